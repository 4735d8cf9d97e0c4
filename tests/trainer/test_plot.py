"""`Trainer.plot`: the curves of a run, as a matplotlib figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivetrain import ConfigurationError, CSVLogger, Trainer
from tests.trainer.tasks import Weight, fitted, ones


class Logs(Weight):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", float(batch_idx))
        self.log("rate", 0.5)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", 3.0)


def run(root: Path) -> Trainer:
    return fitted(Logs(), ones(4), ones(1), max_epochs=2, logger=CSVLogger(root), log_every_n_steps=1)


def curves(figure: Any) -> dict[str, tuple[list[float], list[float]]]:
    lines = [line for axes in figure.axes for line in axes.get_lines()]
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in lines}


def test_the_curves_are_those_that_were_logged(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = run(tmp_path).plot()
    found = curves(figure)
    assert found["train_loss"][1] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert found["val_loss"][1] == [3, 3]
    assert set(found) >= {"train_loss", "val_loss", "rate"}
    together = [{line.get_label() for line in axes.get_lines()} for axes in figure.axes]
    assert {"train_loss", "val_loss"} <= next(each for each in together if "train_loss" in each)
    figure.savefig(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_names_choose_curves(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trainer = run(tmp_path)
    assert set(curves(trainer.plot("rate"))) == {"rate"}
    with pytest.raises(ConfigurationError, match=r"plot\('rates'\): no value of this name was logged. Logged: .*rate"):
        trainer.plot("rates")


def test_without_matplotlib_it_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.trainer.trainer.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r'pip install "drivetrain\[plot\]"'):
        run(tmp_path).plot()
