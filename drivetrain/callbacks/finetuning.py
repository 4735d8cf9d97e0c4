"""Freeze parts of a model, and train them from some epoch on."""

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
    """The base of callbacks that freeze parts of a model, and train them from some epoch on.

    Override `freeze_before_training`, which runs before `configure_optimizers`, and `finetune_function`, which runs
    at the start of every epoch. The task gives its optimizer the parameters that are not frozen. What is trained later
    becomes a parameter group of its own, also in a resumed run. Strategies whose optimizer takes no groups later on
    (DeepSpeed, Megatron) are refused.

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
        self._added: dict[int, list[dict[str, Any]]] = {}  # by optimizer: the groups that were added
        self._epoch = -1  # the last one that `finetune_function` has seen
        self._restored = False

    # to override

    def freeze_before_training(self, task: Task) -> None:
        """Freeze what is not trained from the start.

        Args:
            task: The task, before its optimizers are made.
        """
        raise NotImplementedError

    def finetune_function(self, task: Task, epoch: int, optimizer: Optimizer) -> None:
        """Train more, or change learning rates; called at the start of every epoch, once for each optimizer.

        Args:
            task: The task.
            epoch: The epoch that begins, from 0.
            optimizer: The optimizer.
        """
        raise NotImplementedError

    # what they use

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Return the modules without children, and those with parameters of their own, of modules within modules.

        Args:
            modules: A module, or several in any structure of lists.
        """
        if isinstance(modules, nn.ModuleDict):
            modules = modules.values()
        if isinstance(modules, nn.Module):
            return [m for m in modules.modules() if not list(m.children()) or m._parameters]
        return [found for each in modules for found in BaseFinetuning.flatten_modules(each)]

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters that are trained, or those that are not.

        Args:
            modules: A module, or several in any structure of lists.
            train_bn: Whether those of batch norms count.
            requires_grad: Whether to yield those that are trained, or the frozen ones.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            if isinstance(module, _BatchNorm) and not train_bn:
                continue
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad is requires_grad:
                    yield parameter

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Train all parameters of modules.

        Args:
            modules: A module, or several in any structure of lists.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            if isinstance(module, _BatchNorm):
                module.track_running_stats = True
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad = True

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze the parameters of one module, and the statistics of a batch norm.

        Args:
            module: The module.
        """
        if isinstance(module, _BatchNorm):
            module.track_running_stats = False
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad = False

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze the parameters of modules.

        Args:
            modules: A module, or several in any structure of lists.
            train_bn: Whether batch norms are trained nevertheless.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            if isinstance(module, _BatchNorm) and train_bn:
                BaseFinetuning.make_trainable(module)
            else:
                BaseFinetuning.freeze_module(module)

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that an optimizer does not have yet; warn of others.

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
                f"The provided params to be frozen already belong to a group of this optimizer: {count} of them. They "
                "stay in that group, and are trained from the start. Did you init your optimizer in "
                "configure_optimizers with all parameters? Give it those that have requires_grad.",
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
        """Train modules from now on, and give an optimizer their parameters as a group of their own.

        Args:
            modules: A module, or several in any structure of lists.
            optimizer: The optimizer.
            lr: The group's learning rate; that of the first group by `initial_denom_lr` if None.
            initial_denom_lr: The learning rate of the first group is this times as high.
            train_bn: Whether batch norms are trained as well.
        """
        BaseFinetuning.make_trainable(modules)
        rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else lr
        found = BaseFinetuning.filter_on_optimizer(optimizer, BaseFinetuning.filter_params(modules, train_bn))
        if found:
            optimizer.add_param_group({"params": found, "lr": rate})

    # the state

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "groups": {str(number): groups for number, groups in self._added.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._epoch = state_dict["epoch"]
        self._added = {int(number): list(groups) for number, groups in state_dict["groups"].items()}
        self._restored = True

    # around the loop

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        if stage == "fit":
            self._forget()
            self.freeze_before_training(task)

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        if self._restored:
            self._restored = False
            self._add_again(trainer)

    def on_train_epoch_start(self, trainer: Trainer, task: Task) -> None:
        self._restored = False  # a rollback, to when the groups were the same
        epoch = trainer.current_epoch
        if epoch <= self._epoch:
            return  # resumed within this epoch, whose start has been
        self._epoch = epoch
        before = _names_trained(trainer)
        for number, optimizer in enumerate(trainer.optimizers):
            groups = optimizer.param_groups
            count = len(groups)
            rates = [float(group["lr"]) for group in groups]
            self.finetune_function(task, epoch, optimizer)
            own = range(count - len(self._added.get(number, ())), count)
            changed = [each for each in own if float(groups[each]["lr"]) != rates[each]]
            self._schedule(trainer, optimizer, changed)
            self._record(trainer, number, count)
        self._announce(trainer, before)

    def _record(self, trainer: Trainer, number: int, first: int) -> None:
        """Remember an optimizer's groups from the first that was added on, by the names of their parameters."""
        names = {id(parameter): name for name, parameter in _all_in_place(trainer).items()}
        optimizer = trainer.optimizers[number]
        for group in optimizer.param_groups[first:]:
            params = [names[id(parameter)] for parameter in group["params"]]
            self._added.setdefault(number, []).append({**group, "params": params})

    @staticmethod
    def _schedule(trainer: Trainer, optimizer: Optimizer, changed: Sequence[int] = ()) -> None:
        """Let the optimizer's schedulers step the groups that were added, from the rates that they have now."""
        for config in trainer.lr_scheduler_configs:
            if getattr(config.scheduler, "optimizer", None) is optimizer:
                cover_new_groups(config.scheduler)
                for number in changed:
                    follow_group_rate(config.scheduler, number)

    def _add_again(self, trainer: Trainer) -> None:
        """Give the optimizers the groups that they had in the run before; their state comes next."""
        parameters, before = _all_in_place(trainer), _names_trained(trainer)
        for number, groups in self._added.items():
            for group in groups:
                for name in group["params"]:
                    parameters[name].requires_grad = True
                params = [parameters[name] for name in group["params"]]
                trainer.optimizers[number].add_param_group({**group, "params": params})
            self._schedule(trainer, trainer.optimizers[number])
        self._announce(trainer, before)

    def _announce(self, trainer: Trainer, before: set[str]) -> None:
        """Let the strategy reduce the gradients of what is trained from now on, in the model's order on each rank."""
        trained = {name: each for name, each in _all_in_place(trainer).items() if each.requires_grad}
        added = [parameter for name, parameter in trained.items() if name not in before]
        if added and trainer.model is not None:
            trainer.strategy.gradients.adopt(trainer.model, added)


