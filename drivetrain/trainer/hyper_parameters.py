"""Hyper-parameters of tasks and data modules: recording, saving, and building objects from a checkpoint."""

from __future__ import annotations

import csv
import inspect
import os
from argparse import Namespace
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from drivetrain.checkpoint.manifest import LOSS_IS_FINITE
from drivetrain.runtime.errors import CheckpointError, known_keywords
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.yaml_text import load_yaml
from drivetrain.trainer.given_hyper_parameters import INSTANTIATOR, given_hyper_parameters

logger = get_logger(__name__)


class HyperParameters(dict[str, Any]):
    """Dict whose entries are also attributes: `self.hparams.lr`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"There is no hyper-parameter {name!r}. Known hyper-parameters: {', '.join(self) or 'none'}."
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]


def constructor_arguments(frame: FrameType, owner: Any) -> dict[str, Any]:
    """Find the arguments passed to the constructor of `owner`, by walking up the call stack from `frame`.

    If constructors of a class and its base class have an argument of the same name, the value of the derived class is
    returned.
    """
    found: dict[str, Any] = {}
    # From the base class outwards, so that the derived class's value of an argument wins.
    for constructor in _constructor_frames(frame, owner):
        found.update(_arguments_in(constructor))
    return found


def outermost_arguments(frame: FrameType, owner: Any) -> dict[str, Any] | None:
    # A derived class may not pass all its arguments on. None if no base constructor runs, or with `*args`.
    frames = list(_constructor_frames(frame, owner))
    _, varargs, _, values = inspect.getargvalues(frames[-1]) if frames else (None, None, None, {})
    # Positional varargs have no names under which they could be saved.
    if len(frames) < 2 or (varargs and values.get(varargs)):
        return None
    return _arguments_in(frames[-1])


def _arguments_in(frame: FrameType) -> dict[str, Any]:
    names, _, keywords, values = inspect.getargvalues(frame)
    arguments = {name: values[name] for name in names[1:] if name in values}
    if keywords:
        arguments.update(values.get(keywords, {}))
    return arguments


def _constructor_frames(frame: FrameType, owner: Any) -> Iterator[FrameType]:
    current: FrameType | None = frame
    while current is not None:
        # The first local variable of a method is `self`, whatever it is called.
        first = current.f_code.co_varnames[:1]
        is_own = bool(first) and current.f_locals.get(first[0]) is owner
        if is_own and current.f_code.co_name == "__post_init__":  # in a dataclass; the next frame is its `__init__`
            current = current.f_back
            continue
        if not is_own or current.f_code.co_name != "__init__":
            break
        yield current
        current = current.f_back


def select_hyper_parameters(
    names: Sequence[Any], arguments: dict[str, Any], ignore: Sequence[str] | str | None
) -> dict[str, Any]:
    left_out = {ignore} if isinstance(ignore, str) else set(ignore or ())
    if len(names) == 1 and not isinstance(names[0], str):
        given = names[0]
        if isinstance(given, Namespace):
            chosen = dict(vars(given))
        elif isinstance(given, Mapping):
            chosen = dict(given)
        else:
            # `save_hyperparameters(config)` with a plain object: record it under the name of its argument, if it is
            # one, or else record the object's attributes.
            matching = [name for name, value in arguments.items() if value is given]
            chosen = dict.fromkeys(matching[:1], given) or dict(vars(given))
    elif names:
        unknown = [name for name in names if name not in arguments]
        if unknown:
            raise ValueError(
                f"save_hyperparameters({', '.join(map(repr, names))}): the constructor has no arguments {unknown}. It "
                f"has {sorted(arguments)}."
            )
        chosen = {name: arguments[name] for name in names}
    else:
        chosen = dict(arguments)
    return {name: value for name, value in chosen.items() if name not in left_out}


def _is_module(name: str, value: Any) -> bool:
    """Return True if a hyper-parameter is a module, and warn that `save_hyperparameters` leaves it out."""
    if not isinstance(value, nn.Module):
        return False
    logger.warning(
        f"save_hyperparameters() does not save {name!r}, because it is a module, whose weights are saved in "
        f"checkpoints anyway. Use ignore=[{name!r}] to avoid this warning. Pass the module again when you load the "
        f"checkpoint: load_from_checkpoint({name}=...)."
    )
    return True


def hyper_parameters_in(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read hyper-parameters from a YAML file, such as a run's `hparams.yaml`, or from a CSV file."""
    import yaml  # here, because no run needs it

    file = Path(path)
    try:
        if file.suffix == ".csv" and file.is_file():
            # The first row is the header.
            rows = list(csv.reader(file.read_text(encoding="utf-8").splitlines()))[1:]
            return {name: load_yaml(value) for name, value, *_ in rows}
        found = load_yaml(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (OSError, ValueError, csv.Error, yaml.YAMLError) as error:
        raise CheckpointError(f"hparams_file={os.fspath(path)!r} cannot be read: {error}") from error
    if not isinstance(found, Mapping):
        raise CheckpointError(
            f"hparams_file={os.fspath(path)!r} is not a YAML or CSV file with the names and values of hyper-parameters."
        )
    return dict(found)


def arguments_for(kind: type, saved: Mapping[str, Any], name: str | None = None) -> dict[str, Any]:
    """Return the entries of `saved` that the constructor of `kind` accepts, to create an object from a checkpoint.

    If the constructor has an argument called `name`, and no hyper-parameter has this name, all hyper-parameters are
    returned as this one argument. This restores objects that called `save_hyperparameters(config)`.
    """
    parameters = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    takes_all = [each.name for each in parameters.values() if each.kind is inspect.Parameter.VAR_KEYWORD]
    # The constructor takes all hyper-parameters as one argument, such as `hparams`.
    if name is not None and name in parameters and name not in (*saved, *takes_all):
        return {name: HyperParameters(saved)}
    return {each: value for each, value in saved.items() if takes_all or each in parameters}


def create_from_saved(
    kind: type[HoldsHyperParameters],
    saved: Mapping[str, Any],
    name: str | None,
    overrides: Mapping[str, Any],
    instantiate: bool = False,
) -> Any:
    """Create a task or data module of class `kind` from `saved` hyper-parameters, updated with `overrides`.

    `overrides` replace saved values. `name` is the constructor argument that takes all hyper-parameters as one dict, or
    None. Hyper-parameters of a command line may describe objects to create, which requires `instantiate=True`.
    """
    instantiator = saved.get(INSTANTIATOR)
    if instantiator is None:
        return kind.construct_with({**arguments_for(kind, saved, name), **overrides})
    if not str(instantiator).endswith(".cli.instantiate_module"):
        raise CheckpointError(
            f"The {kind.__name__} in this checkpoint was created by {instantiator!r}, which is not called. Only "
            "objects of a TrainerCLI can be created again (drivetrain.trainer.cli.instantiate_module). Pass all "
            "arguments of the constructor yourself, and hparams_file= with a YAML file that contains only {}."
        )
    # The name is compared, never imported. Command lines of other tools store the same entries with another path.
    from drivetrain.trainer.cli.instantiation import recreate  # here, because few runs use a command line

    return recreate(kind, saved, overrides, instantiate)


def without_modules(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not isinstance(value, nn.Module)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_plain(each) for name, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


_KEPT = (dict, OrderedDict, defaultdict, HyperParameters)


def storable(values: Mapping[str, Any], keeps_objects: bool = False) -> dict[str, Any]:
    """Convert hyper-parameters to plain values that a checkpoint can hold, such as numbers, strings and dicts.

    Enums become their names. Dataclasses, namespaces, pydantic models and other mappings become dicts, with a warning.
    With `keeps_objects`, objects in containers stay as they are, for formats that can store them.
    """
    changed: list[str] = []
    found: dict[str, Any] = _storable({**values}, "", changed, keeps_objects)
    if changed:
        logger.warning_once(
            f"These hyper-parameters are loaded from a checkpoint as plain values: {', '.join(changed)}. Convert them "
            "in the constructor, or pass the objects again to load_from_checkpoint."
        )
    return found


def _storable(value: Any, place: str, changed: list[str], keeps_objects: bool) -> Any:
    def inside(item: Any, key: Any) -> Any:
        return _storable(item, f"{place}.{key}" if place else str(key), changed, keeps_objects)

    kind = type(value)
    # Exact types only: a class derived from `dict` would come back as something else.
    if kind in _KEPT:
        keys = {key: key if keeps_objects else _storable(key, place, changed, False) for key in value}
        return {kept: inside(value[key], key) for key, kept in keys.items()}
    if kind in (list, tuple, set, frozenset):
        return kind(inside(item, index) for index, item in enumerate(value))
    if keeps_objects:
        return value
    content = _content_of(value)
    if content is not None:
        changed.append(f"{place} ({kind.__name__})")
        return _storable(content, place, changed, keeps_objects)
    # `bool` first, because it is a subclass of `int`. NumPy's float64 is a float, for example.
    for base in (bool, int, float, str):
        if isinstance(value, base):
            return base(value)
    from drivetrain.checkpoint import packed  # here, because it imports DTensor, which takes a second

    try:
        packed({place: value})
    except CheckpointError:
        name = place.split(".")[0]
        raise CheckpointError(
            f"The hyper-parameter {place!r} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot "
            "store. Allowed are tensors, numbers, strings, and lists, tuples, sets and dicts of them. Leave it out "
            f"with save_hyperparameters(ignore=[{name!r}]), and pass it again when you load: "
            f"load_from_checkpoint({name}=...)."
        ) from None
    return value


def _content_of(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Namespace | SimpleNamespace):
        return dict(vars(value))
    if callable(getattr(value, "model_dump", None)) and not isinstance(value, type):
        return value.model_dump()
    if isinstance(value, Mapping):
        return {key: value[key] for key in value}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | torch.Size):
        return tuple(value) if isinstance(value, tuple) else list(value)
    return None


class HoldsHyperParameters:
    """Base class of `Task` and `DataModule` that records constructor arguments, so that checkpoints contain them.

    `save_hyperparameters` may be called before `super().__init__()`.
    """

    @classmethod
    def construct_with(cls, arguments: Mapping[str, Any]) -> Any:
        """Create the object for `load_from_checkpoint`, by default with `cls(**arguments)`. Can be overridden.

        Args:
            arguments: The saved hyper-parameters that the constructor accepts, and the arguments of
                `load_from_checkpoint`.
        """
        return cls(**arguments)

    def keep_hyper_parameters(self, chosen: Mapping[str, Any]) -> None:
        self.hparams.update({name: value for name, value in chosen.items() if not _is_module(name, value)})

    @property
    def hparams(self) -> HyperParameters:
        """The hyper-parameters that `save_hyperparameters` recorded, as a dict with attribute access."""
        # In `__dict__`, because `nn.Module.__setattr__` fails before `nn.Module.__init__` has run.
        found: HyperParameters = self.__dict__.setdefault("_hparams", HyperParameters())
        return found

    @property
    def hparams_initial(self) -> HyperParameters:
        """A copy of the hyper-parameters as `save_hyperparameters` recorded them, without later changes."""
        return HyperParameters(self.__dict__.get("_hparams_initial", {}))

    @known_keywords
    def save_hyperparameters(self, *args: Any, ignore: Any = None, frame: Any = None, logger: bool = True) -> None:
        """Record the constructor's arguments in `hparams`, for trackers and checkpoints.

        Call it in `__init__`. It may be called before `super().__init__()`, in a dataclass's `__post_init__`, and by a
        class and its base classes. Names that one of them ignores are removed. Modules are left out with a warning.

        Args:
            *args: The names of the arguments to record, all if none is given. Or a single dict, namespace or object of
                values.
            ignore: The names of arguments to leave out.
            frame: The constructor's stack frame. None finds it.
            logger: True to send the hyper-parameters to trackers.
        """
        if frame is None:
            current = inspect.currentframe()
            frame = current and current.f_back and current.f_back.f_back  # skips the wrapper of known_keywords
        given = given_hyper_parameters(self)
        if given is not None:
            arguments = dict(given)
            # Without this entry, the configuration would be read as plain arguments when it is loaded.
            args = (*args, INSTANTIATOR) if args and INSTANTIATOR in given else args
        else:
            arguments = constructor_arguments(frame, self) if frame is not None else {}
            outermost = outermost_arguments(frame, self) if frame is not None else None
            if outermost is not None:
                self.__dict__["_constructor_arguments"] = outermost
        self.keep_hyper_parameters(select_hyper_parameters(args, arguments, ignore))
        # A base class may have recorded an argument that the derived class ignores.
        for name in [ignore] if isinstance(ignore, str) else ignore or ():
            self.hparams.pop(name, None)
            self.__dict__.get("_constructor_arguments", {}).pop(name, None)
        self.__dict__["_log_hyperparams"] = logger
        self.__dict__["_hparams_initial"] = dict(self.hparams)
        if len(args) == 1 and isinstance(args[0], Mapping | Namespace):
            # So that loading can pass the values as this one argument again.
            names = [name for name, value in arguments.items() if value is args[0]]
            self.__dict__["_hparams_name"] = names[0] if names else None


def hyper_parameters_to_save(
    owner: HoldsHyperParameters | None, keeps_objects: bool, without_secrets: Callable[[Any], Any]
) -> dict[str, Any]:
    """Return the checkpoint entries that contain the hyper-parameters of a task or data module.

    Modules are left out, and `without_secrets` removes secrets. The entry `hparams_constructor` is None unless a
    derived class passes other arguments to its base class. Then it lists the derived constructor's argument names, and
    the values that differ from the hyper-parameters of the same names. Plain arguments that are not hyper-parameters
    are included.
    """
    if owner is None:
        return {"hyper_parameters": {}, "hparams_name": None, "hparams_constructor": None}
    hparams, given = owner.hparams, owner.__dict__.get("_constructor_arguments")
    constructor = None
    if given is not None:
        initial = owner.__dict__.get("_hparams_initial", {})
        names = [name for name, value in given.items() if name in hparams or _is_plain(value)]
        # Hyper-parameters that were changed after they were recorded: the new value is in `hparams`.
        changed = [name for name in names if name in initial and hparams.get(name) is not initial[name]]
        same = [name for name in names if name in initial and initial[name] is given[name]]
        other = {name: given[name] for name in names if name not in (*changed, *same)}
        values = without_secrets(storable(without_modules(other), keeps_objects)) if other else {}
        constructor = {"class": type(owner).__qualname__, "names": names, "values": values}
    kept: dict[str, Any] = {}
    if hparams:  # without modules, whose weights are saved anyway
        kept = without_secrets(storable(hparams if keeps_objects else without_modules(hparams), keeps_objects))
    return {
        "hyper_parameters": kept,
        "hparams_name": owner.__dict__.get("_hparams_name"),
        "hparams_constructor": constructor,
    }


# Creation of a task or data module from a checkpoint


def build(
    kind: type[HoldsHyperParameters],
    driver: Mapping[str, Any],
    entry: str,
    hparams_file: str | os.PathLike[str] | None,
    overrides: Mapping[str, Any],
    instantiate: bool = False,
) -> Any:
    # `driver` holds the Trainer's entries of the checkpoint, and `entry` names the one with the hyper-parameters.
    # `overrides` replace saved constructor arguments.
    saved = driver.get(entry, {}) if hparams_file is None else hyper_parameters_in(hparams_file)
    whole = driver.get(entry.replace("hyper_parameters", "hparams_name"), driver.get("hparams_name"))
    constructor = driver.get(entry.replace("hyper_parameters", "hparams_constructor"))
    if constructor and hparams_file is None and constructor["class"] == kind.__qualname__:
        values = {**saved, **constructor["values"]}  # a base may have saved another value under the name of an argument
        given = {name: values[name] for name in constructor["names"] if name in values}
        return create_from_saved(kind, given, None, overrides, instantiate)
    arguments = arguments_for(kind, saved, whole)
    if whole not in arguments or whole in saved:
        return create_from_saved(kind, saved, whole, overrides, instantiate)
    # Overrides that are no arguments of the constructor replace single entries of the dict.
    own = arguments_for(kind, overrides)
    arguments[whole].update({name: value for name, value in overrides.items() if name not in own})
    return create_from_saved(kind, arguments, None, own, instantiate)


# Conversion between a checkpoint and the dict that hooks receive


# name of an entry in checkpoint hooks -> name in the engine's part of the checkpoint
_ENGINE = {
    "optimizer_states": "optimizers",
    "lr_schedulers": "schedulers",
    "precision": "precision",
    "loaders": "loaders",
    "registered": "registered",
    "classes": "classes",
}
ENTRIES = (
    "progress",
    "hyper_parameters",
    "hparams_name",
    "hparams_constructor",
    "datamodule_hyper_parameters",
    "datamodule_hparams_name",
    "datamodule_hparams_constructor",
    "callbacks",
    "trackers",
    "should_stop",
    "stop_askers",
    "datamodule",
    "combined_loader",
    "hooks",
    LOSS_IS_FINITE,
)
"""Names of the entries that a Trainer adds to a checkpoint."""


@contextmanager
def checkpoint_for_hooks(engine: dict[str, Any], number: int, entries: dict[str, Any]) -> Iterator[dict[str, Any]]:
    # `engine` is the part of the checkpoint with weights, of which `number` is the model of the task. `entries` is the
    # part of the Trainer. Changes that hooks make are written back to both parts after the `with` block.
    progress = entries.get("progress", {})
    state: dict[str, Any] = {"epoch": progress.get("epoch", 0), "global_step": progress.get("global_step", 0)}
    if number < len(engine["models"]):
        state["state_dict"] = engine["models"][number]
    state |= {name: engine[place] for name, place in _ENGINE.items() if place in engine}
    state |= {**entries, **entries.get("hooks", {})}
    yield state
    # Hooks may have replaced whole entries, so each one is read back by name.
    if "state_dict" in state:
        engine["models"][number] = state["state_dict"]
    engine.update({place: state[name] for name, place in _ENGINE.items() if name in state})
    known = {"epoch", "global_step", "state_dict", *_ENGINE, *ENTRIES}
    entries.clear()
    entries.update({name: state[name] for name in ENTRIES if name in state})
    # Entries that hooks added go to a place of their own and cannot clash with the Trainer's.
    entries["hooks"] = {name: value for name, value in state.items() if name not in known}


def state_of(kind: type, entries: Mapping[str, Any]) -> Any:
    # A `.ckpt` file stores the state of a data module under the name of its class.
    return entries.get("datamodule") or entries.get("hooks", {}).get(kind.__qualname__)
