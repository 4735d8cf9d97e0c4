"""Solver that assigns a model's blocks to devices so that every device's memory limit holds."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Literal, TypeAlias

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.host import as_bytes


class Search:
    """Backtracking search for a way to divide the blocks of a model among devices of limited memory."""

    def __init__(
        self,
        sizes: Sequence[int],
        rooms: dict[int, float],
        allowed: Callable[[list[int], list[int]], bool] | None = None,
        most_steps: int = 50_000,
    ) -> None:
        self.sizes, self.rooms, self.allowed, self.most_steps = sizes, rooms, allowed, most_steps

    def first(self, largest_first: bool = True) -> list[int] | None:
        order = list(range(len(self.sizes)))
        if largest_first:
            order.sort(key=lambda index: -self.sizes[index])
        free = dict(self.rooms)
        left = sum(self.sizes)
        chosen: list[int] = []
        options = [self._rooms_to_try(chosen, not largest_first)] if order else []
        steps = 0
        # Gives up after `most_steps`, as if there were no packing.
        while options and steps < self.most_steps:
            steps += 1
            if not options[-1]:
                options.pop()
                if chosen:
                    size = self.sizes[order[len(chosen) - 1]]
                    free[chosen.pop()] += size
                    left += size
                continue
            # Descend: try the next bin for the current item.
            room = options[-1].pop(0)
            size = self.sizes[order[len(chosen)]]
            if size > free[room] or left > sum(free.values()):  # too large, or the remaining items cannot all fit
                continue
            chosen.append(room)
            if self.allowed is not None and not self.allowed(order[: len(chosen)], chosen):
                chosen.pop()
                continue
            free[room] -= size
            left -= size
            if len(chosen) == len(order):
                return [room for _, room in sorted(zip(order, chosen, strict=True))]
            options.append(self._rooms_to_try(chosen, not largest_first))
        return None if order else []

    def _rooms_to_try(self, chosen: list[int], beside: bool) -> list[int]:
        rooms = list(self.rooms)
        if beside and chosen:
            rooms = [chosen[-1], *(room for room in rooms if room != chosen[-1])]
        return rooms


Device: TypeAlias = "int | str"
Policy: TypeAlias = Literal["sequential", "balanced", "balanced_low_0"]

_MOST_RESERVES = 64
"""Maximum number of reserve sizes to try. Most models have far fewer different block sizes."""

_QUICK, _THOROUGH = 2_000, 50_000
"""Step limits of a repeated or large search, and of a single or small one."""

_FEW = 12


@dataclass(frozen=True)
class Block:
    """Smallest part of a model that a device map places as a whole: a module, or modules that share weights.

    Attributes:
        names: Names of the modules.
        positions: Position of each module in the execution order.
        size: Bytes, shared tensors counted once.
        streamed: Bytes on the executing device at a time if the block is offloaded.
        resident: Bytes always on the executing device if the block is offloaded.
        activations: Peak bytes of activations.
    """

    names: tuple[str, ...]
    positions: tuple[int, ...]
    size: int
    streamed: int
    resident: int = 0
    activations: int = 0


@dataclass(frozen=True)
class Budget:
    """Memory limit of one device in bytes, given to the solver that computes device maps."""

    device: Device
    limit: float  # bytes, or infinity
    kind: Literal["accelerator", "host", "disk"]


@dataclass(frozen=True)
class Placement:
    """Result of the search for a device map: the device of each block of the model.

    Attributes:
        places: Budget index of each block.
        main: Budget index of the device that computes offloaded blocks, or None if no block is offloaded.
    """

    places: tuple[int, ...]
    main: int | None = None


@dataclass(frozen=True)
class Share:
    """Memory in bytes that a model takes on one device, listed by purpose, and the device's limit.

    Attributes:
        weights: Bytes of the blocks on the device.
        streamed: Bytes reserved for offloaded blocks: the largest ones, and resident buffers.
        activations: Peak bytes of activations.
        limit: Memory limit in bytes.
    """

    weights: int = 0
    streamed: int = 0
    activations: int = 0
    limit: float = 0

    @property
    def free(self) -> float:
        return self.limit - self.weights - self.streamed - self.activations


@dataclass(frozen=True)
class Problem:
    blocks: Sequence[Block]  # in execution order
    budgets: Sequence[Budget]  # in the order accelerators, host, disk
    stream_buffers: int = 1  # offloaded blocks that are on the executing device at a time

    @property
    def accelerators(self) -> list[int]:
        return [i for i, each in enumerate(self.budgets) if each.kind == "accelerator" and each.limit > 0]

    @property
    def executors(self) -> list[int]:
        host = [i for i, each in enumerate(self.budgets) if each.kind == "host" and each.limit > 0]
        return [*self.accelerators, *host]

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)

    def computes(self, place: int, main: int | None) -> bool:
        # Blocks on other devices are copied to `main` to run there.
        return self.budgets[place].kind == "accelerator" or place == main

    def shares(self, placement: Placement) -> list[Share]:
        weights, activations = [0] * len(self.budgets), [0] * len(self.budgets)
        largest = resident = 0
        for block, place in zip(self.blocks, placement.places, strict=True):
            weights[place] += block.size
            runs_on: int | None = place
            if not self.computes(place, placement.main):
                runs_on, largest, resident = placement.main, max(largest, block.streamed), resident + block.resident
            if runs_on is not None:
                activations[runs_on] = max(activations[runs_on], block.activations)
        streaming = largest * self.stream_buffers + resident
        streamed = [streaming if place == placement.main else 0 for place in range(len(self.budgets))]
        limits = [budget.limit for budget in self.budgets]
        return [Share(*each) for each in zip(weights, streamed, activations, limits, strict=True)]

    def fits(self, placement: Placement) -> bool:
        kept = any(not self.computes(place, placement.main) for place in placement.places)
        if kept and placement.main is None:
            return False
        return all(share.free >= 0 for share in self.shares(placement))

    def boundaries(self, placement: Placement) -> int:
        order = sorted(
            (position, place)
            for block, place in zip(self.blocks, placement.places, strict=True)
            for position in block.positions
            if block.size
        )
        return sum(one != other for (_, one), (_, other) in pairwise(order))


def solve(
    problem: Problem,
    policy: Policy = "sequential",
    reserve_largest: bool = True,
    fill_gaps: bool = False,
    on_host: bool = True,
) -> Placement | None:
    """Assign each block of a model to a device, so that no device exceeds its memory limit.

    Returns None if no assignment is found. Blocks are offloaded to the CPU or disk only if the accelerators cannot hold
    all of them.
    """
    placement = _on_accelerators(problem, policy, reserve_largest) or _with_offload(problem, on_host)
    if placement is not None and fill_gaps:
        placement = _fill_gaps(problem, placement)
    return placement


def _on_accelerators(problem: Problem, policy: Policy, reserve_largest: bool) -> Placement | None:
    if problem.size > sum(problem.budgets[room].limit for room in problem.accelerators):
        return None
    return _on_accelerators_in_order(problem, policy, reserve_largest) or (
        _by_search(problem, None, problem.accelerators) if problem.accelerators else None
    )


def _on_accelerators_in_order(problem: Problem, policy: Policy, reserve_largest: bool) -> Placement | None:
    limits = {room: problem.budgets[room].limit for room in problem.accelerators}
    if not limits:
        return None
    if policy == "sequential":
        candidates = _sequential(problem, limits, reserve_largest)
    elif policy == "balanced":
        candidates = iter([_balanced(problem, limits)])
    else:
        candidates = _low_zero(problem, limits)
    return next((Placement(places) for places in candidates if places is not None), None)


def balanced_shares(problem: Problem, policy: Policy) -> dict[Device, int] | None:
    placement = _on_accelerators_in_order(problem, policy, reserve_largest=False)
    if placement is None:
        return None
    shares = problem.shares(placement)
    return {problem.budgets[room].device: shares[room].weights for room in problem.accelerators}


def _sequential(problem: Problem, limits: dict[int, float], reserve: bool) -> Iterator[tuple[int, ...] | None]:
    first = next(iter(limits))
    alone = Placement((first,) * len(problem.blocks))
    # First try the whole model on one device, which needs no transfers.
    yield alone.places if problem.fits(alone) else None
    if reserve:
        largest = max((block.streamed + block.resident for block in problem.blocks), default=0)
        places = _complete(_Filling(problem, {**limits, first: limits[first] - largest}).in_order())
        yield places if places is not None and first in places else None
    yield _complete(_Filling(problem, limits).in_order())


def _balanced(problem: Problem, limits: dict[int, float]) -> tuple[int, ...] | None:
    return _smallest_cap(lambda cap: _Filling(problem, {room: min(cap, most) for room, most in limits.items()}), limits)


def _low_zero(problem: Problem, limits: dict[int, float]) -> Iterator[tuple[int, ...] | None]:
    first, *others = limits
    if others:
        yield _balanced(problem, {room: limits[room] for room in others})
    yield _smallest_cap(lambda cap: _Filling(problem, {**limits, first: cap}), {first: limits[first]})


def _smallest_cap(make: Callable[[float], _Filling], limits: dict[int, float]) -> tuple[int, ...] | None:
    low, high = 0, int(min(max(limits.values()), sum(block.size + block.activations for block in make(0).blocks)))
    found = _complete(make(high).in_order())
    # Search for the lowest memory cap per device that fits all blocks, which spreads them evenly.
    while found is not None and low < high:
        middle = (low + high) // 2
        places = _complete(make(middle).in_order())
        if places is None:
            low = middle + 1
        else:
            found, high = places, middle
    return found


def _complete(places: list[int | None]) -> tuple[int, ...] | None:
    found = [place for place in places if place is not None]
    return tuple(found) if len(found) == len(places) else None


class _Filling:
    def __init__(self, problem: Problem, limits: dict[int, float], main: int | None = None, reserve: int = 0) -> None:
        self.blocks, self.limits, self.main = problem.blocks, limits, main
        self.used = dict.fromkeys(limits, 0)
        self.activations = dict.fromkeys(limits, 0)
        if main is not None:
            self.used[main] = reserve * problem.stream_buffers + sum(block.resident for block in self.blocks)
            self.activations[main] = max((block.activations for block in self.blocks), default=0)

    def has_room(self, room: int, block: Block) -> bool:
        # A block computed in place needs no resident bytes of its own, which `used` includes.
        returned = block.resident if room == self.main else 0
        working = max(self.activations[room], block.activations)
        return self.used[room] + block.size - returned + working <= self.limits[room]

    def put(self, room: int, block: Block) -> None:
        self.used[room] += block.size
        self.activations[room] = max(self.activations[room], block.activations)
        if self.main is not None:
            self.used[self.main] -= block.resident

    def in_order(self) -> list[int | None]:
        rooms, current = list(self.limits), 0
        places: list[int | None] = []
        for block in self.blocks:
            while current < len(rooms) and not self.has_room(rooms[current], block):
                current += 1
            place = rooms[current] if current < len(rooms) else None
            if place is not None:
                self.put(place, block)
            places.append(place)
        return places

    def around(self, fixed: dict[int, int]) -> list[int | None]:
        for index, room in fixed.items():
            self.put(room, self.blocks[index])
        places: list[int | None] = []
        current = next(iter(self.limits))
        for index, block in enumerate(self.blocks):
            place = fixed.get(index)
            if place is None:
                rooms = (current, *self.limits)
                place = next((room for room in rooms if self.has_room(room, block)), None)
                if place is not None:
                    self.put(place, block)
            current = current if place is None else place
            places.append(place)
        return places


def _with_offload(problem: Problem, on_host: bool) -> Placement | None:
    mains = problem.executors if on_host else problem.accelerators or problem.executors
    reserves = _reserves(problem)
    # For plain dicts, `dispatch_model` uses the first accelerator as the main device, so prefer such placements.
    for expected, main, in_order in product((True, False), mains, (True, False)):
        rooms = [room for room in problem.accelerators if room >= main or not expected]
        plans = [_streaming(problem, main, reserve, in_order, rooms) for reserve in reserves]
        found = [plan for plan in plans if plan is not None and problem.fits(plan)]
        found = [plan for plan in found if not expected or _first_accelerator(problem, plan) == main]
        if found:
            # Most bytes computed without copies first, then fewest changes of device.
            return max(found, key=lambda plan: (_computed_in_place(problem, plan), -problem.boundaries(plan)))
    places = [i for i, each in enumerate(problem.budgets) if each.limit > 0]
    searched = (_by_search(problem, main, places) for main in mains)
    return next((placement for placement in searched if placement is not None), None)


def _reserves(problem: Problem) -> list[int]:
    sizes = sorted({block.streamed for block in problem.blocks} | {0})
    if len(sizes) <= _MOST_RESERVES:
        return sizes
    step = len(sizes) / _MOST_RESERVES
    return sorted({*(sizes[int(number * step)] for number in range(_MOST_RESERVES)), sizes[-1]})


def _first_accelerator(problem: Problem, placement: Placement) -> int | None:
    accelerators = [place for place in placement.places if problem.budgets[place].kind == "accelerator"]
    host = placement.main is not None and problem.budgets[placement.main].kind == "host"
    return accelerators[0] if accelerators else placement.main if host else None


def _computed_in_place(problem: Problem, placement: Placement) -> int:
    placed = zip(problem.blocks, placement.places, strict=True)
    return sum(block.size for block, place in placed if problem.computes(place, placement.main))


def _streaming(problem: Problem, main: int, reserve: int, in_order: bool, rooms: Sequence[int]) -> Placement | None:
    # `main` keeps room for copies of offloaded blocks.
    limits = {room: problem.budgets[room].limit for room in sorted({*rooms, main})}
    filling = _Filling(problem, limits, main, reserve)
    # Blocks above the reserve cannot be offloaded, so they are placed first.
    large = [index for index, block in enumerate(problem.blocks) if block.streamed > reserve]
    if large and not in_order:
        room_for = {**limits, main: limits[main] - reserve * problem.stream_buffers}
        packed = Search([problem.blocks[index].size for index in large], room_for, most_steps=_QUICK).first()
        if packed is None:
            return None
        places = filling.around(dict(zip(large, packed, strict=True)))
    else:
        places = filling.in_order()
    stores = {i: each.limit for i, each in enumerate(problem.budgets) if i != main and each.kind != "accelerator"}
    for index, block in enumerate(problem.blocks):
        if places[index] is None:
            store = next((i for i, free in stores.items() if block.size <= free), None)
            if store is None:
                return None
            stores[store] -= block.size
            places[index] = store
    whole = _complete(places)
    return None if whole is None else Placement(whole, main)


def _by_search(problem: Problem, main: int | None, places: list[int]) -> Placement | None:
    heavy = [index for index, block in enumerate(problem.blocks) if block.size]
    blocks = [problem.blocks[index] for index in heavy]
    part = replace(problem, blocks=blocks)

    def fits(tried: list[int], chosen: list[int]) -> bool:
        some = replace(problem, blocks=[blocks[index] for index in tried])
        return some.fits(Placement(tuple(chosen), main))

    limits = {place: problem.budgets[place].limit for place in places}
    # Without offloading and activations, sizes alone decide, which the search checks by itself.
    only_sizes = main is None and not any(block.activations for block in blocks)
    steps = _THOROUGH if only_sizes or len(blocks) <= _FEW else _QUICK
    search = Search([block.size for block in blocks], limits, None if only_sizes else fits, steps)
    solutions = [
        Placement(tuple(found), main) for found in (search.first(), search.first(largest_first=False)) if found
    ]
    if not solutions:
        return None
    # Fewer changes of device mean fewer transfers during a forward.
    best = min(solutions, key=part.boundaries)
    by_index = dict(zip(heavy, best.places, strict=True))
    current = best.places[0] if best.places else places[0]
    # Blocks without bytes fit anywhere, so they follow their predecessor.
    everywhere = []
    for index in range(len(problem.blocks)):
        current = by_index.get(index, current)
        everywhere.append(current)
    whole = Placement(tuple(everywhere), main)
    return whole if problem.fits(whole) else None


def _fill_gaps(problem: Problem, placement: Placement) -> Placement:
    for index, block in enumerate(problem.blocks):
        if not block.size or problem.computes(placement.places[index], placement.main):
            continue
        for room in problem.accelerators:
            places = (*placement.places[:index], room, *placement.places[index + 1 :])
            moved = Placement(places, placement.main)
            if problem.fits(moved):
                placement = moved
                break
    return placement


def no_fit_error(problem: Problem, unsplit: Container[str]) -> ConfigurationError:
    ways = "Raise a budget, add another device, or load the model in a smaller dtype"
    largest = max(problem.blocks, key=lambda block: block.streamed + block.activations)
    can_split = any(name not in unsplit for name in largest.names)
    split = ", or pass no_split_module_classes=[] so that blocks may be split" if can_split else ""
    total, room = problem.size, sum(budget.limit for budget in problem.budgets)
    if total > room:
        return ConfigurationError(
            f"The model takes {as_bytes(total)}, but the budgets hold {as_bytes(room)} in all: "
            f'{as_bytes(total - room)} are missing. {ways}, or remove the limit of "disk".',
        )
    computing = [problem.budgets[index] for index in problem.executors]
    needed = largest.streamed + largest.activations + sum(block.resident for block in problem.blocks)
    has = max(computing, key=lambda budget: budget.limit, default=None)
    if has is None or needed > has.limit:
        limit = 0 if has is None else has.limit
        where = "no device that can compute has a budget" if has is None else f"the largest budget is {has.device!r}"
        return ConfigurationError(
            f"{largest.names[0] or 'The model'!r} takes {as_bytes(needed)} on the device that computes it, but {where}"
            f", {as_bytes(limit)}: {as_bytes(needed - limit)} are missing. Give one device at least {int(needed)} bytes"
            f'{split}, or add "cpu" with that much to max_memory.',
        )
    return ConfigurationError(
        f"The model takes {as_bytes(total)}, and its blocks (the largest is {largest.names[0]!r}, "
        f"{as_bytes(largest.size)}) do not fit into the budgets: "
        + ", ".join(f"{each.device!r} {as_bytes(each.limit)}" for each in problem.budgets)
        + f". {ways}{split}.",
    )
