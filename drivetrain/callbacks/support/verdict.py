"""A sentence about where the time of a run went, and what to change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from drivetrain.runtime.timing import Timing

NOTICEABLE = 0.2  # the share of the time from which something around the model is worth changing


@dataclass(frozen=True)
class TimeSpent:
    """Where the time of training went, in seconds of one process.

    Attributes:
        total: All of it.
        waiting: Waiting for the training loader.
        model: Forward, backward and the optimizers.
        validating: Validations, with their loaders.
        saving: Saving checkpoints.
        syncing: Waiting for other processes.
        callbacks: The hooks of each callback, or of the task, by its name.
        samples: Samples that this process trained on in that time; None where the loader does not count them.
        workers: The loader's worker processes; None where it has none to set.
        cores: The processor's cores for each process of this machine.
    """

    total: float
    waiting: float = 0.0
    model: float = 0.0
    validating: float = 0.0
    saving: float = 0.0
    syncing: float = 0.0
    callbacks: Mapping[str, float] = field(default_factory=dict)
    samples: int | None = None
    workers: int | None = None
    cores: int = 1

    @classmethod
    def of(
        cls,
        timing: Timing,
        samples: int | None,
        workers: int | None,
        cores: int,
        callbacks: Mapping[str, float] | None = None,
    ) -> TimeSpent:
        """What a `Timing` has measured.

        Args:
            timing: The timing.
            samples: See the attribute, as the following.
            workers: The loader's.
            cores: Of the processor.
            callbacks: By name, where something else has measured each; all together if None.
        """
        seconds = timing.seconds
        named = {"callbacks, which profiler='simple' names": seconds["callbacks"]} if callbacks is None else callbacks
        return cls(
            timing.total_seconds,
            waiting=seconds["data"],
            model=seconds["forward"] + seconds["backward"] + seconds["optimizer"],
            validating=seconds["evaluation"],
            saving=seconds["checkpoint"],
            syncing=seconds["sync"],
            callbacks=named,
            samples=samples,
            workers=workers,
            cores=cores,
        )

    def verdict(self) -> str:
        """What takes the time, in one line; empty where nothing was measured."""
        if self.total <= 0:
            return ""
        name, most = max(self.callbacks.items(), key=lambda item: item[1], default=("", 0.0))
        # Waiting is seen against training alone: a validation has its own loader.
        training = max(self.total - self.validating - self.saving, 1e-12)
        found = [
            (self.waiting / self.total, self._about_data(self.waiting / training)),
            (
                self.validating / self.total,
                f"{_percent(self.validating / self.total)} of the time is validation: validate less often "
                "(check_val_every_n_epoch, val_check_interval), on fewer batches (limit_val_batches) or larger ones.",
            ),
            (
                self.saving / self.total,
                f"{_percent(self.saving / self.total)} of the time is saving checkpoints: save less often "
                "(ModelCheckpoint(every_n_train_steps=...)), or beside training (async_save=True).",
            ),
            (
                self.syncing / self.total,
                f"{_percent(self.syncing / self.total)} of the time waits for other processes: see which is slow "
                "(StragglerMonitor), or exchange gradients less often (accumulate_grad_batches).",
            ),
            (
                most / self.total,
                f"{_percent(most / self.total)} of the time is in {name}: make it cheaper, or let it act less often.",
            ),
        ]
        share, sentence = max(found, key=lambda item: item[0])
        if share >= NOTICEABLE:
            return sentence
        if self.model <= 0:
            return (
                f"{_percent(self.waiting / training)} of the step waits for data: the loader keeps up with the model."
            )
        return (
            f"{_percent(self.model / self.total)} of the time is the model's own (forward, backward, optimizer), "
            f"{_percent(self.waiting / self.total)} waits for data: to be faster, the model must be."
        )

    def _about_data(self, share: float) -> str:
        first = f"{_percent(share)} of the step waits for data"
        advice = "make the dataset cheaper, such as by keeping what it computes"
        training = self.total - self.validating - self.saving
        computing = training - self.waiting
        if not self.samples or self.waiting <= 0 or computing <= 0:
            return f"{first}: {advice}, or give its loader more workers (num_workers)."
        # Workers load while the model computes; without them the two take turns.
        loads_for = training if self.workers else self.waiting
        loader, model = self.samples / loads_for, self.samples / computing
        if self.workers is None:
            return f"{first}: the loader gives {_rate(loader)} samples/s, the model takes {_rate(model)}; {advice}."
        # One more than what would be just enough: handing batches over takes the time of this process, too.
        wanted = math.ceil(max(self.workers, 1) * model / loader) + 1
        sentence = (
            f"{first}: the loader gives {_rate(loader)} samples/s with {self.workers} workers, "
            f"the model takes {_rate(model)}; try num_workers={wanted}"
        )
        if wanted <= self.cores:
            return f"{sentence}."
        return (
            f"{sentence}. This process has {self.cores} core{'s' * (self.cores != 1)}: where loading computes rather "
            f"than waits for files, {advice}."
        )


def _percent(share: float) -> str:
    return f"{min(max(share, 0.0), 1.0) * 100:.0f} %"


def _rate(value: float) -> str:
    """A rate in three digits, such as 2,400."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    rounded = round(value, digits)
    return f"{rounded:,.0f}" if digits <= 0 else f"{rounded:,.{digits}f}"
