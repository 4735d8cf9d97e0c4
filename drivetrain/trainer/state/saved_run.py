"""What a Trainer adds to the state of a run, and how a saved run goes back into one."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from drivetrain import checkpoint
from drivetrain.accelerator.run_state import Moment
from drivetrain.callbacks import Callback
from drivetrain.checkpoint.schema import LOSS_IS_FINITE
from drivetrain.data import CombinedLoader, PreparedLoader
from drivetrain.runtime.collectives import gather_object
from drivetrain.runtime.errors import CheckpointError
from drivetrain.runtime.logging import get_logger
from drivetrain.trainer.hooks import is_overridden
from drivetrain.trainer.hyper_parameters import HoldsHyperParameters, storable, without_modules
from drivetrain.trainer.metrics.metric_states import restore_metric_states
from drivetrain.trainer.state.committed import Committed
from drivetrain.trainer.state.hook_view import ENTRIES, for_hooks, state_of, take_back
from drivetrain.trainer.state.process_entry import layout_of, taken_over
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.checkpoint import PendingSave
    from drivetrain.trainer.data_module import DataModule
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)


def save_run(
    trainer: Trainer,
    directory: str | os.PathLike[str],
    weights_only: bool = False,
    block: bool = True,
    write: Callable[..., PendingSave] | None = None,
) -> PendingSave:
    """Write a checkpoint of a Trainer's run; call it on all processes.

    Args:
        trainer: The trainer.
        directory: The checkpoint's directory, or a URL.
        weights_only: Leave out everything but weights and hyper-parameters.
        block: Whether to return only when it is durable.
        write: What writes the state, with the arguments of `RunState.write`; that itself if None.
    """
    task = trainer.task
    if trainer.spawning is not None:
        raise CheckpointError(
            f"strategy={trainer.strategy.name!r}: the state of a run, such as that of its optimizers, ends with the "
            "processes that fit() has started. Let a ModelCheckpoint save it there; its best_model_path and "
            "last_model_path are known here."
        )
    if task is None or not trainer.task_run.is_placed:
        raise CheckpointError(
            "There is nothing to save yet: a checkpoint can be written once fit() has placed the task."
        )
    loop, run = trainer.loop, trainer.accelerator.run_state
    is_evaluated = all(model is not trainer.model for model in run.prepared.models)  # and was never trained here
    weights_only = weights_only or is_evaluated
    committed = Committed(task, trainer.logged, trainer.progress) if loop is None else loop.batches.committed
    moment, number = moment_of(trainer), _number_of_model(trainer)
    keeps_objects = trainer.pickles and write is not None  # which no directory holds
    with committed.buffers_restored():
        if is_evaluated and trainer.model is not None:
            engine = run.engine_of(trainer.model)
        else:
            engine = run.engine(weights_only, moment)
        state = for_hooks(engine, number, _entries(trainer, task, weights_only, keeps_objects))
        with trainer.shown_to_hooks(state) as shown:
            for callback in trainer.callbacks:
                callback.on_save_checkpoint(trainer, task, shown)
            task.on_save_checkpoint(shown)
        driver = take_back(state, engine, number)
        own: dict[str, Any] = {"layout": layout_of(trainer.strategy)}
        if not weights_only:
            own |= committed.state_dict()
        write = write or run.write
        return write(directory, engine, driver, own, step=trainer.global_step, block=block, moment=moment)


def _watched(trainer: Trainer, data: DataModule, name: str) -> Callable[..., Any]:
    """A method of the data module, measured where there is a profiler."""
    method: Callable[..., Any] = getattr(data, name)
    return trainer.actions.watch(trainer.actions.of_owner(data, name), method)


def _entries(trainer: Trainer, task: Task, weights_only: bool, keeps_objects: bool) -> dict[str, Any]:
    """The Trainer's own entries, by name."""
    data, secrets = trainer.datamodule, trainer.tracker_group.secrets

    def constructor_of(owner: HoldsHyperParameters) -> dict[str, Any] | None:
        found = owner.constructor_arguments
        values = {} if found is None else secrets.drop(storable(without_modules(found["values"]), keeps_objects))
        return None if found is None else found | {"values": values}

    of_data = {} if data is None else data.hparams
    of_task, of_data = (each if keeps_objects else without_modules(each) for each in (task.hparams, of_data))
    entries: dict[str, Any] = {
        "progress": trainer.progress.state_dict(),
        "hyper_parameters": secrets.drop(storable(of_task, keeps_objects)),
        "hparams_name": task.__dict__.get("_hparams_name"),
        "hparams_constructor": constructor_of(task),
        LOSS_IS_FINITE: trainer.is_finite,  # marks the manifest, too: the last choice for a resume
    }
    if weights_only:
        return entries
    return entries | {
        "callbacks": {c.state_key: found for c in trainer.callbacks if (found := c.state_dict())},
        "trackers": trainer.tracker_group.state(),
        # A run that a signal or a limit has ended continues where it is resumed, perhaps with another limit.
        "should_stop": any(gather_object([trainer.control.stops_for_good])),
        "stop_askers": trainer.control.stop_askers,
        "datamodule": _watched(trainer, data, "state_dict")() if data is not None else {},
        "datamodule_hyper_parameters": secrets.drop(storable(of_data, keeps_objects)),
        "datamodule_hparams_constructor": None if data is None else constructor_of(data),
        "datamodule_hparams_name": None if data is None else data.__dict__.get("_hparams_name"),
        "combined_loader": None if trainer.loop is None else trainer.loop.batches.combined_position(),
    }


