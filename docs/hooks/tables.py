"""Fill the written pages of the reference with what the code holds: commands, keys, variables, extras, errors, hooks.

A page names a list by a comment, `<!-- list: commands -->`; the list takes its place while the documentation is built.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

HOOKS = Path(__file__).resolve().parent
ROOT = HOOKS.parents[1]
PACKAGE = ROOT / "drivetrain"
sys.path.insert(0, str(ROOT))  # the command line imports no torch, so it can be read as it is

from drivetrain.cli.launch import section_of as heading_of  # noqa: E402
from drivetrain.cli.main import cli  # noqa: E402
from drivetrain.launch.options import GROUPS, SETTINGS  # noqa: E402
from drivetrain.launch.settings.setting import Setting  # noqa: E402
from drivetrain.launch.settings.sources import KEYS  # noqa: E402

MARK = re.compile(r"^<!-- list: ([a-z ]+) -->$", re.MULTILINE)


def entry(term: str, *meanings: str) -> str:
    """One entry of a definition list."""
    return "\n".join([term, *(f":   {meaning}" for meaning in meanings), ""])


def anchored(code: str, anchor: str) -> str:
    """Code that a link leads to."""
    return f'<span id="{anchor}"></span>`{code}`'


# commands


def commands(command: click.Command = cli, name: str = "drivetrain") -> Iterator[tuple[str, click.Command]]:
    """Every command, with the words that call it."""
    context = click.Context(command, info_name=name)
    if name != "drivetrain":
        yield name, command
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            assert found is not None
            yield from commands(found, f"{name} {each}")


def own_options(name: str, command: click.Command) -> list[click.Option]:
    """The flags that a command's section lists; those of the launcher are in its own section alone."""
    options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    if name == "drivetrain launch" or not SETTINGS.keys() <= {each.name for each in options}:
        return options
    return [each for each in options if each.name not in SETTINGS]


def list_commands() -> str:
    """A section for each command: how it is called, what it does, its flags."""
    return "\n".join(section_of(name, command) for name, command in commands())


def section_of(name: str, command: click.Command) -> str:
    """The section of one command."""
    context = click.Context(command, info_name=name)
    pieces = " ".join([name, *command.collect_usage_pieces(context)])
    lines = [f"## {name}", "", "```text", pieces, "```", "", *help_of(command), ""]
    options = own_options(name, command)
    if len(options) < sum(isinstance(each, click.Option) and not each.hidden for each in command.params):
        lines += ["It takes the flags of [`drivetrain launch`](#drivetrain-launch) too.", ""]
    section = ""
    for option in options:
        heading = heading_of(str(option.name)) if name == "drivetrain launch" else ""
        if heading != section:
            lines += [f"**{heading}**", ""]
            section = heading
        lines.append(option_entry(name, option))
    return "\n".join(lines)


def help_of(command: click.Command) -> Iterator[str]:
    """A command's help as Markdown: what `\\b` keeps as it is becomes a block of code."""
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        if paragraph.startswith("\b"):
            yield from ("```bash", *(line.strip() for line in paragraph.splitlines()[1:]), "```", "")
        else:
            yield from (" ".join(paragraph.split()), "")


def option_entry(name: str, option: click.Option) -> str:
    """One flag: its spellings, what it takes, what it does."""
    context = click.Context(click.Command(name))
    metavar = "" if option.is_flag else f" {option.make_metavar(context)}"
    spellings = [*option.opts, *option.secondary_opts]
    long = next((each for each in spellings if each.strip("-").replace("-", "_") == option.name), spellings[0])
    anchor = f"{name.removeprefix('drivetrain ').replace(' ', '-')}{long}"
    shown = ", ".join(
        [anchored(f"{long}{metavar}", anchor), *(f"`{each}`" for each in spellings if each != long)],
    )
    default = option.default
    known = option.show_default and default is not None and not option.is_flag
    return entry(shown, f"{escaped(option.help or '')}{f' Default: `{default}`.' if known else ''}")


def escaped(text: str) -> str:
    """Text without what Markdown would take for its own; code in backticks stays."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*_<>|\[\]])", r"\\\1", part) for part in parts)


# the configuration file and the environment

ONLY_IN_FILES = {
    "compute_environment": "Where: `LOCAL_MACHINE` or `CUSTOM_CLUSTER`, as Accelerate writes it.",
    "distributed_type": "What the processes are for, as Accelerate writes it: `FSDP`, `MULTI_GPU`, `NO` ...",
    "fp16": "Older files: `true` is `mixed_precision: fp16`.",
    "ipex_config": "Older files: accepted; torch does by itself what the extension did.",
    "tp_config": "Older files: `tp_size` is that of `parallelism_config`.",
}


def list_keys() -> str:
    """Every key of a configuration file, those at the top first, then each group's."""
    top = [setting for setting in SETTINGS.values() if not setting.group]
    lines = ["## Keys at the top", "", *(key_entry(setting) for setting in top)]
    for key in KEYS:
        if key in ONLY_IN_FILES:
            lines.append(entry(anchored(key, key), ONLY_IN_FILES[key]))
    for group in GROUPS.values():
        lines += [f"## {group.name}", ""]
        if group.switch:
            lines += [f"Has an effect with `{group.switch}: true`.", ""]
        if group.prefix:
            lines += [f"The keys may be written without `{group.prefix}`.", ""]
        lines += [key_entry(setting) for setting in group.settings]
    return "\n".join(lines)


