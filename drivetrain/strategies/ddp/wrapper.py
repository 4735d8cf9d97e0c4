"""Torch's DDP wrapper, extended to follow changes of `requires_grad` and to name parameters in errors."""

from __future__ import annotations

import inspect
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import parallel
from torch.optim import Optimizer

from drivetrain.runtime.collectives import gather, reduce
from drivetrain.runtime.errors import ConfigurationError, some_of
from drivetrain.runtime.logging import get_logger
from drivetrain.strategies.base import ReducingWrapper, average_gradients, zero_loss_of
from drivetrain.strategies.step_module import StepModule

# Search for unused parameters


logger = get_logger(__name__)

WATCHED_STEPS = 10  # torch 2.13 records its search for this many steps, and then in each hundredth
_UNTIMED_STEPS = 2  # DDP rebuilds its buckets in the first steps


class UnusedSearch:
    """Detector that checks over several steps whether DDP needs the costly `find_unused_parameters`."""

    def __init__(
        self,
        reducer: Any,
        record: Callable[[], dict[str, Any]],
        named: Callable[[Sequence[int]], list[str]],
        device: torch.device,
    ) -> None:
        self._reducer, self._record, self._named, self._device = reducer, record, named, device
        # Smallest and largest number of processes that used each parameter in a step.
        self._fewest: Tensor | None = None
        self._most: Tensor | None = None
        self._searches: list[float] = []  # seconds
        self._began: list[float] = []
        self._found_here = False

    def search(self, forward_ended: Callable[[Any], Any], output: Any) -> Any:
        start = perf_counter()
        handled = forward_ended(output)
        self._searches.append(perf_counter() - start)
        self._began.append(start)
        return handled

    def note(self) -> bool:
        # True after enough steps.
        if not self._searches:
            return False
        used = self._reducer._get_local_used_map()
        self._fewest = used.clone() if self._fewest is None else self._fewest.minimum(used)
        self._most = used.clone() if self._most is None else self._most.maximum(used)
        # The last micro-batch may not use a parameter that an earlier one used. The search is necessary then.
        self._found_here |= bool(self._record().get("unused_parameter_size", 0))
        return len(self._searches) >= WATCHED_STEPS

    def never_used(self) -> list[int] | None:
        # Indices of the parameters that no step used, or None if steps or processes used different ones.
        assert self._fewest is not None
        assert self._most is not None
        fewest, most, everyone = self._fewest.tolist(), self._most.tolist(), dist.get_world_size()
        if any(count not in (0, everyone) for count in fewest + most) or fewest != most:
            return None
        return [index for index, count in enumerate(most) if not count]

    def settle(self) -> list[int] | None:
        # None if DDP must continue to search for unused parameters in each step.
        never = self.never_used()
        if never is None:
            return None
        # If all parameters are used, a search that found unused ones was in the last micro-batch of a step.
        needed = torch.tensor(float(self._found_here and not never), device=self._device)
        dist.all_reduce(needed)
        if needed.item():
            return None
        found = f"{some_of(self._named(never))} were unused" if never else "all parameters were used"
        logger.info(
            f'find_unused_parameters="auto": in each of the first {WATCHED_STEPS} steps, on all processes, {found}. '
            f"DDP ends the search and excludes unused parameters. {self._cost()}"
        )
        return never

    def finish(self) -> None:
        never = self.never_used()
        if never is None:
            return
        if never:
            logger.warning(
                f"find_unused_parameters=True: in each of the first {WATCHED_STEPS} steps, the same parameters were "
                f"unused on all processes: {some_of(self._named(never))}. Freeze them (requires_grad_(False)) and "
                'remove the option, or use DDP(find_unused_parameters="auto"), which ends the search in this case. '
                f"{self._cost()}"
            )
        elif not self._found_here:
            logger.warning(
                "find_unused_parameters=True: the loss depended on all parameters in each of the first "
                f"{WATCHED_STEPS} steps, on all processes. Remove the option, unless later steps use fewer "
                f"parameters. {self._cost()}"
            )

    def _cost(self) -> str:
        searched = statistics.median(self._searches[_UNTIMED_STEPS:])
        steps = [end - start for start, end in zip(self._began, self._began[1:], strict=False)]
        step = statistics.median(steps[_UNTIMED_STEPS:])
        return (
            f"The search takes {1000 * searched:.2f} ms of a step of {1000 * step:.2f} ms ({100 * searched / step:.1f} "
            "%; medians, measured on this process)."
        )