def _all_in_place(trainer: Trainer) -> dict[str, nn.Parameter]:
    assert trainer.model is not None
    return trainer.strategy.state.parameters_in_place(trainer.model)


def _names_trained(trainer: Trainer) -> set[str]:
    return {name for name, parameter in _all_in_place(trainer).items() if parameter.requires_grad}


def multiplicative(epoch: int) -> float:
    """Twice as much in each epoch."""
    return 2.0


class BackboneFinetuning(BaseFinetuning):
    """Trains the head of a model alone at first, and from an epoch on its `backbone` too, at a growing learning rate.

    The task has a module `backbone`, and gives its optimizer the parameters that are trained.

    Args:
        unfreeze_backbone_at_epoch: The epoch, from 0, that trains the backbone first; or what is trained before it, in
            another unit, such as `"1M samples"` or `"10%"` of the run: then it is the first epoch that begins after it.
        lambda_func: What the backbone's learning rate is multiplied with at the start of an epoch after that.
        backbone_initial_ratio_lr: The backbone's learning rate when it begins, as a share of that of the first group.
        backbone_initial_lr: That learning rate itself, in place of a share.
        should_align: Whether the backbone's learning rate follows that of the first group once it has reached it.
        initial_denom_lr: See `unfreeze_and_add_param_group`; the backbone's own arguments come first.
        train_bn: Whether batch norms that are frozen are trained with the backbone; those of the backbone itself are
            trained from the start.
        verbose: Log both learning rates at the start of each epoch.
        rounding: Digits of what is logged.

    Raises:
        ConfigurationError: If the task has no module `backbone`.

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
        self.rhythm: Duration | None = at if isinstance(at, Duration) else None
        self._start: RunPoint | None = None
        self._elapsed = 0.0  # of what `_start` waits for, in the run before
        self._begun_at: int | None = None  # the epoch, once it has come
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
        if self.rhythm is not None:
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
                f"BackboneFinetuning: {type(task).__name__} has no module `backbone`. Name it so, or subclass "
                "BaseFinetuning.",
            )
        self.previous_backbone_lr = self._begun_at = self._start = None
        self._elapsed = 0.0
        self.freeze(task.backbone)

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        if self.rhythm is not None:
            name = "BackboneFinetuning.unfreeze_backbone_at_epoch"
            self._start = RunPoint(trainer, self.rhythm, name, self._elapsed, by_epoch=True)

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
            optimizer.param_groups[-1]["lr"] = own
        else:
            return
        self.previous_backbone_lr = own
        if self.verbose:
            logger.info(f"Epoch {epoch}: lr {round(rate, self.rounding)}, backbone {round(own, self.rounding)}.")


def _epoch_or_duration(given: int | str | Duration) -> int | Duration:
    """`unfreeze_backbone_at_epoch`, where a number is an epoch, and a number of steps stays one of steps."""
    if isinstance(given, int):
        return given
    read = interval_of(given, "BackboneFinetuning.unfreeze_backbone_at_epoch")
    if isinstance(read, int):
        return Duration(read, Unit.STEPS)
    return int(read.amount) if read.unit is Unit.EPOCHS else read
