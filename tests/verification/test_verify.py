"""`drivetrain verify` on scripts of its own, sound and with planted mistakes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from drivetrain.verification import verify
from tests.pool import ROOT
from tests.verification.cases import HERE, MISTAKES, NOT_COMPARABLE, SOUND, Case

RAW = str(HERE / "raw_loop.py")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `drivetrain verify` and return its exit code and output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "drivetrain", "verify", *arguments], env=environment, capture_output=True, text=True
    )


@pytest.mark.timeout(280)
def test_a_sound_script_is_the_same(tmp_path: Path) -> None:
    page = tmp_path / "page.html"

    run = command("--steps", "3", "--json", "--output", str(page), "--cpu", RAW, "plain")

    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert (result["verdict"], result["steps"], result["processes"]) == ("same", 3, 2)
    assert result["table"]["loss"][0] < result["table"]["loss"][1] < 1e-4
    assert set(result["table"]) >= {"rows", "loss", "gradients", "learning rates", "weights", "buffers"}
    assert any("Dropout" in note for note in result["notes"])
    text = re.sub("<[^>]*>", "", page.read_text())
    assert "same up to rounding: 3 steps on" in text
    assert "Difference of weights" in text


@pytest.mark.slow
def test_a_mean_over_tokens_is_named_with_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    result = verify(RAW, ["token_mean"], num_processes=2, flags=["--cpu"], steps=3)

    assert result.finding is not None
    assert (result.finding.cause, result.finding.step, result.finding.quantity) == ("mean per rank", 1, "loss")
    with pytest.raises(AssertionError, match="Return the sum of the losses and its weight"):
        result.assert_same()


def test_a_script_that_trains_nothing_is_refused() -> None:
    run = command("--cpu", RAW, "trains_nothing")

    assert run.returncode == 2
    assert "has created no Trainer or Accelerator" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_script.py"], "no_such_script.py"),
        (["--steps", "0", RAW, "plain"], "steps=0 is not valid"),
        (["--world-sizes", "1,x", RAW], "Use numbers such as 1,2,4"),
        (["--world-sizes", "1,2", "--record", "x", RAW], "--record compares one run"),
        (["-m", "module"], "Pass the path of the file"),
        (["--set", "layers", RAW, "plain"], "Use NAME=VALUE, as in --set model.layers=2"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(arguments: list[str], message: str) -> None:
    run = command(*arguments)

    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("case", SOUND, ids=lambda case: case.name)
def test_sound_scripts_are_the_same(case: Case) -> None:
    run = command(*case.command)

    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: case.name)
def test_each_mistake_is_found(case: Case) -> None:
    run = command("--json", *case.command)

    assert run.returncode == 1, run.stdout + run.stderr
    finding = json.loads(run.stdout)["finding"]
    assert (finding["cause"], finding["step"], finding["quantity"]) == (case.cause, case.step, case.quantity)


@pytest.mark.slow
@pytest.mark.parametrize("case", NOT_COMPARABLE)
def test_what_cannot_be_compared_says_why(case: str) -> None:
    run = command("--steps", "2", "--cpu", RAW, case)

    assert run.returncode == 2
    assert run.stderr.count("Could not be compared.") == 1
    assert NOT_COMPARABLE[case] in run.stderr
    assert ("raw_loop.py" in run.stderr) == (case in ("fails", "asks", "too_large"))  # the script's line, if it raised
    assert ("with --set" in run.stderr) == (case in ("too_large", "killed"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--set", "model.width=8", "command_line.py", "fit"], 0, "the numbers of one process"),
        (["--set", "model.width=8", "command_line.py", "in_code"], 0, "the numbers of one process"),
        (["--set", "model.width=9", "command_line.py", "fit"], 2, "a width of 9 is odd"),
        (
            ["--set", "model.layers=9", "command_line.py", "fit"],
            2,
            "failed: error: Unrecognized arguments: --model.layers=9",
        ),
        (
            ["--set", "model.width=8", "raw_loop.py", "plain"],
            2,
            "sets an option of a TrainerCLI",
        ),
    ],
)
def test_options_are_set_in_a_scripts_command_line(arguments: list[str], code: int, message: str) -> None:
    *options, script, case = arguments

    run = command("--steps", "2", "--cpu", *options, str(HERE / script), case)

    assert run.returncode == code, run.stdout + run.stderr
    assert message in run.stdout + run.stderr


@pytest.mark.slow
def test_several_strategies_and_sizes_share_their_runs_on_one_process() -> None:
    run = command(
        *("--steps", "2", "--cpu", "--json", "--world-sizes", "1,2", "--strategies", "ddp,fsdp,tp2"), RAW, "plain"
    )

    rows = {(row["strategy"], row["processes"]): row for row in json.loads(run.stdout)}
    assert run.returncode == 2, run.stderr  # a plan is missing for tp2
    assert {key: row["verdict"] for key, row in rows.items() if key[0] != "tp2"} == {
        ("ddp", 1): "identical",
        ("ddp", 2): "same",
        ("fsdp", 1): "identical",
        ("fsdp", 2): "same",
    }
    assert "tp_plan" in rows["tp2", 2]["reason"]
    assert run.stderr.count("on one process, three times") == 2


@pytest.mark.slow
def test_a_recorded_run_is_compared_with_a_later_one(tmp_path: Path) -> None:
    records = str(tmp_path / "records")
    common = ("--steps", "2", "--cpu", RAW)

    assert command("--record", records, *common, "plain").returncode == 0
    again = command("--compare", records, *common, "plain")
    other = command("--compare", records, *common, "sgd")
    without = command("--compare", str(tmp_path), *common, "plain")

    assert again.stdout.startswith("identical: 2 steps on 2 processes (ddp, 32) give the numbers of the recorded run")
    assert (other.returncode, without.returncode) == (1, 2)
    assert "holds no recorded run" in without.stderr


@pytest.mark.slow
def test_a_run_is_compared_with_one_under_other_flags() -> None:
    run = command("--steps", "2", "--against", "--num_processes 2 --use_fsdp", "--cpu", RAW, "plain")

    assert run.returncode == 0, run.stdout + run.stderr
    assert "give the numbers of the other run" in run.stdout


@pytest.mark.slow
def test_a_run_that_is_stopped_and_resumed_is_that_of_one_that_is_not() -> None:
    trainer = command("--resume", "--steps", "6", "--cpu", str(HERE / "trainer_task.py"), "vision_transformer")
    raw = command("--resume", "--steps", "6", "--cpu", RAW, "plain")

    assert trainer.returncode == 0, trainer.stdout + trainer.stderr
    assert "give the numbers of the run without a stop" in trainer.stdout
    assert raw.returncode == 2
    assert "--resume needs a Trainer" in raw.stderr


@pytest.mark.slow
def test_an_uneven_last_batch_shows_rows_that_count_twice() -> None:
    raw = command("--uneven", "--cpu", RAW, "plain")
    trainer = command("--uneven", "--cpu", str(HERE / "trainer_task.py"), "language")

    assert raw.returncode == 1
    assert "they count in the loss" in raw.stdout
    assert trainer.returncode == 0, trainer.stdout


@pytest.mark.slow
def test_an_interrupt_leaves_no_process() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "drivetrain", "verify", "--cpu", RAW, "plain"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    process.stderr.readline()
    time.sleep(4)
    children = psutil.Process(process.pid).children(recursive=True)

    process.send_signal(signal.SIGINT)
    process.wait(60)

    assert children
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
