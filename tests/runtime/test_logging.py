"""A line is printed once, not once per process, unless all processes are asked for."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from drivetrain import ConfigurationError, PartialState, get_logger
from drivetrain.runtime.logging import logs_json
from tests.pool import run_in_processes


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int = 2) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(
    ("rank", "options", "expected"),
    [
        (0, {}, ["hello you"]),
        (1, {}, []),
        (0, {"main_process_only": False}, ["[rank 0] hello you"]),
        (1, {"main_process_only": False}, ["[rank 1] hello you"]),
        (1, {"in_order": True}, ["[rank 1] hello you"]),
    ],
)
def test_who_logs_before_any_state_exists(
    rank: int,
    options: dict[str, bool],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    as_rank(monkeypatch, rank)
    get_logger("drivetrain.test").warning("hello %s", "you", **options)  # type: ignore[arg-type]
    assert caplog.messages == expected
    assert not PartialState.registry()
    assert not torch.distributed.is_initialized()


def test_a_single_process_needs_no_rank_in_front(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("drivetrain.test").warning("hello", main_process_only=False)
    assert caplog.messages == ["hello"]


def test_a_broken_environment_does_not_break_a_log_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    as_rank(monkeypatch, rank=5, world_size=2)
    get_logger("drivetrain.test").warning("hello")
    assert caplog.messages == ["hello"]


def test_the_line_names_the_place_that_logged_it(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("drivetrain.test", log_level="DEBUG")
    logger.warning("a")
    logger.log(logging.ERROR, "b")
    logger.warning_once("c")
    logger.info_once("d", main_process_only=False)
    logger.error("e", in_order=True)
    here = test_the_line_names_the_place_that_logged_it
    assert [record.funcName for record in caplog.records] == [here.__name__] * 5
    assert {record.filename for record in caplog.records} == {"test_logging.py"}


def test_extra_fields_and_tracebacks_reach_the_record(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("drivetrain.test")
    try:
        raise KeyError("k")
    except KeyError:
        logger.exception("failed", extra={"step": 3})
    assert caplog.records[0].step == 3  # type: ignore[attr-defined]
    assert caplog.records[0].exc_info is not None


def test_a_message_with_the_same_arguments_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("drivetrain.test", log_level="INFO")
    for _ in range(3):
        logger.warning_once("slow loader %s", ["unhashable"])
        logger.warning_once("slow loader %s", ["another"])
        logger.info_once("slow loader %s", ["unhashable"])
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "slow loader ['unhashable']"),
        ("WARNING", "slow loader ['another']"),
        ("INFO", "slow loader ['unhashable']"),
    ]


@pytest.mark.parametrize(
    ("argument", "variable", "level"),
    [
        ("debug", None, logging.DEBUG),
        ("INFO", None, logging.INFO),
        (35, None, 35),
        (None, "error", logging.ERROR),
        ("INFO", "error", logging.INFO),
    ],
)
def test_an_explicit_level_wins_over_the_variable(
    argument: Any, variable: str | None, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("DRIVETRAIN_LOG_LEVEL", variable)
    assert get_logger("drivetrain.test.level", log_level=argument).logger.level == level


def test_without_either_python_decides() -> None:
    assert get_logger("drivetrain.test.unset").logger.level == logging.NOTSET


def test_an_unknown_level_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"log_level='WARN'.*DEBUG, INFO.*Did you mean 'WARNING'"):
        get_logger("drivetrain.test", log_level="WARN")
    monkeypatch.setenv("DRIVETRAIN_LOG_LEVEL", "loud")
    with pytest.raises(ConfigurationError, match="DRIVETRAIN_LOG_LEVEL='loud'"):
        get_logger("drivetrain.test")


SCRIPT = """
import json
import logging
from drivetrain.runtime.logging import get_logger
outer, inner = get_logger("outer", log_level="INFO"), get_logger("outer.inner", log_level="INFO")
get_logger("outer", log_level="INFO")
inner.info("before")
logging.basicConfig(level=logging.INFO)
inner.info("after")
"""


def test_a_level_shows_its_lines_once_whoever_configures_logging() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    first, second = done.stderr.splitlines()
    assert first.endswith("INFO outer.inner: before")
    assert second == "INFO:outer.inner:after"


# with real peers


class Reporter(logging.Handler):
    """Adds each line to a file that all ranks share."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{record.getMessage()}\n".encode())
        os.close(descriptor)


def log_in_turn(path: str) -> None:
    PartialState()
    logger = get_logger("drivetrain.test.turns", log_level="INFO")
    logger.logger.addHandler(Reporter(path))
    for turn in range(5):
        logger.info("turn %d", turn, in_order=True)
    logger.info("once")
    # A level that differs must not leave the others waiting.
    logger.setLevel(logging.ERROR if PartialState().process_index == 1 else logging.INFO)
    logger.info("mixed", in_order=True)


def test_processes_log_one_after_the_other(tmp_path: Any) -> None:
    path = tmp_path / "lines.txt"
    run_in_processes(log_in_turn, world_size=3, args=(str(path),), timeout=60)
    expected = [f"[rank {rank}] turn {turn}" for turn in range(5) for rank in range(3)]
    assert path.read_text().splitlines() == [*expected, "once", "[rank 0] mixed", "[rank 2] mixed"]


# the lines of a run

FITS = """
import logging, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from drivetrain import Task, Trainer

if sys.argv[1:] == ["configured"]:
    logging.basicConfig(format="[%(name)s][%(levelname)s] %(message)s", stream=sys.stderr)

class Learns(Task):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        if self.current_epoch == 2:
            raise RuntimeError("no more")
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
trainer = Trainer(max_epochs=3, logger=False, enable_checkpointing=False, enable_model_summary=False)
try:
    trainer.fit(Learns(), loader)
except RuntimeError:
    pass
"""
STARTS = ["Training Learns: ", "Epoch 0/2: 4 batches", "Epoch 1/2: 4 batches", "Failed: the run ended after 8 steps"]


def fits(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", FITS, *arguments]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=120, check=True)


def test_a_run_prints_its_lines_where_logging_is_not_configured() -> None:
    lines = fits().stdout.splitlines()
    assert [line for line, start in zip(lines, STARTS, strict=False) if line.startswith(start)] == lines[: len(STARTS)]


def test_handlers_of_the_program_receive_the_lines_of_a_run() -> None:
    ended = fits("configured")
    assert ended.stdout == ""
    levels = ["INFO", "INFO", "INFO", "ERROR"]
    lines = [line for line in ended.stderr.splitlines() if line.startswith("[drivetrain]")]
    for line, level, start in zip(lines, levels, STARTS, strict=False):
        assert line.startswith(f"[drivetrain][{level}] {start}")
    assert len(lines) >= len(STARTS)


def test_lines_of_a_run_as_json() -> None:
    lines = [json.loads(line) for line in fits(DRIVETRAIN_LOG_FORMAT="json").stdout.splitlines()]
    shown = [line for line in lines if line["logger"] == "drivetrain"]
    assert [line["message"].startswith(start) for line, start in zip(shown, STARTS, strict=False)] == [True] * 4
    assert [line["level"] for line in shown][:4] == ["INFO", "INFO", "INFO", "ERROR"]
    assert [(line["epoch"], line["step"]) for line in shown[1:3]] == [(0, 4), (1, 8)]
    assert {line["rank"] for line in lines} == {0}


def test_an_unknown_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_LOG_FORMAT", "xml")
    with pytest.raises(ConfigurationError, match=r"LOG_FORMAT='xml' is not a log format. Allowed: text, json"):
        logs_json()