# Torch 2.13 renamed the option and warns if the old name is used.
BROADCAST_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(parallel.DistributedDataParallel).parameters
    else "broadcast_buffers"
)

_REQUIRES_GRAD = attrgetter("requires_grad")
_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_INDICES = re.compile(r"did not receive grad for rank \d+:((?: ?\d+)+)")


class DistributedDataParallel(parallel.DistributedDataParallel, ReducingWrapper):
    """Torch's `DistributedDataParallel`, extended to let parameters be frozen and unfrozen during training.

    Torch reduces the parameters that required gradients at construction, and ignores later changes. This class rebuilds
    the reducer if other parameters require gradients.

    Attributes:
        agree: Function called with a description before the reducer is rebuilt. Raises if processes differ.
        reducers_built: Number of reducers built so far.
        reduced: Parameters whose gradients are averaged, in the reducer's order.
    """

    agree: Callable[[str], None] | None = None
    reducers_built = 0
    reduced: tuple[nn.Parameter, ...] = ()
    _search: UnusedSearch | None = None
    _watches = _ends_search = False
    _hook: tuple[Any, Callable[..., Any]] | None = None
    _register: Callable[[DistributedDataParallel], None] | None = None
    _left_out: dict[str, Any] | None = None  # names of the excluded parameters, and the hooks on them
    _idles = False  # True during a forward pass with nothing to train

    def _ddp_init_helper(self, parameters: Any, *options: Any) -> None:
        super()._ddp_init_helper(parameters, *options)  # type: ignore[no-untyped-call]
        self.reduced = tuple(parameters)
        self.reducers_built += 1
        self._watched = tuple(self.module.parameters())
        self._trained = list(map(_REQUIRES_GRAD, self._watched))
        # `requires_grad` flags of the micro-batches since the last reduction.
        self._unsynced: set[tuple[bool, ...]] = set()

    def follow_trained(self) -> bool:
        # Returns False if all parameters are frozen. With a search for unused parameters, frozen ones stay in the
        # reducer, since the search finds them unused.
        if list(map(_REQUIRES_GRAD, self._watched)) == self._trained:
            return True
        trained = self._build_params_for_reducer()[0]  # type: ignore[no-untyped-call]
        if not trained:
            return False
        known = {id(parameter) for parameter in self.reduced}
        stays = self.find_unused_parameters and not self.static_graph
        if not stays or any(id(parameter) not in known for parameter in trained):
            self._rebuild(trained, keeps=stays)
        self._trained = list(map(_REQUIRES_GRAD, self._watched))  # rebuilding may have updated `_watched`
        return True

    def _rebuild(self, trained: Sequence[nn.Parameter], keeps: bool) -> None:
        self.require_reduced()
        known = {id(parameter) for parameter in self.reduced}
        now = {id(parameter) for parameter in trained}
        # Reducers with different parameters would hang or mix up gradients, so the processes compare first.
        if self.agree is not None:
            added = self._named(parameter for parameter in trained if id(parameter) not in known)
            frozen = self._named(parameter for parameter in self.reduced if id(parameter) not in now)
            self.agree(f"requires_grad(True: {some_of(added) or None}, False: {some_of(frozen) or None})")
        frozen_since = [parameter for parameter in self.reduced if id(parameter) not in now]
        for name, handle in (self._left_out or {}).items():
            self.parameters_to_ignore.discard(name)
            handle.remove()
        self._left_out = None
        if self._ends_search:  # search the parameters that are trained now again
            self.find_unused_parameters = True
        # Torch builds the reducer from the parameters that require gradients at this moment.
        with _requiring_gradients(frozen_since if keeps else ()):
            self._build_reducer()
        if self._watches:
            self.watch_search(self._ends_search)

    def watch_search(self, ends: bool) -> None:
        # If DDP need not search for unused parameters, the search is turned off (with `ends`), or a warning is logged.
        # Created again for each reducer, since it reads the reducer's usage counts.
        device = next(self.module.parameters()).device
        self._search = UnusedSearch(self.reducer, self._get_ddp_logging_data, self._names_of, device)
        self._ends_search, self._watches = ends, True

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a DDP communication hook.

        It stays registered if the gradient reducer is built again.
        """
        super().register_comm_hook(state, hook)
        self._hook = (state, hook)

    def register_with(self, register: Callable[[DistributedDataParallel], None]) -> None:
        # Called again whenever DDP is rebuilt, because the hook's state may depend on the buckets.
        register(self)
        self._register = register

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {name: value for name, value in state.items() if name not in ("agree", "_search")}

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._end_idle_forward()
        if self._reduces():
            self._begin_reduction()
        elif torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._unsynced.add(tuple(map(_REQUIRES_GRAD, self._watched)))
        try:
            prepared = super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise self._explained(error) from error
        search = self._search
        # A step's usage is read when the next forward pass begins, since backward calls no method of this class.
        if search is not None and self._reduces() and search.note():
            self._search = None
            if not self._ends_search:
                search.finish()
            elif (never := search.settle()) is not None:
                self._end_search(never)
        return prepared

    def _end_search(self, never: Sequence[int]) -> None:
        # An excluded parameter has no gradient. If a later loss depends on it, a hook raises an error, because its
        # gradient would not be averaged.
        left_out = [self.reduced[place] for place in never]
        hooks = {id(each): partial(_refuse, name) for each, name in zip(left_out, self._named(left_out), strict=True)}
        self._left_out = {
            f"{prefix}.{name}": parameter.register_hook(hooks[id(parameter)])
            for prefix, module in self.module.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            if id(parameter) in hooks and parameter.requires_grad
        }
        self.parameters_to_ignore.update(self._left_out)
        self.find_unused_parameters = False
        self._build_reducer()
        self.reducer.prepare_for_forward()

    def _build_reducer(self) -> None:
        # Deleting the reducer removes its hooks. Torch builds a new reducer in the same way after unpickling.
        del self.reducer, self.logger
        parameters, sparse = self._build_params_for_reducer()  # type: ignore[no-untyped-call]
        names = self._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
        # Static mode must be set again on the new reducer, so it is off while the reducer is built.
        static, self.static_graph = self.static_graph, False
        self._has_rebuilt_buckets = False
        self._ddp_init_helper(parameters, sparse, names, static)
        if static:
            self._set_static_graph()  # type: ignore[no-untyped-call]
        if self._register is not None:
            self._register(self)
        elif self._hook is not None:
            super().register_comm_hook(*self._hook)

    def _post_forward(self, output: Any) -> Any:
        handle = super()._post_forward
        try:
            if self._search is None or not self._reduces():
                return handle(output)  # type: ignore[no-untyped-call]
            return self._search.search(handle, output)
        finally:
            self._end_idle_forward()

    def _begin_reduction(self) -> None:
        accumulated: list[nn.Parameter] = []
        if self._unsynced and self._unsynced != {tuple(map(_REQUIRES_GRAD, self._watched))}:
            columns = zip(*self._unsynced, strict=True)
            accumulated = [each for each, flags in zip(self._watched, columns, strict=True) if any(flags)]
        self._unsynced.clear()
        if not self.follow_trained():
            self.require_backward_grad_sync, self._idles = False, True
        if accumulated:
            # A parameter that only earlier micro-batches trained has its full gradient by now.
            reduced = set(map(id, self.reduced))
            average_gradients([each for each in accumulated if id(each) not in reduced])

    def _end_idle_forward(self) -> None:
        if self._idles:
            self.require_backward_grad_sync, self._idles = True, False

    def _reduces(self) -> bool:
        return torch.is_grad_enabled() and self.require_backward_grad_sync and not torch.compiler.is_compiling()

    def prepare_backward(self, loss: Tensor) -> None:
        if not self.require_backward_grad_sync:
            return
        if self.static_graph and not self._static_graph_delay_allreduce_enqueued:
            return  # the forward pass has done so: see ReducedGradients.no_sync
        self.follow_trained()
        self.reducer.prepare_for_forward()
        self.reducer._rebuild_buckets()
        self.reducer.prepare_for_backward([loss])

    def zero_loss(self) -> Tensor:
        # With the search, a parameter that no process used keeps no gradient. A zero gradient would apply weight decay
        # to it.
        if self.find_unused_parameters:
            return torch.zeros((), device=self.reduced[0].device)
        return zero_loss_of(self.reduced)

    def require_reduced(self) -> None:
        reducer = self.__dict__.get("reducer")
        if reducer is None:  # after the end of the run
            return
        try:
            reducer._check_reducer_finalized()
        except RuntimeError as error:
            raise self._explained(error) from error

    def _explained(self, error: RuntimeError) -> Exception:
        if _UNFINISHED not in str(error):
            return error
        shown = some_of(self._names_without_gradients(str(error)))
        return ConfigurationError(
            f"On rank {dist.get_rank()} no gradient was computed for {shown or 'some parameters'}, because the loss "
            "does not depend on them. DDP waits for the gradients of all parameters. If the parameters that a loss "
            'depends on differ between steps or processes, use strategy="ddp_find_unused_parameters_true" or '
            "DDP(find_unused_parameters=True). Freeze parameters that are never trained (requires_grad_(False)).",
        )

    def _names_without_gradients(self, message: str) -> list[str]:
        found = _INDICES.search(message)
        return self._names_of([int(index) for index in found[1].split()] if found else [])

    @property
    def has_own_hook(self) -> bool:
        # With a user's communication hook, models on different processes may differ.
        return self._hook is not None and self._register is None

    def covered(self) -> list[nn.Parameter]:
        ignored = getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        left_out = self._left_out or ()
        named = dict(self.module.named_parameters())
        return [*self.reduced, *(named[each] for each in (*ignored, *left_out) if each in named)]

    def named(self) -> list[tuple[str, nn.Parameter]]:
        module: nn.Module = self.module
        return list((module.task if isinstance(module, StepModule) else module).named_parameters())

    def _names_of(self, places: Sequence[int]) -> list[str]:
        return self._named(self.reduced[place] for place in places)

    def _named(self, parameters: Iterable[nn.Parameter]) -> list[str]:
        names = {id(parameter): name for name, parameter in self.named()}
        return [names[id(parameter)] for parameter in parameters if id(parameter) in names]


@contextmanager
def _requiring_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)


def _refuse(name: str, gradient: Any) -> None:
    raise ConfigurationError(
        f'find_unused_parameters="auto": the loss depends on {name}, which no process used in the first '
        f"{WATCHED_STEPS} steps. DDP has stopped averaging its gradient. If different steps use different parameters, "
        "use DDP(find_unused_parameters=True).",
    )


# Comparison of gradients and parameters between processes


_TOLERANCE = 1e-5  # relative to the norm, since machines may round differently
_LARGEST = torch.finfo(torch.float32).max

_ADVICE = {
    "gradient": (
        "Each process would train a different model. The usual cause is a backward pass that neither the Trainer nor "
        "the Accelerator has run. Call self.manual_backward(loss) with manual optimization, or "
        "accelerator.backward(loss) in your own loop, once for each forward pass of the model and outside of no_sync."
    ),
    "value": (
        "The processes have trained different models since the last check, or only some have changed a parameter. "
        "Change parameters alike on all processes, and compute gradients with manual_backward or accelerator.backward."
    ),
}


class DriftCheck:
    """Check before every n-th step that all processes have equal parameters.

    The first step is checked, too. The norm and the sum of each tensor are compared with one all-reduce.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._left: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def is_due(self, optimizer: Optimizer) -> bool:
        left = self._left.get(optimizer, 0)
        self._left[optimizer] = self.every - 1 if left <= 0 else left - 1
        return left <= 0

    def restart(self, optimizer: Optimizer) -> None:
        self._left.pop(optimizer, None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        # For loops whose numbers of steps differ between processes.
        every, self.every = self.every, 0
        try:
            yield
        finally:
            self.every = every

    def compare(self, named: Sequence[tuple[str, nn.Parameter]], gradients: bool = True) -> None:
        # A collective call.
        if not named:
            return
        compared = [parameter.grad for _, parameter in named] if gradients else []
        compared += [parameter.detach() for _, parameter in named]
        own = _fingerprints(compared, named[0][1].device)
        # One reduction gives both extremes: the minimum is the negative of the maximum of the negated values.
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
            f"{', '.join(map(str, ranks))} differs from rank 0. {_ADVICE[what]} DDP(check_copies_every=0) disables "
            "this check.",
        )


