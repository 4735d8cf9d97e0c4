"""Callbacks that freeze parts of a model and unfreeze them in a later epoch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from drivetrain.accelerator.prepared import cover_new_groups, follow_group_rate
from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.step_schedule import RunPoint
from drivetrain.runtime.durations import Duration, Unit, interval_of
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)

Modules = nn.Module | Iterable[Any]


class BaseFinetuning(Callback):
    """Base class of callbacks that freeze parts of a model and unfreeze them in a later epoch.

    Override `freeze_before_training`, which runs before `configure_optimizers`, and `finetune_function`, which runs at
    the start of every epoch. `configure_optimizers` must pass only unfrozen parameters to the optimizer. Parameters
    that are unfrozen later get a parameter group of their own, also in a resumed run. Strategies whose optimizers
    accept no new parameter groups (DeepSpeed, Megatron) raise an error.

    Example:
        ```python
        from drivetrain import BaseFinetuning

        class UnfreezeAtTen(BaseFinetuning):
            def freeze_before_training(self, task):
                self.freeze(task.encoder)

            def finetune_function(self, task, epoch, optimizer):
                if epoch == 10:
                    self.unfreeze_and_add_param_group(task.encoder, optimizer)
        ```
    """

    saves_within_steps = False

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._added: dict[int, list[dict[str, Any]]] = {}  # from the index of an optimizer to the groups added to it
        self._epoch = -1  # the last epoch for which `finetune_function` was called
        self._restored = False

    # to override

    def freeze_before_training(self, task: Task) -> None:
        """Freeze parameters before training starts, for example with `self.freeze(task.backbone)`.

        Subclasses must override this method.

        Args:
            task: The task, before `configure_optimizers` is called.
        """
        raise NotImplementedError

    def finetune_function(self, task: Task, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze parameters or change learning rates at the start of an epoch.

        Subclasses must override this method. It is called at the start of every epoch, once for each optimizer.

        Args:
            task: The task.
            epoch: The index of the epoch that begins, from 0.
            optimizer: The optimizer.
        """
        raise NotImplementedError

    # helpers for subclasses

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Return all submodules as a flat list, without containers that have no parameters of their own.

        Args:
            modules: A module, or a nested list of modules.
        """
        if isinstance(modules, nn.ModuleDict):
            modules = modules.values()
        if isinstance(modules, nn.Module):
            return [m for m in modules.modules() if not list(m.children()) or m._parameters]
        return [found for each in modules for found in BaseFinetuning.flatten_modules(each)]

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[nn.Parameter]:
        """Yield the trainable parameters of the given modules, or the frozen ones if `requires_grad` is False.

        Args:
            modules: A module, or a nested list of modules.
            train_bn: Include the parameters of batch norms.
            requires_grad: Yield the trainable parameters if True, the frozen ones if False.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            if isinstance(module, _BatchNorm) and not train_bn:
                continue
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad is requires_grad:
                    yield parameter

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Make all parameters of the given modules trainable, by setting `requires_grad` to True.

        Args:
            modules: A module, or a nested list of modules.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            if isinstance(module, _BatchNorm):
                module.track_running_stats = True
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad = True

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze the parameters that belong directly to a module.

        A batch norm also stops updating its statistics.

        Args:
            module: The module.
        """
        if isinstance(module, _BatchNorm):
            # With tracking turned off, a batch norm no longer updates its running statistics.
            module.track_running_stats = False
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad = False

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze the parameters of modules and their submodules, except batch norms if `train_bn` is True.

        Args:
            modules: A module, or a nested list of modules.
            train_bn: Keep batch norms trainable.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            if isinstance(module, _BatchNorm) and train_bn:
                BaseFinetuning.make_trainable(module)
            else:
                BaseFinetuning.freeze_module(module)

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return those of the given parameters that are not in the optimizer yet, and warn if some already are.

        Args:
            optimizer: The optimizer.
            params: The parameters.
        """
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        given = list(params)
        missing = [parameter for parameter in given if id(parameter) not in known]
        if len(missing) < len(given):
            count = len(given) - len(missing)
            warnings.warn(
                f"The provided params to be frozen already belong to a group of this optimizer ({count} parameters), "
                "so they are trained from the start. Did you init your optimizer in configure_optimizers with all "
                "parameters? Pass only parameters with requires_grad=True to the optimizer.",
                stacklevel=3,
            )
        return missing

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze the modules and add their parameters to the optimizer as a new parameter group.

        Args:
            modules: A module, or a nested list of modules.
            optimizer: The optimizer.
            lr: The learning rate of the new group. If None, it is the learning rate of the first group divided by
                `initial_denom_lr`.
            initial_denom_lr: The divisor for the learning rate of the first group.
            train_bn: Add the parameters of batch norms too.
        """
        BaseFinetuning.make_trainable(modules)
        rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else lr
        found = BaseFinetuning.filter_on_optimizer(optimizer, BaseFinetuning.filter_params(modules, train_bn))
        if found:
            optimizer.add_param_group({"params": found, "lr": rate})

    # state

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "groups": {str(number): groups for number, groups in self._added.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._epoch = state_dict["epoch"]
        self._added = {int(number): list(groups) for number, groups in state_dict["groups"].items()}
        self._restored = True

    # hooks

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        if stage == "fit":
            self._forget()
            self.freeze_before_training(task)

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        if self._restored:
            self._restored = False
            self._restore_groups(trainer)

    def on_train_epoch_start(self, trainer: Trainer, task: Task) -> None:
        self._restored = False  # after a rollback the optimizers still have their groups
        epoch = trainer.current_epoch
        if epoch <= self._epoch:
            return  # resumed within this epoch: `finetune_function` has run for it
        self._epoch = epoch
        for number, optimizer in enumerate(trainer.optimizers):
            groups = optimizer.param_groups
            count = len(groups)
            rates = [float(group["lr"]) for group in groups]
            self.finetune_function(task, epoch, optimizer)
            # The groups that this callback has added are the last ones.
            own = range(count - len(self._added.get(number, ())), count)
            # A rate that `finetune_function` set by hand becomes the new base of the group's schedule.
            changed = [each for each in own if float(groups[each]["lr"]) != rates[each]]
            self._schedule_groups(trainer, optimizer, changed)
            self._record_groups(trainer, number, count)
        _all_in_place(trainer)  # lets the strategy see what is trained from now on

    def _record_groups(self, trainer: Trainer, number: int, first: int) -> None:
        names = {id(parameter): name for name, parameter in _all_in_place(trainer).items()}
        optimizer = trainer.optimizers[number]
        for group in optimizer.param_groups[first:]:
            params = [names[id(parameter)] for parameter in group["params"]]
            self._added.setdefault(number, []).append({**group, "params": params})

    @staticmethod
    def _schedule_groups(trainer: Trainer, optimizer: Optimizer, changed: Sequence[int] = ()) -> None:
        for config in trainer.lr_scheduler_configs:
            if getattr(config.scheduler, "optimizer", None) is optimizer:
                cover_new_groups(config.scheduler)
                for number in changed:
                    follow_group_rate(config.scheduler, number)

    def _restore_groups(self, trainer: Trainer) -> None:
        parameters = _all_in_place(trainer)
        # A saved optimizer state can be loaded only if the optimizer has the same groups.
        for number, groups in self._added.items():
            for group in groups:
                for name in group["params"]:
                    parameters[name].requires_grad = True
                params = [parameters[name] for name in group["params"]]
                trainer.optimizers[number].add_param_group({**group, "params": params})
            self._schedule_groups(trainer, trainer.optimizers[number])
        _all_in_place(trainer)  # lets the strategy see what is trained from now on


def _all_in_place(trainer: Trainer) -> dict[str, nn.Parameter]:
    assert trainer.model is not None
    return trainer.strategy.state.parameters_in_place(trainer.model)


def multiplicative(epoch: int) -> float:
    """Return 2.0, the factor by which `BackboneFinetuning` multiplies the backbone's learning rate by default."""
    return 2.0


