from __future__ import annotations

import csv
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import yaml

from drivetrain.trackers import CSVLogger


def read(path: str | Path) -> list[dict[str, str]]:
    with open(Path(path, "metrics.csv"), newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_values_of_one_step_share_a_row_however_many_calls_log_them(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log({"loss": 0.5, "epoch": 0}, step=1)
    logger.log({"lr": 0.1, "epoch": 0}, step=1)
    logger.log({"loss": 0.25, "epoch": 0}, step=2)
    logger.finish()
    assert read(logger.log_dir) == [
        {"epoch": "0", "step": "1", "loss": "0.5", "lr": "0.1"},
        {"epoch": "0", "step": "2", "loss": "0.25", "lr": ""},
    ]


def test_a_second_value_of_one_name_at_one_step_is_kept_in_a_row_of_its_own(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log({"val_loss": 0.5}, step=3)
    logger.log({"val_loss": 0.75}, step=3)
    logger.finish()
    assert [row["val_loss"] for row in read(logger.log_dir)] == ["0.5", "0.75"]


def test_a_row_already_written_still_takes_values_of_its_step(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log({"loss": 1.0}, step=1)
    logger.log({"loss": 2.0}, step=2)
    logger.save()
    assert [row["loss"] for row in read(logger.log_dir)] == ["1.0", "2.0"]
    logger.log({"val_loss": 3.0}, step=2)
    logger.save()
    logger.save()
    logger.log({"loss": 4.0}, step=3)
    logger.finish()
    assert read(logger.log_dir) == [
        {"step": "1", "loss": "1.0", "val_loss": ""},
        {"step": "2", "loss": "2.0", "val_loss": "3.0"},
        {"step": "3", "loss": "4.0", "val_loss": ""},
    ]


def test_values_without_a_step_have_a_row_for_each_call(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log({"a": 1.0})
    logger.log({"b": 2.0})
    logger.finish()
    assert read(logger.log_dir) == [{"a": "1.0", "b": ""}, {"a": "", "b": "2.0"}]


def test_a_column_that_appears_later_keeps_the_rows_before_it(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    for step in range(5):
        logger.log({"loss": float(step)}, step)
    logger.log({"loss": 5.0, "a, quoted name": 1.5}, 5)
    logger.finish()
    rows = read(logger.log_dir)
    assert [row["loss"] for row in rows] == ["0.0", "1.0", "2.0", "3.0", "4.0", "5.0"]
    assert [row["a, quoted name"] for row in rows] == ["", "", "", "", "", "1.5"]
    assert sorted(os.listdir(logger.log_dir)) == ["metrics.csv"]


def test_the_file_is_written_anew_only_when_columns_are_added(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    path = Path(logger.log_dir, "metrics.csv")
    inodes = []
    for step in range(10):
        logger.log({"loss": 0.0} if step < 6 else {"loss": 0.0, "late": 1.0}, step)
        logger.save()
        inodes.append(path.stat().st_ino)
    logger.finish()
    assert len(set(inodes[:6])) == 1
    assert len(set(inodes[6:])) == 1
    assert inodes[5] != inodes[6]


def test_rows_are_on_disk_after_every_n_of_them(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=3)
    for step in range(7):
        logger.log({"loss": 0.0}, step)
    assert [row["step"] for row in read(logger.log_dir)] == ["0", "1", "2", "3", "4", "5"]


def test_versions_count_up_and_a_given_one_is_continued(tmp_path: Path) -> None:
    for expected in range(3):
        logger = CSVLogger(tmp_path, name="run")
        logger.log({"loss": float(expected)}, 0)
        logger.finish()
        assert logger.log_dir == str(tmp_path / "run" / f"version_{expected}")
    resumed = CSVLogger(tmp_path, name="run", version=1)
    resumed.log({"loss": 9.0, "late": 1.0}, 1)
    resumed.finish()
    assert read(tmp_path / "run" / "version_1") == [
        {"step": "0", "loss": "1.0", "late": ""},
        {"step": "1", "loss": "9.0", "late": "1.0"},
    ]
    assert CSVLogger(tmp_path, name="run").version == 3
    assert CSVLogger(tmp_path, name="run", version="best").log_dir == str(tmp_path / "run" / "best")


def test_runs_that_start_at_the_same_moment_have_folders_of_their_own(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, name="run") for _ in range(16)]
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda logger: logger.log_dir, loggers))
    assert sorted(folders) == sorted(str(tmp_path / "run" / f"version_{number}") for number in range(16))


def test_the_number_of_a_run_that_writes_nothing_is_free_again(tmp_path: Path) -> None:
    idle = CSVLogger(tmp_path, name="run")
    assert idle.version == 0
    idle.finish()
    assert os.listdir(tmp_path) == []
    other = CSVLogger(tmp_path, name="run")
    assert other.version == 0
    idle.log({"loss": 1.0}, 1)  # another run has the number meanwhile
    idle.finish()
    assert idle.version == 1


def test_logging_after_finish_continues_the_same_file(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log({"loss": 1.0}, 1)
    logger.finish()
    logger.log({"test_acc": 0.5}, 1)
    logger.finish()
    assert read(logger.log_dir) == [
        {"step": "1", "loss": "1.0", "test_acc": ""},
        {"step": "1", "loss": "", "test_acc": "0.5"},
    ]


def test_a_line_that_a_killed_run_left_unfinished_is_dropped_on_resume(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from drivetrain.trackers import CSVLogger\n"
        "logger = CSVLogger(sys.argv[1], version=0)\n"
        "logger.log({'loss': 0.5}, 1); logger.save()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60).returncode == -9
    directory = tmp_path / "drivetrain_logs" / "version_0"
    with open(directory / "metrics.csv", "a") as file:
        file.write("2,0.2")  # of 0.25, say
    logger = CSVLogger(tmp_path, version=0)
    logger.log({"loss": 0.125}, 3)
    logger.finish()
    assert read(directory) == [{"step": "1", "loss": "0.5"}, {"step": "3", "loss": "0.125"}]


def test_numbers_keep_every_digit_and_nan_stays_nan(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log({"third": 1 / 3, "nan": math.nan, "note": "a,b"}, 0)
    logger.finish()
    (row,) = read(logger.log_dir)
    assert float(row["third"]) == 1 / 3
    assert math.isnan(float(row["nan"]))
    assert row["note"] == "a,b"


def test_the_prefix_is_put_before_values_but_not_before_step_and_epoch(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, prefix="fold1")
    logger.log({"loss": 1.0, "epoch": 2}, 7)
    logger.finish()
    assert read(logger.log_dir) == [{"epoch": "2", "step": "7", "fold1-loss": "1.0"}]


def test_hyperparameters_are_plain_yaml_and_grow(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_hyperparams({"lr": 0.1, "layers": (32, 16), "path": Path("data"), "act": math.tanh})
    logger.log_hyperparams({"seed": 1})
    logger.finish()
    values = yaml.safe_load(Path(logger.log_dir, "hparams.yaml").read_text())
    assert values == {
        "lr": 0.1,
        "layers": [32, 16],
        "path": "data",
        "act": str(math.tanh),
        "seed": 1,
    }


def test_hyperparameters_of_an_unknown_form_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"of type int.*dict, a dataclass instance or an argparse"):
        CSVLogger(tmp_path).log_hyperparams(3)


def test_making_a_logger_leaves_no_trace_before_it_is_used(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    assert logger.log_dir.endswith("version_0")
    logger.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_grows_after_it_was_written_is_written_anew(tmp_path):
    logger = CSVLogger(tmp_path)
    logger.log({"loss": 1.0}, step=1)
    logger.save()
    logger.log({"val_loss": 2.0}, step=1)
    logger.log({"loss": 3.0}, step=2)
    logger.finish()
    with logger.tracker.open(newline="") as file:
        assert [row["val_loss"] for row in csv.DictReader(file)] == ["2.0", ""]


def test_a_url_is_warned_of_since_logs_are_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    CSVLogger("memory://runs").start()
    assert f"they are in {tmp_path}/drivetrain_logs/version_0" in caplog.text
    assert not Path("memory:").exists()
    assert (tmp_path / "drivetrain_logs/version_0/metrics.csv").exists()


def test_a_number_belongs_to_the_run_that_took_it_first(tmp_path: Path) -> None:
    one, two = CSVLogger(tmp_path), CSVLogger(tmp_path)
    assert (one.version, two.version) == (0, 1)  # nothing was written yet
    two.log({"loss": 1.0}, 0)
    two.finish()
    one.finish()
    assert [path.name for path in Path(tmp_path, "drivetrain_logs").glob("version_*")] == ["version_1"]


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_an_image_is_a_file_with_the_same_pixels(channels: int, tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (5, 7, channels), dtype=np.uint8)
    logger = CSVLogger(tmp_path)
    logger.log_images({"sample": image}, step=3)
    read = np.round(255 * matplotlib.image.imread(Path(logger.log_dir, "images", "sample", "3.png")))
    assert np.array_equal(read.reshape(image.shape), image)


def test_several_images_are_numbered_and_their_names_are_names_of_files(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, prefix="gan")
    logger.log_images({"a/b": np.zeros((2, 4, 4, 3)), "..": np.zeros((4, 4))}, step=10)
    logger.log_images({"last": np.zeros((4, 4))})
    images = Path(logger.log_dir, "images")
    found = sorted(path.relative_to(images).as_posix() for path in images.rglob("*.png"))
    assert found == ["gan-../10.png", "gan-a_b/10-0.png", "gan-a_b/10-1.png", "gan-last/image.png"]
    plain = CSVLogger(tmp_path / "plain")
    plain.log_images({"..": np.zeros((4, 4))}, step=1)
    plain.log_table("..", ["a"], [[1]])
    written = {path.parent.relative_to(plain.log_dir).as_posix() for path in Path(plain.log_dir).rglob("*.*g")}
    assert written == {"images/_."}
    assert [path.name for path in Path(plain.log_dir, "tables").iterdir()] == ["_..csv"]
