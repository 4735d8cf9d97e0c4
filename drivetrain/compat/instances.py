"""Classes of Lightning and Accelerate that `isinstance` finds in drivetrain's own objects."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any


class StandsFor(ABCMeta):
    """The metaclass of a class whose instances are also those of another one; subclasses are as usual."""

    original: type | None

    def __new__(
        mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], original: type | None = None
    ) -> StandsFor:
        return super().__new__(mcs, name, bases, namespace)

    def __init__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], original: type | None = None
    ) -> None:
        super().__init__(name, bases, namespace)
        cls.original = original

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or (cls.original is not None and isinstance(instance, cls.original))


class KindOfDevice(type):
    """The metaclass of kinds of devices: an engine that runs on one is an instance of its class."""

    kind: str

    def __instancecheck__(cls, instance: Any) -> bool:
        if super().__instancecheck__(instance):
            return True
        device = getattr(instance, "device", None)
        return "kind" in cls.__dict__ and getattr(device, "type", None) == cls.kind