def _number_of_model(trainer: Trainer) -> int:
    """Which of the engine's models is the task."""
    models = trainer.accelerator.prepared.models
    return next((number for number, model in enumerate(models) if model is trainer.model), 0)


class SavedRun:
    """A checkpoint on its way back into a run, part by part as the run is built.

    One that an Accelerator has written has the engine's part alone: the run then takes the position of the data from
    the training loader, and counts steps from 0, or from where the Trainer's checkpoint stood that the Accelerator
    had loaded before.

    Args:
        trainer: The trainer, with its task.
        directory: The checkpoint.

    Raises:
        CheckpointError: It cannot be read, or is not the state of a run.
    """

    def __init__(self, trainer: Trainer, directory: str) -> None:
        self._trainer, self._directory = trainer, directory
        run = trainer.accelerator.run_state
        self._strict: bool = trainer.task is None or trainer.task.strict_loading
        whole = self._hooks_see_weights() or not self._strict
        content = trainer.checkpoint_files.read(directory)
        self._saved = run.open(directory, whole=whole, objects=trainer.unpickles, content=content)
        self._entries = self._saved.driver
        run.keep({name: value for name, value in self._entries.items() if name not in ENTRIES})
        layout = layout_of(trainer.strategy)
        own = self._saved.own
        # None: another number of processes, or as many that share the data in another way
        self._own = own if own is not None and own.get("layout", layout) == layout else None
        self._is_ours = "progress" in self._entries and "progress" not in self._saved.kept

    @property
    def step(self) -> int | None:
        """The optimizer step at which it was saved; None if an Accelerator has written it."""
        return int(self._entries["progress"]["global_step"]) if self._is_ours else None

    def _hooks_see_weights(self) -> bool:
        """Whether a hook wants to see the whole weights, so that no process can read its shards alone."""
        trainer = self._trainer
        return is_overridden(trainer.task, Task, "on_load_checkpoint") or any(
            is_overridden(each, Callback, "on_load_checkpoint") for each in trainer.callbacks
        )

    def restore_for_evaluation(self) -> None:
        """Take only the weights."""
        trainer, engine = self._trainer, self._saved.engine
        assert trainer.task is not None
        assert trainer.model is not None
        if len(engine["models"]) != 1:
            raise CheckpointError(
                f"{self._directory} holds {len(engine['models'])} models, so none of them is that of a task."
            )
        state = for_hooks(engine, 0, self._entries)
        with trainer.shown_to_hooks(state) as shown:
            trainer.task.on_load_checkpoint(shown)
        take_back(state, engine, 0)
        self._saved.restore_models([trainer.model], self._strict)

    def restore_early(self) -> None:
        """Let the task and the callbacks see the checkpoint, before the optimizers are built."""
        trainer, entries, engine = self._trainer, self._entries, self._saved.engine
        assert trainer.task is not None
        self._saved.refuse_weights_only()
        if trainer.datamodule is not None and (found := state_of(type(trainer.datamodule), entries)):
            _watched(trainer, trainer.datamodule, "load_state_dict")(found)
        number = _number_of_model(trainer)
        state = for_hooks(engine, number, entries)
        with trainer.shown_to_hooks(state) as shown:
            self._migrate(shown)
            for callback in trainer.callbacks:
                callback.on_load_checkpoint(trainer, trainer.task, shown)
        self._entries = take_back(state, engine, number)
        # Lightning spells keys in another way than this package.
        callbacks = {checkpoint.key_here(key): state for key, state in self._entries.get("callbacks", {}).items()}
        unknown = set(callbacks) - {checkpoint.key_here(callback.state_key) for callback in trainer.callbacks}
        if unknown:
            logger.warning(
                f"The checkpoint has the states of callbacks that this Trainer has not: {', '.join(sorted(unknown))}. "
                "They are left out."
            )
        for callback in trainer.callbacks:
            if (key := checkpoint.key_here(callback.state_key)) in callbacks:
                callback.load_state_dict(callbacks[key])

    def _migrate(self, shown: dict[str, Any]) -> None:
        """Call the task's hook, once more for each further copy of the weights that a callback keeps."""
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
        """Give the placed models their weights."""
        self._saved.check(advice="Let configure_optimizers return the same, and register the same objects.")
        self._saved.restore_models(strict=self._strict)

    def restore_training(self) -> None:
        """Give optimizers, schedulers, the precision and the counters their state."""
        trainer, saved, entries = self._trainer, self._saved, self._entries
        saved.restore_optimizers()
        for optimizer in trainer.optimizers:
            optimizer._opt_called = True  # it has stepped before the break; schedulers warn otherwise
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
        """Go to the batch that comes next.

        Args:
            loader: The prepared training loader.
        """
        progress = self._trainer.progress
        state = self._position_for(loader)
        if state is None:
            go_to(loader, progress.epoch, 0 if progress.batches_are_done else progress.batches_in_epoch)
            return
        if self._is_ours and progress.batches_are_done:
            # Only what the next epoch's order is drawn from still counts.
            state = at_start_of(state, progress.epoch + 1)
        elif self._is_ours and progress.batches_in_epoch == 0:
            # Such as one saved after fit: the loader still stands at the end of the epoch before.
            state = at_start_of(state, progress.epoch)
        elif not self._is_ours and _is_finished(state):
            state = at_start_of(state, progress.epoch)
        loader.load_state_dict(state)
        if not self._is_ours:
            progress.batches_in_epoch = _batches_before(loader, state)
            progress.total_batches = max(progress.total_batches, progress.batches_in_epoch)
            progress.validated_at = progress.total_batches
        elif self._own is None and not progress.batches_are_done and isinstance(loader, PreparedLoader):
            # Another number of processes, each with its own number of batches.
            progress.batches_in_epoch = loader.consumed_batches

    def _position_for(self, loader: PreparedLoader | CombinedLoader) -> dict[str, Any] | None:
        """The saved position of the training loader; None where none was saved."""
        positions = self._saved.engine["loaders"]
        if isinstance(loader, PreparedLoader):
            return positions[0] if positions else None
        count = len(loader.loaders)
        if len(positions) < count:
            return None
        between = self._entries.get("combined_loader") if self._is_ours else None
        if between is None:
            between = {"index": max(each["batches"] for each in positions[:count]), "ended": [False] * count}
        return {**between, "loaders": positions[:count]}

    def restore_process(self) -> None:
        """Give this process what it had logged and its random state; nothing may come between this and training."""
        trainer, own = self._trainer, self._own
        assert trainer.task is not None
        if self._is_ours:
            if own is None:
                own = taken_over(self._directory, trainer.strategy, trainer.task)
            if "logged" not in own:  # a file of Lightning's, also one that was imported
                trainer.print(
                    f"{self._directory} is of Lightning, which saves no random state and no open means: "
                    "shuffling, dropout and the values of an epoch under way begin here."
                )
                return
            trainer.logged.load_state_dict(own["logged"], trainer.strategy.topology.device)
            restore_metric_states(trainer.task, own["metrics"])
            trainer.logged.resume_finished(trainer.task, own.get("finished_metrics", ()))
        self._saved.restore_random()


