"""Torch's DDP wrapper, with errors that name the parameters which took no part in a loss."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import parallel

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.ddp.unused_search import WATCHED_STEPS, UnusedSearch, some_of
from drivetrain.strategies.step_module import StepModule

# Torch 2.13 warns at the old name.
BROADCAST_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(parallel.DistributedDataParallel).parameters
    else "broadcast_buffers"
)

_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_INDICES = re.compile(r"did not receive grad for rank \d+:((?: ?\d+)+)")


class DistributedDataParallel(parallel.DistributedDataParallel):
    """Torch's, which raises errors of ours where a reduction waits for gradients that no backward computes."""

    _search: UnusedSearch | None = None
    _settled: Callable[[Sequence[nn.Parameter]], None] | None = None
    _hook: tuple[Any, Callable[..., Any]] | None = None

    def watch_search(self, settled: Callable[[Sequence[nn.Parameter]], None] | None = None) -> None:
        """Watch in the first steps whether the search for unused parameters finds any.

        Args:
            settled: What to call with the parameters that are never used once the search ends, where it is to end
                by itself; else it never does, and a warning reports what it costs.
        """
        device = next(self.module.parameters()).device
        self._search = UnusedSearch(self.reducer, self._get_ddp_logging_data, self._names_of, device)
        self._settled = settled

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let a function exchange the gradients of a bucket, as torch's does; also after the search has ended."""
        super().register_comm_hook(state, hook)
        self._hook = (state, hook)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
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
        parameters = self._build_params_for_reducer()[0]  # type: ignore[no-untyped-call]
        left_out = [parameters[place] for place in never]
        for parameter, name in zip(left_out, self._names_of(never), strict=True):
            parameter.register_hook(partial(_refuse, name))
        ids = {id(parameter) for parameter in left_out}
        for prefix, module in self.module.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in ids:
                    self.parameters_to_ignore.add(f"{prefix}.{name}")
        # The old one's hooks go with it; torch makes a new one so for a module that was pickled.
        del self.reducer, self.logger
        self.find_unused_parameters = False
        kept, sparse = self._build_params_for_reducer()  # type: ignore[no-untyped-call]
        names = self._build_debug_param_to_name_mapping(kept)  # type: ignore[no-untyped-call]
        self._ddp_init_helper(kept, sparse, names, False)  # type: ignore[no-untyped-call]
        if self._hook is not None:
            super().register_comm_hook(*self._hook)
        self.reducer.prepare_for_forward()
        assert self._settled is not None
        self._settled(left_out)

    def _post_forward(self, output: Any) -> Any:
        handle = super()._post_forward
        if self._search is None or not self._reduces():
            return handle(output)  # type: ignore[no-untyped-call]
        return self._search.search(handle, output)

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

    def _names_of(self, places: Sequence[int]) -> list[str]:
        """The names that the user's module has for parameters, by their places in the reducer."""
        parameters = self._build_params_for_reducer()[0]  # type: ignore[no-untyped-call]
        chosen = [parameters[place] for place in places]
        module: nn.Module = self.module
        bare = module.task if isinstance(module, StepModule) else module
        names = {id(parameter): name for name, parameter in bare.named_parameters()}
        return [names[id(parameter)] for parameter in chosen if id(parameter) in names]


def _refuse(name: str, gradient: Any) -> None:
    raise ConfigurationError(
        f'find_unused_parameters="auto": {name} takes part in the loss, which it did not on any process in the first '
        f"{WATCHED_STEPS} steps, so DDP has left it out since. Where the parameters that a loss depends on change, use "
        "DDP(find_unused_parameters=True).",
        code="DT-052",
    )
