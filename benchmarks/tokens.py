"""Tokens per second of a language model of GPT-2's size, compiled: a bare loop beside the Trainer, and fp8 beside bf16.

    python benchmarks/tokens.py
    python benchmarks/tokens.py --rows 8 --precision bf16 --json tokens.json

One device: the accelerator that torch finds, else the CPU, where only `--size tiny` ends in a reasonable time. See
benchmarks/README.md.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import torch
from tables import as_table
from torch import Tensor, nn
from transformer import Size, Transformer, loss_of, make_optimizer

from drivetrain import Callback, Task, Trainer

SIZES = {
    "gpt2": Size(vocabulary=50304, length=1024, width=768, heads=12, layers=12),
    "tiny": Size(vocabulary=256, length=32, width=64, heads=4, layers=2),
}
# Dense bf16 operations per second, as the makers state them.
PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
TARGET = 0.99
# Turns that do not count: compilation is in the first, and in the last the Trainer has its batch already.
FIRST, LAST = 2, 1
Batch = tuple[Tensor, Tensor]


def flops_per_token(model: nn.Module, size: Size) -> float:
    """Of forward and backward: 6 for each weight, 12 for each layer, unit and token of attention.

    From Chowdhery et al., "PaLM", 2022, appendix B, https://arxiv.org/abs/2204.02311.
    """
    embeddings = size.vocabulary * size.width + size.length * size.width
    weights = sum(parameter.numel() for parameter in model.parameters()) - embeddings
    return 6 * weights + 12 * size.layers * size.width * size.length


def peak_of(device: torch.device) -> float | None:
    """What this device could compute in a second, where that is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAKS.items() if known in name), None)


def make_model(size: Size, compiled: bool) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(size)
    if compiled:
        model.compile()
    return model


class LanguageModel(Task):
    """The model as a task."""

    def __init__(self, size: Size, compiled: bool) -> None:
        super().__init__()
        self.size, self.compiled = size, compiled

    def configure_model(self) -> None:
        self.model = make_model(self.size, self.compiled)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        tokens, targets = batch
        return loss_of(self.model(tokens), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.parameters())


