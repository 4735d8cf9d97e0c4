"""State of a run: the engine's part of a checkpoint, and the entries that a Trainer adds to it."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from drivetrain import checkpoint
from drivetrain.accelerator.accelerate_names import ProjectConfiguration
from drivetrain.accelerator.prepared import Prepared, PreparedOptimizer
from drivetrain.accelerator.step import OptimizerStep
from drivetrain.accelerator.tracking import RunTracking
from drivetrain.checkpoint.manifest import find_places, in_schema, process_in_schema
from drivetrain.checkpoint.save import save_queue
from drivetrain.checkpoint.tree import pack
from drivetrain.runtime import observer
from drivetrain.runtime.collectives import broadcast_object_list
from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.seeds import RandomState
from drivetrain.runtime.state import PartialState
from drivetrain.strategies import Strategy
from drivetrain.strategies.base import class_chosen, empty_optimizer_state, original_type
from drivetrain.strategies.precision import Precision

# Restoring a checkpoint part by part


logger = get_logger(__name__)

_PREPARE = "Prepare and register the same objects, in the same order, before load_state."


class SavedEngine:
    """Reader of a checkpoint, which restores models, optimizers, schedulers and data loaders from it.

    Sharded tensors are read directly into the shards of this process. The checkpoint may have the format of another
    tool.

    Attributes:
        directory: The checkpoint's directory or URL.
        engine: The states of prepared objects, in the layout of `RunState.engine`.
        driver: The entries that a training loop such as the Trainer's added, by name.
        kept: The names of these entries that come from an earlier checkpoint.
        own: This process's entries of the training loop, or None if another number of processes wrote the checkpoint.
    """

    def __init__(
        self,
        run: RunState,
        state: PartialState,
        directory: str | os.PathLike[str],
        whole: bool = False,
        content: Mapping[str, Any] | None = None,
    ) -> None:
        self.directory = os.fspath(directory)
        self._run, self._state = run, state
        strategy = run.strategy
        self._in_shards = strategy.state.held_as == "shards" and not whole
        source = directory if content is None else content
        foreign = checkpoint.read_foreign(source, state.process_index, state.num_processes, given=None)
        if foreign is not None:
            self._in_shards = False
            shared, own = foreign
        else:
            shared, own = self._read_around() if self._in_shards else self._read()
        self._places = find_places(shared)
        shared = in_schema(shared)
        self.engine: dict[str, Any] = shared["engine"]
        if self._in_shards and any(map(checkpoint.holds_positions, self.engine.get("optimizers", ()))):
            self._read_whole()  # names follow from the optimizers that are here
        self.driver: dict[str, Any] = shared["driver"]
        self.kept: list[str] = list(shared["kept"])
        if "models" not in self.engine:
            raise CheckpointError(
                f"{self.directory} is not a training checkpoint of drivetrain: it has no models. Pass a checkpoint "
                "that Accelerator.save_state or a Trainer wrote."
            )
        process = None if own is None else process_in_schema(own)
        self.own: dict[str, Any] | None = None if process is None else process["driver"]
        self._random: Any = None if process is None else process["engine"]["random"]
        self._take_positions(() if process is None else process["engine"].get("loaders", ()))

    def _take_positions(self, own: Sequence[Mapping[str, Any] | None]) -> None:
        positions = self.engine.get("loaders", [])
        for number, position in enumerate(positions):
            # Such a loader reads its own part of the data on each process.
            if position.get("process"):
                # Without a position of this process, the state of rank 0's loader must not be used.
                positions[number] = (own[number] if number < len(own) else None) or {**position, "own": None}

    def _read(
        self, into: dict[str, Any] | None = None, only: Sequence[str] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        return checkpoint.load_run_state(self.directory, self._state, into=into, only=only)

    def _read_around(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        described = checkpoint.describe_run_state(self.directory)
        # The tensors of models and optimizers. Each process reads its shards of them when it restores these.
        later = set(find_places(described)[:2])
        paths = [
            path
            for name, entry in described.items()
            for path in ([f"{name}/{part}" for part in entry] if name == "engine" else [name])
            if path not in later
        ]
        found, own = self._read(only=paths)
        engine = {**described.get("engine", {}), **found.pop("engine", {})}
        return {**described, **found, **({"engine": engine} if "engine" in described else {})}, own

    def refuse_weights_only(self) -> None:
        """Raise an error if the checkpoint holds only weights, so that training cannot resume."""
        if "optimizers" not in self.engine:
            raise CheckpointError(
                f"{self.directory} contains weights only, so training cannot resume from it. Load the weights with "
                "Task.load_from_checkpoint, or export them with drivetrain merge-weights, and start a new run."
            )

    def check(
        self, models: Sequence[nn.Module] | None = None, advice: str = _PREPARE, leaves_rest: bool = False
    ) -> None:
        run = self._run
        # Their numbers and class names are compared. With `leaves_rest`, additional saved objects only cause a warning.
        here: dict[str, Sequence[Any]] = {
            "models": run.prepared.models if models is None else models,
            "optimizers": run.prepared.optimizers,
            "schedulers": run.prepared.schedulers,
            "registered": run.prepared.registered,
        }
        self.refuse_weights_only()
        saved_classes, classes = self.engine.get("classes", {}), run.classes()
        for kind, objects in here.items():
            what = "objects registered for checkpointing" if kind == "registered" else kind
            if leaves_rest and len(self.engine[kind]) > len(objects):
                self._leave(kind, what, len(objects))
            if len(self.engine[kind]) != len(objects):
                were = f" The checkpoint has: {_listed(saved_classes[kind])}." if saved_classes.get(kind) else ""
                raise CheckpointError(
                    f"The checkpoint at {self.directory} contains {len(self.engine[kind])} {what}, but this run has "
                    f"{len(objects)}.{were} {advice}"
                )
        for kind in ("optimizers", "schedulers"):
            for number, (was, now) in enumerate(zip(saved_classes.get(kind, ()), classes[kind], strict=False)):
                # A class that the file or this run does not know is not compared.
                if was is not None and now is not None and was != now:
                    raise CheckpointError(
                        f"The checkpoint at {self.directory} contains the state of {_article(was)}, but {kind[:-1]} "
                        f"{number} of this run is {_article(now)}. Use {_article(was)} as the checkpoint's run did, "
                        "or load only the weights and start a new run."
                    )

    def _read_whole(self) -> None:
        self._in_shards = False
        self.engine = in_schema(self._read()[0])["engine"]

    def _leave(self, kind: str, what: str, count: int) -> None:
        if self._in_shards:  # whose reading has a target for everything that was saved
            self._read_whole()
        saved = self.engine[kind]
        logger.warning(
            "Of %d %s in the checkpoint at %s, only the first %d are loaded, because this run has no more. Not "
            "loaded: %s.",
            len(saved),
            what,
            self.directory,
            count,
            _listed(self.engine.get("classes", {}).get(kind, [None] * len(saved))[count:]),
        )
        self.engine[kind] = saved[:count]

    def restore_models(self, models: Sequence[nn.Module] | None = None, strict: bool = True) -> None:
        strategy, models = self._run.strategy, self._run.prepared.models if models is None else models
        if self._in_shards:
            self._read_into("models", [strategy.state.model(model) for model in models])
        for model, state in zip(models, self.engine["models"], strict=True):
            # Files of other tools hold tied weights once; shards have been read under every name.
            complete = state if self._in_shards else checkpoint.with_tied(strategy.unwrap(model), state)
            found = strategy.state.load_model(model, complete, strict)
            is_pair = isinstance(found, tuple)  # as torch's; a model's own `load_state_dict` may return anything
            if not strict and is_pair and (found.missing_keys or found.unexpected_keys):
                logger.warning(
                    f"The weights in {self.directory} do not match the model. Not in the checkpoint, so not loaded: "
                    f"{_listed(found.missing_keys) or 'none'}. Only in the checkpoint: "
                    f"{_listed(found.unexpected_keys) or 'none'}."
                )

    def restore_optimizers(self) -> None:
        run = self._run
        owners = [run.owner(optimizer) for optimizer in run.prepared.optimizers]
        if self._in_shards:
            parameters = [run.strategy.state.parameters_in_place(owner) for owner in owners]
            saved = zip(self.engine["optimizers"], parameters, strict=True)
            self._read_into("optimizers", [empty_optimizer_state(state, own) for state, own in saved])
        for owner, optimizer, state in zip(owners, run.prepared.optimizers, self.engine["optimizers"], strict=True):
            # The file numbers the parameters instead of naming them.
            if checkpoint.holds_positions(state):
                groups = run.strategy.state.optimizer(owner, optimizer.optimizer)["param_groups"]
                state = checkpoint.named_by_position(state, [group["params"] for group in groups])
            run.strategy.state.load_optimizer(owner, optimizer.optimizer, state)

    def _read_into(self, kind: str, states: list[Any]) -> None:
        found, _ = self._read(self._places.into(kind, states), [getattr(self._places, kind)])
        self.engine[kind] = in_schema(found)["engine"][kind]

    def restore_schedulers(self) -> None:
        for scheduler, state in zip(self._run.prepared.schedulers, self.engine["schedulers"], strict=True):
            scheduler.load_state_dict(state)

    def restore_registered(self) -> None:
        """Load the checkpoint's states into the objects that the user has registered for checkpointing."""
        for item, state in zip(self._run.prepared.registered, self.engine["registered"], strict=True):
            item.load_state_dict(state)

    def restore_precision(self) -> None:
        """Load the checkpoint's state of the numeric precision, such as the loss scale of fp16."""
        self._run.precision.load_state_dict(self.engine["precision"])

    def restore_loaders(self) -> None:
        # Loaders without a saved position are not changed. One after its last batch continues with the next epoch.
        for loader, position in zip(self._run.prepared.loaders, self.engine["loaders"], strict=False):
            loader.load_state_dict(position)
            loader.expect_next_epoch()
            if not loader.stateful:
                loader.rewind()

    @property
    def random(self) -> Any:
        """Saved random state for this process, or None if the checkpoint has none.

        If another number of processes wrote the checkpoint, this is the state of the same rank. Additional ranks reuse
        the states from the start.
        """
        if self._random is None:
            with suppress(CheckpointError):  # a file of another tool has none
                world_size, own = checkpoint.read_processes(self.directory)
                process = process_in_schema(own(self._state.process_index % world_size))
                self._random = process["engine"]["random"]
        return self._random

    def restore_random(self) -> None:
        restore_random(self.random)


