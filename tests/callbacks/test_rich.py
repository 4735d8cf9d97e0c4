"""What is shown by rich."""

from __future__ import annotations

import io
import random
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from drivetrain import ConfigurationError, Trainer
from drivetrain.callbacks import ModelSummary, RichModelSummary, RichProgressBar
from tests.callbacks.tasks import Scripted, numbers
from tests.pool import run_in_processes

pytestmark = pytest.mark.skipif(find_spec("rich") is None, reason="needs rich")


def shown(root: Path, leave: bool = False, terminal: bool = True, width: int = 160) -> str:
    screen = io.StringIO()
    options = {"file": screen, "force_terminal": terminal, "width": width, "force_jupyter": False}
    bar = RichProgressBar(leave=leave, console_kwargs=options)
    bar.refresh_seconds = 0.0
    task = Scripted([0.5, 0.25])
    trainer = Trainer(max_epochs=2, callbacks=[bar], logger=False, enable_checkpointing=False, default_root_dir=root)
    task.on_train_start = lambda: bar.print("hello from the task")  # type: ignore[method-assign]
    trainer.fit(task, numbers(8, 4), numbers(4, 4))
    assert trainer.progress_bar_callback is bar
    return screen.getvalue()


def test_a_terminal_sees_bars_with_batches_and_values(tmp_path: Path) -> None:
    text = shown(tmp_path)
    for part in (
        "Sanity check",
        "Epoch 0/1",
        "Epoch 1/1",
        "Validation",
        "2/2",
        "it/s",
        "train_loss: ",
        "hello from the",
    ):
        assert part in text, part


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_narrow_terminal_keeps_epoch_count_and_values(width: int, tmp_path: Path) -> None:
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown(tmp_path, width=width)))
    epochs = [line.rstrip() for line in lines if line.startswith("Epoch 1/1") and "2/2" in line]
    assert re.search(r"train_loss: \d+\.\d{3}$", epochs[-1])
    assert len(epochs[-1]) <= width
    assert ("it/s" in epochs[-1]) == (width >= 80)


def test_a_file_gets_a_line_for_each_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown(tmp_path, terminal=False)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Epoch")]
    assert [line.partition(":")[0] for line in lines] == ["Epoch 0/1", "Epoch 1/1"]


def test_it_can_be_turned_off(tmp_path: Path) -> None:
    assert RichProgressBar(0).is_disabled
    assert RichProgressBar().refresh_rate == 100
    with pytest.raises(ConfigurationError, match="must be at least 0"):
        RichProgressBar(-1)


def test_the_table_has_what_the_plain_one_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(summary: ModelSummary) -> list[str]:
        trainer = Trainer(
            max_epochs=1, callbacks=[summary], logger=False, enable_checkpointing=False, enable_progress_bar=False
        )
        trainer.fit(Scripted(), numbers(4, 4))
        return capsys.readouterr().out.split()

    rich, plain = printed(RichModelSummary(title="the model")), printed(ModelSummary())
    for word in ("layer", "Linear", "2", "train", "parameters", "trainable"):
        assert word in rich
        assert word in plain
    assert "model" in rich


@pytest.mark.parametrize("make", [RichProgressBar, RichModelSummary])
def test_without_rich_they_say_how_to_install_it(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ConfigurationError, match=r'pip install "drivetrain\[rich\]"'):
        make()


def draw_after_import() -> float:
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        del sys.modules[name]
    random.seed(0)
    RichProgressBar()
    assert "rich.style" in sys.modules
    return random.random()


def test_importing_rich_draws_no_random_number() -> None:
    assert run_in_processes(draw_after_import, 1) == [random.Random(0).random()]
