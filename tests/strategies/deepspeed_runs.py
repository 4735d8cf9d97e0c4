"""Short trainings under DeepSpeed, one after another in the same processes: importing it costs more than they do."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import (
    DDP,
    Accelerator,
    Callback,
    ConfigurationError,
    DeepSpeed,
    DummyOptim,
    DummyScheduler,
    Task,
    Trainer,
)
from drivetrain.runtime.collectives import gather_object

STAGES = (0, 1, 2, 3)
from tests.strategies.quiet import quiet_trainer

ROWS = 4
RUNS: dict[str, Callable[[Path], Any]] = {}


def run(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    RUNS[function.__name__] = function
    return function


def run_all(names: list[str], directory: str) -> dict[str, tuple[bool, Any]]:
    """What each run returned on this process, or its traceback."""
    torch.set_num_threads(1)
    results: dict[str, tuple[bool, Any]] = {}
    for name in names:
        gc.freeze()  # DeepSpeed collects garbage where it makes an engine, which takes a second with all it imports
        try:
            results[name] = (True, RUNS[name](Path(directory) / name))
        except Exception:
            results[name] = (False, traceback.format_exc())
    return results


class Net(nn.Module):
    """A frozen layer, tied weights, a buffer that forwards change, and sizes that no number of processes divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 5, bias=False)
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(F.gelu(self.head(self.norm(F.gelu(self.frozen(self.embed(x)))))))


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def data(steps: int, world: int = 2) -> TensorDataset:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(ROWS * world * steps, 7, generator=generator)
    return TensorDataset(x, torch.randint(0, 5, (len(x),), generator=generator))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


class Loop:
    """A plain loop over an Accelerator: two groups of parameters, a schedule, clipping."""

    def __init__(self, strategy: Any, precision: str = "no", steps: int = 6) -> None:
        self.accelerator = Accelerator(cpu=True, strategy=strategy, mixed_precision=precision)
        model = net()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            [{"params": trained[:2], "weight_decay": 0.0}, {"params": trained[2:]}], lr=1e-2, weight_decay=0.1
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        rows = ROWS * 2 // self.accelerator.num_processes
        loader = DataLoader(data(steps), batch_size=rows)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, loader, schedule
        )

    def train(self, steps: int) -> Loop:
        for _, (x, y) in zip(range(steps), self.loader, strict=False):
            self.optimizer.zero_grad()
            self.accelerator.backward(F.cross_entropy(self.model(x).float(), y))
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.schedule.step()
        return self

    def weights(self) -> dict[str, Tensor]:
        """Whole, on all processes."""
        state = self.accelerator.strategy.state.model(self.model)
        parts = gather_object([{name: value for name, value in state.items() if not value.is_meta}])
        return {name: next(part[name] for part in parts if name in part).detach().clone() for name in state}


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


@run
def resume_under_any_stage(directory: Path) -> dict[str, float]:
    """Three steps under one stage, three more under another: how far from six without a break."""
    kinds: dict[str, Any] = {f"stage {stage}": lambda stage=stage: DeepSpeed(stage) for stage in STAGES}
    kinds["offload"] = lambda: DeepSpeed(3, offload_optimizer="cpu", offload_param="cpu")
    kinds["ddp"] = DDP
    unbroken = {name: Loop(make()).train(6).weights() for name, make in kinds.items()}
    for name, make in kinds.items():
        Loop(make()).train(3).accelerator.save_state(directory / name)
    gaps = {}
    names = list(kinds)
    for number, name in enumerate(names):
        for then in {name, names[(number + 1) % len(names)], "ddp"}:
            loop = Loop(kinds[then]())
            loop.accelerator.load_state(directory / name)
            gaps[f"{name} -> {then}"] = furthest(loop.train(3).weights(), unbroken[then])
    return gaps


@run
def resume_with_master_weights(directory: Path) -> dict[str, float]:
    """The same in bfloat16, where the 32-bit master weights must survive."""
    gaps = {}
    for stage in STAGES:
        unbroken = Loop(DeepSpeed(stage), "bf16-true").train(6).weights()
        Loop(DeepSpeed(stage), "bf16-true").train(3).accelerator.save_state(directory / str(stage))
        loop = Loop(DeepSpeed(stage), "bf16-true")
        loop.accelerator.load_state(directory / str(stage))
        gaps[str(stage)] = furthest(loop.train(3).weights(), unbroken)
    return gaps


@run
def native_checkpoints(directory: Path) -> dict[str, Any]:
    """Written by the engine and read by it: how far from without a break; and the weights, to be merged later."""
    found: dict[str, Any] = {}
    for stage in STAGES:
        unbroken = Loop(DeepSpeed(stage)).train(6).weights()
        loop = Loop(DeepSpeed(stage)).train(3)
        loop.accelerator.strategy.save_native(loop.model, directory / str(stage))
        halfway = loop.weights()
        again = Loop(DeepSpeed(stage))
        again.accelerator.strategy.load_native(again.model, directory / str(stage))
        again.schedule.load_state_dict(loop.schedule.state_dict())
        again.loader.load_state_dict(loop.loader.state_dict())
        found[str(stage)] = (furthest(again.train(3).weights(), unbroken), halfway)
    return found


