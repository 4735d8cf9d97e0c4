"""`Task`: a model together with how it is trained, validated, tested and used."""

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
    """What a task may override to act at a moment of the run, in the order in which the moments come."""

    def on_fit_start(self) -> None:
        """Called at the very beginning of fit, after the optimizers were built."""

    def on_fit_end(self) -> None:
        """Called at the very end of fit."""

    def on_train_start(self) -> None:
        """Called before the first epoch."""

    def on_train_end(self) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Called before an epoch's first batch."""

    def on_train_epoch_end(self) -> None:
        """Called after an epoch's last batch and its validation."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Called before a batch; returning -1 leaves out the rest of the epoch."""
        return None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after a batch; for the last of an optimizer step, after the step."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Called before gradients are cleared."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Called before a backward."""

    def on_after_backward(self) -> None:
        """Called after a backward, before clipping."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called before clipping and stepping, with gradients at their true size."""

    def on_validation_model_zero_grad(self) -> None:
        """Free the gradients before a validation in `fit`; a task that optimizes by hand may count on them."""
        if self.automatic_optimization:
            self.zero_grad()

    def on_validation_model_eval(self) -> None:
        """Switch to evaluation for validation."""
        self.eval()

    def on_validation_model_train(self) -> None:
        """Switch back after validation; the default restores each module's own mode."""

    def on_validation_start(self) -> None:
        """Called before validation."""

    def on_validation_end(self) -> None:
        """Called after validation."""

    def on_validation_epoch_start(self) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last validation batch."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a validation batch."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a validation batch."""

    def on_test_model_eval(self) -> None:
        """Switch to evaluation for testing."""
        self.eval()

    def on_test_model_train(self) -> None:
        """Switch back after testing; the default restores each module's own mode."""

    def on_test_start(self) -> None:
        """Called before testing."""

    def on_test_end(self) -> None:
        """Called after testing."""

    def on_test_epoch_start(self) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """Called after the last test batch."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a test batch."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a test batch."""

    def on_predict_model_eval(self) -> None:
        """Switch to evaluation for predicting."""
        self.eval()

    def on_predict_model_train(self) -> None:
        """Switch back after predicting; the default restores each module's own mode."""

    def on_predict_start(self) -> None:
        """Called before predicting."""

    def on_predict_end(self) -> None:
        """Called after predicting."""

    def on_predict_epoch_start(self) -> None:
        """Called before the first batch to predict."""

    def on_predict_epoch_end(self) -> None:
        """Called after the last batch to predict."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a batch to predict."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a batch to predict."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add to a checkpoint before it is written."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take back what `on_save_checkpoint` added."""

    def on_exception(self, exception: BaseException) -> None:
        """See an exception that ends the run."""


_NO_TRAINER = (
    "You are trying to `self.log()` but the `self.trainer` reference is not registered on the model yet. This is most "
    "likely because the task has not been passed to the Trainer: nothing is logged."
)


