"""Costs of a training step on simulated devices: in a bare loop, through the Trainer and through the Accelerator."""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from drivetrain import (
    FSDP,
    Accelerator,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientNorm,
    LearningRateMonitor,
    LossSpikeGuard,
    MemoryMonitor,
    ModelCheckpoint,
    NaNGuard,
    SpeedMonitor,
    StragglerMonitor,
    Strategy,
    Task,
    ThroughputMonitor,
    Timer,
    Trainer,
    WeightAveraging,
    WeightHistograms,
)
from drivetrain.checkpoint import open_weights
from drivetrain.checkpoint.storage import LocalStorage
from tests.simulated.collectives import network
from tests.simulated.devices import Simulated, start

WIDTH, CLASSES, ROWS = 64, 8, 16
FIRST, COUNTED, LAST = 12, 16, 36
"""Micro-batches before the counted ones, those that are counted, and all of them."""
LOGGED = 20
"""The interval of log points of which one is among the counted micro-batches."""
SPEED = 1e9
"""Bytes per second of kernels and of copies."""


class Meter:
    """Counts between two micro-batches, from the forward pass of one to that of the other.

    Args:
        sim: The devices.
    """

    def __init__(self, sim: Simulated) -> None:
        self._sim, self._passes = sim, 0
        self.counts: dict[str, Any] = {}

    def tick(self) -> None:
        """Count a forward pass."""
        self._passes += 1
        if self._passes == FIRST:
            torch.accelerator.synchronize()
            self._sim.reset_clock(to_device=SPEED, to_host=SPEED, between=SPEED, kernels=SPEED)
            network.calls.clear()
            self._sim.reset_peak(torch.accelerator.current_device_index())
        elif self._passes == FIRST + COUNTED:
            self.counts = self._read()

    def _read(self) -> dict[str, Any]:
        sim, device = self._sim, torch.accelerator.current_device_index()
        synchronisations, kernels, copies = list(sim.synchronisations), sim.kernels, tuple(sim.to_device)
        calls = Counter(call.name for call in network.calls)
        torch.accelerator.synchronize()
        return {
            "synchronisations": synchronisations,
            "kernels": kernels,
            "copies": copies,
            "collectives": dict(calls),
            "bytes": sum(call.bytes for call in network.calls),
            "seconds": sim.now,
            "peak": sim.peak(device),
            "hazards": sim.hazards,
        }


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, meter: Meter) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.meter = meter
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.meter.tick()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


STRATEGIES: dict[str, Callable[[], Strategy]] = {"hsdp": lambda: FSDP(replicate_size=2)}


def strategy_of(name: str) -> str | Strategy:
    """Return what the Trainer and the Accelerator take for a strategy of the table."""
    return STRATEGIES[name]() if name in STRATEGIES else name


def batches(world: int) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS * LAST * world, WIDTH, generator=generator)
    y = torch.randint(0, CLASSES, (len(x),), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=ROWS, pin_memory=True)


def bare(strategy: str, precision: str, accumulate: int, world: int, meter: Meter) -> None:
    """The loop that one writes by hand."""
    from drivetrain import PartialState

    device = PartialState().device
    model: nn.Module = Model(meter).to(device)
    if strategy == "ddp":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif strategy in ("fsdp", "hsdp"):
        low = None if precision == "32" else torch.bfloat16
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low and torch.float32, cast_forward_inputs=False)
        shape, names = {"fsdp": ((2,), ("shard",)), "hsdp": ((2, 2), ("replicate", "shard"))}[strategy]
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number, (x, y) in enumerate(batches(1)):
        steps = (number + 1) % accumulate == 0
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        context: AbstractContextManager[Any] = nullcontext()
        if strategy == "ddp" and not steps:
            context = model.no_sync()  # type: ignore[operator]
        elif strategy in ("fsdp", "hsdp"):
            model.set_requires_gradient_sync(steps)  # type: ignore[operator]
        with context:
            with torch.autocast(device.type, torch.bfloat16, enabled=precision != "32"):
                loss = F.cross_entropy(model(x), y)
            (loss / accumulate if accumulate > 1 else loss).backward()
        if steps:
            optimizer.step()
            optimizer.zero_grad()


