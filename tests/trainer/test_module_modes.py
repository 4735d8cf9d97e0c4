"""Each module trains in the mode that the user chose for it, and every evaluation gives it back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Trainer
from tests.pool import run_in_processes
from tests.trainer.tasks import Weight, ones, quiet, rows


class Frozen(Weight):
    """Has a batch norm that keeps its statistics, set so where `where` says."""

    def __init__(self, where: str = "__init__") -> None:
        super().__init__()
        self.where = where
        self.norm = nn.BatchNorm1d(1)
        self.dropout = nn.Dropout()
        self.modes: list[tuple[bool, bool, bool]] = []
        self._freeze("__init__")

    def _freeze(self, where: str) -> None:
        if self.where == where:
            self.norm.eval()

    def configure_model(self) -> None:
        self._freeze("configure_model")

    def setup(self, stage: str) -> None:
        self._freeze("setup")

    def on_fit_start(self) -> None:
        self._freeze("on_fit_start")

    def on_train_start(self) -> None:
        self._freeze("on_train_start")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.modes.append((self.training, self.norm.training, self.dropout.training))
        return self.w * self.norm(batch[0]).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert not any(module.training for module in self.modules())

    test_step = validation_step


@pytest.mark.parametrize("sanity_steps", [0, 1])
@pytest.mark.parametrize("where", ["__init__", "configure_model", "setup", "on_fit_start", "on_train_start"])
def test_a_frozen_batch_norm_keeps_its_statistics(where: str, sanity_steps: int) -> None:
    task = Frozen(where)
    trainer = quiet(max_epochs=2, num_sanity_val_steps=sanity_steps)
    trainer.fit(task, rows([5.0, 7.0, 9.0, 11.0], batch_size=2), ones(1))
    assert task.modes == [(True, False, True)] * 4
    assert float(task.norm.running_mean) == 0.0  # type: ignore[arg-type]


def test_a_task_trains_after_an_evaluation() -> None:
    task, trainer = Frozen("nowhere"), quiet(max_epochs=1)
    trainer.validate(task, ones(1), verbose=False)
    trainer.test(task, ones(1), verbose=False)
    trainer.fit(task, rows([1.0, 2.0], batch_size=2), ones(1))
    trainer.test(task, ones(1), verbose=False)
    assert task.modes == [(True, True, True)]
    assert all(module.training for module in task.modules())


def modes_on_two() -> list[Any]:
    task = Frozen()
    trainer: Trainer = quiet(strategy="ddp", num_sanity_val_steps=1)
    trainer.fit(task, rows([5.0, 7.0, 9.0, 11.0], batch_size=2), ones(1))
    return [task.modes, float(task.norm.running_mean)]  # type: ignore[arg-type]


def test_modes_are_kept_by_ddp() -> None:
    assert run_in_processes(modes_on_two, 2) == [[[(True, False, True)], 0.0]] * 2


@pytest.mark.parametrize(("whole", "count"), [(False, "1 of 3"), (True, "3 of 3")])
def test_modules_in_evaluation_mode_are_warned_of_once(
    whole: bool, count: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Named(Frozen):
        pass

    Named.__name__ = f"Named{whole}"
    task = Named()
    if whole:
        task.eval()
    for _ in range(2):
        quiet().fit(task, rows([1.0, 2.0], batch_size=2))
    warnings = [record.getMessage() for record in caplog.records if "evaluation mode" in record.getMessage()]
    assert len(warnings) == 1
    assert f"{count} modules of Named{whole}" in warnings[0]
    assert task.modes == [(not whole, False, not whole)] * 2


def test_no_warning_where_all_modules_train(caplog: pytest.LogCaptureFixture) -> None:
    quiet().fit(Frozen("nowhere"), rows([1.0, 2.0], batch_size=2))
    assert "evaluation mode" not in caplog.text
    assert torch.is_grad_enabled()
