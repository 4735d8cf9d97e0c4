"""Torch's profiler around a part of a loop."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from drivetrain.accelerator.handlers import ProfileKwargs
from drivetrain.runtime.state import PartialState


@contextmanager
def profiling(handler: ProfileKwargs | None, usual: ProfileKwargs | None, state: PartialState) -> Iterator[Any]:
    """Record what the body does; each process writes its trace where one is asked for.

    Args:
        handler: The options of this recording.
        usual: Those where None were given.
        state: This process among its peers.

    Yields:
        The profiler.
    """
    options = handler or usual or ProfileKwargs()
    with options.build() as profiler:
        yield profiler
    if options.output_trace_dir is not None:
        os.makedirs(options.output_trace_dir, exist_ok=True)
        path = os.path.join(options.output_trace_dir, f"profile_{state.process_index}.json")
        profiler.export_chrome_trace(path)
        state.wait_for_everyone()
