"""The reference of the built manual is complete, and holds nothing that is internal."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import click
import pytest
import torch
import yaml

import drivetrain
from drivetrain.cli.main import cli
from drivetrain.launch.options import GROUPS, SETTINGS
from drivetrain.launch.settings.sources import KEYS
from drivetrain.runtime import errors
from tests.docs.built import page_of, pages_in
from tests.house import PACKAGE
from tests.pool import ROOT
from tests.trainer.test_hook_order import Watched, lines

INTERNAL: dict[str, list[str]] = yaml.safe_load((ROOT / "docs" / "hooks" / "internal_members.yaml").read_text())
WHOLE = ("Trainer", "Accelerator", "Task", "Callback", "DataModule")
"""The classes of which every member has an entry, inherited ones too."""
ATTRIBUTES = {"Trainer": {"accelerator", "callbacks", "progress"}}
"""Members that only objects have."""
PUBLIC = [name for name in drivetrain.__all__ if not name.startswith("__")]
OF_TORCH = {name for name in PUBLIC if getattr(drivetrain, name).__module__.startswith("torch.")}


def members(kind: type) -> set[str]:
    """The public members that drivetrain gives a class."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("drivetrain.")]
    found = {name for base in ours for name in vars(base) if not name.startswith("_")}
    return (found | ATTRIBUTES.get(kind.__name__, set())) - set(INTERNAL.get(kind.__name__, ()))


@pytest.fixture(scope="session")
def entries(site: Path) -> set[str]:
    """What the reference has entries of, as paths."""
    return {anchor for page in pages_in(site / "reference").values() for anchor in page.ids}


def has_entry(name: str, entries: set[str]) -> bool:
    """Some rooms make their names public themselves; such a name has its entry under the room."""
    home = drivetrain._EXPORTS[name]
    return any(path in entries for path in (f"drivetrain.{name}", f"{home}.{name}"))


def test_every_public_name_has_an_entry(entries: set[str]) -> None:
    assert [name for name in PUBLIC if name not in OF_TORCH and not has_entry(name, entries)] == []


def test_every_public_name_has_a_docstring() -> None:
    named = {name: getattr(drivetrain, name) for name in PUBLIC if name not in OF_TORCH}
    classes = [name for name, value in named.items() if inspect.isclass(value) and not vars(value).get("__doc__")]
    functions = [name for name, value in named.items() if inspect.isfunction(value) and not value.__doc__]
    assert classes + functions == []


@pytest.mark.parametrize("name", WHOLE)
def test_every_member_has_an_entry(name: str, entries: set[str]) -> None:
    missing = [each for each in members(getattr(drivetrain, name)) if f"drivetrain.{name}.{each}" not in entries]
    assert sorted(missing) == []


@pytest.mark.parametrize(
    "name", [name for name in PUBLIC if inspect.isclass(getattr(drivetrain, name)) and name not in OF_TORCH]
)
def test_what_a_class_has_from_bases_without_an_entry_is_among_its_own(name: str, entries: set[str]) -> None:
    kind = getattr(drivetrain, name)
    documented = {getattr(drivetrain, each) for each in PUBLIC}
    missing = []
    for base in kind.__mro__[1:]:
        if base in documented or not base.__module__.startswith("drivetrain."):
            continue
        for member, value in vars(base).items():
            described = inspect.isfunction(value) or isinstance(value, (property, classmethod))
            if member.startswith("_") or not described or member in INTERNAL.get(name, ()):
                continue
            # An override without a docstring is documented where it is declared.
            if member not in vars(kind) and value.__doc__:
                home = drivetrain._EXPORTS[name]
                if not {f"drivetrain.{name}.{member}", f"{home}.{name}.{member}"} & entries:
                    missing.append(member)
    assert missing == []


def test_internals_have_no_entry(entries: set[str]) -> None:
    assert [
        f"{kind}.{name}" for kind, names in INTERNAL.items() for name in names if f"drivetrain.{kind}.{name}" in entries
    ] == []


