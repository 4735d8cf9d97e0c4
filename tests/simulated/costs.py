"""Costs of a training step on simulated devices: in a bare loop, through the Trainer and through the Accelerator."""

from __future__ import annotations

import tempfile
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, Callback, Task, Trainer
from tests.simulated.collectives import network
from tests.simulated.devices import Simulated, start

WIDTH, CLASSES, ROWS = 64, 8, 16
FIRST, COUNTED, LAST = 12, 16, 36
"""Micro-batches before the counted ones, those that are counted, and all of them."""
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
    elif strategy == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        low = None if precision == "32" else torch.bfloat16
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low and torch.float32, cast_forward_inputs=False)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number, (x, y) in enumerate(batches(1)):
        steps = (number + 1) % accumulate == 0
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        context: AbstractContextManager[Any] = nullcontext()
        if strategy == "ddp" and not steps:
            context = model.no_sync()  # type: ignore[operator]
        elif strategy == "fsdp":
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


def with_trainer(
    strategy: str, precision: str, accumulate: int, world: int, meter: Meter, callbacks: list[Callback] | None = None
) -> None:
    """`Trainer.fit` with the default callbacks, and with a logger if callbacks are given, which may need one."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            strategy=strategy,
            precision=precision,
            accumulate_grad_batches=accumulate,
            max_epochs=1,
            callbacks=callbacks,
            logger="csv" if callbacks else False,
            default_root_dir=folder,
            enable_checkpointing=False,
        )
        trainer.fit(Costs(meter), batches(world))


def with_accelerator(strategy: str, precision: str, accumulate: int, world: int, meter: Meter) -> None:
    """The bare loop with an Accelerator."""
    mixed = {"32": "no", "bf16-mixed": "bf16"}[precision]
    accelerator = Accelerator(strategy=strategy, mixed_precision=mixed, gradient_accumulation_steps=accumulate)
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


def cost_with_callbacks(*kinds: type[Callback]) -> dict[str, Any]:
    """Count a step of the Trainer with callbacks, in one process and 32 bits."""
    meter = Meter(start(1))
    with_trainer("single", "32", 1, 1, meter, [kind() for kind in kinds])
    return meter.counts


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