def _is_finished(position: Mapping[str, Any]) -> bool:
    """Return whether a loader's position is after the last batch of its epoch, which a raw loop may save."""
    return bool(position.get("finished"))


def moment_of(trainer: Trainer) -> Moment:
    """The moment that a save within `fit` describes: the last finished step."""
    loop = trainer.loop
    return Moment() if loop is None else Moment(loop.batches.committed.random, loop.batches.positions())


def _batches_before(loader: PreparedLoader | CombinedLoader, state: Mapping[str, Any]) -> int:
    """Batches of this process before a position that was loaded just now."""
    return loader.consumed_batches if isinstance(loader, PreparedLoader) else int(state["index"])


def at_start_of(state: dict[str, Any], epoch: int) -> dict[str, Any]:
    """A loader's position at the start of an epoch, with the generators that its order is drawn from."""
    if "loaders" in state:
        return {
            **state,
            "index": 0,
            "ended": [False] * len(state["loaders"]),
            "loaders": [at_start_of(each, epoch) for each in state["loaders"]],
        }
    return {**state, "epoch": epoch, "consumed": 0, "batches": 0, "start": None, "finished": False}


def go_to(loader: PreparedLoader | CombinedLoader, epoch: int, batches: int) -> None:
    """Begin a loader's next iteration after so many batches of each process, which is all that Lightning's files have.

    Args:
        loader: The prepared training loader.
        epoch: The epoch.
        batches: How many batches of it each process has trained on.
    """
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
