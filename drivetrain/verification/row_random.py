"""Random numbers that depend on the data row, and therefore not on the number of processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from drivetrain.verification.loaders import seed_of

_DROPOUTS = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.dropout_, torch.feature_dropout, torch.alpha_dropout),
}
# function -> position of its argument `dropout_p`
_DROPOUT_PLACES = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}

# function -> how a row of its result is drawn, given the row and a generator
_DRAWS: dict[Any, str] = {
    torch.randn: "normal_",
    torch.randn_like: "normal_",
    torch.rand: "uniform_",
    torch.rand_like: "uniform_",
    torch.randint: "random_",
    torch.randint_like: "random_",
    Tensor.normal_: "normal_",
    Tensor.uniform_: "uniform_",
    Tensor.random_: "random_",
    Tensor.exponential_: "exponential_",
    Tensor.bernoulli_: "bernoulli_",
    torch.normal: "normal",
    torch.bernoulli: "bernoulli",
    torch.multinomial: "multinomial",
}


class RowRandom(TorchFunctionMode):
    """Mode that makes random numbers depend on the data row alone and skips dropout, to compare two runs.

    One process then draws the same numbers for a row as any other number of processes. The global generators are not
    used, so that they stay equal too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._keys: list[str] | None = None  # of each row of the batch; None outside of batches
        self._batch = 0
        self._draws = 0
        self.has_dropout = False
        self.unplaced: set[str] = set()

    def begin(self, keys: list[str], batch: int) -> None:
        self._keys, self._batch, self._draws = keys, batch, 0

    def end(self) -> None:
        self._keys = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._keys is None:
            return func(*args, **kwargs)
        if func in _DROPOUTS:
            self.has_dropout = True
            return args[0] if args else kwargs["input"]
        place = _DROPOUT_PLACES.get(func)
        if place is not None and len(args) > place:
            self.has_dropout |= bool(args[place])
            args = (*args[:place], 0.0, *args[place + 1 :])
        elif place is not None and kwargs.get("dropout_p"):
            self.has_dropout = True
            kwargs = {**kwargs, "dropout_p": 0.0}
        if func in _DRAWS and kwargs.get("generator") is None:
            return self._draw(self._keys, func, args, {name: kwargs[name] for name in kwargs if name != "generator"})
        return func(*args, **kwargs)

    def _draw(self, keys: list[str], func: Any, args: Any, kwargs: Any) -> Any:
        device_state = torch.get_rng_state()
        result = func(*args, **kwargs)
        torch.set_rng_state(device_state)
        if not isinstance(result, Tensor) or not result.numel():
            return result
        self._draws += 1
        rows = len(keys)
        dimension = next((d for d, size in enumerate(result.shape) if rows and size == rows), None)
        if dimension is None and result.dim() and rows and result.shape[0] % rows == 0:
            dimension = 0
        if dimension is None:
            # A single random integer is the seed of a loader that is created within the step.
            if result.dim() or func is not Tensor.random_:
                self.unplaced.add(f"{getattr(func, '__name__', func)}{tuple(result.shape)}")
            parts, per = [result], 0
            keys = [f"batch {self._batch}"]
        else:
            per = result.shape[dimension] // rows
            parts = list(torch.split(result.detach(), per, dimension))
        generator = torch.Generator(result.device)
        with torch.no_grad():
            for number, (part, key) in enumerate(zip(parts, keys, strict=True)):
                generator.manual_seed(seed_of(key, self._draws))
                taken = slice(number * per, (number + 1) * per) if dimension is not None else slice(None)
                _fill(func, part, generator, args, kwargs, dimension or 0, taken)
        return result


def _fill(
    func: Any, part: Tensor, generator: torch.Generator, args: Any, kwargs: Any, dimension: int, taken: slice
) -> None:
    # `part` holds the rows `taken` of the tensor that `func` has made of `args` and `kwargs`, along `dimension`.
    how = _DRAWS[func]

    def own(value: Any) -> Any:
        is_spread = isinstance(value, Tensor) and value.dim() and value.shape[dimension] >= taken.stop
        return value.narrow(dimension, taken.start, taken.stop - taken.start) if is_spread else value

    fresh = torch.empty_like(part, memory_format=torch.contiguous_format)
    if func in (torch.randn, torch.randn_like, torch.rand, torch.rand_like):
        getattr(fresh, how)(generator=generator)
    elif func in (torch.randint, torch.randint_like):
        bounds = [each for each in args if isinstance(each, int)][:2]
        low, high = kwargs.get("low", 0), kwargs.get("high")
        if high is None:
            low, high = (bounds[0], bounds[1]) if len(bounds) > 1 else (low, bounds[0])
        fresh.random_(low, high, generator=generator)
    elif how == "normal":
        mean = kwargs.get("mean", args[0] if args else 0.0)
        std = kwargs.get("std", args[1] if len(args) > 1 else 1.0)
        fresh.normal_(generator=generator).mul_(own(std)).add_(own(mean))
    elif how == "bernoulli":
        fresh.copy_(torch.rand(fresh.shape, generator=generator, device=fresh.device) < own(args[0]))
    elif how == "multinomial":
        fresh.copy_(torch.multinomial(own(args[0]), *args[1:], **kwargs, generator=generator))
    else:
        getattr(fresh, how)(*args[1:], **kwargs, generator=generator)
    part.copy_(fresh)
