"""`Tuner`: searches for a learning rate or a batch size before a run."""

from __future__ import annotations

import gc
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.callbacks import BatchSizeFinder, Callback, LearningRateFinder
from drivetrain.callbacks.base import Stage, Verb
from drivetrain.callbacks.batch_size_finder import BatchSizeRange
from drivetrain.callbacks.learning_rate_finder import LRRange
from drivetrain.data import CombinedLoader
from drivetrain.data.seeding import kept_generators
from drivetrain.runtime.collectives import broadcast_object_list, gather_object
from drivetrain.runtime.devices import get_device_kind
from drivetrain.runtime.environment import RESUME_VARIABLE
from drivetrain.runtime.errors import ConfigurationError, made_again, nearest
from drivetrain.runtime.host import cores_of_process
from drivetrain.runtime.seeds import isolated_random_state
from drivetrain.strategies import Strategy
from drivetrain.strategies.precision import Precision
from drivetrain.trackers.base import first_line
from drivetrain.trainer import task_checks
from drivetrain.trainer.compiling import uncompiled
from drivetrain.trainer.data_module import DataModule
from drivetrain.trainer.task import Task
from drivetrain.trainer.tuning.batch_size_search import check_batch_size_search, search_batch_size
from drivetrain.trainer.tuning.lr_search import LRFinder, search_learning_rate

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


_STAGES = {stage.verb: stage for stage in Stage}


