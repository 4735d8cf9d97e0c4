"""`Trainer(profiler=...)`: what is measured, what is reported, and that nothing is without one."""

from __future__ import annotations

import cProfile
import gc
import json
import sys
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import (
    AdvancedProfiler,
    Callback,
    ConfigurationError,
    EarlyStopping,
    PassThroughProfiler,
    Profiler,
    PyTorchProfiler,
    SimpleProfiler,
    Trainer,
    XLAProfiler,
)
from drivetrain.trainer.profilers import actions as profiled
from tests.pool import run_in_processes
from tests.trainer.tasks import Weight, ones


def quiet(tmp_path: Path, **options: Any) -> Trainer:
    given = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    given |= {"enable_model_summary": False, "accelerator": "cpu", "default_root_dir": tmp_path}
    return Trainer(**(given | options))


class Counting(Profiler):
    def __init__(self) -> None:
        super().__init__()
        self.began: list[str] = []
        self.ended: list[str] = []
        self.moments: list[str] = []

    def start(self, action_name: str) -> None:
        self.began.append(action_name)

    def stop(self, action_name: str) -> None:
        self.ended.append(action_name)

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        self.moments.append(f"setup {stage}")

    def summary(self) -> str:
        self.moments.append("summary")
        return ""

    def teardown(self, stage: str | None) -> None:
        self.moments.append(f"teardown {stage}")


class Sleeping(Callback):
    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(0.01)


class Validated(Weight):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with self.trainer.profiler.profile("mine"):
            self.log("val_loss", self.w)


class ByHand(Validated):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().zero_grad()
        self.manual_backward(self.w * batch[0].mean())
        self.optimizers().step()


# what is measured


@pytest.mark.parametrize("task", [Validated, ByHand])
def test_every_part_of_a_run_is_an_action(tmp_path: Path, task: type[Weight]) -> None:
    profiler = Counting()
    quiet(tmp_path, profiler=profiler, max_epochs=2, callbacks=[Sleeping()]).fit(task(), ones(6, 2), ones(4, 2))
    counts = {name: profiler.began.count(name) for name in profiler.began}
    assert counts["run_training_epoch"] == 2
    assert counts["run_training_batch"] == 6
    assert counts["train_dataloader_next"] == 6
    assert counts["[Strategy]Single.training_step"] == 6
    assert counts["[Strategy]Single.backward"] == 6
    assert counts["[Strategy]Single.optimizer_step"] == 6
    assert counts["[Callback]Sleeping.on_train_batch_end"] == 6
    assert counts["run_validation"] == 2
    assert counts["[Strategy]Single.validation_step"] == counts["mine"] == 6  # 2 of them in the sanity check
    assert counts[f"[Task]{task.__name__}.configure_optimizers"] == 1
    assert counts["setup_train_dataloader"] == 1
    assert sorted(profiler.began) == sorted(profiler.ended)
    assert profiler.moments == ["setup fit", "summary", "teardown fit"]


@pytest.mark.parametrize(("verb", "step"), [("validate", "validation"), ("test", "test"), ("predict", "predict")])
def test_the_other_verbs_are_measured_too(tmp_path: Path, verb: str, step: str) -> None:
    class Evaluated(Validated):
        test_step = Validated.validation_step

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch[0]

    profiler = Counting()
    getattr(quiet(tmp_path, profiler=profiler), verb)(Evaluated(), ones(4, 2))
    assert profiler.began.count(f"[Strategy]Single.{step}_step") == 2
    assert profiler.moments == [f"setup {verb}", "summary", f"teardown {verb}"]


def test_saves_are_measured(tmp_path: Path) -> None:
    profiler = Counting()
    quiet(tmp_path, profiler=profiler, enable_checkpointing=True).fit(Weight(), ones(2))
    assert profiler.began.count("save_checkpoint") == 1


def test_callbacks_of_one_class_are_measured_apart(tmp_path: Path) -> None:
    profiler = Counting()
    twins = [EarlyStopping("val_loss"), EarlyStopping("val_loss", mode="max")]
    quiet(tmp_path, profiler=profiler, callbacks=twins).fit(Validated(), ones(2), ones(2))
    hooks = {name for name in profiler.began if name.endswith("on_validation_end")}
    assert hooks == {f"[Callback]{twin.state_key}.on_validation_end" for twin in twins}


