"""The notebook for TPUs, on one XLA device of the CPU and, where there is no XLA, on the CPU as it is."""

from __future__ import annotations

import re

import pytest

from tests.examples.test_examples import run_example
from tests.pool import run_in_processes
from tests.strategies.xla.running import environment


def accuracies(printed: str) -> list[float]:
    found = re.findall(r"epoch +\d+  test accuracy ([\d.]+)% of (\d+) images", printed)
    assert {images for _, images in found} == {"300"}, printed
    return [float(accuracy) for accuracy, _ in found]


@pytest.mark.xla
@pytest.mark.timeout(600)
def test_the_notebook_trains_on_one_xla_device(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--num-processes", "1", "--epochs", "3"]
    run_in_processes(run_example, 1, args=("tpu_notebook.py", arguments), env=environment(), timeout=400)
    found = accuracies(capsys.readouterr().out)
    assert len(found) == 3
    assert found[-1] > 90


def test_the_notebook_trains_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    run_in_processes(run_example, 1, args=("tpu_notebook.py", ["--num-processes", "1", "--epochs", "3"]), timeout=120)
    assert accuracies(capsys.readouterr().out)[-1] > 90
