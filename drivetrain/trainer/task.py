"""`Task`: a model together with its training, validation, test and prediction steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.accelerator.prepared import parameters_of
from drivetrain.runtime.collectives import gather
from drivetrain.runtime.errors import ConfigurationError, known_keywords
from drivetrain.runtime.pytrees import recursively_apply
from drivetrain.runtime.state import PartialState
from drivetrain.runtime.terminal import print_all
from drivetrain.runtime.timing import LOGGING
from drivetrain.trainer.data_module import DataHooks
from drivetrain.trainer.export import TaskFiles
from drivetrain.trainer.profilers.base import TaskProfiler

if TYPE_CHECKING:
    from typing_extensions import Self

    from drivetrain.trainer.trainer import Trainer


# The hooks of a task around the loop, each a documented no-op


class TaskHooks(nn.Module):
    """Hooks that a task may override to run code at fixed points of a run, in the order in which they are called."""

    def on_fit_start(self) -> None:
        """Run code when `fit` begins, after the optimizers have been created."""

    def on_fit_end(self) -> None:
        """Run code when `fit` ends."""

    def on_train_start(self) -> None:
        """Run code before the first training epoch."""

    def on_train_end(self) -> None:
        """Run code after the last training epoch."""

    def on_train_epoch_start(self) -> None:
        """Run code before the first batch of a training epoch."""

    def on_train_epoch_end(self) -> None:
        """Run code after the last batch of a training epoch and its validation."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Run code before a training batch. Return -1 to skip the rest of the epoch."""
        return None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Run code after a training batch. For the last batch of an optimizer step, it runs after the step."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Run code before gradients are cleared."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Run code before a backward pass."""

    def on_after_backward(self) -> None:
        """Run code after a backward pass, before gradients are clipped."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Run code before gradients are clipped and the optimizer steps. Gradients are unscaled."""

    def on_validation_model_zero_grad(self) -> None:
        """Free gradients before a validation in `fit`, except those of a task with manual optimization."""
        if self.automatic_optimization:
            self.zero_grad()

    def on_validation_model_eval(self) -> None:
        """Switch the model to evaluation mode for validation."""
        self.eval()

    def on_validation_model_train(self) -> None:
        """Restore the training mode after validation. The default restores the mode of each module."""

    def on_validation_start(self) -> None:
        """Run code before a validation."""

    def on_validation_end(self) -> None:
        """Run code after a validation."""

    def on_validation_epoch_start(self) -> None:
        """Run code before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """Run code after the last validation batch."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run code before a validation batch."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run code after a validation batch."""

    def on_test_model_eval(self) -> None:
        """Switch the model to evaluation mode for testing."""
        self.eval()

    def on_test_model_train(self) -> None:
        """Restore the training mode after testing. The default restores the mode of each module."""

    def on_test_start(self) -> None:
        """Run code before testing."""

    def on_test_end(self) -> None:
        """Run code after testing."""

    def on_test_epoch_start(self) -> None:
        """Run code before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """Run code after the last test batch."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run code before a test batch."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run code after a test batch."""

    def on_predict_model_eval(self) -> None:
        """Switch the model to evaluation mode for prediction."""
        self.eval()

    def on_predict_model_train(self) -> None:
        """Restore the training mode after prediction. The default restores the mode of each module."""

    def on_predict_start(self) -> None:
        """Run code before prediction."""

    def on_predict_end(self) -> None:
        """Run code after prediction."""

    def on_predict_epoch_start(self) -> None:
        """Run code before the first prediction batch."""

    def on_predict_epoch_end(self) -> None:
        """Run code after the last prediction batch."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run code before a prediction batch."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run code after a prediction batch."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add entries to a checkpoint dict before it is written."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read entries that `on_save_checkpoint` added, before the run's state is restored."""

    def on_exception(self, exception: BaseException) -> None:
        """Run code when an exception ends the run, before it is raised again."""


