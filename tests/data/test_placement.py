"""Batches are copied on a stream of their own, and used only once the copy is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import DeviceKind
from drivetrain.data import DataShard, prepare_loader
from drivetrain.runtime.devices import get_device_kind
from tests.data.kinds import Numbers


class RecordedStream:
    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def wait_stream(self, other: RecordedStream) -> None:
        self.calls.append(f"{self.name} waits for {other.name}")


class RecordedKind(DeviceKind):
    """A device with streams, which notes what is asked of it."""

    supports_streams = True

    def __init__(self) -> None:
        super().__init__("recorded", backend="gloo")
        self.calls: list[str] = []
        self.compute = RecordedStream("compute", self.calls)

    def make_stream(self, device: torch.device | None = None) -> Any:
        self.calls.append("make side")
        return RecordedStream("side", self.calls)

    def current_stream(self, device: torch.device | None = None) -> Any:
        return self.compute

    @contextmanager
    def stream_context(self, stream: Any) -> Iterator[None]:  # type: ignore[override]
        self.calls.append(f"enter {stream.name}")
        yield
        self.calls.append(f"leave {stream.name}")


def test_each_batch_is_placed_on_the_side_stream_and_waited_for() -> None:
    kind = RecordedKind()

    def place(batch: Any) -> Any:
        kind.calls.append("copy")
        return batch

    loader = prepare_loader(
        DataLoader(Numbers(6), batch_size=4), shard=DataShard(), place=place, device=(kind, torch.device("meta"))
    )
    for _ in loader:
        kind.calls.append("step")
    one = ["enter side", "copy", "leave side", "compute waits for side", "step"]
    assert kind.calls == ["make side", *one, *one]


def test_a_device_without_streams_places_directly() -> None:
    loader = prepare_loader(
        DataLoader(Numbers(4), batch_size=4),
        shard=DataShard(),
        place=lambda batch: batch + 1,
        device=(get_device_kind("cpu"), torch.device("cpu")),
    )
    assert [batch.tolist() for batch in loader] == [[1, 2, 3, 4]]


@pytest.mark.gpu
def test_copies_overlap_with_compute_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    samples = torch.arange(64 * 2**20, dtype=torch.float32).view(64, -1)
    loader = prepare_loader(
        DataLoader(torch.utils.data.TensorDataset(samples), batch_size=8, pin_memory=True),
        shard=DataShard(),
        place=lambda batch: [tensor.to(device, non_blocking=True) for tensor in batch],
        device=(get_device_kind("cuda"), device),
    )
    for number, (batch,) in enumerate(loader):
        torch.cuda._sleep(10**7)
        assert torch.equal(batch.cpu(), samples[number * 8 : number * 8 + 8])


@pytest.mark.gpu
def test_a_batch_that_was_read_is_sent_before_a_gpu_is_waited_for() -> None:
    device = torch.device("cuda", 0)
    batches = [torch.full((2**24,), float(number)).pin_memory() for number in range(6)]
    loader = prepare_loader(
        batches,
        shard=DataShard(),
        place=lambda batch: batch.to(device, non_blocking=True),
        device=(get_device_kind("cuda"), device),
        sends_ahead=True,
    )
    for _ in range(2):  # the second time with memory that is allocated
        window = list(loader.iterate_pending())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for number, pending in enumerate(window):
                batch = pending.take()
                torch.cuda._sleep(10**8)
                assert float((batch - number).abs().max()) == 0.0  # waits for the device
                pending.release()
            torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    ranges = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    copies = [start for start, _, name in ranges if "Memcpy HtoD" in name]
    spins = [end for _, end, name in ranges if "spin" in name]
    assert len(copies) == len(spins) == 6
    # Not that they overlap: beside other programs the copy may end before the kernel has its turn.
    assert all(copied < computed for copied, computed in zip(copies[1:], spins, strict=False))
