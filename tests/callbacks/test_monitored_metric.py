"""A monitor's typo is found by the sanity check, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivetrain import ConfigurationError, EarlyStopping, ModelCheckpoint
from drivetrain.callbacks.step_schedule import find_typo
from tests.callbacks.tasks import Scripted, fit


class Logs(Scripted):
    """Logs a loss in training and in each validation, the sanity check too."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", 1.0)


@pytest.mark.parametrize("name", ["EarlyStopping", "ModelCheckpoint"])
def test_a_typo_is_found_before_the_first_step(name: str, tmp_path: Path) -> None:
    callback: Any = (
        EarlyStopping("val_los") if name == "EarlyStopping" else ModelCheckpoint(tmp_path, monitor="val_los")
    )
    task = Logs()
    with pytest.raises(ConfigurationError, match=rf"{name}\(monitor='val_los'\).*Did you mean 'val_loss'"):
        fit(task, tmp_path, 1, [callback], num_sanity_val_steps=1)
    assert task.steps == 0


@pytest.mark.parametrize("monitor", ["val_loss", "train_loss"])
def test_what_validation_or_training_logs_is_no_typo(monitor: str, tmp_path: Path) -> None:
    task = Logs()
    fit(task, tmp_path, 1, [ModelCheckpoint(tmp_path / "ckpt", monitor=monitor)], num_sanity_val_steps=1)
    assert task.steps > 0


def test_where_a_check_may_be_left_out_a_typo_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = Logs()
    fit(task, tmp_path, 1, [EarlyStopping("val_los", strict=False)], num_sanity_val_steps=1)
    assert "Did you mean 'val_loss'" in caplog.text
    assert task.steps > 0


@pytest.mark.parametrize(
    ("monitor", "logged"),
    [
        ("val_acc", {"val_loss"}),
        ("val_acc_top1", {"val_acc_top5"}),
        ("train_loss_epoch", {"val_loss_epoch"}),
        ("loss", {"val_loss"}),
        ("val_loss", set()),
    ],
)
def test_a_name_that_may_be_logged_later_passes(monitor: str, logged: set[str]) -> None:
    assert find_typo(logged, monitor, "EarlyStopping") is None
