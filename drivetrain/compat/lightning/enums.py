"""String enums that compare without regard to case."""

from __future__ import annotations

from enum import Enum
from typing import Any


class LightningEnum(str, Enum):
    """String enum whose members equal their value in any case."""

    @classmethod
    def from_str(cls, value: str, source: str = "key") -> LightningEnum | None:
        """Return the member with this name or value, or None if there is none."""
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
    """Algorithm of gradient clipping: by norm or by value."""

    VALUE = "value"
    NORM = "norm"

    @staticmethod
    def supported_type(value: str) -> bool:
        """Return True if there is an algorithm of this name."""
        return any(value == member for member in GradClipAlgorithmType)

    @staticmethod
    def supported_types() -> list[str]:
        """Return the names of all algorithms."""
        return [member.value for member in GradClipAlgorithmType]
