"""Two steps of `fit`, two of a raw loop and two of `fit` are six steps of `fit`, under every strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from drivetrain import Accelerator, DeepSpeed, Trainer
from tests.conformance.harness import MAX_NORM
from tests.conformance.language_model import LOCAL_ROWS, LanguageTask, Run, loss_of, precision_of
from tests.conformance.strategies import LANGUAGE, ROWS, Row
from tests.pool import run_in_processes
from tests.strategies.megatron import cpu_shim, models
from tests.strategies.quiet import quiet_trainer

PRECISIONS = ("32", "bf16", "fp16")

STRATEGIES = {**ROWS, "zero-2": replace(ROWS["zero-3"], make=lambda: DeepSpeed(stage=2))}


class Switching(LanguageTask):
    """A task that a raw loop calls as any module."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.model(tokens, positions)


def run_of(precision: str) -> Run:
    return Run(precision, layers=2, samples=2 * LOCAL_ROWS * 6)


def data_of(run: Run, driver: Trainer | Accelerator) -> DataLoader[Any]:
    return DataLoader(run.data(), batch_size=run.rows(driver.strategy.topology.data_shard.count))


def trainer_of(strategy: str, run: Run, steps: int) -> Trainer:
    row = STRATEGIES[strategy]
    options = {"precision": precision_of(run), "gradient_clip_val": MAX_NORM, "max_steps": steps}
    return quiet_trainer(row.make(), accelerator=row.device, **options)


