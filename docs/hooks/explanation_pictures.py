"""Draw how a step works and how data reaches processes: `python docs/hooks/explanation_pictures.py`.

The second is a record of what two prepared loaders with two workers each have given.
"""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from drivetrain import set_seed
from drivetrain.data import DataShard, prepare_loader

PICTURES = Path(__file__).parent.parent / "images" / "explanations"
RECORD = Path(__file__).with_name("data_order.json")
INK, FAINT, LINE = "#26323f", "#74808c", "#c3cad1"
RANKS = ("#00897b", "#5c6bc0")
SAMPLES, BATCH, PROCESSES, WORKERS = 20, 3, 2, 2


def box(x: float, y: float, width: float, height: float, fill: str, words: str = "", ink: str = "#fff") -> str:
    drawn = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{fill}"/>'
    return drawn + text(x + width / 2, y + height / 2 + 5, words, 13, ink, "middle") if words else drawn


def text(x: float, y: float, words: str, size: float = 13, fill: str = INK, anchor: str = "start") -> str:
    where = f'x="{x}" y="{y}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"'
    return f"<text {where}>{html.escape(words)}</text>"


def arrow(x: float, y: float, x2: float, y2: float) -> str:
    return f'<path d="M{x},{y} L{x2},{y2}" stroke="{INK}" stroke-width="1.4" fill="none" marker-end="url(#head)"/>'


def whole(width: int, height: int, described: str, drawn: list[str]) -> str:
    head = '<marker id="head" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="DejaVu Sans, Verdana, sans-serif" role="img"><title>{html.escape(described)}</title>'
        f'<defs>{head}<path d="M0,0 L6,3 L0,6 z" fill="{INK}"/></marker></defs>'
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>\n' + "\n".join(drawn) + "\n</svg>\n"
    )


# a step

LANES = ("workers read", "copy to device", "device computes", "network", "host, after it")
FORWARD, BACKWARD, STEP, OTHER, NEXT = "#00897b", "#ef8e3b", "#5c6bc0", "#90a4ae", "#b9c4cc"


def step_picture() -> str:
    """One optimizer step of two micro-batches, over time."""
    left, tall, top = 120, 34, 58
    drawn = [text(16, 30, "One optimizer step: a window of two micro-batches", 17)]
    lanes = {name: top + number * 62 for number, name in enumerate(LANES)}
    for name, y in lanes.items():
        drawn.append(text(16, y + 22, name, 12, FAINT))
        drawn.append(f'<path d="M{left},{y + tall + 9} H704" stroke="#e4e8ec" stroke-width="1"/>')

    def put(lane: str, at: float, width: float, fill: str, words: str, ink: str = "#fff") -> None:
        drawn.append(box(left + at, lanes[lane], width, tall, fill, words, ink))

    put("workers read", 0, 150, NEXT, "batch 2", INK)
    put("workers read", 156, 170, NEXT, "batch 3", INK)
    put("workers read", 332, 170, NEXT, "batch 4", INK)
    put("copy to device", 0, 44, OTHER, "1")
    put("copy to device", 156, 44, OTHER, "2")
    put("copy to device", 332, 44, OTHER, "3")
    put("device computes", 50, 70, FORWARD, "forward 1")
    put("device computes", 124, 86, BACKWARD, "backward 1")
    put("device computes", 214, 70, FORWARD, "forward 2")
    put("device computes", 288, 110, BACKWARD, "backward 2")
    put("device computes", 440, 40, STEP, "clip")
    put("device computes", 484, 56, STEP, "step")
    put("network", 318, 30, "#c2185b", "")
    put("network", 352, 30, "#c2185b", "")
    put("network", 386, 48, "#c2185b", "last")
    drawn.append(text(left + 200, lanes["network"] + 22, "buckets reduced", 12, "#c2185b"))
    put("host, after it", 484, 96, OTHER, "schedule, log")
    device, network, host = lanes["device computes"], lanes["network"], lanes["host, after it"]
    drawn.append(arrow(left + 44, lanes["copy to device"] + tall, left + 54, device - 2))
    drawn.append(arrow(left + 200, lanes["copy to device"] + tall, left + 220, device - 2))
    drawn.append(arrow(left + 330, device + tall, left + 330, network - 2))
    drawn.append(arrow(left + 434, network, left + 450, device + tall + 3))
    drawn.append(arrow(left + 512, device + tall, left + 512, host - 2))
    drawn.append(
        text(
            16,
            386,
            "An arrow is a wait. Nothing on the host waits for the device: logged values stay there until they",
            12,
            FAINT,
        )
    )
    drawn.append(
        text(
            16,
            403,
            "are shown. Batch 3 belongs to the next window, and is copied one batch ahead.",
            12,
            FAINT,
        )
    )
    described = "The lanes of an optimizer step over time: reading, copying, computing, reducing gradients, scheduling"
    return whole(720, 418, described, drawn)


