"""One XLA device: what is compiled, when the host waits, what stays the same object, and what plain torch gives."""

from __future__ import annotations

import importlib
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import XLA, Accelerator, Callback, PartialState, Trainer, set_seed
from drivetrain.runtime.seeds import RandomState
from tests.shared_runs import SharedRuns
from tests.strategies.xla.running import (
    CLASSES,
    EXACT,
    FEATURES,
    Classifier,
    answers,
    environment,
    gap,
    make_model,
    make_optimizer,
    make_trainer,
    samples,
    train_plain,
    warnings_of,
)

pytestmark = [pytest.mark.xla, pytest.mark.timeout(900)]

runs = SharedRuns(__name__, world_size=1, timeout=800, env=environment())

STEPS = 20


class CountCompilations(Callback):
    """Keeps how many graphs were compiled up to the end of each step."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(trainer.strategy.compilations.count)


@runs
def train_with_trainer() -> dict[str, Any]:
    counted = CountCompilations()
    trainer, task = make_trainer(callbacks=[counted]), Classifier()
    trainer.fit(task, DataLoader(samples(8 * STEPS), 8))
    compilations = trainer.strategy.compilations
    return {
        "strategy": trainer.strategy.name,
        "compilations": counted.seen,
        "steps": compilations.steps,
        "losses": [loss.item() for loss in task.losses],
        "parameters": trainer.strategy.state.model(task.net, full=True),
        "devices": {parameter.device.type for parameter in task.parameters()},
    }


def test_twenty_steps_of_the_trainer_compile_two_graphs() -> None:
    [seen] = runs.of(train_with_trainer)
    print(f"{seen['compilations'][-1]} compilations in {seen['steps']} steps of the Trainer")
    assert seen["steps"] == STEPS
    assert seen["compilations"] == [1] + [2] * (STEPS - 1)


def test_the_trainer_takes_the_strategy_of_the_device_and_gives_what_plain_torch_gives() -> None:
    [seen] = runs.of(train_with_trainer)
    model, losses = train_plain(samples(8 * STEPS))
    assert seen["strategy"] == "xla"
    assert seen["devices"] == {"xla"}
    assert max(abs(a - b) for a, b in zip(seen["losses"], losses, strict=True)) <= EXACT
    assert gap(seen["parameters"], model.state_dict()) <= EXACT


@runs
def train_with_a_raw_loop() -> dict[str, Any]:
    accelerator = Accelerator(device="xla")
    model = make_model()
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = DataLoader(samples(8 * STEPS), 8)
    loader, model, scheduler, optimizer = accelerator.prepare(loader, model, scheduler, optimizer)
    before = accelerator.strategy.compilations.count
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        scheduler.step()
    compiled = accelerator.strategy.compilations.count - before
    return {"compilations": compiled, "parameters": accelerator.get_state_dict(model)}


def test_twenty_steps_of_a_raw_loop_compile_two_graphs_and_train_as_plain_torch() -> None:
    [seen] = runs.of(train_with_a_raw_loop)
    print(f"{seen['compilations']} compilations in {STEPS} steps of a raw loop")
    assert seen["compilations"] == 2
    assert gap(seen["parameters"], train_plain(samples(8 * STEPS))[0].state_dict()) <= EXACT


class WatchReads(Callback):
    """Counts what the host has read from the device, at the start and the end of each step."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.metrics = importlib.import_module("torch_xla.debug.metrics")

    def reads(self) -> int:
        transfers = self.metrics.metric_data("TransferFromDeviceTime")
        return (transfers[0] if transfers else 0) + (self.metrics.counter_value("aten::_local_scalar_dense") or 0)

    def on_train_batch_start(self, trainer: Trainer, task: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.reads())

    def on_train_batch_end(self, trainer: Trainer, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.reads())


