"""Files of `ModelCheckpoint`: which checkpoints to write, how to name them, and which old ones to remove."""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from drivetrain import checkpoint
from drivetrain.callbacks.step_schedule import (
    decide_on_main_process,
    is_better,
)
from drivetrain.checkpoint.manifest import check_replaceable
from drivetrain.checkpoint.storage import LocalStorage, storage_of, writer_token
from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.terminal import without_credentials
from drivetrain.trackers import Tracker
from drivetrain.trackers.directory import DirectoryTracker

if TYPE_CHECKING:
    from drivetrain.callbacks.model_checkpoint import ModelCheckpoint
    from drivetrain.checkpoint import PendingSave
    from drivetrain.trainer.trainer import Trainer


# Ranking and names


_FIELD = re.compile(r"\{([^{}:]+)(:[^{}]*)?\}")


class BestK:
    """The `k` checkpoints of a run with the best scores, or its `k` newest checkpoints without scores."""

    def __init__(self, k: int, mode: str, by_score: bool, tie_mode: str = "min") -> None:
        self.k = k
        self.tie_mode = tie_mode
        self.ties: dict[str, float] = {}  # path -> value of the second metric, which decides between equal scores
        self.mode = mode
        self.by_score = by_score
        self.scores: dict[str, float] = {}  # path -> score, in the order in which they were saved
        self.newest: str = ""

    @property
    def best(self) -> str:
        """The path of the best checkpoint, or of the newest one if no metric is monitored."""
        if not self.by_score:
            return self.newest
        best = ""
        for path, score in self.scores.items():
            if not best or self._is_ahead(score, self._tie(path), best):
                best = path
        return best

    def _tie(self, path: str) -> float:
        return self.ties.get(path, float("nan"))

    def _is_ahead(self, score: float, tie: float, than: str) -> bool:
        other = self.scores[than]
        return is_better(score, other, self.mode) or (score == other and is_better(tie, self._tie(than), self.tie_mode))

    @property
    def worst(self) -> str:
        return self._worst_of(self.scores)

    def wants(self, score: float | None, tie: float | None = None) -> bool:
        if self.k == 0:
            return False
        if not self.by_score:
            return True
        if score is None or score != score:
            return False
        # k = -1 keeps every checkpoint.
        if self.k < 0 or len(self.scores) < self.k:
            return True
        return self._is_ahead(score, float("nan") if tie is None else tie, self.worst)

    def displaced(self) -> list[str]:
        left, gone = dict(self.scores), []
        while 0 < self.k <= len(left):
            gone.append(self._worst_of(left))
            del left[gone[-1]]
        return gone

    def add(self, path: str, score: float | None, tie: float | None = None) -> list[str]:
        # A checkpoint that is saved again under its name displaces no other.
        gone = [] if path in self.scores else self.displaced()
        # The path itself is removed too, so that it moves to the end of the order of saving.
        for old in (path, *gone):
            self.remove(old)
        self.scores[path] = 0.0 if score is None else score
        if tie is not None:
            self.ties[path] = tie
        self.newest = path
        return gone

    def remove(self, path: str) -> None:
        self.scores.pop(path, None)
        self.ties.pop(path, None)

    def _worst_of(self, scores: Mapping[str, float]) -> str:
        worst = ""
        for path, score in scores.items():
            # Of equal scores the later checkpoint goes first. Without scores the oldest goes first.
            if not worst or (self.by_score and not self._is_ahead(score, self._tie(path), worst)):
                worst = path
        return worst


class CheckpointName:
    """Template of a checkpoint name, such as `"{epoch}-{val_loss:.3f}"`."""

    def __init__(
        self, template: str, insert_names: bool = True, equals: str = "=", missing: float = float("nan")
    ) -> None:
        self.template = template
        self.insert_names = insert_names
        self.equals = equals
        self.missing = missing

    @property
    def fields(self) -> list[str]:
        return [match[1] for match in _FIELD.finditer(self.template)]

    def format(self, epoch: int, step: int, metrics: Mapping[str, Any]) -> str:
        def fill(match: re.Match[str]) -> str:
            name, style = match[1], (match[2] or ":")[1:]
            value: Any = {"epoch": epoch, "step": step}.get(name)
            if value is None:
                value = float(metrics[name]) if name in metrics else self.missing
            try:
                text = format(value, style)
            except ValueError as error:
                raise ConfigurationError(
                    f"The checkpoint name {self.template!r} cannot format {name} = {value!r} with {style!r}: {error}. "
                    "Use a format for numbers, such as {epoch:02d} or {val_loss:.3f}.",
                ) from None
            # A slash in a metric's name would create a subdirectory.
            return f"{name.replace('/', '_')}{self.equals}{text}" if self.insert_names else text

        return _FIELD.sub(fill, self.template)


