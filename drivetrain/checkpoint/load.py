"""Reading of a checkpoint: verified, and directly into the destination tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from drivetrain.checkpoint.manifest import Manifest, read_manifest, verified_bytes
from drivetrain.checkpoint.save import PROCESS_FILE, SHARED_FILE
from drivetrain.checkpoint.shards import SafetensorsReader, verify_file
from drivetrain.checkpoint.storage import LocalStorage, Storage, replaced_beside, run_parallel, storage_of
from drivetrain.checkpoint.tree import INDEX, decoded, is_tagged, key_at, pack, tensor_keys, unpack
from drivetrain.runtime.errors import CheckpointError, DamagedCheckpointError

Verify = Literal["hash", "size"]

_SHOWN = 8


@dataclass(frozen=True)
class LoadReport:
    """Differences between a model's tensors and those of a checkpoint.

    Attributes:
        missing: Requested tensors that the checkpoint does not hold.
        left_over: Tensors of the checkpoint that were not requested.
        different: Tensors with different shapes, as text such as `"name: (3, 4) in the checkpoint, (3, 5) here"`.
    """

    missing: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """True if the loaded checkpoint contains exactly the model's tensors, with equal names and shapes."""
        return not (self.missing or self.left_over or self.different)

    def __str__(self) -> str:
        parts = (
            ("not in the checkpoint", self.missing),
            ("only in the checkpoint", self.left_over),
            ("of another shape", self.different),
        )
        return "; ".join(f"{what}: {_listed(names)}" for what, names in parts if names)


