"""How far it is from the user's script to `training_step`: each frame, by name."""

from __future__ import annotations

import inspect
import traceback
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain import Task
from tests.pool import run_in_processes
from tests.trainer.tasks import fitted, ones

# Who is called, and what for. A frame that is not here makes the way longer, or has a name that says nothing.
WAY = [
    ("", "call"),  # refuses unknown arguments
    ("Trainer", "fit"),
    ("FitLoop", "run"),
    ("FitLoop", "run_epoch"),
    ("PlainStep", "run"),
    ("Strategy", "forward_backward"),
    ("PlainStep", "run_micro_batch"),
]


class Looking(Task):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.frames: list[tuple[str, str, str]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        for frame, _ in traceback.walk_stack(inspect.currentframe()):
            owner = frame.f_locals.get("self")
            module = frame.f_globals["__name__"]
            self.frames.append((module, type(owner).__name__ if owner is not None else "", frame.f_code.co_name))
        return self.w * batch[0].mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def frames_between(**options: Any) -> list[tuple[str, str, str]]:
    """The frames from the one that calls `fit` to `training_step`, these two not among them, outermost first."""
    task = Looking()
    fitted(task, ones(1), **options)
    names = [name for _, _, name in task.frames]
    inner = task.frames[1 : names.index("fitted")]
    return inner[::-1]


def test_at_most_ten_frames_lie_between_the_script_and_the_training_step() -> None:
    frames = frames_between()
    assert [(owner.replace("Single", "Strategy"), name) for _, owner, name in frames] == WAY
    assert len(frames) <= 10


def test_accumulation_clipping_and_logging_add_none() -> None:
    assert frames_between(accumulate_grad_batches=2, gradient_clip_val=1.0) == frames_between()


def test_a_precision_adds_one() -> None:
    assert [name for _, _, name in frames_between(precision="bf16")] == [
        *(name for _, name in WAY),
        "step_in_precision",
    ]


def frames_under_ddp() -> list[tuple[str, str, str]]:
    return frames_between(strategy="ddp")


def test_under_ddp_our_own_frames_are_at_most_ten_too() -> None:
    for frames in run_in_processes(frames_under_ddp, 2):
        ours = [(owner, name) for module, owner, name in frames if module.startswith("drivetrain.")]
        # DDP's own forward_backward, which finds out whether all gradients were reduced, runs the one of every
        # strategy.
        before, after = [name for _, name in WAY[:-1]], [WAY[-1][1], "forward", "step_or_dummy"]
        assert [name for _, name in ours] == [*before, "forward_backward", *after]
        assert len(ours) <= 10
        assert {module for module, _, _ in frames if not module.startswith(("drivetrain.", "torch."))} == set()
