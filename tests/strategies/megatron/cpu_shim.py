"""A shim for tests alone: lets megatron-core, which names CUDA throughout, compute on the CPU.

Nothing of it is part of the product. It answers what megatron-core asks of `torch.cuda`, and sends what it makes on
`"cuda"` to the CPU. What it cannot stand for is marked `gpu` in the tests: fused kernels, streams, the all-to-all of a
mixture of experts, context parallelism.
"""

from __future__ import annotations

import functools
import logging
import warnings
from typing import Any

import torch
from torch.autograd import Variable
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class OnCPU(TorchFunctionMode):
    """Sends every tensor that is made on CUDA, or moved there, to the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.autograd.backward, torch.Tensor.backward):
            return self._go_back(args[0], args[1] if len(args) > 1 else kwargs.get("grad_tensors"))
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to:
            args = tuple(CPU if _is_cuda(each) else each for each in args)
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)  # megatron-core compares the names of types
        return result

    def _go_back(self, given: Any, gradients: Any) -> None:
        """Run a backward with this mode on, since layers that recompute run their forward in it."""
        tensors = (given,) if isinstance(given, torch.Tensor) else tuple(given)
        known = gradients if isinstance(gradients, tuple | list) else (gradients,) * len(tensors)
        ones = [torch.ones_like(t) if g is None else g for t, g in zip(tensors, known, strict=True)]
        with self:
            Variable._execution_engine.run_backward(
                tensors, tuple(ones), False, False, (), allow_unreachable=True, accumulate_grad=True
            )


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


@functools.cache
def install() -> None:
    """Put the shim in place, for the rest of this process."""
    warnings.filterwarnings("ignore", category=UserWarning)  # of megatron-core, about the kernels that are not there
    warnings.filterwarnings("ignore", category=FutureWarning)
    # There the CPU's generator stands for the device's, which is what it warns of.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.synchronize = lambda *args: None
    generator = torch.default_generator  # what is drawn on the CPU comes from here, also within a fork of the tracker
    cuda.get_rng_state = lambda *args: generator.get_state()
    cuda.set_rng_state = lambda state, *args: generator.set_state(state)
    cuda.manual_seed = generator.manual_seed
    OnCPU().__enter__()
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda state, *args, **kwargs: generator.set_state(state)  # type: ignore[attr-defined]
    random._get_cuda_rng_state = lambda *args, **kwargs: generator.get_state()  # type: ignore[attr-defined]
