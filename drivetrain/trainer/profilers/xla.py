"""Profiler that names actions in traces of XLA."""

from __future__ import annotations

from typing import Any

from drivetrain.runtime import xla
from drivetrain.trainer.profilers.base import Profiler

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class XLAProfiler(Profiler):
    """Profiler for XLA devices, which serves traces with named actions to TensorBoard.

    Args:
        port: Port of the trace server. Each process of a machine adds its local rank.

    Raises:
        ConfigurationError: When the run begins, if torch_xla is not installed.

    Example:
        ```python
        from drivetrain import Trainer, XLAProfiler

        trainer = Trainer(profiler=XLAProfiler(port=9012), logger=False)
        ```
    """

    def __init__(self, port: int = 9012) -> None:
        super().__init__()
        self.port = port
        self._server: Any = None
        self._open: dict[str, Any] = {}

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        # The server stays for later runs of this process, since its port is in use.
        if self._server is None:
            self._server = xla.serve_profiles(self.port + self.local_rank)

    def start(self, action_name: str) -> None:
        is_step = action_name.rpartition(".")[2] in _STEPS
        self._open[action_name] = trace = xla.trace(action_name, is_step)
        trace.__enter__()

    def stop(self, action_name: str) -> None:
        trace = self._open.pop(action_name, None)
        if trace is not None:
            trace.__exit__(None, None, None)
