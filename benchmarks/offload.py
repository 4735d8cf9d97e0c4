"""A model that runs from disk: time of a forward beside what the disk and the processor need, and beside accelerate.

    python benchmarks/offload.py
    python benchmarks/offload.py --gib 12 --rounds 2
    python benchmarks/offload.py --gib 12 --folder weights --batch 64 --only drivetrain

All contenders run in turn, in each round, on the same weights, with the page cache dropped and with it warm. The ideal
is the larger of a cold read of the files and the forward of the same model in memory: no way of running the model from
disk is quicker.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
import torch
from tables import as_table
from timing import version_of
from torch import nn
from transformer import Block, Size, Transformer

from drivetrain import (
    StreamOptions,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from drivetrain.checkpoint import save_safetensors

MIB, GIB = 1 << 20, 1 << 30
KINDS = ("made", "cold", "warm", "anonymous")
COLUMNS = (
    *("", "batch:", "made:", "cold:", "warm:", "ideal / cold:"),
    *("accelerate / cold:", "accelerate / warm:", "anonymous MiB:"),
)


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
    """A checkpoint of a transformer.

    Args:
        size: The transformer's.
        folder: Where its files are, or are written to.
        options: How drivetrain streams it.
    """

    def __init__(self, size: Size, folder: Path, options: StreamOptions) -> None:
        self.size, self.folder, self.options = size, folder / "checkpoint", options
        self.copies = folder / "accelerate"
        model = self.empty()
        self.nbytes = sum(each.numel() * each.element_size() for each in model.parameters())
        self.block = sum(each.numel() * each.element_size() for each in model.blocks[0].parameters())
        written = sum(path.stat().st_size for path in files_of(self.folder))
        if not self.nbytes <= written < self.nbytes + self.block:  # the rest of a file is its header
            shutil.rmtree(self.copies, ignore_errors=True)
            torch.manual_seed(0)
            save_safetensors(Transformer(size).state_dict(), self.folder, "1GB")

    def empty(self) -> nn.Module:
        """The model without memory."""
        with init_empty_weights():
            return Transformer(self.size)

    def in_memory(self) -> nn.Module:
        """The model, read into memory."""
        model = self.empty()
        self.fill(model)
        return model

    def fill(self, model: nn.Module) -> None:
        """Read the weights of a model into memory: into its own where it has some."""
        load_checkpoint_in_model(model, self.folder, {"": "cpu"})

    def compute(self, batch: int) -> float:
        """Seconds of a forward in memory. The model goes again: two of them may be more than memory holds."""
        model = self.in_memory()
        forward(model, 1)
        return forward(model, batch)

    def ours(self) -> nn.Module:
        """The model on disk, by drivetrain."""
        return load_checkpoint_and_dispatch(self.empty(), self.folder, "disk", main_device="cpu", stream=self.options)

    def theirs(self) -> nn.Module:
        """The model on disk, by accelerate, which writes a copy of its weights where there is none yet."""
        from accelerate import disk_offload

        device = torch.device("cpu")
        if not (self.copies / "index.json").is_file():
            disk_offload(self.in_memory(), self.copies, execution_device=device)
            gc.collect()  # what it was written from: memory may not hold that and another model
        model = self.empty()
        disk_offload(model, self.copies, execution_device=device)
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
        self.figures: dict[str, list[float]] = {"made": [], "cold": [], "warm": [], "anonymous": []}

    def measure(self, batch: int) -> None:
        """Seconds to make the model, of a cold and of a warm forward, and the most anonymous memory of both in MiB."""
        start = time.perf_counter()
        model = self._model or self._build()
        self.figures["made"].append(time.perf_counter() - start)
        drop(self._folder)
        with most_anonymous(model) as most:
            self.figures["cold"].append(forward(model, batch))
            read(self._folder)
            self.figures["warm"].append(forward(model, batch))
        self.figures["anonymous"].append(most[0] / MIB)
        self._model = None if self._again else model
        del model
        gc.collect()

    def median(self, what: str) -> float:
        """The middle of what was measured."""
        return statistics.median(self.figures[what])


def times_of_loading(setting: Setting, rounds: int) -> dict[str, float]:
    """Seconds to fill a model in memory, and to map one, beside `cat`; cold and warm.

    The model's memory was used before, but for the first time: getting it from the system is not a matter of loading.
    """
    found: dict[str, list[float]] = {}

    def note(name: str, action: Callable[[], object]) -> None:
        start = time.perf_counter()
        kept = action()
        found.setdefault(name, []).append(time.perf_counter() - start)
        del kept
        gc.collect()

    drop(setting.folder)
    start = time.perf_counter()
    model = setting.in_memory()
    found["load, cold, into new memory"] = [time.perf_counter() - start]
    for _ in range(rounds):
        for state in ("cold", "warm"):
            for name, action in {"cat": lambda: cat(setting.folder), "load": lambda: setting.fill(model)}.items():
                drop(setting.folder) if state == "cold" else read(setting.folder)
                note(f"{name}, {state}", action)
        note("map", setting.ours)
    return {name: statistics.median(times) for name, times in found.items()}


def shares_of_cat(name: str, loads: Mapping[str, float]) -> str:
    """What `cat` takes of the time of loading, where both were measured."""
    kind, _, state = name.partition(", ")
    return f"{loads[f'cat, {state[:4]}'] / loads[name]:.2f}" if kind == "load" else ""


def has_accelerate() -> bool:
    return importlib.util.find_spec("accelerate") is not None


def bytes_of_block(width: int) -> int:
    with init_empty_weights():
        block = Block(width, 8)
    return sum(each.numel() * each.element_size() for each in block.parameters())


def results(setting: Setting, batches: Sequence[int], rounds: int, only: Collection[str]) -> list[dict[str, Any]]:
    """Times of forwards, for each batch: the ideal, and each contender."""
    found = []
    for batch in batches:
        contenders = {
            "drivetrain": Contender(setting.ours, setting.folder, again=True),
            "accelerate": Contender(setting.theirs, setting.copies, again=False),
        }
        contenders = {name: each for name, each in contenders.items() if name in only}
        times: dict[str, list[float]] = {"cat": [], "read": [], "compute": []}
        for number in range(rounds):
            for name, reading in {"cat": cat, "read": read}.items():
                drop(setting.folder)
                times[name].append(reading(setting.folder))
            times["compute"].append(setting.compute(batch))
            for contender in contenders.values():
                contender.measure(batch)
            print(f"\rbatch {batch}, round {number + 1} of {rounds} ", end="", file=sys.stderr, flush=True)
        compute = statistics.median(times["compute"])
        cold_read = min(statistics.median(times["cat"]), statistics.median(times["read"]))
        ideal = {"cold": [max(cold_read, compute)], "warm": [compute], "made": [0.0], "anonymous": [0.0]}
        found.append({"name": "ideal", "batch": batch, **ideal, **times})
        found += [{"name": name, "batch": batch, **each.figures} for name, each in contenders.items()]
    print(file=sys.stderr)
    return found


def rows_of(found: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Each as a row of the table, beside the ideal and accelerate of its batch."""
    medians = {(each["name"], each["batch"]): {what: statistics.median(each[what]) for what in KINDS} for each in found}
    for (name, batch), own in medians.items():
        ideal, theirs = medians["ideal", batch], medians.get(("accelerate", batch))
        share = f"{ideal['cold'] / own['cold']:.2f}"
        times = [f"{own[what]:.2f}" for what in KINDS[:3]]
        quicker = [f"{theirs[what] / own[what]:.1f}" if theirs else "" for what in ("cold", "warm")]
        yield [name, str(batch), *times, share, *quicker, f"{own['anonymous']:.0f}"]


