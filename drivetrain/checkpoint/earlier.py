"""What of a checkpoint need not be written, since the one before holds it: such files are linked from there.

Tensors that no optimizer changes, such as frozen weights and data sets, lie in files of their own. Such a file is
hashed before it is written; where the newest checkpoint beside it lists the same size and SHA-256, that file gets a
second name (a hard link) instead. Either checkpoint may then be removed, and the other is whole.

What is linked is trusted as far as a complete checkpoint is: its manifest is intact, the file has the size that the
manifest lists, and was not written to since the manifest was. Its content is not read again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from drivetrain.checkpoint.index import INDEX, TensorIndex, entry_of
from drivetrain.checkpoint.manifest import Manifest, decoded, read_manifest, verified_bytes
from drivetrain.checkpoint.storage import MANIFEST, Storage
from drivetrain.checkpoint.tensor_file import FileDigest, bytes_of
from drivetrain.runtime.errors import CheckpointError

SMALLEST = 1 << 20
"""Bytes from which on a tensor is worth a link; less is written sooner."""

_PROBES = 4
_PROBE_BYTES = 512


class Earlier:
    """The newest checkpoint beside one that is being written, which is also the one that this replaces.

    Args:
        storage: Where both are.
        directory: The checkpoint that is being written.
        changing: What optimizers change, and none needs to compare.
    """

    def __init__(self, storage: Storage, directory: str, changing: Collection[MetadataIndex]) -> None:
        self._storage, self._directory, self._changing = storage, directory, changing
        self._found: str | None = None
        self._manifest: Manifest | None = None
        self._index: TensorIndex | None = None
        self._names: dict[FileDigest, str] = {}

    def part(self, items: Sequence[WriteItem]) -> tuple[list[WriteItem], list[WriteItem]]:
        """Part what is to be written into what is written in any case, and what is likely there already.

        Args:
            items: What is to be written.
        """
        others: list[WriteItem] = []
        likely: list[WriteItem] = []
        for item in items:
            fits = self._storage.has_links and item.index not in self._changing and entry_of(item).nbytes >= SMALLEST
            (likely if fits else others).append(item)
        return others, likely

    def compare(
        self, likely: Sequence[WriteItem], resolve: Callable[[WriteItem], Any]
    ) -> tuple[list[WriteItem], list[WriteItem]]:
        """Find the earlier checkpoint, and part what is likely there into what differs and what seems the same.

        Args:
            likely: From `part`.
            resolve: Gives the tensor of each.
        """
        if likely:
            self._open()
        differing: list[WriteItem] = []
        same: list[WriteItem] = []
        for item in likely:
            (differing if self._differs(item, resolve) else same).append(item)
        return differing, same

    def may_have(self, size: int) -> bool:
        """Whether it is worth hashing a file of this size before it is written."""
        return any(digest.size == size for digest in self._names)

    def link(self, digest: FileDigest, target: str) -> bool:
        """Give the file of this content a second name.

        Args:
            digest: Its size and hash.
            target: The name.

        Returns:
            Whether there is such a file and it could be linked; else it has to be written.
        """
        name = self._names.get(digest)
        if name is None or self._found is None or self._manifest is None:
            return False
        source = self._storage.join(self._found, self._manifest.data, name)
        return self._storage.link(source, target, digest.size, self._storage.join(self._found, MANIFEST))

    def _open(self) -> None:
        """Read what the newest checkpoint beside consists of; nothing where there is none, or it is not whole."""
        parent = self._storage.parent(self._directory)
        names = [name for name in self._storage.children(parent or ".") if not name.startswith(".")]
        paths = [self._storage.join(parent, name) for name in names]
        written = {path: self._storage.modified(self._storage.join(path, MANIFEST)) for path in paths}
        newest = max(paths, key=written.__getitem__, default=None)
        if newest is None or not written[newest]:
            return
        try:
            manifest = read_manifest(self._storage, newest)
            raw = verified_bytes(self._storage, newest, manifest, INDEX)
            self._index = TensorIndex(decoded(raw, INDEX), manifest, INDEX)
        except (CheckpointError, OSError):  # damaged, or removed meanwhile: all is written
            return
        self._found, self._manifest = newest, manifest
        self._names = {digest: name for name, digest in manifest.files.items()}

    def _differs(self, item: WriteItem, resolve: Callable[[WriteItem], Any]) -> bool:
        """Whether a few bytes show that a tensor has changed, such as an average of weights, which no optimizer has."""
        if self._index is None or self._found is None or self._manifest is None:
            return False
        try:
            part = self._index.part(item.index)
        except KeyError:
            return False
        if part.entry != entry_of(item):
            return False
        tensor = resolve(item)
        assert isinstance(tensor, Tensor)
        flat = tensor.detach().reshape(-1)
        count = _PROBE_BYTES // flat.itemsize
        path = self._storage.join(self._found, self._manifest.data, part.place.file)
        there = memoryview(bytearray(count * flat.itemsize))
        try:
            with contextlib.closing(self._storage.open(path)) as file:
                for probe in range(_PROBES):
                    start = (flat.numel() - count) * probe // (_PROBES - 1)
                    file.seek(part.place.start + start * flat.itemsize)
                    file.readinto(there)
                    if there != bytes_of(flat[start : start + count]):
                        return True
        except OSError:
            return True
        return False