class Tuner:
    """Searches for a learning rate or a batch size, with a Trainer, before a run of it.

    The task is set up as the run would, some steps are run, and everything is put back as it was, the generators of
    random numbers too: what follows is the run that would have been without the search, with the value that was found.

    Args:
        trainer: The trainer.

    Example:
        ```python
        from drivetrain import Trainer, Tuner

        tuner = Tuner(Trainer(max_epochs=3, logger=False, enable_progress_bar=False))
        ```
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def lr_find(
        self,
        model: Task,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
        weights_only: bool | None = None,
    ) -> LRFinder | None:
        """Search for a learning rate.

        Args:
            model: The task.
            train_dataloaders: As `Trainer.fit` takes them.
            val_dataloaders: As `Trainer.fit` takes them; nothing is validated.
            dataloaders: None.
            datamodule: Where loaders come from instead.
            method: `"fit"`.
            min_lr: The first rate.
            max_lr: The last one.
            num_training: How many rates, each for one optimizer step.
            mode: How the rate rises: `"exponential"` or `"linear"`.
            early_stop_threshold: Stop where the smoothed loss exceeds so many times the smallest one; None never to
                stop.
            update_attr: Whether the task gets the rate.
            attr_name: The attribute or hyper-parameter that holds the rate; `lr` or `learning_rate` if empty.
            weights_only: Taken for Lightning's sake: no file is written.

        Returns:
            What was found; None with `fast_dev_run`.

        Raises:
            ConfigurationError: An argument cannot be, or the task has not one optimizer or no such attribute.
        """
        if method != "fit":
            raise ConfigurationError(
                f"lr_find(method={method!r}): method='fit' is the only one with a learning rate.", code="DT-001"
            )
        tried = LRRange(min_lr, max_lr, num_training, mode.lower(), early_stop_threshold, update_attr, attr_name)
        stage = self._check(LearningRateFinder, method, train_dataloaders, val_dataloaders, dataloaders)
        loaders = {Stage.TRAIN: train_dataloaders, Stage.VALIDATE: val_dataloaders}
        with self._placed(model, stage, loaders, datamodule) as task:
            return self._trainer.tuning.find_learning_rate(task, tried)

    def scale_batch_size(
        self,
        model: Task,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int | None:
        """Search for the largest batch size that memory is enough for.

        Args:
            model: The task.
            train_dataloaders: None: a method of the task or the data module makes them.
            val_dataloaders: The same.
            dataloaders: The same, for the other methods.
            datamodule: Where loaders come from instead.
            method: What is run: `"fit"`, `"validate"`, `"test"` or `"predict"`.
            mode: `"power"` doubles the size until memory lacks; `"binsearch"` then also tries those in between.
            steps_per_trial: Steps to run with each size.
            init_val: The first size.
            max_trials: How many sizes that fit are tried at most.
            batch_arg_name: The attribute or hyper-parameter that holds the size.
            margin: By what share of the largest that fits the size is less, with `"binsearch"`.
            max_val: The largest size that is tried.

        Returns:
            The size, which the task or the data module now has; None with `fast_dev_run`.

        Raises:
            ConfigurationError: An argument cannot be, loaders were given, or nothing has such an attribute.
            RuntimeError: Not even a batch of one row fits.
            CollectiveError: A process without memory could not reach the others.
        """
        tried = BatchSizeRange(mode.lower(), steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val)
        stage = self._check(BatchSizeFinder, method, train_dataloaders, val_dataloaders, dataloaders)
        loaders = {stage: dataloaders}
        if stage is Stage.TRAIN:
            loaders = {Stage.TRAIN: train_dataloaders, Stage.VALIDATE: val_dataloaders}
        with self._placed(model, stage, loaders, datamodule) as task:
            self._trainer.tuning.check_batch_size(task, tried)
            return self._trainer.tuning.find_batch_size(task, tried)

    def _check(self, finder: type[Callback], method: str, training: Any, validating: Any, evaluating: Any) -> Stage:
        """The stage that a method is about, once the loaders fit it and no callback searches too."""
        if method not in _STAGES:
            raise ConfigurationError(
                f"method {method!r} is invalid. Should be one of {', '.join(_STAGES)}.{nearest(method, _STAGES)}",
                code="DT-001",
            )
        if method == "fit" and evaluating is not None:
            raise ConfigurationError(
                "With method='fit' `dataloaders` is of no use; please consider setting `train_dataloaders` and "
                "`val_dataloaders` instead.",
                code="DT-004",
            )
        if method != "fit" and (training is not None or validating is not None):
            raise ConfigurationError(
                f"With method={method!r} `train_dataloaders` and `val_dataloaders` are of no use; please consider "
                "setting `dataloaders` instead.",
                code="DT-004",
            )
        if any(isinstance(callback, finder) for callback in self._trainer.callbacks):
            raise ConfigurationError(
                f"Trainer is already configured with a `{finder.__name__}` callback, which searches when the run "
                "begins. Remove it, or call no Tuner.",
                code="DT-095",
            )
        return _STAGES[Verb(method)]

    @contextmanager
    def _placed(
        self, model: Task, stage: Stage, loaders: dict[Stage, Any], datamodule: DataModule | None
    ) -> Iterator[Task]:
        """Set a task up and place it, as the verb does, for the body; then tear down, with nothing drawn or counted."""
        trainer, run = self._trainer, self._trainer.task_run
        task = uncompiled(model)
        if isinstance(loaders[stage], DataModule):
            loaders, datamodule = {**loaders, stage: None}, loaders[stage]
        progress = trainer.progress.state_dict()
        with ExitStack() as stack:
            stack.enter_context(isolated_random_state(devices=True))
            stack.enter_context(kept_generators(task, datamodule))
            stack.callback(trainer.progress.load_state_dict, progress)
            if stage is Stage.TRAIN:
                task_checks.check_task(task, loaders[stage], loaders[Stage.VALIDATE], datamodule)
            else:
                task_checks.check_evaluation(task, stage)
            run.attach(task, datamodule, stage, loaders)
            trainer.control.begin()
            stack.callback(run.tear_down, task, stage)
            run.set_up(task, stage)
            self._place(task, stage)
            trainer.current.stage = stage
            yield task
            for each, source in run.sources.items():
                if source.is_stale and source.is_defined():
                    trainer.current.loaders[each] = source.raw()

    def _place(self, task: Task, stage: Stage) -> None:
        run, strategy = self._trainer.task_run, self._trainer.strategy
        if stage is not Stage.TRAIN:
            run.place_for_evaluation(task)
            return
        with strategy.init_context():
            task.configure_model()
        trainer = self._trainer
        task_checks.check_training_step(task, trainer.accumulate_grad_batches, trainer.gradient_clip_val)
        run.place(task, run.configure_optimizers(task))


# `Trainer(advise=True)`: changes of one line, each tried on a copy of the task, and what they gain


STEPS = 20
WARM_UP = 5
"""Steps before those that are timed."""
PAYS = 1.1
"""How many times as fast steps become by a change that is worth it; below that the machine's own noise begins."""
MOST = 3
_NOTICEABLE = 0.1
"""The share of the time from which what takes it is worth a trial."""
_AS_IT_IS = "as it is"

