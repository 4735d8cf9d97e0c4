"""Four XLA devices as one: batches, parameters and layers spread over them give what one plain process gives."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as distributed_checkpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import XLA, XLAFSDP, Accelerator, Colwise, Rowwise, Strategy
from drivetrain.checkpoint import Checkpoint
from drivetrain.strategies.xla.strategy import DeviceMesh, MeshShape, to_host
from tests.pool import run_in_processes
from tests.shared_runs import SharedRuns
from tests.strategies.xla.running import (
    EXACT,
    Classifier,
    answers,
    environment,
    gap,
    make_model,
    make_optimizer,
    make_trainer,
    samples,
    train_plain,
)

pytestmark = [pytest.mark.xla, pytest.mark.timeout(900)]

runs = SharedRuns(__name__, world_size=1, timeout=800, env=environment(4))

STEPS = 6
PLAN = {"0": Colwise(), "3": Rowwise()}


def run_of(strategy: Strategy, batch_size: int = 8) -> dict[str, Any]:
    """A run of the Trainer, and how its parameters and their state were spread."""
    trainer, task = make_trainer(strategy=strategy), Classifier()
    trainer.fit(task, DataLoader(samples(8 * STEPS), batch_size))
    weight = task.net[0].weight
    state = trainer.task_optimizers[0].state[weight]["exp_avg"]
    return {
        "parameters": trainer.strategy.state.model(task.net, full=True),
        "losses": [loss.item() for loss in task.losses],
        "weight": DeviceMesh.spec_of(weight),
        "state": DeviceMesh.spec_of(state),
        "compilations": trainer.strategy.compilations.count,
    }


STRATEGIES: dict[str, Any] = {
    "data parallel": XLA,
    "sharded": XLAFSDP,
    "sharded in two copies": lambda: XLAFSDP(replicate_size=2),
    "tensor parallel": lambda: XLA(tp=2, tp_plan=PLAN),
    "tensor parallel and sharded": lambda: XLAFSDP(tp=2, tp_plan=PLAN),
}


@runs
def train_under_each() -> dict[str, dict[str, Any]]:
    return {name: run_of(make()) for name, make in STRATEGIES.items()}


@pytest.mark.parametrize("name", STRATEGIES)
def test_gives_what_one_plain_process_gives(name: str) -> None:
    seen = runs.of(train_under_each)[0][name]
    model, losses = train_plain(samples(8 * STEPS))
    assert max(abs(a - b) for a, b in zip(seen["losses"], losses, strict=True)) <= EXACT
    assert gap(seen["parameters"], model.state_dict()) <= EXACT


@pytest.mark.parametrize(
    ("name", "spread"),
    [
        ("data parallel", "{replicated}"),
        ("sharded", "devices=[4,1]"),
        ("sharded in two copies", "devices=[2,1,2]"),
        ("tensor parallel", "devices=[2,1,2]"),
        ("tensor parallel and sharded", "devices=[2,2]"),
    ],
)
def test_parameters_and_the_state_of_optimizers_are_spread_alike(name: str, spread: str) -> None:
    seen = runs.of(train_under_each)[0][name]
    assert spread in seen["weight"]
    assert seen["state"] == seen["weight"]


@runs
def train_on_uneven_rows() -> dict[str, Any]:
    return run_of(XLAFSDP(), batch_size=6)


def test_rows_that_the_devices_do_not_divide_count_once() -> None:
    seen = runs.of(train_on_uneven_rows)[0]
    model, losses = train_plain(samples(8 * STEPS), batch_size=6)
    assert max(abs(a - b) for a, b in zip(seen["losses"], losses, strict=True)) <= EXACT
    assert gap(seen["parameters"], model.state_dict()) <= EXACT


@runs
def change_the_strategy() -> dict[str, Any]:
    """One task, first sharded and then not, and the other way round."""
    seen = {}
    for names in (("sharded", "data parallel"), ("data parallel", "sharded")):
        task, data = Classifier(), DataLoader(samples(16), 8)
        for name in names:
            make_trainer(strategy=STRATEGIES[name]()).fit(task, data)
        seen[names[-1]] = DeviceMesh.spec_of(task.net[0].weight)
    return seen


def test_a_model_is_spread_as_the_last_strategy_wants_it() -> None:
    seen = runs.of(change_the_strategy)[0]
    assert seen["data parallel"] == "{replicated}"
    assert "devices=[4,1]" in seen["sharded"]


@runs
def train_with_a_raw_loop() -> dict[str, Any]:
    accelerator = Accelerator(device="xla", strategy="xla_fsdp")
    model = make_model()
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), DataLoader(samples(8 * STEPS), 8))
    specs = set()
    for x, y in loader:
        specs.add(DeviceMesh.spec_of(x))
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
    return {"parameters": accelerator.get_state_dict(model), "specs": specs}


def test_batches_of_a_raw_loop_are_spread_by_rows() -> None:
    seen = runs.of(train_with_a_raw_loop)[0]
    assert len(seen["specs"]) == 1
    assert "devices=[4,1]" in seen["specs"].pop()
    assert gap(seen["parameters"], train_plain(samples(8 * STEPS))[0].state_dict()) <= EXACT


@runs
def save_and_resume(directory: Path) -> dict[str, Any]:
    """Three of six steps, saved; the rest under each strategy; and where the state of the optimizer then is."""
    data = DataLoader(samples(8 * STEPS), 8)
    first = make_trainer(strategy=XLAFSDP(), max_steps=3)
    first.fit(Classifier(), data)
    first.save_checkpoint(directory / "saved")
    seen = {}
    for name in ("data parallel", "sharded"):
        trainer, task = make_trainer(strategy=STRATEGIES[name]()), Classifier()
        trainer.fit(task, data, resume=str(directory / "saved"))
        state = trainer.task_optimizers[0].state[task.net[0].weight]["exp_avg"]
        seen[name] = {
            "parameters": trainer.strategy.state.model(task.net, full=True),
            "steps": trainer.global_step,
            "alike": DeviceMesh.spec_of(state) == DeviceMesh.spec_of(task.net[0].weight),
        }
    return seen


@pytest.mark.parametrize("name", ["data parallel", "sharded"])
def test_a_run_resumes_as_if_nothing_had_happened(name: str) -> None:
    seen = runs.of(save_and_resume)[0][name]
    assert seen["steps"] == STEPS
    assert seen["alike"]
    assert gap(seen["parameters"], train_plain(samples(8 * STEPS))[0].state_dict()) <= EXACT


def counted(action: Callable[[], Any]) -> dict[str, float]:
    """What an action compiles, and how many bytes cross between the host and the devices."""
    metrics = importlib.import_module("torch_xla.debug.metrics")

    def seen() -> dict[str, float]:
        known = {name: metrics.metric_data(name) or (0, 0.0) for name in ("CompileTime", "InboundData", "OutboundData")}
        return {"compiled": known["CompileTime"][0], "read": known["InboundData"][1], "sent": known["OutboundData"][1]}

    before = seen()
    action()
    return {name: value - before[name] for name, value in seen().items()}


@runs
def read_and_load_the_state() -> dict[str, Any]:
    trainer, task = make_trainer(strategy=XLAFSDP()), Classifier()
    trainer.fit(task, DataLoader(samples(16), 8))
    state, held = trainer.strategy.state, dict(task.named_parameters())
    model, specs = state.model(trainer.model), {name: DeviceMesh.spec_of(each) for name, each in held.items()}
    optimizer = trainer.task_optimizers[0]
    return {
        "bytes": sum(value.nbytes for value in model.values()),
        "model": counted(lambda: state.model(trainer.model)),
        "optimizer": counted(lambda: state.optimizer(trainer.model, optimizer)),
        "loaded": counted(lambda: state.load_model(trainer.model, {name: 2 * value for name, value in model.items()})),
        "doubled": all(torch.equal(state.model(trainer.model)[name], 2 * value) for name, value in model.items()),
        "as spread as before": specs == {name: DeviceMesh.spec_of(each) for name, each in held.items()},
    }


def test_reading_a_sharded_state_compiles_nothing_and_each_part_crosses_once() -> None:
    seen = runs.of(read_and_load_the_state)[0]
    assert seen["model"] == {"compiled": 0, "read": seen["bytes"], "sent": 0}
    assert seen["optimizer"] == {"compiled": 0, "read": 2 * seen["bytes"], "sent": 0}


def test_loading_sends_each_device_its_part_alone() -> None:
    seen = runs.of(read_and_load_the_state)[0]
    assert seen["loaded"]["sent"] == seen["bytes"]
    assert seen["doubled"]
    assert seen["as spread as before"]


@runs
def open_with_torchs_own_loader(directory: Path) -> dict[str, Any]:
    """A sharded run's checkpoint, read by torch's planner into plain tensors and by torch_xla's into sharded ones."""
    trainer, task = make_trainer(strategy=XLAFSDP()), Classifier()
    trainer.fit(task, DataLoader(samples(16), 8))
    trainer.save_checkpoint(directory / "saved")
    saved = trainer.strategy.state.model(trainer.model, full=True)
    planners = importlib.import_module("torch_xla.experimental.distributed_checkpoint")
    opened = Checkpoint(directory / "saved")
    places = {name: f"engine/models/0/{name}" for name in saved}
    plain = {places[name]: torch.zeros_like(value) for name, value in saved.items()}
    distributed_checkpoint.load(plain, storage_reader=opened.tensors)
    make_trainer(strategy=XLAFSDP()).fit(task, DataLoader(samples(8, seed=9), 8))  # to other values
    sharded = {places[name]: value for name, value in task.named_parameters()}
    distributed_checkpoint.load(sharded, storage_reader=opened.tensors, planner=planners.SPMDLoadPlanner())
    return {
        "plain": all(torch.equal(plain[places[name]], value) for name, value in saved.items()),
        "sharded": {name: torch.equal(to_host(sharded[places[name]]), value) for name, value in saved.items()},
        "spec": DeviceMesh.spec_of(task.net[0].weight),
    }


