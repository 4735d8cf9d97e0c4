from __future__ import annotations

import csv
import json
import logging
import os
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain import PartialState
from drivetrain.callbacks import Callback
from drivetrain.trackers import CSVLogger
from tests.callbacks.tasks import Scripted, fit
from tests.launch.launching import end, started, write_script
from tests.pool import ROOT, ProcessesFailed, run_in_processes
from tests.trainer.tasks import Weight, ones, quiet, rows

INJECTED = [
    "setup",
    "on_fit_start",
    "on_sanity_check_start",
    "on_sanity_check_end",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
]


class Breaks(Callback):
    """Raises the given time that a hook is called."""

    def __init__(self, hook: str, call: int) -> None:
        self.hook, self.left = hook, call
        self.torn_down = 0


def _hook(name: str) -> Any:
    def run(self: Breaks, trainer: Any, *args: Any) -> None:
        self.torn_down += name == "teardown"
        if name != self.hook or (trainer.sanity_checking and "sanity" not in name):
            return
        self.left -= 1
        if self.left == 0:
            raise ZeroDivisionError(name)

    return run


for each in INJECTED:
    setattr(Breaks, each, _hook(each))


class Ends(Callback):
    """Counts how often it is torn down, and what ended the run."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def on_exception(self, trainer: Any, task: Any, exception: BaseException) -> None:
        self.ended.append(str(exception))

    def teardown(self, trainer: Any, task: Any, stage: str) -> None:
        self.ended.append(f"teardown of {stage}")


class Logs(Scripted):
    """Logs in steps, validations and at the end of epochs; keeps what of it is complete."""

    def __init__(self) -> None:
        super().__init__([1.0] * 9)
        self.kept: dict[tuple[str, int], float] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("value", 10.0 + self.trainer.global_step)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("of_the_epoch", 5.0 + self.current_epoch)
        self.kept["of_the_epoch", self.global_step] = 5.0 + self.current_epoch


class Keeps(Ends):
    """Keeps what a step has logged once it is taken, and a validation once it has seen all of its data."""

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        task.kept["value", trainer.global_step] = 9.0 + trainer.global_step

    def on_validation_epoch_end(self, trainer: Any, task: Any) -> None:
        if not trainer.sanity_checking:
            task.kept["val_loss", trainer.global_step] = 1.0


@pytest.mark.parametrize("hook", INJECTED)
def test_wherever_a_run_breaks_nothing_logged_is_lost_and_all_are_torn_down(hook: str, tmp_path: Path) -> None:
    first, breaks, last, task = Keeps(), Breaks(hook, 2 if "batch" in hook or "before" in hook else 1), Ends(), Logs()
    logger = CSVLogger(tmp_path, name=None, version="run")
    callbacks = [first, breaks, last]
    with pytest.raises(ZeroDivisionError, match=hook):
        fit(task, tmp_path, 2, callbacks, logger=logger, log_every_n_steps=1, num_sanity_val_steps=1)
    written, found = tmp_path / "run" / "metrics.csv", {}
    if written.exists() or task.kept:
        with written.open() as file:
            for row in csv.DictReader(file):
                found |= {(name, int(row["step"])): float(value) for name, value in row.items() if value}
    assert task.kept.items() <= found.items()
    assert breaks.torn_down == 1
    assert [ends.ended[-1] for ends in (first, last)] == ["teardown of fit"] * 2


class LogsBoth(Logs):
    """Logs a value of each process, and one that is the mean over processes."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        own = 10.0 * (1 + self.trainer.global_rank) + self.trainer.global_step
        self.log("own", own)
        self.log("both", own, sync_dist=True)
        return Scripted.training_step(self, batch, batch_idx)


