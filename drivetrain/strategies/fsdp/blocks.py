"""What is done to each block of a model by itself: recompute its activations, compile it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint


class BlockForward:
    """Takes the place of a block's `forward`; names in the model's state stay what they are.

    Args:
        block: The block.
        recompute: Keep only what goes into the block, and compute the rest again in backward (Chen et al., 2016,
            https://arxiv.org/abs/1604.06174).
        offload: Keep that on the CPU.
        compile_options: Arguments of `torch.compile`; None does not compile.
    """

    def __init__(
        self, block: nn.Module, recompute: bool, offload: bool, compile_options: dict[str, Any] | None
    ) -> None:
        self.recompute, self.offload, self.compile_options = recompute, offload, compile_options
        forward: Callable[..., Any] = block.forward
        if compile_options is not None:
            forward = torch.compile(forward, **compile_options)
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.recompute and torch.is_grad_enabled()):
            return self._forward(*args, **kwargs)
        if not self.offload:
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
        with save_on_cpu(pin_memory=torch.cuda.is_available()):
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)

    def again_for(self, block: nn.Module) -> None:
        """Do the same for another block."""
        block.__dict__["forward"] = BlockForward(block, self.recompute, self.offload, self.compile_options)


def rewrite_blocks(
    recomputed: Iterable[nn.Module], offload: bool, compiled: Iterable[nn.Module], compile_options: dict[str, Any]
) -> None:
    """Let blocks recompute their activations, and compile them.

    Args:
        recomputed: The blocks whose activations are recomputed.
        offload: Whether what goes into those is kept on the CPU.
        compiled: The blocks that are compiled.
        compile_options: Arguments of `torch.compile`.
    """
    again = {id(block): block for block in recomputed}
    fast = {id(block): block for block in compiled}
    for key, block in {**again, **fast}.items():
        if not isinstance(block.__dict__.get("forward"), BlockForward):
            options = compile_options if key in fast else None
            block.__dict__["forward"] = BlockForward(block, key in again, offload, options)


class NormInFull:
    """Takes the place of a normalisation's `forward`: computes with its parameters in 32 bits, gathered as they may be.

    Torch's CPU kernels, and batch normalisation anywhere, refuse parameters in half precision beside inputs or
    statistics in 32 bits (torch 2.13); under autocast inputs may come in either.

    Args:
        module: The normalisation.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parameters: dict[str, Any] = self._module._parameters
        before = dict(parameters)
        parameters.update({name: None if held is None else held.float() for name, held in before.items()})
        try:
            return type(self._module).forward(self._module, *args, **kwargs)
        finally:
            parameters.update(before)


def normalise_in_full(model: nn.Module, everywhere: bool) -> None:
    """Let a model's normalisations compute in 32 bits.

    Args:
        model: The model, whose parameters are gathered in half precision.
        everywhere: Not only batch normalisation.
    """
    batch = nn.modules.batchnorm._BatchNorm
    kinds = (batch, nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm) if everywhere else (batch,)
    for module in model.modules():
        if isinstance(module, kinds) and "forward" not in module.__dict__:
            module.__dict__["forward"] = NormInFull(module)
