"""Accelerate's words for how prepared models are compiled."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from drivetrain.accelerator.compilation import Compilation
from drivetrain.runtime.errors import ConfigurationError, nearest


class DynamoBackend(str, Enum):
    """Backends of `torch.compile`, in Accelerate's words."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


@dataclass
class TorchDynamoPlugin:
    """How prepared models are compiled.

    A model is compiled in place (`nn.Module.compile`), so its parameters keep their names and every strategy takes it.

    Attributes:
        backend: A member of `DynamoBackend`, its name, or any other backend that `torch.compile` takes;
            none if None.
        mode: The `mode` of `torch.compile`.
        fullgraph: Whether a break in the graph is an error.
        dynamic: Whether shapes are dynamic.
        options: Options of the backend.
        disable: Compile nothing.
        use_regional_compilation: Compile each block of the model's lists of blocks, rather than the whole: much quicker
            to compile where blocks are alike.

    Raises:
        ConfigurationError: The backend has an unknown name.
    """

    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        given = self.backend or "NO"
        if isinstance(given, str) and not isinstance(given, DynamoBackend):
            known = DynamoBackend.__members__.get(given.upper())
            if known is None and given not in _registered():
                names = [*(name.lower() for name in DynamoBackend.__members__), *_registered()]
                raise ConfigurationError(
                    f"Unknown dynamo_backend {given!r}. Allowed: {', '.join(names)}.{nearest(given, names)}",
                    code="DT-001",
                )
            given = known or given
        self.backend = given

    def compilation(self) -> Compilation | None:
        """What compiles prepared models; None where nothing does."""
        if self.backend is DynamoBackend.NO or self.disable:
            return None
        return Compilation(
            str(self.to_dict()["backend"]),
            self.mode,
            bool(self.fullgraph),
            self.dynamic,
            bool(self.use_regional_compilation),
            self.options,
        )

    def to_dict(self) -> dict[str, Any]:
        """The options, the backend by its lower-case name."""
        backend = self.backend.value.lower() if isinstance(self.backend, DynamoBackend) else self.backend
        return {**vars(self), "backend": backend}

    to_kwargs = to_dict


def make_dynamo_plugin(
    backend: DynamoBackend | str | None, plugin: TorchDynamoPlugin | None
) -> TorchDynamoPlugin | None:
    """How prepared models are compiled, as a script asks for it; None where it does not.

    Raises:
        ConfigurationError: A backend and a plugin were given both.
    """
    if backend is not None and plugin is not None:
        raise ConfigurationError("dynamo_backend and dynamo_plugin are given both; give one.", code="DT-004")
    return plugin if backend is None else TorchDynamoPlugin(backend)


def _registered() -> list[str]:
    return [*torch.compiler.list_backends(exclude_tags=()), "inductor"]