def broken_on(hook: str, ranks: list[int], root: Path) -> tuple[str, int, float, list[str]]:
    """Break a run on some of two processes; what it raised, at which step, in which time, and the warnings."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    is_broken = PartialState().process_index in ranks
    call = 2 if "batch" in hook or "before" in hook or "after" in hook else 1
    callbacks: list[Callback] = [Breaks(hook if is_broken else "none", call), Ends()]
    logger, handler = CSVLogger(root, name=None, version="run"), Keep()
    logging.getLogger("drivetrain").addHandler(handler)
    task, raised, began = LogsBoth(), "", time.monotonic()
    try:
        fit(task, root, 2, callbacks, logger=logger, log_every_n_steps=1)
    except Exception as error:
        raised = type(error).__name__
    finally:
        logging.getLogger("drivetrain").removeHandler(handler)
    return (
        raised,
        task.trainer.global_step,
        time.monotonic() - began,
        [each for each in messages if "could not be reduced" in each],
    )


def rows_of(root: Path) -> dict[tuple[str, int], float]:
    with (root / "run" / "metrics.csv").open() as file:
        return {
            (name, int(row["step"])): float(value)
            for row in csv.DictReader(file)
            for name, value in row.items()
            if value and name in ("own", "both")
        }


@pytest.mark.parametrize("hook", [each for each in INJECTED if "train" in each or "before" in each or "after" in each])
def test_nothing_logged_is_lost_where_two_processes_break(hook: str, tmp_path: Path) -> None:
    ends = run_in_processes(broken_on, args=(hook, [0, 1], tmp_path), timeout=60)
    assert [raised for raised, *_ in ends] == ["ZeroDivisionError"] * 2
    step = ends[0][1]
    found = rows_of(tmp_path) if step else {}
    for taken in range(1, step + 1):
        assert found["own", taken] == 9.0 + taken
        assert found["both", taken] == 14.0 + taken
    assert [warnings for *_, warnings in ends] == [[], []]


def broken_alone(root: Path) -> None:
    """Break a run on rank 0 and leave at once; what there was to see goes into a file."""
    seen = broken_on("on_train_batch_end", [0], root)
    if PartialState().process_index == 0:
        (root / "seen.json").write_text(json.dumps(seen))
        os._exit(3)


def test_what_one_process_has_is_written_where_it_breaks_alone(tmp_path: Path) -> None:
    with pytest.raises(ProcessesFailed):
        run_in_processes(broken_alone, args=(tmp_path,), timeout=60)
    raised, step, seconds, warned = json.loads((tmp_path / "seen.json").read_text())
    assert (raised, step) == ("ZeroDivisionError", 2)
    assert seconds < 30
    found = rows_of(tmp_path)
    assert (found["own", 1], found["both", 1]) == (10.0, 15.0)
    assert found["own", 2] == 11.0
    assert found["both", 2] == 11.0  # of rank 0 alone
    assert len(warned) == 1
    assert "the last values of both (step 2) could not be reduced. The trackers receive those of rank 0" in warned[0]


BREAKS_ON_RANK_1 = """
    import json, pathlib
    from tests.trainer.test_hooks import broken_on
    seen = broken_on("on_train_batch_end", [1], pathlib.Path("."))
    pathlib.Path(f"seen_{RANK}.json").write_text(json.dumps(seen))
