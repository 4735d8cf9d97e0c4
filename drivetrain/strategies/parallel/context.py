"""Context parallelism: sequences that are split over processes, with exact attention over all tokens.

Keys and values are gathered from all processes (Llama 3, https://arxiv.org/abs/2407.21783, section 3.3.2). Each process
computes the attention of its own queries. Under a causal mask later queries attend to more keys. To balance the cost,
each process takes one chunk from the front of a sequence and the mirrored chunk from the back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.pytrees import recursively_apply
from drivetrain.strategies.base import View

Batch = TypeVar("Batch")

# Saved at import, because torch's `context_parallel` replaces `F.scaled_dot_product_attention`.
_ATTENTION = F.scaled_dot_product_attention

# Functions that compute attention without a call of `scaled_dot_product_attention` that can be intercepted.
_OWN_ATTENTION = (
    F.multi_head_attention_forward,
    torch._native_multi_head_attention,
    torch._transformer_encoder_layer_fwd,
)
# Torch 2.13 warns about the older name `all_gather_tensor_autograd`.
_all_gather = getattr(funcol, "all_gather_single_autograd", None) or funcol.all_gather_tensor_autograd


@dataclass(frozen=True)
class SequenceShard:
    """Description of the part of each sequence that this process holds under context parallelism.

    Attributes:
        group: Process group over which sequences are split.
        index: Index of this process in the group.
        count: Number of processes in the group.
        balanced: True if each process has a chunk from the front and the mirrored chunk from the back.
    """

    group: ProcessGroup
    index: int
    count: int
    balanced: bool = True

    @property
    def chunks(self) -> int:
        # Each process holds one chunk of a sequence, or two for balance.
        return 2 * self.count if self.balanced else self.count

    @property
    def own_chunks(self) -> tuple[int, ...]:
        # Such as `(0, 7)`: one chunk from the front of a sequence, and the mirrored one from the back.
        return (self.index, self.chunks - 1 - self.index) if self.balanced else (self.index,)

    def split(self, tensor: Tensor, dim: int) -> Tensor:
        length = tensor.size(dim)
        if length % self.chunks:
            raise ConfigurationError(
                f"Sequences of {length} tokens cannot be split over cp={self.count} processes, which needs a multiple "
                f"of {self.chunks}. Pad them to {-(-length // self.chunks) * self.chunks}, or truncate them"
                + (", or pass cp_load_balance=False." if self.balanced and length % self.count == 0 else "."),
            )
        parts = tensor.chunk(self.chunks, dim)
        return torch.cat([parts[number] for number in self.own_chunks], dim)

    def join(self, tensor: Tensor, dim: int) -> Tensor:
        """Gather the sequence parts of all processes, and join the parts along the dimension `dim`.

        Gradients flow back to each part.
        """
        # Gather along dimension 0, where the parts arrive contiguously. For other dimensions torch adds a copy.
        gathered: Tensor = _all_gather(tensor.contiguous(), 0, self.group)
        if isinstance(gathered, funcol.AsyncCollectiveTensor):
            gathered = gathered.wait()
        parts = gathered.chunk(self.count)
        if not self.balanced:
            return torch.cat(parts, dim)
        halves = [part.chunk(2, dim) for part in parts]
        return torch.cat([*(front for front, _ in halves), *(back for _, back in reversed(halves))], dim)

    def positions(self, length: int, device: torch.device | str | None = None) -> Tensor:
        # `length` is the number of this process's tokens of a sequence.
        size = length // len(self.own_chunks)
        return torch.cat([torch.arange(n * size, (n + 1) * size, device=device) for n in self.own_chunks])

    def split_batch(self, batch: Batch, dim: int = 1) -> Batch:
        """Return this process's part of each sequence in a batch.

        Each tensor that has a dimension `dim` is split along it.
        """
        lengths: dict[int, list[tuple[int, ...]]] = {}

        def note(tensor: Tensor) -> Tensor:
            if tensor.dim() > dim:
                lengths.setdefault(tensor.size(dim), []).append(tuple(tensor.shape))
            return tensor

        recursively_apply(note, batch)
        if len(lengths) > 1:
            shapes = sorted({shape for each in lengths.values() for shape in each})
            raise ConfigurationError(
                f"With context parallelism, dimension {dim} of every tensor in a batch must be the sequence, but this "
                f"batch has tensors of the shapes {', '.join(map(str, shapes))}. Set another dimension with "
                "cp_seq_dim, or split batches with a function of your own in cp_shard_batch.",
            )
        split: Batch = recursively_apply(lambda t: self.split(t, dim) if t.dim() > dim else t, batch)
        return split

    def join_output(self, output: Any, length: int, dim: int = 1) -> Any:
        # Tensors whose dimension `dim` has the size `length` are gathered from all processes. Others are unchanged.
        return recursively_apply(lambda t: self.join(t, dim) if t.dim() > dim and t.size(dim) == length else t, output)


@contextmanager
def split_in_place(
    shard: SequenceShard, buffers: Sequence[Tensor], dims: Sequence[int], keep: Collection[Tensor] = ()
) -> Iterator[None]:
    # Afterwards, the buffers have their full data again, except those in `keep`.
    if len(buffers) != len(dims):
        raise ConfigurationError(
            f"buffer_seq_dims must list one dimension for each buffer, but there are {len(buffers)} buffers and "
            f"{len(dims)} dimensions.",
        )
    kept = {id(buffer) for buffer in keep}
    unknown = kept - {id(buffer) for buffer in buffers}
    if unknown:
        raise ConfigurationError(f"{len(unknown)} tensors of no_restore_buffers are not in buffers. Remove them.")
    parts = [shard.split(buffer.detach(), dim) for buffer, dim in zip(buffers, dims, strict=True)]
    whole = [buffer.data for buffer in buffers]
    for buffer, part in zip(buffers, parts, strict=True):
        buffer.data = part
    try:
        yield
    finally:
        for buffer, before in zip(buffers, whole, strict=True):
            if id(buffer) not in kept:
                buffer.data = before


def sequence_length(batch: Any, dim: int) -> int | None:
    """Return a batch's sequence length, or None if no tensor has the dimension."""
    found: list[int] = []
    recursively_apply(lambda t: found.append(t.size(dim)) if t.dim() > dim else None, batch)
    return found[0] if found else None


