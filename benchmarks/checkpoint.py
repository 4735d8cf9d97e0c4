"""What saving and loading a training state costs: time blocked, time until durable, bytes, memory, load time.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --params 30e6 --rounds 5 --json checkpoint.json

A model of 300 million parameters with AdamW: 3.6 GB of state in float32. Every contender saves the same kind of state
in a process of its own, in which `torch.save` and fsync of the same state run right before it in each round. See
benchmarks/README.md.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import click
import torch
from tables import as_table
from timing import version_of
from torch import Tensor, nn

WIDTH = 1024
TOKENS = 64


class Layers(nn.Module):
    """About so many parameters in matrices such as a transformer has."""

    def __init__(self, params: int) -> None:
        super().__init__()
        count = max(1, round(params / (8 * WIDTH * WIDTH)))
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)]) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for up, down in self.layers:
            x = x + down(torch.relu(up(x)))
        return x


@dataclass
class Training:
    """What is saved, and trained between saves.

    Attributes:
        model: the model.
        optimizer: its AdamW.
        is_saving: whether a save goes on.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    is_saving: Callable[[], bool] = lambda: False

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def backward(self) -> None:
        """A forward and a backward, over gradients that keep their memory."""
        self.optimizer.zero_grad(set_to_none=False)
        self.model(torch.randn(TOKENS, WIDTH)).square().mean().backward()

    def step(self) -> None:
        self.optimizer.step()

    def whole_step(self) -> None:
        self.backward()
        self.step()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


# measuring


