"""What only a GPU can show. Run by `make test-gpu`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, GradScalerKwargs, PartialState, Task, Trainer
from drivetrain.data.placement import SideStreamPlacement
from tests.pool import run_in_processes

pytestmark = pytest.mark.gpu
ON_GPU = {"DRIVETRAIN_USE_CPU": None}
NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is missing")


def data(rows: int = 64, features: int = 16) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    samples = TensorDataset(torch.randn(rows, features, generator=generator), torch.arange(rows) % 3)
    return DataLoader(samples, batch_size=8, pin_memory=True)


def make_model(features: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, 3))


def train(precision: str) -> dict[str, Any]:
    """A process group of one, so that DDP's and the collectives' way over the device's backend is taken."""
    accelerator = Accelerator(mixed_precision=precision)
    model = make_model()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data())
    losses = []
    for x, y in loader:
        assert x.device == accelerator.device
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return {
        "device": str(accelerator.device),
        "losses": [loss.item() for loss in losses],
        "scale": None if accelerator.scaler is None else str(accelerator.scaler._device),
    }


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16", "bf16-true"])
def test_training_on_cuda_is_training_on_the_cpu(precision):
    [found] = run_in_processes(train, 1, args=(precision,), env=ON_GPU, timeout=120)
    [expected] = run_in_processes(train, 1, args=("no",))
    assert found["device"] == "cuda:0"
    assert found["losses"] == pytest.approx(expected["losses"], abs={"no": 1e-4, "bf16-true": 0.1}.get(precision, 2e-2))
    assert found["scale"] == ("cuda" if precision == "fp16" else None)


def overflow() -> list[Any]:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=64.0)])
    history: list[Any] = []
    for fused in (False, True):
        model = nn.Linear(1, 1, bias=False)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused))
        for factor in (1.0, float("inf"), 1.0):
            before = model.weight.item()
            optimizer.zero_grad()
            accelerator.backward(model(torch.ones(1, 1, device=accelerator.device)).sum() * factor)
            optimizer.step()
            history.append((model.weight.item() != before, optimizer.step_was_skipped))
    return history


def test_an_overflow_skips_the_step_on_cuda():
    assert run_in_processes(overflow, 1, env=ON_GPU) == [[(True, False), (False, True), (True, False)] * 2]


def placement() -> dict[str, Any]:
    """Copies of large batches beside long kernels, timed by the device."""
    accelerator = Accelerator()
    batches = [torch.randn(4096, 4096).pin_memory() for _ in range(6)]
    loader = accelerator.prepare_data_loader(batches)
    weight = torch.randn(4096, 4096, device=accelerator.device)
    place = loader._place
    assert isinstance(place, SideStreamPlacement)
    sums = []
    for batch in loader:
        for _ in range(20):
            batch = batch @ weight
            batch = batch / batch.norm()
        sums.append(batch.sum())
    side = place._stream
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for batch in loader:
            for _ in range(20):
                batch = batch @ weight
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = [event.time_range for event in events if "Memcpy HtoD" in event.name]
    kernels = [event.time_range for event in events if "Mem" not in event.name]
    overlapping = sum(any(k.start < c.end and c.start < k.end for k in kernels) for c in copies)
    exact = [bool(torch.isfinite(each)) for each in sums]
    return {"side": side != torch.cuda.current_stream(), "overlapping": overlapping, "exact": all(exact)}


def test_copies_overlap_with_compute():
    [found] = run_in_processes(placement, 1, env=ON_GPU, timeout=120)
    assert found["side"]
    assert found["exact"]
    assert found["overlapping"] >= 4  # of 6: the first has nothing to overlap with


def group_of_one() -> dict[str, Any]:
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    model = nn.parallel.DistributedDataParallel(make_model().cuda())
    model(torch.ones(1, 16, device="cuda")).sum().backward()
    value = torch.ones(1, device="cuda")
    dist.all_reduce(value)
    objects = [None]
    dist.all_gather_object(objects, {"rank": 0})
    state = PartialState()
    result = {
        "value": value.item(),
        "objects": objects,
        "device": str(state.device),
    }
    del model
    state.destroy_process_group()
    return result


def test_a_group_of_one_over_nccl():
    [found] = run_in_processes(group_of_one, 1, env=ON_GPU, timeout=120)
    assert found["value"] == 1
    assert found["objects"] == [{"rank": 0}]
    assert found["device"] == "cuda:0"


class CudaTask(Task):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        assert x.is_cuda
        assert self.device.type == "cuda"
        return F.cross_entropy(self.model(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def with_trainer(precision: str) -> float:
    task = CudaTask()
    trainer = Trainer(
        accelerator="gpu", devices=1, precision=precision, max_epochs=2, logger=False, enable_checkpointing=False
    )
    trainer.fit(task, data())
    return float(next(task.parameters()).abs().sum())


@pytest.mark.parametrize("precision", ["32", "bf16-mixed", "16-mixed"])
def test_the_trainer_on_cuda(precision):
    [found] = run_in_processes(with_trainer, 1, args=(precision,), env=ON_GPU, timeout=120)
    assert found > 0


def mixed_beside_full(strategy: str) -> tuple[float, float]:
    """How far weights under bf16 are from those of strategy 'single' under bf16, and from those in 32 bits."""

    def trained(strategy: str, precision: str) -> torch.Tensor:
        task = CudaTask()
        trainer = Trainer(
            accelerator="gpu",
            devices=1,
            strategy=strategy,
            precision=precision,
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
        )
        trainer.fit(task, data())
        state = trainer.strategy.state.model(trainer.model, full=True)
        return torch.cat([state[name].flatten().float().cpu() for name in sorted(state)])

    found = trained(strategy, "bf16-mixed")
    gaps = [(found - trained("single", precision)).abs().max().item() for precision in ("bf16-mixed", "32")]
    return gaps[0], gaps[1]


@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp", *(pytest.param(f"deepspeed_stage_{n}", marks=NEEDS_DEEPSPEED) for n in (1, 2, 3))]
)
def test_every_strategy_computes_in_the_precision_that_was_asked_for(strategy):
    [(from_mixed, from_full)] = run_in_processes(mixed_beside_full, 1, args=(strategy,), env=ON_GPU, timeout=120)
    assert from_mixed < 1e-5
    assert from_full > 1e-4
