"""Accelerate's three state classes, which extend drivetrain's by what Accelerate's scripts change."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain import accelerator as engine
from drivetrain.runtime import state as runtime
from drivetrain.runtime.collective_checks import CallComparison
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.process_group import DEFAULT_TIMEOUT, group_timeout
from drivetrain.runtime.state import DistributedType

if TYPE_CHECKING:
    from drivetrain.compat.accelerate.accelerator import Accelerator

DEVICE_VARIABLE = "ACCELERATE_TORCH_DEVICE"
_LATEST = "compat.accelerate"
_CHOSEN = "compat.accelerate.distributed_type"

__all__ = ["AcceleratorState", "GradientState", "PartialState", "is_initialized"]


def latest_accelerator() -> Accelerator | None:
    """Return the Accelerator that was created last in this process, or None if there is none or it was freed."""
    found: Accelerator | None = runtime.PartialState.registry().get(_LATEST, lambda: None)()
    return found


def latest_or_refused(name: str) -> Accelerator:
    """Return the Accelerator that was created last. Raise `ConfigurationError` if there is none."""
    found = latest_accelerator()
    if found is None:
        raise ConfigurationError(f"{name} is part of an Accelerator's loop: make an Accelerator first.")
    return found


def record_accelerator(accelerator: Accelerator) -> None:
    """Make an Accelerator the one that functions without an Accelerator argument use."""
    registry = runtime.PartialState.registry()
    registry[_LATEST] = weakref.ref(accelerator)  # must not keep the prepared models alive
    registry.pop(_CHOSEN, None)


def is_initialized() -> bool:
    """Return True if an Accelerator was created in this process."""
    return _LATEST in runtime.PartialState.registry()


class _Changeable(runtime.PartialState):
    """Process state whose distributed type and debug flag scripts can assign."""

    _shared_state: ClassVar[dict[str, Any]] = runtime.PartialState.registry()

    @property
    def distributed_type(self) -> DistributedType:
        """Distributed type of the run, or the value that the script assigned."""
        return self.registry().get(_CHOSEN) or super().distributed_type

    @distributed_type.setter
    def distributed_type(self, value: DistributedType) -> None:
        self.registry()[_CHOSEN] = value

    @property
    def debug(self) -> bool:
        """True if ranks compare their arguments before each collective. Assignable at any time."""
        return bool(self.__dict__.get("debug", False))

    @debug.setter
    def debug(self, value: bool) -> None:
        self.__dict__["debug"] = value
        store = self.store
        if value and store is not None and self.call_comparison is None:
            limit = group_timeout() or DEFAULT_TIMEOUT
            self.call_comparison = CallComparison(store, self.process_index, self.num_processes, limit)


class PartialState(_Changeable):
    """`drivetrain.PartialState` with the arguments of Accelerate's `PartialState`."""

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        known = {name: kwargs[name] for name in ("device", "backend", "timeout") if kwargs.get(name) is not None}
        if "environment" not in self.registry() and DEVICE_VARIABLE in os.environ:
            known.setdefault("device", os.environ[DEVICE_VARIABLE])
        super().__init__(cpu, **known)


class AcceleratorState(engine.AcceleratorState, _Changeable):
    """`drivetrain.AcceleratorState` whose attributes scripts can assign."""

    __slots__ = ()

    @property
    def distributed_type(self) -> DistributedType:
        """Distributed type of the run, or the value that the script assigned."""
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
        """Always False: Accelerate removed IPEX support too."""
        return False


class GradientState(engine.GradientState):
    """`drivetrain.accelerator.GradientState` with the attributes that only Accelerate's scripts use."""

    _shared_state: ClassVar[dict[str, Any]] = {}
    """Empty: each Accelerator has a state of its own, so there is nothing to clear."""

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Always True: gradients on XLA are reduced before the optimizer steps."""
        return True

    @is_xla_gradients_synced.setter
    def is_xla_gradients_synced(self, value: bool) -> None:
        """Ignore the value: gradients on XLA are always reduced before the optimizer steps."""