@dataclass
class Held:
    """The DDP modules that average an optimizer's gradients, and the parameters outside these modules.

    Attributes:
        found_at: Number of the optimizer's parameters and of the modules' reducers when this record was made.
        wrapped: The DDP modules whose parameters the optimizer holds.
        beside: Parameters that no DDP module reduces.
    """

    found_at: tuple[int, int]
    wrapped: tuple[DistributedDataParallel, ...]
    beside: tuple[nn.Parameter, ...]


class Copies:
    """Registry of a run's DDP modules, which checks that all processes have equal weights.

    Attributes:
        wrapped: The DDP modules.
        are_several: True if there is more than one process.
    """

    def __init__(self, every: int) -> None:
        self.wrapped: WeakSet[DistributedDataParallel] = WeakSet()
        self._held: WeakKeyDictionary[Optimizer, Held] = WeakKeyDictionary()
        self._check = DriftCheck(every)
        self.are_several = False
        self.pause = self._check.paused

    def add(self, wrapped: DistributedDataParallel) -> None:
        self.wrapped.add(wrapped)
        self._held.clear()

    def clear(self) -> None:
        self.wrapped.clear()
        self._held.clear()

    def held_by(self, optimizer: Optimizer) -> Held:
        # Cached until the optimizer's parameters or a module's reducer change.
        known = self._held.get(optimizer)
        reducers = 0
        for one in self.wrapped if known is None else known.wrapped:
            reducers += one.reducers_built
        at = sum(len(group["params"]) for group in optimizer.param_groups), reducers
        # Counting is cheap enough for every step, a search through all parameters is not.
        if known is None or known.found_at != at:
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            # By `id`, since tensors compare elementwise.
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
        # All processes must call this.
        for optimizer in optimizers if self.are_several else ():
            held = self.held_by(optimizer)
            if held.beside and all(one.require_backward_grad_sync for one in held.wrapped):
                average_gradients([parameter for parameter in held.beside if parameter.requires_grad])

    def must_compare(self, optimizer: Optimizer) -> bool:
        # The step is counted.
        if not (self.are_several and self._check.every and self._check.is_due(optimizer)):
            return False
        # Within no_sync, which LocalSGD uses, copies differ on purpose.
        return all(one.require_backward_grad_sync and not one.has_own_hook for one in self.held_by(optimizer).wrapped)

    def compare(self, optimizer: Optimizer) -> None:
        """Raise if the parameters of an optimizer or their gradients differ between processes.

        All processes must call this.
        """
        held = self.held_by(optimizer)
        names = {id(parameter): name for one in held.wrapped for name, parameter in one.named()}
        compared = {id(parameter) for one in held.wrapped for parameter in one.reduced}
        compared |= {id(parameter) for parameter in held.beside if parameter.requires_grad}
        self._check.compare(
            [
                (names.get(id(each), f"a parameter of shape {tuple(each.shape)} beside the model"), each)
                for group in optimizer.param_groups  # in an order that is the same on all processes
                for each in group["params"]
                if id(each) in compared
            ]
        )

    def compare_weights(self, model: nn.Module) -> None:
        """Raise an error if a model's parameters differ between processes.

        All processes must call this.
        """
        if not (self._check.every and isinstance(model, DistributedDataParallel)):
            return
        if model.require_backward_grad_sync and not model.has_own_hook:
            reduced = set(map(id, model.reduced))
            named = [(name, parameter) for name, parameter in model.named() if id(parameter) in reduced]
            self._check.compare(named, gradients=False)

    def comparing_once(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        waits = [True]

        def run() -> Any:
            result = closure()
            if waits:
                waits.clear()
                self.compare(optimizer)
            return result

        return run


def _fingerprints(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    # A fingerprint is a norm and a scaled sum, both -1 for None. The sum is divided by the root of the size, so that
    # the norm is an upper bound (Cauchy-Schwarz).
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
        # Torch cannot compute a norm in a narrower dtype.
        wide = torch.float64 if values.dtype is torch.float64 else torch.float32
        try:
            norm, total = torch.linalg.vector_norm(values, dtype=wide), values.sum(dtype=wide)
        except (NotImplementedError, RuntimeError):  # a tensor subclass may lack these operations
            norm = total = absent
        norms.append(norm.float().to(device))
        sums.append(total.float().to(device))
        roots.append(max(1, values.numel()) ** 0.5)
    prints = torch.stack([torch.stack(norms), torch.stack(sums) / torch.tensor(roots, device=device)], dim=1)
    return prints.nan_to_num(_LARGEST, _LARGEST, -_LARGEST)


def _differ(first: Tensor, second: Tensor) -> Tensor:
    bound = _TOLERANCE * torch.maximum(first[:, :1].abs(), second[:, :1].abs())
    return ((first - second).abs() > bound).any(dim=1)
