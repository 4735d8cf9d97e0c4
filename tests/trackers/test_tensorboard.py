from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from drivetrain.trackers import TensorBoardLogger


def events(directory: str | Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return accumulator


def test_numbers_are_read_back_as_curves_with_their_steps(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="run")
    for step in (1, 5, 9):
        logger.log({"loss": 1.0 / step, "acc": step / 10}, step)
    logger.finish()
    assert logger.log_dir == str(tmp_path / "run" / "version_0")
    read = events(logger.log_dir)
    assert set(read.Tags()["scalars"]) == {"loss", "acc"}
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [
        (1, 1.0),
        (5, pytest.approx(0.2)),
        (9, pytest.approx(1 / 9)),
    ]


def test_text_is_read_back_as_text(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log({"sample": "hello there"}, 4)
    logger.finish()
    (event,) = events(logger.log_dir).Tensors("sample/text_summary")
    assert (event.step, event.tensor_proto.string_val[0]) == (4, b"hello there")


def test_calls_without_a_step_are_numbered(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log({"loss": 1.0})
    logger.log({"loss": 2.0})
    logger.finish()
    assert [event.step for event in events(logger.log_dir).Scalars("loss")] == [0, 1]


def test_hyperparameters_go_to_yaml_and_to_the_page_of_tensorboard(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_hyperparams({"optim": {"name": "sgd", "lr": 0.1}, "layers": [3, 4]})
    logger.finish()
    assert yaml.safe_load(Path(logger.log_dir, "hparams.yaml").read_text()) == {
        "optim": {"name": "sgd", "lr": 0.1},
        "layers": [3, 4],
    }
    metadata = events(logger.log_dir).SummaryMetadata("_hparams_/session_start_info")
    assert metadata.plugin_data.plugin_name == "hparams"
    assert b"optim/lr" in metadata.plugin_data.content
    assert b"[3, 4]" in metadata.plugin_data.content


def test_a_resumed_version_holds_the_values_of_both_runs(tmp_path: Path) -> None:
    for step in (1, 2):
        logger = TensorBoardLogger(tmp_path, version=7)
        logger.log({"loss": float(step)}, step)
        logger.finish()
    read = events(tmp_path / "drivetrain_logs" / "version_7")
    assert [event.step for event in read.Scalars("loss")] == [1, 2]


def test_logging_after_finish_goes_on_in_the_same_version(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log({"loss": 1.0}, 1)
    logger.finish()
    logger.log({"test_acc": 0.5}, 1)
    logger.finish()
    assert set(events(logger.log_dir).Tags()["scalars"]) == {"loss", "test_acc"}


def test_prefix_and_sub_directory_are_used(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, prefix="fold1", sub_dir="events")
    logger.log({"loss": 1.0}, 1)
    logger.finish()
    assert events(Path(logger.log_dir, "events")).Tags()["scalars"] == ["fold1-loss"]


def test_the_raw_writer_is_within_reach(tmp_path: Path) -> None:
    import torch

    logger = TensorBoardLogger(tmp_path)
    logger.tracker.add_histogram("weights", torch.arange(10.0), 3)
    assert logger.experiment is logger.tracker
    logger.finish()
    assert events(logger.log_dir).Tags()["histograms"] == ["weights"]


def test_tensorboard_is_not_imported_before_it_is_used(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from drivetrain.trackers import TensorBoardLogger\n"
        "logger = TensorBoardLogger(sys.argv[1])\n"
        "assert 'tensorboard' not in sys.modules\n"
        "logger.log({'a': 1.0}, 1)\n"
        "assert 'tensorboard' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=120)


def test_without_tensorboard_the_error_names_the_extra_to_install(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "PathFinder.find_spec = lambda name, *rest: None if name == 'tensorboard' else find(name, *rest)\n"
        "from drivetrain.trackers import TensorBoardLogger\n"
        "TensorBoardLogger(sys.argv[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "ConfigurationError" in done.stderr
    assert "pip install 'drivetrain[tensorboard]'" in done.stderr
