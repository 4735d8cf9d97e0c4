"""Converting the checkpoints of other tools into ones of this package."""

from __future__ import annotations

import os
from pathlib import Path

from drivetrain.checkpoint.accelerate_format import is_accelerate_state, read_accelerate_state
from drivetrain.checkpoint.entry_points import save_run_state
from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.runtime.state import PartialState


def import_checkpoint(source: str | os.PathLike[str], output: str | os.PathLike[str]) -> str:
    """Convert what Hugging Face Accelerate's `save_state` wrote, also in FSDP's shards; for one process.

    `Accelerator.load_state` and `Trainer.fit(resume=...)` take the result. Nothing in the files is executed. Of random
    states that of the main process is kept, for a run of one process.

    Args:
        source: The directory that Accelerate wrote.
        output: The new checkpoint's directory, which must not be there yet.

    Returns:
        `output`.

    Raises:
        CheckpointError: `source` is no such directory, or a file in it cannot be read.
        ConfigurationError: `output` is there already.

    Example:
        ```text
        import_checkpoint("accelerate/step_1000", "run/step_1000")
        ```
    """
    if not is_accelerate_state(source):
        raise CheckpointError(
            f"{os.fspath(source)} is not a checkpoint of Accelerate's save_state: there is no random_states_0.pkl."
        )
    if Path(output).exists():
        raise ConfigurationError(f"{os.fspath(output)} is there already. Name a new directory, or remove it.")
    shared, own = read_accelerate_state(source)
    save_run_state(output, shared, own or {}, PartialState(cpu=True), step=None, block=True)
    return os.fspath(output)
