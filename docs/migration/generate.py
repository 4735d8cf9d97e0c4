"""Each public name of Accelerate and of Lightning and its counterpart here: writes the pages *-names.md.

    python docs/migration/generate.py            # writes the pages; fails on a gap that nothing explains
    python docs/migration/generate.py --check    # fails where a page is not what would be written

The names are those of accelerate_names.json and lightning_names.json, which `record.py` writes. A name, a member, an
argument or a flag that is there under the same name is found by itself; explanations.yaml and
lightning_explanations.yaml state the rest; accelerate_head.txt and lightning_head.txt are what the pages begin with.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from drivetrain.compat.handed_on import import_module

FOLDER = Path(__file__).parent

SAME, BETTER, NO_EFFECT, OTHER_NAME = "same", "better", "no effect", "other name"
LEFT_OUT, MISSING = "left out", "missing"
OF_WHAT_IS_THERE = (BETTER, NO_EFFECT)
VERDICTS = {
    SAME: "available under the same name, with the same arguments",
    BETTER: "available under the same name, improved",
    NO_EFFECT: "accepted, without effect",
    OTHER_NAME: "available under another name",
    LEFT_OUT: "left out on purpose",
    MISSING: "not available yet",
}
# Rooms whose public names count beside those of `drivetrain` itself.
ROOMS = (
    "drivetrain",
    "drivetrain.runtime.pytrees",
    "drivetrain.runtime.collectives",
    "drivetrain.runtime.seeds",
    "drivetrain.runtime.state",
    "drivetrain.data",
    "drivetrain.trackers",
    "drivetrain.launch",
    "drivetrain.accelerator",
)


@dataclass(frozen=True)
class Framework:
    """Another framework, whose names are compared with ours.

    Attributes:
        package: Its package.
        head: The beginning of its page.
        rooms: Whose public names count beside those of its mirror.
        explanations: The table of what is not simply there.
        page: What is written.
        names: What `record.py` has recorded.
    """

    package: str
    head: str
    rooms: tuple[str, ...]
    explanations: Path
    page: Path
    names: Path

    @property
    def mirror(self) -> str:
        """The package that has its paths and names."""
        return f"drivetrain.compat.{self.package}"


@dataclass(frozen=True)
class Entry:
    """One name of theirs, and what became of it.

    Attributes:
        id: Such as `accelerate.Accelerator.backward(loss)`, or `launch --cpu`.
        owner: The class, function or command that it is listed under.
        verdict: One of `VERDICTS`.
        ours: Where it is.
        why: What differs, or why it is not there.
    """

    id: str
    owner: str
    verdict: str
    ours: str = ""
    why: str = ""


class Explanations:
    """The table of what is not simply the same.

    Args:
        entries: Items with `names` (patterns), `verdict`, and `ours` or `why`.
    """

    def __init__(self, entries: list[dict[str, Any]]) -> None:
        self.entries = entries
        for entry in entries:
            if entry["verdict"] not in VERDICTS or not (entry.get("why") or entry.get("ours")):
                raise ValueError(f"{entry}: give one of {', '.join(VERDICTS)} as its verdict, and ours or why.")

    def of(self, name: str) -> dict[str, Any] | None:
        """The first entry whose patterns match."""
        # Patterns are those of a shell, but for brackets and parentheses, which names have.
        return next((each for each in self.entries if any(fnmatchcase(name, one) for one in each["names"])), None)


class Comparison:
    """Theirs beside ours.

    Args:
        recorded: What `record.py` wrote.
        explanations: The table.
        framework: Whose they are.
    """

    def __init__(self, recorded: dict[str, Any], explanations: Explanations, framework: Framework) -> None:
        self.recorded, self.explanations, self.framework = recorded, explanations, framework

    def entries(self) -> Iterator[Entry]:
        """Every name, member, argument and flag."""
        for module, names in self.recorded["modules"].items():
            for name, described in names.items():
                yield from self._of_name(module, name, described)
        for command, flags in self.recorded["commands"].items():
            yield self._judge(f"drivetrain {command}", f"drivetrain {command}", has_command(command))
            for flag in flags:
                yield self._judge(f"{command} {flag}", f"drivetrain {command}", has_flag(command, flag))

    def _of_name(self, module: str, name: str, described: dict[str, Any]) -> Iterator[Entry]:
        path = f"{module}.{name}"
        place, found = counterpart(self.framework, module, name)
        owner = path if found is not None and described["kind"] in ("class", "enum") else module
        yield self._judge(path, owner, found is not None, place)
        if found is None or described["kind"] in ("again", "value"):
            return  # the parts of what is not there are not there either
        for argument in described.get("arguments") or ():
            yield self._judge(f"{path}({argument})", owner, argument in arguments_of(found), place)
        for member, arguments in (described.get("members") or {}).items():
            there = has_member(found, member)
            yield self._judge(f"{path}.{member}", owner, there, place)
            if there and arguments:
                ours = arguments_of(getattr(found, member, None))
                for argument in arguments:
                    yield self._judge(f"{path}.{member}({argument})", owner, argument in ours, place)

    def _judge(self, name: str, owner: str, there: bool, place: str = "") -> Entry:
        explained = self.explanations.of(name)
        if there:
            stated = explained if explained and explained["verdict"] in OF_WHAT_IS_THERE else {"verdict": SAME}
            return Entry(name, owner, stated["verdict"], place, stated.get("why", ""))
        if explained is None or explained["verdict"] in OF_WHAT_IS_THERE:
            return Entry(name, owner, "")
        return Entry(name, owner, explained["verdict"], explained.get("ours", ""), explained.get("why", ""))


# Ours


@cache
def module_or_none(path: str) -> Any:
    try:
        return import_module(path) if path.startswith("drivetrain.compat.") else importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name and path.startswith(error.name):
            return None
        raise


def counterpart(framework: Framework, module: str, name: str) -> tuple[str, Any]:
    """Where a name of theirs is here, and what it is; an empty place and None if it is not there."""
    mirrored = framework.mirror + module.removeprefix(framework.package)
    for path in (*framework.rooms, mirrored):
        room = module_or_none(path)
        if room is None:
            continue
        public = getattr(room, "__all__", None)
        if path != mirrored and public is not None and name not in public:
            continue
        found = getattr(room, name, None)
        if found is not None and not inspect.ismodule(found) and not is_stand_in(found):
            return f"{path}.{name}", found
    return "", None


def is_stand_in(found: Any) -> bool:
    """Whether a name can be imported only, and raises when it is called."""
    return inspect.isclass(found) and (found.__doc__ or "").startswith("Not in drivetrain.")


@cache
def arguments_of(function: Any) -> frozenset[str]:
    """Names that a callable takes; those of a dataclass are its fields, and what a class hands on its base's."""
    if dataclasses.is_dataclass(function):
        return frozenset(field.name for field in dataclasses.fields(function) if field.init)
    if inspect.isclass(function) and function.__module__.startswith("drivetrain.compat.lightning"):
        names: set[str] = set()
        for base in (each for each in function.__mro__ if "__init__" in vars(each)):
            parameters = inspect.signature(base.__init__).parameters
            names.update(parameters)
            if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
                break
        return frozenset(names)
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()