def test_a_sharded_checkpoint_opens_through_torchs_and_torch_xlas_planners() -> None:
    seen = runs.of(open_with_torchs_own_loader)[0]
    assert seen["plain"]
    assert all(seen["sharded"].values()), seen["sharded"]
    assert "devices=[4,1]" in seen["spec"]


@runs
def refuse() -> dict[str, str]:
    attempts: dict[str, Any] = {
        "one device": lambda: Accelerator(device="xla", strategy=XLA(spmd=False)),
        "sizes": lambda: Accelerator(device="xla", strategy=XLA(tp=3, tp_plan=PLAN)),
        "style": lambda: Accelerator(device="xla", strategy=XLA(tp=2, tp_plan={"2": Colwise()})).prepare(make_model()),
        "pattern": lambda: Accelerator(device="xla", strategy=XLA(tp=2, tp_plan={"9": Colwise()})).prepare(
            make_model()
        ),
        "width": lambda: Accelerator(device="xla", strategy=XLA(tp=2, tp_plan={"0": Colwise()})).prepare(
            nn.Sequential(nn.Linear(4, 7))
        ),
    }
    return answers(attempts)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("one device", "already runs over all devices, so it cannot run on one device"),
        ("sizes", "do not multiply to the 4 XLA device(s) of this process. Sizes that fit: 1, 2, 4"),
        ("style", "assigns the style ColwiseParallel to '2', a LayerNorm"),
        ("pattern", "tp_plan has patterns that match no module of Sequential: '9'"),
        ("width", "'0' has out_features=7, which is not divisible by tp=2"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(what: str, said: str) -> None:
    found = runs.of(refuse)[0][what]
    assert found.startswith("ConfigurationError: ")
    assert said in found


def join_two_processes() -> str:
    try:
        Accelerator(device="xla")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "joined"


def test_several_processes_on_the_cpu_are_refused_since_each_would_train_alone() -> None:
    said = run_in_processes(join_two_processes, 2, env=environment(4), timeout=120)
    assert all("ConfigurationError: XLA on the CPU cannot connect several processes" in each for each in said)


def test_a_mesh_takes_what_its_sizes_leave() -> None:
    assert MeshShape(tensor=2).fill(8) == MeshShape(data=4, shard=1, tensor=2)
    assert MeshShape(data=2, shard=-1).fill(8) == MeshShape(data=2, shard=4, tensor=1)
    assert MeshShape(data=1, shard=2, tensor=3).size == 6
