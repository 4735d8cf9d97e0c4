"""A checkpoint on its way back into an engine, part by part."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import nn

from drivetrain import checkpoint
from drivetrain.checkpoint.schema import find_places, in_schema, process_in_schema
from drivetrain.runtime.errors import CheckpointError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.seeds import RandomState
from drivetrain.runtime.state import PartialState

if TYPE_CHECKING:
    from drivetrain.accelerator.run_state import RunState


logger = get_logger(__name__)

_PREPARE = "Prepare and register the same objects, in the same order, before load_state."


class SavedEngine:
    """A checkpoint, opened: all but the tensors that each process reads straight into its shards.

    It may be one as Accelerate's `save_state` writes it, or Lightning's Trainer.

    Args:
        run: The state that it goes into.
        state: This process among its peers.
        directory: The checkpoint's directory, or a URL.
        whole: Read all tensors at once.
        objects: Whether objects in a file of Lightning's are unpickled, which runs whatever code it holds.
        content: What a file of Lightning's holds, where it has been read already.

    Attributes:
        directory: The checkpoint's directory, or a URL.
        engine: The engine's part, as `RunState.engine` gives it.
        driver: The entries that a driver has added, by name.
        kept: The names of those that are of an earlier checkpoint than the rest.
        own: The driver's entries of this process; None where another number of processes wrote them.

    Raises:
        CheckpointError: It cannot be read, or is not the state of a run.
    """

    def __init__(
        self,
        run: RunState,
        state: PartialState,
        directory: str | os.PathLike[str],
        whole: bool = False,
        objects: bool = False,
        content: Mapping[str, Any] | None = None,
    ) -> None:
        self.directory = os.fspath(directory)
        self._run, self._state = run, state
        strategy = run.strategy
        self._in_shards = strategy.state.reads_shards and not strategy.schedules_microbatches and not whole
        source = directory if content is None else content
        foreign = checkpoint.read_foreign(source, state.process_index, state.num_processes, objects, given=None)
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
                f"{self.directory} is not the state of a run: neither Accelerator.save_state nor a Trainer wrote it."
            )
        process = None if own is None else process_in_schema(own)
        self.own: dict[str, Any] | None = None if process is None else process["driver"]
        self._random: Any = None if process is None else process["engine"]["random"]

    def _read(
        self, into: dict[str, Any] | None = None, only: Sequence[str] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        self._run.saves.settle()  # what is read here goes where a save may still be copying from
        return checkpoint.load_run_state(self.directory, self._state, into=into, only=only)

    def _read_around(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Read all but the models and the optimizers, whose tensors come without values."""
        described = checkpoint.describe_run_state(self.directory)
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
        """Refuse a checkpoint that training cannot continue from.

        Raises:
            CheckpointError: The models are all that was saved.
        """
        if "optimizers" not in self.engine:
            raise CheckpointError(
                f"{self.directory} holds weights only, so training cannot continue from it. Load them with "
                "Task.load_from_checkpoint, or export them with drivetrain merge-weights, and start again."
            )

    def check(
        self, models: Sequence[nn.Module] | None = None, advice: str = _PREPARE, leaves_rest: bool = False
    ) -> None:
        """Refuse a checkpoint of other objects than those that are prepared and registered.

        Args:
            models: Those that are to be restored; all that are prepared if None.
            advice: What to do where there are more or fewer of a kind.
            leaves_rest: Whether fewer may be here than were saved: the last ones are then left, with a warning.

        Raises:
            CheckpointError: There are more or fewer of a kind, or an optimizer is of another class; both are named.
        """
        run = self._run
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
                were = f" It holds: {_listed(saved_classes[kind])}." if saved_classes.get(kind) else ""
                raise CheckpointError(
                    f"The checkpoint at {self.directory} holds {len(self.engine[kind])} {what}, but here are "
                    f"{len(objects)}.{were} {advice}"
                )
        for kind in ("optimizers", "schedulers"):
            for number, (was, now) in enumerate(zip(saved_classes.get(kind, ()), classes[kind], strict=False)):
                if was is not None and now is not None and was != now:
                    raise CheckpointError(
                        f"The checkpoint at {self.directory} holds the state of {_article(was)}, but {kind[:-1]} "
                        f"{number} here is {_article(now)}. Make {_article(was)}, as the run that wrote it did, or "
                        "load the weights alone and start again."
                    )

    def _read_whole(self) -> None:
        self._in_shards = False
        self.engine = in_schema(self._read()[0])["engine"]

    def _leave(self, kind: str, what: str, count: int) -> None:
        """Take the first of the saved objects of a kind, and leave the rest."""
        if self._in_shards:  # whose reading has a target for everything that was saved
            self._read_whole()
        saved = self.engine[kind]
        logger.warning(
            "Of %d %s in the checkpoint at %s the first %d are loaded, since so many are here. Left: %s.",
            len(saved),
            what,
            self.directory,
            count,
            _listed(self.engine.get("classes", {}).get(kind, [None] * len(saved))[count:]),
        )
        self.engine[kind] = saved[:count]

    def restore_models(self, models: Sequence[nn.Module] | None = None, strict: bool = True) -> None:
        """Give the models their weights.

        Args:
            models: Those to restore; all that are prepared if None.
            strict: Whether missing and left-over weights are an error; else they are listed in a warning, where the
                checkpoint was opened whole.
        """
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
                    f"{self.directory} has other weights than the model. Not in it, and as they were: "
                    f"{_listed(found.missing_keys) or 'none'}. Only in it: {_listed(found.unexpected_keys) or 'none'}."
                )

    def restore_optimizers(self) -> None:
        """Give the optimizers their state."""
        run = self._run
        owners = [run.owner(optimizer) for optimizer in run.prepared.optimizers]
        if self._in_shards:
            saved = zip(owners, self.engine["optimizers"], strict=True)
            self._read_into(
                "optimizers", [run.strategy.state.optimizer_targets(owner, state) for owner, state in saved]
            )
        for owner, optimizer, state in zip(owners, run.prepared.optimizers, self.engine["optimizers"], strict=True):
            if checkpoint.holds_positions(state):
                groups = run.strategy.state.optimizer(owner, optimizer.optimizer)["param_groups"]
                state = checkpoint.named_by_position(state, [group["params"] for group in groups])
            run.strategy.state.load_optimizer(owner, optimizer.optimizer, state)

    def _read_into(self, kind: str, states: list[Any]) -> None:
        found, _ = self._read(self._places.into(kind, states), [getattr(self._places, kind)])
        self.engine[kind] = in_schema(found)["engine"][kind]

    def restore_schedulers(self) -> None:
        """Give the schedulers their state."""
        for scheduler, state in zip(self._run.prepared.schedulers, self.engine["schedulers"], strict=True):
            scheduler.load_state_dict(state)

    def restore_registered(self) -> None:
        """Give the registered objects their state."""
        for item, state in zip(self._run.prepared.registered, self.engine["registered"], strict=True):
            item.load_state_dict(state)

    def restore_precision(self) -> None:
        """Give the precision its scaler's state."""
        self._run.precision.load_state_dict(self.engine["precision"])

    def restore_loaders(self) -> None:
        """Let each loader's next iteration be the epoch that was interrupted; one that was not saved is as it is.

        One that was prepared with `use_stateful_dataloader` continues in it where the run was. After the last batch of
        an epoch it is the next epoch.
        """
        for loader, position in zip(self._run.prepared.loaders, self.engine["loaders"], strict=False):
            loader.load_state_dict(position)
            loader.expect_next_epoch()
            if not loader.stateful:
                loader.rewind()

    @property
    def random(self) -> Any:
        """The random state that was kept for this process; None if there is none.

        Of a run on another number of processes it is the state of the same rank, and those come again for more ranks.
        """
        if self._random is None:
            with suppress(CheckpointError):  # a file of another tool has none
                world_size, own = checkpoint.read_processes(self.directory)
                process = process_in_schema(own(self._state.process_index % world_size))
                self._random = process["engine"]["random"]
        return self._random

    def restore_random(self) -> None:
        """Give this process the random state that was kept for it, if there is one."""
        restore_random(self.random)


def restore_random(state: Mapping[str, Any] | None) -> None:
    """Put the global generators where a process's entry of a checkpoint has them; nothing where it has none."""
    if state is not None:
        RandomState.from_state_dict(state).restore()


def _listed(classes: Sequence[str | None]) -> str:
    return ", ".join(name or "unknown" for name in classes)


def _article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}"