"""


def test_what_the_main_process_has_is_written_where_its_peer_is_gone(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "DRIVETRAIN_USE_CPU": "1",
    }
    with ExitStack() as stack:
        processes = []
        for rank in (0, 1):
            script = write_script(tmp_path, BREAKS_ON_RANK_1.replace("{RANK}", str(rank)), f"rank_{rank}.py")
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(stack.enter_context(started(str(script), cwd=tmp_path, **variables, **place)))
        ended = [end(process, time.monotonic(), 60) for process in processes]
    assert [each.code for each in ended] == [0, 0], [each.err for each in ended]
    raised, step, _, warned = json.loads((tmp_path / "seen_0.json").read_text())
    assert raised != "ZeroDivisionError"
    assert step >= 2
    found = rows_of(tmp_path)
    assert (found["own", 1], found["both", 1]) == (10.0, 15.0)
    assert found["own", 2] == 11.0
    assert found["both", 2] in (11.0, 16.0), "of rank 0 alone, or of both where rank 1 had still come there"
    assert found["own", step] == 9.0 + step
    assert bool(warned) == (found["both", step] == 9.0 + step)


def test_all_are_torn_down_where_several_raise_and_the_first_error_is_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, last = Breaks("teardown", 1), Breaks("teardown", 1), Ends()
    with caplog.at_level(logging.ERROR), pytest.raises(ZeroDivisionError):
        fit(Scripted([1]), tmp_path, 1, [first, second, last])
    assert (first.torn_down, second.torn_down, last.ended) == (1, 1, ["teardown of fit"])
    assert caplog.text.count("teardown raised ZeroDivisionError") == 2


def test_an_error_in_on_exception_hides_neither_the_first_one_nor_the_other_hooks(tmp_path: Path) -> None:
    class Worse(Callback):
        def on_exception(self, trainer: Any, task: Any, exception: BaseException) -> None:
            raise KeyError("worse")

    last = Ends()
    with pytest.raises(ZeroDivisionError, match="on_train_batch_end"):
        fit(Scripted([1]), tmp_path, 1, [Worse(), Breaks("on_train_batch_end", 1), last])
    assert last.ended == ["on_train_batch_end", "teardown of fit"]


def test_hooks_of_evaluation_batches_may_leave_the_loader_out(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Short(Callback):
        def on_validation_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            seen.append(batch_idx)

    class Task(Scripted):
        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            seen.append(torch.is_tensor(batch[0]))

    fit(Task([1]), tmp_path, 1, [Short()], num_sanity_val_steps=0, limit_val_batches=1)
    assert seen == [0, True]


@pytest.mark.parametrize(("loaders", "passed"), [(1, [(), (0,)]), (2, [(0,), (0,), (1,), (1,)])])
def test_hooks_get_the_number_of_the_loader_where_there_are_several_or_they_need_it(loaders: int, passed: Any) -> None:
    seen: list[Any] = []

    class Takes(Callback):
        def on_validation_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int, *more: int) -> None:
            seen.append(more)

    class Needs(Callback):
        def on_validation_batch_start(  # type: ignore[override]
            self, trainer: Any, task: Any, batch: Any, batch_idx: int, dataloader_idx: int
        ) -> None:
            seen.append((dataloader_idx,))

    trainer = quiet([Takes(), Needs()], limit_val_batches=1)
    trainer.validate(Weight(), [rows([1.0])] * loaders, verbose=False)
    assert seen == passed


def test_the_stage_comes_by_its_name_where_a_hook_has_it_and_else_by_its_place() -> None:
    seen: list[Any] = []

    class Named(Callback):
        def setup(self, trainer: Any, task: Any, *args: Any, **kwargs: Any) -> None:
            seen.append((args, kwargs))

    class Other(Callback):
        def setup(self, trainer: Any, task: Any, phase: str) -> None:  # type: ignore[override]
            seen.append(phase)

    quiet([Named(), Other()]).validate(Weight(), rows([1.0]), verbose=False)
    assert seen == [((), {"stage": "validate"}), "validate"]


def test_a_hook_of_the_mode_may_be_none() -> None:
    task: Any = Weight()
    task.on_validation_model_train = None
    quiet().validate(task, rows([1.0]), verbose=False)
    assert task.training


def test_a_tasks_callbacks_replace_those_of_their_class_and_of_its_bases() -> None:
    class Base(Callback):
        pass

    class Derived(Base):
        pass

    class Brings(Weight):
        def configure_callbacks(self) -> Any:
            return Derived()

    trainer = quiet(callbacks=[Callback(), Base(), Derived(), Base()])
    trainer.fit(Brings(), ones(1))
    assert [type(each) for each in trainer.callbacks] == [Callback, Derived]
