"""Saving of a Trainer's run to a checkpoint, and restoring of the run from one."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain import checkpoint
from drivetrain.accelerator.run_state import Moment
from drivetrain.callbacks.base import Callback
from drivetrain.checkpoint.formats import CheckpointFormat
from drivetrain.checkpoint.manifest import LOSS_IS_FINITE, process_in_schema
from drivetrain.data import CombinedLoader, PreparedLoader
from drivetrain.runtime.collectives import broadcast_object_list
from drivetrain.runtime.environment import RESUME_VARIABLE
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, DrivetrainError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.seeds import RandomState
from drivetrain.runtime.terminal import shown
from drivetrain.strategies import Strategy
from drivetrain.trainer.hooks import is_overridden
from drivetrain.trainer.hyper_parameters import ENTRIES, checkpoint_for_hooks, hyper_parameters_to_save, state_of
from drivetrain.trainer.loops.progress import Phase, Progress
from drivetrain.trainer.metrics.logged_values import LoggedValues
from drivetrain.trainer.metrics.metric_sync import (
    find_metrics,
    merged_metric_states,
    metric_states,
    restore_metric_states,
)
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.checkpoint import PendingSave
    from drivetrain.trainer.data_module import DataModule
    from drivetrain.trainer.trainer import Trainer


# State of each rank


def layout_of(strategy: Strategy) -> list[Any]:
    # The state that a rank has saved can be restored only in a run with an equal layout.
    topology = strategy.topology
    return [topology.data_shard.count, None if topology.value_ranks is None else list(topology.value_ranks)]


def merge_saved_ranks(directory: str, strategy: Strategy, task: nn.Module) -> dict[str, Any]:
    """Return this rank's part of a checkpoint's logged values and metrics, if the number of ranks has changed.

    Also used if only the layout of the ranks has changed. Each saved rank is assigned to exactly one rank of this run,
    so that sums over an epoch stay complete. Return {} if the checkpoint has no logged values.
    """
    world_size, own = checkpoint.read_processes(directory)
    first = process_in_schema(own(0))["driver"]
    if "logged" not in first:
        return {}
    _, ranks = first.get("layout", [None, None])
    there = range(world_size) if ranks is None else ranks
    position, count = strategy.topology.value_place
    states = [process_in_schema(own(each))["driver"] for each in there[position::count]]
    if not states:
        return {"logged": {**first["logged"], "train": []}, "metrics": {}}
    return {
        "logged": {**states[0]["logged"], "train": _merged([state["logged"]["train"] for state in states])},
        "metrics": merged_metric_states(task, [state["metrics"] for state in states]),
        "finished_metrics": states[0].get("finished_metrics", []),
    }


def _merged(tables: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for table in tables:
        for entry in table:
            known = found.get(entry["name"])
            found[entry["name"]] = dict(entry) if known is None else _combined(known, entry)
    return list(found.values())


def _combined(one: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    totals = [entry["total"] for entry in (one, other) if entry["total"] is not None]
    if len(totals) == 2:
        # Pending values are concatenated below, not reduced: another order of additions would change the result.
        totals = [_total(one["reduction"], totals[0], totals[1])]
    pending = [entry["pending"] for entry in (one, other) if entry["pending"] is not None]
    return {
        **one,
        "total": totals[0] if totals else None,
        "weight": one["weight"] + other["weight"],
        "pending": torch.cat(pending) if pending else None,
        "weights": [*one["weights"], *other["weights"]],
        "fresh": one["fresh"] or other["fresh"],
    }


def _total(reduction: str | None, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if reduction is None:  # a function that needs all values at once
        return torch.cat([one, other])
    if reduction in ("mean", "sum"):
        return one + other
    return torch.maximum(one, other) if reduction == "max" else torch.minimum(one, other)


# State after the last finished step


_WITHIN_STEPS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_gradients_ready",
    "on_before_optimizer_step",
    "on_exception",
)


class StepSnapshot:
    """Copy of this rank's state before a training step, for checkpoints that are saved during the step.

    A resumed run repeats the unfinished step or validation. Its random numbers, logged values, metric updates and
    buffers must therefore not be saved. A mark copies the random states, the metric states and the buffers.

    Attributes:
        random: Random state at the mark, or None without a mark.
    """

    def __init__(self, task: nn.Module, logged: LoggedValues, progress: Progress) -> None:
        self._task, self._logged, self._progress = task, logged, progress
        self._metrics = find_metrics(task)
        self._kept_buffers = [
            buffer
            for module in task.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]
        self._marked: tuple[int, int] | None = None
        self.random: RandomState | None = None
        self._logged_mark: Any = None
        self._metric_states: dict[str, Any] = {}
        self._buffer_values: list[Tensor] = []

    def mark(self) -> None:
        progress = self._progress
        self._marked = progress.total_batches, progress.validations
        self.random = RandomState.capture()
        self._logged_mark = self._logged.mark()
        self._metric_states = metric_states(self._metrics)
        self.mark_buffers()

    def mark_buffers(self) -> None:
        # Called after `WeightAveraging` has exchanged the buffers.
        if self.is_open:
            self._buffer_values = [buffer.detach().clone() for buffer in self._kept_buffers]

    def release(self) -> None:
        self._marked = self.random = self._logged_mark = None
        self._metric_states, self._buffer_values = {}, []

    @property
    def is_open(self) -> bool:
        # True while the step or validation that follows the mark is running. Checkpoints then store the snapshot.
        progress = self._progress
        return self._marked == (progress.total_batches, progress.validations)

    @contextmanager
    def buffers_restored(self) -> Iterator[None]:
        # Used while a checkpoint is saved.
        if not self.is_open:
            yield
            return
        present = [buffer.detach().clone() for buffer in self._kept_buffers]
        self._fill_buffers(self._buffer_values)
        try:
            yield
        finally:
            self._fill_buffers(present)

    def _fill_buffers(self, values: list[Tensor]) -> None:
        for buffer, value in zip(self._kept_buffers, values, strict=True):
            buffer.data.copy_(value)  # `.data` keeps the version counter: the open backward would fail otherwise

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's logged values and metric states for a checkpoint.

        During a step, they are those from before the step.
        """
        if self.is_open:
            return {"logged": self._logged.state_dict(self._logged_mark), "metrics": self._metric_states}
        return {
            "logged": self._logged.state_dict(),
            "metrics": metric_states(find_metrics(self._task)) if "torchmetrics" in sys.modules else {},
            "finished_metrics": self._logged.finished_metrics(self._task),
        }