@click.command()
@click.option("--gib", type=float, help="Size of the model, in place of --layers.")
@click.option("--layers", default=24, show_default=True, help="Blocks of 61 MiB: 24 are 1.5 GiB.")
@click.option("--width", default=1152, show_default=True)
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 64), show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--prefetch", default=1, show_default=True, help="Blocks that are read ahead.")
@click.option("--budget", default=None, type=int, help="MiB of the first blocks that stay in memory.")
@click.option("--only", multiple=True, type=click.Choice(["drivetrain", "accelerate"]), help="Only these contenders.")
@click.option("--measure", multiple=True, type=click.Choice(["forwards", "loading"]), help="Only one of them.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="Where weights are written, on the disk to measure, and found by a later run of the same size.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there too.")
def main(
    gib: float | None,
    layers: int,
    width: int,
    batches: tuple[int, ...],
    rounds: int,
    prefetch: int,
    budget: int | None,
    only: tuple[str, ...],
    measure: tuple[str, ...],
    folder: Path | None,
    json_file: Path | None,
) -> None:
    names = [name for name in only or ("drivetrain", "accelerate") if name == "drivetrain" or has_accelerate()]
    size = Size(width=width, heads=8, layers=layers if gib is None else round(gib * GIB / bytes_of_block(width)))
    with nullcontext(folder) if folder is not None else tempfile.TemporaryDirectory() as place:
        options = StreamOptions(prefetch=prefetch, budget=None if budget is None else budget * MIB)
        setting = Setting(size, Path(place), options)
        found = results(setting, batches, rounds, names) if measure != ("loading",) else []
        loads = times_of_loading(setting, rounds) if measure != ("forwards",) else {}
    versions = ", ".join(f"{name} {version_of(name)}" for name in names)
    print(f"{setting.nbytes / GIB:.2f} GiB in {size.layers} blocks of {setting.block / MIB:.0f} MiB. {versions}.")
    print(f"Medians in seconds; rounds: {rounds}. Two blocks and 100 MiB: {2 * setting.block / MIB + 100:.0f} MiB.\n")
    if found:
        print(as_table(COLUMNS, rows_of(found)))
    if loads:
        rows = [[name, f"{time:.2f}", shares_of_cat(name, loads)] for name, time in loads.items()]
        print("\n" + as_table(("", "s:", "cat / load:"), rows))
    if json_file is not None:
        json_file.write_text(json.dumps({"forwards": found, "loading": loads}, indent=2))


if __name__ == "__main__":
    main()