_NO_TRAINER = (
    "You are trying to `self.log()` but the `self.trainer` reference is not registered on the model yet. This is most "
    "likely because the task has not been passed to the Trainer: nothing is logged."
)


class Task(TaskFiles, DataHooks, TaskHooks):
    """Model with its training, validation, test and prediction steps and its optimizers.

    Subclass it, override `training_step` and `configure_optimizers`, and pass an instance to `Trainer.fit`.

    Attributes:
        automatic_optimization: True if the Trainer runs the backward pass and steps the optimizers. If False,
            `training_step` does so with `manual_backward` and `optimizers()`.

    Example:
        ```python
        import torch
        from drivetrain import Task, Trainer

        class Line(Task):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(1, 1)

            def training_step(self, batch, batch_idx):
                x, y = batch
                loss = (self.layer(x) - y).square().mean()
                self.log("loss", loss)
                return loss

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        x = torch.linspace(0, 1, 32).unsqueeze(1)
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 2 * x), batch_size=8)
        Trainer(max_epochs=1, logger=False, enable_checkpointing=False).fit(Line(), data)
        ```
    """

    automatic_optimization: bool = True
    """Whether the trainer runs backward and steps the optimizers; see the class."""

    profiler = TaskProfiler()
    """The profiler of the Trainer that runs this task, or one that the task sets itself."""

    def __init__(self) -> None:
        super().__init__()
        self._trainer: Trainer | None = None
        # By identity: torchmetrics objects hash by their state. Holding them keeps each id from being used again.
        self._metric_paths: dict[int, tuple[nn.Module, str]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trainer": None, "_metric_paths": {}}

    # the steps

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | Mapping[str, Any] | None:
        """Compute the training loss of one batch.

        Args:
            batch: A batch of the loader, on the device.
            batch_idx: The index of the batch in the epoch.

        Returns:
            The mean loss as a scalar tensor, a dict with the loss under `"loss"`, or None to skip the batch.
        """
        raise ConfigurationError(f"{type(self).__name__} has no training_step; override it to train.")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate one validation batch. It may have a parameter `dataloader_idx`, the index of the loader."""

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate one test batch. It may have a parameter `dataloader_idx`, the index of the loader."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Compute predictions for one batch. The default calls the task's `forward`.

        It may have a parameter `dataloader_idx`, the index of the loader.
        """
        return self(batch)

    def configure_optimizers(self) -> Any:
        """Create the optimizers and learning-rate schedulers.

        Returns:
            One of: an optimizer; a list of optimizers that all step on the same loss; a list of optimizers and a list
                of schedulers; a dict with `"optimizer"` and `"lr_scheduler"` (a scheduler, or a dict with
                `"scheduler"`, `"interval"`, `"frequency"`, `"monitor"`); a list of such dicts; None to train without an
                optimizer or with manual optimization.
        """
        raise ConfigurationError(
            f"{type(self).__name__} has no configure_optimizers; override it, such as with "
            "`return torch.optim.AdamW(self.parameters(), lr=1e-3)`.",
        )

    # logging

    @known_keywords
    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Tensor], Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool | None = None,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a value to the progress bar, trackers and callbacks. It stays on its device until it is needed.

        Args:
            name: The name of the value. Each name must be used with the same options everywhere.
            value: A scalar tensor, a number, or a torchmetrics metric, which is computed and reset each epoch.
            prog_bar: True to show the value in the progress bar.
            logger: True or None to send the value to the trackers.
            on_step: True to log the value of each step. Default in training steps. In validation and test steps, the
                main process's value is written for each batch.
            on_epoch: True to log the value reduced over the epoch. Default in validation, testing and epoch-end hooks.
                A mean weights each value by its batch's number of real rows over all processes. With `on_step` too,
                `_step` and `_epoch` are appended to the names.
            reduce_fx: `"mean"`, `"sum"`, `"max"`, `"min"`, or a function of the stacked values.
            enable_graph: Accepted without effect. Values are always detached.
            sync_dist: True to reduce over processes. Default for epoch values, not for step values. Step values are
                reduced only when they are written.
            sync_dist_group: Accepted without effect. All processes take part.
            add_dataloader_idx: True to append the loader's index to the name if there are several loaders.
            batch_size: The weight of the value in a mean, if the batch size cannot be determined.
            metric_attribute: The name of the task's attribute that holds the metric, if it cannot be found.
            rank_zero_only: True to use only the main process's values.

        Raises:
            ConfigurationError: The value is not a scalar, the name was logged with other options, or there is no
                current step or epoch.
        """
        trainer = self._trainer
        if trainer is None:
            warnings.warn(_NO_TRAINER, stacklevel=3)
            return
        if metric_attribute is None and isinstance(value, nn.Module):
            metric_attribute = self._path_of(value)
        timing = trainer.accelerator.optimizer_step.timing
        outer = timing.enter(LOGGING) if timing.on else None
        trainer.logged.log(
            name,
            value,
            (
                prog_bar,
                logger,
                on_step,
                on_epoch,
                reduce_fx,
                sync_dist,
                add_dataloader_idx,
                metric_attribute,
                rank_zero_only,
            ),
            batch_size,
        )
        if outer is not None:
            timing.enter(outer)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log several values with the same options. Accepts a dict or a torchmetrics `MetricCollection`."""
        # The metrics of a collection may share their states; without this, each call would copy them.
        options: dict[str, Any] = {}
        if isinstance(dictionary, nn.Module):
            options["copy_state"] = not getattr(dictionary, "_enable_compute_groups", True)
        for name, value in dictionary.items(**options):
            self.log(name, value, *args, **kwargs)

    def _path_of(self, module: nn.Module) -> str:
        known = self._metric_paths.get(id(module))
        if known is not None:
            return known[1]
        for name, found in self.named_modules():
            if found is module:
                self._metric_paths[id(module)] = (module, name)
                return str(name)
        raise ConfigurationError(
            f"The {type(module).__name__} given to log() is not part of the task. Keep it as an attribute "
            "(self.accuracy = ...), so that it is moved to the device and reset with it.",
        )

    # where am I

    @property
    def trainer(self) -> Trainer:
        """The Trainer that runs this task.

        Raises:
            RuntimeError: The task is not attached to a Trainer.
        """
        if self._trainer is None:
            raise RuntimeError(f"{type(self).__name__} is not attached to a `Trainer`.")
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        for module in self.modules():  # tasks in this one log through the same trainer
            if isinstance(module, Task):
                module._trainer = trainer

    @property
    def device(self) -> torch.device:
        """The device of the task's parameters."""
        if self._trainer is not None:
            return self._trainer.strategy.topology.device
        return next((parameter.device for parameter in self.parameters()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the task's parameters."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def current_epoch(self) -> int:
        """The number of finished epochs, which is the index of the current one."""
        return 0 if self._trainer is None else self._trainer.current_epoch

    @property
    def global_step(self) -> int:
        """The number of optimizer steps taken."""
        return 0 if self._trainer is None else self._trainer.global_step

    @property
    def global_rank(self) -> int:
        """The global rank of this process."""
        return 0 if self._trainer is None else self._trainer.global_rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its machine."""
        return 0 if self._trainer is None else self._trainer.local_rank

    @property
    def logger(self) -> Any:
        """The first experiment tracker, or None."""
        return None if self._trainer is None else self._trainer.logger

    @property
    def loggers(self) -> list[Any]:
        """All experiment trackers."""
        return [] if self._trainer is None else self._trainer.loggers

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only, without breaking the progress bar. Takes the arguments of the built-in `print`."""
        if self._trainer is None:
            print_all(*args, **kwargs)
        else:
            self._trainer.print(*args, **kwargs)

    @known_keywords
    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather tensors of all processes, stacked along a new first dimension. On one process, return them unchanged.

        Args:
            data: A nested structure of tensors with equal shapes on all processes.
            group: Accepted without effect. All processes take part.
            sync_grads: Not supported. Use `torch.distributed.nn` for collectives with gradients.
        """
        if sync_grads:
            raise ConfigurationError("all_gather(sync_grads=True) is not supported; use torch.distributed.nn.")
        if PartialState().num_processes == 1:
            return data
        return recursively_apply(lambda tensor: gather(tensor.unsqueeze(0)), data)

    # training by hand

    @known_keywords
    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or the list of optimizers if there are several.

        Args:
            use_pl_optimizer: False to return the original optimizers, whose steps bypass the precision.
        """
        chosen = [o if use_pl_optimizer else o.optimizer for o in self.trainer.task_optimizers]
        return chosen[0] if len(chosen) == 1 else chosen

    def lr_schedulers(self) -> Any:
        """Return the learning-rate scheduler, the list of schedulers if there are several, or None."""
        found = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return None if not found else found[0] if len(found) == 1 else found

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of a loss in a `training_step` with manual optimization."""
        if self.automatic_optimization:
            raise ConfigurationError(
                "manual_backward() is for tasks with automatic_optimization = False; this one returns its loss.",
            )
        named = dict(zip(("gradient", "retain_graph", "create_graph"), args, strict=False))
        self.trainer.accelerator.backward(loss, **named, **kwargs)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Compute gradients only for this optimizer's parameters, until `untoggle_optimizer` is called."""
        context: AbstractContextManager[None] = optimizer.toggle_model()
        context.__enter__()
        self.__dict__["_toggled"] = context

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Compute gradients for all parameters again, after `toggle_optimizer`."""
        context = self.__dict__.pop("_toggled", None)
        if context is not None:
            context.__exit__(None, None, None)

    @known_keywords
    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of an optimizer, by norm (default) or by value. A limit of 0 or None disables clipping."""
        if not gradient_clip_val:
            return
        engine, parameters = self.trainer.accelerator, parameters_of(optimizer)
        if gradient_clip_algorithm == "value":
            engine.clip_grad_value_(parameters, gradient_clip_val)
        else:
            engine.clip_grad_norm_(parameters, gradient_clip_val)

    # what the trainer does in each step; override to do it otherwise

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of a loss that is already weighted and scaled. May be overridden."""
        self.trainer.strategy.backward(loss, *args, **kwargs)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Run the step of one optimizer. Override it to customize the step.

        Args:
            epoch: The index of the current epoch.
            batch_idx: The index of the last batch of the step.
            optimizer: The optimizer.
            optimizer_closure: A function that runs forward and backward. Call it, or pass it to `optimizer.step`.
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clear the gradients of an optimizer before the first backward of a step."""
        optimizer.zero_grad()

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients according to the Trainer's arguments. Override it to clip in another way."""
        self.clip_gradients(
            optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
        )

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step a learning-rate scheduler.

        Args:
            scheduler: The scheduler.
            metric: The monitored value, for `ReduceLROnPlateau`, else None.
        """
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def configure_model(self) -> None:
        """Create large modules here instead of in the constructor, so that the strategy can create them sharded."""

    def configure_callbacks(self) -> Any:
        """Return callbacks of the task. They replace the Trainer's callbacks of the same class or of a base class."""
        return []

    # parameters

    def freeze(self) -> Self:
        """Set `requires_grad=False` on all parameters, and switch to evaluation mode. Returns the task."""
        self.requires_grad_(False)
        return self.eval()

    def unfreeze(self) -> Self:
        """Set `requires_grad=True` on all parameters, and switch to training mode. Returns the task."""
        self.requires_grad_(True)
        return self.train()


# torch.jit.script compiles every property of a module that is not named here.
Task.__jit_unused_properties__ = [name for name in dir(Task) if isinstance(getattr(Task, name), property)]