def test_what_a_profiler_begins_ends_when_a_run_fails(tmp_path: Path) -> None:
    class Failing(Weight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("on purpose")

    profiler = Counting()
    with pytest.raises(RuntimeError, match="on purpose"):
        quiet(tmp_path, profiler=profiler).fit(Failing(), ones(2))
    assert sorted(profiler.began) == sorted(profiler.ended)
    assert profiler.moments[-1] == "teardown fit"


def test_a_task_reaches_the_profiler_and_may_have_its_own(tmp_path: Path) -> None:
    task = Weight()
    assert isinstance(task.profiler, PassThroughProfiler)
    trainer = quiet(tmp_path, profiler="simple")
    trainer.fit(task, ones(2))
    assert task.profiler is trainer.profiler
    task.profiler = own = AdvancedProfiler()
    assert task.profiler is own


def test_without_a_profiler_the_loop_makes_not_one_more_call(tmp_path: Path) -> None:
    """Counted as Python sees calls: what is asked once in a run, whatever its length."""
    room = Path(profiled.__file__).parent.as_posix()

    def calls_of(steps: int) -> int:
        trainer, task, loader = quiet(tmp_path, max_steps=steps, max_epochs=-1), Weight(), ones(steps)
        counted = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal counted
            counted += event == "call" and frame.f_code.co_filename.startswith(room)

        gc.collect()
        gc.disable()  # what earlier tests left is not collected meanwhile: an unfinished generator is called once more
        sys.setprofile(count)
        try:
            trainer.fit(task, loader)
        finally:
            sys.setprofile(None)
            gc.enable()
        return counted

    calls_of(2)
    assert 0 < calls_of(4) == calls_of(40)


# which profiler


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, PassThroughProfiler),
        ("simple", SimpleProfiler),
        ("Advanced", AdvancedProfiler),
        ("pytorch", PyTorchProfiler),
        ("xla", XLAProfiler),
        (SimpleProfiler(), SimpleProfiler),
    ],
)
def test_a_profiler_is_given_by_name_or_as_it_is(given: Any, expected: type[Profiler]) -> None:
    assert isinstance(Trainer(profiler=given, logger=False).profiler, expected)


@pytest.mark.parametrize("given", ["simpel", 3, SimpleProfiler])
def test_anything_else_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"profiler=.* Use one of 'simple', 'advanced', 'pytorch', 'xla'"):
        Trainer(profiler=given, logger=False)


def test_barebones_has_no_profiler() -> None:
    with pytest.raises(ConfigurationError, match="barebones=True, profiler='simple'"):
        Trainer(profiler="simple", barebones=True)


# simple


def test_simple_measures_what_passes_and_what_is_in_it() -> None:
    profiler = SimpleProfiler()
    with profiler.profile("outer"):
        time.sleep(0.02)
        with profiler.profile("inner"):
            time.sleep(0.03)
    assert profiler.recorded_durations["outer"][0] >= 0.05
    assert profiler.recorded_durations["inner"][0] >= 0.03
    assert profiler.own_seconds["outer"] + profiler.own_seconds["inner"] == pytest.approx(
        profiler.recorded_durations["outer"][0]
    )
    assert deepcopy(profiler).recorded_durations.keys() == {"outer", "inner"}


def test_simple_refuses_what_does_not_pair() -> None:
    profiler = SimpleProfiler()
    with pytest.raises(ValueError, match="never started"):
        profiler.stop("a")
    profiler.start("a")
    with pytest.raises(ValueError, match="Attempted to start a"):
        profiler.start("a")


@pytest.mark.parametrize("extended", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_simple_reports_the_longest_first(tmp_path: Path, extended: bool) -> None:
    profiler = SimpleProfiler(tmp_path, "times", extended)
    quiet(tmp_path, profiler=profiler, callbacks=[Sleeping()]).fit(Weight(), ones(4))
    lines = (tmp_path / "fit-times.txt").read_text().splitlines()
    assert lines[0] == "FIT Profiler Report"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert (
        rows[0]
        == ["Action", "Mean duration (s)", *["Num calls"] * extended, "Total time (s)"] + ["Percentage %"] * extended
    )
    row = next(row for row in rows if row[0] == "[Callback]Sleeping.on_train_batch_end")
    assert float(row[1]) >= 0.01
    totals = [float(row[3 if extended else 2]) for row in rows[1 + extended :]]
    assert totals == sorted(totals, reverse=True)
    if extended:
        assert row[2] == "4"


def test_the_report_is_printed_where_no_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet(tmp_path, profiler="simple").fit(Weight(), ones(2))
    assert capsys.readouterr().out.count("FIT Profiler Report") == 1


def fit_profiled(folder: str) -> None:
    trainer = quiet(Path(folder), profiler=SimpleProfiler(folder, "times"), strategy="ddp")
    trainer.fit(Weight(), ones(4))


@pytest.mark.slow
def test_each_process_writes_its_own_report(tmp_path: Path) -> None:
    run_in_processes(fit_profiled, 2, (str(tmp_path),))
    assert {path.name for path in tmp_path.iterdir()} == {"fit-times-0.txt", "fit-times-1.txt"}
    assert "DDP.training_step" in (tmp_path / "fit-times-1.txt").read_text()


# advanced


def test_advanced_reports_the_functions_of_each_action(tmp_path: Path) -> None:
    profiler = AdvancedProfiler(tmp_path, "functions", line_count_restriction=5, dump_stats=True)
    quiet(tmp_path, profiler=profiler, callbacks=[Sleeping()]).fit(Weight(), ones(2))
    report = (tmp_path / "fit-functions.txt").read_text()
    action = report.split("Profile stats for: [Callback]Sleeping.on_train_batch_end")[1].split("Profile stats")[0]
    assert "{built-in method time.sleep}" in action
    assert list(tmp_path.glob("fit-functions-*Sleeping.on_train_batch_end.prof"))


def test_advanced_measures_an_action_in_another_one() -> None:
    profiler = AdvancedProfiler()
    with profiler.profile("outer"):
        time.sleep(0.01)
        with profiler.profile("inner"):
            sorted([3, 1, 2])
        len([])
    called = {
        name: str([each.code for each in profiler.profiled_actions[name].getstats()]) for name in ("outer", "inner")
    }
    assert "sleep" in called["outer"]
    assert "built-in method builtins.len" in called["outer"]  # after the inner one, too
    assert "sorted" in called["inner"]
    assert isinstance(profiler.profiled_actions["outer"], cProfile.Profile)


def test_advanced_refuses_what_does_not_pair() -> None:
    with pytest.raises(ValueError, match="Attempting to stop recording"):
        AdvancedProfiler().stop("a")


# torch's


class Blocks(Validated):
    def __init__(self) -> None:
        super().__init__(lr=0.1)
        self.layer = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.ReLU())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch[0]).sum() * self.w
        loss.item()
        return loss


