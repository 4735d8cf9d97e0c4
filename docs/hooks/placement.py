"""Record and draw what each process holds under each strategy, for docs/explanations/what-each-strategy-holds.md.

    python docs/hooks/placement.py record          # trains a small model under each strategy, writes placement.json
    python docs/hooks/placement.py record zero-1   # under this one alone
    python docs/hooks/placement.py losses          # compares losses with those of one process, writes exactness.json
    python docs/hooks/placement.py draw            # draws docs/images/explanations/ placement_*.svg and exactness.svg

A process reports the parts of tensors that it holds when its second optimizer step is about to begin, which is when
gradients and optimizer state are there together. DeepSpeed must be installed for the three stages of ZeRO.
"""

from __future__ import annotations

import html
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from drivetrain import (
    DDP,
    FSDP,
    Callback,
    Colwise,
    DeepSpeed,
    Parallel,
    Rowwise,
    Task,
    Trainer,
    gather_object,
    sequence_positions,
)

RECORD = Path(__file__).with_name("placement.json")
LOSSES = Path(__file__).with_name("exactness.json")
PICTURES = Path(__file__).parent.parent / "images" / "explanations"
WIDTH, WORDS, LENGTH, LAYERS, ROWS = 32, 48, 16, 2, 8
ROLES = ("parameters", "gradients", "optimizer")
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}

Part = list[list[int]]  # [where it begins, how large it is], in each dimension; of a flat range [[start], [size]]


# what is trained


