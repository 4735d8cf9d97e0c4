"""The peak memory of a training step, counted while it runs on tensors without memory."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.live_bytes import LiveBytes

_INPUT = re.compile(r"^(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?$")
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
_TRUE = {"bf16-true": torch.bfloat16, "fp16-true": torch.float16, "64": torch.float64}

Inputs = tuple[list[tuple[tuple[int, ...], torch.dtype]], dict[str, tuple[tuple[int, ...], torch.dtype]]]


def parse_inputs(given: Sequence[str]) -> Inputs:
    """The shapes and dtypes of a batch, from texts such as `8x128:int64` or `input_ids=8x128:int64`.

    Raises:
        ConfigurationError: One cannot be read.
    """
    positional, named = [], {}
    for text in given:
        found = _INPUT.match(text)
        dtype = getattr(torch, (found and found["dtype"]) or "float32", None)
        if found is None or not isinstance(dtype, torch.dtype):
            raise ConfigurationError(
                f"--input {text!r} cannot be read. Give [NAME=]SHAPE[:DTYPE], such as 8x128:int64 or "
                "input_ids=8x128:int64.",
                code="DT-007",
            )
        entry = (tuple(map(int, found["shape"].split("x"))), dtype)
        if found["name"]:
            named[found["name"]] = entry
        else:
            positional.append(entry)
    return positional, named


def peak_of_training(
    model: nn.Module,
    inputs: Inputs,
    precision: str = "32",
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> tuple[int, int]:
    """Peak bytes of the second training step of a model on one process; nothing is allocated.

    Args:
        model: The model, on the meta device. It is left as it is.
        inputs: The batch, as `parse_inputs` gives it.
        precision: The precision's name.
        make_optimizer: Makes the optimizer of the parameters.

    Returns:
        The peak of forward and backward, and that of the optimizer's step.
    """
    positional, named = inputs
    meta = copy.deepcopy(model)
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        copied = _without_memory(meta, _TRUE.get(precision))
        live.add([*copied.parameters(), *copied.buffers()])
        arguments = [_tensor(*entry, precision) for entry in positional]
        keywords = {name: _tensor(*entry, precision) for name, entry in named.items()}
        optimizer = make_optimizer([p for p in copied.parameters() if p.requires_grad])
        for _ in range(2):  # the optimizer makes its state in the first
            live.peak = live.current
            with _forward_context(precision):
                output = copied(*arguments, **keywords)
            loss = _loss_of(output)
            del output
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
            of_backward, live.peak = live.peak, live.current
            optimizer.step()
            optimizer.zero_grad()
    return of_backward, live.peak


def _without_memory(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Give a model fresh tensors that claim to be on the CPU, under a fake mode; ties stay ties."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    empty = torch.empty(parameter.shape, dtype=dtype or parameter.dtype)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                kind = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
                module._buffers[name] = made.setdefault(id(buffer), torch.empty(buffer.shape, dtype=kind))
    return model.train()


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, precision: str) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.empty(shape, dtype=_TRUE.get(precision, dtype))
    return torch.zeros(shape, dtype=dtype)


def _forward_context(precision: str) -> AbstractContextManager[Any]:
    dtype = _AUTOCAST.get(precision)
    return torch.autocast("cpu", dtype) if dtype is not None else nullcontext()


def _loss_of(output: Any) -> torch.Tensor:
    """The loss that a model returns, else the mean of what it returns."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    floats = [
        leaf
        for leaf in tree_leaves(dict(output) if isinstance(output, Mapping) else output)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad
    ]
    if not floats:
        raise ConfigurationError(
            "The model returns nothing that depends on its parameters, so it cannot be trained.", code="DT-085"
        )
    return floats[0].float().mean()