def anonymous_memory() -> int:
    """Bytes of this process's own memory, without mapped files."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


@contextlib.contextmanager
def peak_memory() -> Iterator[dict[str, int]]:
    """Note how much memory was added at most in the body."""
    result, over, before = {"peak": 0}, threading.Event(), anonymous_memory()

    def watch() -> None:
        while not over.wait(0.005):
            result["peak"] = max(result["peak"], anonymous_memory() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield result
    finally:
        over.set()
        watcher.join()
        result["peak"] = max(result["peak"], anonymous_memory() - before)


def files_of(path: Path) -> list[Path]:
    return [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path]


def make_durable(path: Path) -> None:
    """Flush files and the directories that they are in, as a saver that promises durability has to."""
    for one in [*files_of(path), path.parent, *([path] if path.is_dir() else [])]:
        descriptor = os.open(one, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def forget(path: Path) -> None:
    """Drop files from the page cache, so that loading reads the disk."""
    for one in files_of(path):
        descriptor = os.open(one, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_bytes(path: Path, keep: bool) -> None:
    """Read files into new memory.

    Args:
        path: a file, or a directory of them.
        keep: whether to keep all of it, which is the least that loading can do; else each file's memory is free before
            the next one, and may be used again, which is faster.
    """
    kept = []
    for one in files_of(path):
        target = memoryview(torch.empty(one.stat().st_size, dtype=torch.uint8).numpy())
        if keep:
            kept.append(target)
        with open(one, "rb", buffering=0) as file:
            done = 0
            while done < len(target):
                done += file.readinto(target[done : done + (8 << 20)])


def timed(work: Callable[[], Any]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


# contenders: each gives what it trains, and {variant: (start, wait until written, load)}

Variant = tuple[Callable[[Path], Any], Callable[[Any], None], Callable[[Path], Any] | None]


def written_already(started: Any) -> None:
    """Where saving returns only once the files are written."""


def with_drivetrain(params: int) -> tuple[Training, dict[str, Variant]]:
    from drivetrain import Accelerator
    from drivetrain.checkpoint import load_run_state

    accelerator = Accelerator(cpu=True)
    model = Layers(params)
    optimizer = adamw(model)
    model, _ = accelerator.prepare(model, optimizer)
    queue = accelerator.save_queue
    variants: dict[str, Variant] = {
        "drivetrain, save_state": (
            lambda path: accelerator.save_state(path),
            lambda started: None,
            lambda path: load_run_state(path, accelerator.state),
        ),
        "drivetrain, save_state(block=False)": (
            lambda path: accelerator.save_state(path, block=False),
            lambda started: queue.finish(),
            lambda path: load_run_state(path, accelerator.state),
        ),
    }
    return Training(model, optimizer, lambda: queue.pending is not None), variants


def with_accelerate(params: int) -> tuple[Training, dict[str, Variant]]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Layers(params)
    optimizer = adamw(model)
    model, _ = accelerator.prepare(model, optimizer)
    variants: dict[str, Variant] = {
        "Accelerate, save_state": (
            lambda path: accelerator.save_state(str(path)),
            written_already,
            lambda path: accelerator.load_state(str(path)),
        )
    }
    return Training(model, optimizer), variants


def with_lightning(params: int) -> tuple[Training, dict[str, Variant]]:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Layers(params)
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, index: int) -> None:
            pass

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=-1,
        max_epochs=1,
        limit_train_batches=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(1)))
    [optimizer] = trainer.optimizers
    variants: dict[str, Variant] = {
        "Lightning, save_checkpoint": (
            lambda path: trainer.save_checkpoint(path),
            written_already,
            lambda path: trainer.strategy.load_checkpoint(path, weights_only=False),
        )
    }
    return Training(module.model, optimizer), variants


CONTENDERS = {"drivetrain": with_drivetrain, "accelerate": with_accelerate, "lightning": with_lightning}
VARIANTS = {"blocking": "save_state", "background": "(block=False)"}


# one contender in a process of its own


def measure(name: str, params: int, rounds: int, folder: Path, kind: str | None) -> list[dict[str, Any]]:
    training, variants = CONTENDERS[name](params)
    if kind is not None and len(variants) > 1:
        variants = {variant: one for variant, one in variants.items() if variant.endswith(VARIANTS[kind])}
    training.whole_step()
    base = with_torch_save(training)
    results: dict[str, dict[str, list[float]]] = {variant: {} for variant in variants}
    for number in range(-1, rounds):
        for variant, contender in variants.items():
            for prefix, one in (("base_", base), ("", contender)):
                measured = measure_saving(one, folder / f"saved.{name}")
                measured |= measure_training(one, folder / f"saved.{name}", training)
                for key, value in measured.items():
                    if number < 0 and key == "called":
                        results[variant][prefix + "first"] = [value]
                    if number >= 0 or key == "memory":  # what is kept from the first save on counts too
                        results[variant].setdefault(prefix + key, []).append(value)
            print(f"\r{variant}: round {number + 1} of {rounds} ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    bytes_of_state = sum(t.numel() * t.itemsize for t in tensors_of(training.state()))
    return [{"name": variant, "state": bytes_of_state, **values} for variant, values in results.items()]


def with_torch_save(training: Training) -> Variant:
    return (lambda path: torch.save(training.state(), path), written_already, None)


def measure_saving(variant: Variant, path: Path) -> dict[str, float]:
    """A save that nothing is trained beside, and a load."""
    save, wait, load = variant
    os.sync()
    result: dict[str, float] = {}
    with peak_memory() as memory:
        start, cpu = perf_counter(), process_time()
        started = save(path)
        result["called"] = perf_counter() - start
        wait(started)
        if not (path / "MANIFEST.json").exists():  # whose writer does it itself
            make_durable(path)
        result |= {"durable": perf_counter() - start, "cpu": process_time() - cpu}
    result["memory"] = memory["peak"]
    result["bytes"] = sum(one.stat().st_size for one in files_of(path))
    if load is not None:
        result |= measure_loading(load, path)
    remove(path)
    return result


def measure_training(variant: Variant, path: Path, training: Training) -> dict[str, float]:
    """Steps of training, without a save and with one before the first of them."""
    save, wait, _ = variant
    os.sync()
    alone = timed(training.whole_step)
    start = perf_counter()
    started = save(path)
    blocked = perf_counter() - start
    training.backward()
    training.step()
    longer = perf_counter() - start - alone
    steps = 1
    while training.is_saving():
        training.whole_step()
        steps += 1
    in_all = perf_counter() - start - steps * alone
    wait(started)
    remove(path)
    return {"blocked": blocked, "longer": longer, "in_all": in_all}


def measure_loading(load: Callable[[Path], Any], path: Path) -> dict[str, float]:
    works = {
        "keep": lambda: read_bytes(path, keep=True),
        "free": lambda: read_bytes(path, keep=False),
        "load": lambda: load(path),
    }
    works["keep"]()  # a virtual machine may have to ask its host for memory that was not used for a while
    result: dict[str, float] = {}
    for kind in ("cold", "warm"):
        times: dict[str, list[float]] = {name: [] for name in works}
        for name in ("keep", "load", "keep", "free"):  # before and after, since the speed of a disk changes
            if kind == "cold":
                forget(path)
            times[name].append(timed(works[name]))
        result |= {f"{name}_{kind}": statistics.mean(values) for name, values in times.items()}
    return result


def tensors_of(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_of(value)


# all of them


def ratio(one: dict[str, Any], key: str, other: str) -> float:
    """The median of the ratios within each round."""
    return statistics.median(a / b for a, b in zip(one[key], one[other], strict=True))


def show(results: list[dict[str, Any]]) -> None:
    columns = (
        "blocked s",
        "of torch.save",
        "step longer s",
        "in all s",
        "the first s",
        "durable s",
        "CPU s",
        "of it + fsync",
        "GB",
        "memory",
    )
    rows = []
    for one in results:
        for prefix, name in (("base_", "torch.save + fsync, beside it"), ("", one["name"])):
            keys = ("blocked", "longer", "in_all", "durable", "cpu", "bytes")
            median = {key: statistics.median(one[prefix + key]) for key in keys}
            cells = (
                f"{median['blocked']:.3f}",
                f"{ratio(one, prefix + 'blocked', 'base_blocked'):.1%}",
                f"{median['longer']:.2f}",
                f"{median['in_all']:.2f}",
                f"{one[prefix + 'first'][0]:.2f}",
                f"{median['durable']:.2f}",
                f"{median['cpu']:.2f}",
                f"{ratio(one, prefix + 'durable', 'base_durable'):.2f}x",
                f"{median['bytes'] / 1e9:.3f}",
                f"{max(one[prefix + 'memory']) / one['state']:.2f}x",
            )
            rows.append((name, *cells))
    print(as_table(["saving", *(f"{column}:" for column in columns)], rows), end="\n\n")
    columns, rows = ("s", "of keeping", "of freeing", "s, warm", "of keeping", "of freeing"), []
    for one in results:
        cells = ()
        for kind in ("cold", "warm"):
            load = f"load_{kind}"
            cells += (
                f"{statistics.median(one[load]):.2f}",
                f"{ratio(one, load, f'keep_{kind}'):.2f}x",
                f"{ratio(one, load, f'free_{kind}'):.2f}x",
            )
        rows.append((one["name"], *cells))
    print(as_table(["loading", *(f"{column}:" for column in columns)], rows))


@click.command()
@click.option("--params", default=300e6, show_default=True, help="Parameters; a state takes 12 bytes for each.")
@click.option("--rounds", default=3, show_default=True, help="Rounds, after one that is thrown away.")
@click.option("--folder", type=click.Path(path_type=Path), default=None, help="Where to write; a temporary directory.")
@click.option("--only", multiple=True, type=click.Choice(list(CONTENDERS)), help="Measure this one alone.")
@click.option("--kind", type=click.Choice(["blocking", "background"]), help="Of drivetrain's, measure this one alone.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures there as well.")
@click.option("--contender", hidden=True, default=None)
def main(
    params: float,
    rounds: int,
    folder: Path | None,
    only: tuple[str, ...],
    kind: str | None,
    json_path: Path | None,
    contender: str | None,
) -> None:
    """Compare what saving and loading a training state costs."""
    if contender is not None:
        assert folder is not None
        warnings.filterwarnings("ignore")
        print(json.dumps(measure(contender, int(params), rounds, folder, kind)))
        return
    load = os.getloadavg()[0]
    if load > 1:
        print(f"Other work keeps this machine busy (load {load:.1f}): the figures will be too high and uneven.")
    results = []
    for name in only or CONTENDERS:
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed and is left out.")
            continue
        with tempfile.TemporaryDirectory(dir=folder) as place:
            command = [sys.executable, __file__, "--contender", name, "--folder", place]
            command += ["--params", str(params), "--rounds", str(rounds)]
            command += [] if kind is None else ["--kind", kind]
            results += json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1])
    versions = {name: version_of(name) for name in ("drivetrain", "torch", "accelerate", "lightning")}
    print(
        f"\n{params:.3g} parameters, {rounds} rounds, load {load:.1f} at the start. "
        + ", ".join(f"{k} {v}" for k, v in versions.items())
    )
    show(results)
    if json_path is not None:
        json_path.write_text(
            json.dumps({"params": params, "load": load, "versions": versions, "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
