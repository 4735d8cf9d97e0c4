"""What the README and the documentation show is run, so none of it can go stale.

Python blocks run as scripts of their own, in an empty directory. A block marked `<!-- continues -->` above
its fence goes on where the block before it on the page ended; one marked `<!-- needs: gpu -->`, `xla` or
`pipelining` runs only where there is one, one marked with a package, `<!-- needs: transformers -->`, only where it is
installed, and one marked `<!-- processes: 2 -->` in as many processes. In shell blocks, `drivetrain` commands are
parsed by the command itself, and `make` targets, extras and scripts must exist.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import runpy
import shlex
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from drivetrain import ConfigurationError
from tests.pool import INSIDE, ROOT, run_in_processes

FENCE = re.compile(
    r"(?P<marks>(?:^[ ]*<!--[^\n]*-->[ ]*\n\s*)*)"
    r"^(?P<indent>[ ]*)```[ ]*(?P<language>\w+)[^\n]*\n(?P<code>.*?)^(?P=indent)```[ ]*$",
    flags=re.MULTILINE | re.DOTALL,
)
SHELL = {"bash", "sh", "shell", "console"}
ABILITIES = {"gpu", "xla", "megatron", "pipelining"}
"""What a block may need that is no package by its name."""
LANES = {
    "xla": "xla",
    **dict.fromkeys(("transformers", "peft", "onnx", "huggingface_hub", "schedulefree", "webdataset"), "compat"),
    **dict.fromkeys(("ray", "optuna"), "ray"),
}
"""What a block may need, and the lane whose environment has it."""


@dataclass
class Script:
    """Python blocks of a page that run one after the other, at the line numbers that they have there."""

    page: Path
    line: int
    text: str
    needs: set[str] = field(default_factory=set)
    processes: int = 1

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if page.is_file()]


def blocks(page: Path, text: str) -> list[tuple[int, str, str, str]]:
    """(line of the first line of code, language, marks, code) of each fence."""
    return [
        (
            text.count("\n", 0, match.start("code")) + 1,
            match["language"].lower(),
            match["marks"],
            textwrap.dedent(match["code"]),
        )
        for match in FENCE.finditer(text)
    ]


def scripts_of(page: Path, text: str) -> list[Script]:
    scripts: list[Script] = []
    for line, language, marks, code in blocks(page, text):
        if language not in {"python", "py"}:
            continue
        if "<!-- continues -->" in marks:
            assert scripts, f"{page}:{line} continues a block, and there is none before it"
            script = scripts[-1]
        else:
            script = Script(page, line, "")
            scripts.append(script)
        script.text += "\n" * (line - 1 - script.text.count("\n")) + code
        script.needs |= set(re.findall(r"<!-- needs: (\w+) -->", marks))
        if asked := re.search(r"<!-- processes: (\d+) -->", marks):
            script.processes = int(asked[1])
    return scripts


def commands_of(page: Path, text: str) -> list[tuple[str, str]]:
    """(where, command) of each line in a shell block, continued lines joined."""
    found = []
    for line, language, _, code in blocks(page, text):
        if language in SHELL:
            for command in code.replace("\\\n", " ").splitlines():
                words = command.strip().removeprefix("$ ")
                if words and not words.startswith("#"):
                    found.append((f"{page.relative_to(ROOT)}:{line}", words))
    return found


SCRIPTS = [script for page in pages() for script in scripts_of(page, page.read_text())]
COMMANDS = [
    command
    for page in (*pages(), ROOT / "CONTRIBUTING.md")
    if page.is_file()
    for command in commands_of(page, page.read_text())
]


RANK_OF_THIS_PROCESS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_script(path: str, processes: int = 1) -> None:
    """Run a script as `python path` would, or `drivetrain launch` in several processes."""
    for name in (INSIDE, *(RANK_OF_THIS_PROCESS if processes == 1 else ())):
        os.environ.pop(name, None)
    sys.argv = [path]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def check_command(command: str) -> None:
    """Refuse a command line that names something that does not exist."""
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"\w+=\S*", words[0]):
        del words[0]
    if not words:
        return
    if words[0] == "drivetrain":
        check_drivetrain(words[1:])
    if words[0] == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
        for word in words[1:]:
            assert "=" in word or word.startswith("-") or word in targets, f"the Makefile has no target {word}"
    if "pip" in words and "install" in words:
        extras = re.search(r"\[project\.optional-dependencies\]\n(.*?)\n\[", pyproject(), flags=re.DOTALL)
        assert extras is not None
        for named in re.findall(r"(?:drivetrain|\.)\[([\w,-]+)\]", command):
            for extra in named.split(","):
                assert re.search(rf"^{extra} = \[", extras[1], flags=re.MULTILINE), f"there is no extra {extra}"
    for word in words:
        if word.startswith(("examples/", "benchmarks/")):
            assert (ROOT / word).exists(), f"there is no {word}"


def check_drivetrain(words: list[str]) -> None:
    import click

    from drivetrain.cli.main import cli

    try:
        context = cli.make_context("drivetrain", list(words))
        rest = [*context._protected_args, *context.args]
        name, command, arguments = cli.resolve_command(context, rest)
        assert command is not None
        command.make_context(name, arguments, parent=context)
    except click.exceptions.Exit as ended:  # --help and --version
        if ended.exit_code:
            raise


def pyproject() -> str:
    return (ROOT / "pyproject.toml").read_text()


def lanes_of(script: Script) -> list[pytest.MarkDecorator]:
    """The marks of the lanes that run a block; none for the default lane."""
    return [getattr(pytest.mark, lane) for lane in sorted({LANES[need] for need in script.needs & LANES.keys()})]


def missing_packages(script: Script) -> list[str]:
    return sorted(need for need in script.needs - ABILITIES if importlib.util.find_spec(need) is None)


@pytest.mark.parametrize("script", [pytest.param(each, marks=lanes_of(each)) for each in SCRIPTS], ids=str)
def test_python_block_runs(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "gpu" in script.needs:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU, and this machine has none")
    if "megatron" in script.needs:
        pytest.skip("needs megatron-core and CUDA; tests/strategies/megatron/test_strategy.py runs it")
    if "pipelining" in script.needs:
        try:
            importlib.import_module("drivetrain.strategies.parallel.pipeline.schedule")
        except ConfigurationError as error:  # of a torch that is too old
            pytest.skip(str(error))
    if missing := missing_packages(script):
        pytest.skip(f"needs {', '.join(missing)}, which this environment does not have")
    path = tmp_path / "snippet.py"
    path.write_text(script.text)
    monkeypatch.chdir(tmp_path)
    env = {"DRIVETRAIN_USE_CPU": None, **({"PJRT_DEVICE": "CPU"} if "xla" in script.needs else {})}
    run_in_processes(run_script, script.processes, args=(str(path), script.processes), timeout=120, env=env)


@pytest.mark.parametrize(("where", "command"), COMMANDS)
def test_shell_command_exists(where: str, command: str) -> None:
    check_command(command)


@pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="there is no README.md")
def test_the_readme_shows_code() -> None:
    shown = scripts_of(ROOT / "README.md", (ROOT / "README.md").read_text())
    assert len(shown) >= 2


PAGE = """
# A page

