"""Metaclasses that make drivetrain's objects instances of Lightning's and Accelerate's classes."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any


class StandsFor(ABCMeta):
    """Metaclass that makes another class's instances pass `isinstance`. Subclasses behave as usual."""

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
    """Metaclass of accelerator classes: an Accelerator on that device type passes `isinstance`."""

    kind: str

    def __instancecheck__(cls, instance: Any) -> bool:
        if super().__instancecheck__(instance):
            return True
        device = getattr(instance, "device", None)
        return "kind" in cls.__dict__ and getattr(device, "type", None) == cls.kind