def saves_within_steps(trainer: Trainer) -> bool:
    owners: list[tuple[Any, type]] = [(one, Callback) for one in trainer.callbacks if one.saves_within_steps]
    owners.append((trainer.task, Task))
    return any(
        is_overridden(owner, base, name) for owner, base in owners for name in _WITHIN_STEPS if hasattr(base, name)
    )


logger = get_logger(__name__)


class Directories(CheckpointFormat):
    """Default checkpoint format, in which each checkpoint is a directory."""

    name = "drivetrain"

    def save(
        self,
        trainer: Trainer,
        path: str | os.PathLike[str],
        weights_only: bool = False,
        block: bool = True,
        write: Callable[..., PendingSave] | None = None,
        keeps_objects: bool = False,
    ) -> PendingSave:
        """Save a checkpoint of a Trainer's run into the directory `path`, and return a `PendingSave` to wait for.

        All ranks must call this together. `write` writes the state in another format, with the arguments of
        `SaveQueue.save`. With `keeps_objects`, hyper-parameters may be arbitrary objects.
        """
        placed = trainer.task_run
        task, loop, run = placed.task, trainer.loop, trainer.accelerator.run_state
        if task is None or placed.model is None or run.strategy.unwrap(placed.model) is not task:
            if trainer.spawning is not None:
                raise CheckpointError(
                    f"With strategy={trainer.strategy.name!r}, the state of a run exists only in the processes that "
                    "fit() starts, and is gone after fit(). Add a ModelCheckpoint, which saves during fit(), and use "
                    "its best_model_path or last_model_path afterwards."
                )
            raise CheckpointError(
                "There is nothing to save yet. Save the checkpoint in a hook that runs during fit(), or after fit()."
            )
        models, step = run.prepared.models, trainer.progress.global_step
        is_evaluated = all(
            model is not placed.model for model in models
        )  # the model was placed for evaluation and never trained here
        weights_only = weights_only or is_evaluated
        number = next((place for place, model in enumerate(models) if model is placed.model), 0)
        snapshot = StepSnapshot(task, trainer.logged, trainer.progress) if loop is None else loop.batches.snapshot
        moment = moment_of(trainer)
        with snapshot.buffers_restored():
            engine = run.engine_of(placed.model) if is_evaluated else run.engine(weights_only, moment)
            driver = _entries(trainer, task, moment, weights_only, keeps_objects)
            with (
                checkpoint_for_hooks(engine, number, driver) as state,
                trainer.checkpoint_format.shown_to_hooks(state) as shown,
            ):
                for callback in trainer.callbacks:
                    callback.on_save_checkpoint(trainer, task, shown)
                task.on_save_checkpoint(shown)
            own = {"layout": layout_of(run.strategy), **({} if weights_only else snapshot.state_dict())}
            shared, process = run.compose(engine, driver, own, moment)
            write = write or checkpoint.save_queue(trainer.accelerator.state).save
            return write(path, shared, process, step=step, block=block)


