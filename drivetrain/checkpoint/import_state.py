"""Converting the checkpoints of other tools into ones of this package."""

from __future__ import annotations

import os
from pathlib import Path

from drivetrain.checkpoint.foreign import read_foreign
from drivetrain.checkpoint.run_state import save_run_state
from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.runtime.state import PartialState


def import_checkpoint(source: str | os.PathLike[str], output: str | os.PathLike[str]) -> str:
    """Convert what Hugging Face Accelerate's `save_state` wrote, also in FSDP's shards, or a `.ckpt` of Lightning's.

    For one process. `Accelerator.load_state` and `Trainer.fit(resume=...)` take the result. Nothing in the files is
    executed. Of random states that of the main process is kept, for a run of one process; Lightning saves none.

    Args:
        source: The directory that Accelerate wrote, or the file of Lightning's or its folder of shards.
        output: The new checkpoint's directory, which must not be there yet.

    Returns:
        `output`.

    Raises:
        CheckpointError: `source` is neither, or a file cannot be read.
        ConfigurationError: `output` is there already.

    Example:
        ```text
        import_checkpoint("accelerate/step_1000", "run/step_1000")
        ```
    """
    found = read_foreign(source)
    if found is None:
        raise CheckpointError(
            f"{os.fspath(source)} is not a checkpoint of Accelerate's save_state, since there is no "
            "random_states_0.pkl, and no file of Lightning's."
        )
    if Path(output).exists():
        raise ConfigurationError(
            f"{os.fspath(output)} is there already. Name a new directory, or remove it.", code="DT-009"
        )
    shared, own = found
    step = shared["driver"].get("progress", {}).get("global_step")
    save_run_state(output, shared, own or {}, PartialState(cpu=True), step=step, block=True)
    return os.fspath(output)
