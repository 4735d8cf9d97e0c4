"""Device maps as text, as an HTML page, and the reason for a block's device."""

from __future__ import annotations

import math
from html import escape

from drivetrain.inference.solver import Block, Placement, Problem, Share
from drivetrain.runtime.host import as_bytes

_MOST_NAMES = 4


def as_table(problem: Problem, placement: Placement) -> str:
    rows = [["device", "modules", "weights", "room to stream", "activations", "free after", "of"]]
    shares = problem.shares(placement)
    for place, (budget, share) in enumerate(zip(problem.budgets, shares, strict=True)):
        if not (share.weights or share.streamed) and budget.kind != "accelerator":
            continue
        counts = (share.weights, share.streamed, share.activations, share.free, budget.limit)
        rows.append([str(budget.device), modules_on(problem, placement, place), *map(_bytes, counts)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [_line(row, widths) for row in rows]
    lines.insert(1, "-" * len(lines[0]))
    if has_no_room_ahead(problem, placement):
        lines.append("no room to prefetch a block: copies and computation do not overlap")
    lines.append(f"{problem.boundaries(placement)} boundaries between devices, {as_bytes(problem.size)} in all")
    return "\n".join(line.rstrip() for line in lines)


def has_no_room_ahead(problem: Problem, placement: Placement) -> bool:
    main = placement.main
    if main is None or problem.budgets[main].kind != "accelerator" or problem.stream_buffers > 1:
        return False
    placed = zip(problem.blocks, placement.places, strict=True)
    largest = max((block.streamed for block, place in placed if not problem.computes(place, main)), default=0)
    return largest > max(0, problem.shares(placement)[main].free)


def _line(row: list[str], widths: list[int]) -> str:
    left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
    right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
    return "  ".join([*left, *right])


def _bytes(count: float) -> str:
    return "no limit" if math.isinf(count) else as_bytes(count)


def modules_on(problem: Problem, placement: Placement, place: int) -> str:
    where = {
        position: (name, its)
        for block, its in zip(problem.blocks, placement.places, strict=True)
        for position, name in zip(block.positions, block.names, strict=True)
    }
    runs: list[list[str]] = []
    before = None
    for position in sorted(where):
        name, its = where[position]
        if its == place:
            if before != place:
                runs.append([])
            runs[-1].append(name or "(all)")
        before = its
    # Such as `h.0 - h.21`.
    texts = [run[0] if len(run) == 1 else f"{run[0]} - {run[-1]}" for run in runs]
    if len(texts) > _MOST_NAMES:
        texts = [*texts[: _MOST_NAMES - 1], f"{len(texts) - _MOST_NAMES + 1} more"]
    return ", ".join(texts)


def explain(problem: Problem, placement: Placement, block: Block) -> str:
    place = placement.places[problem.blocks.index(block)]
    shares = problem.shares(placement)
    budget = problem.budgets[place]
    first = block.names[0] or "the whole model"
    text = f"{first} ({as_bytes(block.size)}) is on {budget.device}"
    if len(block.names) > 1:
        text += f", together with {', '.join(block.names[1:])} (shared weights)"
    before = [room for room in problem.accelerators if room < place]
    reasons = [_room_left(problem.budgets[room].device, shares[room], block) for room in before]
    if not problem.computes(place, placement.main):
        main = problem.budgets[placement.main].device if placement.main is not None else None
        text += f", and is copied to {main} when it runs"
        text += ", with no room to prefetch it" if has_no_room_ahead(problem, placement) else ""
    if reasons:
        text += ": " + "; ".join(reasons)
    return text + "."


def _room_left(device: object, share: Share, block: Block) -> str:
    left = f"{device} has {as_bytes(max(0, share.free))} left of {_bytes(share.limit)}"
    if share.streamed:
        left += f", with {as_bytes(share.streamed)} reserved for offloaded blocks"
    if share.free >= block.size:
        left += ", but already has the modules before this one, or its even share"
    return left


_STYLE = """
:root { --paper: #fff; --text: #1c2024; --soft: #5b6570; --line: #c4cbd2; --room: #f1f3f5;
  --block: #1f6fd0; --other: #7aacea; --stream: #b86a00; --work: #a03c86; color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171a; --text: #e6e9ec; --soft: #98a3ad; --line: #4a525a; --room: #1f2429;
    --block: #64a8f5; --other: #2f6cb3; --stream: #e3ab52; --work: #e07fc2; }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; padding: 1.5rem 1rem; max-width: 70rem; background: var(--paper); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .25rem; } h2 { font-size: 1.05rem; margin: 1.5rem 0 0; }
p { margin: 0 0 .2rem; color: var(--soft); overflow-wrap: anywhere; }
details { margin-top: .2rem; }
.bar { display: flex; height: 2.25rem; min-width: 4px; overflow: hidden; background: var(--room);
  border: 1px solid var(--line); border-radius: 4px; }
.bar.cut { border-right: 3px dotted var(--soft); }
.bar div { height: 100%; flex: none; }
.block { background: var(--block); } .other { background: var(--other); }
.stream { background: var(--stream); } .work { background: var(--work); }
ul.key { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin: .75rem 0; padding: 0; list-style: none; }
.key i { display: inline-block; width: .9em; height: .9em; margin-right: .4em; border: 1px solid var(--line);
  border-radius: 2px; vertical-align: -.1em; }
.key .room { background: var(--room); }
summary { cursor: pointer; color: var(--soft); }
table { border-collapse: collapse; margin: .4rem 0; font-variant-numeric: tabular-nums; }
td { padding: .1rem 1rem .1rem 0; vertical-align: top; overflow-wrap: anywhere; }
td:last-child { text-align: right; padding-right: 0; white-space: nowrap; }
"""
_KEY = (
    ("block", "blocks, each in one of two shades"),
    ("stream", "room for offloaded blocks"),
    ("work", "activations"),
    ("room", "free"),
)


def as_page(problem: Problem, placement: Placement) -> str:
    shares = problem.shares(placement)
    # Limits above the model's size, such as the disk's, would make all other bars invisible.
    limits = [share.limit for share in shares if share.limit <= problem.size] or [problem.size]
    widest = max(1, *limits, *map(_used, shares))
    devices = "".join(_device(problem, placement, place, share, widest) for place, share in enumerate(shares))
    key = "".join(f'<li><i class="{kind}"></i>{text}</li>' for kind, text in _KEY)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Device map</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>Device map</h1><p>{as_bytes(problem.size)} in all, "
        f"{problem.boundaries(placement)} boundaries between devices. A bar's length is the device's memory; a "
        "dotted end marks a device with more.</p>"
        f'<ul class="key">{key}</ul>{devices}</body></html>\n'
    )


def _used(share: Share) -> float:
    return share.weights + share.streamed + share.activations


def _device(problem: Problem, placement: Placement, place: int, share: Share, widest: float) -> str:
    budget = problem.budgets[place]
    whole = max(min(share.limit, widest), 1)
    kind = "bar cut" if share.limit > whole else "bar"
    blocks = [
        (", ".join(block.names) or "(all)", block.size)
        for block, its in zip(problem.blocks, placement.places, strict=True)
        if its == place and block.size
    ]
    parts = [_part(name, size, whole, ("block", "other")[number % 2]) for number, (name, size) in enumerate(blocks)]
    parts.append(_part("room to stream", share.streamed, whole, "stream"))
    parts.append(_part("activations", share.activations, whole, "work"))
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{as_bytes(size)}</td></tr>" for name, size in blocks)
    noun = "block" if len(blocks) == 1 else "blocks"
    listing = f"<details><summary>{len(blocks)} {noun}</summary><table>{rows}</table></details>" if blocks else ""
    modules = modules_on(problem, placement, place)
    held = "no limit" if math.isinf(budget.limit) else f"{as_bytes(share.free)} free of {as_bytes(budget.limit)}"
    streamed = f", {as_bytes(share.streamed)} to stream" if share.streamed else ""
    working = f", {as_bytes(share.activations)} for activations" if share.activations else ""
    name = f"device {budget.device}" if isinstance(budget.device, int) else budget.device
    text = f"{as_bytes(share.weights)} of weights{streamed}{working}, {held}"
    label = escape(f"{name}: {text}", quote=True)
    return (
        f"<h2>{escape(name)}</h2><p>{escape(modules) or 'nothing'}</p><p>{text}</p>"
        f'<div class="{kind}" role="img" aria-label="{label}" style="width:{100 * whole / widest:.3f}%">'
        f"{''.join(parts)}</div>{listing}"
    )


def _part(name: str, size: float, whole: float, kind: str) -> str:
    if not size:
        return ""
    title = escape(f"{name}: {as_bytes(size)}", quote=True)
    return f'<div class="{kind}" title="{title}" style="width:{100 * size / whole:.3f}%"></div>'
