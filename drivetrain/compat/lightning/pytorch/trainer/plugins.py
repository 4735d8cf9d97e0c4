"""What a Trainer's plugins and its strategy stand for among its other arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    """
    for plugin in plugins if isinstance(plugins, Sequence) and not isinstance(plugins, str) else [plugins]:
        if isinstance(plugin, TorchSyncBatchNorm):
            options["sync_batchnorm"] = True
        elif isinstance(plugin, Precision):
            precision = plugin.precision
        elif isinstance(plugin, ClusterEnvironment):
            plugin.publish(options.get("devices"), options.get("num_nodes", 1))
        elif plugin is not None:
            raise ConfigurationError(f"Trainer(plugins={type(plugin).__name__}()) is not taken. {PLUGIN}")
    strategy = options.get("strategy")
    if isinstance(strategy, StrategyMembers):
        if strategy.cluster_environment is not None:
            strategy.cluster_environment.publish(options.get("devices"), options.get("num_nodes", 1))
        precision = strategy.given_precision if precision is None else precision
    return precision
