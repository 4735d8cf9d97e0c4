"""Hooks that run before and after a module's forward."""

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

# Other packages look for a module's hook under this name.
_HOOK, _HANDLES = "_hf_hook", "_hf_hook_handles"
_calls = threading.local()
_untraced: dict[Callable[..., Any], Callable[..., Any]] = {}


class ModelHook:
    """Base class for hooks that run before and after the forward of a module.

    Override the methods that the hook needs. Only overridden methods are registered with the module, so the others cost
    nothing.

    Attributes:
        no_grad: Run the forward without recording gradients. The hook's own methods run outside of `torch.no_grad()`.
        stays: Keep this hook when `add_hook_to_module` replaces a module's hooks. For hooks that belong to the whole
            model.

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
    # Assigning one of these attributes can change which PyTorch hooks must be registered.
    _decisive: tuple[str, ...] = ("no_grad", "pre_forward", "post_forward", "on_error")

    def init_hook(self, module: ModuleT) -> ModuleT:
        """Prepare or replace a module when this hook is added to it. Subclasses may override this method.

        Args:
            module: The module.

        Returns:
            The module to use.
        """
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Receive the arguments of a module's forward before it runs, and return the arguments to use instead.

        Args:
            module: The module.
            *args: The positional arguments of the call.
            **kwargs: The keyword arguments of the call.

        Returns:
            The positional and the keyword arguments to use.
        """
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Process the output of a module's forward, and return the output that the module's caller receives.

        Args:
            module: The module.
            output: The output of the forward.

        Returns:
            The output to return to the caller.
        """
        return output

    def on_error(self, module: nn.Module) -> None:
        """Clean up after a module's forward has raised an exception, in which case `post_forward` is not called.

        Args:
            module: The module.
        """

    def detach_hook(self, module: ModuleT) -> ModuleT:
        """Undo the changes that `init_hook` has made to a module, when this hook is removed from the module.

        Args:
            module: The module.

        Returns:
            The module to use.
        """
        return module

    def needs(self) -> tuple[bool | Registered, bool, bool]:
        # Whether the hook acts before a forward, after it, and after an exception. The first value may also be a
        # function that is registered with the module instead of `pre_forward`.
        before = overrides(self, "pre_forward")
        return before, overrides(self, "post_forward"), self.no_grad or overrides(self, "on_error")

    def attached_to(self, module: nn.Module, attached: bool) -> None:
        # Later changes of the hook reach the modules that have it.
        links: list[_Link] = vars(self).setdefault("_links", [])
        # This also drops links to modules that no longer exist.
        links[:] = [link for link in links if link.module not in (None, module)]
        if attached:
            links.append(_Link(module))

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in self._decisive:
            for link in vars(self).get("_links", ()):
                module = link.module
                if module is not None:
                    _register(module, vars(module)[_HOOK])


def overrides(hook: ModelHook, method: str) -> bool:
    return method in vars(hook) or getattr(type(hook), method) is not getattr(ModelHook, method)


class _Link:
    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = None if module is None else weakref.ref(module)

    @property
    def module(self) -> nn.Module | None:
        return None if self._module is None else self._module()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Link:
        # The copy refers to the copied module.
        return _Link(memo.get(id(self.module)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Link, (self.module,)


class SequentialHook(ModelHook):
    """Hook that runs several hooks in order, passing the result of each hook to the next.

    Args:
        *hooks: The hooks. All events run them in this order.
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    @property
    def no_grad(self) -> bool:
        """True if any hook in the sequence makes the module's forward run without gradients."""
        return any(hook.no_grad for hook in self.hooks)

    @no_grad.setter
    def no_grad(self, value: bool) -> None:
        for hook in self.hooks:
            hook.no_grad = value

    def init_hook(self, module: ModuleT) -> ModuleT:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def on_error(self, module: nn.Module) -> None:
        for hook in self.hooks:
            hook.on_error(module)

    def detach_hook(self, module: ModuleT) -> ModuleT:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module

    def needs(self) -> tuple[bool | Registered, bool, bool]:
        needed = [hook.needs() for hook in self.hooks]
        return any(bool(each[0]) for each in needed), any(each[1] for each in needed), any(each[2] for each in needed)

    def attached_to(self, module: nn.Module, attached: bool) -> None:
        for hook in self.hooks:
            hook.attached_to(module, attached)


def hook_of(module: nn.Module) -> ModelHook | None:
    found: ModelHook | None = vars(module).get(_HOOK)
    return found


