"""Checkpoints: saving state to disk atomically, and loading it on any number of processes.

The stable functions and classes are listed below. Call them on every process, unless "one process" is noted.

- `save_run_state(directory, shared, own, state, *, step=None, block=True) -> PendingSave`
- `load_run_state(directory, state=None, *, into=None, strict=True, only=None, verify="hash") -> (shared, own | None)`.
With `state=None`, a single process loads without communication. `only=("engine/models", ...)` selects entries.
- `newest_checkpoint(root, verify=True, *, state=None) -> str | None`, and `list_checkpoints(root) ->
[FoundCheckpoint(path, step, saved_at, world_size)]` (one process), newest first.
- `PendingSave`: `done()`, `failed()`, `wait(timeout=None)`, `raise_if_failed()`, `add_done_callback(function)`,
`directory`.
- `save_queue(state) -> SaveQueue`, one per process: `save(...)`, `check()` at each step, `finish()`, `pending`.
- `describe_run_state(directory) -> shared` (one process): the state with tensors on the meta device.
- `remove_checkpoint(directory)` (one process).
- `is_checkpoint(directory)` (one process): True if drivetrain wrote it. `checkpoint_at(path) -> FoundCheckpoint`.
- `Checkpoint(directory)` (one process): `manifest`, `shared(into, strict) -> (state, LoadReport)`, `own(rank)`,
`verify()`.
- `clean_stale(root)` (one process): remove what ended runs left. Every save and every search does this as well.
- `consolidate(checkpoint, output, max_shard_size="5GB", dtype=None, module=None)` (one process): export safetensors.
- `consolidate_shards(directory, output)` (one process): export safetensors from `torch.distributed.checkpoint` shards.
- `import_checkpoint(source, output)` (one process): convert a checkpoint of another tool.
- `read_foreign(path, rank)`: read a checkpoint of another tool. `read_shared(path, only)`: read one of any format.
- `CheckpointFormat`, `find_format(name)`: how the checkpoints of a tool are recognized, read and written.
- `open_weights(source)` (one process): weights by name from any source, read one at a time.

`directory` and `root` are local paths or fsspec URLs. Every failure is a `CheckpointError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.runtime.exports import load_export

# public name -> the module that defines it; resolved on first use, since torch's distributed checkpoints take
# most of a second to import, and most of what a run does needs none of them
_EXPORTS = {
    "Checkpoint": "drivetrain.checkpoint.load",
    "CheckpointFormat": "drivetrain.checkpoint.formats",
    "find_format": "drivetrain.checkpoint.formats",
    "FoundCheckpoint": "drivetrain.checkpoint.discovery",
    "LoadReport": "drivetrain.checkpoint.load",
    "PendingSave": "drivetrain.checkpoint.save",
    "SaveQueue": "drivetrain.checkpoint.save",
    "clean_stale": "drivetrain.checkpoint.storage",
    "compare_states": "drivetrain.checkpoint.load",
    "consolidate": "drivetrain.checkpoint.export",
    "consolidate_shards": "drivetrain.checkpoint.export",
    "describe_run_state": "drivetrain.checkpoint.run_state",
    "extra_place": "drivetrain.checkpoint.save",
    "holds_positions": "drivetrain.checkpoint.torch_files",
    "import_checkpoint": "drivetrain.checkpoint.run_state",
    "is_checkpoint": "drivetrain.checkpoint.formats",
    "key_here": "drivetrain.checkpoint.formats",
    "is_sharded": "drivetrain.checkpoint.export",
    "list_checkpoints": "drivetrain.checkpoint.discovery",
    "load_over_processes": "drivetrain.checkpoint.export",
    "load_run_state": "drivetrain.checkpoint.run_state",
    "checkpoint_at": "drivetrain.checkpoint.discovery",
    "named_by_position": "drivetrain.checkpoint.torch_files",
    "newest_checkpoint": "drivetrain.checkpoint.discovery",
    "open_weights": "drivetrain.checkpoint.export",
    "packed": "drivetrain.checkpoint.tree",
    "read_foreign": "drivetrain.checkpoint.formats",
    "read_processes": "drivetrain.checkpoint.run_state",
    "read_shared": "drivetrain.checkpoint.run_state",
    "remove_checkpoint": "drivetrain.checkpoint.formats",
    "save_pickled_weights": "drivetrain.checkpoint.export",
    "save_queue": "drivetrain.checkpoint.save",
    "save_run_state": "drivetrain.checkpoint.run_state",
    "save_safetensors": "drivetrain.checkpoint.export",
    "with_tied": "drivetrain.checkpoint.export",
}

__all__ = [*sorted(_EXPORTS)]


def __getattr__(name: str) -> Any:
    return load_export(name, _EXPORTS, globals())


if TYPE_CHECKING:
    from drivetrain.checkpoint.discovery import FoundCheckpoint as FoundCheckpoint
    from drivetrain.checkpoint.discovery import checkpoint_at as checkpoint_at
    from drivetrain.checkpoint.discovery import list_checkpoints as list_checkpoints
    from drivetrain.checkpoint.discovery import newest_checkpoint as newest_checkpoint
    from drivetrain.checkpoint.export import consolidate as consolidate
    from drivetrain.checkpoint.export import consolidate_shards as consolidate_shards
    from drivetrain.checkpoint.export import is_sharded as is_sharded
    from drivetrain.checkpoint.export import load_over_processes as load_over_processes
    from drivetrain.checkpoint.export import open_weights as open_weights
    from drivetrain.checkpoint.export import save_pickled_weights as save_pickled_weights
    from drivetrain.checkpoint.export import save_safetensors as save_safetensors
    from drivetrain.checkpoint.export import with_tied as with_tied
    from drivetrain.checkpoint.formats import CheckpointFormat as CheckpointFormat
    from drivetrain.checkpoint.formats import find_format as find_format
    from drivetrain.checkpoint.formats import is_checkpoint as is_checkpoint
    from drivetrain.checkpoint.formats import key_here as key_here
    from drivetrain.checkpoint.formats import read_foreign as read_foreign
    from drivetrain.checkpoint.formats import remove_checkpoint as remove_checkpoint
    from drivetrain.checkpoint.load import Checkpoint as Checkpoint
    from drivetrain.checkpoint.load import LoadReport as LoadReport
    from drivetrain.checkpoint.load import compare_states as compare_states
    from drivetrain.checkpoint.run_state import describe_run_state as describe_run_state
    from drivetrain.checkpoint.run_state import import_checkpoint as import_checkpoint
    from drivetrain.checkpoint.run_state import load_run_state as load_run_state
    from drivetrain.checkpoint.run_state import read_processes as read_processes
    from drivetrain.checkpoint.run_state import read_shared as read_shared
    from drivetrain.checkpoint.run_state import save_run_state as save_run_state
    from drivetrain.checkpoint.save import PendingSave as PendingSave
    from drivetrain.checkpoint.save import SaveQueue as SaveQueue
    from drivetrain.checkpoint.save import extra_place as extra_place
    from drivetrain.checkpoint.save import save_queue as save_queue
    from drivetrain.checkpoint.storage import clean_stale as clean_stale
    from drivetrain.checkpoint.torch_files import holds_positions as holds_positions
    from drivetrain.checkpoint.torch_files import named_by_position as named_by_position
    from drivetrain.checkpoint.tree import packed as packed
