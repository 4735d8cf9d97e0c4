"""`LRFinder`: the losses of a learning-rate search, the rate that they suggest, and their plot."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.callbacks.support.lr_range import MODES
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger

if TYPE_CHECKING:
    from matplotlib.axes import Axes

logger = get_logger(__name__)


class LRFinder:
    """What a learning-rate search has found.

    Args:
        mode: `"exponential"` or `"linear"`: how the rate was raised.
        lr_min: The first rate.
        lr_max: The last one.
        num_training: How many there were to be.

    Attributes:
        results: The rates under `"lr"`, and the smoothed loss at each under `"loss"`.

    Raises:
        ConfigurationError: The mode is another one.
    """

    def __init__(self, mode: str, lr_min: float, lr_max: float, num_training: int) -> None:
        if mode not in MODES:
            raise ConfigurationError(f"LRFinder(mode={mode!r}): give {' or '.join(map(repr, MODES))}.", code="DT-001")
        self.mode, self.lr_min, self.lr_max, self.num_training = mode, lr_min, lr_max, num_training
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """The rate at which the loss falls fastest.

        Args:
            skip_begin: Points to leave out at the beginning.
            skip_end: Points to leave out at the end.

        Returns:
            The rate; None where fewer than two points with a finite loss are left.
        """
        place = self._steepest(skip_begin, skip_end)
        if place is None:
            logger.error(
                "Failed to compute suggestion for learning rate: fewer than two of the %d points are finite once %d "
                "are left out at the beginning and %d at the end. Give lr_find a larger num_training, or more data.",
                len(self.results["loss"]),
                skip_begin,
                skip_end,
            )
            return None
        return self.results["lr"][place]

    def _steepest(self, skip_begin: int, skip_end: int) -> int | None:
        """The number of the point around which the loss falls fastest from one rate to the next, as the plot shows it.

        Over the rates themselves the steps between the smallest would count most, and so the noise of the losses there;
        over single points, that of the first ones, which are smoothed least.
        """
        losses = torch.tensor([float(value) for value in self.results["loss"]], dtype=torch.float64)
        places = torch.arange(len(losses))[skip_begin : max(len(losses) - skip_end, 0)]
        places = places[torch.isfinite(losses[places])]
        if len(places) < 2:
            return None
        count, around = len(places), max(1, len(places) // 20)
        middle = torch.arange(count)
        before, after = places[(middle - around).clamp(min=0)], places[(middle + around).clamp(max=count - 1)]
        return int(places[((losses[after] - losses[before]) / (after - before)).argmin()])

    def plot(self, suggest: bool = False, show: bool = False, ax: Axes | None = None) -> Any:
        """Draw the loss over the learning rate.

        Args:
            suggest: Mark the suggested rate.
            show: Open a window with it.
            ax: Where to draw; a new figure if None.

        Returns:
            The figure, of matplotlib.

        Raises:
            ConfigurationError: If matplotlib is not installed.
        """
        if find_spec("matplotlib") is None:
            raise ConfigurationError(
                'LRFinder.plot needs matplotlib, which is not installed: pip install "drivetrain[plot]".', code="DT-013"
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
