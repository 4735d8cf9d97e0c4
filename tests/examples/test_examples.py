"""Every example runs for real, alone and as two processes, with settings that make it short."""

from __future__ import annotations

import csv
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.pool import ROOT, run_in_processes

EXAMPLES = ROOT / "examples"


def run_example(name: str, arguments: Sequence[str]) -> None:
    """Run an example in a rank as the launcher would."""
    torch.set_num_threads(1)
    sys.argv = [name, *arguments]
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    except SystemExit as ended:  # click ends every command so
        if ended.code:
            raise


def output_of(capsys: pytest.CaptureFixture[str], name: str, world_size: int, *arguments: object) -> str:
    run_in_processes(run_example, world_size, args=(name, [str(each) for each in arguments]), timeout=120)
    return capsys.readouterr().out


def test_every_example_is_tested_here() -> None:
    tested = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    for example in EXAMPLES.glob("*.py"):
        assert f'"{example.name}"' in tested


@pytest.mark.slow
def test_the_command_line_trains_by_its_file_and_tests_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = ["--config", str(EXAMPLES / "command_line.yaml")]
    output_of(capsys, "command_line.py", 1, "fit", *config, "--trainer.max_epochs=3", "--model.width=48")
    [checkpoint] = tmp_path.glob("drivetrain_logs/version_0/checkpoints/epoch=*.ckpt")
    written = (tmp_path / "drivetrain_logs" / "version_0" / "config.yaml").read_text()
    assert "width: 48" in written
    assert "activation: torch.nn.GELU" in written
    printed = output_of(capsys, "command_line.py", 2, "test", *config, f"--ckpt_path={checkpoint}")
    accuracy = re.search(r"accuracy +([\d.]+)", printed)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.85


@pytest.mark.parametrize("processes", [1, 2])
def test_digits_reports_and_leaves_curves_metrics_events_and_the_best_checkpoint(
    processes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = output_of(capsys, "digits.py", processes, "--epochs", 5, "--output", tmp_path)
    accuracy = re.search(r"test accuracy +([\d.]+)%", printed)
    assert accuracy is not None
    assert float(accuracy[1]) > 90
    assert {1: "with 1 process\n", 2: "with 2 processes\n"}[processes] in printed
    assert str(tmp_path / "curves.png") in printed
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    [metrics] = tmp_path.glob("csv/version_0/metrics.csv")
    rows = list(csv.DictReader(metrics.open()))
    assert {"train_loss", "train_accuracy", "val_loss", "val_accuracy", "test_accuracy"} <= set(rows[0])
    assert [row["epoch"] for row in rows if row["val_loss"]] == ["0", "1", "2", "3", "4"]
    assert list(tmp_path.glob("tensorboard/version_0/events.out.tfevents.*"))
    [checkpoint] = tmp_path.glob("csv/version_0/checkpoints/epoch=*.ckpt")
    assert checkpoint.is_dir()
    assert f"with the best checkpoint, {checkpoint.stem}\n" in printed


@pytest.mark.parametrize("processes", [1, 2])
def test_accelerator_digits_counts_each_test_image_once(processes: int, capsys: pytest.CaptureFixture[str]) -> None:
    printed = output_of(capsys, "accelerator_digits.py", processes, "--epochs", 3)
    epochs = re.findall(r"epoch +\d+  test accuracy ([\d.]+)% of (\d+) images", printed)
    assert [count for _, count in epochs] == ["300"] * 3
    assert float(epochs[-1][0]) > 80


@pytest.mark.parametrize("processes", [1, 2])
def test_gan_reaches_the_clusters_as_a_task_and_in_a_loop_alike(
    processes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ("--epochs", 4, "--batch-size", 256)
    figures = []
    for how in ("task", "loop"):
        printed = output_of(capsys, "gan.py", processes, "--how", how, *short)
        found = re.search(r"([\d.]+)% of the generated points lie in a cluster; (\d) of 8 clusters", printed)
        assert found is not None
        figures.append(found.groups())
    # Both run the same computation on the same engine, seeded alike.
    assert figures[0] == figures[1]
    assert float(figures[0][0]) > 30
    assert int(figures[0][1]) >= 4


def test_the_quickstart_predicts_the_digits_and_leaves_its_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = output_of(capsys, "quickstart.py", 1)
    predicted, labels = (re.findall(r"\d", line) for line in printed.splitlines()[-2:])
    assert len(predicted) == len(labels) == 12
    assert sum(map(str.__eq__, predicted, labels)) >= 10
    assert (tmp_path / "drivetrain_logs" / "version_0" / "report.html").is_file()