DIRECTORIES = Directories()


def _entries(trainer: Trainer, task: Task, moment: Moment, weights_only: bool, keeps_objects: bool) -> dict[str, Any]:
    data = trainer.task_run.datamodule

    def without_secrets(values: Any) -> Any:
        return trainer.tracker_group.secrets.drop(values)

    entries: dict[str, Any] = {
        "progress": trainer.progress.state_dict(),
        **hyper_parameters_to_save(task, keeps_objects, without_secrets),
        LOSS_IS_FINITE: trainer.is_finite,  # also in the manifest: resume='auto' prefers others
    }
    if weights_only:
        return entries
    of_data = hyper_parameters_to_save(data, keeps_objects, without_secrets)
    return {
        **entries,
        **trainer.control.state_dict(),
        **{f"datamodule_{name}": value for name, value in of_data.items()},
        "callbacks": {c.state_key: found for c in trainer.callbacks if (found := c.state_dict())},
        "datamodule": {} if data is None else _watched(trainer, data, "state_dict")(),
        "trackers": trainer.tracker_group.state(),
        "combined_loader": moment.combined,
    }


def _watched(trainer: Trainer, data: DataModule, name: str) -> Callable[..., Any]:
    method: Callable[..., Any] = getattr(data, name)
    return trainer.actions.watch(trainer.actions.of_owner(data, name), method)


