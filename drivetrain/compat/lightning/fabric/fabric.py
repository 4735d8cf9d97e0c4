"""`Fabric`: the Accelerator, as a raw loop written for Fabric calls it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from drivetrain.accelerator import Accelerator
from drivetrain.compat.lightning.accelerators import Accelerator as Kind
from drivetrain.compat.lightning.fabric.files import StateFiles
from drivetrain.compat.lightning.fabric.plugins.environments import ClusterEnvironment
from drivetrain.compat.lightning.fabric.preparing import Preparing
from drivetrain.compat.lightning.fabric.processes import Processes
from drivetrain.compat.lightning.fabric.stepping import Stepping
from drivetrain.compat.lightning.fabric.strategy import FabricStrategy
from drivetrain.compat.lightning.fabric.utilities.seed import seed_everything
from drivetrain.compat.lightning.fabric.wrappers import BackwardGuard
from drivetrain.compat.lightning.plugins import Precision, usable_on
from drivetrain.compat.lightning.reasons import PLUGIN
from drivetrain.compat.lightning.registry import STRATEGIES
from drivetrain.compat.lightning.spawning import call_spawned
from drivetrain.compat.lightning.strategy_members import StrategyMembers
from drivetrain.runtime.errors import ArgumentTypeError, ConfigurationError
from drivetrain.strategies import Strategy, started_by_verbs
from drivetrain.strategies.base import StartsProcesses
from drivetrain.strategies.precision.mixed import MixedPrecision
from drivetrain.trackers import Tracker
from drivetrain.trainer.setup import make_accelerator


def _nothing(fabric: Fabric) -> None:
    """What `launch` runs where nothing is given."""


class Fabric(Preparing, Stepping, Processes, StateFiles):
    """A raw loop's hold on devices, processes and number formats.

    Args:
        accelerator: `"auto"`, `"cpu"`, `"gpu"`, or another kind of device.
        strategy: A name, or a strategy.
        devices: How many processes on this machine, or which devices.
        num_nodes: Number of machines.
        precision: Such as `"bf16-mixed"`.
        plugins: A number format, and a cluster environment.
        callbacks: Objects whose methods `call` calls.
        loggers: Where `log` writes.

    Raises:
        ConfigurationError: A plugin was given that is not here.

    Attributes:
        accelerator: The engine that does the work.
    """

    def __init__(
        self,
        *,
        accelerator: Any = "auto",
        strategy: Any = "auto",
        devices: Any = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        plugins: Any = None,
        callbacks: Any = None,
        loggers: Tracker | Sequence[Tracker] | None = None,
    ) -> None:
        for plugin in plugins if isinstance(plugins, Sequence) else [plugins]:
            if isinstance(plugin, Precision):
                precision = plugin.precision
            elif isinstance(plugin, ClusterEnvironment):
                plugin.publish(devices, num_nodes)
            elif plugin is not None:
                raise ConfigurationError(
                    f"Fabric(plugins={type(plugin).__name__}()) is not taken. {PLUGIN}", code="DT-008"
                )
        strategy = STRATEGIES.made(strategy)
        if isinstance(strategy, StrategyMembers):
            if strategy.cluster_environment is not None:
                strategy.cluster_environment.publish(devices, num_nodes)
            precision = strategy.given_precision if precision is None else precision
        kind = accelerator.kind if issubclass(type(accelerator), Kind) else accelerator
        precision = usable_on(kind, precision)
        self._made_with = {"accelerator": kind, "num_nodes": num_nodes, "precision": precision, "callbacks": callbacks}
        self._made_with["loggers"] = loggers
        self._asked = strategy
        self.accelerator = make_accelerator(kind, strategy, devices, num_nodes, precision, 1, False)
        self._strategy: Any = FabricStrategy(self.accelerator)
        self._guard = BackwardGuard(_needs_own_backward(self.accelerator))
        self._callbacks = list(callbacks) if isinstance(callbacks, Sequence) else [callbacks] if callbacks else []
        self._loggers = list(loggers) if isinstance(loggers, Sequence) else [loggers] if loggers else []

    @staticmethod
    def seed_everything(seed: int | None = None, workers: bool | None = None, verbose: bool = True) -> int:
        """Seed Python's, NumPy's and torch's generators.

        Args:
            seed: The seed; that of the variable `PL_GLOBAL_SEED` if None, and 0 without it.
            workers: Taken for Lightning's sake: each sample has a seed of its own, whatever the worker.
            verbose: Whether to log the seed.
        """
        return seed_everything(seed, workers is not False, verbose)

    # this process

    @property
    def strategy(self) -> Any:
        """The strategy, with Lightning's members beside its own."""
        return self._strategy

    @property
    def global_rank(self) -> int:
        """Global rank of this process."""
        return int(self._strategy.global_rank)

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return int(self._strategy.local_rank)

    @property
    def node_rank(self) -> int:
        """The number of this machine."""
        return int(self._strategy.node_rank)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return int(self._strategy.world_size)

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the main process."""
        return self.accelerator.is_main_process

    @property
    def loggers(self) -> list[Any]:
        """All loggers."""
        return self._loggers

    @property
    def logger(self) -> Any:
        """The first logger."""
        return self._loggers[0]

    # launching

    def launch(self, function: Callable[..., Any] = _nothing, *args: Any, **kwargs: Any) -> Any:
        """Run a function in every process; they are there already, but for a strategy that starts them for it.

        Args:
            function: Called with this object.
            *args: Further arguments of it.
            **kwargs: The same.

        Returns:
            What it returned; of several processes that were started for it, in the first.

        Raises:
            ConfigurationError: It is no function, or takes nothing, or there is none for processes to run.
        """
        _check_launched(function, started_by_verbs(self._asked) is not None)
        spawning = self.accelerator.strategy
        if isinstance(spawning, StartsProcesses):
            made_with = {**self._made_with, "strategy": self._asked, "devices": spawning.num_processes}
            return call_spawned(spawning, _launched, type(self), made_with, function, args, kwargs)
        return function(self, *args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Override it for code that `Fabric` subclasses run."""


def _needs_own_backward(engine: Accelerator) -> bool:
    """Whether a plain `loss.backward()` would leave something out."""
    is_own = type(engine.strategy).backward is not Strategy.backward
    return is_own or isinstance(engine.precision, MixedPrecision)


def _launched(
    kind: type[Fabric], made_with: dict[str, Any], function: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """What each process runs that `launch` starts."""
    return function(kind(**made_with), *args, **kwargs)


def _check_launched(function: Any, spawns: bool) -> None:
    if function is _nothing:
        if spawns:
            raise ArgumentTypeError(
                "Where the strategy starts processes, `launch()` needs to be called with a function for them to run: "
                "fabric.launch(train).",
                code="DT-005",
            )
        return
    if not callable(function):
        raise ArgumentTypeError(
            f"`Fabric.launch(...)` needs to be a callable, got a {type(function).__name__}. Give the function itself: "
            "fabric.launch(train), not fabric.launch(train(fabric))."
        )
    try:
        takes_none = not inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
    if takes_none:
        raise ArgumentTypeError(
            f"The function given to `Fabric.launch(...)` needs to take at least one argument, the Fabric: "
            f"def {getattr(function, '__name__', 'train')}(fabric): ..."
        )
