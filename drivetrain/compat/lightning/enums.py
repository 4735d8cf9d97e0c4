"""Enums whose members equal their text in any case."""

from __future__ import annotations

from enum import Enum
from typing import Any


class LightningEnum(str, Enum):
    """An enum of texts; a member equals its text in upper and in lower case."""

    @classmethod
    def from_str(cls, value: str, source: str = "key") -> LightningEnum | None:
        """The member of this name or value; None if there is none."""
        for member in cls:
            by_name = source in ("key", "any") and member.name.lower() == value.lower().replace("-", "_")
            if by_name or (source in ("value", "any") and member.value.lower() == value.lower()):
                return member
        return None

    def __eq__(self, other: Any) -> bool:
        text = other.value if isinstance(other, Enum) else other
        return isinstance(text, str) and self.value.lower() == text.lower()

    def __hash__(self) -> int:
        return hash(self.value.lower())

    def __str__(self) -> str:
        return str(self.value)


class GradClipAlgorithmType(LightningEnum):
    """How gradients are clipped."""

    VALUE = "value"
    NORM = "norm"

    @staticmethod
    def supported_type(value: str) -> bool:
        """Whether there is such a way."""
        return any(value == member for member in GradClipAlgorithmType)

    @staticmethod
    def supported_types() -> list[str]:
        """All ways."""
        return [member.value for member in GradClipAlgorithmType]
