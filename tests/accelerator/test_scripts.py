"""The four-line change: scripts of Accelerate's documentation run word for word with only their import changed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from tests.accelerator import scripts
from tests.pool import run_in_processes

ROOT = Path(__file__).parents[2]
CLEARS_FIRST = "accumulate, clearing first"
ACCELERATE = ROOT / ".venv-bench" / "bin" / "python"

# The import name stands for Accelerate's own here: nothing of this package is in that interpreter's way.
SIDE_BY_SIDE = """
import json, re, sys
sys.path.insert(0, {root!r})
import importlib.util
spec = importlib.util.spec_from_file_location("scripts", {path!r})
scripts = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scripts)
from accelerate.state import AcceleratorState, GradientState, PartialState
results = {{}}
for name in scripts.BODIES:
    results[name] = scripts.run(name, {folder!r}, scripts.source(name))
    AcceleratorState._reset_state(True); GradientState._reset_state()
print("RESULTS" + json.dumps(results))
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[float]]]:
    """What every script gives in one process."""
    return run_in_processes(scripts.run_all, 1, args=(str(tmp_path_factory.mktemp("alone")),), timeout=120)[0]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, list[float]]]]:
    """What every script gives in each of two processes."""
    folder = tmp_path_factory.mktemp("together")
    return [dict(zip(scripts.BODIES, each, strict=True)) for each in zip(*_run_each(str(folder)), strict=True)]


def _run_each(folder: str) -> list[list[dict[str, list[float]]]]:
    return [run_in_processes(scripts.run, 2, args=(name, folder), timeout=60) for name in scripts.BODIES]


@pytest.mark.parametrize("name", scripts.BODIES)
def test_runs_in_one_process(name, alone):
    assert len(alone[name]["parameters"]) == 6 * 8 + 8 + 8 * 3 + 3


@pytest.mark.parametrize("name", scripts.BODIES)
def test_two_processes_hold_the_same_model(name, together):
    first, second = (each[name]["parameters"] for each in together)
    assert first == second


# With whole batches of 4 for each process, two processes train on global batches of 8.
@pytest.mark.parametrize("name", ["four lines", "without a scheduler", "clip", "accumulate"])
def test_two_processes_train_as_one_on_global_batches(name, together, tmp_path):
    text = scripts.moved(name).replace("batch_size=4", "batch_size=8")
    if "scheduler.step()" in text:  # once per process, as Accelerate does
        text = text.replace("scheduler.step()", "scheduler.step(); scheduler.step()")
    expected = run_in_processes(scripts.run, 1, args=(name, str(tmp_path), text))[0]
    for each in together:
        assert each[name]["parameters"] == pytest.approx(expected["parameters"], abs=5e-6)
        for key in expected.keys() - {"parameters", "losses", "synced"}:
            assert each[name][key] == pytest.approx(expected[key], abs=5e-6), key


def test_split_batches_train_two_processes_on_the_batches_of_one(alone, together):
    name = "handlers and utilities"
    for each in together:
        assert each[name]["parameters"] == pytest.approx(alone[name]["parameters"], abs=5e-6)
        assert each[name]["rates"] == alone[name]["rates"]


def test_evaluation_over_two_processes_sees_each_sample_once_and_in_order(alone, together):
    for each in [alone, *together]:
        assert each["evaluate"]["numbers"] == list(range(13))
        assert each["evaluate"]["sums"] == pytest.approx(alone["evaluate"]["sums"], abs=1e-6)


def test_clearing_before_the_backward_accumulates_as_plain_torch_does(alone):
    namespace: dict = {}
    exec(scripts.HEAD, namespace)
    model, optimizer, scheduler = namespace["model"], namespace["optimizer"], namespace["scheduler"]
    for index, (inputs, targets) in enumerate(namespace["training_dataloader"]):
        (namespace["loss_function"](model(inputs), targets) / 4).backward()
        if index % 4 == 3:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert alone[CLEARS_FIRST]["parameters"] == pytest.approx(parameters.tolist(), abs=1e-7)


def test_unprepared_torch_gives_the_same_as_the_four_lines(alone):
    namespace: dict = {}
    exec(scripts.HEAD, namespace)
    model, optimizer, scheduler = namespace["model"], namespace["optimizer"], namespace["scheduler"]
    for inputs, targets in namespace["training_dataloader"]:
        optimizer.zero_grad()
        namespace["loss_function"](model(inputs), targets).backward()
        optimizer.step()
        scheduler.step()
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert alone["four lines"]["parameters"] == parameters.tolist()


@pytest.mark.skipif(not ACCELERATE.exists(), reason="Accelerate is not installed in .venv-bench (make bench)")
def test_accelerate_itself_gives_the_same_numbers(alone, tmp_path):
    code = SIDE_BY_SIDE.format(root="", path=str(Path(scripts.__file__)), folder=str(tmp_path))
    done = subprocess.run(
        [str(ACCELERATE), "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.split("RESULTS")[1])
    # Accelerate clears at a micro-batch that ends a window whatever is held, so clearing first loses the others there.
    assert alone[CLEARS_FIRST]["parameters"] != pytest.approx(results.pop(CLEARS_FIRST)["parameters"], abs=1e-4)
    for name, expected in results.items():
        for key, values in expected.items():
            assert alone[name][key] == pytest.approx(values, abs=5e-6), (name, key)
