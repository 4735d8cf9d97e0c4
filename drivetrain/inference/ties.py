"""Which tensors of a model are the same memory, or are meant to be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as _wraps


def wraps_others(tensor: Any) -> bool:
    """Whether a tensor holds its values in other tensors: a quantised or a sharded one."""
    return bool(_wraps(tensor))


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """What two tensors have in common that share their memory, also on the meta device.

    Args:
        tensor: The tensor.

    Returns:
        The device, a number that is the storage's own as long as it lives, and its bytes.
    """
    if wraps_others(tensor):
        return tensor.device, id(tensor), tensor.numel() * tensor.element_size()
    storage = tensor.untyped_storage()
    # On the meta device all addresses are 0.
    return tensor.device, storage.data_ptr() or storage._cdata, storage.nbytes()


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor covers, and the one after its last."""
    if wraps_others(tensor):
        return 0, tensor.numel() * tensor.element_size()
    if tensor.numel() == 0:
        return 0, 0
    size = tensor.element_size()
    last = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * size, int(start + last + 1) * size


def find_tied_parameters(model: nn.Module, **_kwargs: Any) -> list[list[str]]:
    """The names under which a model's parameters occur more than once.

    Parameters are tied that share memory, in full or in part, and those that the model declares as tied (as
    transformers' models do), also where each has memory of its own at present.

    Args:
        model: The model.

    Returns:
        A list of names, sorted, for each such group.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return [sorted(group) for group in memory_groups(parameters, declared_ties(model)) if len(group) > 1]


def memory_groups(tensors: Mapping[str, torch.Tensor], declared: Mapping[str, str]) -> list[list[str]]:
    """The names of tensors, those together that share memory, in full or in part, or are declared as tied.

    Args:
        tensors: The tensors.
        declared: Names, and whose memory each is meant to have.

    Returns:
        A list of names for each group, in the order of `tensors`; most are of one name.
    """
    groups = _Groups(tensors)
    storages: dict[Any, list[tuple[int, int, str]]] = defaultdict(list)
    for name, tensor in tensors.items():
        storages[id_tensor_storage(tensor)[:2]].append((*extent(tensor), name))
    for covered in storages.values():
        first, reached = "", 0
        for start, end, name in sorted(covered):
            if start < reached:
                groups.join(first, name)
            elif end > start:
                first = name
            reached = max(reached, end)
    for target, source in declared.items():
        if target in tensors and source in tensors:
            groups.join(source, target)
    return groups.all()


class _Groups:
    """Names in groups that are joined."""

    def __init__(self, names: Iterable[str]) -> None:
        self._first = {name: name for name in names}

    def join(self, one: str, other: str) -> None:
        kept, joined = self._first[one], self._first[other]
        if kept == joined:
            return
        self._first = {name: kept if first == joined else first for name, first in self._first.items()}

    def all(self) -> list[list[str]]:
        groups: dict[str, list[str]] = defaultdict(list)
        for name, first in self._first.items():
            groups[first].append(name)
        return list(groups.values())


def declared_ties(model: nn.Module) -> Mapping[str, str]:
    """The ties that a model of transformers declares: each name, and whose weight it has."""
    declared = getattr(model, "all_tied_weights_keys", None)
    return declared if isinstance(declared, Mapping) else {}


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether a model declares ties between its parameters, whatever they share at present.

    Args:
        model: The model.
    """
    if declared_ties(model):
        return True
    config = getattr(model, "config", None)
    words = getattr(config, "tie_word_embeddings", False) and callable(getattr(model, "get_output_embeddings", None))
    return bool(
        (words and model.get_output_embeddings() is not None)  # type: ignore[operator]
        or (getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False))
    )


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Let the names of each group hold one parameter again: the first among them that has memory.

    Args:
        model: The model.
        tied_params: The groups, as `find_tied_parameters` returned them before.
    """
    for group in tied_params:
        held = [model.get_parameter(name) for name in group]
        kept = next((each for each in held if not each.is_meta), held[0])
        for name in group:
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, kept)