class NetTask(Task):
    def __init__(self, optimizer: Callable[[nn.Module], Any] = adamw, build: bool = True) -> None:
        super().__init__()
        self.make_optimizer = optimizer
        self.net = net() if build else None
        self.partitioned: list[bool] = []

    def configure_model(self) -> None:
        if self.net is None:
            self.net = net()
            self.partitioned = [hasattr(p, "ds_id") for p in self.net.parameters()]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]).float(), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]).float(), batch[1]))

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.net)


def fitted(strategy: Any, task: Task | None = None, **options: Any) -> tuple[Trainer, dict[str, Tensor]]:
    one = quiet_trainer(strategy, **options)
    one.fit(task or NetTask(), DataLoader(data(4), batch_size=ROWS))
    return one, whole_weights(one)


def whole_weights(one: Trainer) -> dict[str, Tensor]:
    """Of rank 0, on all processes."""
    state: dict[str, Tensor] = gather_object([one.strategy.state.full(one.model)])[0]
    return state


@run
def built_in_parts(directory: Path) -> dict[str, Any]:
    """A model made in `configure_model` under ZeRO-3: taken apart where it is made; trained, and evaluated alone."""
    task = NetTask(build=False)
    one, weights = fitted(DeepSpeed(3), task)
    _, expected = fitted(DeepSpeed(3))
    alone, other = NetTask(build=False), quiet_trainer(DeepSpeed(3))
    path = directory / "weights.ckpt"
    one.save_checkpoint(path)
    evaluation = DataLoader(data(3), batch_size=3)
    loss = one.validate(task, evaluation, verbose=False)[0]["val_loss"]
    again = other.validate(alone, evaluation, ckpt_path=path, verbose=False)[0]["val_loss"]
    return {"partitioned": task.partitioned, "gap": furthest(weights, expected), "losses": (loss, again)}


@run
def optimizer_of_the_configuration(directory: Path) -> dict[str, Any]:
    """`DummyOptim` and `DummyScheduler`, against the same built by hand."""
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_num_steps": "auto",
                "warmup_max_lr": "auto",
                "warmup_min_lr": 0.001,
                "warmup_type": "linear",
            },
        },
    }

    def stand_ins(model: nn.Module) -> Any:
        optimizer = DummyOptim([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.01)
        return [optimizer], [DummyScheduler(optimizer, warmup_num_steps=4)]

    def by_hand(model: nn.Module) -> Any:
        optimizer = adamw(model)
        # DeepSpeed's makes two steps at the lowest rate: it counts its own steps from the first one on.
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 + 0.9 * max(0, step - 1) / 4)
        return [optimizer], [{"scheduler": rates, "interval": "step"}]

    found = {}
    for stage in (1, 3):
        one, weights = fitted(DeepSpeed(stage, config=config), NetTask(stand_ins))
        _, expected = fitted(DeepSpeed(stage), NetTask(by_hand))
        found[stage] = (furthest(weights, expected), one.optimizers[0].param_groups[0]["lr"])
    return found


@run
def clipped_by_the_configuration(directory: Path) -> dict[int, float]:
    """`gradient_clipping` in the configuration, against the Trainer's."""
    found = {}
    for stage in STAGES:
        _, weights = fitted(DeepSpeed(stage, gradient_clipping=0.1))
        _, expected = fitted(DeepSpeed(stage), gradient_clip_val=0.1)
        found[stage] = furthest(weights, expected)
    return found


@run
def clipped_by_value(directory: Path) -> dict[int, float]:
    found = {}
    _, expected = fitted("ddp", gradient_clip_val=0.01, gradient_clip_algorithm="value")
    for stage in STAGES:
        _, weights = fitted(DeepSpeed(stage), gradient_clip_val=0.01, gradient_clip_algorithm="value")
        found[stage] = furthest(weights, expected)
    return found


class Veto(Callback):
    """Leaves out the second step, whose gradients must then count for nothing."""

    def __init__(self) -> None:
        self.seen = 0

    def on_gradients_ready(self, trainer: Trainer, task: Task) -> bool:
        self.seen += 1
        return self.seen != 2


@run
def a_step_left_out(directory: Path) -> dict[str, float]:
    found = {}
    _, expected = fitted("ddp", callbacks=[Veto()], accumulate_grad_batches=2)
    for stage in STAGES:
        _, weights = fitted(DeepSpeed(stage), callbacks=[Veto()], accumulate_grad_batches=2)
        found[str(stage)] = furthest(weights, expected)
    _, weights = fitted(DeepSpeed(2, offload_optimizer="cpu"), callbacks=[Veto()], accumulate_grad_batches=2)
    found["2, offloaded"] = furthest(weights, expected)
    return found


@run
def fitted_twice(directory: Path) -> dict[int, float]:
    found = {}
    for stage in STAGES:
        task = NetTask()
        one, _ = fitted(DeepSpeed(stage), task)
        one.fit(task, DataLoader(data(4), batch_size=ROWS))
        weights = whole_weights(one)
        task = NetTask()
        one, _ = fitted("ddp", task)
        one.fit(task, DataLoader(data(4), batch_size=ROWS))
        found[stage] = furthest(weights, whole_weights(one))
    return found


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.experts[which](x)


