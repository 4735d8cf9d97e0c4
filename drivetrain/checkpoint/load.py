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

from drivetrain.checkpoint.manifest import Manifest, decoded, read_manifest, verified_bytes
from drivetrain.checkpoint.peers import Failure, Peers
from drivetrain.checkpoint.save import SHARED_FILE, process_file
from drivetrain.checkpoint.shards import SafetensorsReader
from drivetrain.checkpoint.storage import LocalStorage, Storage, storage_of
from drivetrain.checkpoint.stream import verify_file
from drivetrain.checkpoint.tensor_file import run_parallel
from drivetrain.checkpoint.tree import pack, tensor_keys, unpack
from drivetrain.checkpoint.writer_record import replaced_beside
from drivetrain.runtime.errors import CheckpointError
from drivetrain.runtime.state import PartialState

Verify = Literal["hash", "size"]

_SHOWN = 8


@dataclass(frozen=True)
class LoadReport:
    """How the tensors asked for and those of a checkpoint differ, by path.

    Attributes:
        missing: asked for, and not in the checkpoint.
        left_over: in the checkpoint, and not asked for.
        different: in both with different shapes, as `"name: (3, 4) in the checkpoint, (3, 5) here"`.
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
        directory: the checkpoint's directory or URL.
        verify: `"hash"` checks the SHA-256 of all that is read, `"size"` the files' sizes only.
        storage: where it is; found from `directory` if None.
        once: whether no other process of this machine reads it as well, so that caching it is of no use.

    Attributes:
        manifest: what it consists of, with `step`, `world_size` and `saved_at`.

    Raises:
        CheckpointError: there is no complete checkpoint, or a file is missing, left over or of another size.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        verify: Verify = "hash",
        storage: Storage | None = None,
        once: bool = False,
    ) -> None:
        if verify not in ("hash", "size"):
            raise CheckpointError(f"verify={verify!r}: give 'hash' or 'size'.")
        found, self.directory = storage_of(directory)
        self._storage = storage or found
        self._hashes, self._once = verify == "hash", once
        if isinstance(self._storage, LocalStorage):
            self.directory = replaced_beside(self.directory) or self.directory
        self.manifest: Manifest = read_manifest(self._storage, self.directory)
        self.tensors = SafetensorsReader(self._storage, self.directory, self.manifest, self._hashes, once)

    @property
    def storage(self) -> Storage:
        """Where it is."""
        return self._storage

    def packed(self, name: str = SHARED_FILE) -> Any:
        """A tree of plain values as it is in its file, with references to tensors."""
        path = self.tensors.path_of(name)
        return decoded(verified_bytes(self._storage, self.directory, self.manifest, name), path)

    def shared(
        self, into: Mapping[str, Any] | None = None, strict: bool = True, only: Collection[str] | None = None
    ) -> tuple[Any, LoadReport]:
        """Read what all processes share.

        Args:
            only: the top-level entries to read, or paths of two names such as `"engine/models"`; all if None.
            into: some of its top-level entries, with tensors that are filled in place; they may be sharded DTensors.
            strict: whether tensors that are missing, left over or of another shape under those entries are an error.

        Returns:
            The state, with the tensors of `into` in it, and what did not fit; with `strict` nothing.
        """
        packed = self.packed()
        if only is not None:
            packed = _part_of(packed, only)
        targets = self._targets(into)
        report = self._compare(packed, targets, into or {})
        if strict and not report.fits:
            raise CheckpointError(
                f"{self.directory} holds the state of another model: {report}. Build the model as in the run that "
                "wrote it, or load with strict=False."
            )
        return self._tree(packed, targets), report

    def own(self, rank: int) -> Any:
        """Read what was one process's own."""
        return self._tree(self.packed(process_file(rank)), {})

    def verify(self, names: list[str] | None = None) -> None:
        """Check the SHA-256 of files.

        Args:
            names: which ones; all if None.

        Raises:
            CheckpointError: one is damaged; it is named.
        """
        jobs: list[Callable[[], None]] = [
            partial(verify_file, self._storage, self.tensors.path_of(name), self.manifest.files[name], self._once)
            for name in (self.manifest.files if names is None else names)
        ]
        run_parallel(jobs, workers=os.cpu_count() or 1)

    def _tree(self, packed: Any, targets: dict[str, Tensor]) -> Any:
        """Put a tree together, reading its tensors into the targets or new ones."""
        described = self.tensors.tensors()
        tensors: dict[str, Tensor] = {}
        for key in tensor_keys(packed):
            if key not in described:
                raise CheckpointError(f"{self.directory}: the index of its tensors does not have {key}.")
            one = described[key]
            target = targets.get(key)
            fits = target is not None and target.shape == one.size
            tensors[key] = target if target is not None and fits else torch.empty(one.size, dtype=one.properties.dtype)
        # One on the meta device stands for what a peer holds, and reads.
        self._read({key: tensor for key, tensor in tensors.items() if not tensor.is_meta})
        return unpack(packed, tensors.__getitem__)

    def _read(self, tensors: dict[str, Tensor]) -> None:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        metadata = self.tensors.read_metadata()
        with torch.no_grad():
            planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
            plan = planner.finish_plan(planner.create_local_plan())
            self.tensors.read_data(plan, planner).wait()

    def _targets(self, into: Mapping[str, Any] | None) -> dict[str, Tensor]:
        if not into:
            return {}
        packed, tensors = pack(into)
        del packed
        return tensors

    def _compare(self, packed: Any, targets: dict[str, Tensor], into: Mapping[str, Any]) -> LoadReport:
        described = self.tensors.tensors()
        heads = tuple(f"{key}/" for key in into)
        saved = [key for key in tensor_keys(packed) if key.startswith(heads)] if heads else []
        return LoadReport(
            [key for key in targets if key not in described],
            [key for key in saved if key not in targets],
            [
                f"{key}: {tuple(described[key].size)} in the checkpoint, {tuple(target.shape)} here"
                for key, target in targets.items()
                if key in described and described[key].size != target.shape
            ],
        )


