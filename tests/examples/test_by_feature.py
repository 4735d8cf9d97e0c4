"""The examples of one feature each: they learn on one and two processes, and where they must, with equal losses."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import pytest

from tests.examples.test_examples import EXAMPLES, run_example
from tests.pool import run_in_processes

pytestmark = pytest.mark.sharded  # a minute or so, which the default lane has not

FOLDER = EXAMPLES / "by_feature"
SHARED = "digits_data.py"
EQUAL = 2e-4
"""Largest difference of a last loss, printed with six digits, between one process and two after 200 steps or so."""


def run_feature(name: str, arguments: list[str]) -> None:
    """Run an example in a rank as the launcher would: its folder is where it imports from first."""
    sys.path.insert(0, str(FOLDER))
    run_example(f"by_feature/{name}", arguments)


PRINTED: dict[tuple[object, ...], str] = {}
"""What runs that several tests compare with have printed: they write nothing."""


def output_of(capsys: pytest.CaptureFixture[str], name: str, processes: int, *arguments: object) -> str:
    run_in_processes(run_feature, processes, args=(name, [str(each) for each in arguments]), timeout=240)
    return capsys.readouterr().out


def compared_output(capsys: pytest.CaptureFixture[str], *run: object) -> str:
    """The output of a run, which is run once for all tests."""
    if run not in PRINTED:
        PRINTED[run] = output_of(capsys, *run)  # type: ignore[arg-type]
    return PRINTED[run]


def figures_in(printed: str) -> tuple[float, float]:
    """The last loss and accuracy that were printed, by one process."""
    found = re.findall(r"last loss ([\d.]+), test accuracy ([\d.]+)%", printed)
    assert found, printed
    return float(found[-1][0]), float(found[-1][1])


def test_every_example_is_tested_here() -> None:
    tested = Path(__file__).read_text()
    assert [path.name for path in FOLDER.glob("*.py") if f'"{path.name}"' not in tested] == []


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("four_lines.py", []),
        ("distributed_evaluation.py", []),
        ("accumulate.py", []),
        ("cross_validation.py", []),
        ("comm_hooks.py", ["--hook", "none"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_two_processes_learn_as_one_does(name: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (compared_output(capsys, name, processes, *arguments) for processes in (1, 2))
    assert one.count("\n") == two.count("\n")  # printed once, not by each process
    (loss, accuracy), (other_loss, other_accuracy) = figures_in(one), figures_in(two)
    assert accuracy > 85
    assert other_loss == pytest.approx(loss, abs=EQUAL)
    assert other_accuracy == pytest.approx(accuracy, abs=0.4)  # an image on the border


def test_evaluation_on_two_processes_has_the_figures_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (compared_output(capsys, "distributed_evaluation.py", processes) for processes in (1, 2))
    assert [float(value) for value in re.findall(r"F1 ([\d.]+)", two)] == pytest.approx(
        [float(value) for value in re.findall(r"F1 ([\d.]+)", one)], abs=4e-3
    )


def test_micro_batches_train_as_the_whole_batch_does(capsys: pytest.CaptureFixture[str]) -> None:
    micro = compared_output(capsys, "accumulate.py", 2)
    whole = output_of(capsys, "accumulate.py", 1, "--steps", 1, "--batch-size", 64)
    assert re.findall(r"(\d+) steps", micro) == re.findall(r"(\d+) steps", whole) == ["138"]
    assert figures_in(micro)[0] == pytest.approx(figures_in(whole)[0], abs=EQUAL)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_run_resumes_in_mid_epoch_on_another_number_of_processes(
    before: int, after: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = output_of(capsys, "checkpointing.py", 1, "--output", tmp_path / "whole", "--epochs", 3)
    assert {path.name for path in (tmp_path / "whole").iterdir()} == {"epoch_1", "epoch_2", "epoch_3"}
    cut = ("--every", 30, "--epochs", 3, "--output", tmp_path / "cut")
    assert "stopped after 70 steps" in output_of(capsys, "checkpointing.py", before, *cut, "--stop-after", 70)
    assert {path.name for path in (tmp_path / "cut").iterdir()} == {"step_30", "step_60"}
    resumed = output_of(capsys, "checkpointing.py", after, *cut, "--resume", tmp_path / "cut" / "step_60")
    assert "138 steps" in resumed
    assert figures_in(resumed)[0] == pytest.approx(figures_in(whole)[0], abs=EQUAL)
    assert figures_in(resumed)[1] > 85


@pytest.mark.parametrize("processes", [1, 2])
def test_values_are_tracked_once(processes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trackers = ("--log-with", "csv", "--log-with", "tensorboard")
    printed = output_of(capsys, "tracking.py", processes, *trackers, "--output", tmp_path)
    loss, accuracy = figures_in(printed)
    assert accuracy > 85
    [metrics] = tmp_path.rglob("metrics.csv")
    rows = list(csv.DictReader(metrics.open()))
    steps = [int(row["step"]) for row in rows if row["loss"]]
    assert steps == list(range(10, 139, 10))
    accuracies = [float(row["accuracy"]) for row in rows if row["accuracy"]]
    assert len(accuracies) == 3
    assert 100 * accuracies[-1] == pytest.approx(accuracy, abs=0.05)
    assert float(next(row["loss"] for row in rows if row["loss"])) > loss
    assert list(tmp_path.rglob("events.out.tfevents.*"))


@pytest.mark.parametrize("processes", [1, 2])
def test_all_processes_stop_at_the_same_early_step(processes: int, capsys: pytest.CaptureFixture[str]) -> None:
    printed = output_of(capsys, "early_stopping.py", processes)
    [steps] = re.findall(r"steps of each process: \[([\d, ]+)\]", printed)
    taken = [int(each) for each in steps.split(",")]
    assert len(taken) == processes
    assert len(set(taken)) == 1
    assert 10 < taken[0] < 460  # of ten epochs
    assert figures_in(printed)[1] > 80


@pytest.mark.parametrize("hook", ["fp16", "bf16", "powersgd"])
def test_compressed_gradients_train_nearly_as_well(hook: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain, hooked = (compared_output(capsys, "comm_hooks.py", 2, "--hook", each) for each in ("none", hook))
    assert figures_in(hooked)[1] > 85
    difference = abs(figures_in(hooked)[0] - figures_in(plain)[0])
    assert 0 < difference < 0.15  # other gradients, and nearly the same model


@pytest.mark.parametrize("every", [1, 8])
def test_processes_that_step_alone_end_with_one_model(every: int, capsys: pytest.CaptureFixture[str]) -> None:
    printed = output_of(capsys, "local_sgd.py", 2, "--every", every)
    [norms] = re.findall(r"on each process: \[([\d., ]+)\]", printed)
    first, second = norms.split(",")
    assert float(first) == float(second)
    assert figures_in(printed)[1] > 85
    alone = compared_output(capsys, "local_sgd.py", 1)  # has nothing to average, and is plain SGD
    assert figures_in(alone)[0] == pytest.approx(figures_in(compared_output(capsys, "four_lines.py", 1))[0], abs=EQUAL)


@pytest.mark.parametrize("processes", [1, 2])
def test_each_process_writes_a_trace_of_what_it_ran(
    processes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = output_of(capsys, "profiler.py", processes, "--output", tmp_path, "--steps", 5)
    assert "10 products in the forwards of 5 steps" in printed
    assert figures_in(printed)[1] > 85
    for rank in range(processes):
        events = json.loads((tmp_path / f"profile_{rank}.json").read_text())["traceEvents"]
        assert sum(event.get("name") == "aten::addmm" for event in events) == 10


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, where a process's memory can be capped")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_batch_that_does_not_fit_is_made_smaller(processes: int, capsys: pytest.CaptureFixture[str]) -> None:
    printed = output_of(capsys, "automatic_batch_size.py", processes, "--spare", 600, "--epochs", 3)
    assert re.findall(r"trying (\d+) images", printed) == ["1024", "256"]
    assert "trained with 256 images" in printed
    assert figures_in(printed)[1] > 50  # after nine steps or eighteen
