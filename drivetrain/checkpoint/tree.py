"""Encoding of nested state as JSON plus a flat dict of tensors, and the layout of these tensors in safetensors files.

A packed tree is plain JSON. A value that JSON cannot represent becomes a dict with one key that names its type:

| value | packed |
|---|---|
| a tensor | `{"__tensor__": key}`, with the tensor under that key in the flat dict |
| a NumPy array | `{"__ndarray__": key}` |
| a tuple, set, frozenset, `deque` | `{"__tuple__": [...]}`, ... |
| a dict with keys that are not strings, a `Counter` | `{"__dict__": [[key, value], ...]}`, `{"__counter__": ...}` |
| bytes | `{"__bytes__": base64}` |
| NaN or an infinite float | `{"__float__": "nan"}` |
| a dtype, a device, a complex number, a path | `{"__dtype__": "float32"}`, ... |

Other objects are refused. They would need unpickling, which can run arbitrary code from the file.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    packer = _Packer()
    return packer.pack(tree, prefix), packer.tensors


def packed(state: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Separate a run's nested state into tensors by name and a tree of plain values that JSON can store.

    The result has the entries `tree` and `tensors`.

    Args:
        state: Nested dicts and lists of plain values and tensors.
        path: The position of the state in a larger one, for error messages.

    Raises:
        CheckpointError: The state holds an object that a checkpoint cannot store.
    """
    tree, tensors = pack(dict(state), path)
    return {"tree": tree, "tensors": {name: tensor.cpu() for name, tensor in tensors.items()}}


def unpack(packed: Any, tensor_of: Callable[[str], Tensor], source: str = "The state") -> Any:
    try:
        return _unpacked(packed, tensor_of)
    except RecursionError:
        raise DamagedCheckpointError(f"{source} is damaged: it is nested too deeply.") from None
    except _NotWritten as error:
        raise DamagedCheckpointError(f"{source} is damaged: {error}, which is not a valid entry.") from error


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
        raise _NotWritten(f"it contains {{{word!r}: {_shown(content)}}}") from error


# JSON content that drivetrain never writes, as in a damaged checkpoint
class _NotWritten(Exception): ...


def tensor_keys(packed: Any, source: str = "The state") -> list[str]:
    # A dict, because it keeps the order of its keys, unlike a set.
    found: dict[str, None] = {}
    unpack(packed, lambda key: found.setdefault(key, None) or _NO_TENSOR, source)
    return list(found)


def key_at(packed: Any, path: str) -> str | None:
    # `path` is the key that the tensor would have if it were not tied.
    for part in path.split("/"):
        # Undo the escaping of `_join`, in reverse order.
        name = part.replace("%2F", "/").replace("%25", "%")
        packed = subtree(packed, int(name) if isinstance(packed, list) and name.isdecimal() else name)
    key = packed.get("__tensor__") if isinstance(packed, dict) else None
    return key if isinstance(key, str) else None


def described_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    # A broadcast view has the full shape, but memory for one element only.
    return np.broadcast_to(torch.zeros((), dtype=tensor.dtype).numpy(), tuple(tensor.shape))


def is_tagged(packed: dict[str, Any]) -> bool:
    # Such as {"__tuple__": [1, 2]}, which stands for a tuple.
    return len(packed) == 1 and next(iter(packed)) in _WORDS - {"__dict__"}


def subtree(packed: Any, *path: str | int) -> Any:
    for part in path:
        try:
            packed = packed[part]
        except (KeyError, IndexError, TypeError):
            return None
    return packed


_NO_TENSOR = torch.empty(0)


# All dtypes of dense tensors, without quantized types and types of bits.
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
    """Encoder that converts a nested state to JSON and collects its tensors.

    Tied tensors are stored once.
    """

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
            # A dict whose only key is a tag would be read as another type, so it is stored as pairs.
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
            "cannot hold. Save tensors, arrays, numbers, text, bytes, None, or lists, tuples, sets and dicts of these "
            "in its place, such as the object's state_dict()."
        )

    def _keep(self, tensor: Tensor, path: str) -> str:
        if tensor.layout != torch.strided or tensor.is_quantized:
            what = "quantised" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
            raise CheckpointError(
                f"{path} is a {what} tensor, but a checkpoint stores only dense tensors. Save its dense parts."
            )
        identity: tuple[Any, ...] | None = None
        if tensor.is_meta:  # held by another process; without an address, tied weights are recognized as one object
            identity = ("meta", id(tensor))
        tensor = tensor.detach()
        # Shards are never treated as tied: a process with an empty shard could not tell, and all must agree.
        if identity is None and type(tensor) is Tensor and tensor.numel():
            # Tensors are tied if they are equal views of one memory.
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
    # Slashes separate the parts of a path, so those in keys are escaped.
    escaped = key.replace("%", "%25").replace("/", "%2F")
    return f"{path}/{escaped}" if path else escaped


def _tensor_from(array: np.ndarray[Any, Any], path: str) -> Tensor:
    try:
        # ascontiguousarray gives a scalar one dimension, so the shape is restored.
        return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    except TypeError:
        raise CheckpointError(
            f"{path} is a NumPy array of dtype {array.dtype}, but a checkpoint stores only arrays of numbers and "
            "booleans."
        ) from None


# Content of a checkpoint's JSON files


