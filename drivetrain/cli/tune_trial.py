"""Program that `drivetrain tune` runs in each process of a trial."""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.data import DataLoader

from drivetrain import Callback, Task, Trainer
from drivetrain.callbacks.base import Stage
from drivetrain.cli.tune import STEPS, WARM_UP, Change
from drivetrain.runtime.collectives import gather_object
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.host import cores_of_process
from drivetrain.trackers.base import first_line

_NOTICEABLE = 0.1
"""Minimum share of the step time for which a change is worth a trial."""
_LAYS_OUT = ("cpu", "cuda", "xpu")
"""Devices with channels-last kernels for convolutions."""
# Arguments of the Trainer that affect a step. A trial leaves out all others.
_KEPT = (
    *("accelerator", "strategy", "devices", "num_nodes", "precision", "compile", "sync_batchnorm"),
    *("limit_train_batches", "overfit_batches", "use_distributed_sampler", "accumulate_grad_batches"),
    *("gradient_clip_val", "gradient_clip_algorithm", "deterministic", "benchmark", "auto_micro_batch", "seed"),
)


class Pace(Callback):
    saves_within_steps = False

    def __init__(self, change: Change, result: Path, compiles: Any) -> None:
        self._change, self._result, self._compiles = change, result, compiles
        self.loaders: list[DataLoader[Any]] = []
        self._first = self._batches = 0
        self._begun = 0.0
        self._lays_out = False

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        layers = [each for each in task.modules() if isinstance(each, nn.Conv2d | nn.ConvTranspose2d)]
        weights = [each.weight for each in layers if not isinstance(each.weight, UninitializedParameter)]
        self._lays_out = any(not each.is_contiguous(memory_format=torch.channels_last) for each in weights)
        if self._change.lays_out:
            task.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        self._first = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        done, topology = trainer.global_step - self._first, trainer.strategy.topology
        # The first steps include compilation and other start-up work, so they are not measured.
        if done < WARM_UP:
            return
        self._batches += bool(self._begun)
        if self._begun and done < WARM_UP + STEPS:
            return
        # Kernels run asynchronously: without this, the clock would not include them.
        topology.kind.synchronize(topology.device)
        if not self._begun:
            self._begun = perf_counter()
            return
        seconds = (perf_counter() - self._begun) / self._batches * trainer.accumulate_grad_batches
        # The slowest process determines the time of a step.
        seconds, shares = max(gather_object([(seconds, trainer.timing.shares)]), key=lambda each: each[0])
        cores = min(gather_object([cores_of_process(trainer.num_devices)]))
        if trainer.is_global_zero:
            changes = [asdict(each) for each in self._changes(trainer, task, shares, cores)]
            self._result.write_text(json.dumps({"seconds": seconds, "changes": changes}))
        # Whatever the script does after these steps is not part of the trial.
        raise SystemExit(0)

    def adapt(self, loader: Any) -> None:
        if isinstance(loader, DataLoader):
            self.loaders.append(loader)
            for name, value in self._change.loader.items():
                setattr(loader, name, value)
            if loader.num_workers and not loader.prefetch_factor:
                loader.prefetch_factor = 2

    def _changes(self, trainer: Trainer, task: Task, shares: dict[str, float], cores: int) -> Iterator[Change]:
        kind, same = trainer.strategy.topology.kind, "Same results."
        if shares["data"] >= _NOTICEABLE and self.loaders:
            count = max(2, 2 * max(each.num_workers for each in self.loaders))
            while count <= max(2, cores):
                yield Change(f"DataLoader(num_workers={count})", same, loader={"num_workers": count})
                count *= 2
            if kind.pins_memory and not all(each.pin_memory for each in self.loaders):
                yield Change("DataLoader(pin_memory=True)", same, loader={"pin_memory": True})
        if shares["forward"] + shares["backward"] + shares["optimizer"] < _NOTICEABLE:
            return
        rounded = "Same results except for rounding."
        if trainer.precision == "32" and kind.supports_bf16():
            note = "Changes results: forward and backward compute with 8 significant bits."
            yield Change("Trainer(precision='bf16-mixed')", note, {"precision": "bf16-mixed"})
        if trainer.accelerator.preparation.compilation is None and self._compiles is None:
            yield Change("Trainer(compile=True)", f"{rounded} The first steps take longer.", {"compile": True})
        if kind.name in _LAYS_OUT and self._lays_out:
            yield Change("task.to(memory_format=torch.channels_last)", f"Before fit. {rounded}", lays_out=True)
        convolves = any(isinstance(each, nn.modules.conv._ConvNd) for each in task.modules())
        is_settled = torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.benchmark
        if kind.name == "cuda" and convolves and not is_settled:
            yield Change("Trainer(benchmark=True)", rounded, {"benchmark": True})


def _patch_trainer(change: Change, result: Path) -> None:
    # The user's script creates its Trainer itself, so the class is changed before the script runs.
    make, adapt = Trainer.__init__, Trainer.adapt_loader

    @functools.wraps(make)
    def make_for_trial(made: Trainer, **options: Any) -> None:
        kept = {name: value for name, value in options.items() if name in _KEPT and name not in change.options}
        pace = Pace(change, result, options.get("compile"))
        quiet: dict[str, Any] = {"barebones": True, "limit_val_batches": 0, "max_epochs": -1}
        make(made, **kept, **change.options, **quiet, default_root_dir=result.parent, callbacks=[pace])
        if made.spawning is not None:
            raise ConfigurationError(
                f"drivetrain tune does not support strategy={made.strategy.name!r}, which starts its own processes. "
                "Use strategy='ddp' and a flag: drivetrain tune --num_processes 2 script.py.",
            )

    def adapt_for_trial(trainer: Trainer, loader: Any, stage: Stage) -> Any:
        loader = adapt(trainer, loader, stage)
        for pace in trainer.callbacks if stage is Stage.TRAIN else ():
            if isinstance(pace, Pace):
                pace.adapt(loader)
        return loader

    Trainer.__init__ = make_for_trial  # type: ignore[assignment, method-assign]
    Trainer.adapt_loader = adapt_for_trial  # type: ignore[assignment, method-assign]


def _main(trial: str, script: str) -> None:
    asked = json.loads(Path(trial).read_text())
    result = Path(asked["result"])
    _patch_trainer(Change(**asked["change"]), result)
    sys.argv = sys.argv[2:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception as error:
        result.write_text(json.dumps({"problem": first_line(error)}))
        raise


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])
