"""Runs the real launcher as a user would, with a time limit that ends all that it started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.pool import DEVICE, ROOT, device

_FROM_LAUNCHERS = (
    "DRIVETRAIN_",
    "TORCHELASTIC_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "GROUP_",
    "OMP_",
    "PYTEST_",
)

# Rank 0 waits in a collective, deaf to SIGTERM, and would wait for half an hour.
RANK_1_FAILS = """
    import os, signal, sys
    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGTERM, lambda *_: None)
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        {fail}
    dist.all_reduce(torch.ones(1))
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str
    seconds: float


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's variables without those that a launcher sets, and with these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FROM_LAUNCHERS)}
    return {**kept, DEVICE: device(), **variables}


def on_device(*arguments: str | Path) -> list[str]:
    """The arguments of `drivetrain launch` that let `script.py` run on devices of the kind that `--device` names."""
    given = [str(each) for each in arguments]
    if device() == "cpu":
        return ["--cpu", *given]
    at = given.index("script.py")
    return [*given[:at], str(ROOT / "tests" / "simulated" / "run.py"), *given[at:]]


def write_script(directory: Path, source: str, name: str = "script.py") -> Path:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    return path


@contextmanager
def started(*command: str, cwd: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command in a process group of its own; end it and all its children afterwards."""
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=cwd,
        env=clean_environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        left = [process]
        try:
            left = [*psutil.Process(process.pid).children(recursive=True), process]
        except psutil.NoSuchProcess:
            pass
        for one in left:
            try:
                one.kill()
            except (psutil.NoSuchProcess, ProcessLookupError):
                pass
        process.communicate()


def end(process: subprocess.Popen[str], started_at: float, timeout: float = 60) -> Ended:
    out, err = process.communicate(timeout=timeout)
    return Ended(process.returncode, without_gloo(out), err, time.monotonic() - started_at)


def without_gloo(text: str) -> str:
    """Without the line that gloo itself writes for each group that a rank joins, up to torch 2.9.

    It writes the line in pieces, so those of two ranks may stand within each other.
    """
    pieces = re.compile(r"\[Gloo\] Rank |\d+ is connected to \d+ peer ranks|Expected number of connected peer")
    return "".join(line for line in text.splitlines(keepends=True) if not pieces.search(line))


def run(*command: str, cwd: Path, timeout: float = 60, **variables: str) -> Ended:
    """Run `python <command>`."""
    begin = time.monotonic()
    with started(*command, cwd=cwd, **variables) as process:
        return end(process, begin, timeout)


def launch(*arguments: str | Path, cwd: Path, timeout: float = 60, **variables: str) -> Ended:
    """Run `drivetrain launch <arguments>`."""
    return run("-m", "drivetrain", "launch", *map(str, arguments), cwd=cwd, timeout=timeout, **variables)


def wait_for_lines(process: subprocess.Popen[str], text: str, count: int) -> list[str]:
    """Read stdout until `count` lines hold `text`; what was read."""
    assert process.stdout is not None
    lines: list[str] = []
    while sum(text in line for line in lines) < count:
        line = process.stdout.readline()
        assert line, f"the command ended early: {lines} {process.stderr and process.stderr.read()}"
        lines.append(line)
    return lines