def decoded(raw: bytes, path: str) -> Any:
    try:
        # json.loads accepts NaN and Infinity by default, which are not valid JSON.
        return json.loads(raw, parse_constant=_refused_constant)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} is not JSON: {error}.") from error


def _refused_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON's")


def encoded(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


# Tensors in files of safetensors' layout: https://huggingface.co/docs/safetensors/index#format


CACHE_LINE = 64
"""Bytes of a cache line, to which torch aligns its memory. At other addresses, kernels may round differently."""

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "complex64": "C64",
}


_LENGTH = 8  # bytes that hold the length of the header
_LONGEST_HEADER = 100 << 20

FOLDER = "tensors"
"""Folder of a checkpoint that contains the tensors and their index."""

INDEX = f"{FOLDER}/index.json"


@dataclass(frozen=True)
class Entry:
    """Name, dtype and shape of a tensor or shard in a safetensors file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of_part(
        cls, key: str, dtype: torch.dtype, size: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
    ) -> Entry:
        # The name of a shard ends with its offsets.
        is_whole = tuple(sizes) == tuple(size)
        return cls(key if is_whole else f"{key}@{','.join(map(str, offsets))}", dtype, tuple(sizes))

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count

    def described(self, start: int) -> dict[str, Any]:
        name = dtype_name(self.dtype)
        known = name in _NAMES
        return {
            "dtype": _NAMES[name] if known else "U8",
            "shape": list(self.shape) if known else [self.nbytes],
            "data_offsets": [start, start + self.nbytes],
        }


@dataclass(frozen=True)
class Place:
    """File and byte range in which part of a tensor is stored."""

    file: str
    start: int
    nbytes: int


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as `"float32"` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of a name in a safetensors header, such as `"F32"`."""
    found = next((ours for ours, theirs in _NAMES.items() if theirs == name), None)
    if found is None:
        raise ValueError(f"{name!r} is not a known dtype; the known dtypes are {', '.join(_NAMES.values())}")
    return getattr(torch, found)  # type: ignore[no-any-return]


def layout(entries: Sequence[Entry], metadata: dict[str, str] | None = None) -> tuple[bytes, list[int]]:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    starts, position = [], 0
    for entry in entries:
        header[entry.name] = entry.described(position)
        starts.append(position)
        position += entry.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # Pad with spaces, which JSON allows, so that the tensors begin at a cache line.
    text += b" " * (-(8 + len(text)) % CACHE_LINE)
    begin = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, [begin + start for start in starts]


def aligned(entries: Iterable[Entry]) -> list[int]:
    # In this order, each tensor starts at a multiple of its item size: tensors whose size is a multiple of a cache
    # line come first, then those of a multiple of 32 bytes, of 16, and so on.
    listed = list(entries)
    return sorted(range(len(listed)), key=lambda index: -math.gcd(listed[index].nbytes, CACHE_LINE))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor as a memoryview, without a copy if possible."""
    # Conjugation and negation may be pending flags of a tensor, which its bytes do not show.
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if plain.numel() == 0:
        return memoryview(b"")
    return memoryview(plain.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def takes_bytes(target: Tensor, dtype: torch.dtype) -> bool:
    plain = target.device.type == "cpu" and target.is_contiguous() and not target.is_neg() and not target.is_conj()
    return plain and target.dtype == dtype


@dataclass(frozen=True)
class Placed:
    entry: Entry
    start: int

    @property
    def end(self) -> int:
        return self.start + self.entry.nbytes


def read_header(head: bytes, size: int, where: str) -> tuple[dict[str, Placed], dict[str, str]]:
    length = header_length(head, size, where)
    begin = _LENGTH + length
    try:
        header = json.loads(head[_LENGTH:begin])
        metadata = header.pop("__metadata__", {})
        placed = sorted((_placed(name, one, begin) for name, one in header.items()), key=lambda one: one.start)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where} cannot be read: its header is damaged ({error}).") from error
    # The tensors must fill the file without gaps and overlaps.
    reached = begin
    for one in placed:
        if one.start != reached:
            raise CheckpointError(
                f"{where} is damaged: {one.entry.name} does not begin where the previous tensor ends."
            )
        reached = one.end
    if reached != size:
        problem = "is truncated" if size < reached else "is damaged"
        raise CheckpointError(f"{where} {problem}: its header describes {reached} bytes, but the file has {size}.")
    return {one.entry.name: one for one in placed}, {str(key): str(value) for key, value in metadata.items()}


def header_length(head: bytes, size: int, where: str) -> int:
    length = int.from_bytes(head[:_LENGTH], "little") if len(head) >= _LENGTH else 0
    # The limit keeps a damaged length from allocating a huge amount of memory.
    if not 0 < length <= min(size - _LENGTH, _LONGEST_HEADER):
        raise CheckpointError(f"{where} cannot be read: it does not begin with a safetensors header.")
    return length


def _placed(name: str, described: Mapping[str, Any], begin: int) -> Placed:
    dtype = dtype_named(described["dtype"])
    shape = tuple(described["shape"])
    start, end = described["data_offsets"]
    if not all(type(count) is int and count >= 0 for count in (*shape, start, end)):
        raise ValueError(f"{name} has the invalid shape {list(shape)} or offsets {[start, end]}")
    entry = Entry(name, dtype, shape)
    if end - start != entry.nbytes:
        raise ValueError(
            f"{name} needs {entry.nbytes} bytes for its dtype and shape, but its offsets span {end - start}"
        )
    return Placed(entry, begin + start)
