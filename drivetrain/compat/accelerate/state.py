"""Accelerate's three shared states: drivetrain's, with what only Accelerate's scripts do to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain import accelerator as engine
from drivetrain.runtime import state as runtime
from drivetrain.runtime.collective_checks import CallComparison
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.process_group import DEFAULT_TIMEOUT, group_timeout
from drivetrain.runtime.state import DistributedType

if TYPE_CHECKING:
    from drivetrain.compat.accelerate.accelerator import Accelerator

_LATEST = "compat.accelerate"
_CHOSEN = "compat.accelerate.distributed_type"

__all__ = ["AcceleratorState", "GradientState", "PartialState", "is_initialized"]


def latest_accelerator() -> Accelerator | None:
    """The Accelerator that was made last in this process."""
    return runtime.PartialState.registry().get(_LATEST)


def latest_or_refused(name: str) -> Accelerator:
    """Return the Accelerator that was made last in this process."""
    found = latest_accelerator()
    if found is None:
        raise ConfigurationError(f"{name} is part of an Accelerator's loop: make an Accelerator first.")
    return found


def record_accelerator(accelerator: Accelerator) -> None:
    """Let the functions that work without an Accelerator use this one."""
    registry = runtime.PartialState.registry()
    registry[_LATEST] = accelerator
    registry.pop(_CHOSEN, None)


def is_initialized() -> bool:
    """Whether an Accelerator was made in this process."""
    return latest_accelerator() is not None


class _Changeable(runtime.PartialState):
    """The state of this process, in which scripts change what is fixed otherwise."""

    _shared_state: ClassVar[dict[str, Any]] = runtime.PartialState.registry()

    @property
    def distributed_type(self) -> DistributedType:
        """How the run is spread, or what a script has put in its place."""
        return self.registry().get(_CHOSEN) or super().distributed_type

    @distributed_type.setter
    def distributed_type(self, value: DistributedType) -> None:
        self.registry()[_CHOSEN] = value

    @property
    def debug(self) -> bool:
        """Whether the processes compare their calls before each collective; may be switched on at any time."""
        return bool(self.__dict__.get("debug", False))

    @debug.setter
    def debug(self, value: bool) -> None:
        self.__dict__["debug"] = value
        store = self.store
        if value and store is not None and self.call_comparison is None:
            limit = group_timeout() or DEFAULT_TIMEOUT
            self.call_comparison = CallComparison(store, self.process_index, self.num_processes, limit)


class PartialState(_Changeable):
    """`drivetrain.PartialState` with the arguments that only Accelerate's takes."""

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        known = {name: kwargs[name] for name in ("device", "backend", "timeout") if kwargs.get(name) is not None}
        super().__init__(cpu, **known)


class AcceleratorState(engine.AcceleratorState, _Changeable):
    """`drivetrain.AcceleratorState`, in which scripts change what is fixed otherwise."""

    __slots__ = ()

    @property
    def distributed_type(self) -> DistributedType:
        """How the run is spread, or what a script has put in its place."""
        chosen: DistributedType | None = self.registry().get(_CHOSEN)
        return chosen or self.record.distributed_type or super().distributed_type

    @distributed_type.setter
    def distributed_type(self, value: DistributedType) -> None:
        self.registry()[_CHOSEN] = value

    @property
    def _mixed_precision(self) -> str:
        return self.mixed_precision

    @property
    def _cpu(self) -> bool:
        return self.kind.name == "cpu"

    @property
    def use_ipex(self) -> bool:
        """False: Accelerate has dropped it too."""
        return False


class GradientState(engine.GradientState):
    """`drivetrain.accelerator.GradientState` with what only Accelerate's scripts do to it."""

    _shared_state: ClassVar[dict[str, Any]] = {}
    """Empty: each Accelerator has a state of its own, so there is nothing to clear."""

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Whether an XLA optimizer's step need not reduce gradients: they are when it is called."""
        return True

    @is_xla_gradients_synced.setter
    def is_xla_gradients_synced(self, value: bool) -> None:
        """Accepted: gradients are reduced when the optimizer steps."""
