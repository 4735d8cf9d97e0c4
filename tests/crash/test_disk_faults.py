"""A disk that fails at any call, on either of two processes, costs nothing but the checkpoint that is being written."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, Callback, CheckpointError, ModelCheckpoint, Trainer, gather_object
from drivetrain.checkpoint import Checkpoint, CheckpointFormat, checkpoint_at, find_format
from tests.callbacks.guarded import Regression, train
from tests.crash.disk_faults import DiskFaults, Site, sites_in
from tests.pool import run_in_processes

pytestmark = pytest.mark.crash

WRITTEN_BY = ("checkpoint/storage.py", "checkpoint/save.py")
NOT_IN_A_SAVE = {Site("checkpoint/storage.py", "remove", "rename")}
ERRORS = [errno.ENOSPC, errno.EIO]


class Saving:
    """An Accelerator whose checkpoints hold a number, tensors that either process writes, and a file of a hook.

    Args:
        root: the directory of the checkpoints.
        block: whether to save at once, or in the background, where hooks are called at once all the same.

    Attributes:
        good: the names of the checkpoints that were saved, and the numbers in them.
        tried: the number that was to be saved last.
    """

    def __init__(self, root: str, block: bool) -> None:
        self.accelerator = Accelerator(cpu=True)
        self.rank = self.accelerator.process_index
        self.root, self.block = Path(root), block
        self.good: dict[str, int] = {}
        self.tried = 0
        model = nn.Linear(64, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.model, _ = self.accelerator.prepare(model, optimizer)
        self.accelerator.register_save_state_pre_hook(self._add_note)

    def save(self, name: str) -> str:
        """Save the next number; returns what went wrong, if anything."""
        self.tried += 1
        with torch.no_grad():
            self.accelerator.unwrap_model(self.model).weight.fill_(self.tried)
        try:
            self.accelerator.save_state(self.root / name, block=self.block)
            self.accelerator.save_queue.finish()
        except CheckpointError as error:
            return str(error)
        self.good[name] = self.tried
        return ""

    def look(self, lasting: bool) -> None:
        """Compare what is there, bit by bit, with what was saved.

        Args:
            lasting: the disk has failed on the way back, too: the old one may be left under its other name, or the
                new one under its own, but one of them is found and whole.
        """
        if self.rank == 0:
            there = [name for name in os.listdir(self.root) if not (lasting and name.startswith("."))]
            assert set(there) <= set(self.good) if lasting else set(there) == set(self.good)
            for name, number in self.good.items():
                checkpoint = Checkpoint(self.root / name)
                checkpoint.verify()
                weight = checkpoint.shared()[0]["engine"]["models"][0]["weight"]
                assert (weight == weight[0, 0]).all()
                assert weight[0, 0] == number or (lasting and weight[0, 0] == self.tried)
        self.accelerator.wait_for_everyone()

    def _add_note(self, models: Any, weights: Any, output_dir: str) -> None:
        if self.rank == 0:
            Path(output_dir, "note.txt").write_text("by a hook")


def save_on_a_failing_disk(root: str, block: bool, lasting: bool) -> tuple[list[Any], set[Site]]:
    """Let each call of either process fail in turn; tells which calls failed, with what message here."""
    saving = Saving(f"{root}/run", block)
    failures = []
    with DiskFaults(root) as faults:
        assert saving.save("good") == ""
        for victim, error in itertools.product((0, 1), ERRORS):
            name = "good" if block else f"new-{victim}-{error}"  # replacing the last good one, or beside it
            for call in itertools.count(1):
                faults.arm(call if saving.rank == victim else 0, error, lasting)
                message = saving.save(name)
                site = gather_object([faults.disarm()])[victim]
                saving.look(lasting)
                if site is None:
                    assert message == ""
                    break
                if message:
                    failures.append((victim, error, site, message))
                else:
                    assert site.kind == "mkdir"  # the other process had made that directory
                assert saving.save("good") == "", site
                saving.look(lasting=False)
    return failures, faults.seen


@pytest.mark.parametrize(
    ("block", "lasting"),
    [(True, False), (False, False), (True, True)],
    ids=["at_once", "in_the_background", "and_ever_after"],
)
def test_a_call_that_fails_on_one_process_is_told_on_all_and_harms_nothing(
    block: bool, lasting: bool, tmp_path: Path
) -> None:
    (first, sites), (second, others) = run_in_processes(
        save_on_a_failing_disk, args=(str(tmp_path), block, lasting), timeout=240
    )
    assert first == second  # each with the same words
    for victim, error, site, message in first:
        assert f"rank {victim}: " in message, site
        assert os.strerror(error) in message, site
        assert str(tmp_path) in message, site
    failed = {(victim, error): len([one for one in first if one[:2] == (victim, error)]) for victim, error, *_ in first}
    print(f"{len(first)} failures", failed)
    assert set(failed) == set(itertools.product((0, 1), ERRORS))
    assert sites >= others
    if block and lasting:  # with the way back, which is taken only where something has failed
        assert sites & sites_in(*WRITTEN_BY) == sites_in(*WRITTEN_BY) - NOT_IN_A_SAVE


KEEPING = sites_in("callbacks/checkpoint_files.py") | NOT_IN_A_SAVE
HARMLESS = {
    Site("callbacks/checkpoint_files.py", "_link_or_copy", "link"),  # copied instead
    Site("checkpoint/storage.py", "remove", "rename"),  # the old one stays, with a warning
}


class FailAtEachCall(Callback):
    """Lets one call fail after every other save, one further on each time, and looks what is there then.

    Args:
        faults: what fails.
        error: with which error number.
        folder: the directory of the checkpoints.

    Attributes:
        failed: the calls that failed, and None where there was none left.
    """

    def __init__(self, faults: DiskFaults, error: int, folder: Path) -> None:
        self.faults, self.error, self.folder = faults, error, folder
        self.failed: list[Site | None] = []

    def on_train_batch_start(self, trainer: Trainer, task: Any, batch: Any, batch_idx: int) -> None:
        if not trainer.is_global_zero:
            return
        step, site = trainer.global_step, self.faults.disarm()
        if step:
            self._poll(step, site)
        if step and step % 2 == 0:
            self.failed.append(site)
        self.faults.arm((step + 1) // 2 if step % 2 else 0, self.error)

    def _poll(self, step: int, site: Site | None) -> None:
        names = sorted(os.listdir(self.folder))
        steps = {name: checkpoint_at(self.folder / name).step for name in names}  # none of them is half there
        was_told = site is not None and site not in HARMLESS
        assert steps.pop("last.ckpt") == step - was_told, site
        assert steps[f"step={step}.ckpt"] == step  # it had been written by then
        assert all(name == f"step={each}.ckpt" for name, each in steps.items())


class WritesFiles(Trainer):
    """Its checkpoints are files in Lightning's format."""

    @property
    def checkpoint_format(self) -> CheckpointFormat:
        return find_format("lightning")