def key_entry(setting: Setting) -> str:
    """One key: what it takes, what it does, its flag and its variable."""
    spelled = ", ".join([anchored(setting.name, setting.name), *(f"`{key}`" for key in setting.keys)])
    also = [f"flag [`{setting.flag}`](command-line.md#{flag_anchor(setting)})"]
    if setting.variable:
        also.append(f"variable `{setting.variable}`")
    return entry(f"{spelled} ({takes(setting)})", f"{escaped(setting.help)} ({', '.join(also)})")


def flag_anchor(setting: Setting) -> str:
    """Where the flag of a setting is on the page of commands."""
    return f"launch--{setting.name}"


def takes(setting: Setting) -> str:
    """What a setting takes, in words."""
    kinds = {
        "switch": "true or false",
        "bool": "true or false",
        "int": "whole number",
        "float": "number",
        "choice": " or ".join(f"`{choice}`" for choice in setting.choices),
        "words": "list, or text with commas",
        "bools": "three of true or false",
    }
    least = "" if setting.least is None else f", at least {setting.least:g}"
    return kinds.get(setting.kind, "text") + least + (", or `auto`" if setting.auto else "")


def list_variables() -> str:
    """Every environment variable: those of the settings, then the others by who sets them."""
    lines = ["## Settings of the launcher", ""]
    for setting in SETTINGS.values():
        if setting.variable:
            theirs = f" Accelerate's launcher sets `{setting.theirs}`." if setting.theirs else ""
            flag = f"[`{setting.flag}`](command-line.md#{flag_anchor(setting)})"
            lines.append(entry(anchored(setting.variable, setting.variable), f"As the flag {flag}.{theirs}"))
    lines += ["## Variables of Accelerate's launcher alone", ""]
    for setting in SETTINGS.values():
        if setting.theirs and not setting.variable:
            lines.append(entry(anchored(setting.theirs, setting.theirs), escaped(setting.help)))
    if lines[-1] == "":
        del lines[-2:]
    for heading, variables in yaml.safe_load((HOOKS / "variables.yaml").read_text()).items():
        lines += [f"## {heading}", "", *(entry(anchored(name, name), text) for name, text in variables.items())]
    return "\n".join(lines)


# extras, exit codes, errors


def list_extras() -> str:
    """The extras of `pyproject.toml`, under the comments that group them there."""
    text = (ROOT / "pyproject.toml").read_text()
    [block] = re.findall(r"^\[project\.optional-dependencies\]\n(.*?)^\[", text, re.MULTILINE | re.DOTALL)
    lines: list[str] = []
    for comment, name, packages in re.findall(r"^# ([^\n]*)$|^([\w-]+) = \[(.*?)\]$", block, re.MULTILINE | re.DOTALL):
        if comment:
            lines += [f"## {comment[0].upper()}{comment[1:]}", ""]
        else:
            needed = ", ".join(f"`{each}`" for each in re.findall(r'"([^"]+)"', packages))
            lines.append(entry(anchored(name, f"extra-{name}"), needed))
    return "\n".join(lines)


CODES = {
    "0": "Every process ended with 0.",
    "1": "A `DrivetrainError`, other than one of configuration, ended the command; or a script raised, as in Python.",
    "2": "The command line, a configuration file or an argument asks for what cannot be: `ConfigurationError`.",
    "RESUME_EXIT_CODE": "",
    "HANG_EXIT_CODE": "",
    "128 + N": "Signal N ended a rank or the launcher: 130 for Ctrl-C, 137 for SIGKILL (often the kernel, out of "
    "memory), 143 for SIGTERM.",
    "any other": "That of the first rank that failed, or that the script gave to `sys.exit`.",
}


