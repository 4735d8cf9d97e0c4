"""A training whose ranks are killed over and over ends as if nobody had touched it, bit for bit."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.crash.harness import Run, differences, epochs_for, train, train_with_preemptions

pytestmark = pytest.mark.crash

# 25 kills in all, among them some while a checkpoint is written, by the training itself or by its writer's thread
PLAIN = (13, ["--seed", "1"])
IN_THE_BACKGROUND = (12, ["--seed", "2", "--async_save"])
WITH_WORKERS = (25, ["--seed", "3", "--async_save", "--num_workers", "2"])


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = train(tmp_path_factory.mktemp("untouched") / "run", epochs_for(PLAIN[0]))
    assert run.ended.code == 0, run.ended.err
    return run


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kills", "flags"), [PLAIN, IN_THE_BACKGROUND], ids=["plain", "saving_in_the_background"])
def test_a_run_whose_ranks_are_killed_ends_as_if_nobody_had_touched_it(
    untouched: Run, tmp_path: Path, kills: int, flags: list[str]
) -> None:
    crashed = train(tmp_path / "run", epochs_for(PLAIN[0]), *flags, kills=kills)
    assert differences(crashed, untouched) == []
    assert crashed.restarts == len(crashed.shots) == kills


@pytest.mark.timeout(400)
def test_a_run_that_is_preempted_and_started_again_is_none_the_worse(untouched: Run, tmp_path: Path) -> None:
    preempted = train_with_preemptions(tmp_path / "run", epochs_for(PLAIN[0]), [signal.SIGTERM, signal.SIGUSR1])
    assert differences(preempted, untouched) == []
    batches = [json.loads(line)["batch"] for line in (preempted.home / "trace0").read_text().splitlines()]
    assert batches == sorted(batches)  # nothing was done twice
    assert len(batches) == epochs_for(PLAIN[0]) * 7


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nor_do_loader_workers_make_a_difference(tmp_path: Path) -> None:
    kills, flags = WITH_WORKERS
    untouched = train(tmp_path / "untouched", epochs_for(kills))
    crashed = train(tmp_path / "crashed", epochs_for(kills), *flags, kills=kills, timeout=1500)
    assert differences(crashed, untouched) == []
    assert crashed.restarts == len(crashed.shots) == kills


# file, what is changed in it (every place), what is put there instead, what the comparison must say
TAMPERINGS = [
    ("trace1", '"batch": [2, 0], "step"', '"batch": [2, 99], "step"', "rank 1 never saw the batches [(2, 0)]"),
    ("trace0", '"loss": "0x1.', '"loss": "0x1.0', "rank 0, batch (0, 0)"),
    ("end1.json", '"parameters": "', '"parameters": "0', "rank 1, parameters"),
    ("logs/drivetrain_logs/version_0/metrics.csv", "\n3,", "\n33,", "metrics.csv, line"),
]


@pytest.mark.parametrize(("file", "old", "new", "said"), TAMPERINGS, ids=[row[0] for row in TAMPERINGS])
def test_the_comparison_sees_a_difference(
    untouched: Run, tmp_path: Path, file: str, old: str, new: str, said: str
) -> None:
    other = Run(shutil.copytree(untouched.home, tmp_path / "run"), untouched.ended)
    assert differences(other, untouched) == []
    content = (other.home / file).read_text()
    assert old in content
    (other.home / file).write_text(content.replace(old, new))
    assert said in "\n".join(differences(other, untouched))