def source_of(kind: type) -> str:
    """The source of a class; empty for one that a function makes."""
    try:
        return inspect.getsource(kind)
    except OSError:
        return ""


@cache
def attributes_set(kind: type) -> frozenset[str]:
    """Names that a class's own methods set on its instances."""
    sources = [source_of(base) for base in kind.__mro__ if base.__module__.startswith("drivetrain")]
    return frozenset(re.findall(r"self\.([a-z]\w*)(?:,| =|: [^=\n]+ =)", "\n".join(sources)))


def has_member(kind: Any, name: str) -> bool:
    if hasattr(kind, name):
        return True
    if inspect.isclass(kind) and issubclass(kind, enum.Enum):
        return name in kind.__members__
    return inspect.isclass(kind) and (name in arguments_of(kind) or name in attributes_set(kind))


@cache
def command_options(command: str) -> frozenset[str] | None:
    """The flags of a command of ours, with underscores; None if there is no such command."""
    from drivetrain.cli.main import cli

    found = cli.get_command(None, command)
    if found is None:
        return None
    return frozenset("--" + option.lstrip("-").replace("-", "_") for each in found.params for option in each.opts)


def has_command(command: str) -> bool:
    return command_options(command) is not None


def has_flag(command: str, flag: str) -> bool:
    return flag in (command_options(command) or ())


# The page


