"""What happens to a checkpoint once it is decided on: written, then named, then what it replaces removed."""

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
from drivetrain.checkpoint.manifest import check_replaceable, writer_token
from drivetrain.checkpoint.storage import LocalStorage, storage_of
from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.terminal import without_credentials
from drivetrain.trackers import Tracker
from drivetrain.trackers.directory import DirectoryTracker

if TYPE_CHECKING:
    from drivetrain.callbacks.model_checkpoint import ModelCheckpoint
    from drivetrain.checkpoint import PendingSave
    from drivetrain.trainer.trainer import Trainer


# Which checkpoints to keep and what to call them; independent of how they are stored


_FIELD = re.compile(r"\{([^{}:]+)(:[^{}]*)?\}")


class BestK:
    """The best k checkpoints: paths and scores."""

    def __init__(self, k: int, mode: str, by_score: bool) -> None:
        self.k = k
        self.mode = mode
        self.by_score = by_score
        self.scores: dict[str, float] = {}  # path -> score, in the order in which they were saved
        self.newest: str = ""

    @property
    def best(self) -> str:
        """The path of the best checkpoint, or an empty text; where scores do not count, of the newest."""
        if not self.by_score:
            return self.newest
        best = ""
        for path, score in self.scores.items():
            if not best or is_better(score, self.scores[best], self.mode):
                best = path
        return best

    @property
    def worst(self) -> str:
        """The path of the checkpoint that goes first, or an empty text."""
        return self._worst_of(self.scores)

    def wants(self, score: float | None) -> bool:
        """Whether a checkpoint with this score is to be kept. One whose score is NaN never is."""
        if self.k == 0:
            return False
        if not self.by_score:
            return True
        if score is None or score != score:
            return False
        if self.k < 0 or len(self.scores) < self.k:
            return True
        return is_better(score, self.scores[self.worst], self.mode)

    def displaced(self) -> list[str]:
        """Return the paths of the checkpoints that have to go when one more comes."""
        left, gone = dict(self.scores), []
        while 0 < self.k <= len(left):
            gone.append(self._worst_of(left))
            del left[gone[-1]]
        return gone

    def add(self, path: str, score: float | None) -> list[str]:
        """Take a checkpoint in; returns the paths of those that go for it."""
        gone = [] if path in self.scores else self.displaced()
        for old in (path, *gone):
            self.scores.pop(old, None)
        self.scores[path] = 0.0 if score is None else score
        self.newest = path
        return gone

    def _worst_of(self, scores: Mapping[str, float]) -> str:
        worst = ""
        for path, score in scores.items():
            # Of equals the one that came later goes first; where scores do not count, the oldest one does.
            if not worst or (self.by_score and not is_better(score, scores[worst], self.mode)):
                worst = path
        return worst


class CheckpointName:
    """The name of a checkpoint, from a template such as `"{epoch}-{val_loss:.3f}"`."""

    def __init__(
        self, template: str, insert_names: bool = True, equals: str = "=", missing: float = float("nan")
    ) -> None:
        self.template = template
        self.insert_names = insert_names
        self.equals = equals
        self.missing = missing

    @property
    def fields(self) -> list[str]:
        """The names in braces."""
        return [match[1] for match in _FIELD.finditer(self.template)]

    def format(self, epoch: int, step: int, metrics: Mapping[str, Any]) -> str:
        """Return the name."""

        def fill(match: re.Match[str]) -> str:
            name, style = match[1], (match[2] or ":")[1:]
            value: Any = {"epoch": epoch, "step": step}.get(name)
            if value is None:
                value = float(metrics[name]) if name in metrics else self.missing
            try:
                text = format(value, style)
            except ValueError as error:
                raise ConfigurationError(
                    f"The checkpoint name {self.template!r} writes {name} = {value!r} as {style!r}: {error}. "
                    "Use a format for numbers, such as {epoch:02d} or {val_loss:.3f}.",
                ) from None
            # A metric's name may hold a slash, which would make a directory.
            return f"{name.replace('/', '_')}{self.equals}{text}" if self.insert_names else text

        return _FIELD.sub(fill, self.template)