class SavedRun:
    """Checkpoint that a run has opened, to resume training or to load weights for an evaluation.

    The parts are restored one after another, while the run is set up. A checkpoint of an `Accelerator` has no entries
    of a Trainer. The run then takes its position from the training loader, and counts steps from 0 or from the
    Trainer's checkpoint that the Accelerator had loaded before.
    """

    def __init__(self, trainer: Trainer, directory: str) -> None:
        self._trainer, self._directory = trainer, directory
        run = trainer.accelerator.run_state
        self._strict: bool = trainer.task is None or trainer.task.strict_loading
        # Hooks expect full weights, and reading shards needs a target for every saved tensor.
        whole = self._hooks_see_weights() or not self._strict
        content = trainer.checkpoint_format.content(directory)
        self._saved = run.open(directory, whole=whole, content=content)
        self._entries = dict(self._saved.driver)
        run.keep({name: value for name, value in self._entries.items() if name not in ENTRIES})
        layout = layout_of(trainer.strategy)
        own = self._saved.own
        # None if the number of ranks or their layout differs. `merge_saved_ranks` then merges the saved ranks.
        self._own = own if own is not None and own.get("layout", layout) == layout else None
        self._is_ours = "progress" in self._entries and "progress" not in self._saved.kept

    @property
    def step(self) -> int | None:
        # None if an `Accelerator` saved the checkpoint.
        return int(self._entries["progress"]["global_step"]) if self._is_ours else None

    def _hooks_see_weights(self) -> bool:
        trainer = self._trainer
        return is_overridden(trainer.task, Task, "on_load_checkpoint") or any(
            is_overridden(each, Callback, "on_load_checkpoint") for each in trainer.callbacks
        )

    def restore_for_evaluation(self) -> None:
        """Load the checkpoint's weights for an evaluation.

        The task's `on_load_checkpoint` may change them first.
        """
        trainer, engine = self._trainer, self._saved.engine
        assert trainer.task is not None
        assert trainer.model is not None
        if len(engine["models"]) != 1:
            raise CheckpointError(
                f"{self._directory} contains {len(engine['models'])} models, but a task can load only a single model."
            )
        shown_to_hooks = trainer.checkpoint_format.shown_to_hooks
        with checkpoint_for_hooks(engine, 0, self._entries) as state, shown_to_hooks(state) as shown:
            trainer.task.on_load_checkpoint(shown)
        self._saved.restore_models([trainer.model], self._strict)

    def restore_early(self) -> None:
        # Called before the run creates optimizers.
        trainer, entries, engine = self._trainer, self._entries, self._saved.engine
        assert trainer.task is not None
        self._saved.refuse_weights_only()
        if trainer.datamodule is not None and (found := state_of(type(trainer.datamodule), entries)):
            _watched(trainer, trainer.datamodule, "load_state_dict")(found)
        models, shown_to_hooks = trainer.accelerator.prepared.models, trainer.checkpoint_format.shown_to_hooks
        number = next((place for place, model in enumerate(models) if model is trainer.model), 0)
        with checkpoint_for_hooks(engine, number, entries) as state, shown_to_hooks(state) as shown:
            self._migrate(shown)
            for callback in trainer.callbacks:
                callback.on_load_checkpoint(trainer, trainer.task, shown)
        # Checkpoints of other tools use other keys.
        callbacks = {checkpoint.key_here(key): state for key, state in self._entries.get("callbacks", {}).items()}
        unknown = set(callbacks) - {checkpoint.key_here(callback.state_key) for callback in trainer.callbacks}
        if unknown:
            logger.warning(
                "The checkpoint contains the states of callbacks that this Trainer does not have: "
                f"{', '.join(sorted(unknown))}. These states are ignored."
            )
        for callback in trainer.callbacks:
            if (key := checkpoint.key_here(callback.state_key)) in callbacks:
                callback.load_state_dict(callbacks[key])

    def _migrate(self, shown: dict[str, Any]) -> None:
        # A callback may have stored copies of the weights in the checkpoint, which `on_load_checkpoint` must change,
        # too.
        trainer = self._trainer
        assert trainer.task is not None
        names = {name for each in trainer.callbacks if (name := each.further_weights) in shown}
        rest = {name: value for name, value in shown.items() if name not in (*names, "state_dict")}
        copies = {name: {**copy.deepcopy(rest), "state_dict": shown[name]} for name in names if name is not None}
        trainer.task.on_load_checkpoint(shown)
        for name, again in copies.items():
            trainer.task.on_load_checkpoint(again)
            shown[name] = again["state_dict"]

    def restore_weights(self) -> None:
        self._saved.check(advice="Let configure_optimizers return the same, and register the same objects.")
        self._saved.restore_models(strict=self._strict)

    def restore_training(self) -> None:
        """Restore optimizers, schedulers and counters from the checkpoint."""
        trainer, saved, entries = self._trainer, self._saved, self._entries
        saved.restore_optimizers()
        for optimizer in trainer.optimizers:
            optimizer._opt_called = True  # otherwise schedulers warn that they step before the optimizer
        saved.restore_schedulers()
        saved.restore_precision()
        saved.restore_registered()
        trainer.progress.load_state_dict(entries.get("progress", {}))
        if not self._is_ours:
            positions = saved.engine["loaders"]
            trainer.progress.begin_epoch(positions[0]["epoch"] + _is_finished(positions[0]) if positions else 0)
        stopped = self._is_ours and bool(entries["should_stop"])
        trainer.control.resume_stop(stopped, entries.get("stop_askers", ()))
        trainer.tracker_group.load_state(entries.get("trackers", ()))

    def restore_loader(self, loader: PreparedLoader | CombinedLoader) -> None:
        """Move the training loader to the position in the checkpoint.

        If the number of ranks has changed, also correct the count of batches in the epoch.
        """
        progress = self._trainer.progress
        state = self._position_for(loader)
        if state is None:
            go_to(loader, progress.epoch, 0 if progress.batches_are_done else progress.batches_in_epoch)
            return
        if self._is_ours and progress.batches_are_done:
            # Of the finished epoch, only the generators of the next epoch's order are needed.
            state = at_start_of(state, progress.epoch + 1)
        elif self._is_ours and progress.batches_in_epoch == 0:
            # For example saved after `fit`, when the loader was still at the end of the last epoch.
            state = at_start_of(state, progress.epoch)
        elif not self._is_ours and _is_finished(state):
            state = at_start_of(state, progress.epoch)
        loader.load_state_dict(state)
        if not self._is_ours:
            progress.batches_in_epoch = _batches_before(loader, state)
            progress.total_batches = max(progress.total_batches, progress.batches_in_epoch)
            progress.validated_at = progress.total_batches
        elif self._own is None and not progress.batches_are_done and isinstance(loader, PreparedLoader):
            # With another number of ranks, the saved batch count does not apply to this rank.
            progress.batches_in_epoch = loader.consumed_batches

    def _position_for(self, loader: PreparedLoader | CombinedLoader) -> dict[str, Any] | None:
        positions = self._saved.engine["loaders"]
        if isinstance(loader, PreparedLoader):
            return positions[0] if positions else None
        count = len(loader.loaders)
        if len(positions) < count:
            return None
        # A checkpoint of an `Accelerator` has no position of a `CombinedLoader`, only those of the loaders in it.
        between = self._entries.get("combined_loader") if self._is_ours else None
        if between is None:
            between = {"index": max(each["batches"] for each in positions[:count]), "ended": [False] * count}
        return {**between, "loaders": positions[:count]}

    def restore_process(self) -> None:
        # Called just before training: any random number or logged value in between would change the run.
        trainer, own = self._trainer, self._own
        assert trainer.task is not None
        if self._is_ours:
            if own is None:
                own = merge_saved_ranks(self._directory, trainer.strategy, trainer.task)
            if "logged" not in own:  # a file of another tool, or one imported from it
                trainer.announce(
                    f"{self._directory} was written by another tool, which saves no random state and no logged "
                    "values. Shuffling, dropout and the values of the current epoch therefore start anew."
                )
                return
            trainer.logged.load_state_dict(own["logged"], trainer.strategy.topology.device)
            restore_metric_states(trainer.task, own["metrics"])
            trainer.logged.resume_finished(trainer.task, own.get("finished_metrics", ()))
        self._saved.restore_random()