class BackboneFinetuning(BaseFinetuning):
    """Callback that trains only the model's head at first, and unfreezes its `backbone` in a later epoch.

    The learning rate of the backbone starts low and grows. The task needs a submodule named `backbone`, and must pass
    only unfrozen parameters to its optimizer.

    Args:
        unfreeze_backbone_at_epoch: The epoch, from 0, in which to unfreeze the backbone. A duration such as `"1M
            samples"` or `"10%"` of the run selects the first epoch that begins after it.
        lambda_func: A function from the epoch to the factor by which the learning rate of the backbone is multiplied
            at the start of each later epoch.
        backbone_initial_ratio_lr: The initial learning rate of the backbone, as a fraction of that of the first group.
        backbone_initial_lr: The initial learning rate of the backbone. It replaces `backbone_initial_ratio_lr`.
        should_align: Never let the learning rate of the backbone exceed that of the first group.
        initial_denom_lr: See `unfreeze_and_add_param_group`. It has no effect here, since the two arguments above set
            the rate.
        train_bn: Add batch norms of the backbone to its parameter group if the optimizer does not have them yet. Batch
            norms of the backbone require gradients from the start.
        verbose: Log both learning rates at the start of each epoch.
        rounding: The number of decimal places in the log.

    Raises:
        ConfigurationError: If the task has no submodule `backbone`.

    Example:
        ```python
        from drivetrain import BackboneFinetuning, Trainer

        trainer = Trainer(callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=5)], logger=False)
        ```
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int | str | Duration = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 10e-2,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__()
        self.unfreeze_backbone_at_epoch = _epoch_or_duration(unfreeze_backbone_at_epoch)
        at = self.unfreeze_backbone_at_epoch
        self.schedule: Duration | None = at if isinstance(at, Duration) else None
        self._start: RunPoint | None = None
        self._elapsed = 0.0  # the part of that duration that passed in the resumed run
        self._begun_at: int | None = None  # the epoch in which the backbone was unfrozen
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr = backbone_initial_lr
        self.should_align = should_align
        self.initial_denom_lr = initial_denom_lr
        self.train_bn = train_bn
        self.verbose = verbose
        self.rounding = rounding
        self.previous_backbone_lr: float | None = None

    def state_dict(self) -> dict[str, Any]:
        state = {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}
        if self.schedule is not None:
            state["begun_at"] = self._begun_at
            state["elapsed"] = self._elapsed if self._start is None else self._start.elapsed
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]
        self._begun_at, self._elapsed = state_dict.get("begun_at"), state_dict.get("elapsed", 0.0)

    def freeze_before_training(self, task: Task) -> None:
        if not isinstance(getattr(task, "backbone", None), nn.Module):
            raise ConfigurationError(
                f"BackboneFinetuning: {type(task).__name__} has no module `backbone`. Rename the module, or "
                "subclass BaseFinetuning.",
            )
        self.previous_backbone_lr = self._begun_at = self._start = None
        self._elapsed = 0.0
        self.freeze(task.backbone)

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        if self.schedule is not None:
            name = "BackboneFinetuning.unfreeze_backbone_at_epoch"
            self._start = RunPoint(trainer, self.schedule, name, self._elapsed, by_epoch=True)

    def on_train_epoch_start(self, trainer: Trainer, task: Task) -> None:
        if self._start is not None and self._begun_at is None and self._start.has_come():
            self._begun_at = trainer.current_epoch
        super().on_train_epoch_start(trainer, task)

    def finetune_function(self, task: Task, epoch: int, optimizer: Optimizer) -> None:
        rate = float(optimizer.param_groups[0]["lr"])
        at = self.unfreeze_backbone_at_epoch
        first_epoch = self._begun_at if isinstance(at, Duration) else at
        if first_epoch is None:
            return
        if epoch == first_epoch:
            first = self.backbone_initial_lr
            own = rate * self.backbone_initial_ratio_lr if first is None else first
            self.unfreeze_and_add_param_group(
                task.backbone,
                optimizer,
                own,
                self.initial_denom_lr,
                self.train_bn,
            )
        elif epoch > first_epoch and self.previous_backbone_lr is not None:
            own = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            own = rate if self.should_align and own > rate else own
            # The group of the backbone was added last.
            optimizer.param_groups[-1]["lr"] = own
        else:
            return
        self.previous_backbone_lr = own
        if self.verbose:
            logger.info(f"Epoch {epoch}: lr {round(rate, self.rounding)}, backbone lr {round(own, self.rounding)}.")


def _epoch_or_duration(given: int | str | Duration) -> int | Duration:
    if isinstance(given, int):
        return given
    read = interval_of(given, "BackboneFinetuning.unfreeze_backbone_at_epoch")
    if isinstance(read, int):
        return Duration(read, Unit.STEPS)
    return int(read.amount) if read.unit is Unit.EPOCHS else read
