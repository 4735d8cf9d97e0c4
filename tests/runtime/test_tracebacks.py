"""Tracebacks of drivetrain's errors end at the user's line; those of user code keep its frames."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path

import pytest

from drivetrain import ConfigurationError
from drivetrain.runtime.errors import FULL_VARIABLE, short_tracebacks
from tests.house import PACKAGE
from tests.launch.launching import clean_environment, launch

pytestmark = pytest.mark.timeout(120)

HEAD = """
import torch
from torch.utils.data import DataLoader
from drivetrain import Accelerator, EarlyStopping, Task, Trainer

class Net(Task):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def loss(self, batch):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def loader():
    return DataLoader(torch.ones(8, 2), batch_size=4)

def trainer(**options):
    quiet = dict(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    return Trainer(**{**quiet, "accelerator": "cpu", **options})
"""

# What goes wrong, the last line of the user's code that the traceback has.
SCRIPTS = {
    "an argument of the Trainer": ("trainer(max_epochs='ten')", "return Trainer("),
    "an unknown argument of the Trainer": ("Trainer(gpus=2)", "Trainer(gpus=2)"),
    "an argument of the Accelerator": (
        "Accelerator(mixed_precision='bf17', cpu=True)",
        "Accelerator(mixed_precision='bf17', cpu=True)",
    ),
    "an argument of a callback": ("EarlyStopping('loss', patience=-1)", "patience=-1"),
    "an argument of fit": ("trainer().fit(torch.nn.Linear(2, 1), loader())", "trainer().fit("),
    "a limit that leaves no batch": (
        "trainer(limit_train_batches=0.1).fit(Net(), loader())",
        "trainer(limit_train_batches=0.1).fit(",
    ),
    "prepare": ("Accelerator(cpu=True).prepare_data_loader(3)", "Accelerator(cpu=True).prepare_data_loader(3)"),
    "backward": (
        "a = Accelerator(cpu=True); a.backward(torch.ones(1, requires_grad=True).sum(), weight='x')",
        "a.backward(",
    ),
    "what a step returned": (
        "Net.loss = lambda self, batch: self.layer(batch)\ntrainer().fit(Net(), loader())",
        "trainer().fit(",
    ),
    "log in a step": (
        "def step(self, batch, batch_idx):\n    self.log('x', torch.ones(3))\n    return self.loss(batch)\n"
        "Net.training_step = step\ntrainer().fit(Net(), loader())",
        "self.log('x', torch.ones(3))",
    ),
}


def script(tmp_path: Path, lines: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text(f"{HEAD}\n{textwrap.dedent(lines)}\n")
    return path


def frames(text: str) -> list[str]:
    """The files of a traceback's frames."""
    return re.findall(r'^ +File "([^"]+)", line \d+', text, re.MULTILINE)


def ours(text: str) -> list[str]:
    return [file for file in frames(text) if file.startswith(f"{PACKAGE}/")]


def shown(path: Path) -> str:
    """The traceback of what a script raises, as the launcher's processes shorten it."""
    with pytest.raises(Exception) as caught:
        exec(compile(path.read_text(), path, "exec"), {"__name__": "__main__"})
    error, of_this_function = caught.value, caught.tb
    with short_tracebacks(error, of_this_function.tb_next):
        return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("case", SCRIPTS)
def test_an_error_of_drivetrain_ends_at_the_users_line(case: str, tmp_path: Path) -> None:
    text = shown(script(tmp_path, SCRIPTS[case][0]))
    of_user = [file for file in frames(text) if file.endswith("script.py")]
    assert of_user
    assert 1 <= len(ours(text)) <= 3
    assert len(frames(text)) == len(of_user) + len(ours(text))
    assert SCRIPTS[case][1] in text
    assert re.search(r"^drivetrain\.[\w.]+Error: ", text, re.MULTILINE)


def test_plain_python_shows_all_frames_for_its_hook_is_left_alone(tmp_path: Path) -> None:
    path = script(tmp_path, SCRIPTS["what a step returned"][0])
    environment = {**clean_environment(CUDA_VISIBLE_DEVICES=""), "PYTHONPATH": str(PACKAGE.parent)}
    ended = subprocess.run([sys.executable, path], capture_output=True, text=True, env=environment, timeout=100)
    assert ended.returncode == 1
    assert len(ours(ended.stderr)) > 5
    assert re.search(r"^drivetrain\.[\w.]+Error: ", ended.stderr, re.MULTILINE)


def test_all_frames_are_shown_if_the_variable_asks_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FULL_VARIABLE, "1")
    assert len(ours(shown(script(tmp_path, SCRIPTS["what a step returned"][0])))) > 5


def test_an_error_in_a_step_of_the_user_keeps_the_users_frames(tmp_path: Path) -> None:
    lines = """
        def loss(self, batch):
            return self.layer(batch[:, :1]).mean()

        Net.loss = loss
        trainer().fit(Net(), loader())
        """
    text = shown(script(tmp_path, lines))
    for line in ("trainer().fit(Net(), loader())", "return self.loss(batch)", "self.layer(batch[:, :1])"):
        assert line in text
    assert "torch/nn/modules/linear.py" in text
    assert text.rstrip().splitlines()[-1].startswith("RuntimeError: ")


def test_an_error_under_the_launcher_ends_at_the_users_line(tmp_path: Path) -> None:
    script(tmp_path, SCRIPTS["what a step returned"][0])
    short = launch("--num_processes", "1", "--cpu", "script.py", cwd=tmp_path, timeout=100)
    assert (short.code, 1 <= len(ours(short.err)) <= 3) == (1, True), short.err
    assert "trainer().fit(Net(), loader())" in short.err
    assert re.search(r"drivetrain\.[\w.]+Error: ", short.err)
    whole = launch("--num_processes", "1", "--cpu", "--full_traceback", "script.py", cwd=tmp_path, timeout=100)
    assert len(ours(whole.err)) > 5


def fail() -> None:
    from drivetrain import Duration

    Duration.of("3 parsecs", "max_duration")


def raised() -> BaseException:
    with pytest.raises(ConfigurationError) as caught:
        fail()
    return caught.value


def test_the_exception_keeps_its_whole_traceback() -> None:
    error = raised()
    whole = error.__traceback__
    with short_tracebacks(error, whole):
        assert error.__traceback__ is not whole
    assert error.__traceback__ is whole


def test_an_exception_of_the_user_that_wraps_one_of_drivetrain_shortens_that_alone() -> None:
    cause = raised()
    wrapped = ValueError("no duration")
    wrapped.__cause__ = cause
    whole = cause.__traceback__
    with short_tracebacks(wrapped, None):
        assert wrapped.__traceback__ is None
        assert cause.__traceback__ is not whole
