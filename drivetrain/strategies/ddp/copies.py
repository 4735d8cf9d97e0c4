"""The copies of a model that the processes hold: what optimizers step of them, and whether they stay the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.runtime.collectives import gather, reduce
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.ddp.wrapper import DistributedDataParallel
from drivetrain.strategies.gradients import average_gradients

_TOLERANCE = 1e-5  # of the norm: machines that round differently are no fault
_LARGEST = torch.finfo(torch.float32).max

_ADVICE = {
    "gradient": (
        "Each process would train a model of its own. Most often a backward was not run by the Trainer or the "
        "Accelerator: call self.manual_backward(loss) in a task that optimizes by hand, accelerator.backward(loss) in "
        "a loop, and one backward for each forward of the prepared model, outside of no_sync."
    ),
    "value": (
        "The processes have trained different models since the last check, or only some have changed a parameter. "
        "Change parameters on all processes alike, and compute gradients by manual_backward or accelerator.backward."
    ),
}


class DriftCheck:
    """Compares gradients and parameters between processes: before the first step, then once in many steps.

    Of each tensor the norm and the sum are compared, in one all-reduce of a few numbers for each.

    Args:
        every: Steps of an optimizer from one check to the next; 0 for none.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._left: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def is_due(self, optimizer: Optimizer) -> bool:
        """Count a step of an optimizer. Returns whether to compare before it."""
        left = self._left.get(optimizer, 0)
        self._left[optimizer] = self.every - 1 if left <= 0 else left - 1
        return left <= 0

    def restart(self, optimizer: Optimizer) -> None:
        """Compare before the next step of an optimizer, which trains other parameters from now on."""
        self._left.pop(optimizer, None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which processes may take different numbers of steps, so that nothing is compared."""
        every, self.every = self.every, 0
        try:
            yield
        finally:
            self.every = every

    def compare(self, named: Sequence[tuple[str, nn.Parameter]], gradients: bool = True) -> None:
        """Compare parameters, and their gradients, between all processes.

        Args:
            named: The names and the parameters, the same on all processes.
            gradients: Whether to compare their gradients.

        Raises:
            ConfigurationError: On all processes, naming the first that differs, and the ranks.
        """
        if not named:
            return
        compared = [parameter.grad for _, parameter in named] if gradients else []
        compared += [parameter.detach() for _, parameter in named]
        own = _prints(compared, named[0][1].device)
        most = reduce(torch.cat([own, -own]), "max")
        different = _differ(most[: len(own)], -most[len(own) :])
        if not bool(different.any()):
            return
        place = int(different.nonzero()[0])
        what = "gradient" if gradients and place < len(named) else "value"
        everyone = gather(own[place][None])
        ranks = [rank for rank, each in enumerate(everyone) if bool(_differ(each[None], everyone[:1]).any())]
        raise ConfigurationError(
            f"The {what} of {named[place % len(named)][0]} on rank{'s' if ranks[1:] else ''} "
            f"{', '.join(map(str, ranks))} is another than on rank 0. {_ADVICE[what]} DDP(check_copies_every=0) leaves "
            "this check out.",
            code="DT-063",
        )


@dataclass
class Held:
    """What an optimizer holds of the wrapped modules.

    Attributes:
        found_at: How many parameters the optimizer and how many reducers the modules had when it was found.
        wrapped: The modules whose parameters it holds.
        beside: The parameters that no module reduces.
    """

    found_at: tuple[int, int]
    wrapped: tuple[DistributedDataParallel, ...]
    beside: tuple[nn.Parameter, ...]


class Copies:
    """The wrapped modules, of which every process has a copy, and the optimizers that step them.

    Args:
        every: Steps from one comparison of the copies to the next.

    Attributes:
        wrapped: The wrapped modules.
        are_several: Whether there are other processes.
    """

    def __init__(self, every: int) -> None:
        self.wrapped: WeakSet[DistributedDataParallel] = WeakSet()
        self._held: WeakKeyDictionary[Optimizer, Held] = WeakKeyDictionary()
        self._check = DriftCheck(every)
        self.are_several = False
        self.pause = self._check.paused

    def add(self, wrapped: DistributedDataParallel) -> None:
        """Take a module that was wrapped."""
        self.wrapped.add(wrapped)
        self._held.clear()

    def clear(self) -> None:
        """Let all modules go."""
        self.wrapped.clear()
        self._held.clear()

    def held_by(self, optimizer: Optimizer) -> Held:
        """Find what an optimizer holds, again if it has other groups or a module another reducer."""
        known = self._held.get(optimizer)
        reducers = 0
        for one in self.wrapped if known is None else known.wrapped:
            reducers += one.reducers_built
        at = sum(len(group["params"]) for group in optimizer.param_groups), reducers
        if known is None or known.found_at != at:
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            ids = set(map(id, held))
            wrapped = tuple(one for one in self.wrapped if any(id(p) in ids for p in one.parameters()))
            if known is None or known.found_at[0] != at[0]:
                self._check.restart(optimizer)
            covered = {id(parameter) for one in wrapped for parameter in one.covered()}
            beside = tuple(parameter for parameter in held if id(parameter) not in covered)
            known = Held((at[0], sum(one.reducers_built for one in wrapped)), wrapped, beside)
            self._held[optimizer] = known
        return known

    def average_beside(self, optimizers: Sequence[Optimizer]) -> None:
        """Average the gradients that no module's backward has: of groups and layers that were added later."""
        for optimizer in optimizers if self.are_several else ():
            held = self.held_by(optimizer)
            if held.beside and all(one.require_backward_grad_sync for one in held.wrapped):
                average_gradients([parameter for parameter in held.beside if parameter.requires_grad])

    def must_compare(self, optimizer: Optimizer) -> bool:
        """Count a step of an optimizer. Returns whether to compare before it."""
        if not (self.are_several and self._check.every and self._check.is_due(optimizer)):
            return False
        # Within no_sync, as of LocalSGD, copies differ on purpose.
        return all(one.require_backward_grad_sync and not one.has_own_hook for one in self.held_by(optimizer).wrapped)

    def compare(self, optimizer: Optimizer) -> None:
        """Compare an optimizer's gradients and parameters between processes."""
        held = self.held_by(optimizer)
        names = {id(parameter): name for one in held.wrapped for name, parameter in one.named()}
        compared = {id(parameter) for one in held.wrapped for parameter in one.reduced}
        compared |= {id(parameter) for parameter in held.beside if parameter.requires_grad}
        self._check.compare(
            [
                (names.get(id(each), f"a parameter of shape {tuple(each.shape)} beside the model"), each)
                for group in optimizer.param_groups  # whose order is the same on all processes
                for each in group["params"]
                if id(each) in compared
            ]
        )

    def compare_weights(self, model: nn.Module) -> None:
        """Compare the parameters of a module between processes, which a checkpoint takes from any of them."""
        if not (self._check.every and isinstance(model, DistributedDataParallel)):
            return
        if model.require_backward_grad_sync and not model.has_own_hook:
            reduced = set(map(id, model.reduced))
            named = [(name, parameter) for name, parameter in model.named() if id(parameter) in reduced]
            self._check.compare(named, gradients=False)

    def comparing_once(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure after whose first run the gradients are compared."""
        waits = [True]

        def run() -> Any:
            result = closure()
            if waits:
                waits.clear()
                self.compare(optimizer)
            return result

        return run


def _prints(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """The norm of each tensor, and its sum by the root of its size, so that the norm bounds both; -1 if it is None."""
    absent = torch.full((), -1.0, device=device)
    norms, sums, roots = [], [], []
    for tensor in tensors:
        if tensor is None:
            norms.append(absent)
            sums.append(absent)
            roots.append(1.0)
            continue
        values = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor
        values = torch.view_as_real(values) if values.is_complex() else values
        wide = torch.float64 if values.dtype is torch.float64 else torch.float32  # torch narrows no norm
        try:
            norm, total = torch.linalg.vector_norm(values, dtype=wide), values.sum(dtype=wide)
        except (NotImplementedError, RuntimeError):  # of a tensor's own class, which lacks the operation
            norm = total = absent
        norms.append(norm.float().to(device))
        sums.append(total.float().to(device))
        roots.append(max(1, values.numel()) ** 0.5)
    prints = torch.stack([torch.stack(norms), torch.stack(sums) / torch.tensor(roots, device=device)], dim=1)
    return prints.nan_to_num(_LARGEST, _LARGEST, -_LARGEST)


def _differ(first: Tensor, second: Tensor) -> Tensor:
    bound = _TOLERANCE * torch.maximum(first[:, :1].abs(), second[:, :1].abs())
    return ((first - second).abs() > bound).any(dim=1)