class Checkpoint:
    """Reader of one checkpoint in drivetrain's own format, to load its state and verify its files.

    Args:
        directory: The checkpoint's directory or URL.
        verify: `"hash"` checks the SHA-256 of each file that is read. `"size"` checks only the sizes.
        storage: The storage to read from. None selects it from `directory`.

    Attributes:
        manifest: The content of its manifest, with `step`, `world_size` and `saved_at`.

    Raises:
        CheckpointError: There is no complete checkpoint, or a file is missing, unexpected or has another size.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        verify: Verify = "hash",
        storage: Storage | None = None,
    ) -> None:
        if verify not in ("hash", "size"):
            raise CheckpointError(f"verify={verify!r} is not valid. Use 'hash' or 'size'.")
        found, self.directory = storage_of(directory)
        self._storage = storage or found
        self._hashes = verify == "hash"
        if isinstance(self._storage, LocalStorage):
            # An interrupted save may have moved the only complete checkpoint aside.
            self.directory = replaced_beside(self.directory) or self.directory
        self.manifest: Manifest = read_manifest(self._storage, self.directory)
        self.tensors = SafetensorsReader(self._storage, self.directory, self.manifest, self._hashes)

    @property
    def storage(self) -> Storage:
        """The `Storage` through which the checkpoint's files are read, such as the local file system."""
        return self._storage

    def packed(self, name: str = SHARED_FILE) -> dict[str, Any]:
        # The content of a JSON file, in which a key stands for each tensor.
        path = self.tensors.path_of(name)
        packed = decoded(verified_bytes(self._storage, self.directory, self.manifest, name), path)
        if type(packed) is not dict or is_tagged(packed):
            raise DamagedCheckpointError(f"{path} is damaged: it is not a JSON object with named entries.")
        return packed

    def shared(
        self, into: Mapping[str, Any] | None = None, strict: bool = True, only: Collection[str] | None = None
    ) -> tuple[Any, LoadReport]:
        """Read the state that all processes share, such as that of the model, and fill the tensors of `into`.

        Args:
            only: The top-level entries to read, or paths of two names such as `"engine/models"`. None reads all.
            into: Some top-level entries with tensors to fill in place. They may be sharded DTensors.
            strict: True to raise an error if tensors of these entries are missing, unexpected or have another shape.

        Returns:
            The state, which contains the tensors of `into`, and a report of differences.
        """
        packed = self.packed()
        if only is not None:
            packed = _part_of(packed, only)
        targets, tied = self._targets(into, packed)
        report = self._compare(packed, targets, into or {})
        if strict and not report.fits:
            raise CheckpointError(
                f"{self.directory} contains the state of a different model: {report}. Build the same model as in the "
                "run that wrote the checkpoint, or load with strict=False."
            )
        tree = self._tree(packed, targets, SHARED_FILE)
        for key, target in tied:
            self.read_tensors({key: target})
        return tree, report

    def own(self, rank: int) -> Any:
        """Read from the checkpoint what only process `rank` has saved, such as its random generators' state."""
        return self._tree(self.packed(PROCESS_FILE.format(rank)), {}, PROCESS_FILE.format(rank))

    def verify(self, names: list[str] | None = None) -> None:
        """Compare the SHA-256 hashes of the checkpoint's files with the manifest, to detect files that are damaged.

        Args:
            names: The files to check. None checks all, and also the structure of the index and the JSON files.

        Raises:
            CheckpointError: A file is damaged. The message names it.
        """
        jobs: list[Callable[[], None]] = [
            partial(verify_file, self._storage, self.tensors.path_of(name), self.manifest.files[name])
            for name in (self.manifest.files if names is None else names)
        ]
        # Hashing is limited by the processor, so all cores are used.
        run_parallel(jobs, workers=os.cpu_count() or 1)
        if names is None:
            self.tensors.check_headers()
            for name in (SHARED_FILE, *(PROCESS_FILE.format(rank) for rank in range(self.manifest.world_size))):
                self._keys(self.packed(name), name)

    def _keys(self, packed: Any, name: str) -> list[str]:
        keys, described = tensor_keys(packed, self.tensors.path_of(name)), self.tensors.tensors()
        for key in keys:
            if key not in described:
                raise DamagedCheckpointError(
                    f"{self.tensors.path_of(name)} is damaged: {INDEX} does not list the tensor {key}."
                )
        return keys

    def _tree(self, packed: Any, targets: dict[str, Tensor], name: str) -> Any:
        described = self.tensors.tensors()
        tensors: dict[str, Tensor] = {}
        for key in self._keys(packed, name):
            one = described[key]
            target = targets.get(key)
            # A target of another shape is not filled; the state then contains a new tensor.
            fits = target is not None and target.shape == one.size
            tensors[key] = target if target is not None and fits else torch.empty(one.size, dtype=one.properties.dtype)
        # Tensors on the meta device are held and read by another process.
        self.read_tensors({key: tensor for key, tensor in tensors.items() if not tensor.is_meta})
        path = self.tensors.path_of(name)
        tree: dict[str, Any] = unpack(packed, tensors.__getitem__, path)
        return tree

    def read_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Read values from this checkpoint into existing `tensors`, such as the weights of a sharded model.

        Args:
            tensors: The tensors to fill, by their key in the checkpoint's index. They may be sharded.
        """
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        metadata = self.tensors.read_metadata()
        with torch.no_grad():
            planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
            plan = planner.finish_plan(planner.create_local_plan())
            self.tensors.read_data(plan, planner)

    def _targets(
        self, into: Mapping[str, Any] | None, packed: Any
    ) -> tuple[dict[str, Tensor], list[tuple[str, Tensor]]]:
        if not into:
            return {}, []
        described, targets, tied = self.tensors.tensors(), pack(into)[1], []
        # Tensors that were tied when they were saved are stored once, but may be separate here, as shards are.
        for path, target in list(targets.items()):
            key = None if path in described else key_at(packed, path)
            if key in described and key in targets and described[key].size == target.shape:
                tied.append((key, targets.pop(path)))
        return targets, tied

    def _compare(self, packed: Any, targets: dict[str, Tensor], into: Mapping[str, Any]) -> LoadReport:
        described = self.tensors.tensors()
        heads = tuple(f"{key}/" for key in into)
        # Only the entries that were requested can have tensors left over.
        saved = [key for key in self._keys(packed, SHARED_FILE) if key.startswith(heads)] if heads else []
        return LoadReport(
            [key for key in targets if key not in described],
            [key for key in saved if key not in targets],
            [
                f"{key}: {tuple(described[key].size)} in the checkpoint, {tuple(target.shape)} here"
                for key, target in targets.items()
                if key in described and described[key].size != target.shape
            ],
        )


def compare_states(wanted: Mapping[str, Any], saved: Mapping[str, Any]) -> LoadReport:
    """Return a report of the names and tensor shapes in which the state dict `saved` differs from `wanted`.

    Args:
        wanted: The state dict to be filled.
        saved: The state dict to load from.

    Returns:
        The differences.
    """
    return LoadReport(
        [name for name in wanted if name not in saved],
        [name for name in saved if name not in wanted],
        [
            f"{name}: {tuple(saved[name].shape)} in the checkpoint, {tuple(value.shape)} here"
            for name, value in wanted.items()
            if isinstance(value, Tensor) and isinstance(saved.get(name), Tensor) and saved[name].shape != value.shape
        ],
    )


def _part_of(packed: Mapping[str, Any], only: Collection[str]) -> dict[str, Any]:
    part: dict[str, Any] = {}
    # A path is a top-level key, or two keys such as `engine/models`.
    for path in only:
        head, _, rest = path.partition("/")
        if path in packed:
            part[path] = packed[path]
        elif rest and isinstance(packed.get(head), dict) and rest in packed[head]:
            part.setdefault(head, {})[rest] = packed[head][rest]
    return part


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