class SharedAttention(TorchFunctionMode):
    """Context that makes `F.scaled_dot_product_attention` cover the sequence parts of all processes."""

    def __init__(self, shard: SequenceShard) -> None:
        super().__init__()
        self.shard = shard
        self.calls = 0

    def check(self, since: int) -> None:
        # `since` is an earlier value of the counter `calls`.
        if self.calls == since:
            raise ConfigurationError(
                f"cp={self.shard.count} splits sequences over processes, but nothing called "
                "torch.nn.functional.scaled_dot_product_attention, so that tokens cannot attend to those on other "
                "processes. Compute attention with it (in transformers: attn_implementation='sdpa').",
            )

    def entered(self) -> AbstractContextManager[Any]:
        # A caller may have entered the context already, which must not be entered twice.
        return self if active_shard() is None else nullcontext()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            return attend(self.shard, *args, **(kwargs or {}))
        if func is Tensor.backward:
            with self:  # torch leaves the mode during `backward`, in which checkpointed blocks run again
                _backward(*args, **(kwargs or {}))
            return None
        if func in _OWN_ATTENTION:
            raise ConfigurationError(
                "Context parallelism does not support nn.MultiheadAttention and nn.Transformer, whose attention "
                "would cover only this process's tokens. Use a module that calls "
                "torch.nn.functional.scaled_dot_product_attention.",
            )
        return func(*args, **(kwargs or {}))