def fit(strategy: str, run: Run, steps: int, resume: str | None = None, save: str | None = None) -> dict[str, Tensor]:
    """Train with the Trainer up to so many steps of its own."""
    torch.set_num_threads(1)
    if STRATEGIES[strategy].family == LANGUAGE:
        trainer = trainer_of(strategy, run, steps)
        trainer.fit(Switching(layers=run.layers), data_of(run, trainer), resume=resume)
    else:
        trainer = fit_layers(STRATEGIES[strategy], run, steps, resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return trainer.strategy.state.model(trainer.model, full=True)


def fit_layers(row: Row, run: Run, steps: int, resume: str | None) -> Trainer:
    """The same with megatron-core's layers."""
    cpu_shim.install()
    torch.manual_seed(11)
    data = models.Texts(models.ROWS * 6)
    options = {"precision": precision_of(run), "max_steps": steps, "resume": resume, "evaluate": False}
    trainer = models.fit(row.make(), data=data, accumulate=1, **options).trainer
    assert trainer is not None
    return trainer


def take_steps(accelerator: Accelerator, loss: Callable[[Any], Tensor], optimizer: Any, batches: Any) -> None:
    """Two steps of a loop that a user writes."""
    (model,) = accelerator.prepared.models
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        accelerator.backward(loss(batch))
        accelerator.clip_grad_norm_(list(model.parameters()), MAX_NORM)
        optimizer.step()
        if number == 1:
            return


def raw_loop(strategy: str, run: Run, load: str, save: str) -> None:
    """Train in a raw loop from a Trainer's checkpoint on."""
    torch.set_num_threads(1)
    row = STRATEGIES[strategy]
    options = {"device": row.device, "mixed_precision": precision_of(run)}
    if row.family == LANGUAGE:
        accelerator = Accelerator(strategy=row.make(), **options)
        task = Switching(layers=run.layers)
        model, optimizer, loader = accelerator.prepare(task, task.configure_optimizers(), data_of(run, accelerator))
        loss = loss_with(model)
    else:
        cpu_shim.install()
        accelerator = Accelerator(strategy=row.make(), **options)
        with accelerator.init_context():
            model = models.held_gpt(accelerator.strategy.transformer_config)
        rows = models.ROWS // accelerator.strategy.topology.data_shard.count
        loader = DataLoader(models.Texts(models.ROWS * 6), batch_size=rows)
        model, optimizer, loader = accelerator.prepare(model, models.adamw(model.parameters()), loader)
        loss = models.loss_with(model)
    accelerator.load_state(load)
    take_steps(accelerator, loss, optimizer, accelerator.skip_first_batches(loader, 2))
    accelerator.save_state(save)


def loss_with(model: Any) -> Callable[[Any], Tensor]:
    return lambda batch: loss_of(model(batch["tokens"], batch["positions"]), batch["labels"])


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
        take_steps(accelerator, loss_with(model), task.optimizers(), rest)
        accelerator.save_state(f"{root}/{precision} live")
        trainer.fit(task, data, resume=f"{root}/{precision} live")
        assert trainer.global_step == 2
        found[precision] = whole, trainer.strategy.state.model(trainer.model, full=True)
    return found


def check(found: dict[str, Any]) -> None:
    for precision, (whole, parts) in found.items():
        assert whole.keys() == parts.keys()
        assert whole, precision
        for name, value in whole.items():
            torch.testing.assert_close(
                parts[name], value, atol=1e-6, rtol=1e-6, msg=lambda m, p=precision, n=name: f"{p}, {n}: {m}"
            )


# DeepSpeed refuses float16 on the CPU, and XLA everywhere; the scale that Megatron begins with overflows in six steps.
ONE_RUN = {
    "single": PRECISIONS,
    "ddp": PRECISIONS,
    "fsdp": PRECISIONS,
    "tp": PRECISIONS,
    "zero-2": PRECISIONS[:2],
    "xla": PRECISIONS[:2],
    "xla-fsdp": PRECISIONS[:2],
    "megatron-data": PRECISIONS[:2],
    "megatron-tp": PRECISIONS[:2],
}


def marked(strategy: str) -> Any:
    row = STRATEGIES[strategy]
    marks = [] if strategy == "single" else [getattr(pytest.mark, row.lane)]
    return pytest.param(strategy, marks=[*marks, *([pytest.mark.cpu(row.on_cpu)] if row.on_cpu else [])])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", [through_checkpoints, live])
@pytest.mark.parametrize("strategy", [marked(name) for name in ONE_RUN])
def test_fit_a_raw_loop_and_fit_are_one_run(strategy: str, way: Any, tmp_path: Path) -> None:
    row = STRATEGIES[strategy]
    if strategy == "zero-2" and find_spec("deepspeed") is None:
        pytest.skip("deepspeed is missing: pip install 'drivetrain[deepspeed]'")
    if way is live and row.family != LANGUAGE:
        pytest.skip("the schedule of a MegatronTask runs forward and backward: a raw loop prepares a model of its own")
    given = (strategy, str(tmp_path), ONE_RUN[strategy])
    check(run_in_processes(way, row.processes, args=given, timeout=600, env=row.env)[0])


# What a pipeline trains, a raw loop trains as a whole.
PIPELINES = {"pp": "single", "megatron-pp": "megatron"}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", [marked(name) for name in PIPELINES])
def test_a_pipeline_leaves_fit_for_a_raw_loop_on_one_process_and_comes_back(strategy: str, tmp_path: Path) -> None:
    """A raw loop cannot run a schedule of stages, but the engine's part of its state goes anywhere."""
    root, low = str(tmp_path), ("bf16", "fp16") if strategy == "pp" else ("bf16",)
    found = {}
    for precision in ("32", *low):
        run, fitted, raw = run_of(precision), f"{root}/{precision} fit", f"{root}/{precision} raw"
        whole = run_in_processes(fit, 2, args=(strategy, run, 6), timeout=120)[0]
        run_in_processes(fit, 2, args=(strategy, run, 2), kwargs={"save": fitted}, timeout=120)
        run_in_processes(raw_loop, 1, args=(PIPELINES[strategy], run, fitted, raw), timeout=120)
        resumed = run_in_processes(fit, 2, args=(strategy, run, 4), kwargs={"resume": raw}, timeout=120)[0]
        found[precision] = whole, resumed
    check({"32": found["32"]})
    for precision in low:
        whole, parts = found[precision]
        for name, value in whole.items():
            torch.testing.assert_close(parts[name], value, atol=3e-3, rtol=3e-3, msg=lambda m, n=name: f"{n}: {m}")
