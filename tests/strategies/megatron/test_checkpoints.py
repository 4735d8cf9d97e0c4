"""Checkpoints of Megatron: exact under the same grid, and megatron-core's own beside them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Subset

from drivetrain import Callback, CheckpointError
from tests.conformance.strategies import ROWS
from tests.pool import run_in_processes
from tests.strategies.megatron import cpu_shim
from tests.strategies.megatron.models import GPT, Texts, adamw, fit, two_groups

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(300)]

EXACT = 5e-6
SAVED_AFTER = 2  # of four steps
ON_TWO = ["megatron-data", "megatron-tp", "megatron-pp", "megatron-interleaved"]
NATIVE = ["megatron-tp", "megatron-pp", "megatron-data"]
SWIGLU = {"gated_linear_unit": True, "add_bias_linear": False}


class SaveOnce(Callback):
    """Saves after two steps, as the Trainer does and as megatron-core does."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        if trainer.global_step == SAVED_AFTER and batch_idx % 2:
            trainer.save_checkpoint(self.directory / "run")
            trainer.strategy.save_native(trainer.model, self.directory / "native")


class LoadNative(Callback):
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_fit_start(self, trainer, task):
        trainer.strategy.load_native(trainer.model, self.directory)


def task(**options: Any) -> GPT:
    torch.manual_seed(11)
    return GPT(tied=True, optimizer=two_groups, **{**SWIGLU, **options})


def write(grids: list[str], root: Path) -> dict[str, Any]:
    """Train to the end, saving on the way."""
    cpu_shim.install()
    found = {}
    for grid in grids:
        outcome = fit(ROWS[grid].make(), task(), callbacks=[SaveOnce(root / grid)])
        found[grid] = (outcome.parameters, outcome.evaluation_loss)
    return found


def resume(grids: list[str], root: Path) -> dict[str, Any]:
    """Resume what each grid has saved, to the end."""
    cpu_shim.install()
    found = {}
    for grid in grids:
        outcome = fit(ROWS[grid].make(), task(), resume=root / grid / "run")
        found[grid] = (outcome.parameters, outcome.evaluation_loss)
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What each grid has saved on the way, and what it had in the end."""
    root = tmp_path_factory.mktemp("megatron")
    found = run_in_processes(write, 1, args=(["megatron"], root), timeout=100)[0]
    return root, found | run_in_processes(write, 2, args=(ON_TWO, root), timeout=200)[0]


@pytest.fixture(scope="module")
def resumed(written) -> dict[str, Any]:
    return run_in_processes(resume, 2, args=(["megatron-tp", "megatron-interleaved"], written[0]), timeout=200)[0]


def assert_same(found: Any, expected: Any, tolerance: float = EXACT) -> None:
    assert found[0].keys() == expected[0].keys()
    for name, value in expected[0].items():
        torch.testing.assert_close(found[0][name], value, atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    assert found[1] == pytest.approx(expected[1], abs=tolerance)


@pytest.mark.parametrize("grid", ["megatron-tp", "megatron-interleaved"])
def test_a_run_continues_to_the_bit_under_the_same_grid(grid: str, written, resumed) -> None:
    assert_same(resumed[grid], written[1][grid], tolerance=0.0)


def read_native(pairs: list[tuple[str, str]], root: Path) -> dict[tuple[str, str], Any]:
    """Continue from megatron-core's own checkpoints, on the data that is left."""
    cpu_shim.install()
    found = {}
    for writer, reader in pairs:
        rest = Subset(Texts(), range(len(Texts()) // 2, len(Texts())))
        callback = LoadNative(root / writer / "native")
        outcome = fit(ROWS[reader].make(), task(), rest, callbacks=[callback])
        found[writer, reader] = (outcome.parameters, outcome.evaluation_loss)
    return found


@pytest.fixture(scope="module")
def continued(written) -> dict[tuple[str, str], Any]:
    root, _ = written
    found = run_in_processes(read_native, 2, args=(list(product(NATIVE, NATIVE)), root), timeout=280)[0]
    to_one = [("megatron-tp", "megatron"), ("megatron-data", "megatron")]
    return found | run_in_processes(read_native, 1, args=(to_one, root), timeout=100)[0]


@pytest.mark.parametrize("writer", NATIVE)
@pytest.mark.parametrize("reader", NATIVE)
def test_its_own_checkpoints_continue_under_another_grid(writer: str, reader: str, written, continued) -> None:
    tolerance = 0.0 if writer == reader else EXACT
    assert_same(continued[writer, reader], written[1][writer], tolerance)


@pytest.mark.parametrize("writer", ["megatron-tp", "megatron-data"])
def test_its_own_checkpoints_continue_on_one_process(writer: str, written, continued) -> None:
    assert_same(continued[writer, "megatron"], written[1][writer])


def exact_with_dropout(root: Path) -> list[bool]:
    """With dropout and low weights: interrupted and resumed, against a run to the end, in 32-bit master weights."""
    cpu_shim.install()
    found = []
    for number, sizes in enumerate(({"tensor_parallel": 2}, {})):
        options = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
        directory = root / str(number)
        ends = []
        for resume in (None, directory / "run"):
            from drivetrain import Megatron

            callbacks = [] if resume else [SaveOnce(directory)]
            outcome = fit(
                Megatron(**sizes),
                GPT(optimizer=adamw, **options),
                evaluate=False,
                resume=resume,
                precision="bf16",
                seed=5,
                callbacks=callbacks,
            )
            state = outcome.trainer.strategy.state.model(outcome.trainer.model)
            ends.append({name: value for name, value in state.items() if not value.is_meta})
        found.append(all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0]))
        found.append(all(value.dtype is torch.float32 for value in ends[0].values()))
    return found


def test_dropout_and_master_weights_are_resumed_to_the_bit(tmp_path: Path) -> None:
    assert all(all(each) for each in run_in_processes(exact_with_dropout, 2, args=(tmp_path,), timeout=200))


def refusals(root: Path) -> list[str]:
    cpu_shim.install()
    from drivetrain import Megatron

    found = []
    for other, options in (({}, {}), ({"num_layers": 2}, {}), ({}, {"optimizer": adamw})):
        try:
            given = GPT(tied=True, **{**SWIGLU, "optimizer": two_groups, **options, **other})
            fit(Megatron(), given, resume=root / "megatron" / "run", evaluate=False)
        except CheckpointError as error:
            found.append(str(error))
    try:
        fit(Megatron(), task(), callbacks=[LoadNative(root / "megatron" / "run")], evaluate=False)
    except CheckpointError as error:
        found.append(str(error))
    return found


def test_checkpoints_of_another_model_are_refused(written) -> None:
    layers, groups, native = run_in_processes(refusals, 1, args=(written[0],), timeout=100)[0]
    assert "['model.decoder.layers.2" in layers
    assert "parameter groups that do not match" in groups
    assert "save_native" in native