```python
first = 1
```

<!-- continues -->
```python
assert first == 1
second = undefined
```

<!-- needs: gpu -->

```python
third = 3
```

    ```bash
    $ drivetrain launch --num_processes 2 \\
        train.py
    ```

```text
anything at all
```
"""


def test_blocks_are_found_with_their_marks_and_lines() -> None:
    first, second = scripts_of(ROOT / "page.md", PAGE)
    assert (first.line, first.needs) == (5, set())
    assert first.text.splitlines()[4] == "first = 1"
    assert first.text.splitlines()[10] == "second = undefined"
    assert (second.line, second.needs) == (17, {"gpu"})
    [(where, command)] = commands_of(ROOT / "page.md", PAGE)
    assert where == "page.md:21"
    assert command.split() == ["drivetrain", "launch", "--num_processes", "2", "train.py"]


def test_a_block_that_needs_a_package_runs_in_its_lane_and_names_what_is_missing() -> None:
    marks = "<!-- needs: transformers -->\n<!-- needs: no_such_package -->\n<!-- needs: torch -->\n"
    [script] = scripts_of(ROOT / "page.md", f"{marks}```python\npass\n```\n")
    assert script.needs == {"transformers", "no_such_package", "torch"}
    assert [mark.name for mark in lanes_of(script)] == ["compat"]
    assert set(missing_packages(script)) - {"transformers"} == {"no_such_package"}


def test_a_block_that_fails_fails_at_its_line_on_the_page(tmp_path: Path) -> None:
    from tests.pool import ProcessesFailed

    script = tmp_path / "snippet.py"
    script.write_text(scripts_of(ROOT / "page.md", PAGE)[0].text)
    with pytest.raises(ProcessesFailed, match=r"(?s)snippet.py\", line 11.*NameError"):
        run_in_processes(run_script, 1, args=(str(script),))


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("make tset", "no target tset"),
        ("pip install drivetrain[tensorbord]", "no extra tensorbord"),
        ("drivetrain launch --num_procs 2 train.py", "num_procs"),
        ("drivetrain lunch train.py", "lunch"),
        ("python examples/no_such_example.py", "no examples/no_such_example.py"),
    ],
)
def test_a_command_that_does_not_exist_is_found(command: str, problem: str) -> None:
    with pytest.raises(Exception, match=problem):
        check_command(command)


@pytest.mark.parametrize(
    "command",
    ["make test", "A=1 make test-gpu PYTHON=python3", "pip install -e '.[test,dev]'", "ls | wc  # a comment"],
)
def test_a_command_that_exists_passes(command: str) -> None:
    check_command(command)
