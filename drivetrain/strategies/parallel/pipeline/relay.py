"""Requests that run through the stages of a pipeline one after another, forward only."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from drivetrain.runtime.errors import CollectiveError
from drivetrain.strategies.parallel.pipeline.holdings import StageHoldings
from drivetrain.strategies.parallel.pipeline.split import StageLayout
from drivetrain.strategies.parallel.pipeline.stage import Call, StageModule
from drivetrain.strategies.parallel.pipeline.trace import ModelOutline, Route, TensorShape, signature_of

Request = tuple[tuple[Any, ...], dict[str, Any]]

_MOST_ROUTES = 64
_COMPUTED, _FAILED = 1, 0


class StagedModel:
    """This process's stage of a model, all processes being one pipeline with a stage each.

    Args:
        module: The model; parameters of other stages are on the meta device from now on.
        layout: Its stages, as many as there are processes.
        device: Where this process computes.
        load: Called with the model and the names of this stage's tensors, to load them and bring them to the device.
        in_flight: How many requests a stage may be ahead of the next one.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: StageLayout,
        device: torch.device,
        load: Callable[[nn.Module, list[str]], None],
        in_flight: int,
    ) -> None:
        self._module, self._device, self._in_flight = module, device, in_flight
        self._rank, self._last = dist.get_rank(), layout.count - 1
        self._outline = ModelOutline(module, layout, device)
        self._routes: dict[Any, Route] = {}
        world: Any = dist.group.WORLD
        self.holdings = StageHoldings(module, "", layout, world, range(layout.count))
        self.holdings.drop_foreign()
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        load(module, [name for name, _ in tensors if not self.holdings.is_foreign(name)])
        self._stage = StageModule(module, layout, self._rank, device, nullcontext)

    @property
    def is_last(self) -> bool:
        """Whether outputs are computed here."""
        return self._rank == self._last

    def check(self, request: Request) -> None:
        """Find how a request runs through the stages.

        Args:
            request: Positional and keyword arguments of the model.

        Raises:
            ConfigurationError: The model cannot be split there.
        """
        self._route(request)

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Any]]:
        """Run requests through the stages; call it on all processes.

        A stage computes one request while the stage before it computes the next.

        Args:
            requests: Positional and keyword arguments of the model; those of the first process count.

        Yields:
            Each request and its output, in order; on the last process only.

        Raises:
            CollectiveError: A stage before this one failed.
        """
        link = _Link(self._rank, self._last, self._device, self._in_flight)
        for request in requests if self._rank == 0 else link.requests():
            link.forward_request(request)
            with torch.no_grad():
                output = self._compute(request, link)
            if self.is_last:
                yield request, output
        link.forward_request(None)
        link.finish()

    def _compute(self, request: Request, link: _Link) -> Any:
        """Run this stage on one request, with what the stage before hands over."""
        try:
            route = self._route(request)
            received = link.receive_values(route.cuts[self._rank].tensors) if self._rank else ()
            output = self._stage(*received, inputs=request, call=Call(*request, route))
        except BaseException:
            link.send_values(_FAILED, ())
            raise
        if not self.is_last:
            link.send_values(_COMPUTED, output)
        return output

    def _route(self, request: Request) -> Route:
        training = self._module.training
        key = signature_of(*request, training)
        if key not in self._routes:
            if len(self._routes) >= _MOST_ROUTES:
                self._routes.pop(next(iter(self._routes)))
            self._routes[key] = self._outline.route(*request, training)
        return self._routes[key]


class _Link:
    """Brings requests and values from the stage before to this one, and from this one to the next.

    Args:
        rank: This process.
        last: The last one.
        device: Where values are.
        in_flight: How many requests may be on their way to the next stage.
    """

    def __init__(self, rank: int, last: int, device: torch.device, in_flight: int) -> None:
        self._rank, self._last, self._device, self._in_flight = rank, last, device, in_flight
        self._sent: deque[list[Any]] = deque([[]])

    def requests(self) -> Iterator[Request]:
        """The requests that the stage before passes on, until their end."""
        while True:
            size = self._receive((1,), torch.int64)
            content = self._receive((int(size.item()),), torch.uint8)
            request = pickle.loads(content.cpu().numpy().tobytes())
            if request is None:
                return
            leaves, spec = pytree.tree_flatten(request)
            filled = [
                self._receive(leaf.shape, leaf.dtype) if isinstance(leaf, TensorShape) else leaf for leaf in leaves
            ]
            yield pytree.tree_unflatten(filled, spec)

    def forward_request(self, request: Request | None) -> None:
        """Pass a request on to the next stage, or None for the end of all."""
        if self._rank == self._last:
            return
        while len(self._sent) > self._in_flight:
            self._wait(self._sent.popleft())
        self._sent.append([])
        leaves, spec = pytree.tree_flatten(request)
        shapes = [TensorShape(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        content = pickle.dumps(pytree.tree_unflatten(shapes, spec))
        self._send(torch.tensor([len(content)], dtype=torch.int64))
        self._send(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self._send(leaf)

    def send_values(self, status: int, values: Iterable[Tensor]) -> None:
        """Hand what this stage computed over to the next one."""
        if self._rank == self._last:
            return
        self._send(torch.tensor([status], dtype=torch.int64))
        for value in values:
            self._send(value)

    def receive_values(self, shapes: Iterable[TensorShape]) -> tuple[Tensor, ...]:
        """What the stage before hands over.

        Raises:
            CollectiveError: It failed.
        """
        if int(self._receive((1,), torch.int64).item()) == _FAILED:
            raise CollectiveError(
                f"Stage {self._rank - 1} of the pipeline failed, so stage {self._rank} has nothing to compute with. "
                "What it raised is in the output of its process."
            )
        return tuple(self._receive(each.shape, each.dtype) for each in shapes)

    def finish(self) -> None:
        """Wait until all has arrived."""
        while self._sent:
            self._wait(self._sent.popleft())

    def _send(self, tensor: Tensor) -> None:
        tensor = tensor.detach().to(self._device).contiguous()
        self._sent[-1].append((dist.isend(tensor, dst=self._rank + 1), tensor))  # it has to live until it has arrived

    def _receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        received = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(received, src=self._rank - 1)
        return received

    @staticmethod
    def _wait(sent: list[Any]) -> None:
        for work, _ in sent:
            work.wait()
