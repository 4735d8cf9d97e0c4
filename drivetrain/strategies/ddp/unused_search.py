"""Whether DDP's search for parameters that take no part in a loss finds any, what it costs, and the end of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.runtime.errors import some_of
from drivetrain.runtime.logging import get_logger

logger = get_logger(__name__)

WATCHED_STEPS = 10  # torch 2.13 notes what a search found for as many, then for each hundredth
_UNTIMED_STEPS = 2  # the first ones, in which buckets are rebuilt


class UnusedSearch:
    """Watches the search in the first steps, and warns once where a run does without it.

    Nothing is exchanged for it: the reducer sums over processes which parameters were used, for its own sake.

    Args:
        reducer: DDP's.
        record: Returns DDP's own record, which holds what the search of this process found.
        named: The names of parameters, by their places in the reducer.
        device: Where processes exchange what they found.
    """

    def __init__(
        self,
        reducer: Any,
        record: Callable[[], dict[str, Any]],
        named: Callable[[Sequence[int]], list[str]],
        device: torch.device,
    ) -> None:
        self._reducer, self._record, self._named, self._device = reducer, record, named, device
        self._fewest: Tensor | None = None  # processes that used each parameter, over the steps
        self._most: Tensor | None = None
        self._searches: list[float] = []  # seconds
        self._began: list[float] = []
        self._found_here = False

    def search(self, forward_ended: Callable[[Any], Any], output: Any) -> Any:
        """Run what searches the graph of an output, and time it.

        Args:
            forward_ended: Torch's own handling of a forward's output.
            output: The output.

        Returns:
            What it returned.
        """
        start = perf_counter()
        handled = forward_ended(output)
        self._searches.append(perf_counter() - start)
        self._began.append(start)
        return handled

    def note(self) -> bool:
        """Take up what the last step used, as the next one begins; returns whether enough steps were seen."""
        if not self._searches:
            return False
        used = self._reducer._get_local_used_map()
        self._fewest = used.clone() if self._fewest is None else self._fewest.minimum(used)
        self._most = used.clone() if self._most is None else self._most.maximum(used)
        # A window's last micro-batch may leave out what an earlier one used, and that is what the search is for.
        self._found_here |= bool(self._record().get("unused_parameter_size", 0))
        return len(self._searches) >= WATCHED_STEPS

    def never_used(self) -> list[int] | None:
        """The places of the parameters that no process used in any step; None where processes or steps differed."""
        assert self._fewest is not None
        assert self._most is not None
        fewest, most, everyone = self._fewest.tolist(), self._most.tolist(), dist.get_world_size()
        if any(count not in (0, everyone) for count in fewest + most) or fewest != most:
            return None
        return [index for index, count in enumerate(most) if not count]

    def settle(self) -> list[int] | None:
        """Decide, together with all processes, whether the search may end.

        Returns:
            The places of the parameters that are never used; None where steps have to be searched further.
        """
        never = self.never_used()
        if never is None:
            return None
        # Without unused parameters a search that found some was of a window's last micro-batch.
        needed = torch.tensor(float(self._found_here and not never), device=self._device)
        dist.all_reduce(needed)
        if needed.item():
            return None
        found = f"the same ones never did, and are left out: {some_of(self._named(never))}" if never else "all did"
        logger.info(
            f'find_unused_parameters="auto": of the parameters that take part in a loss, in each of the first '
            f"{WATCHED_STEPS} steps and on all processes, {found}. DDP does not search any more. {self._cost()}"
        )
        return never

    def finish(self) -> None:
        """Warn where all parameters were used in each step, or where the same ones never were."""
        never = self.never_used()
        if never is None:
            return
        if never:
            logger.warning(
                f"find_unused_parameters=True: in each of the first {WATCHED_STEPS} steps the parameters that took no "
                f"part in a loss were the same on all processes: {some_of(self._named(never))}. Freeze them "
                f'(requires_grad_(False)) and leave the option out, or give DDP(find_unused_parameters="auto"), which '
                f"ends the search where it finds that. "
                f"{self._cost()}"
            )
        elif not self._found_here:
            logger.warning(
                f"find_unused_parameters=True: all parameters took part in the loss in each of the first "
                f"{WATCHED_STEPS} steps, on all processes. Leave the option out, unless later steps use fewer. "
                f"{self._cost()}"
            )

    def _cost(self) -> str:
        searched = statistics.median(self._searches[_UNTIMED_STEPS:])
        steps = [end - start for start, end in zip(self._began, self._began[1:], strict=False)]
        step = statistics.median(steps[_UNTIMED_STEPS:])
        return (
            f"The search takes {1000 * searched:.2f} ms of a step of {1000 * step:.2f} ms ({100 * searched / step:.1f} "
            "%; medians, measured on this process)."
        )