def _is_finished(position: Mapping[str, Any]) -> bool:
    # An `Accelerator` loop may save after the last batch of an epoch, before it begins the next one.
    return bool(position.get("finished"))


def moment_of(trainer: Trainer) -> Moment:
    # Random state and loader positions after the last finished step.
    if trainer.loop is None:
        return Moment()
    batches, progress = trainer.loop.batches, trainer.progress
    loader, reached, done = batches.loader, batches.loader.reached, progress.batches_in_epoch
    is_open = batches.snapshot.is_open
    if progress.phase >= Phase.DRAINED:
        position = loader.state_dict()
    elif batches.marked is not None and is_open:
        position = batches.marked
    elif reached is not None and reached.index < done:
        # The loader has not read ahead of the finished steps, so its own position is the one to save.
        position = loader.state_dict()
    elif batches.finished is not None and batches.finished.index == done - 1:
        # The loader has already read batches of the next step, which must be read again after a resume.
        position = loader.state_after(batches.finished)
    elif batches.origin is not None:
        # No step of this pass has finished yet.
        position = batches.origin
    else:
        position = at_start_of(loader.state_dict(), progress.epoch)
    random = batches.snapshot.random if is_open else None
    if "loaders" not in position:
        return Moment(random, [position])
    return Moment(random, position["loaders"], {name: position[name] for name in ("index", "ended")})


def _batches_before(loader: PreparedLoader | CombinedLoader, state: Mapping[str, Any]) -> int:
    return loader.consumed_batches if isinstance(loader, PreparedLoader) else int(state["index"])


def at_start_of(state: dict[str, Any], epoch: int) -> dict[str, Any]:
    """Return a copy of a data loader's saved state that points to the first batch of `epoch`."""
    if "loaders" in state:
        return {
            **state,
            "index": 0,
            "ended": [False] * len(state["loaders"]),
            "loaders": [at_start_of(each, epoch) for each in state["loaders"]],
        }
    return {**state, "epoch": epoch, "consumed": 0, "batches": 0, "start": None, "finished": False}


def go_to(loader: PreparedLoader | CombinedLoader, epoch: int, batches: int) -> None:
    # Used for a checkpoint without the loader's position.
    loader.set_epoch(epoch)
    if not batches:
        return
    if isinstance(loader, PreparedLoader):
        loader.skip(batches)
        return
    lengths = [len(each) if hasattr(each, "__len__") else batches + 1 for each in loader.loaders]
    for each, length in zip(loader.loaders, lengths, strict=True):
        each.skip(batches % length if loader.mode == "max_size_cycle" else min(batches, length))
    ended = [batches >= length for length in lengths]
    loader.load_state_dict({**loader.state_dict(), "index": batches, "ended": ended})


