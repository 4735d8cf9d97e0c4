"""Free device memory, and detect out-of-memory errors."""

from __future__ import annotations

from typing import Any

from drivetrain.runtime.memory import is_out_of_memory, release_memory
from drivetrain.runtime.pytrees import recursively_apply

is_oom_error = is_out_of_memory


def recursive_detach(in_dict: Any, to_cpu: bool = False) -> Any:
    """Detach the tensors of a nested structure."""
    return recursively_apply(lambda tensor: tensor.detach().cpu() if to_cpu else tensor.detach(), in_dict)


def garbage_collection_cuda() -> None:
    """Collect garbage and free cached GPU memory."""
    release_memory()