def keep_on_a_failing_disk(
    root: str, save_last: str, error: int, kind: type[Trainer]
) -> tuple[list[Site | None], set[Site], int]:
    folder = Path(root) / "ckpt"
    keeping = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_last=save_last, on_save_error="warn")
    with DiskFaults(root, only=KEEPING) as faults:
        failing = FailAtEachCall(faults, error, folder)
        trainer = train(Regression({}), root, [failing, keeping], batches=40, epochs=1, kind=kind)
    return failing.failed, faults.seen, trainer.global_step


@pytest.mark.parametrize("error", ERRORS, ids=["ENOSPC", "EIO"])
def test_a_call_that_fails_in_keeping_the_last_checkpoint_leaves_the_one_before(error: int, tmp_path: Path) -> None:
    sites: set[Site] = set()
    for save_last, kind in (("copy", Trainer), ("link", Trainer), ("copy", WritesFiles)):
        root = tmp_path / f"{save_last} {kind.__name__}"
        (failed, seen, steps), (_, _, others) = run_in_processes(
            keep_on_a_failing_disk, args=(str(root), save_last, error, kind), timeout=120
        )
        assert steps == others == 40
        assert None not in failed[: failed.index(None)]
        assert set(failed) - {None} <= seen
        sites |= set(failed) - {None}
    assert sites == KEEPING
