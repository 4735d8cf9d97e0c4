"""Actions of a run that are reported to its profiler, and their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import wraps
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from drivetrain.accelerator.step import StepHooks
from drivetrain.callbacks.base import Stage
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.trainer.data_module import DataModule
from drivetrain.trainer.profilers.base import TRAIN_DATA, PassThroughProfiler, Profiler

if TYPE_CHECKING:
    from drivetrain.callbacks.base import Callback
    from drivetrain.data import CombinedLoader, PreparedLoader
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer

C = TypeVar("C", bound=Callable[..., Any])
T = TypeVar("T")

NAMES = ("simple", "advanced", "pytorch", "xla")


class Actions:
    """Measures the hooks and steps of a run with the Trainer's profiler.

    Parts of the run wrap their functions once, before the loop. Without a profiler, functions are returned unchanged,
    so that profiling costs nothing.
    """

    def __init__(self, trainer: Trainer, profiler: Profiler | str | None, barebones: bool) -> None:
        if profiler is not None and barebones:
            raise ConfigurationError(
                f"Trainer(barebones=True, profiler={profiler!r}) is not possible: a barebones run measures nothing. "
                "Remove one of the two.",
            )
        self._trainer = trainer
        self.profiler = PassThroughProfiler() if profiler is None else make_profiler(profiler)
        self.measures = self.profiler.measures
        self._words: Mapping[str, str] = {}
        self._is_open = False
        self._samples: int | None = 0
        self._workers: int | None = None

    def use_words(self, words: Mapping[str, str]) -> None:
        self._words = words

    # Names

    def of_callback(self, callback: Callback, name: str) -> str:
        """Return the name by which the profiler records a callback's hook, such as `[Callback]Timer.on_fit_start`."""
        # The class name alone is ambiguous if there are several callbacks of a class.
        twins = sum(type(each) is type(callback) for each in self._trainer.callbacks)
        return f"[Callback]{callback.state_key if twins > 1 else type(callback).__name__}.{name}"

    def of_strategy(self, name: str) -> str:
        return f"[Strategy]{self._word(self._trainer.strategy.__class__.__name__)}.{name}"

    def of_owner(self, owner: Task | DataModule, name: str) -> str:
        kind = "DataModule" if isinstance(owner, DataModule) else "Task"
        return f"[{self._word(kind)}]{type(owner).__name__}.{name}"

    def _word(self, word: str) -> str:
        return self._words.get(word, word)

    # Measured functions

    def watch(self, action: str, function: C) -> C:
        """Wrap a function so that the profiler measures its calls.

        Without a profiler, return it unchanged.
        """
        if not self.measures:
            return function
        profile = self.profiler.profile

        @wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            with profile(action):
                return function(*args, **kwargs)

        return measured  # type: ignore[return-value]

    def iterate(self, action: str, values: Iterable[T]) -> Iterable[T]:
        return self._iterate(action, iter(values)) if self.measures else values

    def iterate_training(self, values: Iterable[T], loader: PreparedLoader | CombinedLoader) -> Iterable[T]:
        return self._count_samples(self._iterate(TRAIN_DATA, iter(values)), loader) if self.measures else values

    def _count_samples(self, values: Iterator[T], loader: PreparedLoader | CombinedLoader) -> Iterator[T]:
        self._workers = getattr(loader, "num_workers", None)

        def add(value: T) -> T:
            # One unknown count makes the total unknown.
            rows = None if loader.current is None else loader.current.real_rows
            self._samples = None if rows is None or self._samples is None else self._samples + rows
            return value

        return map(add, values)

    def _iterate(self, action: str, values: Iterator[T]) -> Iterator[T]:
        profile = self.profiler.profile
        held: list[T] = []  # emptied before the yield: a local variable would keep the batch in memory
        while True:
            with profile(action):
                held.extend(islice(values, 1))
            if not held:
                return
            yield held.pop()

    def watch_step(self, hooks: StepHooks) -> StepHooks:
        if not self.measures:
            return hooks
        strategy = self._trainer.strategy
        return replace(
            hooks,
            run_backward=self.watch(self.of_strategy("backward"), hooks.run_backward or strategy.backward),
            optimizer_step=self.watch(self.of_strategy("optimizer_step"), strategy.optimizer_step),
        )

    # Start and end of a run

    def begin(self, task: Task, stage: Stage) -> None:
        if self.measures:
            trainer = self._trainer
            # Without a rank, file names of a single process stay short.
            local_rank = trainer.local_rank if trainer.world_size > 1 else None
            self.profiler.setup(stage.verb, local_rank, trainer.local_dir)
            self.profiler.attach(task, self._count_steps)
            self._is_open, self._samples = True, 0

    def finish(self, stage: Stage) -> None:
        if self._is_open:
            self._is_open = False
            # The report needs the recordings that `teardown` releases.
            self.profiler.describe()
            if stage is Stage.TRAIN and self._trainer.is_global_zero:
                from drivetrain.trainer.profilers.simple import SimpleProfiler, time_spent

                trainer = self._trainer
                if isinstance(self.profiler, SimpleProfiler):
                    spent = time_spent(trainer.timing, self.profiler, self._samples, self._workers, trainer.num_devices)
                    trainer.announce(spent.sentence())
            self.profiler.teardown(stage.verb)

    def _count_steps(self, kind: str) -> float:
        current = self._trainer.current
        if kind == Stage.TRAIN.step_name:
            return current.training_batches
        # Evaluation steps run once per loader, so the loaders' lengths are added.
        [stage] = [each for each in Stage if each.step_name == kind]
        return sum(current.evaluation_batches.get(stage, ()), 0.0)


def make_profiler(given: Profiler | str) -> Profiler:
    """Create the profiler that the Trainer's argument `profiler` names.

    A `Profiler` is returned unchanged.
    """
    if isinstance(given, Profiler):
        return given
    name = given.lower() if isinstance(given, str) else ""
    if name not in NAMES:
        allowed = ", ".join(map(repr, NAMES))
        raise ConfigurationError(
            f"profiler={given!r} is not valid. Use one of {allowed}, or a drivetrain.Profiler.{nearest(name, NAMES)}"
        )
    from drivetrain.trainer import profilers  # imports torch's profiler

    kinds: dict[str, type[Profiler]] = {
        "simple": profilers.SimpleProfiler,
        "advanced": profilers.AdvancedProfiler,
        "pytorch": profilers.PyTorchProfiler,
        "xla": profilers.XLAProfiler,
    }
    return kinds[name]()
