"""Two steps of `fit`, two of a raw loop and two of `fit` are six steps of `fit`, under every strategy."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from drivetrain import DDP, FSDP, Accelerator, DeepSpeed, Parallel, Trainer
from tests.conformance.harness import MAX_NORM
from tests.conformance.language_model import LOCAL_ROWS, LanguageTask, Run, loss_of, precision_of
from tests.conformance.test_parallel import layers_split
from tests.pool import run_in_processes

PRECISIONS = ("32", "bf16", "fp16")

STRATEGIES: dict[str, tuple[int, Any]] = {
    "single": (1, lambda: "single"),
    "ddp": (2, DDP),
    "fsdp": (2, FSDP),
    "zero-2": (2, lambda: DeepSpeed(stage=2)),
    "tp": (2, lambda: Parallel(tp=2, tp_plan=layers_split())),
    "pp": (2, lambda: Parallel(pp=2)),
}


class Switching(LanguageTask):
    """A task that a raw loop calls as any module."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.model(tokens, positions)


def run_of(precision: str) -> Run:
    return Run(precision, layers=2, samples=2 * LOCAL_ROWS * 6)


def data_of(run: Run, driver: Trainer | Accelerator) -> DataLoader[Any]:
    return DataLoader(run.data(), batch_size=run.rows(driver.strategy.topology.data_shard.count))


def trainer_of(strategy: str, run: Run, steps: int) -> Trainer:
    return Trainer(
        accelerator=run.device,
        strategy=STRATEGIES[strategy][1](),
        precision=precision_of(run),
        gradient_clip_val=MAX_NORM,
        max_epochs=1,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit(strategy: str, run: Run, steps: int, resume: str | None = None, save: str | None = None) -> dict[str, Tensor]:
    """Train with the Trainer up to so many steps of its own."""
    torch.set_num_threads(1)
    trainer = trainer_of(strategy, run, steps)
    trainer.fit(Switching(layers=run.layers), data_of(run, trainer), resume=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return trainer.strategy.state.full(trainer.model)


def take_steps(accelerator: Accelerator, call: Any, optimizer: Any, batches: Any, parameters: Any) -> None:
    """Two steps of a loop that a user writes."""
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        accelerator.backward(loss_of(call(batch["tokens"], batch["positions"]), batch["labels"]))
        accelerator.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        if number == 1:
            return


def raw_loop(strategy: str, run: Run, load: str, save: str) -> None:
    """Train in a raw loop from a Trainer's checkpoint on."""
    torch.set_num_threads(1)
    accelerator = Accelerator(device=run.device, strategy=STRATEGIES[strategy][1](), mixed_precision=precision_of(run))
    task = Switching(layers=run.layers)
    prepared = accelerator.prepare(task, task.configure_optimizers(), data_of(run, accelerator))
    model, optimizer, loader = prepared
    accelerator.load_state(load)
    rest = accelerator.skip_first_batches(loader, 2)
    take_steps(accelerator, model, optimizer, rest, list(model.parameters()))
    accelerator.save_state(save)


def through_checkpoints(strategy: str, root: str, precisions: tuple[str, ...]) -> dict[str, Any]:
    """For each precision the weights after six steps of `fit`, and after two, two and two."""
    found = {}
    for precision in precisions:
        run, place = run_of(precision), f"{root}/{precision}"
        whole = fit(strategy, run, 6)
        fit(strategy, run, 2, save=f"{place}/fit")
        raw_loop(strategy, run, f"{place}/fit", f"{place}/raw")
        # The raw loop has kept the count of two steps.
        found[precision] = whole, fit(strategy, run, 2 + 2, resume=f"{place}/raw")
    return found


def live(strategy: str, root: str, precisions: tuple[str, ...]) -> dict[str, Any]:
    """The same in one process: the raw loop drives what `fit` has prepared."""
    torch.set_num_threads(1)
    found = {}
    for precision in precisions:
        run = run_of(precision)
        whole = fit(strategy, run, 6)
        trainer, task = trainer_of(strategy, run, 2), Switching(layers=run.layers)
        data = data_of(run, trainer)
        trainer.fit(task, data)
        accelerator = trainer.accelerator
        assert (len(accelerator.prepared.models), len(accelerator.prepared.optimizers)) == (1, 1)
        model = accelerator.prepare(task)
        rest = accelerator.skip_first_batches(accelerator.prepare(data), 2)
        take_steps(accelerator, model, task.optimizers(), rest, list(model.parameters()))
        accelerator.save_state(f"{root}/{precision} live")
        trainer.fit(task, data, resume=f"{root}/{precision} live")
        assert trainer.global_step == 2
        found[precision] = whole, trainer.strategy.state.full(trainer.model)
    return found


def check(found: dict[str, Any]) -> None:
    for precision, (whole, parts) in found.items():
        assert whole.keys() == parts.keys()
        assert whole, precision
        for name, value in whole.items():
            torch.testing.assert_close(
                parts[name], value, atol=1e-6, rtol=1e-6, msg=lambda m, p=precision, n=name: f"{p}, {n}: {m}"
            )


@pytest.mark.parametrize("way", [through_checkpoints, live])
@pytest.mark.parametrize("strategy", ["single", pytest.param("ddp", marks=pytest.mark.sharded)])
def test_fit_a_raw_loop_and_fit_are_one_run(strategy: str, way: Any, tmp_path: Path) -> None:
    processes = STRATEGIES[strategy][0]
    check(run_in_processes(way, processes, args=(strategy, str(tmp_path), PRECISIONS), timeout=240)[0])


@pytest.mark.sharded
@pytest.mark.parametrize("way", [through_checkpoints, live])
@pytest.mark.parametrize("strategy", ["fsdp", "tp", "zero-2"])
def test_fit_a_raw_loop_and_fit_are_one_run_in_shards(strategy: str, way: Any, tmp_path: Path) -> None:
    if strategy == "zero-2" and find_spec("deepspeed") is None:
        pytest.skip("deepspeed is missing: pip install 'drivetrain[deepspeed]'")
    precisions = PRECISIONS[:2] if strategy == "zero-2" else PRECISIONS  # DeepSpeed refuses float16 on the CPU
    processes = STRATEGIES[strategy][0]
    check(run_in_processes(way, processes, args=(strategy, str(tmp_path), precisions), timeout=300)[0])


@pytest.mark.sharded
def test_a_pipeline_leaves_fit_for_a_raw_loop_on_one_process_and_comes_back(tmp_path: Path) -> None:
    """A raw loop cannot run a schedule of stages, but the engine's part of its state goes anywhere."""
    root = str(tmp_path)
    found = {}
    for precision in PRECISIONS:
        run, fitted, raw = run_of(precision), f"{root}/{precision} fit", f"{root}/{precision} raw"
        whole = run_in_processes(fit, 2, args=("pp", run, 6), timeout=120)[0]
        run_in_processes(fit, 2, args=("pp", run, 2), kwargs={"save": fitted}, timeout=120)
        run_in_processes(raw_loop, 1, args=("single", run, fitted, raw), timeout=120)
        found[precision] = whole, run_in_processes(fit, 2, args=("pp", run, 4), kwargs={"resume": raw}, timeout=120)[0]
    check({"32": found["32"]})
    for precision in ("bf16", "fp16"):
        whole, parts = found[precision]
        for name, value in whole.items():
            torch.testing.assert_close(parts[name], value, atol=3e-3, rtol=3e-3, msg=lambda m, n=name: f"{n}: {m}")
