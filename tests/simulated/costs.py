"""Costs of a training step on simulated devices: in a bare loop, through the Trainer and through the Accelerator."""

from __future__ import annotations

import contextlib
import io
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from drivetrain import (
    FSDP,
    Accelerator,
    Callback,
    Colwise,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientNorm,
    LearningRateMonitor,
    LossSpikeGuard,
    MemoryMonitor,
    ModelCheckpoint,
    NaNGuard,
    Parallel,
    Rowwise,
    SpeedMonitor,
    StragglerMonitor,
    Strategy,
    Task,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    Trainer,
    WeightAveraging,
    WeightHistograms,
)
from drivetrain.checkpoint import open_weights
from drivetrain.checkpoint.storage import LocalStorage
from tests.simulated.collectives import network
from tests.simulated.devices import Simulated, start

WIDTH, CLASSES, ROWS, TOKENS, HEADS = 64, 8, 16, 8, 4
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
        self._counts_passes = True
        self.counts: dict[str, Any] = {}

    def __deepcopy__(self, memo: Any) -> Meter:
        # A pipeline traces a copy of the model, whose passes compute nothing.
        copied = Meter(self._sim)
        copied._counts_passes = False
        return copied

    def tick(self) -> None:
        """Count a forward pass."""
        if not self._counts_passes:
            return
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


class AttentionBlock(nn.Module):
    """Block over sequences of `TOKENS` tokens, with a causal attention in place of the hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention: Callable[[Tensor, Tensor, Tensor], Tensor] = causal

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v = (
            part.view(rows, tokens, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        return x + self.out(self.attention(q, k, v).transpose(1, 2).reshape(rows, tokens, WIDTH))


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Model(nn.Module):
    def __init__(self, meter: Meter, block: type[nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.meter = meter
        self.blocks = nn.ModuleList([block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.meter.tick()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TENSOR_PLAN = {"blocks.*.up": Colwise(), "blocks.*.down": Rowwise()}
SECOND_STAGE = 2
"""Number of the block with which the second stage of a pipeline begins."""
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "hsdp": lambda: FSDP(replicate_size=2),
    "tp": lambda: Parallel(tp=2, tp_plan=TENSOR_PLAN),
    "cp": lambda: Parallel(cp=2, wrap=[AttentionBlock]),
    "pp": lambda: Parallel(pp=2, pp_split=[f"blocks.{SECOND_STAGE}"]),
}
WORLDS = {"single": 1, "ddp": 2, "fsdp": 2, "hsdp": 4, "tp": 2, "cp": 2, "pp": 2}
"""Processes of each strategy."""
SHARED = ("tp", "cp", "pp")
"""Strategies whose processes all train on the same batches."""


def strategy_of(name: str) -> str | Strategy:
    """Return what the Trainer and the Accelerator take for a strategy of the table."""
    return STRATEGIES[name]() if name in STRATEGIES else name


def model_for(strategy: str, meter: Meter) -> Model:
    return Model(meter, AttentionBlock if strategy == "cp" else Block)


def batches(world: int, strategy: str = "single", rows: int = ROWS) -> DataLoader[tuple[Tensor, ...]]:
    """Return a loader of `LAST` batches for each process: of sequences for context parallelism, otherwise of rows."""
    generator = torch.Generator().manual_seed(1)
    shape = (ROWS * LAST * (1 if strategy in SHARED else world), *([TOKENS] if strategy == "cp" else []))
    x = torch.randn(*shape, WIDTH, generator=generator)
    y = torch.randint(0, CLASSES, shape, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=rows, pin_memory=True)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def bare(strategy: str, precision: str, accumulate: int, world: int, meter: Meter) -> None:
    """The loop that one writes by hand."""
    from drivetrain import PartialState

    device = PartialState().device
    if strategy == "pp":
        bare_pipeline(device, precision, accumulate, meter)
        return
    model: nn.Module = model_for(strategy, meter).to(device)
    options: dict[str, Any] = {}
    gathered: GatheredAttention | None = None
    if strategy == "ddp":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif strategy == "tp":
        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        model = parallelize_module(model, init_device_mesh(device.type, (2,)), plan)
        options["foreach"] = False  # torch refuses DTensors and plain tensors in one call
    elif strategy in ("fsdp", "hsdp", "cp"):
        low = None if precision == "32" else torch.bfloat16
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low and torch.float32, cast_forward_inputs=False)
        shape, names = {"hsdp": ((2, 2), ("replicate", "shard"))}.get(strategy, ((2,), ("shard",)))
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        if strategy == "cp":
            gathered = GatheredAttention(mesh.get_group())
        for block in model.blocks:  # type: ignore[union-attr]
            if gathered is not None:
                block.attention = gathered
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    for number, (x, y) in enumerate(batches(1, strategy)):
        steps = (number + 1) % accumulate == 0
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        if gathered is not None:
            x, y = gathered.own(x), gathered.own(y)
        context: AbstractContextManager[Any] = nullcontext()
        if strategy == "ddp" and not steps:
            context = model.no_sync()  # type: ignore[operator]
        elif strategy in ("fsdp", "hsdp", "cp"):
            model.set_requires_gradient_sync(steps)  # type: ignore[operator]
        with context:
            with torch.autocast(device.type, torch.bfloat16, enabled=precision != "32"):
                loss = loss_of(model(x), y)
            (loss / accumulate if accumulate > 1 else loss).backward()
        if steps:
            optimizer.step()
            optimizer.zero_grad()


class GatheredAttention:
    """Causal attention by hand over sequences that two processes share: keys and values are gathered.

    Each process has one of the four chunks of a sequence from the front and the mirrored one from the back.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._own = (group.rank(), 3 - group.rank())

    def own(self, tensor: Tensor) -> Tensor:
        chunks = tensor.chunk(4, 1)
        return torch.cat([chunks[number] for number in self._own], 1)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        gathered = funcol.all_gather_single_autograd(torch.stack((key, value)), 0, self._group)
        first, last = (part.chunk(2, -2) for part in gathered.wait().chunk(2))
        keys, values = torch.cat([first[0], last[0], last[1], first[1]], -2)
        size, outputs = query.size(-2) // 2, []
        for number, part in zip(self._own, query.chunk(2, -2), strict=True):
            seen = (number + 1) * size
            mask: dict[str, Any] = {"attn_mask": causal_lower_right(size, seen)} if number else {"is_causal": True}
            outputs.append(F.scaled_dot_product_attention(part, keys[..., :seen, :], values[..., :seen, :], **mask))
        return torch.cat(outputs, -2)


