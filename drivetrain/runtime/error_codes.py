"""The causes of a `ConfigurationError`, by code: what `drivetrain explain` prints and the manual's page lists."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from drivetrain.runtime.errors import ConfigurationError

REGISTRY = Path(__file__).with_suffix(".yaml")

_LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")


@dataclass(frozen=True)
class Cause:
    """One cause of errors.

    Attributes:
        code: Its code, such as `"DT-012"`.
        title: The cause in a few words.
        raised: When errors with the code are raised; a sentence.
        example: A message, as raised.
        cause: What leads to it; Markdown.
        mend: What to do; Markdown.
    """

    code: str
    title: str
    raised: str
    example: str
    cause: str
    mend: str

    def as_text(self) -> str:
        """Compose what a terminal shows."""
        parts = [f"{self.code}: {self.title}", self.raised, f"Example:\n\n    {self.example}"]
        parts += [f"Cause: {_LINK.sub(_shown, self.cause)}", f"What to do: {_LINK.sub(_shown, self.mend)}"]
        return "\n\n".join(parts)

    def as_markdown(self) -> str:
        """Compose the section of the manual; its anchor is the code in lower case."""
        return (
            f"### {self.code}: {self.title} {{#{self.code.lower()}}}\n\n{self.raised}\n\n"
            f"```text\n{self.example}\n```\n\n**Cause.** {self.cause}\n\n**What to do.** {self.mend}\n"
        )


def _shown(link: re.Match[str]) -> str:
    return f'"{link[1]}" in the manual'


@cache
def causes() -> dict[str, Cause]:
    """Read all causes, by code, in the order of the codes."""
    entries = yaml.safe_load(REGISTRY.read_text(encoding="utf-8"))
    return {code: Cause(code, **fields) for code, fields in entries.items()}


def find_cause(given: str) -> Cause:
    """Return the cause with a code.

    Args:
        given: The code; `"dt-012"` and `"12"` are read, too.

    Raises:
        ConfigurationError: There is no such code.
    """
    code = given.upper().removeprefix("[").removesuffix("]").removesuffix(":")
    code = f"DT-{int(code):03}" if code.isascii() and code.isdigit() else code
    found = causes().get(code)
    if found is None:
        raise ConfigurationError(f"There is no error code {given!r}. `drivetrain explain` lists all.", code="DT-001")
    return found
