"""Learning-rate range test: raise the rate step by step and record the loss.

Source: Smith, 2017, https://arxiv.org/abs/1506.01186.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.callbacks.base import Callback, Stage
from drivetrain.callbacks.learning_rate_finder import MODES, LRRange
from drivetrain.data import PendingBatch
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.seeds import isolated_random_state
from drivetrain.trainer.optimizers import parse_configured_optimizers
from drivetrain.trainer.task import Task
from drivetrain.trainer.tuning.trial import TrainingTrial, TunedAttribute, preserve_run, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from drivetrain.trainer.trainer import Trainer


# Result of a search


logger = get_logger(__name__)


class LRFinder:
    """Losses at the learning rates that a search has tried, from which `suggestion` chooses a rate.

    Args:
        mode: `"exponential"` or `"linear"`, the way in which the rate was raised.
        lr_min: First learning rate.
        lr_max: Last learning rate.
        num_training: Planned number of learning rates.

    Attributes:
        results: Dict with the learning rates under `"lr"` and the smoothed losses under `"loss"`.

    Raises:
        ConfigurationError: If the mode is unknown.
    """

    def __init__(self, mode: str, lr_min: float, lr_max: float, num_training: int) -> None:
        if mode not in MODES:
            raise ConfigurationError(f"LRFinder(mode={mode!r}) is not valid. Use {' or '.join(map(repr, MODES))}.")
        self.mode, self.lr_min, self.lr_max, self.num_training = mode, lr_min, lr_max, num_training
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Suggest a learning rate: the one at which the loss falls fastest.

        Args:
            skip_begin: Number of points to ignore at the beginning.
            skip_end: Number of points to ignore at the end.

        Returns:
            The learning rate, or None if fewer than two points with a finite loss are left.
        """
        place = self._steepest(skip_begin, skip_end)
        if place is None:
            logger.error(
                "Failed to compute suggestion for learning rate: fewer than two of the %d points are finite once %d "
                "are left out at the beginning and %d at the end. Use a larger num_training in lr_find, or more data.",
                len(self.results["loss"]),
                skip_begin,
                skip_end,
            )
            return None
        return self.results["lr"][place]

    def _steepest(self, skip_begin: int, skip_end: int) -> int | None:
        # The slope is taken over the index of the points, not over the rate. Otherwise the smallest rates, which are
        # closest to each other, would dominate with their noise.
        losses = torch.tensor([float(value) for value in self.results["loss"]], dtype=torch.float64)
        places = torch.arange(len(losses))[skip_begin : max(len(losses) - skip_end, 0)]
        places = places[torch.isfinite(losses[places])]
        if len(places) < 2:
            return None
        # A slope over several points reduces noise further.
        count, around = len(places), max(1, len(places) // 20)
        middle = torch.arange(count)
        before, after = places[(middle - around).clamp(min=0)], places[(middle + around).clamp(max=count - 1)]
        return int(places[((losses[after] - losses[before]) / (after - before)).argmin()])

    def plot(self, suggest: bool = False, show: bool = False, ax: Axes | None = None) -> Any:
        """Plot the loss against the learning rate into `ax` or a new figure, and return the matplotlib figure.

        Args:
            suggest: If True, mark the suggested rate.
            show: If True, open a window with the plot.
            ax: Axes of matplotlib to draw into. None creates a new figure.

        Returns:
            The matplotlib figure.

        Raises:
            ConfigurationError: If matplotlib is not installed.
        """
        if find_spec("matplotlib") is None:
            raise ConfigurationError(
                'LRFinder.plot requires matplotlib. Install it with pip install "drivetrain[plot]".'
            )
        import matplotlib.pyplot as plt

        rates, losses = self.results["lr"], self.results["loss"]
        if ax is None:
            _, ax = plt.subplots()
        ax.plot(rates, losses)
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("Learning rate")
        ax.set_ylabel("Loss")
        place = self._steepest(10, 1) if suggest else None
        if place is not None:
            label = f"suggested: {rates[place]:.3g}"
            ax.plot(rates[place], losses[place], "o", markersize=10, color="red", label=label)
            ax.legend()
        if show:
            plt.show()
        return ax.figure


NAMES = ("lr", "learning_rate")
SMOOTHING = 0.98  # decay of the moving average


def search_learning_rate(trainer: Trainer, task: Task, tried: LRRange) -> LRFinder:
    """Train with rising learning rates. Return the losses and the rate at which the loss falls fastest.

    `tried` describes the search: the range of rates, the number of steps and the attribute to set. Everything else in
    the run is restored.

    All ranks must call this together, after the task is placed. Their losses are averaged, so all find an equal rate.
    """
    attribute = None
    if tried.update_attr:
        names = (tried.attr_name,) if tried.attr_name else NAMES
        attribute = TunedAttribute.find(
            names, task, trainer.datamodule, "Pass its name as attr_name, or use update_attr=False."
        )
    if len(trainer.task_optimizers) != 1:
        raise ConfigurationError(
            f"The learning-rate search only works with single optimizer: {type(task).__name__}.configure_optimizers "
            f"returned {len(trainer.task_optimizers)}. Search for each optimizer separately, with a task that returns "
            "only that one.",
        )
    found = LRFinder(tried.mode, tried.min_lr, tried.max_lr, tried.num_training)
    # A copy without a prepared loader, so that trial steps do not use the run's own loader.
    source = trainer.task_run.sources[Stage.TRAIN].again()
    losses = _SmoothedLosses(tried.early_stop_threshold)
    with preserve_run(trainer, task, trains=True):
        watched = _Losses()
        trial = TrainingTrial(trainer, task, [watched])
        groups = trainer.optimizers[0].param_groups

        def run(number: int, window: list[PendingBatch]) -> bool:
            rate = tried.rate(number)
            for group in groups:
                group["lr"] = rate
            trial.step(window)
            loss = watched.take(trainer)
            continues = losses.add(loss)
            found.results["lr"].append(rate)
            # A step without a loss keeps its place, so that both lists have equal lengths.
            found.results["loss"].append(losses.latest if loss is not None else math.nan)
            advance(lr=rate, loss=losses.latest)
            return continues

        with shown(trainer, "Learning-rate search", tried.num_training) as advance:
            trial.run(source, tried.num_training, run, within_limits=True)
    suggestion = found.suggestion()
    if attribute is not None and suggestion is not None:
        before = attribute.value
        attribute.write(suggestion)
        _take_rate(trainer, task, suggestion)
        outcome = f"{attribute.name} is now {suggestion:.4g}, and was {before}"
    else:
        outcome = "none is suggested" if suggestion is None else f"{suggestion:.4g} is suggested"
    ended = f", where the loss {losses.verdict}" if losses.verdict else ""
    trainer.announce(
        f"Learning-rate search: {len(found.results['lr'])} steps from {tried.min_lr:g} to "
        f"{found.results['lr'][-1]:.4g}{ended}; {outcome}. Nothing else has changed."
    )
    return found


def _take_rate(trainer: Trainer, task: Task, rate: float) -> None:
    groups = trainer.optimizers[0].param_groups
    before = [group["lr"] for group in groups]
    # Schedules that depend on the rate, such as OneCycleLR, must be created anew.
    if trainer.global_step == 0:
        with isolated_random_state(devices=True):
            configured = task.configure_optimizers()
            [optimizer], schedulers = parse_configured_optimizers(configured, trainer.read_scheduler)
        if len(optimizer.param_groups) == len(groups):
            for group, configured in zip(groups, optimizer.param_groups, strict=True):
                group.update({name: value for name, value in configured.items() if name != "params"})
            for config, again in zip(trainer.lr_scheduler_configs, schedulers, strict=True):
                config.scheduler.load_state_dict(again.scheduler.state_dict())
    if [group["lr"] for group in groups] == before:
        for group in groups:
            group["lr"] = rate


class _Losses(Callback):
    saves_within_steps = False

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        if loss is not None and not trainer.logged.skips:
            weight = outputs.get("weight", 1.0)
            if not isinstance(weight, Tensor):
                weight = torch.full((), weight, dtype=torch.float32, device=loss.device)
            mean = "weight" not in outputs
            # Without a weight, outputs hold a mean, which is turned into a sum with the weight 1.
            self._sums.append(torch.stack([(loss * weight if mean else loss).float(), weight.float()]))

    def take(self, trainer: Trainer) -> float | None:
        # All-reduces the sums, and starts new ones. None if there was no loss on any rank.
        sums, self._sums = self._sums, []
        device = trainer.strategy.topology.device
        own = torch.stack(sums).sum(0).to(device) if sums else torch.zeros(2, device=device)
        total, weight = trainer.strategy.topology.sum(own).tolist()
        return total / weight if weight else None


class _SmoothedLosses:
    """Exponential moving average of the losses, which detects when the loss has grown too large."""

    def __init__(self, threshold: float | None) -> None:
        self._threshold = threshold
        self._mean, self._count, self._best = 0.0, 0, math.inf
        self.latest, self.verdict = math.nan, ""

    def add(self, loss: float | None) -> bool:
        # Returns False if the mean has exploded, which ends the search.
        if loss is None:
            return True
        self._count += 1
        self._mean = SMOOTHING * self._mean + (1 - SMOOTHING) * loss
        # Bias correction for the start at 0, as in Adam.
        self.latest = self._mean / (1 - SMOOTHING**self._count)
        # The first loss has nothing to be compared with.
        if self._threshold is not None and self._count > 1:
            if not math.isfinite(self.latest):
                self.verdict = "became NaN or infinite"
            # Equals `latest > threshold * best` for positive losses, and is right for negative ones too.
            elif self.latest - self._best > (self._threshold - 1) * abs(self._best):
                self.verdict = f"exceeded {self._threshold:g} times the smallest one"
        self._best = min(self._best, self.latest)
        return not self.verdict
