"""Compiling prepared models with torch.compile, in place: no wrapper, and no new names in their state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies import StepModule


@dataclass(frozen=True)
class Compilation:
    """How models are compiled.

    Args:
        backend: Of torch.compile, such as `"inductor"`.
        mode: Of torch.compile; None is the default.
        fullgraph: Whether a model that is not one graph is refused.
        dynamic: Whether shapes are expected to change; None finds out.
        regional: Whether repeated blocks are compiled, each kind once, in place of the whole model.
        options: Of the backend.

    Raises:
        ConfigurationError: A backend that torch does not have.
    """

    backend: str
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    regional: bool = False
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        import torch

        from_torch = [*torch.compiler.list_backends(exclude_tags=()), "inductor"]
        if self.backend not in from_torch:
            raise ConfigurationError(
                f"dynamo_backend is {self.backend!r}, which torch {torch.__version__} does not have. It has: "
                f"{', '.join(sorted({*from_torch}))}."
            )

    def apply(self, model: nn.Module) -> None:
        """Compile a model in place; of a Trainer's task, each of its modules. What is compiled already stays so."""
        whole = list(model.task.children()) if isinstance(model, StepModule) else [model]
        for part in whole:
            for module in self._regions(part) if self.regional else [part]:
                if getattr(module, "_compiled_call_impl", None) is None:
                    module.compile(**self._options())

    def _regions(self, model: nn.Module) -> list[nn.Module]:
        """The blocks of a model that are there several times; the model where there are none."""
        found: list[nn.Module] = []
        for module in model.modules():
            if isinstance(module, nn.ModuleList | nn.Sequential):
                kinds = Counter(type(child) for child in module)
                found += [child for child in module if kinds[type(child)] > 1 and any(True for _ in child.parameters())]
        inner = {id(part) for block in found for part in block.modules() if part is not block}
        return [block for block in found if id(block) not in inner] or [model]

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"backend": self.backend, "fullgraph": self.fullgraph, "dynamic": self.dynamic}
        if self.options:
            options["options"] = dict(self.options)
        # Torch takes a mode for inductor only.
        return {**options, "mode": self.mode} if self.mode not in (None, "default") else options