# Saved state: names within one directory, never paths, since a checkpoint may come from an untrusted source


@dataclass(frozen=True)
class SavedAccount:
    """Names and scores of an earlier run's checkpoints, loaded from the state of its `ModelCheckpoint`.

    Attributes:
        saved_in: The checkpoint directory of the earlier run. It is compared with paths of this run, but never opened.
        below_root: That directory relative to the default root directory, or None if it lay outside.
        scores: A dict from checkpoint name to score.
        names: A dict from fields of `CheckpointAccount` to checkpoint names.
        lists: A dict from fields of `CheckpointAccount` to lists of checkpoint names.
        ties: A dict from checkpoint name to the value of the second metric.
    """

    saved_in: str
    below_root: str | None
    scores: dict[str, float]
    names: dict[str, str] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)
    ties: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> SavedAccount:
        saved_in = state.get("dirpath") or ""
        if not isinstance(saved_in, str):
            raise _invalid_state("dirpath", saved_in)
        below_root = state.get("below_root")
        if below_root is not None:
            below_root = _checked_name("below_root", below_root, "")
        scores = _values("best_k_models", state.get("best_k_models"), saved_in)
        ties = _values("ties", state.get("ties", []), saved_in)  # older checkpoints have none
        names = {
            attribute: _checked_name(key, state.get(key), saved_in)
            for attribute, key in (
                ("newest_of_best", "newest_of_best"),
                ("last", "last_model_path"),
                ("newest", "newest_model_path"),
                ("beside", "beside"),
            )
        }
        lists = {
            key: [_checked_name(key, name, saved_in) for name in _list(key, state.get(key))]
            for key in ("passing", "doomed")
        }
        return cls(saved_in, below_root, scores, names, lists, ties)

    def without(self, names: set[str]) -> SavedAccount:
        return SavedAccount(
            self.saved_in,
            self.below_root,
            {name: score for name, score in self.scores.items() if name not in names},
            {key: "" if name in names else name for key, name in self.names.items()},
            {key: [name for name in listed if name not in names] for key, listed in self.lists.items()},
            self.ties,
        )

    def names_leading_outside(self, directory: str) -> set[str]:
        every = {*self.scores, *self.names.values(), *(name for listed in self.lists.values() for name in listed)}
        inside = os.path.realpath(directory) + os.sep
        return {name for name in every - {""} if not os.path.realpath(os.path.join(directory, name)).startswith(inside)}


