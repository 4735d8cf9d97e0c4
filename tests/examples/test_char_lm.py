"""The small GPT trains alike under every strategy, writes text, and its losses are drawn."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.examples.test_examples import run_example
from tests.pool import run_in_processes

PROCESSES = {"single": 1, "ddp": 2, "fsdp": 2, "tp_fsdp": 4, "pp": 2, "deepspeed": 2}


def train(strategy: str, steps: int, folder: Path) -> list[dict[str, str]]:
    """Run the example; the rows of its metrics."""
    arguments = ["--strategy", strategy, "--steps", str(steps), "--output", str(folder)]
    run_in_processes(run_example, PROCESSES[strategy], args=("char_lm.py", arguments), timeout=240)
    [metrics] = (folder / strategy).glob("version_*/metrics.csv")
    with metrics.open() as file:
        return list(csv.DictReader(file))


def values(rows: list[dict[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row.get(name)]


def test_one_process_learns_validates_writes_and_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = train("single", 3, tmp_path)
    losses = values(rows, "loss")
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert len(values(rows, "val_loss")) == 3
    printed = capsys.readouterr().out
    assert "980,000 characters to train on, 20,000 to validate" in printed
    assert f"single: loss {losses[-1]:.4f}" in printed
    written = printed.partition("\ndef ")[2]
    assert len(written.rstrip("\n")) > 200

    picture = tmp_path / "images" / "curves.png"
    run_in_processes(run_example, 1, args=("plot_char_lm.py", [str(tmp_path), str(picture)]), timeout=60)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [name for name in PROCESSES if name != "single"])
def test_every_strategy_has_the_losses_of_one_process(strategy: str, tmp_path: Path) -> None:
    if strategy == "deepspeed":
        pytest.importorskip("deepspeed", reason="deepspeed is missing: pip install 'drivetrain[deepspeed]'")
    expected, found = (train(name, 6, tmp_path) for name in ("single", strategy))
    for name, count in (("loss", 6), ("val_loss", 6)):
        assert len(values(found, name)) == count
        assert values(found, name) == pytest.approx(values(expected, name), abs=1e-5)
