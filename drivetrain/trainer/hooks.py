"""Lookup of overridden hooks, done once per run, so that hooks that are not overridden cost nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.base import Callback
from drivetrain.runtime.logging import get_logger
from drivetrain.trainer.data_module import DataModule
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)

Hook = Callable[..., Any]


def is_overridden(owner: Any, base: type, name: str) -> bool:
    """Return True if an object or its class replaces a method of `base`.

    An attribute set to None does not count.
    """
    if name in getattr(owner, "__dict__", {}):
        # Assigned to the instance: another method, or None to disable the hook.
        return owner.__dict__[name] is not None
    own = getattr(type(owner), name, None)
    return own is not None and own is not getattr(base, name, None)


def is_redefined(owner: Any, base: type, name: str) -> bool:
    """Check whether `owner` overrides the method `name` of `base`. A decorated base method is no override."""
    if not is_overridden(owner, base, name):
        return False
    # A bound method has the function that is compared in `__func__`.
    inner = inspect.unwrap(getattr(owner, name))
    return getattr(inner, "__func__", inner) is not getattr(base, name, None)


class Hooks:
    def __init__(self, trainer: Trainer, task: Task, callbacks: Sequence[Callback] | None = None) -> None:
        self._trainer = trainer
        self._task = task
        self._callbacks = callbacks
        self._found: dict[str, tuple[Hook, ...]] = {}
        self._of_batches: dict[tuple[str, int | None], tuple[Hook, ...]] = {}

    def find(self, name: str) -> tuple[Hook, ...]:
        # Hooks of callbacks come first, with the Trainer and the task bound as first arguments, then the task's.
        found = self._found.get(name)
        if found is None:
            found = self._found[name] = self._collect(name)
        return found

    def find_of_batch(self, name: str, dataloader_idx: int | None) -> tuple[Hook, ...]:
        # Hooks that require the loader's index receive it, and with several loaders those that accept it, too.
        key = name, dataloader_idx
        if key not in self._of_batches:
            # End hooks receive outputs, batch and batch index, start hooks only batch and index.
            count = 3 if name.endswith("_end") else 2
            self._of_batches[key] = tuple(_of_loader(hook, count, dataloader_idx) for hook in self.find(name))
        return self._of_batches[key]

    def call(self, name: str, *args: Any) -> None:
        """Call all overrides of a hook: first those of the callbacks, then the task's."""
        for hook in self.find(name):
            hook(*args)

    def find_running_first(self, name: str) -> tuple[Hook, ...]:
        return (*self._of_callbacks(name, late=False), *self._of_owner(name))

    def find_running_last(self, name: str) -> tuple[Hook, ...]:
        # Callbacks such as `ModelCheckpoint` set `runs_last_at_epoch_end`, since they read values that others log.
        return self._of_callbacks(name, late=True)

    def _collect(self, name: str) -> tuple[Hook, ...]:
        # The step does extra work for this hook, so a method that is merely decorated does not count.
        is_asked = is_redefined if name == "on_gradients_ready" else is_overridden
        callbacks = [c for c in self._chosen() if is_asked(c, Callback, name)]
        return (*(self._bind(callback, name) for callback in callbacks), *self._of_owner(name))

    def _chosen(self) -> Sequence[Callback]:
        return self._trainer.callbacks if self._callbacks is None else self._callbacks

    def _of_callbacks(self, name: str, late: bool) -> tuple[Hook, ...]:
        return tuple(
            self._bind(callback, name)
            for callback in self._chosen()
            if is_overridden(callback, Callback, name) and callback.runs_last_at_epoch_end is late
        )

    def _of_owner(self, name: str) -> tuple[Hook, ...]:
        # Some hooks exist only on callbacks.
        if hasattr(Task, name) and is_overridden(self._task, Task, name):
            actions = self._trainer.actions
            return (actions.watch(actions.of_owner(self._task, name), getattr(self._task, name)),)
        return ()

    def _bind(self, callback: Callback, name: str) -> Hook:
        bound = partial(getattr(callback, name), self._trainer, self._task)
        actions = self._trainer.actions
        return actions.watch(actions.of_callback(callback, name), bound)


def _of_loader(hook: Hook, count: int, dataloader_idx: int | None) -> Hook:
    if dataloader_idx is None:
        # A single loader: the index 0 is passed only to hooks that require it.
        return hook if _takes(hook, count) else lambda *given: hook(*given, 0)
    # Several loaders: the index is passed to every hook that can take it.
    return (lambda *given: hook(*given, dataloader_idx)) if _takes(hook, count + 1) else hook


def _takes(hook: Hook, count: int) -> bool:
    try:
        inspect.signature(hook).bind(*(None,) * count)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        pass
    return True


def set_log_methods(callback: Callback, task: Task | None) -> None:
    """Give a callback the `log` and `log_dict` methods of `task`, or remove both methods if `task` is None."""
    for name in ("log", "log_dict"):
        if task is None:
            callback.__dict__.pop(name, None)
        elif not hasattr(type(callback), name):
            # On the instance, so that the class stays as it is and the attribute can be removed.
            callback.__dict__[name] = getattr(task, name)


def call_setup_hooks(trainer: Trainer, task: Task, data: DataModule | None, stage: str) -> None:
    """Call `setup` of the data module, the callbacks and the task, in this order."""
    for hook in _bound(trainer, task, data, "setup", stage):
        hook()


def call_teardown_hooks(trainer: Trainer, task: Task, data: DataModule | None, stage: str) -> None:
    """Call `teardown` of the data module, the callbacks and the task, in this order.

    All are called even if one raises. All errors are logged, and the first one is raised at the end.
    """
    errors = call_all("teardown", _bound(trainer, task, data, "teardown", stage))
    if errors:
        raise errors[0]


def call_all(name: str, hooks: Iterable[Hook]) -> list[BaseException]:
    """Call all hooks even if some raise an error. Log each error with the hook's name, and return the errors."""
    errors: list[BaseException] = []
    for hook in hooks:
        try:
            hook()
        # KeyboardInterrupt too: the other hooks must still release what they hold.
        except BaseException as error:
            logger.error(f"{name} raised {type(error).__name__}: {error}", exc_info=error)
            errors.append(error)
    return errors


def _bound(trainer: Trainer, task: Task, data: DataModule | None, name: str, stage: str) -> list[Hook]:
    actions = trainer.actions
    hooks: list[Hook] = []
    if data is not None:
        hooks.append(_bind_stage(actions.watch(actions.of_owner(data, name), getattr(data, name)), stage))
    for callback in trainer.callbacks:
        watched = actions.watch(actions.of_callback(callback, name), getattr(callback, name))
        hooks.append(_bind_stage(partial(watched, trainer, task), stage))
    hooks.append(_bind_stage(actions.watch(actions.of_owner(task, name), getattr(task, name)), stage))
    return hooks


def _bind_stage(hook: Hook, stage: str) -> Hook:
    try:
        # Users may call the parameter something else, such as `_`.
        inspect.signature(hook).bind(stage=stage)
    except (TypeError, ValueError):
        return partial(hook, stage)
    return partial(hook, stage=stage)
