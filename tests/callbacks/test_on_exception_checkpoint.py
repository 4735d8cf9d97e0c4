from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import ConfigurationError, Trainer
from drivetrain.callbacks import OnExceptionCheckpoint
from tests.callbacks.guarded import Regression, rows

QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Failing(Regression):
    fails_at = 3

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.fails_at:
            raise RuntimeError("the third batch")
        return super().training_step(batch, batch_idx)


def test_a_run_that_raised_is_resumed_from_its_last_step(tmp_path: Path) -> None:
    callback = OnExceptionCheckpoint(tmp_path)
    trainer = Trainer(max_epochs=1, callbacks=[callback], default_root_dir=tmp_path, **QUIET)
    with pytest.raises(RuntimeError, match="the third batch"):
        trainer.fit(Failing({}), rows(5))
    assert callback.ckpt_path == str(tmp_path / "on_exception.ckpt")
    resumed, plain = Regression({}), Regression({})
    Trainer(max_epochs=1, enable_checkpointing=False, **QUIET).fit(resumed, rows(5), resume=callback.ckpt_path)
    Trainer(max_epochs=1, enable_checkpointing=False, **QUIET).fit(plain, rows(5))
    assert resumed.trained == [(0, 3), (0, 4)]
    assert torch.equal(resumed.layer.weight, plain.layer.weight)


def test_a_run_that_ends_well_leaves_nothing(tmp_path: Path) -> None:
    trainer = Trainer(max_epochs=1, callbacks=[OnExceptionCheckpoint(tmp_path, "failed")], **QUIET)
    trainer.fit(Regression({}), rows(2))
    assert not list(tmp_path.iterdir())


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="filename must not be empty"):
        OnExceptionCheckpoint(".", "")
