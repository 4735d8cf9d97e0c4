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


# Hooks that a task may override. By default, most of them do nothing.


class TaskHooks(nn.Module):
    """Hooks that a task can override, to run its own code at certain points of a run."""

    def on_fit_start(self) -> None:
        """Run code at the start of `fit`, once the model is on its device and the optimizers exist."""

    def on_fit_end(self) -> None:
        """Run code at the end of `fit`, after the training loop."""

    def on_train_start(self) -> None:
        """Run code once, before the first training epoch of `fit`."""

    def on_train_end(self) -> None:
        """Run code once, after the last training epoch of `fit`."""

    def on_train_epoch_start(self) -> None:
        """Run code at the start of each training epoch, before its first batch."""

    def on_train_epoch_end(self) -> None:
        """Run code at the end of each training epoch. If a validation ends the epoch, it runs before this hook."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Run code before each training batch. Return -1 to skip the rest of the epoch.

        Args:
            batch: The batch, on the device.
            batch_idx: The index of the batch in the epoch.
        """
        return None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Run code after each training batch. `outputs` is a dict with the detached loss under `"loss"`.

        With gradient accumulation, the optimizer step has already run when the hook is called for the step's last
        batch.

        Args:
            outputs: The detached output of `training_step` as a dict, or None for a skipped batch.
            batch: The batch, on the device.
            batch_idx: The index of the batch in the epoch.
        """

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Run code each time before the gradients of `optimizer` are cleared."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Run code before each backward pass. `loss` is already weighted and scaled."""

    def on_after_backward(self) -> None:
        """Run code after each backward pass.

        Gradients are not clipped yet, and may be scaled in fp16 training.
        """

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Run code before each step of `optimizer`, for example to log gradient norms.

        Gradients are not clipped yet. They are already unscaled.
        """

    def on_validation_model_zero_grad(self) -> None:
        """Free the gradients before each validation within `fit`, to save memory.

        The default does nothing for a task with manual optimization, whose gradients may still be needed.
        """
        if self.automatic_optimization:
            self.zero_grad()

    def on_validation_model_eval(self) -> None:
        """Switch the task to evaluation mode. The Trainer calls this hook before each validation.

        The default calls `self.eval()`.
        """
        self.eval()

    def on_validation_model_train(self) -> None:
        """Run code after each validation, before the Trainer restores the training mode of each module.

        The default does nothing.
        """

    def on_validation_start(self) -> None:
        """Run code at the start of each validation, before `on_validation_epoch_start`."""

    def on_validation_end(self) -> None:
        """Run code at the end of each validation, after its results are logged."""

    def on_validation_epoch_start(self) -> None:
        """Run code before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """Run code after the last validation batch.

        Values logged in this hook belong to the validation.
        """

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run code before each validation batch. `dataloader_idx` is the index of its loader.

        Args:
            batch: The batch, on the device.
            batch_idx: The index of the batch in its loader.
            dataloader_idx: The index of the loader, if there are several.
        """

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run code after each validation batch. `outputs` is what `validation_step` returned.

        Args:
            outputs: The output of `validation_step`.
            batch: The batch, on the device.
            batch_idx: The index of the batch in its loader.
            dataloader_idx: The index of the loader, if there are several.
        """

    def on_test_model_eval(self) -> None:
        """Switch the task to evaluation mode before testing. The default calls `self.eval()`."""
        self.eval()

    def on_test_model_train(self) -> None:
        """Run code after testing, before every module returns to its previous training mode.

        The default does nothing. The Trainer restores the modes itself.
        """

    def on_test_start(self) -> None:
        """Run code at the start of `test`, before `on_test_epoch_start`."""

    def on_test_end(self) -> None:
        """Run code at the end of `test`, after its results are logged."""

    def on_test_epoch_start(self) -> None:
        """Run code before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """Run code after the last test batch. Values logged in this hook belong to the test."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run code before each test batch. `dataloader_idx` is the index of its loader.

        Args:
            batch: The batch, on the device.
            batch_idx: The index of the batch in its loader.
            dataloader_idx: The index of the loader, if there are several.
        """

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run code after each test batch. `outputs` is what `test_step` returned.

        Args:
            outputs: The output of `test_step`.
            batch: The batch, on the device.
            batch_idx: The index of the batch in its loader.
            dataloader_idx: The index of the loader, if there are several.
        """

    def on_predict_model_eval(self) -> None:
        """Switch the task to evaluation mode before prediction. The default calls `self.eval()`."""
        self.eval()

    def on_predict_model_train(self) -> None:
        """Run code after prediction, before the Trainer gives each module its earlier training mode back.

        The default does nothing.
        """

    def on_predict_start(self) -> None:
        """Run code at the start of `predict`, before `on_predict_epoch_start`."""

    def on_predict_end(self) -> None:
        """Run code at the end of `predict`, after `on_predict_epoch_end`."""

    def on_predict_epoch_start(self) -> None:
        """Run code before the first prediction batch."""

    def on_predict_epoch_end(self) -> None:
        """Run code after the last prediction batch."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run code before each prediction batch. `dataloader_idx` is the index of its loader.

        Args:
            batch: The batch, on the device.
            batch_idx: The index of the batch in its loader.
            dataloader_idx: The index of the loader, if there are several.
        """

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run code after each prediction batch. `outputs` is what `predict_step` returned.

        Args:
            outputs: The output of `predict_step`.
            batch: The batch, on the device.
            batch_idx: The index of the batch in its loader.
            dataloader_idx: The index of the loader, if there are several.
        """

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the task's own entries to the dict `checkpoint` before the checkpoint is written.

        Args:
            checkpoint: The entries of the checkpoint, to be changed in place.
        """

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read or change the entries of a loaded checkpoint, before weights and optimizers are restored.

        Args:
            checkpoint: The entries of the checkpoint. Changes apply to what is restored.
        """

    def on_exception(self, exception: BaseException) -> None:
        """Run code when an exception ends the run. The exception is raised again after the hook."""


_NO_TRAINER = (
    "You are trying to `self.log()` but the `self.trainer` reference is not registered on the model yet. This is most "
    "likely because the task has not been passed to a Trainer. Nothing is logged."
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
    """True if the Trainer runs the backward pass and steps the optimizers. False for manual optimization."""

    profiler = TaskProfiler()
    """The profiler of the Trainer that runs this task, or one that the task sets itself."""

    def __init__(self) -> None:
        super().__init__()
        self._trainer: Trainer | None = None
        # By identity: torchmetrics objects hash by their state. Holding them keeps each id from being used again.
        self._metric_paths: dict[int, tuple[nn.Module, str]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trainer": None, "_metric_paths": {}}

    # Steps

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | Mapping[str, Any] | None:
        """Compute the loss of one training batch.

        Each task must override this method to be trained.

        Args:
            batch: A batch of the loader, on the device.
            batch_idx: The index of the batch in the epoch.

        Returns:
            The mean loss as a scalar tensor, a dict with the loss under `"loss"`, or None to skip the batch.
        """
        raise ConfigurationError(f"{type(self).__name__} has no training_step. Define one to train it.")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Process one validation batch, for example to compute and log the loss.

        The output is passed to `on_validation_batch_end`. An override may have a third parameter `dataloader_idx`, the
        index of the loader.
        """

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate one test batch, for example log its metrics.

        The output is passed to `on_test_batch_end`. An override may have a third parameter `dataloader_idx`, the index
        of the loader.
        """

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the predictions for one batch. The default passes the batch to the task's `forward`.

        An override may have a third parameter `dataloader_idx`, the index of the loader.
        """
        return self(batch)

    def configure_optimizers(self) -> Any:
        """Create and return the optimizers and learning-rate schedulers for training.

        Returns:
            One of: an optimizer; a list of optimizers that all step on the same loss; a list of optimizers and a list
                of schedulers; a dict with `"optimizer"` and `"lr_scheduler"` (a scheduler, or a dict with
                `"scheduler"`, `"interval"`, `"frequency"`, `"monitor"`); a list of such dicts; None to train without an
                optimizer or with manual optimization.
        """
        raise ConfigurationError(
            f"{type(self).__name__} has no configure_optimizers. Define it and return an optimizer, for example "
            "torch.optim.AdamW(self.parameters(), lr=1e-3).",
        )

    # Logging

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
        """Log a value for the experiment trackers, the callbacks and the progress bar.

        The value stays on its device until it is needed.

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
        """Log all values of a dict or a torchmetrics `MetricCollection`, each under its key.

        Further arguments are those of `log`, and apply to each value.
        """
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
            f"The {type(module).__name__} that was passed to log() is not part of the task. Assign it to an attribute "
            "of the task, such as self.accuracy = ..., so that it moves to the task's device.",
        )

    # Position in the run

    @property
    def trainer(self) -> Trainer:
        """The Trainer that runs this task.

        Raises:
            RuntimeError: The task is not attached to a Trainer.
        """
        if self._trainer is None:
            raise RuntimeError(f"{type(self).__name__} is not attached to a `Trainer`. Pass it to Trainer.fit().")
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        for module in self.modules():  # tasks inside this one log through the same Trainer
            if isinstance(module, Task):
                module._trainer = trainer

    @property
    def device(self) -> torch.device:
        """The device on which the task is trained or evaluated."""
        if self._trainer is not None:
            return self._trainer.strategy.topology.device
        return next((parameter.device for parameter in self.parameters()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the task's first floating-point parameter."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def current_epoch(self) -> int:
        """The index of the current training epoch, which equals the number of finished epochs."""
        return 0 if self._trainer is None else self._trainer.current_epoch

    @property
    def global_step(self) -> int:
        """The number of optimizer steps that the run has taken so far."""
        return 0 if self._trainer is None else self._trainer.global_step

    @property
    def global_rank(self) -> int:
        """The rank of this process among all processes of the run."""
        return 0 if self._trainer is None else self._trainer.global_rank

    @property
    def local_rank(self) -> int:
        """The rank of this process among the processes on its machine."""
        return 0 if self._trainer is None else self._trainer.local_rank

    @property
    def logger(self) -> Any:
        """The Trainer's first experiment tracker, or None if there is none."""
        return None if self._trainer is None else self._trainer.logger

    @property
    def loggers(self) -> list[Any]:
        """All experiment trackers of the Trainer, as a list that may be empty."""
        return [] if self._trainer is None else self._trainer.loggers

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print like the built-in `print`, but only on rank 0 and without breaking the progress bar."""
        if self._trainer is None:
            print_all(*args, **kwargs)
        else:
            self._trainer.print(*args, **kwargs)

    @known_keywords
    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather tensors from all processes, and stack them along a new first dimension.

        With a single process, the tensors are returned unchanged.

        Args:
            data: A nested structure of tensors with equal shapes on all processes.
            group: Accepted without effect. All processes take part.
            sync_grads: Not supported. Use `torch.distributed.nn` for collectives with gradients.
        """
        if sync_grads:
            raise ConfigurationError("all_gather(sync_grads=True) is not supported. Use torch.distributed.nn instead.")
        if PartialState().num_processes == 1:
            return data
        return recursively_apply(lambda tensor: gather(tensor.unsqueeze(0)), data)

    # Manual optimization

    @known_keywords
    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer that `configure_optimizers` created, or a list if there are several.

        Args:
            use_pl_optimizer: False to return the original optimizers, whose steps bypass the precision.
        """
        chosen = [o if use_pl_optimizer else o.optimizer for o in self.trainer.task_optimizers]
        return chosen[0] if len(chosen) == 1 else chosen

    def lr_schedulers(self) -> Any:
        """Return the task's learning-rate scheduler, or a list if there are several.

        None without any. Tasks with manual optimization step these schedulers themselves.
        """
        found = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return None if not found else found[0] if len(found) == 1 else found

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass for a loss, within a `training_step` with manual optimization.

        Further arguments are those of `torch.Tensor.backward`.

        Raises:
            ConfigurationError: The task uses automatic optimization.
        """
        if self.automatic_optimization:
            raise ConfigurationError(
                "manual_backward() is only for tasks with automatic_optimization = False. Return the loss instead.",
            )
        named = dict(zip(("gradient", "retain_graph", "create_graph"), args, strict=False))
        self.trainer.accelerator.backward(loss, **named, **kwargs)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Freeze all parameters that `optimizer` does not update, for example in a GAN.

        Sets their `requires_grad` to False until `untoggle_optimizer` is called.
        """
        context: AbstractContextManager[None] = optimizer.toggle_model()
        context.__enter__()
        self.__dict__["_toggled"] = context

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Restore the `requires_grad` values of the parameters that `toggle_optimizer` has frozen."""
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
        """Clip the gradients of an optimizer's parameters in place, by total norm or by value.

        Args:
            optimizer: The optimizer whose parameters' gradients are clipped.
            gradient_clip_val: The largest norm or absolute value. 0 or None disables clipping.
            gradient_clip_algorithm: `"value"` to clip each element, anything else to clip the total norm.
        """
        if not gradient_clip_val:
            return
        engine, parameters = self.trainer.accelerator, parameters_of(optimizer)
        if gradient_clip_algorithm == "value":
            engine.clip_grad_value_(parameters, gradient_clip_val)
        else:
            engine.clip_grad_norm_(parameters, gradient_clip_val)

    # Actions of the Trainer in each step, which a task may override

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of `loss`, which the Trainer has weighted and scaled. Override it to customize this.

        Further arguments are those of `torch.Tensor.backward`.
        """
        self.trainer.strategy.backward(loss, *args, **kwargs)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Update the parameters of one optimizer with their gradients, as the Trainer does in each optimizer step.

        Override it to change how an optimizer steps, for example to warm up its learning rate.

        Args:
            epoch: The index of the current epoch.
            batch_idx: The index of the last batch of the step.
            optimizer: The optimizer.
            optimizer_closure: A function that runs forward and backward. Call it, or pass it to `optimizer.step`.
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clear the gradients of one optimizer, before the first backward pass of a step.

        Override it to clear gradients in another way.
        """
        optimizer.zero_grad()

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of one optimizer before its step.

        Override it to clip in another way.

        Args:
            optimizer: The optimizer that is about to step.
            gradient_clip_val: The Trainer's `gradient_clip_val`.
            gradient_clip_algorithm: The Trainer's `gradient_clip_algorithm`.
        """
        self.clip_gradients(
            optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
        )

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step a learning-rate scheduler. Override this method for a scheduler whose `step` takes other arguments.

        Args:
            scheduler: The scheduler.
            metric: The monitored value, for `ReduceLROnPlateau`, else None.
        """
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def configure_model(self) -> None:
        """Create the task's large modules, which the strategy can then shard as they are created.

        Override it instead of creating these modules in the constructor.
        """

    def configure_callbacks(self) -> Any:
        """Return a callback or a list of callbacks to add to those of the Trainer.

        The default returns none. They replace the Trainer's callbacks of the same class or of a base class.
        """
        return []

    # Parameters

    def freeze(self) -> Self:
        """Set `requires_grad=False` on all parameters, switch to evaluation mode and return the task."""
        self.requires_grad_(False)
        return self.eval()

    def unfreeze(self) -> Self:
        """Set `requires_grad=True` on all parameters, switch to training mode and return the task."""
        self.requires_grad_(True)
        return self.train()


# torch.jit.script compiles every property of a module that is not named here.
Task.__jit_unused_properties__ = [name for name in dir(Task) if isinstance(getattr(Task, name), property)]
