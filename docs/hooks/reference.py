"""Write the pages of the reference that hold classes and functions, from the names that `drivetrain` makes public.

The pages exist only while the documentation is built, so a name that becomes public is documented at once. A class
shows its own members, and those of its bases that have no entry of their own; `internal_members.yaml` lists what
is left out.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from public_api import INTERNAL, PACKAGE, inherited, package, public_names

# Where a search finds a guide and an entry of the reference, the guide comes first.
BOOST = 0.3


@dataclass(frozen=True)
class Topic:
    """One page of classes and functions.

    Args:
        title: Its heading, and its entry in the navigation.
        room: The room of the package whose names are here, but for those that another page lists.
        names: The names that are here wherever they are defined, in this order.
        introduction: What the page begins with; if empty, the room's own docstring.
    """

    title: str
    room: str = ""
    names: tuple[str, ...] = ()
    introduction: str = ""


TOPICS = {
    "trainer": Topic("Trainer", "trainer", ("Trainer",), "Runs a task: `fit`, `validate`, `test` and `predict`."),
    "task": Topic("Task", names=("Task", "MegatronTask"), introduction="A model with how it is trained and used."),
    "data-module": Topic("DataModule", names=("DataModule",), introduction="Loaders, and what prepares them."),
    "callback": Topic("Callback", names=("Callback",), introduction="The base class of all callbacks."),
    "callbacks": Topic("Callbacks", "callbacks", introduction="The callbacks that drivetrain brings."),
    "tuning": Topic(
        "Tuning, timing and profilers",
        names=(
            *("Tuner", "LRFinder", "LearningRateFinder", "BatchSizeFinder", "Timing", "Profiler"),
            *("SimpleProfiler", "AdvancedProfiler", "PyTorchProfiler", "XLAProfiler", "PassThroughProfiler"),
        ),
        introduction="Learning rates and batch sizes found by trial, and where a run spends its time.",
    ),
    "trainer-cli": Topic(
        "TrainerCLI",
        names=("TrainerCLI", "TrainerArgumentParser", "SaveConfigCallback"),
        introduction="Command lines of training scripts, made from the signatures of their classes.",
    ),
    "accelerator": Topic(
        "Accelerator", names=("Accelerator",), introduction="The raw engine: it prepares what a loop of your own runs."
    ),
    "plugins": Topic(
        "Plugins and state of the Accelerator", "accelerator", introduction="Options of the Accelerator, by topic."
    ),
    "strategies": Topic("Strategies and precision", "strategies"),
    "data": Topic("Data", "data"),
    "checkpoint": Topic("Checkpoints", "checkpoint"),
    "trackers": Topic("Trackers", "trackers"),
    "launch": Topic("Launching from Python", "launch"),
    "inference": Topic("Big models", "inference"),
    "verification": Topic(
        "Verification",
        "verification",
        introduction="Checks that a script trains the same on several processes as on one.",
    ),
    "planning": Topic(
        "Planning",
        "planning",
        introduction="Predictions of which strategy fits a model on given devices, and how fast it trains.",
    ),
    "runtime": Topic("Distributed utilities", "runtime"),
}

# Pages that are written, with tables that tables.py fills in.
WRITTEN = {
    "hooks": "Hooks in calling order",
    "command-line": "Command line",
    "configuration": "Configuration file",
    "environment-variables": "Environment variables",
    "extras": "Extras",
    "exit-codes": "Errors and exit codes",
}

SECTIONS = {
    "Trainer": ("trainer", "task", "data-module", "hooks", "callback", "callbacks", "tuning", "trainer-cli"),
    "Accelerator": ("accelerator", "plugins"),
    "Components": (
        *("strategies", "data", "checkpoint", "trackers", "launch", "inference"),
        *("verification", "planning", "runtime"),
    ),
    "Command line and settings": ("command-line", "configuration", "environment-variables", "extras", "exit-codes"),
}


def names_by_page() -> dict[str, list[str]]:
    """The public names of each page, in its order."""
    rooms = public_names()
    by_last = {path.rpartition(".")[2]: path for path in rooms}
    found = {page: [by_last[name] for name in topic.names] for page, topic in TOPICS.items()}
    listed = {path for paths in found.values() for path in paths}
    page_of_room = {topic.room: page for page, topic in TOPICS.items() if topic.room}
    for path, room in rooms.items():
        if path not in listed:
            found[page_of_room[room]].append(path)
    return found


def page_of(page: str, names: list[str]) -> str:
    """Compose a page: what it is about, and the entries of its names."""
    topic = TOPICS[page]
    source = PACKAGE / topic.room / "__init__.py"
    introduction = topic.introduction or ast.get_docstring(ast.parse(source.read_text())) or ""
    entries = [entry(name) for name in names]
    if page == "trainer":
        entries.insert(1, options_as_attributes())
    return "\n\n".join([f"# {topic.title}", introduction, *entries, ""])


def entry(path: str) -> str:
    """Compose the directive for a public name."""
    options: dict[str, object] = {}
    if members := inherited(path):
        options["inherited_members"] = members
    if internal := INTERNAL.get(path.rpartition(".")[2]):
        options["filters"] = ["!^_", f"!^({'|'.join(internal)})$"]
    written = yaml.safe_dump({"options": options}, width=10_000) if options else ""
    return "\n".join([f"::: {path}", *(f"    {line}" for line in written.splitlines())])


def options_as_attributes() -> str:
    """The table of those of the Trainer's arguments that are attributes too."""
    tree = ast.parse((PACKAGE / "trainer" / "options.py").read_text())
    [holder] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "OptionAttributes"]
    rows = []
    for node in holder.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            assert isinstance(node.value.func, ast.Subscript)
            kind = ast.unparse(node.value.func.slice).strip("'\"").replace("|", "\\|")
            name = ast.unparse(node.targets[0])
            rows.append(f'| <a id="drivetrain.Trainer.{name}"></a>`trainer.{name}` | `{kind}` |')
    text = (
        "### Options as attributes\n\nThese arguments of the Trainer can be read from it under their names, and "
        "written between two runs; what is written is checked as the argument is."
    )
    return "\n".join([text, "", "| attribute | type |", "| --- | --- |", *rows])


def all_names() -> str:
    """Compose the page that lists every public name with its first line."""
    lines = ["# Reference", "", "Everything public can be imported from `drivetrain`. By page:", ""]
    for page, names in names_by_page().items():
        lines += [f"## {TOPICS[page].title}", "", "| name | |", "| --- | --- |"]
        for path in names:
            found = package()[path.removeprefix("drivetrain.")]
            first = found.docstring.value.split("\n")[0] if found.docstring else ""
            lines.append(f"| [`{path.rpartition('.')[2]}`][{path}] | {first.replace('|', chr(92) + '|')} |")
        lines.append("")
    return "\n".join(lines)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages into the navigation."""
    titles = {page: topic.title for page, topic in TOPICS.items()} | WRITTEN
    sections = [
        {section: [{titles[page]: f"reference/{page}.md"} for page in pages]} for section, pages in SECTIONS.items()
    ]
    sections[-1]["Command line and settings"].append({"Errors": "errors.md"})
    config.nav = [*(config.nav or []), {"Reference": [{"All names": "reference/index.md"}, *sections]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages to what is built."""
    for page, names in names_by_page().items():
        files.append(File.generated(config, f"reference/{page}.md", content=page_of(page, names)))
    files.append(File.generated(config, "reference/index.md", content=all_names()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the search rank pages of the reference behind guides."""
    if page.file.src_uri.startswith(("reference/", "errors.md")):
        page.meta.setdefault("search", {}).setdefault("boost", BOOST)
    return markdown