def written(entries: list[Entry], version: str, framework: Framework) -> str:
    """The page."""
    counts = Counter(entry.verdict for entry in entries)
    lines = [framework.head.replace("{version}", version), "| | names |", "|---|---:|"]
    lines += [f"| {text} | {counts[verdict]} |" for verdict, text in VERDICTS.items()]
    lines += [f"| **all** | {len(entries)} |", ""]
    owners: dict[str, list[Entry]] = {}
    for entry in entries:
        owners.setdefault(entry.owner, []).append(entry)
    for owner, listed in owners.items():
        lines += section(owner, listed, framework.mirror)
    return "\n".join(lines).rstrip("\n") + "\n"


def section(owner: str, entries: list[Entry], mirror: str) -> list[str]:
    """What belongs to one class, module or command: a list of what is the same, and a table of the rest."""
    lines = [f"## `{owner}`", ""]
    for package, is_mirrored in (("drivetrain", False), (mirror, True)):
        same = [entry for entry in entries if entry.verdict == SAME and entry.ours.startswith(mirror) is is_mirrored]
        if same:
            lines += [
                f"You can keep these as they are. They come from `{package}`:",
                "",
                '<div class="columns" markdown>',
            ]
            lines += [f"- {name}" for name in names_of(same, owner)] + ["</div>", ""]
    rest: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        if entry.verdict != SAME:
            rest.setdefault((entry.verdict, note(entry)), []).append(entry)
    if rest:
        lines += ["| name | | |", "|---|---|---|"]
        lines += [f"| {listed(found, owner)} | {verdict} | {text} |" for (verdict, text), found in rest.items()] + [""]
    return lines


def listed(entries: list[Entry], owner: str) -> str:
    """Their names, as one text. See `names_of`."""
    return ", ".join(names_of(entries, owner))


def names_of(entries: list[Entry], owner: str) -> list[str]:
    """Their names without what the heading has, arguments of one callable together: `reduce(tensor, scale)`."""
    arguments: dict[str, list[str]] = {}
    for entry in entries:
        name, _, argument = entry.id.partition("(")
        arguments.setdefault(name, []).extend([argument.rstrip(")")] if argument else [])
    heads = (owner.removeprefix("drivetrain ") + " ", owner + ".")
    names = []
    for name, given in arguments.items():
        short = owner.rpartition(".")[2] if name == owner else name
        for head in heads:
            short = short.removeprefix(head)
        names.append(f"`{short}({', '.join(given)})`" if given else f"`{short}`")
    return names


def note(entry: Entry) -> str:
    parts = [f"`{entry.ours}`" if entry.verdict == OTHER_NAME and entry.ours else "", entry.why]
    return ". ".join(part for part in parts if part).replace("|", "\\|")


FRAMEWORKS = {
    "accelerate": Framework(
        "accelerate",
        (FOLDER / "accelerate_head.txt").read_text(),
        ROOMS,
        FOLDER / "explanations.yaml",
        FOLDER / "accelerate-names.md",
        FOLDER / "accelerate_names.json",
    ),
    "lightning": Framework(
        "lightning",
        (FOLDER / "lightning_head.txt").read_text(),
        (),
        FOLDER / "lightning_explanations.yaml",
        FOLDER / "lightning-names.md",
        FOLDER / "lightning_names.json",
    ),
}


def compare(framework: Framework) -> tuple[list[Entry], str]:
    """All entries, and the framework's version."""
    recorded = json.loads(framework.names.read_text())
    explanations = Explanations(yaml.safe_load(framework.explanations.read_text()))
    comparison = Comparison(recorded, explanations, framework)
    return list(comparison.entries()), recorded["version"]


def unexplained(entries: list[Entry]) -> list[str]:
    return [entry.id for entry in entries if not entry.verdict]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the pages with the names of Accelerate and of Lightning.")
    parser.add_argument("--check", action="store_true", help="Write nothing; fail where a page is not up to date.")
    is_check = parser.parse_args().check
    for framework in FRAMEWORKS.values():
        make_page(framework, is_check)


def make_page(framework: Framework, is_check: bool) -> None:
    """Write a framework's page, or check it; leave with an error on a gap that nothing explains."""
    entries, version = compare(framework)
    gaps = unexplained(entries)
    if gaps:
        sys.exit(f"Not here, and not in {framework.explanations.name}:\n  " + "\n  ".join(gaps))
    page = written(entries, version, framework)
    if is_check and framework.page.read_text() != page:
        sys.exit(f"{framework.page} is not up to date: run python docs/migration/generate.py.")
    if not is_check:
        framework.page.write_text(page)
        counts = Counter(entry.verdict for entry in entries)
        print(f"wrote {framework.page}: " + ", ".join(f"{count} {name}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