# data


class Recorded(Dataset[tuple[int, int, float]]):
    """Gives a sample's number, the worker that read it, and a random number that belongs to the sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, int, float]:
        worker = get_worker_info()
        return index, -1 if worker is None else worker.id, torch.rand(()).item()


def data_order(workers: int = WORKERS) -> list[list[dict[str, Any]]]:
    """For each process its batches of one epoch: the samples, who read them, and how many rows are padding."""
    set_seed(7)
    found = []
    for rank in range(PROCESSES):
        generator = torch.Generator().manual_seed(3)
        plain = DataLoader(Recorded(), BATCH, shuffle=True, generator=generator, num_workers=workers)
        loader = prepare_loader(plain, shard=DataShard(rank, PROCESSES))
        batches = []
        for samples, readers, _ in loader:
            info = loader.current
            assert info is not None
            batches.append(
                {"samples": samples.tolist(), "workers": sorted(set(readers.tolist())), "real": info.real_rows}
            )
        found.append(batches)
    return found


def data_picture(found: list[list[dict[str, Any]]]) -> str:
    """The order of the epoch in one line, and below it the batches of each process."""
    cell, left = 32, 20
    drawn = [
        text(left, 30, f"{SAMPLES} samples, batch_size={BATCH}, {PROCESSES} processes, {WORKERS} workers each", 17)
    ]
    drawn.append(text(left, 62, "the order that one plain PyTorch process would have"))
    number = 0
    for step in range(len(found[0])):
        for rank, batches in enumerate(found):
            for sample in batches[step]["samples"][: batches[step]["real"]]:
                drawn.append(box(left + number * cell, 72, cell - 3, 26, RANKS[rank], str(sample)))
                number += 1
    y = 138
    for rank, batches in enumerate(found):
        drawn.append(text(left, y, f"process {rank} (data shard {rank} of {PROCESSES})", fill=RANKS[rank]))
        x = left
        for step, batch in enumerate(batches):
            for row, sample in enumerate(batch["samples"]):
                real = row < batch["real"]
                drawn.append(
                    box(
                        x,
                        y + 10,
                        cell - 3,
                        26,
                        RANKS[rank] if real else "#e4e8ec",
                        str(sample),
                        "#fff" if real else FAINT,
                    )
                )
                x += cell
            readers = ", ".join(map(str, batch["workers"]))
            drawn.append(text(x - len(batch["samples"]) * cell, y + 54, f"step {step}, worker {readers}", 11, FAINT))
            x += 14
        y += 92
    drawn.append(
        text(
            left,
            y - 14,
            "Grey rows are padding: samples from the start of the epoch, which gather_for_metrics drops.",
            12,
            FAINT,
        )
    )
    described = (
        "How the shuffled order of an epoch is spread over two processes, batch by batch, with the padding at its end"
    )
    return whole(680, y + 6, described, drawn)


if __name__ == "__main__":
    recorded = data_order()
    RECORD.write_text(json.dumps(recorded) + "\n")
    for name, drawing in (("step", step_picture()), ("data", data_picture(recorded))):
        (PICTURES / f"{name}.svg").write_text(drawing)
        print(f"wrote {name}.svg: {len(drawing):,} bytes")