# The Trainer's arguments that a step depends on.
_KEPT = (
    *("accelerator", "strategy", "devices", "num_nodes", "precision", "compile", "sync_batchnorm"),
    *("limit_train_batches", "overfit_batches", "use_distributed_sampler", "accumulate_grad_batches"),
    *("gradient_clip_val", "gradient_clip_algorithm", "deterministic", "benchmark", "auto_micro_batch", "seed"),
)


@dataclass(frozen=True)
class Advice:
    """A change that pays.

    Attributes:
        change: The change, as it is written in a script.
        gain: How many times as fast steps were with it.
        seconds: How long a step took with it.
        note: What it means for the numbers.
    """

    change: str
    gain: float
    seconds: float
    note: str

    def __str__(self) -> str:
        return f"{self.change}: {self.gain:.1f}x, {_time(self.seconds)} a step. {self.note}"


@dataclass(frozen=True)
class _Change:
    """What is tried: arguments of the Trainer, another loader, or another layout of the task's weights."""

    text: str
    note: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    adapt: Callable[[DataLoader[Any]], None] | None = None
    lay_out: Callable[[Task], object] | None = None


@dataclass(frozen=True)
class _Outcome:
    """What a trial showed, of the slowest process: seconds of a step, the share of each part, or why there are none."""

    seconds: float
    shares: Mapping[str, float]
    problem: str = ""


def advise(trainer: Trainer, task: Task, loaders: Any, datamodule: DataModule | None) -> list[Advice]:
    """Try changes, print those that pay, and leave everything as it was; call it on all processes.

    Each trial is a `fit` of a few steps with a Trainer or a loader that differs in one argument, of a copy of the task
    and its data module, with no callbacks and trackers.

    Args:
        trainer: The trainer, which has placed nothing yet.
        task: The task that it is to train.
        loaders: Its training loaders; None where a method makes them.
        datamodule: Its data module, if there is one.

    Returns:
        At most three, the best first.

    Raises:
        ConfigurationError: The training data can be read only once.
    """
    for loader in _loaders_in(loaders):
        _refuse_once(loader)
    trainer.print(f"Advice: trying changes, each for {WARM_UP + STEPS} steps on a copy of the task.")
    with _nothing_changed(loaders, datamodule, task) as folder:
        trials = _Trials(trainer, task, loaders, datamodule, folder)
        found = trials.run()
    trainer.print(trials.describe(found))
    return found


