"""Checks of tasks, data modules and callbacks before a run starts."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Module

from drivetrain.accelerator.prepared import unwrap_optimizer
from drivetrain.accelerator.run_state import check_storable
from drivetrain.callbacks.base import Callback, Stage
from drivetrain.runtime.durations import Duration
from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.runtime.logging import get_logger
from drivetrain.trainer.data_module import DataModule
from drivetrain.trainer.hooks import is_overridden
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)

_ALIKE = 0.85
"""Similarity to a hook's name, from 0 to 1, from which a method counts as a misspelled hook."""

_HOOKS_OF_LIGHTNING_1 = {
    "training_epoch_end": "on_train_epoch_end(self); collect what it needs in training_step",
    "validation_epoch_end": "on_validation_epoch_end(self); collect what it needs in validation_step",
    "test_epoch_end": "on_test_epoch_end(self); collect what it needs in test_step",
    "training_step_end": "training_step, or on_train_batch_end for what follows it",
    "validation_step_end": "validation_step, or on_validation_batch_end for what follows it",
    "test_step_end": "test_step, or on_test_batch_end for what follows it",
    "on_epoch_start": "on_train_epoch_start, on_validation_epoch_start or on_test_epoch_start",
    "on_epoch_end": "on_train_epoch_end, on_validation_epoch_end or on_test_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "on_init_start": "setup",
    "on_init_end": "setup",
    "on_before_accelerator_backend_setup": "setup",
    "on_configure_sharded_model": "setup",
    "configure_sharded_model": "configure_model",
    "on_keyboard_interrupt": "on_exception",
    "on_train_dataloader": "train_dataloader",
    "on_val_dataloader": "val_dataloader",
    "on_test_dataloader": "test_dataloader",
    "on_predict_dataloader": "predict_dataloader",
    "on_hpc_save": "on_save_checkpoint",
    "on_hpc_load": "on_load_checkpoint",
    "tbptt_split_batch": "training_step, over the parts of the batch with automatic_optimization = False",
    "get_progress_bar_dict": "self.log(..., prog_bar=True)",
}


def check_task(task: Any, train: Any, val: Any, data: Any) -> None:
    """Raise `ConfigurationError` if `Trainer.fit` got no `Task`, or both loaders and a data module."""
    if not isinstance(task, Task):
        raise ConfigurationError(
            f"Trainer.fit takes a Task, got {described(task)}. Subclass drivetrain.Task and pass an instance.",
        )
    if data is not None and not isinstance(data, DataModule):
        raise ConfigurationError(f"datamodule must be a DataModule, got a {type(data).__name__}.")
    if data is not None and (train is not None or val is not None):
        raise ConfigurationError("fit() got both loaders and a datamodule. Pass only one of the two.")


def check_training_step(task: Task, accumulate: int, clip: float | None) -> None:
    """Raise an error if `task` lacks training methods, or if manual optimization meets accumulation or clipping."""
    if not is_overridden(task, Task, "training_step"):
        raise ConfigurationError(
            f"No `training_step()` method defined in {type(task).__name__}. Define training_step(self, batch, "
            "batch_idx) and return the loss.",
        )
    if "optimizer_idx" in inspect.signature(task.training_step).parameters:
        raise ConfigurationError(
            "Remove the `optimizer_idx` argument from `training_step`, which runs once for all optimizers. For one "
            "loss per optimizer, return a dict of losses by optimizer name, or set automatic_optimization = False.",
        )
    if task.configure_optimizers is None:
        raise ConfigurationError(
            f"No `configure_optimizers()` method defined in {type(task).__name__}. Define it and return an optimizer.",
        )
    if not task.automatic_optimization and type(task).optimizer_step is not Task.optimizer_step:
        logger.warning_once(
            f"{type(task).__name__} overrides optimizer_step but has automatic_optimization = False, so it is never "
            "called. Step the optimizers in training_step."
        )
    if not task.automatic_optimization and (accumulate > 1 or clip):
        given = f"accumulate_grad_batches={accumulate}" if accumulate > 1 else f"gradient_clip_val={clip}"
        what = "accumulation" if accumulate > 1 else "clipping"
        raise ConfigurationError(
            f"Automatic gradient {what} is not supported for {type(task).__name__}, which has "
            f"automatic_optimization = False. Remove {given} from the Trainer. To accumulate, step the optimizer only "
            "every few batches in training_step. To clip, call self.clip_gradients there.",
        )


def check_evaluation(task: Any, stage: Stage) -> Task:
    """Return the task if it has all methods for a stage, such as `test_step`.

    Otherwise raise `ConfigurationError`.
    """
    if task is None:
        raise ConfigurationError(f"{stage.verb}() needs a model, since fit() was not called before. Pass the task.")
    if not isinstance(task, Task):
        raise ConfigurationError(f"Trainer.{stage.verb} takes a Task, got a {type(task).__name__}.")
    step, name = stage.step_name, type(task).__name__
    if getattr(task, step) is None and stage is Stage.PREDICT:
        raise ConfigurationError(f"`{step}` cannot be None in {name}. Define the method, or remove the attribute.")
    if stage is not Stage.PREDICT and not is_overridden(task, Task, step):
        raise ConfigurationError(f"No `{step}()` method defined in {name}. Define {step}(self, batch, batch_idx).")
    if stage is Stage.PREDICT and task.forward is None:
        raise ConfigurationError(f"`{name}.predict_step` requires `forward` method to run. Define one of the two.")
    return task


