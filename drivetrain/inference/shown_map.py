"""Device maps for people: a table, and the reason for one block."""

from __future__ import annotations

import math

from drivetrain.inference.solver import Block, Placement, Problem, Share
from drivetrain.runtime.byte_sizes import as_bytes

_MOST_NAMES = 4


def as_table(problem: Problem, placement: Placement) -> str:
    """A line for each device: its modules, bytes, and what is left of it."""
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
        lines.append("no room to fetch a block ahead: copies and computing take turns")
    lines.append(f"{problem.boundaries(placement)} boundaries between devices, {as_bytes(problem.size)} in all")
    return "\n".join(line.rstrip() for line in lines)


def has_no_room_ahead(problem: Problem, placement: Placement) -> bool:
    """Whether an accelerator computes what is kept elsewhere, and has room for one such block at a time alone."""
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
    """The runs of modules on a device, such as `wte, wpe, h.0 - h.21`."""
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
    texts = [run[0] if len(run) == 1 else f"{run[0]} - {run[-1]}" for run in runs]
    if len(texts) > _MOST_NAMES:
        texts = [*texts[: _MOST_NAMES - 1], f"{len(texts) - _MOST_NAMES + 1} more"]
    return ", ".join(texts)


def explain(problem: Problem, placement: Placement, block: Block) -> str:
    """Why a block is where it is, in a sentence or two."""
    place = placement.places[problem.blocks.index(block)]
    shares = problem.shares(placement)
    budget = problem.budgets[place]
    first = block.names[0] or "the whole model"
    text = f"{first} ({as_bytes(block.size)}) is on {budget.device}"
    if len(block.names) > 1:
        text += f", with {', '.join(block.names[1:])}, which it shares weights with"
    before = [room for room in problem.accelerators if room < place]
    reasons = [_room_left(problem.budgets[room].device, shares[room], block) for room in before]
    if not problem.computes(place, placement.main):
        main = problem.budgets[placement.main].device if placement.main is not None else None
        text += f", and is brought to {main} when it runs"
        text += ", with no room to fetch it ahead" if has_no_room_ahead(problem, placement) else ""
    if reasons:
        text += ": " + "; ".join(reasons)
    return text + "."


def _room_left(device: object, share: Share, block: Block) -> str:
    left = f"{device} has {as_bytes(max(0, share.free))} left of {_bytes(share.limit)}"
    if share.streamed:
        left += f", with {as_bytes(share.streamed)} kept free for what is brought there"
    if share.free >= block.size:
        left += ", and holds what runs before it, or its even share"
    return left
