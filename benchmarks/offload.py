"""A model that runs from disk: time of a forward beside what the disk and the processor need, and beside accelerate.

    python benchmarks/offload.py
    python benchmarks/offload.py --layers 192 --rounds 3

All contenders run in turn, in each round, on the same weights, with the page cache dropped and with it warm. The ideal
is the larger of a cold read of the file and the forward of the same model in memory.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import torch
from tables import as_table
from timing import version_of
from torch import nn
from transformer import Size, Transformer

from drivetrain import (
    StreamOptions,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from drivetrain.checkpoint import save_safetensors

MIB = 1 << 20


def drop(folder: Path) -> None:
    """Take a folder's files out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def files_of(folder: Path) -> list[Path]:
    """A folder's files of weights."""
    return [path for path in sorted(folder.rglob("*")) if path.suffix in (".safetensors", ".dat")]


def cat(folder: Path) -> float:
    """Seconds that `cat` takes for the weights of a folder."""
    start = time.perf_counter()
    with open(os.devnull, "wb") as nowhere:
        subprocess.run(["cat", *map(str, files_of(folder))], stdout=nowhere, check=True)
    return time.perf_counter() - start


def read(folder: Path) -> float:
    """Seconds that reading them takes, 16 MiB at once."""
    start = time.perf_counter()
    block = memoryview(bytearray(16 * MIB))
    for path in files_of(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return time.perf_counter() - start


def anonymous() -> int:
    """Bytes of memory that are this process's own."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) * 1024


@contextmanager
def most_anonymous(model: nn.Module) -> Iterator[list[int]]:
    """The most anonymous memory that a forward takes, looked at after each block."""
    seen = [0]
    before = anonymous()

    def look(*_: object) -> None:
        seen[0] = max(seen[0], anonymous() - before)

    handles = [block.register_forward_hook(look) for block in model.blocks]
    yield seen
    for handle in handles:
        handle.remove()


def forward(model: nn.Module, batch: int) -> float:
    tokens = torch.arange(batch)[:, None]
    start = time.perf_counter()
    with torch.no_grad():
        model(tokens)
    return time.perf_counter() - start


class Setting:
    """A checkpoint of a transformer."""

    def __init__(self, size: Size, folder: Path, options: StreamOptions) -> None:
        self.size, self.folder, self.options = size, folder / "checkpoint", options
        self.copies = folder / "accelerate"
        torch.manual_seed(0)
        model = Transformer(size)
        self.nbytes = sum(each.numel() * each.element_size() for each in model.parameters())
        self.block = sum(each.numel() * each.element_size() for each in model.blocks[0].parameters())
        save_safetensors(model.state_dict(), self.folder, "1GB")

    def empty(self) -> nn.Module:
        with init_empty_weights():
            return Transformer(self.size)

    def in_memory(self) -> nn.Module:
        model = self.empty()
        load_checkpoint_in_model(model, self.folder, {"": "cpu"})
        return model

    def compute(self, batch: int) -> float:
        """Seconds of a forward in memory. The model goes again: two of them may be more than memory holds."""
        model = self.in_memory()
        forward(model, batch)
        return forward(model, batch)

    def ours(self) -> nn.Module:
        return load_checkpoint_and_dispatch(self.empty(), self.folder, "disk", main_device="cpu", stream=self.options)

    def theirs(self) -> nn.Module:
        from accelerate import disk_offload

        model = self.in_memory()
        disk_offload(model, self.copies, execution_device=torch.device("cpu"))
        return model


class Contender:
    """One way to run the model, and what was measured of it.

    Args:
        build: Makes the model.
        folder: What it reads.
        again: Whether it is made again for each cold forward: pages that are mapped cannot be dropped.
    """

    def __init__(self, build: Callable[[], nn.Module], folder: Path, again: bool) -> None:
        self._build, self._folder, self._again = build, folder, again
        self._model: nn.Module | None = None
        self.figures: dict[str, list[float]] = {"cold": [], "warm": [], "anonymous": []}

    def measure(self, batch: int) -> None:
        """Seconds of a cold and of a warm forward, and the most anonymous memory of one in MiB."""
        model = self._model or self._build()
        drop(self._folder)
        self.figures["cold"].append(forward(model, batch))
        read(self._folder)
        forward(model, batch)
        self.figures["warm"].append(forward(model, batch))
        with most_anonymous(model) as most:
            forward(model, batch)
        self.figures["anonymous"].append(most[0] / MIB)
        self._model = None if self._again else model
        del model
        gc.collect()

    def median(self, what: str) -> float:
        """The middle of what was measured."""
        return statistics.median(self.figures[what])


def loading(setting: Setting, rounds: int) -> dict[str, float]:
    """Seconds to fill a model in memory, and to map one, beside `cat`; cold and warm."""
    found: dict[str, list[float]] = {}

    def note(name: str, action: Callable[[], object]) -> None:
        start = time.perf_counter()
        kept = action()
        found.setdefault(name, []).append(time.perf_counter() - start)
        del kept
        gc.collect()

    for _ in range(rounds):
        for state in ("cold", "warm"):
            for name, action in {"cat": lambda: cat(setting.folder), "load": setting.in_memory}.items():
                drop(setting.folder) if state == "cold" else read(setting.folder)
                note(f"{name}, {state}", action)
        note("map", setting.ours)
    return {name: statistics.median(times) for name, times in found.items()}


@click.command()
@click.option("--layers", default=24, show_default=True, help="Blocks of 61 MiB: 24 are 1.5 GiB, 192 are 12 GiB.")
@click.option("--width", default=1152, show_default=True)
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 64), show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--prefetch", default=1, show_default=True, help="Blocks that are read ahead.")
@click.option("--budget", default=None, type=int, help="MiB of the first blocks that stay in memory.")
@click.option("--without-accelerate", is_flag=True)
@click.option(
    "--folder", type=click.Path(path_type=Path), help="Where the weights are written, on the disk to measure."
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there too.")
def main(
    layers: int,
    width: int,
    batches: tuple[int, ...],
    rounds: int,
    prefetch: int,
    budget: int | None,
    without_accelerate: bool,
    folder: Path | None,
    json_file: Path | None,
) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        options = StreamOptions(prefetch=prefetch, budget=None if budget is None else budget * MIB)
        setting = Setting(Size(width=width, heads=8, layers=layers), Path(place), options)
        others = not without_accelerate and importlib.util.find_spec("accelerate") is not None
        reads: list[float] = []
        rows, figures = [], []
        for batch in batches:
            contenders = {"drivetrain": Contender(setting.ours, setting.folder, again=True)}
            if others:
                contenders["accelerate"] = Contender(setting.theirs, setting.copies, again=False)
            computes: list[float] = []
            for _ in range(rounds):
                for reading in (cat, read):
                    drop(setting.folder)
                    reads.append(reading(setting.folder))
                computes.append(setting.compute(batch))
                for contender in contenders.values():
                    contender.measure(batch)
            quickest = min(statistics.median(reads[0::2]), statistics.median(reads[1::2]))
            compute = statistics.median(computes)
            ideal = max(quickest, compute)
            for name, each in contenders.items():
                cold = each.median("cold")
                times = (compute, cold, ideal / cold, each.median("warm"))
                most = f"{each.median('anonymous'):.0f}"
                rows.append([name, str(batch), *(f"{time:.2f}" for time in times), most])
                figures.append({"name": name, "batch": batch, "ideal": ideal, "compute": compute, **each.figures})
        loads = loading(setting, rounds)
    versions = ", ".join(f"{name} {version_of(name)}" for name in ("drivetrain", *(["accelerate"] if others else [])))
    print(f"{setting.nbytes / 2**30:.2f} GiB in {layers} blocks of {setting.block / MIB:.0f} MiB. {versions}.")
    print(f"{rounds} rounds, medians in seconds. A cold read of the files takes {quickest:.2f} s.\n")
    columns = ("", "batch:", "in memory:", "cold:", "ideal / cold:", "warm:", "anonymous MiB:")
    print(as_table(columns, rows))
    print()
    print(as_table(("", "s:"), [[name, f"{value:.2f}"] for name, value in loads.items()]))
    if json_file is not None:
        json_file.write_text(json.dumps({"reads": reads, "forwards": figures, "loading": loads}, indent=2))


if __name__ == "__main__":
    main()
