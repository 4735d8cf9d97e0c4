"""Torch's DDP wrapper, with errors that name the parameters which took no part in a loss."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import parallel

from drivetrain.runtime.errors import ConfigurationError, some_of
from drivetrain.strategies.ddp.unused_search import WATCHED_STEPS, UnusedSearch
from drivetrain.strategies.gradients import average_gradients
from drivetrain.strategies.step_module import StepModule

# Torch 2.13 warns at the old name.
BROADCAST_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(parallel.DistributedDataParallel).parameters
    else "broadcast_buffers"
)

_REQUIRES_GRAD = attrgetter("requires_grad")
_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_INDICES = re.compile(r"did not receive grad for rank \d+:((?: ?\d+)+)")


class DistributedDataParallel(parallel.DistributedDataParallel):
    """Torch's, which follows what is trained, and names parameters in its errors.

    Torch reduces what required gradients when it was built, and leaves the rest to each process. Here the reducer is
    rebuilt where other parameters do.

    Attributes:
        agree: Called with a description before the reducer is rebuilt; raises if other processes do not, too.
        reducers_built: How many reducers there have been.
        reduced: The parameters whose gradients are averaged, in the reducer's order.
    """

    agree: Callable[[str], None] | None = None
    reducers_built = 0
    reduced: tuple[nn.Parameter, ...] = ()
    _search: UnusedSearch | None = None
    _settled: Callable[[Sequence[nn.Parameter] | None], None] | None = None
    _watches = False
    _hook: tuple[Any, Callable[..., Any]] | None = None
    _register: Callable[[DistributedDataParallel], None] | None = None
    _left_out: dict[str, Any] | None = None  # names of parameters that the search has left out, and the hooks on them
    _idles = False  # whether the forward under way is one without anything to train

    def _ddp_init_helper(self, parameters: Any, *options: Any) -> None:
        super()._ddp_init_helper(parameters, *options)  # type: ignore[no-untyped-call]
        self.reduced = tuple(parameters)
        self.reducers_built += 1
        self._watched = tuple(self.module.parameters())
        self._trained = list(map(_REQUIRES_GRAD, self._watched))
        self._unsynced: set[tuple[bool, ...]] = set()  # what micro-batches have trained since the last reduction

    def follow_trained(self) -> bool:
        """Rebuild the reducer if other parameters require gradients than those that it reduces.

        Where DDP searches for unused parameters, frozen ones stay: they are found to be unused.

        Returns:
            Whether any parameter requires gradients.

        Raises:
            CollectiveError: The processes train other parameters.
        """
        if list(map(_REQUIRES_GRAD, self._watched)) == self._trained:
            return True
        trained = self._build_params_for_reducer()[0]  # type: ignore[no-untyped-call]
        if not trained:
            return False
        known = {id(parameter) for parameter in self.reduced}
        stays = self.find_unused_parameters and not self.static_graph
        if not stays or any(id(parameter) not in known for parameter in trained):
            self._rebuild(trained, keeps=stays)
        self._trained = list(map(_REQUIRES_GRAD, self._watched))  # rebuilding watches layers that were added, too
        return True

    def _rebuild(self, trained: Sequence[nn.Parameter], keeps: bool) -> None:
        self.require_reduced()
        known = {id(parameter) for parameter in self.reduced}
        now = {id(parameter) for parameter in trained}
        if self.agree is not None:
            added = self._named(parameter for parameter in trained if id(parameter) not in known)
            frozen = self._named(parameter for parameter in self.reduced if id(parameter) not in now)
            self.agree(f"requires_grad(True: {some_of(added) or None}, False: {some_of(frozen) or None})")
        frozen_since = [parameter for parameter in self.reduced if id(parameter) not in now]
        for name, handle in (self._left_out or {}).items():
            self.parameters_to_ignore.discard(name)
            handle.remove()
        self._left_out = None
        if self._settled is not None:  # what is trained now is to be searched for unused parameters again
            self.find_unused_parameters = True
            self._settled(None)
        with _requiring_gradients(frozen_since if keeps else ()):
            self._build_reducer()
        if self._watches:
            self.watch_search(self._settled)

    def watch_search(self, settled: Callable[[Sequence[nn.Parameter] | None], None] | None = None) -> None:
        """Watch in the first steps whether the search for unused parameters finds any.

        Args:
            settled: What to call with the parameters that are never used once the search ends, where it is to end
                by itself; else it never does, and a warning reports what it costs.
        """
        device = next(self.module.parameters()).device
        self._search = UnusedSearch(self.reducer, self._get_ddp_logging_data, self._names_of, device)
        self._settled, self._watches = settled, True

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let a function exchange the gradients of a bucket, as torch's does; also in reducers that are built later."""
        super().register_comm_hook(state, hook)
        self._hook = (state, hook)

    def register_with(self, register: Callable[[DistributedDataParallel], None]) -> None:
        """Let a function register the hook of each reducer, whose state may depend on the buckets.

        Args:
            register: Calls `register_comm_hook`.
        """
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
        if search is not None and self._reduces() and search.note():
            self._search = None
            if self._settled is None:
                search.finish()
            elif (never := search.settle()) is not None:
                self._end_search(never)
        return prepared

    def _end_search(self, never: Sequence[int]) -> None:
        """Reduce from here on what is used in each step, without looking for what is not.

        A parameter that is left out has no gradient, as in one process. One that a later loss does depend on is an
        error: its gradient would stay this process's own.
        """
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
        assert self._settled is not None
        self._settled(left_out)

    def _build_reducer(self) -> None:
        # The old one's hooks go with it; torch makes a new one so for a module that was pickled.
        del self.reducer, self.logger
        parameters, sparse = self._build_params_for_reducer()  # type: ignore[no-untyped-call]
        names = self._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
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
            # What earlier micro-batches have trained, and this one does not, has its gradient by now.
            reduced = set(map(id, self.reduced))
            average_gradients([each for each in accumulated if id(each) not in reduced])

    def _end_idle_forward(self) -> None:
        if self._idles:
            self.require_backward_grad_sync, self._idles = True, False

    def _reduces(self) -> bool:
        """Whether the backward of the forward that runs exchanges gradients."""
        return torch.is_grad_enabled() and self.require_backward_grad_sync and not torch.compiler.is_compiling()

    def require_reduced(self) -> None:
        """Raise where the last backward has left out parameters, whose gradients the peers wait for.

        Raises:
            ConfigurationError: Names the rank and the parameters.
        """
        reducer = self.__dict__.get("reducer")
        if reducer is None:  # the strategy has been torn down
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
            f"On rank {dist.get_rank()} no gradient was computed for {shown or 'some parameters'}: the loss does not "
            'depend on them, and DDP waits for the gradients of all. Use strategy="ddp_find_unused_parameters_true", '
            "or DDP(find_unused_parameters=True), where the parameters that a loss depends on differ between steps or "
            "processes; freeze those that are never trained (requires_grad_(False)).",
            code="DT-052",
        )

    def _names_without_gradients(self, message: str) -> list[str]:
        found = _INDICES.search(message)
        return self._names_of([int(index) for index in found[1].split()] if found else [])

    @property
    def has_own_hook(self) -> bool:
        """Whether a user's function exchanges gradients, which may leave the copies different on purpose."""
        return self._hook is not None and self._register is None

    def covered(self) -> list[nn.Parameter]:
        """The parameters that a backward averages, and those that the user has left to each process."""
        ignored = getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        left_out = self._left_out or ()
        named = dict(self.module.named_parameters())
        return [*self.reduced, *(named[each] for each in (*ignored, *left_out) if each in named)]

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters by the names that the user's module has for them."""
        module: nn.Module = self.module
        return list((module.task if isinstance(module, StepModule) else module).named_parameters())

    def _names_of(self, places: Sequence[int]) -> list[str]:
        """The names that the user's module has for parameters, by their places in the reducer."""
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
        f'find_unused_parameters="auto": {name} takes part in the loss, which it did not on any process in the first '
        f"{WATCHED_STEPS} steps, so DDP has left it out since. Where the parameters that a loss depends on change, use "
        "DDP(find_unused_parameters=True).",
        code="DT-052",
    )