class LogsMore(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("epoch_loss", loss, on_epoch=True)
        self.log("highest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss


@runs
def read_in_steps() -> list[int]:
    watch = WatchReads()
    make_trainer(callbacks=[watch]).fit(LogsMore(), DataLoader(samples(8 * 6), 8))
    before = watch.reads()
    torch.ones(1, device=PartialState().device).add(1).item()
    return [*watch.seen, before, watch.reads()]


def test_logging_in_a_step_reads_nothing_from_the_device() -> None:
    *seen, before, after = runs.of(read_in_steps)[0]
    assert len(set(seen)) == 1
    assert after > before, "the counters do not see a read, so that they prove nothing"


@runs
def accumulate() -> dict[str, Any]:
    trainer, task = make_trainer(accumulate_grad_batches=3), Classifier()
    trainer.fit(task, DataLoader(samples(8 * 12), 8))
    return trainer.strategy.state.model(task.net, full=True)


def test_micro_batches_add_up_as_in_plain_torch() -> None:
    [parameters] = runs.of(accumulate)
    assert gap(parameters, train_plain(samples(8 * 12), accumulate=3)[0].state_dict()) <= EXACT


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale


@runs
def move_a_model() -> dict[str, Any]:
    accelerator = Accelerator(device="xla")
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copies = [*model.parameters()]
    accelerator.prepare_model(model)  # without its optimizer, which was made before
    before = model.first.weight.detach().cpu().clone()
    model(torch.ones(2, 4, device=accelerator.device)).sum().backward()
    optimizer.step()
    return {
        "same": all(one is other for one, other in zip(copies, model.parameters(), strict=True)),
        "tied": model.first.weight is model.second.weight,
        "buffer": model.scale.device.type,
        "moved": (model.first.weight.detach().cpu() - before).abs().max().item(),
    }


def test_parameters_stay_the_same_objects_tied_and_held_by_their_optimizer() -> None:
    [seen] = runs.of(move_a_model)
    assert seen["same"]
    assert seen["tied"]
    assert seen["buffer"] == "xla"
    assert seen["moved"] > 0


@runs
def move_what_is_held() -> str:
    accelerator = Accelerator(device="xla")
    model = nn.Linear(2, 2)
    held = weakref.ref(model.weight)
    try:
        accelerator.prepare(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"moved {held}"


def test_a_parameter_that_cannot_be_moved_is_refused_by_name() -> None:
    [said] = runs.of(move_what_is_held)
    assert said.startswith("ConfigurationError: Parameter 'weight' cannot be moved")
    assert "before the model is used" in said


def batches_of(lengths: list[int]) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.ones(2, length, FEATURES), "y": torch.zeros(2, dtype=torch.long)} for length in lengths]


def run_raw(accelerator: Accelerator, batches: list[Any], select: bool = False) -> list[str]:
    model = nn.Linear(FEATURES, CLASSES)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = accelerator.prepare_data_loader(batches)
    with warnings_of("drivetrain.strategies.xla.compilations") as warned:
        for step, batch in enumerate(loader):
            x = batch["x"][:, : 1 + step] if select else batch["x"]
            accelerator.backward(F.cross_entropy(model(x.mean(1)), batch["y"]))
            optimizer.step()
            optimizer.zero_grad()
    return warned


@runs
def recompile() -> dict[str, list[str]]:
    return {
        "shapes": run_raw(Accelerator(device="xla"), batches_of([*range(20, 30)])),
        "fixed": run_raw(Accelerator(device="xla"), batches_of([7] * 10)),
        "two shapes": run_raw(Accelerator(device="xla"), batches_of([7, 9] * 6)),
        "step count": run_raw(Accelerator(device="xla"), batches_of([12] * 10), select=True),
    }


def test_steps_that_compile_again_and_again_are_named_with_the_shapes_that_changed() -> None:
    [said] = runs.of(recompile)[0]["shapes"]
    assert "compiled a graph in 3 of 5 steps" in said
    assert "batch['x'] had the shapes (2, 20, 8), (2, 21, 8), (2, 22, 8), (2, 23, 8) and others" in said
    assert "batch['y']" not in said
    assert "Pad batches to one length" in said


def test_steps_that_compile_again_although_no_shape_changed_are_named_with_what_else_it_can_be() -> None:
    [said] = runs.of(recompile)[0]["step count"]
    assert "The shapes of the batches did not change" in said
    assert "Python numbers" in said


@pytest.mark.parametrize("batches", ["fixed", "two shapes"])
def test_a_few_shapes_are_no_reason_to_warn(batches: str) -> None:
    assert runs.of(recompile)[0][batches] == []


@runs
def evaluate() -> dict[str, Any]:
    trainer, task = make_trainer(), Classifier()
    data = DataLoader(samples(21, seed=9), 8)
    seen: dict[str, Any] = {"val_loss": trainer.validate(task, data, verbose=False)[0]["val_loss"]}
    compilations = trainer.strategy.compilations
    seen["of validation"] = before = compilations.count
    seen["predictions"] = torch.cat(trainer.predict(task, data))
    seen["of prediction"] = compilations.count - before
    before = compilations.count
    trainer.predict(task, data)
    seen["of prediction again"] = compilations.count - before
    return seen


def test_evaluation_gives_what_plain_torch_gives_on_every_row_once() -> None:
    [seen] = runs.of(evaluate)
    x, y = samples(21, seed=9).tensors
    with torch.no_grad():
        logits = make_model()(x)
    assert abs(seen["val_loss"] - F.cross_entropy(logits, y).item()) <= EXACT
    assert torch.equal(seen["predictions"], logits.argmax(-1))


def test_a_short_last_batch_compiles_nothing_in_prediction_and_one_graph_in_validation() -> None:
    [seen] = runs.of(evaluate)
    print({name: count for name, count in seen.items() if name.startswith("of ")})
    assert seen["of prediction"] == 1
    assert seen["of prediction again"] == 0


@runs
def gather_rows() -> dict[str, Any]:
    accelerator = Accelerator(device="xla")
    model, loader = accelerator.prepare(make_model(), DataLoader(samples(21, seed=9), 8))
    found, shapes = [], []
    with torch.no_grad():
        for x, _ in loader:
            shapes.append(tuple(x.shape))
            found.append(accelerator.gather_for_metrics(model(x).argmax(-1)).cpu())
    return {"shapes": shapes, "predictions": torch.cat(found)}


def test_batches_of_a_raw_loop_have_one_shape_and_metrics_see_every_row_once() -> None:
    [seen] = runs.of(gather_rows)
    assert seen["shapes"] == [(8, FEATURES)] * 3
    with torch.no_grad():
        assert torch.equal(seen["predictions"], make_model()(samples(21, seed=9).tensors[0]).argmax(-1))


@runs
def draw() -> list[list[float]]:
    state = Accelerator(device="xla").state

    def numbers() -> list[float]:
        return torch.rand(4, device=state.device).tolist()

    set_seed(7)
    first = numbers()
    kept = RandomState.capture()
    second = numbers()
    kept.restore()
    again = numbers()
    set_seed(7)
    return [first, second, again, numbers()]


def test_the_device_draws_what_its_seed_and_its_restored_state_say() -> None:
    first, second, again, seeded = runs.of(draw)[0]
    assert first != second
    assert again == second
    assert seeded == first


@runs
def train_in_bfloat16() -> dict[str, Any]:
    trainer, task = make_trainer(precision="bf16"), Classifier()
    trainer.fit(task, DataLoader(samples(8 * 6), 8))
    dtypes = {str(parameter.dtype) for parameter in task.parameters()}
    return {"losses": [loss.item() for loss in task.losses], "dtypes": dtypes}


def test_bf16_keeps_parameters_in_32_bits_and_stays_near_full_precision() -> None:
    [seen] = runs.of(train_in_bfloat16)
    _, losses = train_plain(samples(8 * 6))
    differences = [abs(a - b) for a, b in zip(seen["losses"], losses, strict=True)]
    assert seen["dtypes"] == {"torch.float32"}
    assert 0 < max(differences) <= 3e-2


@runs
def refuse() -> dict[str, str]:
    attempts: dict[str, Any] = {
        "fp16": lambda: Accelerator(device="xla", mixed_precision="fp16"),
        "ddp": lambda: Accelerator(device="xla", strategy="ddp"),
        "single": lambda: Trainer(accelerator="xla", strategy="single", logger=False),
        "spmd": lambda: Accelerator(device="xla", strategy=XLA(spmd=True)),
        "downcast": lambda: Accelerator(device="xla", strategy=XLA(downcast_bf16=True), mixed_precision="bf16"),
    }
    return answers(attempts)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("fp16", "precision='fp16' is not supported with strategy='xla', because TPUs compute in bfloat16. Use 'bf16'"),
        ("ddp", "strategy='ddp' cannot run on 'xla' devices. Use strategy='xla' or 'xla_fsdp'"),
        ("single", "strategy='single' cannot run on 'xla' devices"),
        ("spmd", "already runs on one device, so it cannot run over all devices"),
        ("downcast", "downcast_bf16=True must be set before this process first uses XLA"),
    ],
)
def test_what_cannot_work_is_refused_with_what_can(what: str, said: str) -> None:
    found = runs.of(refuse)[0][what]
    assert found.startswith("ConfigurationError: ")
    assert said in found
