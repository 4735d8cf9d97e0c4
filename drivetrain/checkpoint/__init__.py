"""How state reaches disk and comes back: a directory that appears complete or not at all.

What is stable, all of it to be called on every process unless it says otherwise:

- `save_run_state(directory, shared, own, state, *, step=None, block=True) -> PendingSave`
- `load_run_state(directory, state=None, *, into=None, strict=True, only=None, verify="hash") -> (shared, own | None)`;
  `state=None` reads alone, without any exchange; `only=("state_dict", ...)` reads some top-level entries.
- `newest_checkpoint(root, verify=True, *, state=None) -> str | None` and
  `list_checkpoints(root) -> [FoundCheckpoint(path, step, saved_at, world_size)]` (one process), newest first.
- `PendingSave`: `done()`, `failed()`, `wait(timeout=None)`, `raise_if_failed()`,
  `add_done_callback(function)`, `directory`.
- `save_queue(state) -> SaveQueue`, one for each process: `save(...)`, `check()` for each step, `finish()`, `pending`.
- `remove_checkpoint(directory)` (one process): gone under its name at once.
- `Checkpoint(directory)` (one process): `manifest`, `shared(into, strict) -> (state, LoadReport)`, `own(rank)`,
  `verify()`.
- `clean_stale(root)` (one process): what dead runs left. Every save and every look for checkpoints does it too.
- `consolidate(checkpoint, output, max_shard_size="5GB", dtype=None)` (one process): plain safetensors.

`directory` and `root` are local paths or URLs that fsspec knows. Every failure is a `CheckpointError`.
"""

from drivetrain.checkpoint.consolidate import consolidate, save_safetensors
from drivetrain.checkpoint.discovery import FoundCheckpoint, list_checkpoints, newest_checkpoint
from drivetrain.checkpoint.load import Checkpoint, LoadReport, compare_states, load_run_state
from drivetrain.checkpoint.queue import PendingSave, SaveQueue, save_queue
from drivetrain.checkpoint.run_state import remove_checkpoint, save_run_state
from drivetrain.checkpoint.save import extra_place
from drivetrain.checkpoint.writer_record import clean_stale

__all__ = [
    "Checkpoint",
    "FoundCheckpoint",
    "LoadReport",
    "PendingSave",
    "SaveQueue",
    "clean_stale",
    "compare_states",
    "consolidate",
    "extra_place",
    "list_checkpoints",
    "load_run_state",
    "newest_checkpoint",
    "remove_checkpoint",
    "save_queue",
    "save_run_state",
    "save_safetensors",
]