# What a checkpoint holds about the other checkpoints of its run: names within one directory, never paths


@dataclass(frozen=True)
class SavedAccount:
    """The state of a `ModelCheckpoint` from a checkpoint, checked.

    Attributes:
        saved_in: The directory of the checkpoints then; only ever compared with those of this run.
        below_root: That directory as seen from the run's default directory; None where it was not below it.
        scores: Names and scores of the checkpoints kept.
        names: Other names by the field of `CheckpointAccount`.
        lists: Lists of names by the field of `CheckpointAccount`.
    """

    saved_in: str
    below_root: str | None
    scores: dict[str, float]
    names: dict[str, str] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> SavedAccount:
        """Check the state."""
        saved_in = state.get("dirpath") or ""
        if not isinstance(saved_in, str):
            raise _refused("dirpath", saved_in)
        below_root = state.get("below_root")
        if below_root is not None:
            below_root = _checked_name("below_root", below_root, "")
        scores: dict[str, float] = {}
        for pair in _list("best_k_models", state.get("best_k_models")):
            if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[1], int | float):
                raise _refused("best_k_models", pair)
            scores[_checked_name("best_k_models", pair[0], saved_in)] = float(pair[1])
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
        return cls(saved_in, below_root, scores, names, lists)

    def without(self, names: set[str]) -> SavedAccount:
        """The same but for some names."""
        return SavedAccount(
            self.saved_in,
            self.below_root,
            {name: score for name, score in self.scores.items() if name not in names},
            {key: "" if name in names else name for key, name in self.names.items()},
            {key: [name for name in listed if name not in names] for key, listed in self.lists.items()},
        )

    def leading_outside(self, directory: str) -> set[str]:
        """The names that a link in a local directory makes lead outside of it."""
        every = {*self.scores, *self.names.values(), *(name for listed in self.lists.values() for name in listed)}
        inside = os.path.realpath(directory) + os.sep
        return {name for name in every - {""} if not os.path.realpath(os.path.join(directory, name)).startswith(inside)}


