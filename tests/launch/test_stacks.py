from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest
import torch

import drivetrain
from drivetrain.launch.report import Stack

OURS = os.path.dirname(drivetrain.__file__)
TORCH = os.path.dirname(torch.__file__)
STANDARD = sysconfig.get_path("stdlib")

GATHER = [
    f"{TORCH}/distributed/distributed_c10d.py:4394 all_gather_single",
    f"{TORCH}/distributed/c10d_logger.py:83 wrapper",
    f"{OURS}/runtime/collective_checks.py:61 call_collective",
    f"{OURS}/runtime/pytrees.py:101 recursively_apply",
    f"{OURS}/runtime/collectives.py:75 gather",
    f"{OURS}/accelerator/accelerator.py:12 gather",
]
FIRST = [
    f"{TORCH}/distributed/distributed_c10d.py:5000 barrier",
    f"{OURS}/runtime/process_group.py:130 barrier",
    f"{OURS}/runtime/state.py:229 _wait",
    f"{STANDARD}/contextlib.py:137 __enter__",
    f"{OURS}/runtime/state.py:220 main_process_first",
]
BACKWARD = [f"{TORCH}/autograd/graph.py:800 _engine_run_backward", f"{TORCH}/_tensor.py:600 backward"]


def written(frames: list[str]) -> str:
    """Spell frames as faulthandler does."""
    lines = []
    for frame in frames:
        place, function = frame.rsplit(" ", 1)
        filename, line = place.rsplit(":", 1)
        lines.append(f'  File "{filename}", line {line} in {function}')
    return "\n".join(["Stack (most recent call first):", *lines, ""])


@pytest.mark.parametrize(
    ("inside", "collective"),
    [
        (GATHER, "gather"),
        (FIRST, "main_process_first"),
        (BACKWARD, "backward"),
        ([f"{TORCH}/distributed/distributed_c10d.py:3000 all_reduce"], "all_reduce"),
        ([f"{STANDARD}/threading.py:320 wait"], None),
        ([f"{OURS}/runtime/state.py:320 print"], None),
        ([], None),
    ],
)
def test_the_collective_is_the_function_that_was_called_and_the_line_is_the_users(
    inside: list[str], collective: str | None
) -> None:
    user = ["/home/me/train.py:12 train", "/home/me/train.py:30 <module>"]
    stack = Stack.parse(written([*inside, *user, f"{OURS}/launch/worker.py:112 _run_as_main"]))
    assert stack is not None
    assert stack.collective == collective
    assert str(stack.user_frame) == "/home/me/train.py:12 in train"


def test_a_packages_code_counts_as_the_users() -> None:
    frame = f"{STANDARD}/site-packages/somebody/model.py:3 forward"
    stack = Stack.parse(written([*BACKWARD, frame, "/home/me/train.py:12 train"]))
    assert stack is not None
    assert stack.user_frame.filename.endswith("somebody/model.py")


def test_the_line_is_shown_with_its_source(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("first\nsecond()\n")
    stack = Stack.parse(written([f"{script}:2 main"]))
    assert str(stack and stack.user_frame) == f"{script}:2 in main: second()"


@pytest.mark.parametrize("text", ["", "Fatal Python error\n", "Stack (most recent call first):\n  <no Python frame>\n"])
def test_what_holds_no_stack_is_none(text: str) -> None:
    assert Stack.parse(text) is None


def test_of_several_stacks_the_last_one_counts() -> None:
    stack = Stack.parse(written(["/a.py:1 f"]) + written(["/b.py:2 g"]))
    assert stack is not None
    assert [frame.filename for frame in stack.frames] == ["/b.py"]
