"""Mapping between the model parts of each process and the full model's canonical parameter names.

Positions come from megatron-core's `sharded_state_dict`. Names are those of the same model on one process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.runtime.collectives import gather_object
from drivetrain.runtime.errors import CheckpointError

Slices = tuple[Any, ...]
Holder = Callable[[str, list[int]], int]

_LAYER = re.compile(r"(.*\blayers)\.(\d+)\Z")
# Describe each layer under its own number, as a model on one process names it.
_METADATA = {"non_homogeneous_layers": True}


@dataclass
class Entry:
    """One process's part of a parameter or buffer, and the part's position in the unsharded tensor.

    Attributes:
        name: The name of the full tensor.
        tensor: The local parameter or buffer.
        sharded: Megatron-core's description of its position.
        shape: The shape of the full tensor.
        counts: True if this process stores the part, False if the part is a replica of another process's.
    """

    name: str
    tensor: Tensor
    sharded: Any
    shape: tuple[int, ...]
    counts: bool

    def pieces(self, like: Tensor) -> list[tuple[Slices, Tensor]]:
        # Views of `like`, which has the local shape, each with its position in the full tensor.
        return [(piece.global_slice(), piece.data) for piece in _pieces(self.sharded, like)]

    def fill(self, like: Tensor, whole: Tensor) -> None:
        if tuple(whole.shape) != self.shape:
            raise CheckpointError(
                f"Shape mismatch for {self.name!r}: {tuple(whole.shape)} in the checkpoint, but {self.shape} here."
            )
        with torch.no_grad():
            for place, view in self.pieces(like):
                view.copy_(whole[place])


class Layout:
    """Map of which process holds which part of each tensor of a model.

    Creating it is a collective call.

    Attributes:
        entries: The tensors of this process.
        names: The names of the full model's tensors, in order.
    """

    def __init__(self, chunks: Iterable[nn.Module], prefix: str, device: torch.device) -> None:
        self._device = device
        self.entries = [entry for chunk in chunks for entry in _entries(chunk, prefix)]
        self._by_tensor = {id(entry.tensor): entry for entry in self.entries}
        own = [
            (e.name, e.shape, e.tensor.dtype, [place for place, _ in e.pieces(e.tensor)])
            for e in self.entries
            if e.counts
        ]
        self._parts: dict[str, list[tuple[int, Slices]]] = {}
        self._described: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        # Exchanged once, so that each process knows where every part of a tensor is.
        for rank, described in enumerate(gather_object([own])):
            for name, shape, dtype, places in described:
                self._described.setdefault(name, (shape, dtype))
                self._parts.setdefault(name, []).extend((rank, place) for place in places)
        self.names = sorted(self._described, key=_natural_sort_key)
        self._numbers = {name: number for number, name in enumerate(self.names)}

    def find(self, tensor: Tensor) -> Entry | None:
        return self._by_tensor.get(id(tensor))

    def dtype(self, name: str) -> torch.dtype:
        return self._described[name][1]

    def rotating(self, name: str, ranks: list[int]) -> int:
        # Ranks take turns to store full tensors.
        return ranks[self._numbers[name] % len(ranks)]

    def read(
        self,
        values: Callable[[Entry], Tensor],
        dtype: Callable[[str], torch.dtype],
        holder: Holder | None = None,
    ) -> dict[str, Tensor]:
        # A collective call. Each full tensor is on the CPU of one rank, and a meta tensor on other ranks. `holder`
        # chooses the rank from the tensor's name and the ranks with parts of it.
        rank = dist.get_rank()
        state: dict[str, Tensor] = {}
        own: dict[str, list[Entry]] = {}
        for entry in self.entries:
            own.setdefault(entry.name, []).append(entry)
        # All ranks go through names and parts in the same order, so that sends and receives match.
        for name in self.names:
            parts, shape = self._parts[name], self._described[name][0]
            keeper = (holder or self.rotating)(name, sorted({owner for owner, _ in parts}))
            # Replicas are read too, because `values` may be a collective call of the processes that share the tensor.
            read = [(entry, values(entry)) for entry in own.get(name, [])]
            views = iter([view for entry, value in read if entry.counts for _, view in entry.pieces(value.detach())])
            whole = torch.empty(shape, dtype=dtype(name), device="cpu" if rank == keeper else "meta")
            for owner, place in parts:
                if owner == rank:
                    self._hand_over(next(views), whole, place, keeper)
                elif rank == keeper:
                    part = torch.empty(
                        torch.empty(shape, device="meta")[place].shape, dtype=whole.dtype, device=self._device
                    )
                    dist.recv(part, src=owner)
                    whole[place] = part.cpu()
            state[name] = whole
        return state

    def _hand_over(self, part: Tensor, whole: Tensor, place: Slices, keeper: int) -> None:
        if not whole.is_meta:
            whole[place] = part.to(whole.dtype).cpu()
        else:
            dist.send(part.to(whole.dtype).contiguous(), dst=keeper)

    def elements(self, tensor: Tensor) -> int:
        entry = self.find(tensor)
        return tensor.numel() if entry is None else torch.Size(entry.shape).numel()


def _entries(chunk: nn.Module, prefix: str) -> Iterator[Entry]:
    renumbered = {
        f"{match[1]}.{match[2]}.": f"{match[1]}.{module.layer_number - 1}."
        for path, module in chunk.named_modules()
        if (match := _LAYER.match(path)) and hasattr(module, "layer_number")
    }
    for local, sharded in chunk.sharded_state_dict(metadata=dict(_METADATA)).items():  # type: ignore[operator]
        # TransformerEngine's extra state is not part of the weights.
        if not isinstance(getattr(sharded, "data", None), Tensor) or local.endswith("_extra_state"):
            continue
        pieces = _pieces(sharded, sharded.data)
        yield Entry(
            name=prefix + _name_in_full_model(local, sharded.key, renumbered),
            tensor=sharded.data,
            sharded=sharded,
            shape=tuple(pieces[0].global_shape),
            counts=_is_main(sharded.replica_id),
        )


def _name_in_full_model(local: str, key: str, renumbered: dict[str, str]) -> str:
    # A weight that is tied to the embedding gets the embedding's name.
    if key.endswith("embedding.word_embeddings.weight"):
        return key
    for before, after in renumbered.items():
        if local.startswith(before):
            return after + local.removeprefix(before)
    return local


def _pieces(sharded: Any, like: Tensor) -> list[Any]:
    # A factory describes a tensor that is stored as several pieces, such as the halves of a gated layer.
    build = getattr(sharded, "build_fn", None)
    if build is None:
        return [replace(sharded, data=like, dtype=like.dtype)]
    return list(_flat(build(sharded.key, like, sharded.replica_id, sharded.flattened_range)))


def _flat(built: Any) -> Iterator[Any]:
    if isinstance(built, dict):
        built = list(built.values())
    if isinstance(built, list | tuple):
        for each in built:
            yield from _flat(each)
    else:
        yield built


def _is_main(replica: Any) -> bool:
    return not any(replica) if isinstance(replica, tuple) else not replica


def _natural_sort_key(name: str) -> list[Any]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