class MixtureTask(Task):
    """Each process sends its rows to another expert."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tail, self.mixture, self.head = nn.Linear(7, 7), Mixture(), nn.Linear(7, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.mixture(F.gelu(self.tail(batch[0])), (self.trainer.global_rank + batch_idx) % 2)
        return F.cross_entropy(self.head(x), batch[1])

    def configure_optimizers(self) -> Any:
        return adamw(self)


@run
def mixture_of_experts(directory: Path) -> float:
    _, weights = fitted(DeepSpeed(3, moe_layers=["Mixture"]), MixtureTask())
    _, expected = fitted(DDP(find_unused_parameters=True), MixtureTask())
    return furthest(weights, expected)


@run
def two_models(directory: Path) -> dict[int, float]:
    """Each with an optimizer of its own, and one loss over both."""

    def train(strategy: Any) -> dict[str, Tensor]:
        accelerator = Accelerator(cpu=True, strategy=strategy)
        torch.manual_seed(5)
        models = [nn.Linear(7, 6), nn.Linear(6, 5)]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
        loader = DataLoader(data(4), batch_size=ROWS)
        first, second, one, other, loader = accelerator.prepare(*models, *optimizers, loader)
        for x, y in loader:
            accelerator.backward(F.cross_entropy(second(F.gelu(first(x))), y))
            norm = accelerator.clip_grad_norm_([*first.parameters(), *second.parameters()], 0.1)
            for optimizer in (one, other):
                optimizer.step()
                optimizer.zero_grad()
        states = [gather_object([accelerator.get_state_dict(model)])[0] for model in (first, second)]
        weights = {f"{n}.{name}": value for n, state in enumerate(states) for name, value in state.items()}
        return weights | {"norm": norm}

    expected = train("ddp")
    return {stage: furthest(train(DeepSpeed(stage)), expected) for stage in (1, 2, 3)}


@run
def refusals(directory: Path) -> dict[str, str]:
    def message(call: Callable[[], Any]) -> str:
        try:
            call()
        except ConfigurationError as error:
            return str(error)
        return "nothing was raised"

    def two_optimizers(model: nn.Module) -> Any:
        return [torch.optim.SGD(model.embed.parameters(), lr=0.1), torch.optim.SGD(model.head.parameters(), lr=0.1)]

    def two_models_at_stage_0() -> None:
        accelerator = Accelerator(cpu=True, strategy=DeepSpeed(0))
        models = [nn.Linear(7, 6), nn.Linear(6, 5)]
        first, second, *_ = accelerator.prepare(*models, *[torch.optim.SGD(m.parameters(), lr=0.1) for m in models])
        accelerator.backward(second(first(torch.ones(2, 7))).sum())

    def unprepared() -> None:
        accelerator = Accelerator(cpu=True, strategy=DeepSpeed(1))
        accelerator.prepare(net())
        accelerator.prepare(torch.optim.SGD(net().parameters(), lr=0.1)).step()

    def clipped_otherwise() -> None:
        loop = Loop(DeepSpeed(1, gradient_clipping=1.0))
        loop.train(1)

    return {
        "fp16": message(lambda: quiet_trainer("deepspeed", precision="fp16")),
        "fp16-true": message(lambda: quiet_trainer("deepspeed", precision="16-true")),
        "64": message(lambda: quiet_trainer("deepspeed", precision="64")),
        "zero option": message(lambda: quiet_trainer(DeepSpeed(2, overlap_com=True))),
        "accumulation": message(lambda: fitted(DeepSpeed(config={"gradient_accumulation_steps": 4}))),
        "clipping": message(lambda: fitted(DeepSpeed(gradient_clipping=1.0), gradient_clip_val=0.5)),
        "clipping in a loop": message(clipped_otherwise),
        "two optimizers": message(lambda: fitted(DeepSpeed(1), NetTask(two_optimizers))),
        "L-BFGS": message(lambda: fitted(DeepSpeed(1), NetTask(lambda m: torch.optim.LBFGS(m.head.parameters())))),
        "unprepared": message(unprepared),
        "two models at stage 0": message(two_models_at_stage_0),
        "moe": message(lambda: fitted(DeepSpeed(3, moe_layers=["Mixtur"]), MixtureTask())),
        "nvme": message(lambda: quiet_trainer(DeepSpeed(2, offload_optimizer="nvme", nvme_path=directory))),
    }


@run
def unshared_buffers(directory: Path) -> bool:
    """Each process's batch statistics differ; what is evaluated and saved is rank 0's on all."""
    loop = Loop(DeepSpeed(2)).train(2)
    own = loop.accelerator.unwrap_model(loop.model).norm.running_mean.clone()
    means = gather_object([own])
    saved = gather_object([loop.weights()["norm.running_mean"]])
    return not torch.equal(means[0], means[1]) and torch.equal(saved[0], saved[1]) and torch.equal(saved[0], means[0])