class RingAttention(SharedAttention):
    """Context that computes attention over all processes by torch's ring attention, to save memory.

    Keys and values travel around a ring during the computation, so no process ever holds all of them (Liu et al., 2023,
    https://arxiv.org/abs/2310.01889).
    """

    def __init__(self, shard: SequenceShard, mesh: DeviceMesh, device: torch.device) -> None:
        super().__init__(shard)
        self._mesh, self._device = mesh, device
        self._depth = 0
        self._ring = ExitStack()

    def __enter__(self) -> Any:
        if self._depth == 0:
            from torch.distributed.tensor.experimental import _attention

            self._ring.enter_context(_set(_attention._cp_options, "enable_load_balance", self.shard.balanced))
            # `context_parallel` needs a buffer to split, and takes the order of chunks from its length.
            chunks = torch.zeros(self.shard.chunks, device=self._device)
            self._ring.enter_context(_attention.context_parallel(self._mesh, buffers=[chunks], buffer_seq_dims=[0]))
        self._depth += 1
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if self._depth == 0:
            self._ring.close()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _ATTENTION:
            self.calls += 1
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _backward(
    tensor: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    # Function modes see torch's own function, and each call of it would leave the attention context.
    chosen = () if inputs is None else (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    seeds = torch.autograd._make_grads((tensor,), (gradient,), is_grads_batched=False)
    keep = create_graph if retain_graph is None else retain_graph
    torch.autograd.graph._engine_run_backward(
        (tensor,), seeds, keep, create_graph, chosen, allow_unreachable=True, accumulate_grad=True
    )


def attend(
    shard: SequenceShard,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if isinstance(query, DTensor):
        return _attend_on_shards(shard, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is not None:
        raise ConfigurationError(
            f"With context parallelism, attention got a mask of shape {tuple(attn_mask.shape)}, which covers only "
            "this process's tokens. Pass is_causal=True instead, or no mask.",
        )
    if dropout_p:
        raise ConfigurationError(
            f"Context parallelism does not support dropout of attention weights (dropout_p={dropout_p}). Set the "
            "attention's dropout to 0. Dropout elsewhere works.",
        )
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if key.shape == value.shape and key.dtype == value.dtype:  # stacked, they need one collective instead of two
        keys, values = shard.join(torch.stack((key, value)), -2)
    else:
        keys, values = shard.join(key, -2), shard.join(value, -2)
    if not is_causal:
        return F.scaled_dot_product_attention(query, keys, values, **options)
    if query.size(-2) != key.size(-2):
        raise ConfigurationError(
            f"With context parallelism, causal attention needs as many queries as keys, got {query.size(-2)} and "
            f"{key.size(-2)}.",
        )
    size = query.size(-2) // len(shard.own_chunks)
    outputs = []
    for number, part in zip(shard.own_chunks, query.chunk(len(shard.own_chunks), -2), strict=True):
        # A chunk sees all keys up to its own end, and its causal mask is aligned to the last of them.
        seen = (number + 1) * size
        mask = {"is_causal": True} if number == 0 else {"attn_mask": _aligned_to_the_last(size, seen)}
        outputs.append(
            F.scaled_dot_product_attention(part, keys[..., :seen, :], values[..., :seen, :], **mask, **options)
        )
    return torch.cat(outputs, -2)


def _aligned_to_the_last(size: int, seen: int) -> Tensor:
    # The dispatch modes are disabled, because torch 2.13 cannot create the mask within one.
    if torch.compiler.is_compiling():
        return causal_lower_right(size, seen)
    with _disable_current_modes():
        return causal_lower_right(size, seen)


def _attend_on_shards(shard: SequenceShard, query: DTensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    heads = (query.dim() - 3) % query.dim()
    if any(not (placement.is_replicate() or placement.is_shard(heads)) for placement in query.placements):
        raise ConfigurationError(
            "With context parallelism, queries may be split over tensor-parallel processes only along their heads "
            f"(dimension {heads}), but they are placed as {query.placements}.",
        )
    # Heads are independent of each other, so that each rank computes attention for its own heads.
    own: list[Any] = [t.to_local() if isinstance(t, DTensor) else t for t in (query, key, value)]
    local = attend(shard, *own, *rest)
    whole: DTensor = DTensor.from_local(local, query.device_mesh, query.placements, run_check=False)
    return whole


def active_shard() -> SequenceShard | None:
    modes: list[Any] = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    for mode in reversed(modes):
        if isinstance(mode, SharedAttention):
            return mode.shard
    return None


def sequence_positions(length: int, device: torch.device | str | None = None) -> Tensor:
    """Return the positions of this process's tokens in the full sequences, for position embeddings.

    Use this function in models that create position ids themselves. With context parallelism,
    `torch.arange(x.shape[1])` would number each process's part from 0. Without it, the result is that `arange`.

    Args:
        length: Number of tokens of each sequence on this process, such as `x.shape[1]`.
        device: Device of the returned tensor.

    Returns:
        An int64 tensor of shape `(length,)`.
    """
    shard = active_shard()
    return torch.arange(length, device=device) if shard is None else shard.positions(length, device)


# Splitting sequences over processes


class Sequences:
    # Without context parallelism, sequences stay whole. `SplitSequences` splits them.

    def split(
        self, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int], keep: Collection[torch.Tensor]
    ) -> AbstractContextManager[Any]:
        return nullcontext()

    def view(self, model: nn.Module, stage: View) -> nn.Module:
        return model

    def attention(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def shard_batch(self, batch: Any) -> Any:
        return batch


class SplitSequences(Sequences):
    """Context parallelism that splits the sequences of each batch over processes."""

    def __init__(
        self,
        shard: SequenceShard,
        attention: SharedAttention,
        seq_dim: int,
        shard_batch: Callable[[Any, SequenceShard], Any] | None,
    ) -> None:
        self.shard, self._attention, self._seq_dim, self._shard_batch = shard, attention, seq_dim, shard_batch

    def view(self, model: nn.Module, stage: View) -> nn.Module:
        joined_dim = self._seq_dim if stage == "evaluate" else None
        return SequenceStep(model, self._attention, self.shard_batch, joined_dim)

    def attention(self) -> AbstractContextManager[Any]:
        return self._attention.entered()

    def shard_batch(self, batch: Any) -> Any:
        if self._shard_batch is not None:
            return self._shard_batch(batch, self.shard)
        return self.shard.split_batch(batch, self._seq_dim)

    @contextmanager
    def split(
        self, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int], keep: Collection[torch.Tensor]
    ) -> Iterator[None]:
        before = self._attention.calls
        with split_in_place(self.shard, buffers, seq_dims, keep), self.attention():
            yield
        self._attention.check(before)


class SequenceStep(nn.Module):
    # Called as `module(step, batch, ...)`.

    def __init__(
        self, inner: nn.Module, attention: SharedAttention, split: Callable[[Any], Any], joined_dim: int | None = None
    ) -> None:
        super().__init__()
        self.inner = inner
        self._attention, self._split, self._joined_dim = attention, split, joined_dim
        self._checked = False

    def forward(self, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        own = self._split(batch)
        before = self._attention.calls
        with self._attention.entered():
            output = self.inner(step, own, *args, **kwargs)
        if not self._checked:
            self._attention.check(before)
            self._checked = True
        if self._joined_dim is None or output is None:
            return output
        length = sequence_length(own, self._joined_dim)
        return output if length is None else self._attention.shard.join_output(output, length, self._joined_dim)


# DTensor sharding rules for the CPU's attention kernel: torch 2.13 has them only for GPU kernels


aten = torch.ops.aten

# Each row and each head is computed by itself: (rows, heads, tokens, head size).
_SPLIT = (Shard(0), Shard(1), Replicate())


@cache
def register_attention_sharding() -> None:
    # Torch has no sharding rules for attention of DTensors on the CPU.

    @register_sharding(aten._scaled_dot_product_flash_attention_for_cpu.default)  # type: ignore[untyped-decorator]
    def forward(*args: Any, **options: Any) -> Any:
        others = [None] * (len(args) - 3)
        return [([place, place], [place, place, place, *others]) for place in _SPLIT]

    @register_sharding(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)  # type: ignore[untyped-decorator]
    def backward(*args: Any, **options: Any) -> Any:
        others = [None] * (len(args) - 6)
        return [([place] * 3, [*[place] * 6, *others]) for place in _SPLIT]
