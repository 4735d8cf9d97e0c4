"""What a Trainer's plugins and its strategy stand for among its other arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drivetrain.compat.lightning.checkpoint_io import CheckpointIO
from drivetrain.compat.lightning.fabric.plugins.environments import ClusterEnvironment
from drivetrain.compat.lightning.plugins import Precision, TorchSyncBatchNorm
from drivetrain.compat.lightning.reasons import PLUGIN
from drivetrain.compat.lightning.registry import STRATEGIES
from drivetrain.compat.lightning.strategy_members import StrategyMembers
from drivetrain.runtime.errors import ConfigurationError


def spell(options: dict[str, Any]) -> None:
    """Spell options as the core does.

    Args:
        options: The arguments by name, which are changed.
    """
    if options.get("fast_dev_run") == 1:
        options["fast_dev_run"] = True
    strategy = STRATEGIES.made(options.get("strategy", "auto"))
    if isinstance(strategy, str):
        strategy = "single" if strategy.lower() == "single_device" else strategy.lower()
    options["strategy"] = strategy


def taken_from(plugins: Any, precision: Any, options: dict[str, Any]) -> Any:
    """The precision that plugins stand for, or the given one; what else they stand for is written into the options.

    Args:
        plugins: The plugins of a Trainer.
        precision: Its precision.
        options: Its other arguments by name.

    Raises:
        ConfigurationError: One of them replaces what has one implementation, or there are two of a kind.
    """
    given = _several(plugins)
    _refuse_two_of_a_kind(given)
    for plugin in given:
        if isinstance(plugin, TorchSyncBatchNorm):
            options["sync_batchnorm"] = True
        elif isinstance(plugin, Precision):
            precision = plugin.precision
        elif isinstance(plugin, ClusterEnvironment):
            plugin.publish(options.get("devices"), options.get("num_nodes", 1))
        elif not isinstance(plugin, CheckpointIO):
            raise ConfigurationError(
                f"Trainer(plugins={type(plugin).__name__}()) is not taken. {PLUGIN}", code="DT-008"
            )
    strategy = options.get("strategy")
    if isinstance(strategy, StrategyMembers):
        if strategy.cluster_environment is not None:
            strategy.cluster_environment.publish(options.get("devices"), options.get("num_nodes", 1))
        precision = strategy.given_precision if precision is None else precision
    return precision


def give_checkpoint_io(plugins: Any, strategy: Any) -> None:
    """Let a strategy keep what writes checkpoints, where it is among the plugins.

    Args:
        plugins: The plugins of a Trainer.
        strategy: Its strategy, with Lightning's members.

    Raises:
        ConfigurationError: The strategy has one of its own.
    """
    found = next((plugin for plugin in _several(plugins) if isinstance(plugin, CheckpointIO)), None)
    given = strategy.given_checkpoint_io
    if found is None or given is found:
        return
    if given is not None:
        raise ConfigurationError(
            "checkpoint_io set through both strategy class and plugins, choose one: "
            f"{type(strategy).__name__}(checkpoint_io={type(given).__name__}()) and plugins={type(found).__name__}().",
            code="DT-004",
        )
    strategy.take_checkpoint_io(found)


def _several(plugins: Any) -> list[Any]:
    """The plugins as a list."""
    given = list(plugins) if isinstance(plugins, Sequence) and not isinstance(plugins, str) else [plugins]
    return [plugin for plugin in given if plugin is not None]


def _refuse_two_of_a_kind(plugins: list[Any]) -> None:
    kinds = (Precision, CheckpointIO, ClusterEnvironment)
    doubled = [kind.__name__ for kind in kinds if sum(isinstance(plugin, kind) for plugin in plugins) > 1]
    if doubled:
        raise ConfigurationError(
            f"Received multiple values for {', '.join(doubled)} flags in `plugins`. Give one of each at most.",
            code="DT-004",
        )