@pytest.mark.parametrize("kind", INTERNAL)
def test_what_is_internal_is_there_and_used_by_the_package_alone(kind: str) -> None:
    pages = " ".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    sources = " ".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    for name in INTERNAL[kind]:
        assert hasattr(getattr(drivetrain, kind), name), f"{kind} has no {name}"
        assert len(re.findall(rf"\b{name}\b", sources)) > 1, f"{name} is used nowhere"
        shown = re.findall(rf"\b(?:trainer|accelerator|task|self|data)\.{name}\b", pages)
        assert not shown, f"{name} is internal, but the manual shows it: {shown}"


# the command line and its settings


def commands(command: click.Command = cli, name: str = "drivetrain") -> Iterator[tuple[str, click.Command]]:
    if name != "drivetrain":
        yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=name)
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            assert found is not None
            yield from commands(found, f"{name} {each}")


def test_every_command_has_a_section(site: Path) -> None:
    sections = page_of(site, "reference/command-line").ids
    assert [name for name, _ in commands() if name.replace(" ", "-") not in sections] == []


def test_every_flag_is_listed(site: Path) -> None:
    page = page_of(site, "reference/command-line")
    shown = {text.split(" ")[0] for text in page.code}
    missing = []
    for name, command in commands():
        options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
        for option in options:
            missing += [f"{name} {each}" for each in (*option.opts, *option.secondary_opts) if each not in shown]
            section = name.removeprefix("drivetrain ").replace(" ", "-")
            flag = next(
                (each for each in option.opts if each.strip("-").replace("-", "_") == option.name), option.opts[0]
            )
            own = f"{section}{flag}" in page.ids
            if not own and not (option.name in SETTINGS and f"launch--{option.name}" in page.ids):
                missing.append(f"{name} {flag} (no anchor)")
    assert missing == []


def test_every_key_of_a_configuration_file_is_listed(site: Path) -> None:
    page = page_of(site, "reference/configuration")
    keys = {*KEYS, *SETTINGS} - GROUPS.keys()
    assert sorted(key for key in keys if key not in page.code) == []
    assert [group for group in GROUPS if group not in page.ids] == []


CONSTANTS = {
    str(target.id): node.value.value
    for path in PACKAGE.rglob("*.py")
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    for target in node.targets
    if isinstance(target, ast.Name)
}


def variables_read(tree: ast.AST) -> set[str]:
    """The environment variables that code reads or sets by name."""
    found: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            of_environment = node.func.attr in ("get", "pop", "setdefault") and is_environment(node.func.value)
            if of_environment or node.func.attr == "getenv":
                found.append(node.args[0])
        elif isinstance(node, ast.Subscript) and is_environment(node.value):
            found.append(node.slice)
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            found += [node.left] if is_environment(node.comparators[0]) else []
    names = [
        each.value if isinstance(each, ast.Constant) else CONSTANTS.get(each.id, "")
        for each in found
        if isinstance(each, (ast.Constant, ast.Name))
    ]
    return {name for name in names if isinstance(name, str) and re.fullmatch(r"[A-Z][A-Z0-9_]+", name)}


def is_environment(node: ast.expr) -> bool:
    return ast.unparse(node).rpartition(".")[2] in ("environ", "variables", "environment")


def test_every_environment_variable_is_listed(site: Path) -> None:
    ours = {setting.variable for setting in SETTINGS.values()} | {setting.theirs for setting in SETTINGS.values()}
    for path in PACKAGE.rglob("*.py"):
        if "compat" not in path.parts:  # what only ported scripts read is the other framework's
            ours |= variables_read(ast.parse(path.read_text()))
    page = page_of(site, "reference/environment-variables")
    assert sorted(name for name in ours - {None} if name not in page.code) == []


@pytest.mark.parametrize(
    "line",
    [
        'os.environ["MASTER_ADDR"]',
        'os.environ.get("MASTER_ADDR", "")',
        'os.getenv("MASTER_ADDR")',
        'variables.setdefault("MASTER_ADDR", "x")',
        '"MASTER_ADDR" in os.environ',
    ],
)
def test_a_variable_that_code_reads_is_found(line: str) -> None:
    assert variables_read(ast.parse(line)) == {"MASTER_ADDR"}