def load_run_state(
    directory: str | os.PathLike[str],
    state: PartialState | None = None,
    *,
    into: Mapping[str, Any] | None = None,
    strict: bool = True,
    only: Collection[str] | None = None,
    verify: Verify = "hash",
    storage: Storage | None = None,
) -> tuple[Any, Any | None]:
    """Read a checkpoint. Nothing in it is ever unpickled.

    Args:
        directory: the checkpoint's directory or URL.
        state: this process among its peers, all of which must call it; an error of one is raised on all. None for a
            process that reads alone.
        into: some of the shared state's top-level entries, with tensors that are filled in place; they may be sharded.
        strict: whether tensors missing, left over or of another shape under those entries are an error.
        only: the shared state's top-level entries to read, or paths of two names such as `"engine/models"`; all if
            None. Files that hold none of them are not read.
        verify: `"hash"` checks the SHA-256 of every file, `"size"` their sizes only, as after `newest_checkpoint`.
        storage: where it is; found from `directory` if None.

    Returns:
        What all processes share, and this process's own part; None where as many processes did not write it.

    Raises:
        CheckpointError: there is no complete checkpoint, a file is damaged, or it is that of another model.

    Example:
        ```python
        from drivetrain import PartialState
        from drivetrain.checkpoint import load_run_state, save_run_state

        state = PartialState()
        save_run_state("checkpoints/step_7", {"epoch": 1}, {"seen": 28}, state, step=7)
        shared, own = load_run_state("checkpoints/step_7", state)
        ```
    """
    peers = Peers(state)

    def read() -> tuple[Any, Any | None]:
        checkpoint = Checkpoint(directory, verify, storage, once=state is None or state.num_processes == 1)
        shared, _ = checkpoint.shared(into, strict, only)
        same_world = state is not None and checkpoint.manifest.world_size == state.num_processes
        own = checkpoint.own(peers.rank) if same_world else None
        if verify == "hash" and only is None:
            checkpoint.verify(checkpoint.tensors.unread())
        return shared, own

    result = peers.attempt(read)
    failure = peers.agree(result if isinstance(result, Failure) else None)
    if failure is not None:
        peers.fail(failure, f"The checkpoint {os.fspath(directory)} could not be loaded")
    assert not isinstance(result, Failure)
    return result


def compare_states(wanted: Mapping[str, Any], saved: Mapping[str, Any]) -> LoadReport:
    """Say how the tensors of two flat state dicts differ, such as a model's own and one that was loaded.

    Args:
        wanted: what is to be filled.
        saved: what there is.
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
