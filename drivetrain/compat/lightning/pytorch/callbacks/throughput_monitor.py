"""`ThroughputMonitor` with the metric names of Lightning's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from drivetrain.callbacks import Callback
from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_warn
from drivetrain.compat.lightning.fabric.utilities.throughput import Throughput, get_available_flops

__all__ = ["ThroughputMonitor"]


class ThroughputMonitor(Callback):
    """Callback that logs throughput of training, validation, test and prediction.

    `drivetrain.ThroughputMonitor` also counts FLOPs, and synchronizes the device before it reads the clock.
    """

    saves_within_steps = False

    def __init__(
        self, batch_size_fn: Callable[[Any], int], length_fn: Callable[[Any], int] | None = None, **kwargs: Any
    ) -> None:
        self.batch_size_fn, self.length_fn = batch_size_fn, length_fn
        self.kwargs = kwargs
        self.available_flops: float | None = None
        self._passes: dict[str, Pass] = {}
        self._logged_at = -1
        self._has_warned = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.available_flops is None and "available_flops" not in self.kwargs:
            self.available_flops = get_available_flops(trainer.strategy.topology.device, trainer.precision)

    def _pass(self, trainer: Any, name: str) -> Pass:
        if name not in self._passes:
            options = {"available_flops": self.available_flops, "world_size": trainer.world_size}
            self._passes[name] = Pass(Throughput(**{**options, "using_sparse_model": False, **self.kwargs}))
        return self._passes[name]

    def _update(self, trainer: Any, pl_module: Any, batch: Any, name: str) -> None:
        flops = getattr(pl_module, "flops_per_batch", None)
        if flops is None and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                "When using the `ThroughputMonitor`, you need to define a `flops_per_batch` attribute or property in "
                f"{type(pl_module).__name__} to compute the FLOPs."
            )
        lengths = None if self.length_fn is None else self.length_fn(batch)
        self._pass(trainer, name).add(self.batch_size_fn(batch), lengths, flops)

    def _write(self, trainer: Any, name: str, step: int) -> None:
        separator = self.kwargs.get("separator", "/")
        values = {f"{name}{separator}{key}": value for key, value in self._passes[name].throughput.compute().items()}
        if name == "train":
            trainer.log_metrics(values, step)
        elif trainer.tracker_group.writes_here:
            trainer.tracker_group.log(values, step)

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self._logged_at = trainer.global_step
        self._passes.pop("train", None)
        self._pass(trainer, "train").start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self._update(trainer, pl_module, batch, "train")
        step, every = trainer.global_step, trainer.log_every_n_steps
        interval = trainer.tracker_log.step_interval
        is_due = bool(every) and (step % every == 0 if interval is None else interval.is_due(step))
        if step != self._logged_at and is_due:
            self._logged_at = step
            self._write(trainer, "train", step)

    def _evaluated(self, trainer: Any, pl_module: Any, batch: Any, name: str) -> None:
        if trainer.sanity_checking:
            return
        self._update(trainer, pl_module, batch, name)
        batches, every = self._passes[name].batches, trainer.log_every_n_steps
        if isinstance(every, int) and every and batches % every == 0:
            self._write(trainer, name, trainer.global_step if "train" in self._passes else batches)

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._pass(trainer, "validate").start()

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self._evaluated(trainer, pl_module, batch, "validate")

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._passes["train"].leave_out_until(self._passes["validate"])

    def on_test_start(self, trainer: Any, *_: Any) -> None:
        self._pass(trainer, "test").start()

    def on_test_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self._evaluated(trainer, pl_module, batch, "test")

    def on_predict_start(self, trainer: Any, *_: Any) -> None:
        self._pass(trainer, "predict").start()

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self._evaluated(trainer, pl_module, batch, "predict")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._passes.clear()


class Pass:
    """Totals of one stage, such as training, over all its passes."""

    def __init__(self, throughput: Throughput) -> None:
        self.throughput = throughput
        self.batches = 0
        self._samples = self._lengths = 0
        self._before = 0.0  # seconds of earlier passes
        self._began = self._ended = 0.0

    def start(self) -> None:
        """Start a pass."""
        self._before += self._ended - self._began
        self._began = self._ended = time.perf_counter()

    def add(self, samples: int, lengths: int | None, flops: int | None) -> None:
        """Record a batch."""
        self._ended = time.perf_counter()
        self.batches += 1
        self._samples += samples
        self._lengths += lengths or 0
        self.throughput.update(
            time=self._before + self._ended - self._began,
            batches=self.batches,
            samples=self._samples,
            lengths=None if lengths is None else self._lengths,
            flops=flops,
        )

    def leave_out_until(self, other: Pass) -> None:
        """Exclude the time that a nested pass, such as a validation, took."""
        gap = max(0.0, other._ended - self._ended)
        self._began += gap
        self._ended += gap
