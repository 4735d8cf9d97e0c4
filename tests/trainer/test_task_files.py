"""Tasks from checkpoints, of both formats, and their forward in other tools' formats."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import CheckpointError, ConfigurationError, Trainer
from tests.trainer.lightning_files import Line, content, data, quiet, write


def ours(path: Path) -> str:
    trainer = quiet(path.parent, max_epochs=1)
    trainer.fit(Line(), data())
    trainer.save_checkpoint(path)
    return str(path)


def theirs(path: Path) -> str:
    return write(path, 6, True)


both = pytest.mark.parametrize("made", [ours, theirs])


@both
def test_arguments_win_over_a_file_which_wins_over_the_saved(tmp_path: Path, made: Callable[[Path], str]) -> None:
    path = made(tmp_path / "x.ckpt")
    assert Line.load_from_checkpoint(path).hparams.lr == 0.1
    assert Line.load_from_checkpoint(path, map_location="cpu", weights_only=True, lr=0.5).hparams.lr == 0.5
    (tmp_path / "h.yaml").write_text("lr: 0.25\nwidth: 2\n")
    (tmp_path / "h.csv").write_text("key,value\nlr,0.75\nwidth,2\n")
    assert Line.load_from_checkpoint(path, hparams_file=tmp_path / "h.yaml").hparams.lr == 0.25
    assert Line.load_from_checkpoint(path, hparams_file=tmp_path / "h.csv").hparams.lr == 0.75


class Wider(Line):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.head = nn.Linear(1, 1)


@both
def test_other_weights_are_listed_once_where_that_is_allowed(
    tmp_path: Path, made: Callable[[Path], str], caplog: pytest.LogCaptureFixture
) -> None:
    path = made(tmp_path / "x.ckpt")
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        Wider.load_from_checkpoint(path)
    with caplog.at_level(logging.WARNING):
        Wider.load_from_checkpoint(path, strict=False)
    assert caplog.text.count("head.weight") == 1

    class Lenient(Wider):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.strict_loading = False

    caplog.clear()
    with caplog.at_level(logging.WARNING):
        quiet(tmp_path).test(Lenient(), data(), ckpt_path=path, verbose=False)
    assert caplog.text.count("head.weight") == 1
    with pytest.raises(ConfigurationError, match="in conflict with"):
        Lenient.load_from_checkpoint(path, strict=True)


def test_a_task_without_the_checkpoint_s_extra_weights_is_trained(tmp_path: Path) -> None:
    class Less(Line):
        strict_loading = False

    saved = content(6, True)
    saved["state_dict"]["old.weight"] = torch.ones(1)
    torch.save(saved, tmp_path / "x.ckpt")
    with pytest.raises((CheckpointError, RuntimeError), match=r"old\.weight"):
        quiet(tmp_path).fit(Line(), data(), ckpt_path=tmp_path / "x.ckpt")
    task = Less()
    quiet(tmp_path, max_epochs=2).fit(task, data(), ckpt_path=tmp_path / "x.ckpt")
    assert len(task.losses) == 6


def test_an_opened_file_is_read(tmp_path: Path) -> None:
    opened = io.BytesIO(Path(theirs(tmp_path / "x.ckpt")).read_bytes())
    torch.testing.assert_close(Line.load_from_checkpoint(opened).state_dict(), content(6, True)["state_dict"])


# exports


@pytest.mark.parametrize("method", ["script", "trace"])
def test_torchscript_computes_the_same_after_a_fit(tmp_path: Path, method: str) -> None:
    task, x = Line(), torch.randn(3, 2)
    task.example_input_array = x
    trainer = quiet(tmp_path, max_epochs=1)
    trainer.fit(task, data())
    task.train()
    task.to_torchscript(tmp_path / "net.pt", method=method)
    assert task.training
    assert task.trainer is trainer
    torch.testing.assert_close(torch.jit.load(str(tmp_path / "net.pt"))(x), task(x))  # type: ignore[no-untyped-call]


def test_an_exported_program_computes_the_same(tmp_path: Path) -> None:
    task, x = Line(), torch.randn(3, 2)
    task.to_exported_program(tmp_path / "net.pt2", (x,))
    torch.testing.assert_close(torch.export.load(tmp_path / "net.pt2").module()(x), task(x))


def test_an_export_without_a_sample_names_the_argument() -> None:
    with pytest.raises(ConfigurationError, match="requires either `input_sample`"):
        Line().to_onnx("net.onnx")
    with pytest.raises(ConfigurationError, match="requires either `example_inputs`"):
        Line().to_torchscript(method="trace")
    with pytest.raises(ConfigurationError, match="'script' or 'trace'"):
        Line().to_torchscript(method="guess")


def test_onnx_is_written_or_the_error_has_the_line_that_installs_it(tmp_path: Path) -> None:
    path, x = tmp_path / "net.onnx", torch.randn(3, 2)
    if find_spec("onnx") is None or find_spec("onnxscript") is None:
        with pytest.raises(ConfigurationError, match=r'pip install "drivetrain\[onnx\]"'):
            Line().to_onnx(path, x)
    else:
        import onnx
        from onnx.reference import ReferenceEvaluator

        task = Line()
        task.to_onnx(path, x, verbose=False)
        written = onnx.load(path)
        onnx.checker.check_model(written)
        [found] = ReferenceEvaluator(written).run(None, {written.graph.input[0].name: x.numpy()})
        assert torch.allclose(torch.from_numpy(found), task(x), atol=1e-6)


# making modules


def test_modules_are_made_in_the_dtype_of_the_run(tmp_path: Path) -> None:
    trainer = Trainer(accelerator="cpu", precision="bf16-true", logger=False, enable_checkpointing=False)
    with trainer.init_module():
        made = nn.Linear(2, 2)
    assert made.weight.dtype == torch.bfloat16
    assert nn.Linear(2, 2).weight.dtype == torch.float32


def test_modules_are_made_without_initial_values() -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    before = torch.get_rng_state()
    with trainer.init_module(empty_init=True):
        nn.Linear(2, 2)
    assert torch.equal(before, torch.get_rng_state())
    with trainer.init_module():
        nn.Linear(2, 2)
    assert not torch.equal(before, torch.get_rng_state())
