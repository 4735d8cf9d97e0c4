"""Taking tensors out of nested state, so that what remains is JSON, and putting them back.

A packed tree is plain JSON. What JSON has no word for is a dict with one key that names its kind:

| in the state | packed |
|---|---|
| a tensor | `{"__tensor__": key}`, the tensor under that key in one flat dict |
| a NumPy array | `{"__ndarray__": key}` |
| a tuple, set, frozenset, `deque` | `{"__tuple__": [...]}`, ... |
| a dict whose keys are not all text, a `Counter` | `{"__dict__": [[key, value], ...]}`, `{"__counter__": ...}` |
| bytes | `{"__bytes__": base64}` |
| a float that JSON cannot write | `{"__float__": "nan"}` |
| a dtype, a device, a complex number, a path | `{"__dtype__": "float32"}`, ... |

Nothing else is taken: an arbitrary object would need unpickling, which runs whatever code the file holds.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drivetrain.runtime.errors import CheckpointError, DamagedCheckpointError

_SEQUENCES: dict[type, str] = {
    tuple: "__tuple__",
    torch.Size: "__tuple__",
    set: "__set__",
    frozenset: "__frozenset__",
    deque: "__deque__",
}
_MAPPINGS = (dict, OrderedDict, defaultdict)


def pack(tree: Any, prefix: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Take the tensors out of a tree."""
    packer = _Packer()
    return packer.pack(tree, prefix), packer.tensors


def packed(state: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """State as plain values and one flat dict of tensors on the CPU.

    Args:
        state: Nested dicts and lists of plain values and tensors.
        path: Where it is, for messages.

    Raises:
        CheckpointError: Something in it is neither.
    """
    tree, tensors = pack(dict(state), path)
    return {"tree": tree, "tensors": {name: tensor.cpu() for name, tensor in tensors.items()}}


def unpack(packed: Any, tensor_of: Callable[[str], Tensor], source: str = "The state") -> Any:
    """Put a tree together again. Only what `pack` may have written is taken."""
    try:
        return _unpacked(packed, tensor_of)
    except RecursionError:
        raise DamagedCheckpointError(f"{source} is damaged: it is nested too deeply.") from None
    except _NotWritten as error:
        raise DamagedCheckpointError(
            f"{source} is damaged: {error}, which is not what a checkpoint writes there."
        ) from error


def _unpacked(packed: Any, tensor_of: Callable[[str], Tensor]) -> Any:
    if isinstance(packed, list):
        return [_unpacked(item, tensor_of) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if len(packed) == 1:
        ((word, content),) = packed.items()
        if word in _WORDS:
            return _unpacked_word(word, content, tensor_of)
    return {key: _unpacked(value, tensor_of) for key, value in packed.items()}


def _unpacked_word(word: str, content: Any, tensor_of: Callable[[str], Tensor]) -> Any:
    """What stands under one of the words that JSON does not have."""
    try:
        if word == "__tensor__":
            return tensor_of(_text(content))
        if word == "__ndarray__":
            return _array_of(tensor_of(_text(content)))
        if word in _PAIRED:
            pairs = [_pair(each) for each in _list(content)]
            return _PAIRED[word]([(_unpacked(key, tensor_of), _unpacked(value, tensor_of)) for key, value in pairs])
        if word in _LISTED:
            return _LISTED[word](_unpacked(item, tensor_of) for item in _list(content))
        return _WRITTEN[word](content)
    except (TypeError, ValueError, KeyError) as error:  # such as a list as a key, or a dtype that torch has not
        raise _NotWritten(f"it holds {{{word!r}: {_shown(content)}}}") from error


class _NotWritten(Exception):
    """Something that `pack` never writes."""


def tensor_keys(packed: Any, source: str = "The state") -> list[str]:
    """The keys of the tensors that a packed tree refers to, each once, in order."""
    found: dict[str, None] = {}
    unpack(packed, lambda key: found.setdefault(key, None) or _NO_TENSOR, source)
    return list(found)


def key_at(packed: Any, path: str) -> str | None:
    """Return the key of the tensor at a path of a packed tree, which is another's path if it is tied to that; or None.

    Args:
        packed: What `pack` made.
        path: A key of the same tree, packed with nothing tied.
    """
    for part in path.split("/"):
        name = part.replace("%2F", "/").replace("%25", "%")
        packed = subtree(packed, int(name) if isinstance(packed, list) and name.isdecimal() else name)
    key = packed.get("__tensor__") if isinstance(packed, dict) else None
    return key if isinstance(key, str) else None


def described_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """An array of a tensor's shape and dtype that takes no memory."""
    return np.broadcast_to(torch.zeros((), dtype=tensor.dtype).numpy(), tuple(tensor.shape))


def is_tagged(packed: dict[str, Any]) -> bool:
    """Whether a packed dict stands for something else than a dict."""
    return len(packed) == 1 and next(iter(packed)) in _WORDS - {"__dict__"}


def subtree(packed: Any, *path: str | int) -> Any:
    """The part of a packed tree at a path of plain keys, or None."""
    for part in path:
        try:
            packed = packed[part]
        except (KeyError, IndexError, TypeError):
            return None
    return packed


_NO_TENSOR = torch.empty(0)


# Every dtype that a dense tensor may have, and nothing else that torch has a name for.
DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
}
"""Dtypes by name."""

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _text(content: Any) -> str:
    if type(content) is not str:
        raise TypeError("not text")
    return content


def _list(content: Any) -> list[Any]:
    if type(content) is not list:
        raise TypeError("not a list")
    return content


def _pair(content: Any) -> tuple[Any, Any]:
    key, value = _list(content)
    return key, value


def _array_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    return described_array(tensor) if tensor.is_meta else tensor.numpy()


def _counter_of(pairs: list[tuple[Any, Any]]) -> Counter[Any]:
    if not all(isinstance(count, int | float) for _, count in pairs):
        raise TypeError("not numbers")
    return Counter(dict(pairs))


def _complex_of(parts: Any) -> complex:
    real, imaginary = _pair(parts)
    return complex(float(_text(real)), float(_text(imaginary)))


def _device_of(name: Any) -> torch.device:
    try:
        return torch.device(_text(name))
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def _path_of(text: Any) -> Path:
    if "\0" in _text(text):
        raise ValueError("a null byte")
    return Path(text)


def _shown(content: Any) -> str:
    shown = repr(content) if not isinstance(content, list | dict) else type(content).__name__
    return shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}..."


