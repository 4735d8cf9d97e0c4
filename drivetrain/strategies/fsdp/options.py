"""The options of `FSDP`, checked."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from drivetrain.runtime.errors import ConfigurationError, nearest

_INITS = ("rank0", "meta")


@dataclass(frozen=True)
class FSDPOptions:
    """What `FSDP` was asked for; see there.

    Raises:
        ConfigurationError: An option cannot be.
    """

    wrap: Any = "auto"
    reshard_after_forward: bool | int | None = None
    replicate_size: int = 1
    cpu_offload: bool = False
    activation_checkpointing: Any = False
    activation_offload: bool = False
    ignored_modules: tuple[nn.Module | str, ...] = ()
    gather_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    init: str = "rank0"
    weights: str | os.PathLike[str] | None = None
    sync_module_states: bool = True
    compile: bool | dict[str, Any] = False
    sync_each_batch: bool = False
    reduce_unused: bool = False
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    forward_methods: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("replicate_size", 1), ("forward_prefetch", 0), ("backward_prefetch", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigurationError(
                    f"{name} must be a whole number of at least {least}, got {value!r}.", code="DT-002"
                )
        if self.init not in _INITS:
            raise ConfigurationError(
                f"init must be one of {', '.join(map(repr, _INITS))}, got {self.init!r}.{nearest(self.init, _INITS)}",
                code="DT-001",
            )
        resharding = self.reshard_after_forward
        if resharding is not None and not isinstance(resharding, int):
            raise ConfigurationError(
                f"reshard_after_forward must be True, False, None or a number of processes, got {resharding!r}.",
                code="DT-003",
            )
        if self.activation_offload and self.activation_checkpointing is False:
            raise ConfigurationError(
                "activation_offload=True keeps what goes into recomputed blocks on the CPU, so it needs "
                "activation_checkpointing.",
                code="DT-005",
            )
        if not isinstance(self.compile, bool | dict):
            raise ConfigurationError(
                f"compile must be True, False or a dict of options, got {self.compile!r}.", code="DT-003"
            )

    def compile_options(self) -> dict[str, Any]:
        """Arguments of `torch.compile`."""
        return dict(self.compile) if isinstance(self.compile, dict) else {}

    def changed(self) -> str:
        """The options that are not as by default, as they would be written."""
        return ", ".join(
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        )
