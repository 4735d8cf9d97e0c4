"""An exhaustive search for a place for each of a few things."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Search:
    """Puts things of given sizes into rooms of given sizes, by trying; exact for few things.

    Args:
        sizes: The sizes of the things.
        rooms: The rooms, those that are tried first first, and what each holds.
        allowed: Whether things (their indices) may be in rooms; None where only sizes count. What is not allowed for
            some is not for more.
        most_steps: After how many attempts the search gives up.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        rooms: dict[int, float],
        allowed: Callable[[list[int], list[int]], bool] | None = None,
        most_steps: int = 50_000,
    ) -> None:
        self.sizes, self.rooms, self.allowed, self.most_steps = sizes, rooms, allowed, most_steps

    def first(self, largest_first: bool = True) -> list[int] | None:
        """The first solution, the rooms of things in their order; None if there is none, or if it is not soon found.

        Args:
            largest_first: Place large things first, which finds one sooner; else each beside the one before it, which
                finds one with longer runs.
        """
        order = list(range(len(self.sizes)))
        if largest_first:
            order.sort(key=lambda index: -self.sizes[index])
        free = dict(self.rooms)
        left = sum(self.sizes)
        chosen: list[int] = []
        options = [self._rooms_to_try(chosen, not largest_first)] if order else []
        steps = 0
        while options and steps < self.most_steps:
            steps += 1
            if not options[-1]:
                options.pop()
                if chosen:
                    size = self.sizes[order[len(chosen) - 1]]
                    free[chosen.pop()] += size
                    left += size
                continue
            room = options[-1].pop(0)
            size = self.sizes[order[len(chosen)]]
            if size > free[room] or left > sum(free.values()):
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