# Choice of the checkpoint to resume, and the one saved after a signal


def asked_to_resume(given: str | os.PathLike[str] | None) -> str | os.PathLike[str] | None:
    # The environment variable counts only for the first `fit` of a process.
    asked = os.environ.pop(RESUME_VARIABLE, None)
    return asked if given is None else given


def find_checkpoint(trainer: Trainer, given: str | os.PathLike[str] | None) -> str | None:
    """Return the path of the checkpoint that `given` names: `"best"`, `"last"`, `"auto"` (the newest) or a path.

    All ranks must call this together, since `"auto"` runs a collective.

    `"best"` and `"last"` are those of the `ModelCheckpoint`. `"auto"` is the newest checkpoint of earlier runs.
    """
    if given is None:
        return None
    if given in ("best", "last"):
        callback = trainer.checkpoint_callback
        if callback is None:
            raise ConfigurationError(
                f"{given!r} was given, but `ModelCheckpoint` is not configured. Add one to the callbacks.",
            )
        if trainer.control.reason is not None and callback.run_identity not in (None, trainer.control.identity):
            raise ConfigurationError(
                f"{given!r} is ambiguous: another Trainer has since used the ModelCheckpoint, so it refers to the "
                "checkpoints of that Trainer. Use one ModelCheckpoint per Trainer, or pass the checkpoint's path.",
            )
        found = getattr(callback, f"{given}_model_path")
        if not found:
            if given == "best" and not callback.save_top_k:
                raise ConfigurationError(
                    "There is no best checkpoint, because the ModelCheckpoint has save_top_k=0. Set save_top_k=1."
                )
            raise ConfigurationError(f"{given!r} was given, but the ModelCheckpoint has saved no checkpoint yet.")
        return str(found)
    if given != "auto":
        return os.fspath(given)
    answer: list[Any] = [None, None]
    if trainer.is_global_zero:
        try:
            answer[0] = _newest(_directories(trainer))
        except (DrivetrainError, OSError) as error:
            answer[1] = error.message if isinstance(error, DrivetrainError) else str(error)
    # The error of rank 0 is broadcast too, or the other ranks would wait here forever.
    path, problem = broadcast_object_list(answer)
    if problem is not None:
        raise CheckpointError(f"resume='auto' could not search for checkpoints: {problem}")
    if path is not None:
        trainer.announce(shown(f"Resuming from {path}"))
    else:
        searched = ", ".join(_directories(trainer)) or "no folder"
        trainer.announce(shown(f"resume='auto' found no checkpoint in {searched}. Training starts from the beginning."))
    return str(path) if path is not None else None


def save_for_resume(trainer: Trainer) -> None:
    """Save a checkpoint to resume from, after a signal has ended training.

    Without a checkpoint callback, a preempted run saves to the default directory. A run ended by Ctrl-C saves nothing.
    """
    if trainer.saves is not None:
        try:
            trainer.saves.finish()
        except CheckpointError as error:
            logger.error(f"{error} The run now saves another checkpoint to resume from.")
    callback = trainer.checkpoint_callback
    if callback is not None:
        callback.save_now(trainer, reason=str(trainer.control.signal))
    elif trainer.preempted:
        trainer.save_checkpoint(f"{_default_directory(trainer)}/preempted-step={trainer.global_step}.ckpt")


def _directories(trainer: Trainer) -> list[str]:
    # A preempted run without a checkpoint callback saves to the default directory.
    found = [_default_directory(trainer)]
    for callback in trainer.checkpoint_callbacks:
        found += callback.directories(trainer)
    return list(dict.fromkeys(found))


def _default_directory(trainer: Trainer) -> str:
    return os.path.join(trainer.default_root_dir, "checkpoints")


def _newest(directories: list[str]) -> str | None:
    """Return the newest checkpoint in several directories, or None.

    One with a finite loss is preferred.
    """
    found = [path for path in map(checkpoint.newest_checkpoint, directories) if path is not None]

    def rank(path: str) -> tuple[bool, int]:
        one = checkpoint.checkpoint_at(path)
        return one.finite_loss, one.step or 0

    return max(found, key=rank, default=None)
