"""Hooks that run before and after the forward of a module, and can be added and removed."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from drivetrain.runtime.errors import ConfigurationError

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Registered = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]

_HOOK, _HANDLES = "_hf_hook", "_hf_hook_handles"
_calls = threading.local()
_untraced: dict[Callable[..., Any], Callable[..., Any]] = {}


class ModelHook:
    """What runs around the forward of a module: subclass it and override what is needed.

    A method that is not overridden costs nothing: only those that are get registered with the module.

    Attributes:
        no_grad: Whether the forward runs without recording gradients. The methods of the hook run outside of that.
        stays: Whether it stays beside a hook that would replace it, and goes only when it is removed: for what belongs
            to a whole model, and not to one module of it.

    Example:
        ```python
        import torch
        from torch import nn

        from drivetrain import ModelHook, add_hook_to_module

        class Doubled(ModelHook):
            def post_forward(self, module, output):
                return output * 2

        layer = nn.Linear(4, 4)
        before = layer(torch.ones(4))
        add_hook_to_module(layer, Doubled())
        assert torch.equal(layer(torch.ones(4)), before * 2)
        ```
    """

    no_grad: bool = False
    stays: bool = False
    # What decides which of a module's hooks are registered, and may be assigned at any time.
    _decisive: tuple[str, ...] = ("no_grad", "pre_forward", "post_forward", "on_error")

    def init_hook(self, module: ModuleT) -> ModuleT:
        """Called when the hook is added to a module.

        Args:
            module: The module.

        Returns:
            The module to use.
        """
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before the forward.

        Args:
            module: The module.
            *args: The positional arguments of the forward.
            **kwargs: Its keyword arguments.

        Returns:
            The positional and the keyword arguments to use.
        """
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after a forward that ended well.

        Args:
            module: The module.
            output: What the forward returned.

        Returns:
            What the module returns.
        """
        return output

    def on_error(self, module: nn.Module) -> None:
        """Called in the place of `post_forward` after a forward that raised.

        Args:
            module: The module.
        """

    def detach_hook(self, module: ModuleT) -> ModuleT:
        """Called when the hook is removed from a module.

        Args:
            module: The module.

        Returns:
            The module to use.
        """
        return module

    def needs(self) -> tuple[bool | Registered, bool, bool]:
        """Whether there is something to do before the forward, after it, and after an error in it.

        For the first there may be a function instead, to be registered with the module in the place of `pre_forward`.
        """
        before = overrides(self, "pre_forward")
        return before, overrides(self, "post_forward"), self.no_grad or overrides(self, "on_error")

    def attached_to(self, module: nn.Module, attached: bool) -> None:
        """Remember that a module has this hook, or that it no longer has.

        Args:
            module: The module.
            attached: Whether it has.
        """
        links: list[_Link] = vars(self).setdefault("_links", [])
        links[:] = [link for link in links if link.module not in (None, module)]
        if attached:
            links.append(_Link(module))

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in self._decisive:
            self._register_again()

    def _register_again(self) -> None:
        for link in vars(self).get("_links", ()):
            module = link.module
            if module is not None:
                _register(module, vars(module)[_HOOK])


def overrides(hook: ModelHook, method: str) -> bool:
    """Whether a hook has its own method of this name."""
    return method in vars(hook) or getattr(type(hook), method) is not getattr(ModelHook, method)


class _Link:
    """The way from a hook to a module that has it, which does not keep the module alive.

    A copy of the module has a copy of the hook, and that leads to the copy.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = None if module is None else weakref.ref(module)

    @property
    def module(self) -> nn.Module | None:
        """The module, as long as something else uses it."""
        return None if self._module is None else self._module()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Link:
        return _Link(memo.get(id(self.module)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Link, (self.module,)


class SequentialHook(ModelHook):
    """Several hooks as one, each of which gets what the one before it returned.

    Args:
        *hooks: The hooks, in this order at each event.
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    @property
    def no_grad(self) -> bool:
        """Whether one of them has the forward run without recording gradients."""
        return any(hook.no_grad for hook in self.hooks)

    @no_grad.setter
    def no_grad(self, value: bool) -> None:
        for hook in self.hooks:
            hook.no_grad = value

    def init_hook(self, module: ModuleT) -> ModuleT:
        """Called when the hook is added to a module."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before the forward."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after a forward that ended well."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def on_error(self, module: nn.Module) -> None:
        """Called in the place of `post_forward` after a forward that raised."""
        for hook in self.hooks:
            hook.on_error(module)

    def detach_hook(self, module: ModuleT) -> ModuleT:
        """Called when the hook is removed from a module."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module

    def needs(self) -> tuple[bool | Registered, bool, bool]:
        """Whether one of the hooks has something to do before the forward, after it, and after an error in it."""
        needed = [hook.needs() for hook in self.hooks]
        return any(bool(each[0]) for each in needed), any(each[1] for each in needed), any(each[2] for each in needed)

    def attached_to(self, module: nn.Module, attached: bool) -> None:
        """Remember that a module has these hooks, or that it no longer has."""
        for hook in self.hooks:
            hook.attached_to(module, attached)


def hook_of(module: nn.Module) -> ModelHook | None:
    """The hook that was added to a module itself, if there is one."""
    found: ModelHook | None = vars(module).get(_HOOK)
    return found


def add_hook_to_module(module: ModuleT, hook: ModelHook, append: bool = False) -> ModuleT:
    """Add a hook to a module, in the place of the one that it has.

    The module's `forward` stays as it is: the hook runs through `register_forward_pre_hook` and
    `register_forward_hook`, next to the forward, so within the module's other hooks. It is readable as
    `module._hf_hook`.

    Args:
        module: The module.
        hook: The hook.
        append: Keep the present hook and run the new one after it, both in one `SequentialHook`.

    Returns:
        The module.
    """
    present = hook_of(module)
    before = [present] if append and present is not None else [each for each in _parts(present) if each.stays]
    if not before:
        module = remove_hook_from_module(module)
    elif not append:
        for each in _parts(present):
            if not each.stays:
                each.attached_to(module, False)
                module = each.detach_hook(module)
    module = hook.init_hook(module)
    if before:
        hook = SequentialHook(*before, hook)
    vars(module)[_HOOK] = hook
    hook.attached_to(module, True)
    _register(module, hook)
    return module


def _parts(hook: ModelHook | None) -> list[ModelHook]:
    """The hooks that one stands for."""
    if isinstance(hook, SequentialHook):
        return [part for each in hook.hooks for part in _parts(each)]
    return [] if hook is None else [hook]


def remove_hook_from_module(module: ModuleT, recurse: bool = False) -> ModuleT:
    """Remove the hook of a module; weights that it keeps elsewhere come back.

    Args:
        module: The module.
        recurse: Whether also from the modules within it.

    Returns:
        The module.
    """
    hook = hook_of(module)
    if hook is not None:
        for handle in vars(module).pop(_HANDLES, ()):
            handle.remove()
        hook.attached_to(module, False)
        del vars(module)[_HOOK]
        module = hook.detach_hook(module)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse=True)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and of all modules within it.

    Args:
        module: The module.
    """
    remove_hook_from_module(module, recurse=True)


def _register(module: nn.Module, hook: ModelHook) -> None:
    """Register with a module what its hook has to do."""
    for handle in vars(module).pop(_HANDLES, ()):
        handle.remove()
    before, after, guarded = hook.needs()
    handles: list[RemovableHandle] = []
    if before or guarded:
        first: Registered = _enter if guarded else before if callable(before) else _before
        handles.append(module.register_forward_pre_hook(first, with_kwargs=True))
    if after or guarded:
        # First of all: the hooks of others get what this one returns.
        handles.append(module.register_forward_hook(_leave if guarded else _after, prepend=True, always_call=guarded))
    vars(module)[_HANDLES] = handles


# What is registered is the same for all modules: it has to be found again when a module is copied or unpickled.


def _before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module.__dict__[_HOOK].pre_forward(module, *args, **kwargs)


def _after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return module.__dict__[_HOOK].post_forward(module, output)


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _outside_graphs(_entered)(module, args, kwargs)


def _leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return _outside_graphs(_left)(module, args, output)


def _outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that `torch.compile` calls as it is: what moves weights is no part of a graph."""
    if "torch._dynamo" not in sys.modules:  # importing it takes a second
        return function
    if function not in _untraced:
        disable: Any = torch.compiler.disable
        _untraced[function] = disable(function)
    return _untraced[function]


def _entered(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run what comes before, and note what `_left` has to restore."""
    hook: Any = module._hf_hook
    open_calls: list[tuple[int, bool, BaseException | None]] = vars(_calls).setdefault("open", [])
    open_calls.append((id(module), torch.is_grad_enabled(), sys.exc_info()[1]))
    changed = hook.pre_forward(module, *args, **kwargs)
    if hook.no_grad:
        torch.set_grad_enabled(False)
    return changed


def _left(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Restore, and run what comes after; called after an error too."""
    open_calls = vars(_calls).get("open", [])
    if not any(call[0] == id(module) for call in open_calls):
        return None  # an error came before `_entered`
    while open_calls:
        called, recorded, handled = open_calls.pop()
        if called == id(module):
            break
    hook: Any = module._hf_hook
    if hook.no_grad:
        torch.set_grad_enabled(recorded)
    if sys.exc_info()[1] is not handled:
        hook.on_error(module)
        return None
    return hook.post_forward(module, output)


# Refuses `to`, `half` and the like of models whose weights are not one thing in one place


class StreamedModelError(ConfigurationError, RuntimeError):
    """Something was asked of a model over devices, memory and disk that only one in one place can do."""


class MoveGuard:
    """Stands before what moves or casts modules, and lets pass what changes nothing."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        kinds: Iterable[tuple[torch.dtype, torch.device]],
        pass_on: Callable[[nn.Module, Callable[[Tensor], Tensor], bool], nn.Module] | None = None,
    ) -> None:
        self._modules, self._kinds, self._pass_on = list(modules), set(kinds), pass_on
        for module in self._modules:
            module.__dict__["_apply"] = partial(self._guarded, module)

    def _guarded(self, module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Called in the place of the module's own method, which `to`, `half` and the like use."""
        for dtype, device in self._kinds:
            probe = torch.empty(0, dtype=dtype, device=device)
            if function(probe) is not probe:
                where = ", ".join(sorted({str(device) for _, device in self._kinds}))
                raise StreamedModelError(
                    f"{type(module).__name__} has weights that come and go, or are on several devices ({where}): `to`, "
                    "`half` and the like cannot move or cast it. Load it with another device_map or dtype, or call "
                    "remove_hook_from_submodules(model) first."
                )
        plain: Any = type(module)._apply if self._pass_on is None else self._pass_on
        return plain(module, function, recurse)  # type: ignore[no-any-return]

    def remove(self) -> None:
        """Let the modules be moved again."""
        for module in self._modules:
            module.__dict__.pop("_apply", None)
        self._modules = []
