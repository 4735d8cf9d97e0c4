"""The benchmarks run, compare what they say they compare, and write down what they measured."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.pool import ROOT, run_in_processes

BENCHMARKS = ROOT / "benchmarks"


def run_benchmark(name: str, *arguments: str) -> None:
    """Run a benchmark as `python benchmarks/name` would."""
    sys.path.insert(0, str(BENCHMARKS))
    sys.argv = [name, *arguments]
    try:
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
    except SystemExit as ended:  # click ends every command so
        if ended.code:
            raise


@pytest.mark.slow
@pytest.mark.parametrize("data", ["list", "loader"])
def test_overhead_measures_every_way_of_running_drivetrain(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "overhead.json"
    short = ("--rounds", "1", "--steps", "20", "--warmup", "5", "--only", "drivetrain", "--data", data)
    run_in_processes(run_benchmark, 1, args=("overhead.py", *short, "--json", str(file)), timeout=120)
    figures = json.loads(file.read_text())
    names = [
        "drivetrain Trainer",
        "drivetrain Trainer, log and bar",
        "drivetrain Trainer, ten callbacks, five values",
        "drivetrain Accelerator",
    ]
    assert [each["name"] for each in figures["results"]] == names
    assert all(each["median"] > 0 and each["rounds"] == 1 for each in figures["results"])
    printed = capsys.readouterr().out
    for name in names:
        assert f"| {name} |" in printed


def test_evaluation_measures_validation_and_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "evaluation.json"
    short = ("--model", "tiny", "--rounds", "1", "--steps", "10", "--turn", "5", "--only", "drivetrain")
    run_in_processes(run_benchmark, 1, args=("evaluation.py", *short, "--json", str(file)), timeout=60)
    works = ["validate, a loss", "validate, a loss and a metric", "predict"]
    assert [each["name"] for each in json.loads(file.read_text())] == [f"drivetrain: {work}" for work in works]
    assert "| drivetrain: predict |" in capsys.readouterr().out


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs posix_fadvise, which drops files from the cache")
def test_offload_measures_a_model_on_disk_beside_one_in_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "offload.json"
    small = ("--layers", "2", "--width", "64", "--rounds", "1", "--only", "drivetrain", "--folder", str(tmp_path))
    run_in_processes(run_benchmark, 1, args=("offload.py", *small, "--json", str(file)), timeout=60)
    figures = json.loads(file.read_text())
    names = [(name, batch) for batch in (1, 64) for name in ("ideal", "drivetrain")]
    assert [(each["name"], each["batch"]) for each in figures["forwards"]] == names
    assert all(each["cold"][0] > 0 and each["warm"][0] > 0 for each in figures["forwards"])
    names = {"cat, cold", "load, cold", "load, cold, into new memory", "cat, warm", "load, warm", "map"}
    assert set(figures["loading"]) == names
    assert "| drivetrain | 64 |" in capsys.readouterr().out


def test_a_filter_that_leaves_nothing_of_startup_names_what_there_is() -> None:
    command = [sys.executable, str(BENCHMARKS / "startup.py"), "--only", "Acelerator"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "'Acelerator'" in done.stderr
    assert "drivetrain, first Accelerator" in done.stderr
    assert "Traceback" not in done.stderr


def test_report_shows_both_runs_of_a_process() -> None:
    command = [sys.executable, str(BENCHMARKS / "report.py"), "--seconds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    header, _, row = done.stdout.splitlines()
    assert header.count("run of a process") == 2
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[0] == "1"
    assert all(float(cell.split()[0]) > 0.1 for cell in cells[1:])


def test_tokens_measures_the_trainer_beside_a_bare_loop(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    short = ("--size", "tiny", "--no-compile", "--precision", "bf16", "--rounds", "2", "--block", "1", "--rows", "2")
    run_in_processes(run_benchmark, 1, args=("tokens.py", *short, "--json", str(file)), timeout=120)
    (result,) = json.loads(file.read_text())["results"]
    assert len(result["bare"]) == len(result["own"]) == 2
    bare, own = result["losses"]
    assert own == pytest.approx(bare, abs=1e-6)


@pytest.mark.slow
def test_checkpoint_measures_both_ways_of_saving(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "checkpoint.json"
    short = ("--rounds", "1", "--params", "8e6", "--only", "drivetrain", "--folder", str(tmp_path))
    run_in_processes(run_benchmark, 1, args=("checkpoint.py", *short, "--json", str(file)), timeout=120)
    results = json.loads(file.read_text())["results"]
    assert [each["name"] for each in results] == ["drivetrain, save_state", "drivetrain, save_state(block=False)"]
    for each in results:
        assert each["state"] == pytest.approx(12 * 8e6, rel=0.1)
        assert each["bytes"] == pytest.approx(each["base_bytes"], rel=0.01)
        assert 0 < each["called"][0] <= each["durable"][0]
        assert each["blocked"][0] > 0
        assert len(each["longer"]) == len(each["in_all"]) == 1
        assert each["cpu"][0] > 0
    assert list(tmp_path.iterdir()) == [file]
    assert "torch.save + fsync" in capsys.readouterr().out


def count_memory(name: str, processes: int) -> list[dict[str, int]]:
    sys.path.insert(0, str(BENCHMARKS))
    measure = importlib.import_module("memory").measure
    return measure(name, processes, layers=1)


@pytest.mark.slow
def test_each_process_holds_its_share_under_fsdp_and_everything_under_ddp() -> None:
    [[alone]] = run_in_processes(count_memory, 1, args=("DDP", 1), timeout=120)
    assert alone["gradients"] == alone["parameters"]
    assert alone["optimizer"] == pytest.approx(2 * alone["parameters"], rel=1e-3)  # and the numbers of steps
    assert alone["other"] < 0.01 * alone["parameters"]
    for name, share in (("FSDP", 0.5), ("DDP", 1.0)):
        for counts in run_in_processes(count_memory, 2, args=(name, 2), timeout=120)[0]:
            assert sum(counts.values()) == pytest.approx(share * sum(alone.values()), rel=0.05), (name, counts)


def measure_peak(name: str, rows: int) -> float:
    sys.path.insert(0, str(BENCHMARKS))
    return importlib.import_module("peak").measure(name, width=128, rows=rows)


@pytest.mark.parametrize("rows", [16, 2048], ids=["gradients count", "activations count"])
def test_a_run_takes_no_more_memory_than_the_bare_loop(rows: int) -> None:
    def peak(name: str) -> float:
        return run_in_processes(measure_peak, 1, args=(name, rows), timeout=120)[0]

    bare = peak("bare loop")
    for name in ("drivetrain Trainer", "drivetrain Trainer, validation every 3 steps", "drivetrain Accelerator"):
        assert peak(name) <= 1.01 * bare, name


@pytest.mark.slow
def test_strategies_measures_both_loops_and_sees_that_they_compute_the_same(tmp_path: Path) -> None:
    file = tmp_path / "strategies.json"
    # One turn says nothing of their speed, so it may say that the target was missed.
    arguments = ["--rounds", "1", "--block", "1", "--only", "FSDP", "--only", "TP", "--json", str(file)]
    ended = subprocess.run(
        [sys.executable, str(BENCHMARKS / "strategies.py"), *arguments], capture_output=True, text=True
    )
    results = json.loads(file.read_text())["results"]
    assert [each["name"] for each in results] == ["FSDP", "TP"], ended.stderr
    for each in results:
        bare, own = each["losses"]
        assert own == pytest.approx(bare, abs=1e-5)
        assert f"| {each['name']} |" in ended.stdout


def test_overhead_says_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    run_in_processes(run_without_ignite, 1, timeout=120)
    assert "Ignite: left out, ignite is not installed" in capsys.readouterr().out


def run_without_ignite() -> None:
    found = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name == "ignite" else found(name, package)

    importlib.util.find_spec = find_spec
    short = ("--rounds", "1", "--steps", "2", "--warmup", "1")
    run_benchmark("overhead.py", *short, "--only", "Ignite", "--only", "drivetrain Accelerator")


def test_the_clock_times_the_steps_between_two_forwards_but_for_the_first_of_a_turn() -> None:
    timing = SimpleNamespace(**runpy.run_path(str(BENCHMARKS / "timing.py")))
    turns = timing.Turns()
    turns.end(1)  # so that this clock's turn does not end
    seconds = iter([10.0, 10.5, 20.0, 21.0])
    clock = timing.Clock(turns, 0, warmup=3, steps=7, turn=5, now=lambda: next(seconds))
    assert clock.total == timing.Clock.steps_of(3, 7, 5) == 3 + 2 * (5 + clock.SETTLING) + 1
    for _ in range(clock.total - 1):
        clock.tick()
    with pytest.raises(RuntimeError, match="only 23 of 24 steps"):
        _ = clock.microseconds_per_step
    clock.tick()
    assert clock.microseconds_per_step == pytest.approx(0.15e6)


def test_two_loops_run_in_turn_and_one_that_fails_leaves_the_rest_to_the_other() -> None:
    timing = SimpleNamespace(**runpy.run_path(str(BENCHMARKS / "timing.py")))
    turns, order = timing.Turns(), []

    def loop(number: int, fails_at: int | None = None) -> None:
        clock = timing.Clock(turns, number, warmup=1, steps=4, turn=2)
        for step in range(clock.total):
            if step == fails_at:
                raise ValueError("in the middle")
            clock.tick()
            order.append(number)

    timing.run_in_turn(turns, lambda: loop(0), lambda: loop(1))
    turn = 2 + timing.Clock.SETTLING
    assert order == [0] + [1] + [0] * turn + [1] * turn + [0] * turn + [0] + [1] * turn + [1]
    turns = timing.Turns()
    order.clear()
    with pytest.raises(ValueError, match="in the middle"):
        timing.run_in_turn(turns, lambda: loop(0, fails_at=3), lambda: loop(1))
    assert order.count(1) == 2 + 2 * turn


def test_a_comparison_pairs_each_measurement_with_the_base_line_right_before_it() -> None:
    compare = runpy.run_path(str(BENCHMARKS / "timing.py"))["compare"]
    base, own = iter([99.0, 10.0, 20.0, 30.0]), iter([99.0, 15.0, 24.0, 33.0])
    [result] = compare(lambda: next(base), {"contender": lambda: next(own)}, rounds=3)
    assert (result.base, result.own) == ([10.0, 20.0, 30.0], [15.0, 24.0, 33.0])
    assert result.added == pytest.approx(4.0)
    assert result.ratio == pytest.approx(1.2)


@pytest.mark.slow  # tests/trainer/test_startup.py asks the same of a process or two
def test_importing_drivetrain_and_the_first_trainer_load_nothing_heavy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "startup.json"
    only = ("--only", "import drivetrain", "--only", "first Trainer")
    run_in_processes(run_benchmark, 1, args=("startup.py", "--rounds", "1", *only, "--json", str(file)), timeout=120)
    rows = {each["name"]: each for each in json.loads(file.read_text())["results"]}
    assert rows["import drivetrain"]["loaded"] == []
    heavy = {"torchvision", "transformers", "tensorboard"}
    assert not heavy & set(rows["drivetrain, first Trainer"]["loaded"])


def test_device_maps_are_counted_by_how_they_end(tmp_path: Path) -> None:
    file = tmp_path / "maps.json"
    run_in_processes(run_benchmark, 1, args=("device_maps.py", "--cases", "20", "--json", str(file)), timeout=60)
    figures = json.loads(file.read_text())
    ours = figures["outcomes"]["drivetrain"]
    assert sum(ours.values()) == 20
    assert set(ours) <= {"holds", "refused"}
    assert figures["seconds"]["drivetrain"] > 0