def restore_random(state: Mapping[str, Any] | None) -> None:
    """Set the random number generators of Python, NumPy and torch to a saved state.

    None changes nothing.
    """
    if state is not None:
        RandomState.from_state_dict(state).restore()


def _listed(classes: Sequence[str | None]) -> str:
    return ", ".join(name or "unknown" for name in classes)


def _article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}"


# Numbered checkpoints of `save_state()` under a project's directory


_NUMBERED = re.compile(r"checkpoint_(\d+)")


@dataclass(eq=False)
class NumberedCheckpoints:
    configuration: ProjectConfiguration
    state: PartialState

    @property
    def enabled(self) -> bool:
        return self.configuration.automatic_checkpoint_naming and self.configuration.project_dir is not None

    def next(self) -> Path:
        number = self.configuration.iteration
        if number in self._from_main_process():
            raise ConfigurationError(
                f"{self._path(number)} already exists from an earlier run. Resume that run with load_state(), start "
                "at a free number with ProjectConfiguration(iteration=...), or choose another project_dir.",
            )
        return self._path(number)

    def latest(self) -> Path:
        """Return the folder of the checkpoint with the highest number."""
        numbers = self._from_main_process()
        if not numbers:
            raise CheckpointError(
                f"There is no checkpoint in {self._folder()} yet. Pass the path of a checkpoint: load_state('path')."
            )
        return self._path(numbers[-1])

    def record_written(self, directory: Path, pending: checkpoint.PendingSave) -> None:
        if directory != self._path(self.configuration.iteration):
            return
        self.configuration.iteration += 1
        limit = self.configuration.total_limit
        if limit is not None and self.state.is_main_process:
            # Not earlier: if this save fails, the older checkpoints are still needed.
            pending.add_done_callback(lambda save: None if save.failed() else self._remove_beyond(limit))

    def _remove_beyond(self, limit: int) -> None:
        # Never remove a directory that is no checkpoint, even if its name looks like one.
        found = [path for number in self._numbers() if checkpoint.is_checkpoint(path := self._path(number))]
        for path in found[:-limit]:
            checkpoint.remove_checkpoint(path)

    def record_loaded(self, directory: Path) -> None:
        number = _NUMBERED.fullmatch(directory.name)
        if self.enabled and number and directory.resolve() == self._path(int(number[1])).resolve():
            self.configuration.iteration = int(number[1]) + 1

    def _folder(self) -> Path:
        if not self.enabled:
            raise ConfigurationError(
                "save_state() and load_state() without a directory need ProjectConfiguration(project_dir=..., "
                "automatic_checkpoint_naming=True). Otherwise pass a directory, such as "
                "save_state('checkpoints/latest').",
            )
        return Path(str(self.configuration.project_dir)) / "checkpoints"

    def _path(self, number: int) -> Path:
        return self._folder() / f"checkpoint_{number}"

    def _numbers(self) -> list[int]:
        folder = self._folder()
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return sorted(int(found[1]) for name in names if (found := _NUMBERED.fullmatch(name)))

    def _from_main_process(self) -> list[int]:
        self._folder()
        # All processes must agree, and other machines may not see the disk of the main process.
        numbers: list[int] = broadcast_object_list([self._numbers() if self.state.is_main_process else None])[0]
        return numbers


SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], None]
LoadHook = Callable[[list[nn.Module], str], None]


@dataclass(frozen=True)
class Moment:
    """Random state and loader positions after an optimizer step, for a checkpoint saved during the next step.

    The Trainer uses this if it saves within a step: the checkpoint then describes the last finished step.

    Attributes:
        random: The random state after that step. None means the current one.
        loaders: The loaders' positions after that step. None means the current ones.
        combined: Further state of a combined loader, or None.
    """

    random: RandomState | None = None
    loaders: Sequence[Mapping[str, Any]] | None = None
    combined: Mapping[str, Any] | None = None


class RunState:
    """Object that writes and reads the checkpoints of a run, for `Accelerator` and `Trainer`.

    The states of prepared objects have the same layout for every training loop (see `drivetrain.checkpoint.manifest`).
    A training loop such as the Trainer's adds named entries, shared and per process. Entries that the next training
    loop does not use are kept and written again.

    Attributes:
        prepared: The prepared and registered objects.
        save_hooks: Functions of the user that run before `save_state`, by handle number.
        load_hooks: Functions of the user that run before `load_state`, by handle number.
        moment: Returns the point in time that a save describes. Set by the Trainer, which may save within a step.
    """

    def __init__(
        self,
        state: PartialState,
        strategy: Strategy,
        precision: Precision,
        numbered: NumberedCheckpoints,
        prepared: Prepared,
        tracking: RunTracking,
        step: OptimizerStep,
    ) -> None:
        self.strategy, self.precision, self.prepared = strategy, precision, prepared
        self.save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self.load_hooks: OrderedDict[int, LoadHook] = OrderedDict()
        self.moment: Callable[[], Moment] = Moment
        self._state, self._numbered, self._tracking = state, numbered, tracking
        self._step = step
        self._kept: dict[str, Any] = {}

    def register(self, objects: Sequence[Any]) -> None:
        """Add objects with `state_dict` and `load_state_dict` to the checkpoints."""
        states: list[tuple[str, Any]] = []
        for item in objects:
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise ConfigurationError(
                    f"{type(item).__name__} cannot be registered for checkpointing, because it has no state_dict() "
                    "and load_state_dict(state). Add both methods to the class.",
                )
            with suppress(Exception):  # one may have no state yet
                states.append((f"{type(item).__name__}.state_dict()", item.state_dict()))
        for name, state in states:
            check_storable(state, name)
        self.prepared.registered.extend(objects)

    # saving

    def engine(self, weights_only: bool = False, moment: Moment | None = None) -> dict[str, Any]:
        # All processes must call this together.
        strategy, classes = self.strategy, self.classes()
        states = [strategy.state.model(model) for model in self.prepared.models]
        if weights_only:
            return {"models": states, "classes": {"models": classes["models"]}}
        positions = (moment or self.moment()).loaders
        here = self.prepared
        return {
            "models": states,
            "optimizers": [strategy.state.optimizer(self.owner(one), one.optimizer) for one in here.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in here.schedulers],
            "loaders": [one.state_dict() for one in here.loaders] if positions is None else list(positions),
            "registered": [item.state_dict() for item in here.registered],
            "precision": self.precision.state_dict(),
            "classes": classes,
        }

    def engine_of(self, model: nn.Module) -> dict[str, Any]:
        name = original_type(self.strategy.unwrap(model)).__name__
        return {"models": [self.strategy.state.model(model)], "classes": {"models": [name]}}

    def classes(self) -> dict[str, list[str | None]]:
        bare = [self.strategy.unwrap(model) for model in self.prepared.models]
        return {
            "models": [original_type(model).__name__ for model in bare],
            "optimizers": [class_chosen(one.optimizer) for one in self.prepared.optimizers],
            "schedulers": [class_chosen(one.scheduler) for one in self.prepared.schedulers],
            "registered": [type(item).__name__ for item in self.prepared.registered],
        }

    def write(
        self,
        directory: str | os.PathLike[str],
        engine: dict[str, Any],
        driver: Mapping[str, Any] | None = None,
        own: Mapping[str, Any] | None = None,
        *,
        step: int | None = None,
        block: bool = True,
        extra: str | None = None,
        moment: Moment | None = None,
    ) -> checkpoint.PendingSave:
        # All processes must call this together.
        if observer.current is not None:
            directory = observer.current.directory(os.fspath(directory))
        shared, process = self.compose(engine, driver, own, moment)
        return save_queue(self._state).save(directory, shared, process, step=step, block=block, extra=extra)

    def compose(
        self,
        engine: dict[str, Any],
        driver: Mapping[str, Any] | None = None,
        own: Mapping[str, Any] | None = None,
        moment: Moment | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        # `driver` holds entries of the training loop that all processes share, and `own` those of this process.
        driver = dict(driver or {})
        kept = sorted(self._kept.keys() - driver)
        shared = {"engine": engine, "driver": {**{name: self._kept[name] for name in kept}, **driver}, "kept": kept}
        random = (moment or self.moment()).random or RandomState.capture()
        process: dict[str, Any] = {"random": random.state_dict()}
        # A loader that reads a part of its own on each process has another position on each.
        positions = [each if each.get("process") else None for each in engine.get("loaders", ())]
        if any(positions):
            process["loaders"] = positions
        return shared, {"engine": process, "driver": dict(own or {})}

    def save(self, output_dir: str | os.PathLike[str] | None, block: bool) -> str:
        self._check_step()
        directory = os.fspath(self._numbered.next() if output_dir is None else output_dir)
        if observer.current is not None:
            directory = observer.current.directory(directory)
        engine, extra = self.engine(), None
        if self.save_hooks:
            extra = checkpoint.extra_place(directory, self._state)
            for hook in list(self.save_hooks.values()):
                hook(list(self.prepared.models), engine["models"], extra)
            # The files of all processes' hooks must exist before the checkpoint is completed.
            self._state.wait_for_everyone()
        pending = self.write(directory, engine, self._tracking.entries(), block=block, extra=extra)
        if output_dir is None:
            self._numbered.record_written(Path(directory), pending)
        return directory

    def _check_step(self) -> None:
        if self._step.is_torn:
            raise CheckpointError(
                "A checkpoint cannot be saved while an optimizer is in its step, for example in the closure of "
                "L-BFGS, because only some weights are updated. Save after optimizer.step()."
            )
        keeps_moment = self.moment is not Moment  # a driver, that of its last finished step
        if not keeps_moment and self._step.holds_gradients:
            logger.warning_once(
                "save_state was called before the optimizer step. The accumulated gradients are not part of the "
                "checkpoint, so a resumed run loses them and continues with the next batch. Call save_state after "
                "the step of the last optimizer, when accelerator.sync_gradients is True."
            )

    def export(
        self,
        model: nn.Module,
        directory: str | os.PathLike[str],
        max_shard_size: int | str,
        safe: bool = True,
        on_each_node: bool = False,
    ) -> None:
        """Write a model's full weights to files that other libraries can load."""
        weights = self.strategy.state.model(model, full=True, everywhere=on_each_node)
        if self._state.is_local_main_process if on_each_node else self._state.is_main_process:
            write = checkpoint.save_safetensors if safe else checkpoint.save_pickled_weights
            write(weights, directory, max_shard_size)
        self._state.wait_for_everyone()

    # loading

    def open(
        self,
        directory: str | os.PathLike[str],
        whole: bool = False,
        content: Mapping[str, Any] | None = None,
    ) -> SavedEngine:
        return SavedEngine(self, self._state, directory, whole, content)

    def keep(self, entries: Mapping[str, Any]) -> None:
        # Later checkpoints contain them too, unless the current training loop has an entry with the same name.
        self._kept = dict(entries)

    def load(self, input_dir: str | os.PathLike[str] | None) -> None:
        directory = os.fspath(self._numbered.latest() if input_dir is None else input_dir)
        if observer.current is not None:
            directory = observer.current.saved_in(directory)
        # The checkpoint to load may still be in the queue of background saves.
        save_queue(self._state).finish()
        models = list(self.prepared.models)
        for hook in list(self.load_hooks.values()):
            hook(models, directory)
        saved = self.open(directory)
        saved.check(models, leaves_rest=True)
        saved.restore_models(models)
        saved.restore_optimizers()
        saved.restore_schedulers()
        saved.restore_loaders()
        saved.restore_registered()
        saved.restore_precision()
        saved.restore_random()
        self.keep(saved.driver)
        self._tracking.load(saved.driver)
        self._numbered.record_loaded(Path(directory))

    def owner(self, optimizer: PreparedOptimizer) -> nn.Module:
        held = {id(parameter) for group in optimizer.optimizer.param_groups for parameter in group["params"]}
        owners = [model for model in self.prepared.models if any(id(p) in held for p in model.parameters())]
        if len(owners) == 1:
            return owners[0]
        return nn.ModuleList(self.strategy.unwrap(model) for model in owners)


def check_storable(state: Any, name: str) -> None:
    """Raise an error if a state dict holds objects that a checkpoint cannot store."""
    pack({name: state})