def check_hooks(trainer: Trainer, task: Task, data: DataModule | None) -> None:
    """Raise an error for hooks that are no longer supported, and warn about misspelled hooks."""
    owners: list[tuple[Any, type]] = [(task, Task), *((callback, Callback) for callback in trainer.callbacks)]
    if data is not None:
        owners.append((data, DataModule))
    for owner, base in owners:
        for name, defining in _own_methods(type(owner), base).items():
            replacement = _HOOKS_OF_LIGHTNING_1.get(name)
            # An `on_epoch_start` with required parameters is the user's own method: the removed hook took none.
            if replacement is not None and not (base is Task and _takes_more(owner, name)):
                raise ConfigurationError(
                    f"{defining.__name__}.{name} is a hook of Lightning 1.x, which the Trainer never calls. "
                    f"Use {replacement}.",
                )
            if not hasattr(base, name):
                hooks = [
                    hook for hook in dir(base) if not hook.startswith("_") and inspect.isfunction(getattr(base, hook))
                ]
                alike = difflib.get_close_matches(name, hooks, n=1, cutoff=_ALIKE)
                if alike and not is_overridden(owner, base, alike[0]):
                    logger.warning_once(
                        f"{defining.__name__}.{name} is not a hook and never runs. Did you mean {alike[0]!r}?"
                    )


def _takes_more(task: Task, name: str) -> bool:
    parameters = inspect.signature(getattr(task, name)).parameters.values()
    is_needed = any(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)
    return name in ("on_epoch_start", "on_epoch_end") and is_needed


def _own_methods(kind: type, base: type) -> dict[str, type]:
    found: dict[str, type] = {}
    # In the order of the MRO, so that the most derived definition of a method is found first.
    for defining in kind.__mro__:
        if defining is base or defining in base.__mro__:
            continue
        if defining.__module__.startswith(("drivetrain.", "torch.")):
            continue
        for name, member in vars(defining).items():
            if not name.startswith("_") and inspect.isfunction(member):
                found.setdefault(name, defining)
    return found


def warn_of_unused_validation(task: Task, has_loader: bool) -> None:
    name, has_step = type(task).__name__, is_overridden(task, Task, "validation_step")
    if has_loader and not has_step:
        logger.warning(
            f"You passed in a `val_dataloader` but have no `validation_step` in {name}, so nothing is validated."
        )
    elif has_step and not has_loader:
        logger.warning(
            f"You defined a `validation_step` but have no `val_dataloader`, so nothing is validated. Pass "
            f"val_dataloaders to fit(), or define val_dataloader() in {name} or a DataModule."
        )


def warn_of_rare_logging(trainer: Trainer, steps: float) -> None:
    """Warn if training takes too few steps for `log_every_n_steps` to log any."""
    every = trainer.log_every_n_steps
    if isinstance(every, Duration):
        return
    # A resumed run may have logged values before, so it gets no warning.
    if trainer.loggers and 0 < steps < every and not trainer.global_step:
        logger.warning(
            f"The run takes {steps:.0f} optimizer steps, fewer than log_every_n_steps={every}, so the trackers receive "
            f"no values of training steps. To see them, use for example "
            f"Trainer(log_every_n_steps={max(1, int(steps) // 10)})."
        )


def described(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def warn_of_evaluation_mode(task: Task) -> None:
    """Warn once if some of the task's modules are in evaluation mode when `fit` begins."""
    modes = [module.training for module in task.modules()]
    evaluating = modes.count(False)
    if not evaluating:
        return
    logger.warning_once(
        "%d of %d modules of %s are in evaluation mode when training begins, and remain so. Their dropout is off, and "
        "their batch norms do not update their statistics. If that is not intended, call train() on them before fit().",
        evaluating,
        len(modes),
        type(task).__name__,
    )


def check_saved_states(trainer: Trainer) -> None:
    """Raise an error if a callback, scheduler or module has state that cannot be saved.

    Called before training and after the first step, so that the run fails early rather than at its first save. The
    check does not call `on_save_checkpoint`, which may have side effects.
    """
    saving = [each for each in trainer.callbacks if each.saves_checkpoints]
    if trainer.checkpoint_format.keeps_objects or all(getattr(each, "save_weights_only", False) for each in saving):
        return
    prepared = trainer.accelerator.prepared
    own = [owner for owner in (*trainer.callbacks, trainer.datamodule, *prepared.registered) if owner is not None]
    named = [(type(owner).__name__, owner) for owner in own]
    states = []
    for name, owner in (*named, *((type(each.scheduler).__name__, each) for each in prepared.schedulers)):
        with suppress(Exception):  # some have no state before their first hook
            states.append((f"{name}.state_dict()", owner.state_dict()))
    for name, state in states:
        check_storable(state, name)
    for module in trainer.task.modules() if trainer.task is not None else ():
        if getattr(module.get_extra_state, "__func__", None) is not Module.get_extra_state:
            check_storable(module.get_extra_state(), f"{type(module).__name__}.get_extra_state()")


def check_optimizer_states(trainer: Trainer) -> None:
    """Raise an error early if an optimizer's state is of a type that cannot be saved.

    Called after the first step, when the state exists, rather than at the first save.
    """
    for optimizer in trainer.optimizers if trainer.checkpoint_callbacks else ():
        bare = unwrap_optimizer(optimizer)
        states = bare.state.values() if isinstance(bare.state, Mapping) else ()  # Megatron's state is not a mapping
        for value in (each for state in states if isinstance(state, Mapping) for each in state.values()):
            # A DTensor is a tensor subclass too, but checkpoints can store it as a shard.
            is_shard = hasattr(value, "to_local")
            if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__") and not is_shard:
                raise CheckpointError(
                    f"{type(bare).__name__} keeps its state in {type(value).__name__}, a tensor type that checkpoints "
                    "cannot store yet, so the run could not be resumed. Use another optimizer, or train without "
                    "checkpoints: Trainer(enable_checkpointing=False)."
                )
