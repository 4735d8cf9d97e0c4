"""The index of a checkpoint's tensors: where the parts of each lie, checked before anything is read by it.

A tensor is made without values and filled from its parts, so parts that leave a gap would let whatever was in memory
become weights. What is checked: each part lies within its tensor and within a file that the manifest lists, has the
length that its dtype and sizes need, overlaps no other part in the tensor nor in the file, and all parts of a tensor
together are the whole tensor. The header of each file that is read then has to agree, see `check_header`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem

from drivetrain.checkpoint.errors import DamagedCheckpointError
from drivetrain.checkpoint.manifest import Manifest
from drivetrain.checkpoint.tensor_file import Entry
from drivetrain.checkpoint.tree import DTYPES

FOLDER = "tensors"
"""The folder of a checkpoint that its tensors and their index are in."""

INDEX = f"{FOLDER}/index.json"

_STORED = {name: dtype for name, dtype in DTYPES.items() if not re.fullmatch(r"u?int[1-7]", name)}
_LONGEST = 2**63 - 1


@dataclass(frozen=True)
class Place:
    """Where one part of a tensor lies."""

    file: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class Part:
    """One part of a tensor.

    Attributes:
        entry: Its name in its file, its dtype and its sizes.
        place: Where it lies.
    """

    entry: Entry
    place: Place


class TensorIndex:
    """Every tensor of a checkpoint, and where its parts lie.

    Args:
        content: What `index.json` holds.
        manifest: Of the checkpoint.
        path: The index's path, for messages.

    Attributes:
        metadata: The tensors as `torch.distributed.checkpoint` describes them.

    Raises:
        DamagedCheckpointError: It cannot be the index of these files; the tensor is named.
    """

    def __init__(self, content: Any, manifest: Manifest, path: str) -> None:
        self._manifest, self._path = manifest, path
        self._parts: dict[MetadataIndex, Part] = {}
        tensors = content.get("tensors") if isinstance(content, dict) else None
        if not isinstance(tensors, dict):
            raise DamagedCheckpointError(f"{path} is damaged: it lists no tensors.")
        self.metadata = Metadata({key: self._described(key, one) for key, one in tensors.items()})
        self._check_files()

    def part(self, index: MetadataIndex) -> Part:
        """A part of a tensor."""
        return self._parts[index]

    def files(self) -> dict[str, list[Part]]:
        """For each file with tensors the parts in it that are not empty."""
        found: dict[str, list[Part]] = {}
        for part in self._parts.values():
            if part.place.nbytes:
                found.setdefault(part.place.file, []).append(part)
        return found

    def _described(self, key: str, one: Any) -> TensorStorageMetadata:
        if not isinstance(one, dict) or not isinstance(one.get("chunks"), list):
            raise self._damaged(key, "is not described")
        dtype = _STORED.get(one["dtype"]) if isinstance(one.get("dtype"), str) else None
        if dtype is None:
            raise self._damaged(key, f"has the dtype {one.get('dtype')!r}, which no tensor of a checkpoint has")
        size = self._numbers(key, one.get("size"), "size")
        if math.prod(max(1, length) for length in size) * dtype.itemsize > _LONGEST:
            raise self._damaged(key, f"has the size {size}, which no tensor has")
        chunks = [self._chunk(key, dtype, size, chunk) for chunk in one["chunks"]]
        filled = [chunk for chunk in chunks if chunk.sizes.numel()]
        pair = _overlapping(filled)
        if pair is not None:
            raise self._damaged(key, f"has two parts for one place, at {_at(pair[0])} and {_at(pair[1])}")
        covered = sum(chunk.sizes.numel() for chunk in filled)
        if covered != math.prod(size):
            raise self._damaged(key, f"has {math.prod(size)} values, of which its parts hold only {covered}")
        return TensorStorageMetadata(TensorProperties(dtype), torch.Size(size), chunks)

    def _chunk(self, key: str, dtype: torch.dtype, size: list[int], chunk: Any) -> ChunkStorageMetadata:
        if not isinstance(chunk, dict):
            raise self._damaged(key, "has a part that is not described")
        offsets = self._numbers(key, chunk.get("offsets"), "offsets")
        sizes = self._numbers(key, chunk.get("sizes"), "sizes")
        file = chunk.get("file")
        start, nbytes = self._numbers(key, [chunk.get("start"), chunk.get("nbytes")], "place")
        inside = len(offsets) == len(sizes) == len(size) and all(
            offset + length <= whole for offset, length, whole in zip(offsets, sizes, size, strict=True)
        )
        if not inside:
            raise self._damaged(key, f"has a part of {sizes} at {offsets}, but is {size} in all")
        listed = self._manifest.files.get(file) if isinstance(file, str) else None
        if listed is None or start + nbytes > listed.size or math.prod(sizes) * dtype.itemsize != nbytes:
            raise self._damaged(key, f"cannot lie where it is said to, in {file}")
        part = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        index = MetadataIndex(key, part.offsets)
        if nbytes or index not in self._parts:  # an empty part may begin where another one does
            self._parts[index] = Part(_entry(key, dtype, size, offsets, sizes), Place(str(file), start, nbytes))
        return part

    def _numbers(self, key: str, values: Any, what: str) -> list[int]:
        fits = isinstance(values, list) and all(type(value) is int and 0 <= value <= _LONGEST for value in values)
        if not fits:
            raise self._damaged(key, f"has the {what} {values!r}, which are not numbers of 0 or more")
        return list(values)

    def _check_files(self) -> None:
        """Let no bytes belong to two parts: a small file could stand for more memory than there is."""
        ends: dict[str, tuple[int, str]] = {}
        for part in sorted(self._parts.values(), key=lambda one: (one.place.file, one.place.start)):
            place = part.place
            if not place.nbytes:
                continue
            end, before = ends.get(place.file, (0, ""))
            if place.start < end:
                raise self._damaged(part.entry.name, f"lies where {before} does, in {place.file}")
            ends[place.file] = (place.start + place.nbytes, part.entry.name)

    def _damaged(self, key: str, what: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{self._path} is damaged: {key} {what}.")


def entry_name(key: str, size: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """The name that a part of a tensor has in its file."""
    return key if tuple(sizes) == tuple(size) else f"{key}@{','.join(map(str, offsets))}"


def entry_of(item: WriteItem) -> Entry:
    """The part of a tensor that an item of a plan asks to write."""
    data = item.tensor_data
    assert data is not None
    name = entry_name(item.index.fqn, data.size, data.chunk.offsets, data.chunk.sizes)
    return Entry(name, data.properties.dtype, tuple(data.chunk.sizes))


def _entry(key: str, dtype: torch.dtype, size: list[int], offsets: list[int], sizes: list[int]) -> Entry:
    return Entry(entry_name(key, size, offsets, sizes), dtype, tuple(sizes))


def check_header(header: bytes, length: int, parts: Sequence[Part], path: str) -> None:
    """Compare the index's description of a file with the file's own header.

    Args:
        header: The header, JSON.
        length: How many bytes come before the tensors.
        parts: What lies in the file by the index.
        path: The file's path.

    Raises:
        DamagedCheckpointError: They differ; the tensor is named.
    """
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: its header is not JSON.") from error
    for part in parts:
        name = part.entry.name
        said = entries.get(name) if isinstance(entries, dict) else None
        if said != part.entry.described(part.place.start - length):
            raise DamagedCheckpointError(
                f"{path} is damaged: its header does not have {name} where it lies by the index, with that "
                "dtype and shape."
            )


def _overlapping(chunks: Sequence[ChunkStorageMetadata]) -> tuple[ChunkStorageMetadata, ChunkStorageMetadata] | None:
    """Two parts, none of them empty, that hold a value in common."""
    if len(chunks) < 2:
        return None
    # Along the dimension that they are spread over most, only few reach beyond the start of the next one.
    dims = range(len(chunks[0].sizes))
    along = max(dims, key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}), default=None)
    if along is None:
        return chunks[0], chunks[1]  # two parts of a number
    reaching: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda one: one.offsets[along]):
        reaching = [one for one in reaching if one.offsets[along] + one.sizes[along] > chunk.offsets[along]]
        for one in reaching:
            if all(
                one.offsets[dim] < chunk.offsets[dim] + chunk.sizes[dim]
                and chunk.offsets[dim] < one.offsets[dim] + one.sizes[dim]
                for dim in dims
            ):
                return one, chunk
        reaching.append(chunk)
    return None


def _at(chunk: ChunkStorageMetadata) -> str:
    return str(list(chunk.offsets))