def add_hook_to_module(module: ModuleT, hook: ModelHook, append: bool = False) -> ModuleT:
    """Add a hook to a module, in place of or after an existing one.

    With `append`, an existing hook stays and runs first. The module's `forward` method does not change. The hook uses
    `register_forward_pre_hook` and `register_forward_hook`, and runs closer to the forward than the module's other
    hooks. It is available as `module._hf_hook`.

    Args:
        module: The module.
        hook: The hook.
        append: Run the hook after the present one. Both are then combined in a `SequentialHook`.

    Returns:
        The module.
    """
    present = hook_of(module)
    # Hooks with `stays` survive the replacement of the others.
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
    if isinstance(hook, SequentialHook):
        return [part for each in hook.hooks for part in _parts(each)]
    return [] if hook is None else [hook]


def remove_hook_from_module(module: ModuleT, recurse: bool = False) -> ModuleT:
    """Remove the hook from a module.

    Offloaded weights return to their original devices.

    Args:
        module: The module.
        recurse: Also remove the hooks of all submodules.

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
    """Remove the hooks of a module and of all its submodules.

    Args:
        module: The module.
    """
    remove_hook_from_module(module, recurse=True)


def _register(module: nn.Module, hook: ModelHook) -> None:
    for handle in vars(module).pop(_HANDLES, ()):
        handle.remove()
    before, after, guarded = hook.needs()
    handles: list[RemovableHandle] = []
    if before or guarded:
        # Only hooks that need it pay for restoring state after errors.
        first: Registered = _enter if guarded else before if callable(before) else _before
        handles.append(module.register_forward_pre_hook(first, with_kwargs=True))
    if after or guarded:
        # Prepended, so that all other forward hooks receive the output that this hook returns.
        handles.append(module.register_forward_hook(_leave if guarded else _after, prepend=True, always_call=guarded))
    vars(module)[_HANDLES] = handles


# Module-level functions that find the hook through the module, so that copied and unpickled modules use their own hook.


def _before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module.__dict__[_HOOK].pre_forward(module, *args, **kwargs)


def _after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return module.__dict__[_HOOK].post_forward(module, output)


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _untraced_function(_run_pre_forward)(module, args, kwargs)


def _leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return _untraced_function(_run_post_forward)(module, args, output)


def _untraced_function(function: Callable[..., Any]) -> Callable[..., Any]:
    # `torch.compile` must not trace functions that move weights.
    if "torch._dynamo" not in sys.modules:  # importing it takes a second
        return function
    if function not in _untraced:
        disable: Any = torch.compiler.disable
        _untraced[function] = disable(function)
    return _untraced[function]


def _run_pre_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    hook: Any = module._hf_hook
    open_calls: list[tuple[int, bool, BaseException | None]] = vars(_calls).setdefault("open", [])
    open_calls.append((id(module), torch.is_grad_enabled(), sys.exc_info()[1]))
    changed = hook.pre_forward(module, *args, **kwargs)
    if hook.no_grad:
        torch.set_grad_enabled(False)
    return changed


def _run_post_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    open_calls = vars(_calls).get("open", [])
    if not any(call[0] == id(module) for call in open_calls):
        return None  # an error was raised before `_run_pre_forward` ran
    # Entries of inner calls remain if their forward hooks did not run.
    while open_calls:
        called, recorded, handled = open_calls.pop()
        if called == id(module):
            break
    hook: Any = module._hf_hook
    if hook.no_grad:
        torch.set_grad_enabled(recorded)
    # With always_call, the forward hook also runs while an exception of the forward is being handled.
    if sys.exc_info()[1] is not handled:
        hook.on_error(module)
        return None
    return hook.post_forward(module, output)


# Guard against moving and casting


class StreamedModelError(ConfigurationError, RuntimeError):
    """Error for operations that a model with offloaded weights does not support.

    An example is `model.to()`.
    """


class MoveGuard:
    """Guard against moving or casting modules while their weights are offloaded."""

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
        for dtype, device in self._kinds:
            probe = torch.empty(0, dtype=dtype, device=device)
            # Functions that change neither dtype nor device, such as `share_memory_`, return the tensor itself.
            if function(probe) is not probe:
                where = ", ".join(sorted({str(device) for _, device in self._kinds}))
                raise StreamedModelError(
                    f"{type(module).__name__} is offloaded or on several devices ({where}), so it cannot be moved or "
                    "cast, for example with `to` or `half`. Load it with another device_map or dtype, or call "
                    "remove_hook_from_submodules(model) first."
                )
        plain: Any = type(module)._apply if self._pass_on is None else self._pass_on
        return plain(module, function, recurse)  # type: ignore[no-any-return]

    def remove(self) -> None:
        for module in self._modules:
            module.__dict__.pop("_apply", None)
        self._modules = []