_LONGEST_SHOWN = 60


_PAIRED: dict[str, Callable[[list[tuple[Any, Any]]], Any]] = {
    "__dict__": dict,
    "__counter__": _counter_of,
}
_LISTED: dict[str, Callable[[Iterable[Any]], Any]] = {
    "__tuple__": tuple,
    "__set__": set,
    "__frozenset__": frozenset,
    "__deque__": deque,
}
_WRITTEN: dict[str, Callable[[Any], Any]] = {
    "__bytes__": lambda text: base64.b64decode(_text(text).encode("ascii"), validate=True),
    "__float__": lambda name: _NOT_FINITE[_text(name)],
    "__complex__": _complex_of,
    "__dtype__": lambda name: DTYPES[_text(name)],
    "__device__": _device_of,
    "__path__": _path_of,
}
_WORDS = frozenset({"__tensor__", "__ndarray__", *_PAIRED, *_LISTED, *_WRITTEN})


@dataclass(eq=False)
class _Packer:
    """Packs one tree; keeps the tensors met, and which of them is which storage."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    _keys: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def pack(self, value: Any, path: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"__float__": repr(value)}
        if isinstance(value, Tensor):
            return {"__tensor__": self._keep(value, path)}
        if isinstance(value, _MAPPINGS) and kind in _MAPPINGS:
            plain = all(type(key) is str for key in value)
            if plain and not (len(value) == 1 and next(iter(value)) in _WORDS):
                return {key: self.pack(item, _join(path, key)) for key, item in value.items()}
            return {"__dict__": self._pack_pairs(value, path)}
        if kind is list:
            return [self.pack(item, f"{path}/{index}") for index, item in enumerate(value)]
        if kind is Counter:
            return {"__counter__": self._pack_pairs(value, path)}
        if kind in _SEQUENCES:
            return {_SEQUENCES[kind]: [self.pack(item, f"{path}/{index}") for index, item in enumerate(value)]}
        return self._pack_written(value, path)

    def _pack_pairs(self, value: Mapping[Any, Any], path: str) -> list[list[Any]]:
        return [[self.pack(key, path), self.pack(item, _join(path, str(key)))] for key, item in value.items()]

    def _pack_written(self, value: Any, path: str) -> Any:
        if isinstance(value, np.ndarray):
            return {"__ndarray__": self._keep(_tensor_from(value, path), path)}
        if isinstance(value, np.generic) and isinstance(value.item(), bool | int | float):
            return self.pack(value.item(), path)
        if isinstance(value, bytes | bytearray):
            return {"__bytes__": base64.b64encode(value).decode("ascii")}
        if isinstance(value, complex):
            return {"__complex__": [repr(value.real), repr(value.imag)]}
        if isinstance(value, torch.dtype):
            return {"__dtype__": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"__device__": str(value)}
        if isinstance(value, PurePath):
            return {"__path__": str(value)}
        raise CheckpointError(
            f"{path or 'The state'} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
            "cannot hold: it takes tensors, arrays, numbers, text, bytes, None, and lists, tuples, sets and dicts of "
            "them. Save those in its place, as an object's state_dict() returns them."
        )

    def _keep(self, tensor: Tensor, path: str) -> str:
        """Give a tensor its key, or the one that the same tensor has already."""
        if tensor.layout != torch.strided or tensor.is_quantized:
            what = "quantised" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
            raise CheckpointError(
                f"{path} is a {what} tensor; a checkpoint holds dense ones. Save it as its dense parts."
            )
        identity: tuple[Any, ...] | None = None
        if tensor.is_meta:  # a peer holds it; it has no address, but tied weights are one object here too
            identity = ("meta", id(tensor))
        tensor = tensor.detach()
        # Shards never count as the same: a process whose shard is empty could not see it, and all must agree.
        if identity is None and type(tensor) is Tensor and tensor.numel():
            place = (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())
            identity = (*place, tensor.is_conj(), tensor.is_neg())
        if identity is not None and identity in self._keys:
            return self._keys[identity]
        key = path
        while key in self.tensors:  # the keys 1 and "1" of one dict
            key += "~"
        self.tensors[key] = tensor
        if identity is not None:
            self._keys[identity] = key
        return key


def _join(path: str, key: str) -> str:
    escaped = key.replace("%", "%25").replace("/", "%2F")
    return f"{path}/{escaped}" if path else escaped


def _tensor_from(array: np.ndarray[Any, Any], path: str) -> Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    except TypeError:
        raise CheckpointError(
            f"{path} is a NumPy array of dtype {array.dtype}, which no tensor has; a checkpoint holds arrays of "
            "numbers and booleans."
        ) from None