def list_exit_codes() -> str:
    """The exit codes of `drivetrain launch` and other commands."""
    tree = ast.parse((PACKAGE / "runtime" / "exit_codes.py").read_text())
    constants = {}
    for node, following in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(node, ast.Assign) and isinstance(following, ast.Expr):
            name = ast.unparse(node.targets[0])
            constants[name] = (ast.literal_eval(node.value), ast.literal_eval(following.value))
    lines = []
    for code, meaning in CODES.items():
        if code in constants:
            number, meaning = constants.pop(code)
            lines.append(entry(anchored(str(number), code), f"{meaning} `drivetrain.runtime.exit_codes.{code}`"))
        else:
            lines.append(entry(f"`{code}`", meaning))
    assert not constants, f"{constants} have no place in the list of exit codes"
    return "\n".join(lines)


def list_errors() -> str:
    """The classes of errors, each with its bases."""
    tree = ast.parse((PACKAGE / "runtime" / "errors.py").read_text())
    lines = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = ", ".join(f"`{ast.unparse(base)}`" for base in node.bases)
            summary = (ast.get_docstring(node) or "").split("\n")[0]
            lines.append(entry(f"{anchored(node.name, node.name)} (a {bases})", summary))
    return "\n".join(lines)


# hooks

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
OF_TASK = (
    *STEPS,
    *("configure_callbacks", "configure_model", "configure_optimizers", "configure_gradient_clipping"),
    *("optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "backward"),
)
NO_HOOKS_OF_CALLBACKS = {"build_state_key", "state_key", "print"}
SOURCES = {
    "Task": (
        ("trainer/task.py", "TaskHooks"),
        ("trainer/data_module.py", "DataHooks"),
        ("trainer/task.py", "Task"),
    ),
    "Callback": (("callbacks/base.py", "Callback"),),
    "DataModule": (("trainer/data_module.py", "DataHooks"), ("trainer/data_module.py", "DataModule")),
}


def hooks_of(owner: str) -> dict[str, ast.FunctionDef]:
    """The hooks of a class by name, as its sources define them."""
    found: dict[str, ast.FunctionDef] = {}
    for path, name in SOURCES[owner]:
        tree = ast.parse((PACKAGE / path).read_text())
        [holder] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        for node in holder.body:
            if isinstance(node, ast.FunctionDef) and is_hook(owner, name, node):
                found.setdefault(node.name, node)
    return found


def is_hook(owner: str, holder: str, method: ast.FunctionDef) -> bool:
    """Whether a method is there to be overridden, and called at a moment of a run."""
    if method.name.startswith("_"):
        return False
    if holder == "Task":
        return method.name in OF_TASK
    if holder == "DataModule":
        return method.name in ("on_exception", "state_dict", "load_state_dict")
    return owner != "Callback" or method.name not in NO_HOOKS_OF_CALLBACKS


def calling_order(markdown: str) -> list[str]:
    """The names of hooks in the order in which the page shows them."""
    blocks = re.findall(r"^```text title=[^\n]*\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL)
    names = re.findall(r"^ *(?:[DCT] )+ *([\w*]+)", "\n".join(blocks), re.MULTILINE)
    return list(
        dict.fromkeys(name.replace("*", stage) for name in names for stage in ("validation", "test", "predict"))
    )


def list_hooks(markdown: str) -> str:
    """Every hook of the task, the callback and the data module, with its arguments, in calling order."""
    owners = {owner: hooks_of(owner) for owner in SOURCES}
    order = calling_order(markdown)
    names = sorted(
        dict.fromkeys(name for hooks in owners.values() for name in hooks),
        key=lambda name: order.index(name) if name in order else len(order),
    )
    lines = []
    for name in names:
        meanings = [hook_line(owner, hooks[name]) for owner, hooks in owners.items() if name in hooks]
        lines.append(entry(anchored(name, name), *meanings))
    return "\n".join(lines)


def hook_line(owner: str, method: ast.FunctionDef) -> str:
    """What one owner's hook takes and does."""
    defaults = [None] * (len(method.args.args) - len(method.args.defaults)) + list(method.args.defaults)
    taken = [
        argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"
        for argument, default in zip(method.args.args, defaults, strict=True)
        if argument.arg != "self"
    ]
    taken += [f"*{method.args.vararg.arg}"] if method.args.vararg else []
    taken += [f"**{method.args.kwarg.arg}"] if method.args.kwarg else []
    summary = (ast.get_docstring(method) or "").split("\n")[0]
    return f"{owner}: [`({', '.join(taken)})`][drivetrain.{owner}.{method.name}] {escaped(summary)}"


LISTS: dict[str, Callable[[], str]] = {
    "commands": list_commands,
    "keys": list_keys,
    "variables": list_variables,
    "extras": list_extras,
    "exit codes": list_exit_codes,
    "errors": list_errors,
}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put each list in the place of the comment that names it."""

    def fill(match: re.Match[str]) -> str:
        return list_hooks(markdown) if match[1] == "hooks" else LISTS[match[1]]()

    return MARK.sub(fill, markdown) if page.file.src_uri.startswith("reference/") else markdown