def trace(path: Path) -> set[str]:
    return {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}


def test_pytorch_writes_a_trace_of_the_steps_of_its_schedule(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path, "operations")
    quiet(tmp_path, profiler=profiler).fit(Blocks(), ones(8), ones(6))
    names = trace(tmp_path / "fit-operations-training_step.pt.trace.json")
    assert {"ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"} <= names
    assert "ProfilerStep#5" not in names
    assert "[drivetrain][profile][Strategy]Single.backward" in names
    assert "[drivetrain][module]torch.nn.modules.linear.Linear: layer.0" in names
    assert [path.name for path in tmp_path.glob("*validation_step*.json")] != []
    report = (tmp_path / "fit-operations.txt").read_text()
    assert "aten::linear" in report
    assert "[Strategy]Single.training_step reads a tensor's value 1 times per call (item;" in report


def test_pytorch_records_all_steps_of_an_epoch_that_has_few(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path, "operations", record_module_names=False)
    with pytest.warns(UserWarning, match="3 calls of training_step, not enough steps to properly record traces"):
        quiet(tmp_path, profiler=profiler).fit(Blocks(), ones(3))
    names = trace(tmp_path / "fit-operations-training_step.pt.trace.json")
    assert {"ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#2"} <= names
    assert not any("[module]" in name for name in names)


def test_pytorch_follows_a_schedule_of_the_user(tmp_path: Path) -> None:
    ready: list[int] = []
    steps = torch.profiler.schedule(wait=0, warmup=1, active=1)
    profiler = PyTorchProfiler(tmp_path, schedule=steps, on_trace_ready=lambda given: ready.append(given.step_num))
    quiet(tmp_path, profiler=profiler, limit_val_batches=0).fit(Blocks(), ones(7))
    assert ready == [2, 4, 6]
    assert list(tmp_path.iterdir()) == []


def test_pytorch_records_everything_without_a_schedule(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path, schedule=None, export_to_chrome=False)
    with profiler.profile("a"), profiler.profile("b"):
        torch.ones(2) + 1
    assert "aten::add" in profiler.summary()
    names = {event.name for event in profiler.function_events}
    assert {"[drivetrain][profile]a", "[drivetrain][profile]b", "aten::add"} <= names
    assert deepcopy(profiler) is not profiler


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"table_kwargs": {"row_limit": 3}}, "row_limit. This is already a positional argument"),
        ({"table_kwargs": {"widht": 3}}, "Found invalid table_kwargs key: widht. Allowed are row_limit"),
        ({"record_shape": True}, "record_shape=...\\): torch.profiler.profile has no such argument"),
    ],
)
def test_pytorch_refuses_what_torch_does_not_take(given: dict[str, Any], message: str) -> None:
    with pytest.raises((KeyError, ConfigurationError), match=message):
        PyTorchProfiler(**given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_pytorch_has_no_nvtx_without_a_gpu() -> None:
    with pytest.raises(ConfigurationError, match="requires an NVIDIA GPU"):
        PyTorchProfiler(emit_nvtx=True)


def test_files_of_a_run_whose_root_is_a_url_go_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(
        max_epochs=1,
        default_root_dir="memory://profiled/root",
        profiler=SimpleProfiler(filename="report"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Weight(), ones(2))
    assert [path.name for path in tmp_path.iterdir()] == ["fit-report.txt"]