class Stage(nn.Module):
    """One of two stages of the model, with the precision of its forward."""

    def __init__(self, model: Model, stage: int, precision: str) -> None:
        super().__init__()
        self.meter, self.precision = model.meter, precision
        self.blocks = model.blocks[SECOND_STAGE:] if stage else model.blocks[:SECOND_STAGE]
        self.head = model.head if stage else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.meter.tick()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.precision != "32"):
            for block in self.blocks:
                x = block(x)
            return self.head(x)


def bare_pipeline(device: torch.device, precision: str, accumulate: int, meter: Meter) -> None:
    """The loop that one writes by hand with torch's pipeline schedules. Each batch has the rows of a whole step."""
    rank = dist.get_rank()
    module = Stage(Model(meter), rank, precision).to(device)

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision != "32"):
            loss = F.cross_entropy(logits, labels)
        return loss / accumulate if accumulate > 1 else loss

    kind = ScheduleGPipe if accumulate == 1 else Schedule1F1B
    schedule = kind(PipelineStage(module, rank, 2, device), accumulate, loss_fn=loss_fn, scale_grads=False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for x, y in batches(1, "pp", ROWS * accumulate):
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y)
        optimizer.step()
        optimizer.zero_grad()


class Costs(Task):
    def __init__(self, meter: Meter, strategy: str = "single") -> None:
        super().__init__()
        self.net = model_for(strategy, meter)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = loss_of(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def with_trainer(strategy: str, precision: str, accumulate: int, world: int, meter: Meter) -> None:
    """`Trainer.fit` with the default callbacks."""
    loader = batches(world, strategy)
    options = {"strategy": strategy_of(strategy), "precision": precision, "accumulate_grad_batches": accumulate}
    fit(Costs(meter, strategy), loader, **options)


def fit(task: Task, loader: DataLoader[tuple[Tensor, ...]], **options: Any) -> None:
    """Fit a task for one epoch."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            **{"max_epochs": 1, "logger": False, "default_root_dir": folder, "enable_checkpointing": False, **options}
        )
        trainer.fit(task, loader)


def with_accelerator(strategy: str, precision: str, accumulate: int, world: int, meter: Meter) -> None:
    """The bare loop with an Accelerator."""
    mixed = {"32": "no", "bf16-mixed": "bf16"}[precision]
    accelerator = Accelerator(
        strategy=strategy_of(strategy), mixed_precision=mixed, gradient_accumulation_steps=accumulate
    )
    model: Any = model_for(strategy, meter)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader: Any = batches(world, strategy)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        shared = accelerator.maybe_context_parallel([x, y], [1, 1], {x, y}) if strategy == "cp" else nullcontext()
        with accelerator.accumulate(model), shared:
            accelerator.backward(loss_of(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


DRIVERS = {"bare": bare, "trainer": with_trainer, "accelerator": with_accelerator}


def drivers_of(strategy: str) -> list[str]:
    """Return the drivers of a strategy. An Accelerator's loop cannot interleave a pipeline's stages."""
    return [driver for driver in DRIVERS if (driver, strategy) != ("accelerator", "pp")]


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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def log_point(strategy: str, world: int) -> dict[str, Any]:
    """Log once among the counted micro-batches, redraw the bar at the same one, and return what they cost."""
    meter = Meter(start(world))
    bar = TQDMProgressBar(refresh_rate=LOGGED, refresh_seconds=0)
    with contextlib.redirect_stdout(Terminal()) as terminal:
        options: dict[str, Any] = {"logger": "csv", "log_every_n_steps": LOGGED, "callbacks": [bar]}
        fit(Logs(meter), batches(world), strategy=strategy, **options)
    assert f"{LOGGED}/{LAST}" in terminal.getvalue() or torch.distributed.get_rank() > 0
    return meter.counts


class FromLastBatch(Callback):
    """Callback that counts where the host waits between the last batch of an epoch and its end.

    Args:
        sim: The devices.

    Attributes:
        waits: Reason and line of each wait.
    """

    def __init__(self, sim: Simulated) -> None:
        self._sim = sim
        self.waits: list[str] = []

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == LAST - 1:
            torch.accelerator.synchronize()
            self._sim.reset_clock(to_device=SPEED, to_host=SPEED, between=SPEED, kernels=SPEED)

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        self.waits = list(self._sim.synchronisations)


class EpochLogs(Costs):
    """A task that logs the means of four values over the epoch, and one with a function of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        values = {"loss": loss, "mean": logits.mean(), "largest": logits.amax()}
        self.log_dict(values, prog_bar=True, on_step=False, on_epoch=True)
        self.log("both", loss, prog_bar=True, on_step=True, on_epoch=True, sync_dist=True)
        self.log("median", loss, on_step=False, on_epoch=True, reduce_fx=torch.median)
        return loss


def waits_of_epoch_ends(strategy: str, world: int) -> tuple[list[str], dict[str, Any]]:
    """Return where the host waits at the end of an epoch, and the values that a callback then reads."""
    sim = start(world)
    last = FromLastBatch(sim)
    task = EpochLogs(Meter(sim))
    callbacks = [last, TQDMProgressBar(refresh_seconds=3600)]  # drawn when the epoch begins and ends
    with contextlib.redirect_stdout(Terminal()):
        fit(task, batches(world), strategy=strategy, logger="csv", log_every_n_steps=LAST + 1, callbacks=callbacks)
    return last.waits, {name: float(value) for name, value in task.trainer.callback_metrics.items()}


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


def costs_with_callbacks(names: Sequence[str] = tuple(CALLBACKS)) -> dict[str, dict[str, Any]]:
    """Count steps with each of the callbacks, in one process and 32 bits, beside those of a Trainer without them."""
    sim, found = start(1), {}
    for name in names:
        callbacks, meter = CALLBACKS[name], Meter(sim)
        with tempfile.TemporaryDirectory() as folder:
            options: dict[str, Any] = {"logger": "csv", "log_every_n_steps": LOGGED, "callbacks": callbacks(folder)}
            saves = any(isinstance(callback, ModelCheckpoint) for callback in options["callbacks"])
            fit(Costs(meter), batches(1), enable_checkpointing=saves, **options)
        found[name] = meter.counts
    return found


def copied_by_a_checkpoint(block: bool) -> tuple[int, int, list[str]]:
    """Bytes on the device that a checkpoint has to hold, bytes copied to the host while it is saved, and hazards.

    Args:
        block: Whether the call waits for the files, or they are written in the background.
    """
    sim = start(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(max_epochs=1, logger=False, default_root_dir=folder, enable_checkpointing=False)
        task = Costs(Meter(sim))
        trainer.fit(task, batches(1))
        optimizer = trainer.optimizers[0]
        states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        held = sum(each.nbytes for each in [*task.parameters(), *states] if each.device.type == "sim")
        sim.reset_clock(to_device=SPEED, to_host=SPEED, between=SPEED, kernels=SPEED)
        trainer.save_checkpoint(f"{folder}/one.ckpt", block=block).wait()
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
            fit(Costs(Meter(sim)), batches(1), callbacks=[saves])
        written = open_weights(saves.path)
        return {
            "trained": saves.trained,
            "existed": saves.existed,
            "done": (saves.was_done, saves.pending.done()),
            "exact": all(torch.equal(written[name], weight) for name, weight in saves.weights.items()),
            "hazards": sim.hazards,
        }