class _Trials:
    """The trials for one run.

    Args:
        trainer: The trainer.
        task: Its task.
        loaders: As above.
        datamodule: As above.
        folder: Where a trial writes what it must.
    """

    def __init__(self, trainer: Trainer, task: Task, loaders: Any, datamodule: DataModule | None, folder: str) -> None:
        self._trainer, self._task, self._loaders, self._datamodule = trainer, task, loaders, datamodule
        self._folder = folder
        self._given = {name: value for name, value in trainer.made_with[1].items() if name in _KEPT}
        self._workers: list[int] = []  # of the loaders that are torch's
        self._is_pinned = True
        self._tried: dict[str, _Outcome] = {}
        self._base = _Outcome(0.0, {})

    def run(self) -> list[Advice]:
        """Try everything that may pay. Returns what does."""
        self._base = self._try(_Change(_AS_IT_IS))
        if self._base.problem:
            return []
        shares = self._base.shares
        found: list[tuple[_Change, _Outcome]] = []
        if shares["data"] >= _NOTICEABLE and self._workers:
            found.append(self._try_workers())
            if not self._is_pinned and self._kind.pins_memory:
                found.append(self._measured(_Change("DataLoader(pin_memory=True)", _SAME, adapt=_pin)))
        if shares["forward"] + shares["backward"] + shares["optimizer"] >= _NOTICEABLE:
            found += [self._measured(change) for change in self._model_changes()]
        paying = [each for each in found if self._gain(each[1]) >= PAYS]
        if paying:  # a machine that had more to do at first would make everything seem to pay
            again = self._try(_Change(_AS_IT_IS))
            if not again.problem and again.seconds < self._base.seconds:
                self._base = again
        advice = [
            Advice(change.text, self._gain(outcome), outcome.seconds, change.note)
            for change, outcome in paying
            if self._gain(outcome) >= PAYS
        ]
        return sorted(advice, key=lambda each: -each.gain)[:MOST]

    def describe(self, found: Sequence[Advice]) -> str:
        """What to print.

        Args:
            found: What pays.
        """
        base = self._base
        if base.problem:
            return f"Advice: nothing could be tried, since the steps as they are raised {base.problem}"
        took = f"{_time(base.seconds)} a step as it is"
        failed = [f"{text} could not be tried: {each.problem}" for text, each in self._tried.items() if each.problem]
        if found:
            first = f"Advice, each change measured over {STEPS} steps ({took}):"
            return "\n".join([first, *(f"  {each}" for each in found), *(f"  {each}" for each in failed)])
        slower = [f"{text} {self._gain(each):.2f}x" for text, each in self._tried.items() if not each.problem]
        part, share = max(base.shares.items(), key=lambda item: item[1])
        tried = f"nothing that was tried pays: {', '.join(slower)}" if slower else "there is nothing to try"
        return "; ".join([f"Advice: {tried} ({took}, {share:.0%} of it {part})", *failed]) + "."

    @property
    def _kind(self) -> Any:
        return get_device_kind(self._trainer.strategy.topology.device.type)

    def _gain(self, outcome: _Outcome) -> float:
        return 0.0 if outcome.problem else self._base.seconds / outcome.seconds

    def _measured(self, change: _Change) -> tuple[_Change, _Outcome]:
        outcome = self._tried[change.text] = self._try(change)
        return change, outcome

    def _try_workers(self) -> tuple[_Change, _Outcome]:
        """Double the workers as long as that pays, up to the cores of this process, and two at least."""
        most = max(2, min(gather_object([cores_of_process(self._trainer.num_devices)])))
        count = max(2, 2 * max(self._workers))
        best = self._measured(_with_workers(count))
        while 2 * count <= most and not best[1].problem:
            count *= 2
            following = self._measured(_with_workers(count))
            if following[1].problem or best[1].seconds / following[1].seconds < PAYS:
                break
            best = following
        return best

    def _model_changes(self) -> Iterator[_Change]:
        trainer, kind = self._trainer, self._kind
        if trainer.precision == "32" and kind.supports_bf16():
            note = "It changes the numbers: forwards and backwards compute with 8 bits of each number's digits."
            yield _Change("Trainer(precision='bf16-mixed')", note, {"precision": "bf16-mixed"})
        if trainer.accelerator.preparation.compilation is None and self._given.get("compile") is None:
            note = "The same numbers but for rounding; the first steps take longer."
            yield _Change("Trainer(compile=True)", note, {"compile": True})
        if kind.name in _LAYS_OUT and _has_rows_of_channels(self._task):
            note = "Before fit. The same numbers but for rounding."
            yield _Change("task.to(memory_format=torch.channels_last)", note, lay_out=_lay_out)
        has_convolutions = any(isinstance(each, nn.modules.conv._ConvNd) for each in self._task.modules())
        is_settled = torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.benchmark
        if kind.name == "cuda" and has_convolutions and not is_settled:
            note = "The same numbers but for rounding."
            yield _Change("Trainer(benchmark=True)", note, {"benchmark": True})

    def _try(self, change: _Change) -> _Outcome:
        """Run a trial on all processes."""
        pace, task, trial, problem = _Pace(), None, None, ""
        own = float("inf"), dict.fromkeys(self._trainer.timing.shares, 0.0)
        try:
            trial = self._trial(change, pace)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the run itself warns
                task = deepcopy(self._task)
                if change.lay_out is not None:
                    change.lay_out(task)
                trial.fit(task, self._loaders, datamodule=deepcopy(self._datamodule))
            if pace.seconds is None:
                problem = "it took no steps"
            else:
                own = pace.seconds, trial.timing.shares
        except Exception as error:
            problem = first_line(error)
        task = trial = None
        gc.collect()
        self._kind.empty_cache()
        everyone: list[Any] = gather_object([(*own, problem)])
        seconds, shares, _ = max(everyone, key=lambda each: each[0])
        return _Outcome(seconds, shares, next((each[2] for each in everyone if each[2]), ""))

    def _trial(self, change: _Change, pace: Callback) -> Trainer:
        """A Trainer that differs in one thing, and does nothing but steps."""
        options = {**self._given, **change.options}
        if isinstance(options.get("strategy"), Strategy):
            options["strategy"] = made_again(type(options["strategy"]), *options["strategy"].made_with)
        if isinstance(options.get("precision"), Precision):
            options["precision"] = deepcopy(options["precision"])
        # A subclass may have another constructor.
        kind = next(each for each in type(self._trainer).__mro__ if each.__module__.startswith("drivetrain.trainer."))
        trial: Trainer = kind(
            **options,
            barebones=True,
            callbacks=[pace],
            max_steps=WARM_UP + STEPS,
            max_epochs=WARM_UP + STEPS,
            limit_val_batches=0,
            default_root_dir=self._folder,
        )

        def adapt(loader: Any) -> Any:
            loader = self._trainer.adapt_training_loader(loader)
            if not isinstance(loader, DataLoader):
                return loader
            _refuse_once(loader)
            changed = copy(loader)
            if isinstance(loader.dataset, IterableDataset):  # where it stands is its own
                changed.__dict__["dataset"] = deepcopy(loader.dataset)
            if change.text == _AS_IT_IS:
                self._workers.append(loader.num_workers)
                self._is_pinned = self._is_pinned and loader.pin_memory
            if change.adapt is not None:
                change.adapt(changed)
            return changed

        trial.adapt_training_loader = adapt  # type: ignore[method-assign]
        return trial