def bare_step(size: Size, device: torch.device, precision: str, compiled: bool) -> Callable[[Batch], Tensor]:
    """A loop as one writes it by hand: autocast, and torchao's layers for fp8."""
    model = make_model(size, compiled).to(device)
    if precision == "fp8":
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model.blocks)
    optimizer = make_optimizer(model.parameters())

    def step(batch: Batch) -> Tensor:
        tokens, targets = batch
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class TakingTurns:
    """The Trainer's batches. After every few steps it waits, while the bare loop runs as many.

    Args:
        step: Runs a step of the bare loop.
        batch: The batch of every step.
        block: Steps of each before it is the other's turn.
        rounds: Turns of each that count.
    """

    def __init__(self, step: Callable[[Batch], Tensor], batch: Batch, block: int, rounds: int) -> None:
        self.step, self.batch, self.block, self.rounds = step, batch, block, rounds
        self.bare: list[float] = []  # seconds a step, for each turn
        self.own: list[float] = []
        self.bare_loss = float("nan")

    def __len__(self) -> int:
        return (FIRST + self.rounds + LAST) * self.block

    def __iter__(self) -> Iterator[Batch]:
        for number in range(FIRST + self.rounds + LAST):
            start = self.now()
            for _ in range(self.block):
                loss = self.step(self.batch)
            middle = self.now()
            for _ in range(self.block):
                yield self.batch
            end = self.now()
            self.bare_loss = float(loss)
            if FIRST <= number < FIRST + self.rounds:
                self.bare.append((middle - start) / self.block)
                self.own.append((end - middle) / self.block)

    @staticmethod
    def now() -> float:
        """When the device has computed all that it was given."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return perf_counter()


class KeepLoss(Callback):
    """The last loss: both must learn the same."""

    loss = float("nan")

    def on_train_end(self, trainer: Any, task: Any) -> None:
        self.loss = float(self._last)

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._last = outputs["loss"].detach()


def measure(precision: str, size: Size, rows: int, block: int, rounds: int, compiled: bool) -> dict[str, Any]:
    """Both loops in turns, in one precision."""
    keeping = KeepLoss()
    trainer = Trainer(devices=1, precision=precision, max_epochs=1, callbacks=[keeping], barebones=True)
    device = trainer.accelerator.device
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(size.vocabulary, (rows, size.length + 1), generator=generator).to(device)
    batch = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    turns = TakingTurns(bare_step(size, device, precision, compiled), batch, block, rounds)
    trainer.fit(LanguageModel(size, compiled), turns)
    tokens = rows * size.length
    return {
        "precision": precision,
        "bare": [tokens / seconds for seconds in turns.bare],
        "own": [tokens / seconds for seconds in turns.own],
        "losses": [turns.bare_loss, keeping.loss],
    }


def ratio_of(result: dict[str, Any]) -> tuple[float, float]:
    """The median of the paired ratios of speed, and half the distance between their quartiles."""
    each = [own / bare for own, bare in zip(result["own"], result["bare"], strict=True)]
    low, middle, high = statistics.quantiles(each, n=4) if len(each) > 1 else each * 3
    return middle, (high - low) / 2


def rows_of(results: list[dict[str, Any]], flops: float, peak: float | None) -> Iterator[list[str]]:
    for result in results:
        bare, own = (statistics.median(result[key]) for key in ("bare", "own"))
        ratio, spread = ratio_of(result)
        used = "" if peak is None else f"{own * flops / peak:.1%}"
        beside = f"{own / statistics.median(results[0]['own']):.2f}"
        yield [result["precision"], f"{bare:.0f}", f"{own:.0f}", f"{ratio:.3f}", f"{spread:.3f}", used, beside]


@click.command()
@click.option("--size", type=click.Choice(list(SIZES)), default="gpt2", show_default=True)
@click.option("--precision", "precisions", multiple=True, default=("bf16", "fp8"), show_default=True)
@click.option("--rows", default=16, show_default=True, help="Sequences in a step.")
@click.option("--block", default=5, show_default=True, help="Steps in a turn.")
@click.option("--rounds", default=20, show_default=True, help="Turns of each.")
@click.option("--compile/--no-compile", "compiled", default=True, show_default=True)
@click.option("--peak", type=float, help="Operations per second of this device, where it is not a known one.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there too.")
def main(
    size: str,
    precisions: tuple[str, ...],
    rows: int,
    block: int,
    rounds: int,
    compiled: bool,
    peak: float | None,
    json_file: Path | None,
) -> None:
    shape = SIZES[size]
    results = [measure(precision, shape, rows, block, rounds, compiled) for precision in precisions]
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = make_model(shape, compiled=False)
    flops = flops_per_token(model, shape)
    peak = peak or peak_of(device)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    where = torch.cuda.get_device_name() if device.type == "cuda" else str(device)
    print(
        f"{millions:.1f} M parameters, {rows} sequences of {shape.length} tokens a step, "
        f"{'compiled' if compiled else 'not compiled'}, on {where}; {rounds} turns of {block} steps. "
        f"torch {torch.__version__}.\n"
    )
    columns = ["", "bare, tokens/s:", "drivetrain, tokens/s:", "ratio:", "±:", "MFU:", f"of {precisions[0]}:"]
    print(as_table(columns, rows_of(results, flops, peak)))
    for result in results:
        bare, own = result["losses"]
        print(f"{result['precision']}: last losses {bare:.4f} and {own:.4f}")
    if json_file is not None:
        figures = [{**result, "ratio": ratio_of(result)} for result in results]
        shared = {"torch": torch.__version__, "device": where, "size": dataclasses.asdict(shape), "flops": flops}
        json_file.write_text(json.dumps({**shared, "results": figures}, indent=2))
    missed = [f"{each['precision']} {ratio_of(each)[0]:.3f}" for each in results if ratio_of(each)[0] < TARGET]
    if missed and device.type != "cpu":
        raise click.ClickException(f"below {TARGET} of the bare loop's speed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
