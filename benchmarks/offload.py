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


def warm(folder: Path) -> None:
    """Bring a folder's files into the page cache."""
    read(folder)


def read(folder: Path) -> float:
    """Seconds that `cat` takes for the weights of a folder."""
    files = [str(path) for path in sorted(folder.rglob("*")) if path.suffix in (".safetensors", ".dat")]
    start = time.perf_counter()
    with open(os.devnull, "wb") as nowhere:
        subprocess.run(["cat", *files], stdout=nowhere, check=True)
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


Build = Callable[[], nn.Module]


class Setting:
    """A checkpoint of a transformer, and what runs it."""

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

    def ours(self) -> nn.Module:
        return load_checkpoint_and_dispatch(self.empty(), self.folder, "disk", main_device="cpu", stream=self.options)

    def theirs(self) -> nn.Module:
        from accelerate import disk_offload

        model = self.in_memory()
        disk_offload(model, self.copies, execution_device=torch.device("cpu"))
        return model


def measured(setting: Setting, build: Build, folder: Path, batch: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a forward, cold and warm, and the most anonymous memory in MiB."""
    found: dict[str, list[float]] = {"cold": [], "warm": [], "anonymous": []}
    for _ in range(rounds):
        model = build()
        drop(folder)
        found["cold"].append(forward(model, batch))
        warm(folder)
        forward(model, batch)
        found["warm"].append(statistics.median(forward(model, batch) for _ in range(3)))
        with most_anonymous(model) as most:
            forward(model, batch)
        found["anonymous"].append(most[0] / MIB)
        del model
        gc.collect()
    return found


def cold_read(folder: Path, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        drop(folder)
        times.append(read(folder))
    return statistics.median(times)


def loading(setting: Setting, rounds: int) -> dict[str, float]:
    """Seconds to fill a model in memory, and to map one, beside `cat`; cold and warm."""
    found: dict[str, list[float]] = {"cat, cold": [], "load, cold": [], "cat, warm": [], "load, warm": [], "map": []}
    for _ in range(rounds):
        for state in ("cold", "warm"):
            for what in ("cat", "load"):
                drop(setting.folder) if state == "cold" else warm(setting.folder)
                model = setting.empty()
                start = time.perf_counter()
                if what == "cat":
                    read(setting.folder)
                else:
                    load_checkpoint_in_model(model, setting.folder, {"": "cpu"})
                found[f"{what}, {state}"].append(time.perf_counter() - start)
                del model
                gc.collect()
        model = setting.empty()
        start = time.perf_counter()
        load_checkpoint_and_dispatch(model, setting.folder, "disk", main_device="cpu")
        found["map"].append(time.perf_counter() - start)
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
        contenders: dict[str, tuple[Build, Path]] = {"drivetrain": (setting.ours, setting.folder)}
        if not without_accelerate and importlib.util.find_spec("accelerate") is not None:
            contenders["accelerate"] = (setting.theirs, setting.copies)
        reading = cold_read(setting.folder, rounds)
        rows, figures = [], []
        for batch in batches:
            model = setting.in_memory()
            forward(model, batch)
            computing = statistics.median(forward(model, batch) for _ in range(rounds))
            del model
            gc.collect()
            ideal = max(reading, computing)
            for name, (build, where) in contenders.items():
                found = measured(setting, build, where, batch, rounds)
                cold, hot, most = (statistics.median(found[key]) for key in ("cold", "warm", "anonymous"))
                figures.append({"name": name, "batch": batch, "ideal": ideal, "compute": computing, **found})
                times = (computing, cold, ideal / cold, hot)
                rows.append([name, str(batch), *(f"{each:.2f}" for each in times), f"{most:.0f}"])
        loads = loading(setting, rounds)
    size = setting.nbytes / (1 << 30)
    print(f"{size:.2f} GiB in {layers} blocks of {setting.block / MIB:.0f} MiB, {rounds} rounds, medians in seconds.")
    print(f"A cold read of the files takes {reading:.2f} s. {', '.join(map(version_of, contenders))}.")
    head = ["", "batch", "in memory", "cold", "ideal / cold", "warm", "anonymous MiB"]
    print(as_table(head, rows))
    print(as_table(["", "s"], [[name, f"{value:.2f}"] for name, value in loads.items()]))
    if json_file is not None:
        json_file.write_text(json.dumps({"read": reading, "forwards": figures, "loading": loads}, indent=2))


if __name__ == "__main__":
    main()