_SAME = "The same numbers."


def _with_workers(count: int) -> _Change:
    def adapt(loader: DataLoader[Any]) -> None:
        loader.num_workers = count
        loader.prefetch_factor = loader.prefetch_factor or 2

    note = "The same batches; in a run with a seed also the same random numbers of each sample."
    return _Change(f"DataLoader(num_workers={count})", note, adapt=adapt)


def _pin(loader: DataLoader[Any]) -> None:
    loader.pin_memory = True


_LAYS_OUT = ("cpu", "cuda", "xpu")
"""The devices that compute convolutions of images with the channels of each pixel side by side."""


def _has_rows_of_channels(task: Task) -> bool:
    """Whether the weights of a convolution of images are laid out channel by channel."""
    layers = [each for each in task.modules() if isinstance(each, nn.Conv2d | nn.ConvTranspose2d)]
    weights = [each.weight for each in layers if not isinstance(each.weight, UninitializedParameter)]
    return any(not weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)


def _lay_out(task: Task) -> None:
    task.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class _Pace(Callback):
    """Takes the time of the steps after the first ones."""

    saves_within_steps = False

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._begun, self._batches = 0.0, 0

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step < WARM_UP:
            return
        is_last = trainer.global_step >= WARM_UP + STEPS
        if not self._begun or is_last:
            device = trainer.strategy.topology.device
            get_device_kind(device.type).synchronize(device)
        if not self._begun:
            self._begun = perf_counter()
            return
        self._batches += 1
        if is_last:
            per_batch = (perf_counter() - self._begun) / self._batches
            self.seconds = per_batch * trainer.accumulate_grad_batches


