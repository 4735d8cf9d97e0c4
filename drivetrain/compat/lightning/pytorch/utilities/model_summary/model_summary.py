"""`ModelSummary`: layers, parameters and sizes of a module."""

from __future__ import annotations

from typing import Any

from torch import nn

from drivetrain.callbacks.model_summary import NOT_APPLICABLE, UNKNOWN_SIZE, ModuleTable, table_lines, total_lines
from drivetrain.callbacks.model_summary import OTHER as LEFTOVER_PARAMS_NAME
from drivetrain.callbacks.model_summary import Layer as LayerSummary
from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_warn
from drivetrain.runtime.errors import ConfigurationError

__all__ = ["LEFTOVER_PARAMS_NAME", "NOT_APPLICABLE", "UNKNOWN_SIZE", "LayerSummary", "ModelSummary", "summarize"]


class ModelSummary:
    """Table of a module's submodules, whose columns are attributes."""

    def __init__(self, model: nn.Module, max_depth: int = 1) -> None:
        if not isinstance(max_depth, int) or max_depth < -1:
            raise ConfigurationError(f"`max_depth` can be -1, 0 or > 0, got {max_depth}.")
        self._model, self._max_depth = model, max_depth
        self._table = self._make()

    def _make(self) -> ModuleTable:
        trainer = _trainer_of(self._model)
        placed = trainer is not None and trainer.model is not self._model
        strategy = trainer.strategy if trainer is not None and placed else None
        precision = trainer.accelerator.precision if trainer is not None else None
        return ModuleTable(self._model, self._max_depth, strategy, precision)

    def summarize(self) -> dict[str, LayerSummary]:
        """Rebuild the table. Return its rows by module name."""
        self._table = self._make()
        return {layer.name: layer for layer in self._table.layers}

    @property
    def named_modules(self) -> list[tuple[str, nn.Module]]:
        """Modules in the table, as (name, module) pairs."""
        modules = dict(self._model.named_modules(remove_duplicate=False))
        return [(name, modules[name]) for name in self.layer_names]

    @property
    def layer_names(self) -> list[str]:
        """Name of the module in each row."""
        return [layer.name for layer in self._table.layers]

    @property
    def layer_types(self) -> list[str]:
        """Class name of the module in each row."""
        return [layer.kind for layer in self._table.layers]

    @property
    def in_sizes(self) -> list[Any]:
        """Input shape of the module in each row."""
        return [layer.in_size for layer in self._table.layers]

    @property
    def out_sizes(self) -> list[Any]:
        """Output shape of the module in each row."""
        return [layer.out_size for layer in self._table.layers]

    @property
    def param_nums(self) -> list[int]:
        """Number of parameters of the module in each row."""
        return [layer.parameters for layer in self._table.layers]

    @property
    def training_modes(self) -> list[bool]:
        """For each row, True if the module is in training mode."""
        return [layer.mode == "train" for layer in self._table.layers]

    @property
    def flop_counts(self) -> list[int]:
        """FLOPs of the module in each row during one forward pass."""
        return [layer.flops for layer in self._table.layers]

    @property
    def total_flops(self) -> int:
        """FLOPs of a forward pass, 0 if none has run."""
        self.summarize()
        return self._table.total_flops

    @property
    def total_training_modes(self) -> dict[str, int]:
        """Number of submodules in training and in evaluation mode."""
        return self._table.modes

    @property
    def total_parameters(self) -> int:
        """Number of parameter elements."""
        if self._table.is_lazy:
            rank_zero_warn(
                "The total number of parameters detected may be inaccurate because the model has lazy modules, whose "
                "parameters are there from their first forward on."
            )
        return self._table.parameters[0]

    @property
    def trainable_parameters(self) -> int:
        """Number of trainable parameter elements."""
        return self._table.parameters[1]

    @property
    def total_layer_params(self) -> int:
        """Sum of the parameter counts of all rows."""
        return sum(self.param_nums)

    @property
    def model_size(self) -> float:
        """Size of the parameters in megabytes (10^6 bytes)."""
        return self._table.megabytes

    def __str__(self) -> str:
        table = self._table
        totals = total_lines(*table.parameters, table.megabytes, table.modes, table.total_flops)
        return "\n".join([*table_lines(table.columns()), *totals])


def _trainer_of(model: nn.Module) -> Any:
    """Return the Trainer that runs a module, or None."""
    try:
        return model.trainer
    except (AttributeError, RuntimeError):
        return None


def summarize(lightning_module: nn.Module, max_depth: int = 1) -> ModelSummary:
    """Return the summary of a module."""
    return ModelSummary(lightning_module, max_depth)
