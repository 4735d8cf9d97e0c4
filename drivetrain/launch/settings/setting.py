"""One setting of a launch: its flag, its key in a configuration file, its environment variables, and what it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.runtime.errors import ConfigurationError, nearest

_TRUTH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass(frozen=True)
class Setting:
    """One setting.

    Args:
        name: Its name: the flag is `--name`, the key in a file `name`.
        help: What it does, in a sentence or two.
        kind: What it takes: `"switch"` (a flag without a value), `"bool"`, `"int"`, `"float"`, `"text"`, `"choice"`,
            `"words"` (several, by commas) or `"bools"` (three of them, by commas).
        section: Heading in the help.
        group: The mapping of the file that it is in, such as `"fsdp_config"`; empty at the top.
        keys: Further spellings of the key in a file.
        flags: Further spellings of the flag, with their dashes.
        shown: The flag as messages name it; `--name` if empty.
        choices: What a `"choice"` may be.
        metavar: How the help writes the value.
        least: The smallest number allowed.
        auto: Whether `"auto"` stands for not given.
        variable: Environment variable through which it reaches the processes; None where it concerns the launcher.
        theirs: Variable through which Accelerate's launcher passes it.
        inert: Why it changes nothing here; such a setting is accepted and not passed on.
        refused: Why a value that asks for something cannot be, and what to do.
        of_launcher: Whether the variable is one of the launcher's own, which the processes do not read.
    """

    name: str
    help: str
    kind: str = "text"
    section: str = ""
    group: str = ""
    keys: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    shown: str = ""
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    least: float | None = None
    auto: bool = False
    variable: str | None = None
    theirs: str | None = None
    inert: str = ""
    refused: str = ""
    of_launcher: bool = False

    @property
    def flag(self) -> str:
        """The flag as messages name it."""
        return self.shown or f"--{self.name}"

    def parse(self, value: Any, where: str) -> Any:
        """Check a value and bring it to its type.

        Args:
            value: As a flag, a file or a variable gives it; None is not given.
            where: How the message names the place, such as `"--fsdp_version"`.

        Returns:
            The value; None where it stands for not given.

        Raises:
            ConfigurationError: It cannot be.
        """
        if value is None or (self.auto and str(value).strip().lower() in ("auto", "none", "")):
            return None
        if isinstance(value, str):
            value = value.strip()
            if value == "" and self.kind != "text":
                return None
        parsed = getattr(self, f"_{self.kind}")(value, where)
        if self.refused and parsed and str(parsed).lower() not in ("no", "none"):
            raise ConfigurationError(f"{where}: {self.refused}", code="DT-008")  # without the value: it may be a secret
        return parsed

    def text(self, value: Any) -> str:
        """A value as an environment variable holds it."""
        if isinstance(value, bool):
            return "1" if value and self.kind == "switch" else "true" if value else "false"
        if isinstance(value, list | tuple):
            return ",".join(self.text(each) for each in value)
        return str(value)

    def _refuse(self, value: Any, where: str, allowed: str) -> ConfigurationError:
        return ConfigurationError(f"{where}={value!r}: give {allowed}.", code="DT-001")

    def _bool(self, value: Any, where: str) -> bool:
        known = _TRUTH.get(str(value).lower()) if isinstance(value, bool | int | str) else None
        if known is None:
            raise self._refuse(value, where, "true or false")
        return known

    _switch = _bool

    def _int(self, value: Any, where: str) -> int:
        try:
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise ValueError
            number = int(value) if not isinstance(value, str) or "e" not in value.lower() else int(float(value))
            if isinstance(value, float) and number != value:
                raise ValueError
        except (ValueError, OverflowError):
            raise self._refuse(value, where, f"a whole number{self._bound()}") from None
        return int(self._bounded(number, value, where))

    def _float(self, value: Any, where: str) -> float:
        try:
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise ValueError
            number = float(value)
            if number != number or number in (float("inf"), float("-inf")):
                raise ValueError
        except (ValueError, OverflowError):
            raise self._refuse(value, where, f"a number{self._bound()}") from None
        return self._bounded(number, value, where)

    def _bound(self) -> str:
        return "" if self.least is None else f" of at least {self.least:g}"

    def _bounded(self, number: float, value: Any, where: str) -> float:
        if self.least is not None and number < self.least:
            raise self._refuse(value, where, f"a number{self._bound()}")
        return number

    def _text(self, value: Any, where: str) -> str:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self._refuse(value, where, "a text")
        return _printable(str(value), where)

    def _choice(self, value: Any, where: str) -> str:
        if isinstance(value, bool):  # YAML reads a bare `no` as false
            named = ("true" if value else "false") if "true" in self.choices else "no" if not value else "yes"
        elif isinstance(value, str | int):
            named = str(value)
        else:
            raise self._refuse(value, where, f"one of {', '.join(self.choices)}")
        spelled = {choice.lower(): choice for choice in self.choices}
        if named.isdigit() and named not in spelled and 1 <= int(named) <= len(self.choices):
            return self.choices[int(named) - 1]  # its number, as older files have it
        if named.lower() not in spelled:
            raise ConfigurationError(
                f"{where} is {_short(value)}, but must be one of {', '.join(self.choices)}."
                f"{nearest(named.lower(), spelled)}",
                code="DT-001",
            )
        return spelled[named.lower()]

    def _words(self, value: Any, where: str) -> list[str]:
        if isinstance(value, str):
            value = value.split(",")
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
            raise self._refuse(value, where, "a list of words, or one text with commas")
        return [_printable(each.strip(), where) for each in value if each.strip()]

    def _bools(self, value: Any, where: str) -> list[bool]:
        if isinstance(value, str):
            value = [each.strip() for each in value.strip("()[]").split(",")]
        if isinstance(value, bool):
            value = [value] * 3
        if not isinstance(value, list | tuple) or len(value) != 3:
            raise self._refuse(value, where, "three values of true or false, such as [false, false, false]")
        return [self._bool(each, where) for each in value]


@dataclass(frozen=True)
class Group:
    """Settings that belong together: a mapping of the file.

    Args:
        name: Its key in the file.
        prefix: What the names of its settings begin with, which a file may leave out.
        settings: Its settings.
        switch: The switch at the top without which they have no effect; empty where there is none.
        also: Settings of the top that a file may give here.
    """

    name: str
    prefix: str
    settings: tuple[Setting, ...]
    switch: str = ""
    also: tuple[Setting, ...] = ()

    def keys(self) -> Mapping[str, Setting]:
        """Each setting by every key that a file may give it."""
        found: dict[str, Setting] = {}
        for setting in (*self.settings, *self.also):
            for key in (setting.name, *setting.keys):
                found[key] = setting
                if self.prefix and key.startswith(self.prefix):
                    found.setdefault(key.removeprefix(self.prefix), setting)
        return found


def _printable(text: str, where: str) -> str:
    if "\0" in text:
        raise ConfigurationError(
            f"{where} holds a zero byte, which no environment variable can hold. Remove it.", code="DT-007"
        )
    return text


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