def checked_number(state: Mapping[str, Any], key: str, kind: type, optional: bool = False) -> Any:
    value = state.get(key)
    if value is None and optional:
        return None
    allowed: tuple[type, ...] = (int, float) if kind is float else (kind,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise _invalid_state(key, value)
    return value


def _values(key: str, pairs: Any, saved_in: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for pair in _list(key, pairs):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[1], int | float):
            raise _invalid_state(key, pair)
        found[_checked_name(key, pair[0], saved_in)] = float(pair[1])
    return found


def _checked_name(key: str, value: Any, saved_in: str) -> str:
    if not isinstance(value, str):
        raise _invalid_state(key, value)
    # Old checkpoints hold full paths.
    inside = saved_in.rstrip("/") + "/"
    name = value[len(inside) :] if saved_in and value.startswith(inside) else value
    if name and ("\0" in name or any(part in ("", ".", "..") for part in name.split("/"))):
        raise _invalid_state(key, value)
    return name


def _list(key: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise _invalid_state(key, value)
    return list(value)


def _invalid_state(key: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"The state of ModelCheckpoint in this checkpoint has {key}={value!r}, which no run writes: only names of "
        "checkpoints within one directory and numbers are allowed. Do not resume from a checkpoint of unknown origin."
    )


# Checkpoint directory; called by the main process


logger = get_logger(__name__)


def absolute_directory(path: str | os.PathLike[str]) -> str:
    """Make a local path absolute. URLs are returned unchanged."""
    return storage_of(path)[1]


def is_local(path: str) -> bool:
    """Return True if a path is local and not a URL."""
    return isinstance(storage_of(path)[0], LocalStorage)


def is_taken(path: str) -> bool:
    """Return True if a file or directory exists at `path`."""
    storage, place = storage_of(path)
    return os.path.lexists(place) if isinstance(storage, LocalStorage) else storage.is_directory(place)


def free_path(
    path: str, extension: str, may_replace: Callable[[str], bool] = lambda candidate: False, first: int = 1
) -> str:
    candidate, version = path + extension, first - 1
    while is_taken(candidate) and not may_replace(candidate):
        version += 1
        candidate = f"{path}-v{version}{extension}"
    return candidate


def relative(path: str | None, root: str) -> str | None:
    if path is None or not root or not path.startswith(root.rstrip("/") + "/"):
        return None
    return os.path.relpath(path, root)


def directory_to_resume(path: str | None, state: SavedAccount, root: str, own: Sequence[str]) -> str | None:
    moved = [os.path.join(root, state.below_root)] if state.below_root and _leads_below(root, state.below_root) else []
    candidates = [*moved, *(each for each in own if is_directory_of(each, state))]
    return next((candidate for candidate in candidates if is_taken(candidate)), path)


def is_directory_of(path: str | None, state: SavedAccount) -> bool:
    old, newest = state.saved_in, state.names["newest"]
    # Credentials in a URL may change between runs.
    if path is None or without_credentials(path) == without_credentials(old or ""):
        return True
    if not old or "://" in old or not is_local(path):
        return False  # never open a URL that only a checkpoint file names
    if os.path.realpath(path) == os.path.realpath(old):
        return True
    # Moved: the newest checkpoint is no longer in the old directory, but in this one.
    return bool(newest) and not is_taken(f"{old}/{newest}") and is_taken(f"{path}/{newest}")


def _leads_below(root: str, name: str) -> bool:
    return os.path.realpath(os.path.join(root, name)).startswith(os.path.realpath(root) + os.sep)


def default_directories(trackers: Sequence[Tracker], root: str) -> list[str]:
    if not is_local(root):
        return [f"{absolute_directory(root)}/checkpoints"]
    # newest run first
    found = [
        str(version / "checkpoints")
        for tracker in trackers
        if isinstance(tracker, DirectoryTracker)
        for version in tracker.run_directory.existing()
    ]
    return [*dict.fromkeys(os.path.abspath(path) for path in found), os.path.join(os.path.abspath(root), "checkpoints")]


def link(path: str, target: str) -> None:
    """Make `path` a relative symbolic link to the checkpoint `target`."""
    _check_replaceable(path)
    # The link is created under a temporary name and renamed, so that `path` always leads to a checkpoint.
    beside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{writer_token()}.link")
    try:
        os.symlink(os.path.relpath(target, os.path.dirname(path)), beside)
        if os.path.isdir(path) and not os.path.islink(path):
            checkpoint.remove_checkpoint(path)
        os.replace(beside, path)
    except OSError as error:
        if os.path.islink(beside):
            os.unlink(beside)
        raise CheckpointError(f"Cannot create the link {path} to {target}: {error}. Use save_last='copy'.") from error


def duplicate(path: str, source: str) -> None:
    """Make `path` a second copy of a checkpoint, with hard links if possible."""
    _check_replaceable(path)
    storage, token = LocalStorage(), writer_token()
    place, _ = storage.place_for(path, token)
    try:
        if os.path.isfile(source):
            _link_or_copy(source, place)
        else:
            shutil.copytree(source, place, copy_function=_link_or_copy)
        storage.replace(place, path, token)
    except OSError as error:
        storage.discard(place)
        raise CheckpointError(f"Cannot copy the checkpoint {source} to {path}: {error}.") from error


def _check_replaceable(path: str) -> None:
    if os.path.islink(path) or not os.path.isfile(path):
        check_replaceable(LocalStorage(), path)
    elif not checkpoint.is_checkpoint(path):
        raise CheckpointError(f"{path} is not a checkpoint, so this file is not overwritten. Use another name.")


def remove(path: str, kept_in: checkpoint.CheckpointFormat) -> None:
    try:
        kept_in.remove(path)
    except (OSError, CheckpointError) as error:
        logger.warning(f"The old checkpoint {path} could not be removed: {error}")


def surplus(directory: str, limit: int, needed: set[str]) -> list[str]:
    needed = {os.path.realpath(path) if os.path.islink(path) else path for path in needed}
    # Links in `needed` are resolved first, so that the checkpoint that `last` points to is counted as needed.
    found = [one.path for one in checkpoint.list_checkpoints(directory, warn=False)]  # by step: clocks may jump
    others = [path for path in found if path not in needed]
    return others[max(0, limit - (len(found) - len(others))) :]


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # no hard links on this file system, or too many for this file
        shutil.copy2(source, target)
        LocalStorage().settle(target)


# Record of the run's checkpoints


@dataclass
class CheckpointAccount:
    """Record of a `ModelCheckpoint`'s files: which checkpoints it keeps, and which it will delete.

    Attributes:
        best: The best checkpoints, or the newest if checkpoints have no scores.
        last: The path of the checkpoint `last`, or an empty string.
        newest: The path of the newest checkpoint, whatever its score.
        beside: The newest checkpoint if it is not among the best. It is kept as the target of the link `last`.
        passing: Checkpoints written before a preemption. The next complete checkpoint replaces them.
        doomed: Replaced checkpoints that are still to be removed.
    """

    best: BestK
    last: str = ""
    newest: str = ""
    beside: str = ""
    passing: list[str] = field(default_factory=list)
    doomed: list[str] = field(default_factory=list)

    def add(
        self, path: str, score: float | None, among_best: bool, is_whole: bool = True, tie: float | None = None
    ) -> None:
        if self.beside and self.beside != path:
            self.doomed.append(self.beside)
        self.beside = "" if among_best else path
        if among_best:
            self.doomed += self.best.add(path, score, tie)
        self.record_newest(path, is_whole)

    def record_newest(self, path: str, is_whole: bool = True) -> None:
        self.newest = path
        # A complete checkpoint replaces those that were saved for a preemption.
        if is_whole:
            self.doomed += self.passing
            self.passing = []
        self.doomed = [old for old in dict.fromkeys(self.doomed) if old != path]

    def forget(self, path: str) -> None:
        self.best.remove(path)
        self.doomed = [old for old in self.doomed if old != path]

    def indispensable(self) -> set[str]:
        best = self.best.scores if self.best.by_score else ()
        return {path for path in (*best, self.last, self.newest, self.beside) if path}

    def copy(self) -> CheckpointAccount:
        return copy.deepcopy(self)

    def state_dict(self, directory: str) -> dict[str, Any]:
        inside = directory.rstrip("/") + "/"

        def name(path: str) -> str:
            return path.removeprefix(inside)

        return {
            "best_k_models": [[name(path), score] for path, score in self.best.scores.items()],
            "ties": [[name(path), tie] for path, tie in self.best.ties.items()],
            "newest_of_best": name(self.best.newest),
            "last_model_path": name(self.last),
            "newest_model_path": name(self.newest),
            "beside": name(self.beside),
            "passing": [name(path) for path in self.passing],
            "doomed": [name(path) for path in self.doomed],
        }

    def restore(self, state: SavedAccount, directory: str) -> None:
        def here(name: str) -> str:
            return f"{directory.rstrip('/')}/{name}" if name else ""

        self.best.scores = {here(name): score for name, score in state.scores.items()}
        self.best.ties = {here(name): tie for name, tie in state.ties.items() if name in state.scores}
        self.best.newest = here(state.names["newest_of_best"])
        self.last, self.newest = here(state.names["last"]), here(state.names["newest"])
        self.beside = here(state.names["beside"])
        self.passing = [here(name) for name in state.lists["passing"]]
        self.doomed = [here(name) for name in state.lists["doomed"]]


# Decision about a save


@dataclass
class Decision:
    # made on the main process, before a checkpoint is saved
    score: float | None = None
    tie: float | None = None  # decides between equal scores
    path: str | None = None  # None if only `last` is written
    among_best: bool = False
    last: str | None = None  # None if it is not updated
    gone: str = ""  # previous path of `last` if its name has changed

    @property
    def target(self) -> str | None:
        """Path at which the checkpoint is written, or None if no checkpoint is saved."""
        return self.path or self.last

    def report(self, options: ModelCheckpoint, trainer: Trainer) -> None:
        where = f"Epoch {trainer.current_epoch}, step {trainer.global_step}"
        score = "" if self.score is None else f" with {options.monitor} = {self.score:.6g}"
        if self.path is not None:
            logger.info(f"{where}: saved {self.path}{score}.")
        else:
            logger.info(f"{where}: the model{score} is not among the best {options.save_top_k}.")


def decide(
    options: ModelCheckpoint,
    kept: CheckpointAccount,
    name: CheckpointName,
    trainer: Trainer,
    was_validated: bool,
    only_last: bool = False,
) -> Decision:
    # Called on the main process. The paths are None if nothing is to be saved.
    metrics = trainer.callback_metrics
    decision = Decision(score=None if only_last else options.score_of(trainer, was_validated))
    if decision.score is not None:
        decision.tie = options.tie_of(trainer)
    decision.among_best = not only_last and kept.best.wants(decision.score, decision.tie)
    if decision.among_best or (options.save_last == "link" and not only_last):
        text = name.format(trainer.current_epoch, trainer.global_step, metrics)
        for key in name.fields:
            if key not in metrics and key not in ("epoch", "step"):
                logger.warning_once(
                    f"ModelCheckpoint(filename={options.filename!r}): {key!r} was not logged, so the name contains nan"
                    f". Logged so far: {', '.join(map(repr, sorted(metrics))) or 'nothing'}."
                )
        # A name may be reused only if its checkpoint is removed anyway.
        going = [kept.beside, *kept.passing, *kept.doomed, *(kept.best.displaced() if decision.among_best else ())]
        decision.path = _path(options, trainer, text, own=going)
    if options.save_last:
        last = options.name_of(options.CHECKPOINT_NAME_LAST)
        text = last.format(trainer.current_epoch, trainer.global_step, metrics)
        decision.last = _path(options, trainer, text, own=(kept.last,))
        if last.fields and kept.last != decision.last:
            decision.gone = kept.last
    return decision


def _path(options: ModelCheckpoint, trainer: Trainer, name: str, own: Sequence[str]) -> str:
    path = os.path.join(options.dirpath or "", name)
    if not options.enable_version_counter:
        return path + options.FILE_EXTENSION
    kept_in = trainer.checkpoint_format

    def may_replace(candidate: str) -> bool:
        return candidate in own and kept_in.may_replace(candidate, block=not options.async_save)

    return free_path(path, options.FILE_EXTENSION, may_replace, options.STARTING_VERSION)


class CheckpointWriter:
    """Writer of a `ModelCheckpoint`'s checkpoints, which also removes outdated ones.

    All processes call each of its methods.
    """

    def __init__(
        self, kept: CheckpointAccount, links: bool, limit: int | None, in_background: bool, forgives: bool
    ) -> None:
        self.kept = kept
        self._links = links
        self._limit = limit
        self._in_background = in_background
        self._forgives = forgives
        self._in_flight: _InFlight | None = None
        self._protected: set[str] = set()

    def protect(self, path: str) -> None:
        self._protected.add(path)

    @property
    def is_idle(self) -> bool:
        return self._in_flight is None

    def save(self, trainer: Trainer, directory: str, decision: Decision, weights_only: bool) -> None:
        # Only one save may run at a time, so `settle` is called before.
        target = decision.target
        if target is None:
            return
        if trainer.saves is not None:
            trainer.saves.finish()  # an error of another save must raise here, whatever `on_save_error` is
        before = self.kept.copy()
        # The checkpoint contains this record, so update the record before saving.
        if decision.path is not None:
            self.kept.add(decision.path, decision.score, decision.among_best, not weights_only, decision.tie)
        else:
            self.kept.record_newest(target, is_whole=not weights_only)
        if decision.last is not None:
            self.kept.last = decision.last
            self.kept.doomed += [decision.gone] if decision.gone else []
        kept_in = trainer.checkpoint_format
        names = (decision.path, decision.last)
        named_twice = None not in names and (self._links or kept_in.has_second_names(directory))

        def follow_up() -> list[str]:
            return self._follow_up(directory, decision, named_twice, kept_in)

        targets = [path for path in names if path is not None]
        if named_twice:
            del targets[1:]  # `last` becomes a link or a copy
        try:
            if self._in_background:
                for path in targets:
                    pending = trainer.save_checkpoint(path, weights_only=weights_only, block=False)
                pending.claim()
                self._in_flight = flight = _InFlight(pending, before)
                if trainer.is_global_zero:
                    pending.add_done_callback(lambda done: None if done.failed() else flight.do(follow_up))
            else:
                for path in targets:
                    trainer.save_checkpoint(path, weights_only)
        except CheckpointError as error:
            self._roll_back(before, error)
        else:
            if not self._in_background:
                self._finish(follow_up)

    def save_now(self, trainer: Trainer, path: str, is_passing: bool) -> bool:
        # The failure of an earlier save must not prevent this one.
        self.settle(forgive=True)
        if trainer.saves is not None:
            try:
                trainer.saves.finish()
            except CheckpointError as error:
                logger.error(f"{error} A new checkpoint is saved now.")
        before = self.kept.copy()
        if is_passing:
            self.kept.passing = [*(old for old in self.kept.passing if old != path), path]
        self.kept.newest = path
        try:
            trainer.save_checkpoint(path)
        except CheckpointError as error:
            self._roll_back(before, error)
            return False
        return True

    def poll(self, trainer: Trainer) -> None:
        """Raise the error of a failed background save on all processes, without waiting."""
        flight = self._in_flight
        if flight is None or not flight.pending.failed():
            return
        if self._forgives or trainer.world_size == 1:
            self.settle()
        else:
            # Raising on one process alone would leave the others in a collective: all stop at an agreed step.
            trainer.control.request_stop(
                "ModelCheckpoint: a checkpoint could not be written in the background", for_good=False
            )

    def settle(self, forgive: bool = False) -> None:
        flight, self._in_flight = self._in_flight, None
        if flight is None:
            return
        # With `forgive`, errors are logged instead of raised.
        try:
            flight.pending.wait()
        except CheckpointError as error:
            self._roll_back(flight.before, error, forgive)
        else:
            self._finish(flight.outcome, forgive)

    def abandon(self, wait: bool) -> None:
        flight, self._in_flight = self._in_flight, None
        if flight is None:
            return
        if not wait:
            # Other processes may be gone, and waiting for them would hang.
            flight.pending.add_done_callback(_log_failure)
            return
        try:
            flight.pending.wait()
            flight.outcome()
        except CheckpointError as error:
            logger.error(f"ModelCheckpoint: {error}")

    def _finish(self, follow_up: Callable[[], list[str]], forgive: bool = False) -> None:
        try:
            # Other processes receive the removed paths, or the error, from the main process.
            removed = decide_on_main_process(follow_up)
        except CheckpointError as error:
            if not (self._forgives or forgive):
                raise _with_advice(error) from error
            logger.error(f"ModelCheckpoint: {error} The run continues.")
            return
        for path in removed:
            self.kept.forget(path)

    def _follow_up(
        self, directory: str, decision: Decision, named_twice: bool, kept_in: checkpoint.CheckpointFormat
    ) -> list[str]:
        if named_twice and decision.path is not None and decision.last is not None:
            if self._links:
                link(decision.last, decision.path)
            else:
                duplicate(decision.last, decision.path)
        gone = list(self.kept.doomed)
        for path in gone:
            # A protected path stays in `gone`: the record forgets it, but its files stay.
            if path not in self._protected:
                remove(path, kept_in)
        if self._limit is not None:
            beyond = surplus(directory, self._limit, self.kept.indispensable() | self._protected)
            for path in beyond:
                remove(path, kept_in)
            gone += beyond
        return gone

    def _roll_back(self, before: CheckpointAccount, error: CheckpointError, forgive: bool = False) -> None:
        # The failed checkpoint does not exist, so the record must not list it.
        self.kept = before
        if not (self._forgives or forgive):
            raise _with_advice(error) from error
        logger.error(f"ModelCheckpoint: {error} The run continues. Earlier checkpoints are intact.")


def _with_advice(error: CheckpointError) -> CheckpointError:
    return type(error)(
        f"{error} Earlier checkpoints are intact. With ModelCheckpoint(on_save_error='warn') a run continues "
        "if a checkpoint cannot be written."
    )


def _log_failure(pending: PendingSave) -> None:
    try:
        pending.raise_if_failed()
    except CheckpointError as error:
        logger.error(f"ModelCheckpoint: {error}")


@dataclass
class _InFlight:
    pending: PendingSave
    before: CheckpointAccount  # restored if the save fails
    removed: list[str] = field(default_factory=list)  # result of the work after the save
    error: Exception | None = None

    def do(self, follow_up: Callable[[], list[str]]) -> None:
        try:
            # Runs in the thread that writes the checkpoint. An exception must not end that thread, so `outcome`
            # raises it.
            self.removed = follow_up()
        except Exception as error:
            self.error = error

    def outcome(self) -> list[str]:
        if self.error is not None:
            raise self.error
        return self.removed