class Block(nn.Module):
    """Attention with a residual, its four matrices without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (w(x).view(rows, length, -1, 8).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        added: Tensor = self.wo(y.transpose(1, 2).reshape(rows, length, -1))
        return x + added


class Network(nn.Module):
    """A language model of 11 matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(sequence_positions(tokens.shape[1], tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class Sentences(Dataset[tuple[Tensor, Tensor, int]]):
    """Two global batches; each sample ends with its number, by which a process's share is recognised."""

    def __len__(self) -> int:
        return 2 * ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        words = torch.randint(WORDS, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        return words[:-1], words[1:], index


class Predictor(Task):
    """Predicts the next token, and records which samples it was given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Network()
        self.samples: list[int] = []

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, labels, numbers = batch
        self.samples += numbers.tolist()
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), labels.flatten())
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


PLAN = {f"layers.*.{name}": Colwise() for name in ("wq", "wk", "wv")} | {"layers.*.wo": Rowwise()}

# name -> (title, how it is made, on how many processes)
STRATEGIES: dict[str, tuple[str, Callable[[], Any], int]] = {
    "single": ("single: one process", lambda: "single", 1),
    "ddp": ("DDP: copies of everything, other samples on each", DDP, 2),
    "zero-1": ("ZeRO-1: optimizer state sharded", lambda: DeepSpeed(stage=1), 2),
    "zero-2": ("ZeRO-2: optimizer state and gradients sharded", lambda: DeepSpeed(stage=2), 2),
    "zero-3": ("ZeRO-3: all three sharded", lambda: DeepSpeed(stage=3, stage3_param_persistence_threshold=0), 2),
    "fsdp": ("FSDP: all three sharded, row by row", FSDP, 2),
    "hsdp": ("FSDP with replicate_size=2: two copies, each sharded", lambda: FSDP(replicate_size=2), 4),
    "tp": ("Tensor parallel: each planned matrix split", lambda: Parallel(tp=2, tp_plan=PLAN), 2),
    "cp": ("Context parallel: sequences split, the rest sharded", lambda: Parallel(cp=2), 2),
    "pp": ("Pipeline: each process has a stage", lambda: Parallel(pp=2), 2),
}


# what a process holds


def part_of(tensor: Any) -> Part | None:
    """Which part of a whole tensor a process holds of it; None of an empty one and of one without memory."""
    if not isinstance(tensor, Tensor) or tensor.device.type == "meta":
        return None
    local, offset = tensor, [0] * tensor.dim()
    if hasattr(tensor, "_local_tensor"):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        sharded: Any = tensor
        local = sharded._local_tensor
        shape, begins = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, sharded.placements)
        assert tuple(shape) == tuple(local.shape)
        offset = list(begins)
    return [offset, list(local.shape)] if local.numel() else None


def flat_parts(parameter: Any) -> dict[str, Part | None] | None:
    """The parts of one parameter under ZeRO, as ranges of its values; None under other strategies."""
    mapping = getattr(parameter, "_hp_mapping", None)
    shard = getattr(parameter, "ds_tensor", None)
    if isinstance(shard, Tensor):  # ZeRO-3
        from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_grad, safe_get_local_optimizer_state

        tensors = (shard, safe_get_local_grad(parameter), safe_get_local_optimizer_state(parameter, "exp_avg"))
        assert safe_get_local_fp32_param(parameter).numel() == shard.numel()
        rank = parameter.ds_zero_partition_rank if hasattr(parameter, "ds_zero_partition_rank") else rank_here()
        return dict(zip(ROLES, ([[rank * each.numel()], [each.numel()]] for each in tensors), strict=True))
    if mapping is not None:  # ZeRO-1 and 2, of what lies in this process's slice
        address = mapping.lp_fragment_address
        gradient = mapping.get_lp_grad_fragment(parameter._index_in_param_group)
        moment = mapping.get_optim_state_fragment("exp_avg")
        assert moment.numel() == address.numel
        ranges = [
            [[0], [parameter.numel()]],
            [[address.start], [gradient.numel()]],
            [[address.start], [moment.numel()]],
        ]
        return dict(zip(ROLES, ranges, strict=True))
    return None


def rank_here() -> int:
    return int(os.environ.get("RANK", 0))


def held_by(trainer: Any) -> dict[str, Any]:
    """What this process holds: for each parameter the part of it, of its gradient and of its optimizer state."""
    [optimizer] = trainer.optimizers
    inner = getattr(optimizer, "optimizer", optimizer)
    engine = hasattr(trainer.model, "zero_optimization_stage")
    parts: dict[str, dict[str, Part | None]] = {}
    for name, parameter in trainer.task.named_parameters():
        found = flat_parts(parameter)
        if found is None:
            # With DeepSpeed's stages 1 and 2: whole here, and its gradient and state on another process.
            tensors = (parameter, None) if engine else (parameter, parameter.grad)
            found = dict(
                zip(ROLES, map(part_of, (*tensors, inner.state.get(parameter, {}).get("exp_avg"))), strict=True)
            )
        parts[name.removeprefix("model.")] = found
    return {"parts": parts}


class Recorder(Callback):
    """Records before the second step."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}
        self.tokens: set[int] = set(range(LENGTH))

    def on_train_start(self, trainer: Any, task: Any) -> None:
        task.model.positions.register_forward_pre_hook(self.record_tokens)

    def record_tokens(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if type(inputs[0]) is Tensor and inputs[0].device.type != "meta":  # else a trial run on shapes alone
            self.tokens = set(inputs[0].flatten().tolist())

    def on_before_optimizer_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
        if trainer.global_step == 1:
            self.held = {
                **held_by(trainer),
                "samples": sorted({number - ROWS for number in task.samples if number >= ROWS}),
                "tokens": sorted(self.tokens),
            }


def measure(name: str) -> list[dict[str, Any]]:
    """Train for two steps in this process, and return what each process held."""
    recorder = Recorder()
    train(name, recorder, max_steps=2)
    found: list[dict[str, Any]] = gather_object([recorder.held])
    return found


def train(name: str, callback: Callback, **length: int) -> None:
    """Train under a strategy in this process, in steps of the same samples under each."""
    _, make, _ = STRATEGIES[name]
    torch.set_num_threads(1)
    window = 2 if name == "pp" else 1  # micro-batches of a step
    options: dict[str, Any] = {**QUIET, **length}
    trainer = Trainer(strategy=make(), callbacks=[callback], accumulate_grad_batches=window, **options)
    rows = ROWS // trainer.strategy.topology.data_shard.count // window
    trainer.fit(Predictor(), DataLoader(Sentences(), rows))


class Losses(Callback):
    """Keeps the mean loss of each epoch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
        self.values.append(trainer.callback_metrics["loss"].item())


def losses(name: str) -> list[float]:
    """Train for ten epochs of two steps in this process, and return their mean losses."""
    kept = Losses()
    train(name, kept, max_epochs=10)
    return kept.values


def measured_in_processes(name: str, command_here: str = "measure") -> Any:
    """What `measure` or `losses` returns in the processes of a launch."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "held.json")
        command = [sys.executable, "-m", "drivetrain", "launch", "--cpu", "--num_processes", str(STRATEGIES[name][2])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command += [__file__, f"{command_here}-here", name, str(file)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stdout}{done.stderr}")
        return json.loads(file.read_text())


# drawing

INK, FAINT, PAPER = "#26323f", "#8a96a3", "#ffffff"
COLOURS = {"parameters": "#00897b", "gradients": "#ef8e3b", "optimizer": "#5c6bc0", "batch": "#c2185b"}
LABELS = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer state"}
PANEL, MARGIN, SCALE, GAP = 318, 16, 0.72, 3.0


def shapes() -> dict[str, list[int]]:
    """The shapes of the whole tensors by name."""
    return {name: list(parameter.shape) for name, parameter in Network().named_parameters()}


def values_in(part: Part | None) -> int:
    """How many values a part has."""
    if part is None:
        return 0
    count = 1
    for size in part[1]:
        count *= size
    return count


def share_of(process: dict[str, Any], role: str) -> float:
    """Which share of all values of a role a process holds."""
    whole = sum(rows * columns for rows, columns in shapes().values())
    return sum(values_in(parts[role]) for parts in process["parts"].values()) / whole


def boxes(part: Part, shape: list[int]) -> Iterator[tuple[float, float, float, float]]:
    """The rectangles of a matrix, as (top, left, height, width) in its rows and columns, that a part covers."""
    if len(part[0]) == 2:
        (top, left), (height, width) = part
        yield top, left, height, width
        return
    columns = shape[1]
    start, stop = part[0][0], min(part[0][0] + part[1][0], shape[0] * columns)
    while start < stop:
        row, column = divmod(start, columns)
        if column == 0 and stop - start >= columns:
            height = (stop - start) // columns
            yield row, 0, height, columns
            start += height * columns
        else:
            width = min(columns - column, stop - start)
            yield row, column, 1, width
            start += width


def rectangle(x: float, y: float, width: float, height: float, fill: str, outline: str = "none") -> str:
    line = f' stroke="{outline}" stroke-width="0.8"' if outline != "none" else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"{line}/>'


def text(x: float, y: float, words: str, size: float = 13, fill: str = INK, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" font-weight="{weight}">{html.escape(words)}</text>'


def mosaic(x: float, y: float, process: dict[str, Any], role: str) -> list[str]:
    """All tensors of a role in one line, the part that a process holds filled."""
    drawn = []
    for name, shape in shapes().items():
        height, width = shape[0] * SCALE, shape[1] * SCALE
        drawn.append(rectangle(x, y, width, height, "#f1f3f5", "#c3cad1"))
        part = process["parts"][name][role]
        for top, left, rows, columns in boxes(part, shape) if part else ():
            inside = (x + left * SCALE, y + top * SCALE, columns * SCALE, rows * SCALE)
            drawn.append(rectangle(*inside, COLOURS[role]))
        x += width + GAP
    return drawn


def batch_of(x: float, y: float, process: dict[str, Any]) -> list[str]:
    """The global batch, a line for each sample and a column for each token, the part of this process filled."""
    cell, tall = 9.0, 5.0
    drawn = [rectangle(x, y, LENGTH * cell, ROWS * tall, "#f1f3f5", "#c3cad1")]
    tokens = process["tokens"]
    for first in (each for each in tokens if each - 1 not in tokens):
        count = next(n for n in range(1, LENGTH + 1) if first + n not in tokens)
        for sample in process["samples"]:
            here = (x + first * cell, y + sample * tall, count * cell, tall - 1)
            drawn.append(rectangle(*here, COLOURS["batch"]))
    return drawn


def panel(x: float, y: float, process: dict[str, Any], rank: int) -> tuple[list[str], float]:
    """The drawing of one process, and how high it is."""
    drawn = [text(x, y + 14, f"process {rank}", 15, weight="bold")]
    below = y + 36
    for role in ROLES:
        drawn.append(text(x, below, f"{LABELS[role]}: {share_of(process, role):.0%}", fill=COLOURS[role]))
        drawn += mosaic(x, below + 7, process, role)
        below += 7 + WORDS * SCALE + 20
    samples, tokens = len(process["samples"]), len(process["tokens"])
    share = f"batch: {samples} of {ROWS} samples, {tokens} of {LENGTH} tokens"
    drawn.append(text(x, below, share, fill=COLOURS["batch"]))
    drawn += batch_of(x, below + 7, process)
    return drawn, below + 7 + ROWS * 5 - y


def picture(name: str, processes: list[dict[str, Any]]) -> str:
    """The picture of one strategy: a panel for each process, two in a line."""
    title = STRATEGIES[name][0]
    drawn, bottom = [text(MARGIN, 30, title, 17, weight="bold")], 50.0
    for first in range(0, len(processes), 2):
        height = 0.0
        for column, process in enumerate(processes[first : first + 2]):
            lines, height = panel(MARGIN + column * (PANEL + 2 * MARGIN), bottom, process, first + column)
            drawn += lines
        bottom += height + 28
    columns = min(2, len(processes))
    width = max(columns * PANEL + 2 * MARGIN * columns, 470)
    described = f"{title}. What each process holds of parameters, gradients, optimizer state and batch."
    return svg(width, bottom, described, drawn)


def svg(width: float, height: float, described: str, drawn: list[str]) -> str:
    """A picture on white paper."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}" '
        f'height="{height:.0f}" font-family="DejaVu Sans, Verdana, sans-serif" role="img">'
        f"<title>{html.escape(described)}</title>"
        f'<rect width="{width}" height="{height:.0f}" rx="8" fill="{PAPER}"/>\n' + "\n".join(drawn) + "\n</svg>\n"
    )


def difference(values: list[float], expected: list[float]) -> float:
    """The largest difference of two lists of losses."""
    return max(abs(one - other) for one, other in zip(values, expected, strict=True))


BOUND = 5e-6  # within which the tests hold every strategy to one process


def exactness_picture(values: dict[str, list[float]]) -> str:
    """A bar for each strategy: how far its losses are from those of one process, on a logarithmic scale."""
    left, wide, low, high = 170, 430, 1e-8, 1e-5

    def at(value: float) -> float:
        return left + wide * math.log(max(value, low) / low) / math.log(high / low)

    drawn = [text(MARGIN, 30, "Largest difference of a loss from one process, 32 bits, 20 steps", 16, weight="bold")]
    names = [name for name in values if name != "single"]
    bottom = 52 + 30 * len(names)
    for power in range(-8, -4):
        x = at(10.0**power)
        drawn.append(rectangle(x, 48, 1, bottom - 48, "#e4e8ec"))
        drawn.append(text(x - 14, bottom + 18, f"1e{power}", 12, FAINT))
    for number, name in enumerate(names):
        y, found = 54 + 30 * number, difference(values[name], values["single"])
        drawn.append(text(MARGIN, y + 15, f"{name}, {STRATEGIES[name][2]} processes"))
        drawn.append(rectangle(left, y, max(2.0, at(found) - left), 20, COLOURS["parameters"]))
        drawn.append(text(at(found) + 6, y + 15, f"{found:.1e}" if found else "0: bit for bit", 12))
    drawn.append(rectangle(at(BOUND), 48, 2, bottom - 48, COLOURS["batch"]))
    drawn.append(text(at(BOUND) - 92, bottom + 36, "bound of the tests", 12, COLOURS["batch"]))
    described = "Bars of the largest difference of a loss from one process under each strategy, all below 5e-6"
    return svg(680, bottom + 48, described, drawn)


def main(arguments: list[str]) -> None:
    command, *names = arguments
    if command.endswith("-here"):
        found = {"measure-here": measure, "losses-here": losses}[command](names[0])
        if rank_here() == 0:
            Path(names[1]).write_text(json.dumps(found))
    elif command == "losses":
        values = {name: measured_in_processes(name, "losses") for name in STRATEGIES}
        LOSSES.write_text(json.dumps(values) + "\n")
        print({name: difference(each, values["single"]) for name, each in values.items()})
    elif command == "record":
        record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        for name in names or STRATEGIES:
            record[name] = measured_in_processes(name)
            shares = [{role: round(share_of(each, role), 3) for role in ROLES} for each in record[name]]
            print(name, shares, [(each["samples"], len(each["tokens"])) for each in record[name]], flush=True)
        RECORD.write_text(json.dumps({name: record[name] for name in STRATEGIES if name in record}) + "\n")
    else:
        for name, processes in json.loads(RECORD.read_text()).items():
            file = PICTURES / f"placement_{name.replace('-', '_')}.svg"
            file.write_text(picture(name, processes))
            print(f"wrote {file}: {file.stat().st_size:,} bytes")
        if LOSSES.exists():
            (PICTURES / "exactness.svg").write_text(exactness_picture(json.loads(LOSSES.read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