@contextmanager
def _nothing_changed(loaders: Any, datamodule: DataModule | None, task: Task) -> Iterator[str]:
    """Put back what trials share with the run, and give them a folder that is gone afterwards."""
    benchmarks, resumes = torch.backends.cudnn.benchmark, os.environ.pop(RESUME_VARIABLE, None)
    several = [*_loaders_in(loaders), datamodule, task]
    datasets = [getattr(each, "dataset", None) for each in several]
    with ExitStack() as stack:
        stack.enter_context(isolated_random_state(devices=True))
        stack.enter_context(kept_generators(*several, *datasets))
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="drivetrain_advice_", ignore_cleanup_errors=True)
        )
        try:
            yield str(broadcast_object_list([folder])[0])
        finally:
            torch.backends.cudnn.benchmark = benchmarks
            if resumes is not None:
                os.environ[RESUME_VARIABLE] = resumes


def _loaders_in(given: Any) -> list[Any]:
    """The loaders in what `fit` was given."""
    if isinstance(given, CombinedLoader):
        given = given.loaders
    if isinstance(given, Mapping):
        given = list(given.values())
    if isinstance(given, list | tuple):
        return [each for part in given for each in _loaders_in(part)]
    return [] if given is None else [given]


def _refuse_once(loader: Any) -> None:
    """Refuse data that can be read only once."""
    for what in (loader, getattr(loader, "dataset", None)):
        if isinstance(what, Iterator):
            raise ConfigurationError(
                f"Trainer(advise=True) reads the first batches of the training data several times, and "
                f"{type(what).__name__} can be read only once. Give a DataLoader over a dataset that begins again at "
                "each iteration, or leave advise out.",
                code="DT-097",
            )


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


# `Tuning`: the searches of one Trainer, for its `Tuner` and for the callbacks that search within a run


class Tuning:
    """Searches for the task that a Trainer has placed; each leaves the run as it found it.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def find_learning_rate(self, task: Task, tried: LRRange) -> LRFinder | None:
        """Search for a learning rate; call it on all processes.

        Args:
            task: The task that runs.
            tried: Which rates, and what becomes of the one found.

        Returns:
            What was found; None with `fast_dev_run`.
        """
        if self._is_skipped("learning rate finder"):
            return None
        return search_learning_rate(self._trainer, task, tried)

    def check_batch_size(self, task: Task, tried: BatchSizeRange) -> None:
        """Raise where the batch size of what runs cannot be searched, before anything is placed.

        Args:
            task: The task that runs.
            tried: Which sizes.
        """
        stage = self._trainer.task_run.stage
        assert stage is not None
        attribute = check_batch_size_search(self._trainer, task, stage, tried)
        if attribute.is_twice_in_task:
            name = type(task).__name__
            warnings.warn(
                f"{name} has both an attribute {attribute.name} and a hyper-parameter of that name; the search "
                "changes both.",
                stacklevel=3,
            )

    def find_batch_size(self, task: Task, tried: BatchSizeRange) -> int | None:
        """Search for the batch size of what runs; call it on all processes.

        Args:
            task: The task that runs.
            tried: Which sizes.

        Returns:
            The size; None with `fast_dev_run`.
        """
        stage = self._trainer.task_run.stage
        if stage is None or self._is_skipped("batch size scaler"):
            return None
        return search_batch_size(self._trainer, task, stage, tried)

    def advise(self, task: Task, loaders: Any, datamodule: DataModule | None) -> list[Advice]:
        """Try changes before anything is placed, and print those that pay; call it on all processes.

        Args:
            task: The task that is to be trained.
            loaders: Its training loaders; None where a method makes them.
            datamodule: Its data module, if there is one.

        Returns:
            At most three; none with `fast_dev_run`.
        """
        return [] if self._is_skipped("advice") else advise(self._trainer, task, loaders, datamodule)

    def _is_skipped(self, what: str) -> bool:
        if self._trainer.fast_dev_run:
            warnings.warn(f"Skipping {what} since `fast_dev_run` is enabled.", stacklevel=4)
        return bool(self._trainer.fast_dev_run)
