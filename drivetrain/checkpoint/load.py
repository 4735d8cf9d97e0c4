"""Reading a checkpoint: checked, and straight into the tensors that are to hold it."""

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
    """How the tensors asked for and those of a checkpoint differ, by path.

    Attributes:
        missing: Asked for, and not in the checkpoint.
        left_over: In the checkpoint, and not asked for.
        different: In both with different shapes, as `"name: (3, 4) in the checkpoint, (3, 5) here"`.
    """

    missing: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether nothing differs."""
        return not (self.missing or self.left_over or self.different)

    def __str__(self) -> str:
        parts = (
            ("not in the checkpoint", self.missing),
            ("only in the checkpoint", self.left_over),
            ("of another shape", self.different),
        )
        return "; ".join(f"{what}: {_listed(names)}" for what, names in parts if names)


class Checkpoint:
    """A complete checkpoint, opened for reading.

    Args:
        directory: The checkpoint's directory or URL.
        verify: `"hash"` checks the SHA-256 of all that is read, `"size"` the files' sizes only.
        storage: Where it is; found from `directory` if None.

    Attributes:
        manifest: What it consists of, with `step`, `world_size` and `saved_at`.

    Raises:
        CheckpointError: There is no complete checkpoint, or a file is missing, left over or of another size.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        verify: Verify = "hash",
        storage: Storage | None = None,
    ) -> None:
        if verify not in ("hash", "size"):
            raise CheckpointError(f"verify={verify!r}: give 'hash' or 'size'.")
        found, self.directory = storage_of(directory)
        self._storage = storage or found
        self._hashes = verify == "hash"
        if isinstance(self._storage, LocalStorage):
            self.directory = replaced_beside(self.directory) or self.directory
        self.manifest: Manifest = read_manifest(self._storage, self.directory)
        self.tensors = SafetensorsReader(self._storage, self.directory, self.manifest, self._hashes)

    @property
    def storage(self) -> Storage:
        """Where it is."""
        return self._storage

    def packed(self, name: str = SHARED_FILE) -> dict[str, Any]:
        """A tree of plain values as it is in its file, with references to tensors."""
        path = self.tensors.path_of(name)
        packed = decoded(verified_bytes(self._storage, self.directory, self.manifest, name), path)
        return entries_of(packed, path)

    def shared(
        self, into: Mapping[str, Any] | None = None, strict: bool = True, only: Collection[str] | None = None
    ) -> tuple[Any, LoadReport]:
        """Read what all processes share.

        Args:
            only: The top-level entries to read, or paths of two names such as `"engine/models"`; all if None.
            into: Some of its top-level entries, with tensors that are filled in place; they may be sharded DTensors.
            strict: Whether tensors that are missing, left over or of another shape under those entries are an error.

        Returns:
            The state, with the tensors of `into` in it, and what did not fit; with `strict` nothing.
        """
        packed = self.packed()
        if only is not None:
            packed = _part_of(packed, only)
        targets, tied = self._targets(into, packed)
        report = self._compare(packed, targets, into or {})
        if strict and not report.fits:
            raise CheckpointError(
                f"{self.directory} holds the state of another model: {report}. Build the model as in the run that "
                "wrote it, or load with strict=False."
            )
        tree = self._tree(packed, targets, SHARED_FILE)
        for key, target in tied:
            self.read_tensors({key: target})
        return tree, report

    def own(self, rank: int) -> Any:
        """Read what was one process's own."""
        return self._tree(self.packed(PROCESS_FILE.format(rank)), {}, PROCESS_FILE.format(rank))

    def verify(self, names: list[str] | None = None) -> None:
        """Check the SHA-256 of files.

        Args:
            names: Which ones; all if None, and then also that the index and the trees are such as checkpoints hold.

        Raises:
            CheckpointError: One is damaged; it is named.
        """
        jobs: list[Callable[[], None]] = [
            partial(verify_file, self._storage, self.tensors.path_of(name), self.manifest.files[name])
            for name in (self.manifest.files if names is None else names)
        ]
        run_parallel(jobs, workers=os.cpu_count() or 1)
        if names is None:
            self.tensors.check_headers()
            for name in (SHARED_FILE, *(PROCESS_FILE.format(rank) for rank in range(self.manifest.world_size))):
                self._keys(self.packed(name), name)

    def _keys(self, packed: Any, name: str) -> list[str]:
        """The keys of a tree's tensors, all of which the index has."""
        keys, described = tensor_keys(packed, self.tensors.path_of(name)), self.tensors.tensors()
        for key in keys:
            if key not in described:
                raise DamagedCheckpointError(
                    f"{self.tensors.path_of(name)} is damaged: {INDEX} does not have its tensor {key}."
                )
        return keys

    def _tree(self, packed: Any, targets: dict[str, Tensor], name: str) -> Any:
        """Put a tree together, reading its tensors into the targets or new ones."""
        described = self.tensors.tensors()
        tensors: dict[str, Tensor] = {}
        for key in self._keys(packed, name):
            one = described[key]
            target = targets.get(key)
            fits = target is not None and target.shape == one.size
            tensors[key] = target if target is not None and fits else torch.empty(one.size, dtype=one.properties.dtype)
        # One on the meta device stands for what a peer holds, and reads.
        self.read_tensors({key: tensor for key, tensor in tensors.items() if not tensor.is_meta})
        path = self.tensors.path_of(name)
        tree: dict[str, Any] = unpack(packed, tensors.__getitem__, path)
        return tree

    def read_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Fill tensors, which may be sharded ones.

        Args:
            tensors: By the keys that the checkpoint's index has for them.
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
        """Return the tensors to fill by key, and those of tied weights, which the file holds under another's key."""
        if not into:
            return {}, []
        described, targets, tied = self.tensors.tensors(), pack(into)[1], []
        for path, target in list(targets.items()):
            key = None if path in described else key_at(packed, path)
            if key in described and key in targets and described[key].size == target.shape:
                tied.append((key, targets.pop(path)))
        return targets, tied

    def _compare(self, packed: Any, targets: dict[str, Tensor], into: Mapping[str, Any]) -> LoadReport:
        described = self.tensors.tensors()
        heads = tuple(f"{key}/" for key in into)
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


def entries_of(tree: Any, path: str) -> dict[str, Any]:
    """What a file of a checkpoint holds, which is a packed dict; anything else is refused."""
    if type(tree) is not dict or is_tagged(tree):
        raise DamagedCheckpointError(f"{path} is damaged: it holds no named entries.")
    return tree


def compare_states(wanted: Mapping[str, Any], saved: Mapping[str, Any]) -> LoadReport:
    """Compare the tensors of two flat state dicts differ, such as a model's own and one that was loaded.

    Args:
        wanted: What is to be filled.
        saved: What there is.
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
    """Some entries of a packed state, each named by its key or by the path of an entry within one."""
    part: dict[str, Any] = {}
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