class Costs(Task):
    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.net = Model(meter)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def with_trainer(strategy: str, precision: str, accumulate: int, world: int, meter: Meter) -> None:
    """`Trainer.fit` with the default callbacks."""
    fit(Costs(meter), world, strategy=strategy_of(strategy), precision=precision, accumulate_grad_batches=accumulate)


def fit(task: Task, world: int, **options: Any) -> None:
    """Fit a task for one epoch."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            **{"max_epochs": 1, "logger": False, "default_root_dir": folder, "enable_checkpointing": False, **options}
        )
        trainer.fit(task, batches(world))


def with_accelerator(strategy: str, precision: str, accumulate: int, world: int, meter: Meter) -> None:
    """The bare loop with an Accelerator."""
    mixed = {"32": "no", "bf16-mixed": "bf16"}[precision]
    accelerator = Accelerator(
        strategy=strategy_of(strategy), mixed_precision=mixed, gradient_accumulation_steps=accumulate
    )
    model: Any = Model(meter)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader: Any = batches(world)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


DRIVERS = {"bare": bare, "trainer": with_trainer, "accelerator": with_accelerator}


def cost(driver: str, strategy: str, precision: str, accumulate: int, world: int) -> dict[str, Any]:
    """Run a driver in each of `world` processes, and return what its counted micro-batches cost."""
    meter = Meter(start(world))
    network.bandwidth = SPEED
    try:
        DRIVERS[driver](strategy, precision, accumulate, world, meter)
    finally:
        network.bandwidth = 0.0
    return meter.counts


class Logs(Costs):
    """A task that logs five values and a metric, all of them in the progress bar too."""

    def __init__(self, meter: Meter) -> None:
        super().__init__(meter)
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro", validate_args=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log("loss", loss, prog_bar=True)
        self.log("loss_of_all", loss, prog_bar=True, sync_dist=True)
        self.log_dict({"mean": logits.mean(), "largest": logits.amax()}, prog_bar=True, on_step=True, on_epoch=True)
        self.log("number", float(batch_idx), prog_bar=True)
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, prog_bar=True)
        return loss


def waits_of_log_points(strategy: str, world: int) -> list[str]:
    """Log once among the counted micro-batches, and return where the host waited."""
    meter = Meter(start(world))
    options = {"logger": "csv", "log_every_n_steps": LOGGED, "enable_progress_bar": True}
    fit(Logs(meter), world, strategy=strategy, **options)
    return meter.counts["synchronisations"]


CALLBACKS: dict[str, Callable[[str], list[Callback]]] = {
    "none": lambda folder: [],
    "DeviceStatsMonitor": lambda folder: [DeviceStatsMonitor()],
    "EarlyStopping": lambda folder: [EarlyStopping("loss", check_on_train_epoch_end=True)],
    "EMAWeightAveraging": lambda folder: [EMAWeightAveraging()],
    "GradientNorm": lambda folder: [GradientNorm()],
    "LearningRateMonitor": lambda folder: [LearningRateMonitor(logging_interval="step")],
    "LossSpikeGuard": lambda folder: [LossSpikeGuard()],
    "LossSpikeGuard, every 20 steps": lambda folder: [LossSpikeGuard(action="stop", every_n_steps=LOGGED)],
    "MemoryMonitor": lambda folder: [MemoryMonitor()],
    "ModelCheckpoint": lambda folder: [ModelCheckpoint(folder)],
    "NaNGuard": lambda folder: [NaNGuard()],
    "NaNGuard, every 20 steps": lambda folder: [NaNGuard(every_n_steps=LOGGED)],
    "NaNGuard, gradients": lambda folder: [NaNGuard(check_gradients=True)],
    "SpeedMonitor": lambda folder: [SpeedMonitor()],
    "StragglerMonitor": lambda folder: [StragglerMonitor(every_n_steps=LOGGED, measured_steps=2)],
    "ThroughputMonitor": lambda folder: [ThroughputMonitor()],
    "Timer": lambda folder: [Timer("00:01:00:00")],
    "WeightAveraging": lambda folder: [WeightAveraging()],
    "WeightHistograms": lambda folder: [WeightHistograms(every_n_steps=LOGGED)],
}
TEN = (
    "EMAWeightAveraging",
    "EarlyStopping",
    "GradientNorm",
    "LearningRateMonitor",
    "LossSpikeGuard, every 20 steps",
    "MemoryMonitor",
    "ModelCheckpoint",
    "NaNGuard, every 20 steps",
    "SpeedMonitor",
    "Timer",
)
CALLBACKS["ten"] = lambda folder: [callback for name in TEN for callback in CALLBACKS[name](folder)]


def costs_with_callbacks() -> dict[str, dict[str, Any]]:
    """Count steps with each of the callbacks, in one process and 32 bits, beside those of a Trainer without them."""
    sim, found = start(1), {}
    for name, callbacks in CALLBACKS.items():
        meter = Meter(sim)
        with tempfile.TemporaryDirectory() as folder:
            options: dict[str, Any] = {"logger": "csv", "log_every_n_steps": LOGGED, "callbacks": callbacks(folder)}
            saves = any(isinstance(callback, ModelCheckpoint) for callback in options["callbacks"])
            fit(Costs(meter), 1, enable_checkpointing=saves, **options)
        found[name] = meter.counts
    return found


def copied_by_a_checkpoint() -> tuple[int, int, list[str]]:
    """Bytes on the device that a checkpoint has to hold, bytes copied to the host while it is saved, and hazards."""
    sim = start(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(max_epochs=1, logger=False, default_root_dir=folder, enable_checkpointing=False)
        task = Costs(Meter(sim))
        trainer.fit(task, batches(1))
        optimizer = trainer.optimizers[0]
        states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        held = sum(each.nbytes for each in [*task.parameters(), *states] if each.device.type == "sim")
        sim.reset_clock(to_device=SPEED, to_host=SPEED, between=SPEED, kernels=SPEED)
        trainer.save_checkpoint(f"{folder}/one.ckpt")
        return held, sim.to_host.bytes, sim.hazards


class SavesAside(Callback):
    """Callback that saves in the background after the step `SAVED`, and lets the writing begin some steps later.

    Args:
        path: The checkpoint.

    Attributes:
        weights: The weights at the save.
        trained: Steps that ended before the writing began.
        existed: Whether the checkpoint was there by then.
    """

    SAVED, LET = 4, 7

    def __init__(self, path: Path) -> None:
        self.path, self.go = path, threading.Event()
        self.weights: dict[str, Tensor] = {}
        self.trained, self.existed, self.was_done = 0, True, True

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.SAVED:
            self.weights = {name: weight.cpu().clone() for name, weight in task.state_dict().items()}
            self.pending = trainer.save_checkpoint(self.path, block=False)
        elif trainer.global_step == self.LET:
            self.trained = trainer.global_step - self.SAVED
            self.existed, self.was_done = self.path.exists(), self.pending.done()
            self.go.set()


def training_during_a_save() -> dict[str, Any]:
    """Train on while a checkpoint is written, whose files wait for that."""
    sim = start(1)
    sim.reset_clock(to_device=SPEED, to_host=SPEED, between=SPEED, kernels=SPEED)
    with tempfile.TemporaryDirectory() as folder:
        saves = SavesAside(Path(folder) / "one")
        begin = LocalStorage.begin

        def held(storage: LocalStorage, *given: Any) -> None:
            assert saves.go.wait(60), "training waits for the file"
            begin(storage, *given)

        with mock.patch.object(LocalStorage, "begin", held):
            fit(Costs(Meter(sim)), 1, callbacks=[saves])
        written = open_weights(saves.path)
        return {
            "trained": saves.trained,
            "existed": saves.existed,
            "done": (saves.was_done, saves.pending.done()),
            "exact": all(torch.equal(written[name], weight) for name, weight in saves.weights.items()),
            "hazards": sim.hazards,
        }
