"""Device maps as a page: a bar for each device, as long as what it has, and the blocks in it."""

from __future__ import annotations

import math
from html import escape

from drivetrain.inference.shown_map import modules_on
from drivetrain.inference.solver import Placement, Problem, Share
from drivetrain.runtime.byte_sizes import as_bytes

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
    ("stream", "room to bring what is kept elsewhere"),
    ("work", "activations"),
    ("room", "free"),
)


def as_page(problem: Problem, placement: Placement) -> str:
    """A page of HTML that draws a map.

    Args:
        problem: The blocks and the budgets.
        placement: Where the blocks go.
    """
    shares = problem.shares(placement)
    # A disk has so much more than all others that they would not be seen beside it.
    limits = [share.limit for share in shares if share.limit <= problem.size] or [problem.size]
    widest = max(1, *limits, *map(_used, shares))
    devices = "".join(_device(problem, placement, place, share, widest) for place, share in enumerate(shares))
    key = "".join(f'<li><i class="{kind}"></i>{text}</li>' for kind, text in _KEY)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Device map</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>Device map</h1><p>{as_bytes(problem.size)} in all, "
        f"{problem.boundaries(placement)} boundaries between devices. Bars are as long as what devices have; a "
        "dotted end says that there is more.</p>"
        f'<ul class="key">{key}</ul>{devices}</body></html>\n'
    )


def _used(share: Share) -> float:
    return share.weights + share.streamed + share.activations


def _device(problem: Problem, placement: Placement, place: int, share: Share, widest: float) -> str:
    """The bar of one device, what it has, and a list of its blocks."""
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
