"""`SaveConfigCallback`: what is written beside a run, by which process, and over what."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from drivetrain import ConfigurationError, SaveConfigCallback
from drivetrain.trainer.cli import TrainerArgumentParser
from tests.pool import run_in_processes
from tests.trainer.cli.made import command


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])


def fit(*args: str, **kwargs: Any) -> Any:
    return command("fit", *args, save_config_callback=SaveConfigCallback, **kwargs)


@pytest.mark.slow
def test_each_run_has_its_configuration_beside_its_logs() -> None:
    for lr in (0.5, 0.25):
        made = fit(f"--model.lr={lr}", "--trainer.logger=csv")
        assert yaml.safe_load(Path(made.trainer.log_dir, "config.yaml").read_text())["model"]["lr"] == lr


def test_a_configuration_of_another_run_is_not_replaced_unless_told() -> None:
    fit("--model.lr=0.5")
    with pytest.raises(RuntimeError, match=r"config\.yaml not to exist"):
        fit("--model.lr=0.25")
    assert yaml.safe_load(Path("config.yaml").read_text())["model"]["lr"] == 0.5
    fit("--model.lr=0.25", save_config_kwargs={"overwrite": True})
    assert yaml.safe_load(Path("config.yaml").read_text())["model"]["lr"] == 0.25
    assert os.listdir() == ["config.yaml"]


def test_it_is_written_once_for_several_verbs_under_the_name_given() -> None:
    made = fit(save_config_kwargs={"config_filename": "mine.yaml"})
    made.trainer.test(made.model, datamodule=made.datamodule)
    assert os.listdir() == ["mine.yaml"]


def test_a_run_for_development_writes_none() -> None:
    fit("--trainer.fast_dev_run=1")
    assert os.listdir() == []


def test_a_subclass_saves_it_elsewhere() -> None:
    saved: list[str] = []

    class Elsewhere(SaveConfigCallback):
        def save_config(self, trainer: Any, task: Any, stage: str) -> None:
            saved.append(f"{stage}: {yaml.safe_load(self.parser.dump(self.config))['model']['lr']}")

    command("fit", save_config_callback=Elsewhere, save_config_kwargs={"save_to_log_dir": False})
    assert (saved, os.listdir()) == (["fit: 0.1"], [])
    with pytest.raises(ConfigurationError, match="only makes sense"):
        SaveConfigCallback(TrainerArgumentParser(), None, save_to_log_dir=False)


def fit_twice() -> list[str]:
    """Fit, and again where the file is; in one of several processes."""
    made = fit("--trainer.strategy=ddp", trainer_defaults={"devices": 2})
    assert made.trainer.world_size == 2
    try:
        fit("--trainer.strategy=ddp", trainer_defaults={"devices": 2})
    except RuntimeError as error:
        return [type(error).__name__, *os.listdir()]
    return []


@pytest.mark.slow
def test_one_of_several_processes_writes_and_all_refuse_together() -> None:
    assert run_in_processes(fit_twice) == [["ConfigExistsError", "config.yaml"]] * 2