def test_every_extra_is_listed(site: Path) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    [block] = re.findall(r"^\[project\.optional-dependencies\]\n(.*?)^\[", text, re.MULTILINE | re.DOTALL)
    extras = re.findall(r"^([\w-]+) = \[", block, re.MULTILINE)
    assert len(extras) > 20
    assert [name for name in extras if name not in page_of(site, "reference/extras").code] == []


def test_exit_codes_and_errors_are_listed(site: Path) -> None:
    page = page_of(site, "reference/exit-codes")
    codes = [value for name, value in vars(import_module("drivetrain.runtime.exit_codes")).items() if name.isupper()]
    assert codes
    assert [code for code in codes if str(code) not in page.code] == []
    classes = [name for name, value in vars(errors).items() if inspect.isclass(value)]
    ours = [name for name in classes if issubclass(getattr(errors, name), errors.DrivetrainError)]
    assert len(ours) > 10
    assert [name for name in ours if name not in page.ids] == []


# hooks


def blocks_of_hooks() -> dict[str, str]:
    """The lists on the page of hooks, by their titles."""
    text = (ROOT / "docs" / "reference" / "hooks.md").read_text()
    return dict(re.findall(r'^```text title="([^"]+)"\n(.*?)^```', text, re.MULTILINE | re.DOTALL))


def calls(title: str) -> list[str]:
    """What a list on the page promises, call by call."""
    blocks = blocks_of_hooks()
    found: list[str] = []
    for line in blocks[title].splitlines():
        promised = line.partition("#")[0].strip()
        if promised.startswith("->"):
            stage = promised.removeprefix("->").strip()
            found += lines(re.sub(r"#.*", "", blocks["The evaluation loop"]).replace("*", stage))
        else:
            found += lines(promised)
    return found


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_hooks_are_called_in_the_order_of_the_page(verb: str, tmp_path: Path) -> None:
    run = Watched(tmp_path)
    trainer = run.trainer(gradient_clip_val=1.0, limit_train_batches=1)
    quiet = {"verbose": False} if verb in ("validate", "test") else {}
    getattr(trainer, verb)(run.task, datamodule=run.data, **quiet)
    assert run.calls == calls(f"Trainer.{verb}")


def test_every_hook_is_on_the_page_with_its_arguments(site: Path) -> None:
    page = page_of(site, "reference/hooks")
    ours = {
        "Callback": {name for name in members(drivetrain.Callback) if name.startswith("on_")}
        | {"setup", "teardown", "state_dict", "load_state_dict", "is_state_sound"},
        "DataModule": {name for name in members(drivetrain.DataModule) if name.startswith("on_")}
        | {"prepare_data", "setup", "teardown", "transfer_batch_to_device", "state_dict", "load_state_dict"}
        | {name for name in members(drivetrain.DataModule) if name.endswith("_dataloader")},
        "Task": {name for name in members(drivetrain.Task) if name.startswith(("on_", "configure_"))}
        | {
            name
            for name in members(drivetrain.Task)
            if name.endswith(("_step", "_dataloader")) and "global" not in name
        }
        | {"backward", "optimizer_zero_grad", "prepare_data", "setup", "teardown", "transfer_batch_to_device"},
    }
    missing = []
    for owner, names in ours.items():
        for name in names:
            taken = inspect.signature(getattr(getattr(drivetrain, owner), name)).parameters.values()
            shown = ", ".join(str(each).partition(":")[0] + default_of(each) for each in taken if each.name != "self")
            if name not in page.ids or f"({shown})" not in page.code:
                missing.append(f"{owner}.{name}({shown})")
    assert sorted(missing) == []


def default_of(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty or ":" not in str(parameter):
        return ""
    return f"={parameter.default!r}"


def test_torchs_own_classes_are_left_to_its_manual() -> None:
    assert all(issubclass(getattr(drivetrain, name), object) for name in OF_TORCH)
    assert {getattr(drivetrain, name).__module__.partition(".")[0] for name in OF_TORCH} <= {torch.__name__}
