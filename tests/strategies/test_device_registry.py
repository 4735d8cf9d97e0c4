"""Training on a device that no vendor makes: nothing in the way asks for CUDA by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, DeviceNotAvailableError, PartialState, Task, Trainer, register_device, set_seed
from drivetrain.runtime.devices import unregister_device
from tests.pool import run_in_processes
from tests.runtime.pretend import Pretend, PretendModule


class Stream:
    """A queue of a pretend device: work on it is done at once."""

    def __init__(self, module: StreamingModule, name: str) -> None:
        self.module, self.name = module, name

    def wait_stream(self, other: Stream) -> None:
        self.module.calls.append(("wait_stream", self.name, other.name))


class StreamingModule(PretendModule):
    """Has streams too; notes what runs on which."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.main = self.running = Stream(self, "main")

    def Stream(self, device: torch.device | None = None) -> Stream:
        self.calls.append(("Stream", device))
        return Stream(self, "side")

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self.running

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.running = self.running, stream
        try:
            yield
        finally:
            self.running = before


class Recording(Pretend):
    """Notes each time something is placed on it, autocast for it, and a device asked of it."""

    autocast_name = "cpu"

    def __init__(self, streams: bool) -> None:
        super().__init__(2)
        self.placed: list[str] = []
        self.autocasts = 0
        if streams:
            self._module = StreamingModule(2)

    @property
    def autocast_type(self) -> str:
        self.autocasts += 1
        return self.autocast_name

    def device(self, index: int) -> Any:
        self.module.calls.append(("device", index))
        return torch.device("cpu")


class Batch:
    """A batch of the user's own type, which notes where it is sent and on which stream."""

    def __init__(self, kind: Recording, x: torch.Tensor, y: torch.Tensor) -> None:
        self.kind, self.x, self.y = kind, x, y

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        running = getattr(self.kind.module, "running", None)
        self.kind.placed.append(f"{device}, {running.name if running else 'no stream'}, non_blocking={non_blocking}")
        return self


def data(kind: Recording) -> DataLoader:
    def collate(samples: list[Any]) -> Batch:
        x, y = zip(*samples, strict=True)
        return Batch(kind, torch.stack(x), torch.stack(y))

    generator = torch.Generator().manual_seed(0)
    samples = TensorDataset(torch.randn(16, 4, generator=generator), torch.arange(16) % 2)
    return DataLoader(samples, batch_size=4, collate_fn=collate)


class PretendTask(Task):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        assert str(self.device) == "cpu"
        return F.cross_entropy(self.model(batch.x), batch.y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def train(driver: str, device: str, streams: bool, precision: str) -> dict[str, Any]:
    """Train with one of the drivers on a pretend device, or on the CPU to compare with."""
    kind = Recording(streams)
    register_device(kind)
    try:
        model = make_model()
        if driver == "accelerator":
            accelerator = Accelerator(device=device, mixed_precision=precision)
            set_seed(3)
            model, optimizer, loader = accelerator.prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.1), data(kind)
            )
            for batch in loader:
                optimizer.zero_grad()
                accelerator.backward(F.cross_entropy(model(batch.x), batch.y))
                optimizer.step()
            model = accelerator.unwrap_model(model)
            accelerator.free_memory()
        else:
            trainer = Trainer(
                accelerator=device,
                precision=precision,
                max_epochs=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                seed=3,
                devices=PartialState(device=device).num_processes,
            )
            trainer.fit(PretendTask(model), data(kind))
        state = PartialState()
        return {
            "kind": state.kind.name,
            "backend": state.backend,
            "type": state.distributed_type.value,
            "calls": [call[0] for call in kind.module.calls],
            "asked": [call for call in kind.module.calls if call[0] == "device"],
            "waits": [call[1:] for call in kind.module.calls if call[0] == "wait_stream"],
            "placed": kind.placed,
            "autocasts": kind.autocasts,
            "weights": model.weight.detach().tolist(),
        }
    finally:
        unregister_device(kind.name)


@pytest.mark.parametrize("driver", ["accelerator", "trainer"])
@pytest.mark.parametrize(("processes", "precision"), [(1, "32"), (2, "32"), (1, "bf16"), (2, "bf16")])
def test_training_on_a_pretend_device(driver, processes, precision):
    arguments = (False, precision)
    environment = {"DRIVETRAIN_USE_CPU": None}
    on_cpu = run_in_processes(train, processes, args=(driver, "cpu", *arguments))
    found = run_in_processes(train, processes, args=(driver, "pretend", *arguments), env=environment)
    for rank, (each, expected) in enumerate(zip(found, on_cpu, strict=True)):
        assert each["kind"] == "pretend"
        assert each["backend"] == ("gloo" if processes > 1 else None)
        assert each["type"] == ("MULTI_DEVICE" if processes > 1 else "NO")
        assert each["asked"][0] == ("device", rank)
        assert each["calls"].count("set_device") == 1
        assert "manual_seed_all" in each["calls"]
        assert len(each["placed"]) == 4 // processes
        assert {text.split(",")[0] for text in each["placed"]} == {"cpu"}
        assert (each["autocasts"] > 0) == (precision == "bf16")
        assert each["weights"] == expected["weights"]
        assert expected["placed"] == []  # the host is already where its batches are
        assert "set_device" not in expected["calls"]
        if driver == "accelerator":
            assert "empty_cache" in each["calls"]


@pytest.mark.parametrize("driver", ["accelerator", "trainer"])
def test_batches_are_placed_on_a_stream_of_their_own(driver):
    [found] = run_in_processes(train, 1, args=(driver, "pretend", True, "32"), env={"DRIVETRAIN_USE_CPU": None})
    assert found["placed"] == ["cpu, side, non_blocking=True"] * 4
    assert found["waits"] == [("main", "side")] * 4
    assert found["calls"].count("Stream") == 1


def test_more_processes_than_devices_are_refused():
    from tests.pool import ProcessesFailed

    with pytest.raises(ProcessesFailed, match=r"3 processes, but has only 2 pretend device\(s\)"):
        run_in_processes(train, 3, args=("accelerator", "pretend", False, "32"), env={"DRIVETRAIN_USE_CPU": None})


def test_a_device_that_is_not_there_is_refused():
    class Absent(Pretend):
        def is_available(self) -> bool:
            return False

    register_device(Absent())
    try:
        with pytest.raises(DeviceNotAvailableError, match=r"'pretend' was requested, but this machine has none.*cpu"):
            Accelerator(device="pretend")
    finally:
        unregister_device("pretend")