def number(state: Mapping[str, Any], key: str, kind: type, optional: bool = False) -> Any:
    """A number of the state; an int where a float is asked for is one."""
    value = state.get(key)
    if value is None and optional:
        return None
    allowed: tuple[type, ...] = (int, float) if kind is float else (kind,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise _refused(key, value)
    return value


def _checked_name(key: str, value: Any, saved_in: str) -> str:
    """A name within the directory of checkpoints, or an empty text."""
    if not isinstance(value, str):
        raise _refused(key, value)
    # Before there were names, there were paths within the directory.
    inside = saved_in.rstrip("/") + "/"
    name = value[len(inside) :] if saved_in and value.startswith(inside) else value
    if name and ("\0" in name or any(part in ("", ".", "..") for part in name.split("/"))):
        raise _refused(key, value)
    return name


def _list(key: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise _refused(key, value)
    return list(value)


def _refused(key: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"The state of ModelCheckpoint in this checkpoint has {key}={value!r}, which no run writes: it takes names of "
        "checkpoints within one directory, and numbers. Do not resume from this checkpoint unless you know who made it."
    )


# The directory that checkpoints are kept in: names, links, copies and removal. For the main process


logger = get_logger(__name__)


def resolved(path: str | os.PathLike[str]) -> str:
    """A directory as an absolute path, or as the URL that it is."""
    return storage_of(path)[1]


def is_local(path: str) -> bool:
    """Whether a path is on a file system of this machine, which has links."""
    return isinstance(storage_of(path)[0], LocalStorage)


def is_taken(path: str) -> bool:
    """Whether there is anything of this name."""
    storage, place = storage_of(path)
    return os.path.lexists(place) if isinstance(storage, LocalStorage) else storage.is_directory(place)


def free_path(
    path: str, extension: str, may_replace: Callable[[str], bool] = lambda candidate: False, first: int = 1
) -> str:
    """The path for a name: a free one, with a number where the name is taken, or one that may be replaced."""
    candidate, version = path + extension, first - 1
    while is_taken(candidate) and not may_replace(candidate):
        version += 1
        candidate = f"{path}-v{version}{extension}"
    return candidate


def relative(path: str | None, root: str) -> str | None:
    """A directory as seen from a root, or None where it is not below it."""
    if path is None or not root or not path.startswith(root.rstrip("/") + "/"):
        return None
    return os.path.relpath(path, root)


def continued(path: str | None, state: SavedAccount, root: str, own: Sequence[str]) -> str | None:
    """Where a resumed run saves that was given no directory: where the run before it did, if that is one of its own."""
    moved = [os.path.join(root, state.below_root)] if state.below_root and _leads_below(root, state.below_root) else []
    candidates = [*moved, *(each for each in own if is_same(each, state))]
    return next((candidate for candidate in candidates if is_taken(candidate)), path)


def is_same(path: str | None, state: SavedAccount) -> bool:
    """Whether a directory is the one of an earlier run, there or moved. The earlier one is only compared."""
    old, newest = state.saved_in, state.names["newest"]
    if path is None or without_credentials(path) == without_credentials(old or ""):
        return True
    if not old or "://" in old or not is_local(path):
        return False  # nothing is asked of a storage that only a checkpoint names
    if os.path.realpath(path) == os.path.realpath(old):
        return True
    return bool(newest) and not is_taken(f"{old}/{newest}") and is_taken(f"{path}/{newest}")


def _leads_below(root: str, name: str) -> bool:
    """Whether a name below a directory leads there once links are followed."""
    return os.path.realpath(os.path.join(root, name)).startswith(os.path.realpath(root) + os.sep)


def default_places(trackers: Sequence[Tracker], root: str) -> list[str]:
    """Where runs save that were given no directory: beside what trackers write, the newest run first."""
    if not is_local(root):
        return [f"{resolved(root)}/checkpoints"]
    found = [
        str(version / "checkpoints")
        for tracker in trackers
        if isinstance(tracker, DirectoryTracker)
        for version in tracker.run_directory.existing()
    ]
    return [*dict.fromkeys(os.path.abspath(path) for path in found), os.path.join(os.path.abspath(root), "checkpoints")]


def link(path: str, target: str) -> None:
    """Let `path` be a relative symbolic link to a checkpoint beside it, whatever it was before."""
    _check_replaceable(path)
    beside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{writer_token()}.link")
    try:
        os.symlink(os.path.relpath(target, os.path.dirname(path)), beside)
        if os.path.isdir(path) and not os.path.islink(path):
            checkpoint.remove_checkpoint(path)
        os.replace(beside, path)
    except OSError as error:
        if os.path.islink(beside):
            os.unlink(beside)
        raise CheckpointError(f"{path} could not be made a link to {target}: {error}.") from error


def duplicate(path: str, source: str) -> None:
    """Let `path` be a second name of a checkpoint: its files are linked hard, or copied where that cannot be."""
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
        raise CheckpointError(f"{path} could not be made a copy of {source}: {error}.") from error


def _check_replaceable(path: str) -> None:
    """Refuse to let a checkpoint take the place of something that is none."""
    if os.path.islink(path) or not os.path.isfile(path):
        check_replaceable(LocalStorage(), path)
    elif not checkpoint.is_checkpoint(path):
        raise CheckpointError(f"{path} is not replaced by a checkpoint: it is a file that no run has written.")


def remove(path: str, kept_in: checkpoint.CheckpointFormat) -> None:
    """Remove a checkpoint, or a link to one; what cannot be removed stays, with a warning."""
    try:
        kept_in.remove(path)
    except (OSError, CheckpointError) as error:
        logger.warning(f"A checkpoint that nobody needs any more stays: {error}")


def surplus(directory: str, limit: int, needed: set[str]) -> list[str]:
    """The checkpoints of a directory that are beyond a limit, those of the fewest steps."""
    needed = {os.path.realpath(path) if os.path.islink(path) else path for path in needed}
    found = [one.path for one in checkpoint.list_checkpoints(directory, warn=False)]  # by step: clocks are set
    others = [path for path in found if path not in needed]
    return others[max(0, limit - (len(found) - len(others))) :]


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links, or one name too many
        shutil.copy2(source, target)
        LocalStorage().settle(target)


# Which checkpoints of a run there are, and which of them are to go


@dataclass
class CheckpointAccount:
    """The checkpoints that one `ModelCheckpoint` has written and not yet removed.

    Attributes:
        best: The best ones, or the newest where scores do not count.
        last: The path of `last`, or an empty text.
        newest: The path of the newest one, whatever its score.
        beside: The newest one where it is not among the best, kept for `last` to link to.
        passing: Those written for a run that was about to be ended; a newer one makes them superfluous.
        doomed: Those that a newer one has made superfluous, and that are still to be removed.
    """

    best: BestK
    last: str = ""
    newest: str = ""
    beside: str = ""
    passing: list[str] = field(default_factory=list)
    doomed: list[str] = field(default_factory=list)

    def add(self, path: str, score: float | None, among_best: bool, is_whole: bool = True) -> None:
        """Take in a checkpoint under a name of its own, and record those that go for it."""
        if self.beside and self.beside != path:
            self.doomed.append(self.beside)
        self.beside = "" if among_best else path
        if among_best:
            self.doomed += self.best.add(path, score)
        self.record_newest(path, is_whole)

    def record_newest(self, path: str, is_whole: bool = True) -> None:
        """Let a checkpoint be the newest; where a run can resume from it, those for the meantime go."""
        self.newest = path
        if is_whole:
            self.doomed += self.passing
            self.passing = []
        self.doomed = [old for old in dict.fromkeys(self.doomed) if old != path]

    def forget(self, path: str) -> None:
        """Take a checkpoint that was removed off the list."""
        self.best.scores.pop(path, None)
        self.doomed = [old for old in self.doomed if old != path]

    def indispensable(self) -> set[str]:
        """Those that no limit removes: the best by score, `last`, and the newest."""
        best = self.best.scores if self.best.by_score else ()
        return {path for path in (*best, self.last, self.newest, self.beside) if path}

    def copy(self) -> CheckpointAccount:
        """The same, to return to if a save fails."""
        return copy.deepcopy(self)

    def state_dict(self, directory: str) -> dict[str, Any]:
        """Everything, by names within the directory of the checkpoints."""
        inside = directory.rstrip("/") + "/"

        def name(path: str) -> str:
            return path.removeprefix(inside)

        return {
            "best_k_models": [[name(path), score] for path, score in self.best.scores.items()],
            "newest_of_best": name(self.best.newest),
            "last_model_path": name(self.last),
            "newest_model_path": name(self.newest),
            "beside": name(self.beside),
            "passing": [name(path) for path in self.passing],
            "doomed": [name(path) for path in self.doomed],
        }

    def restore(self, state: SavedAccount, directory: str) -> None:
        """Take everything back."""

        def here(name: str) -> str:
            return f"{directory.rstrip('/')}/{name}" if name else ""

        self.best.scores = {here(name): score for name, score in state.scores.items()}
        self.best.newest = here(state.names["newest_of_best"])
        self.last, self.newest = here(state.names["last"]), here(state.names["newest"])
        self.beside = here(state.names["beside"])
        self.passing = [here(name) for name in state.lists["passing"]]
        self.doomed = [here(name) for name in state.lists["doomed"]]


# What is saved, and under which name


@dataclass
class Decision:
    """What is to be saved now, the same on all processes.

    Attributes:
        score: The monitored value.
        path: Save here, under a name of its own.
        among_best: Whether that one is kept for its score.
        last: Let this name stand for it too, or save here where there is no `path`.
        gone: The name that stood for the newest before, where names change as the run goes.
    """

    score: float | None = None
    path: str | None = None
    among_best: bool = False
    last: str | None = None
    gone: str = ""

    @property
    def target(self) -> str | None:
        """Where the state is written."""
        return self.path or self.last

    def report(self, options: ModelCheckpoint, trainer: Trainer) -> None:
        """Log it."""
        where = f"Epoch {trainer.current_epoch}, step {trainer.global_step}"
        score = "" if self.score is None else f" with {options.monitor} = {self.score:.6g}"
        if self.path is not None:
            logger.info(f"{where}: saved {self.path}{score}.")
        else:
            logger.info(f"{where}: not among the best {options.save_top_k}{score}.")


def decide(
    options: ModelCheckpoint,
    kept: CheckpointAccount,
    name: CheckpointName,
    trainer: Trainer,
    was_validated: bool,
    only_last: bool = False,
) -> Decision:
    """Decide what is saved now; called by the main process alone, changes nothing."""
    metrics = trainer.callback_metrics
    decision = Decision(score=None if only_last else options.score_of(trainer, was_validated))
    decision.among_best = not only_last and kept.best.wants(decision.score)
    if decision.among_best or (options.save_last == "link" and not only_last):
        text = name.format(trainer.current_epoch, trainer.global_step, metrics)
        _warn_of_unknown_fields(options, name, metrics)
        # A name is used again only for a checkpoint that goes anyway.
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
    """The path for a name: a free one, or one of this run's own, to be replaced."""
    path = os.path.join(options.dirpath or "", name)
    if not options.enable_version_counter:
        return path + options.FILE_EXTENSION
    kept_in = trainer.checkpoint_format

    def may_replace(candidate: str) -> bool:
        return candidate in own and kept_in.may_replace(candidate, block=not options.async_save)

    return free_path(path, options.FILE_EXTENSION, may_replace, options.STARTING_VERSION)


def _warn_of_unknown_fields(options: ModelCheckpoint, name: CheckpointName, metrics: Mapping[str, Any]) -> None:
    for key in name.fields:
        if key not in metrics and key not in ("epoch", "step"):
            logger.warning_once(
                f"ModelCheckpoint(filename={options.filename!r}): there is no metric {key!r}, so the name has nan. "
                f"Logged so far: {', '.join(map(repr, sorted(metrics))) or 'nothing'}."
            )


class CheckpointWriter:
    """Writes the checkpoints of one `ModelCheckpoint`, one at a time, and keeps account of them.

    All methods are called by all processes.
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
        """Never remove a checkpoint, whatever becomes superfluous."""
        self._protected.add(path)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being written, and no error is left to report."""
        return self._in_flight is None

    def save(self, trainer: Trainer, directory: str, decision: Decision, weights_only: bool) -> None:
        """Write a checkpoint, at once or in the background; `settle` came before."""
        target = decision.target
        if target is None:
            return
        if trainer.saves is not None:
            trainer.saves.finish()  # what others save reports its own error, which is not forgiven here
        before = self.kept.copy()
        # The account is part of the checkpoint, so it is brought up to date first.
        if decision.path is not None:
            self.kept.add(decision.path, decision.score, decision.among_best, is_whole=not weights_only)
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
            del targets[1:]  # the other one is a link or a copy
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
            self._take_back(before, error)
        else:
            if not self._in_background:
                self._finish(follow_up)

    def save_now(self, trainer: Trainer, path: str, is_passing: bool) -> bool:
        """Write a checkpoint with everything in it, at once."""
        self.settle(forgive=True)
        if trainer.saves is not None:
            try:
                trainer.saves.finish()
            except CheckpointError as error:
                logger.error(f"{error} Another one is saved now.")
        before = self.kept.copy()
        if is_passing:
            self.kept.passing = [*(old for old in self.kept.passing if old != path), path]
        self.kept.newest = path
        try:
            trainer.save_checkpoint(path)
        except CheckpointError as error:
            self._take_back(before, error)
            return False
        return True

    def poll(self, trainer: Trainer) -> None:
        """Let an error in the background end the run, as soon as it can be raised on all processes."""
        flight = self._in_flight
        if flight is None or not flight.pending.failed():
            return
        if self._forgives or trainer.world_size == 1:
            self.settle()
        else:
            # They agree on the step to stop at, and raise when training is over.
            trainer.control.request_stop(
                "ModelCheckpoint: a checkpoint could not be written in the background", for_good=False
            )

    def settle(self, forgive: bool = False) -> None:
        """Wait until what is being written is done."""
        flight, self._in_flight = self._in_flight, None
        if flight is None:
            return
        try:
            flight.pending.wait()
        except CheckpointError as error:
            self._take_back(flight.before, error, forgive)
        else:
            self._finish(flight.outcome, forgive)

    def abandon(self, wait: bool) -> None:
        """Leave what is being written to itself, without an exchange with other processes."""
        flight, self._in_flight = self._in_flight, None
        if flight is None:
            return
        if not wait:
            flight.pending.add_done_callback(_log_failure)
            return
        try:
            flight.pending.wait()
            flight.outcome()
        except CheckpointError as error:
            logger.error(f"ModelCheckpoint: {error}")

    def _finish(self, follow_up: Callable[[], list[str]], forgive: bool = False) -> None:
        try:
            removed = decide_on_main_process(follow_up)
        except CheckpointError as error:
            if not (self._forgives or forgive):
                raise _with_way_out(error) from error
            logger.error(f"ModelCheckpoint: {error} The run continues.")
            return
        for path in removed:
            self.kept.forget(path)

    def _follow_up(
        self, directory: str, decision: Decision, named_twice: bool, kept_in: checkpoint.CheckpointFormat
    ) -> list[str]:
        """Do what can be done once the checkpoint is durable; returns what was removed."""
        if named_twice and decision.path is not None and decision.last is not None:
            if self._links:
                link(decision.last, decision.path)
            else:
                duplicate(decision.last, decision.path)
        gone = list(self.kept.doomed)
        for path in gone:
            if path not in self._protected:
                remove(path, kept_in)
        if self._limit is not None:
            beyond = surplus(directory, self._limit, self.kept.indispensable() | self._protected)
            for path in beyond:
                remove(path, kept_in)
            gone += beyond
        return gone

    def _take_back(self, before: CheckpointAccount, error: CheckpointError, forgive: bool = False) -> None:
        self.kept = before
        if not (self._forgives or forgive):
            raise _with_way_out(error) from error
        logger.error(f"ModelCheckpoint: {error} The run continues; the checkpoints before this one are intact.")


def _with_way_out(error: CheckpointError) -> CheckpointError:
    """The error of a save, such as a full disk, with what may be done about it."""
    return type(error)(
        f"{error} The checkpoints before this one are intact. With ModelCheckpoint(on_save_error='warn') a run "
        "continues where a checkpoint cannot be written."
    )


def _log_failure(pending: PendingSave) -> None:
    try:
        pending.raise_if_failed()
    except CheckpointError as error:
        logger.error(f"ModelCheckpoint: {error}")


@dataclass
class _InFlight:
    """A save in the background, what there was before it, and what came of what follows it on the main process."""

    pending: PendingSave
    before: CheckpointAccount
    removed: list[str] = field(default_factory=list)
    error: Exception | None = None

    def do(self, follow_up: Callable[[], list[str]]) -> None:
        """Do what follows the save, in the thread that writes; waiting for the save waits for this, too."""
        try:
            self.removed = follow_up()
        except Exception as error:
            self.error = error

    def outcome(self) -> list[str]:
        """Return what was removed, or raise what went wrong."""
        if self.error is not None:
            raise self.error
        return self.removed