class Task(TaskFiles, DataHooks, TaskHooks):
    """A model together with how it is trained, validated, tested and used.

    Subclass it, override `training_step` and `configure_optimizers`, and hand it to `Trainer.fit`.

    Attributes:
        automatic_optimization: Whether the trainer runs backward and steps the optimizers. With False,
            `training_step` does it through `manual_backward` and `optimizers()`.

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
        """Compute the loss of one batch.

        Args:
            batch: What the loader gave, on the device.
            batch_idx: Its number in the epoch.

        Returns:
            The mean loss as a scalar tensor; or a dict with it under `"loss"`; or None to leave the batch out.
        """
        raise ConfigurationError(f"{type(self).__name__} has no training_step; override it to train.")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate one validation batch; may take `dataloader_idx` too, the number of the loader."""

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate one test batch; may take `dataloader_idx` too, the number of the loader."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Predict for one batch; may take `dataloader_idx` too. The default calls the task on the batch."""
        return self(batch)

    def configure_optimizers(self) -> Any:
        """Build the optimizers.

        Returns:
            An optimizer; a list of optimizers, which all step on the one loss; a pair of lists of optimizers and
            schedulers; a dict with `"optimizer"` and `"lr_scheduler"` (a scheduler, or a dict with `"scheduler"`,
            `"interval"`, `"frequency"`, `"monitor"`); a list of such dicts; or None to train without one, or by hand.
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
        """Log a value. It stays on its device until something shows or writes it.

        Args:
            name: What to call it; one name has one meaning.
            value: A scalar tensor, a number, or a torchmetrics object (computed and reset each epoch).
            prog_bar: Show it in the progress bar.
            logger: Give it to the trackers; yes if None.
            on_step: Show and write each step's value; by default in training steps. In validation and test steps it is
                written for each batch, as the main process has it, against the number of batches evaluated before.
            on_epoch: Reduce over the epoch; by default in validation, test and at the end of epochs. Means weigh
                each value by its batch's real rows, over all processes. With both, the names get `_step` and `_epoch`.
            reduce_fx: `"mean"`, `"sum"`, `"max"`, `"min"`, or a function of the stacked values.
            enable_graph: Accepted for tasks that move over; values are always detached.
            sync_dist: Reduce over processes. By default epoch values are and step values are not; step values
                with True are reduced when they are written, not in each step.
            sync_dist_group: Accepted for tasks that move over; all processes take part.
            add_dataloader_idx: Append the loader's number where there are several.
            batch_size: What a mean weighs the value with, where the batch's size cannot be found.
            metric_attribute: Where in the task the metric is, if it cannot be found.
            rank_zero_only: Only the main process's values count.

        Raises:
            ConfigurationError: The value is no scalar, the name has another meaning already, or there is no step or
                epoch that it could belong to.
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
        """Log several values with the same arguments; also a torchmetrics `MetricCollection`."""
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
        """The trainer that runs this task.

        Raises:
            RuntimeError: None does.
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
        """Where the task's tensors live."""
        if self._trainer is not None:
            return self._trainer.strategy.topology.device
        return next((parameter.device for parameter in self.parameters()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the task's parameters."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def current_epoch(self) -> int:
        """Epochs finished so far."""
        return 0 if self._trainer is None else self._trainer.current_epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps taken so far."""
        return 0 if self._trainer is None else self._trainer.global_step

    @property
    def global_rank(self) -> int:
        """Global rank of this process."""
        return 0 if self._trainer is None else self._trainer.global_rank

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return 0 if self._trainer is None else self._trainer.local_rank

    @property
    def logger(self) -> Any:
        """The first tracker, if there is one."""
        return None if self._trainer is None else self._trainer.logger

    @property
    def loggers(self) -> list[Any]:
        """All trackers."""
        return [] if self._trainer is None else self._trainer.loggers

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process, without breaking the progress bar."""
        if self._trainer is None:
            print_all(*args, **kwargs)
        else:
            self._trainer.print(*args, **kwargs)

    @known_keywords
    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Stack tensors of all processes along a new first dimension; the tensors themselves in a world of one.

        Args:
            data: Nested structure of tensors of equal shapes.
            group: Accepted for tasks that move over; all processes take part.
            sync_grads: Not supported; use `torch.distributed.nn` where gradients must flow.
        """
        if sync_grads:
            raise ConfigurationError("all_gather(sync_grads=True) is not supported; use torch.distributed.nn.")
        if PartialState().num_processes == 1:
            return data
        return recursively_apply(lambda tensor: gather(tensor.unsqueeze(0)), data)

    # training by hand

    @known_keywords
    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer, or the list of them.

        Args:
            use_pl_optimizer: False gives the bare ones, which leave out the precision.
        """
        chosen = [o if use_pl_optimizer else o.optimizer for o in self.trainer.task_optimizers]
        return chosen[0] if len(chosen) == 1 else chosen

    def lr_schedulers(self) -> Any:
        """The scheduler, the list of them, or None."""
        found = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return None if not found else found[0] if len(found) == 1 else found

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients in a `training_step` that optimizes by hand."""
        if self.automatic_optimization:
            raise ConfigurationError(
                "manual_backward() is for tasks with automatic_optimization = False; this one returns its loss.",
            )
        named = dict(zip(("gradient", "retain_graph", "create_graph"), args, strict=False))
        self.trainer.accelerator.backward(loss, **named, **kwargs)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Let only this optimizer's parameters take gradients, until `untoggle_optimizer`."""
        context: AbstractContextManager[None] = optimizer.toggle_model()
        context.__enter__()
        self.__dict__["_toggled"] = context

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """End what `toggle_optimizer` began."""
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
        """Clip an optimizer's gradients, by norm (the default) or by value; a bound of 0 or None clips nothing."""
        if not gradient_clip_val:
            return
        engine, parameters = self.trainer.accelerator, parameters_of(optimizer)
        if gradient_clip_algorithm == "value":
            engine.clip_grad_value_(parameters, gradient_clip_val)
        else:
            engine.clip_grad_norm_(parameters, gradient_clip_val)

    # what the trainer does in each step; override to do it otherwise

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of a loss that is weighed and scaled already."""
        self.trainer.strategy.backward(loss, *args, **kwargs)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Step an optimizer.

        Args:
            epoch: The epoch under way.
            batch_idx: Number of the step's last batch.
            optimizer: The optimizer.
            optimizer_closure: Runs forward and backward; must be run, or given to `optimizer.step`.
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clear an optimizer's gradients before a step's first backward."""
        optimizer.zero_grad()

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients as the Trainer's arguments ask; override to do it otherwise."""
        self.clip_gradients(
            optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
        )

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step a scheduler.

        Args:
            scheduler: The scheduler.
            metric: The monitored value, for `ReduceLROnPlateau`.
        """
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def configure_model(self) -> None:
        """Build large modules here, under the strategy's context, rather than in the constructor."""

    def configure_callbacks(self) -> Any:
        """Callbacks that belong to the task; they replace the trainer's of the same class, or of a base of theirs."""
        return []

    # parameters

    def freeze(self) -> Self:
        """Let no parameter take gradients, and switch to evaluation; returns the task."""
        self.requires_grad_(False)
        return self.eval()

    def unfreeze(self) -> Self:
        """Let all parameters take gradients, and switch to training; returns the task."""
        self.requires_grad_(True)
        return self.train()


# torch.jit.script compiles every property of a module that is not named here.
Task.__jit_unused_properties__ = [name for name in dir(Task) if isinstance(getattr(Task, name), property)]
