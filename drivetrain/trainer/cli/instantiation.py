"""Creation of objects from configurations, on the command line and from checkpoints."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import importlib
import inspect
import os
import typing
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta
from enum import Enum
from importlib.util import find_spec
from pathlib import PurePath
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.trainer.given_hyper_parameters import CLASS_PATH, INSTANTIATOR, hyper_parameters_given, loaded_subclass

# The optional package jsonargparse


IS_INSTALLED = find_spec("jsonargparse") is not None and find_spec("docstring_parser") is not None
"""True if jsonargparse is installed, with the package that it needs to read signatures."""


def require_jsonargparse(owner: str) -> None:
    """Raise `ConfigurationError` if jsonargparse, which the command line needs, is not installed."""
    if not IS_INSTALLED:
        raise ConfigurationError(
            f'{owner} requires jsonargparse[signatures]. Install it with pip install "drivetrain[cli]".',
        )


def is_of_jsonargparse(error: BaseException) -> bool:
    # An error of code that jsonargparse called, such as a constructor, is not an error of jsonargparse.
    # The innermost frame is the one that raised.
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and str(frame.tb_frame.f_globals.get("__name__", "")).startswith("jsonargparse")


M = TypeVar("M")


def instantiate_class(args: Any, init: Mapping[str, Any]) -> Any:
    """Create the object that the configuration `init` describes, with `args` as its first constructor arguments.

    Args:
        args: The first constructor argument, or a tuple of several, which is not part of the configuration.
        init: A dict with `class_path`, `init_args` and `dict_kwargs`.

    Returns:
        The object.

    Example:
        ```python
        import torch
        from drivetrain.trainer.cli import instantiate_class

        layer = torch.nn.Linear(2, 1)
        init = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
        optimizer = instantiate_class(layer.parameters(), init)
        ```
    """
    module, _, name = init["class_path"].rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    # A generator of parameters is one argument, only a tuple stands for several.
    given = args if isinstance(args, tuple) else (args,)
    return kind(*given, **{**init.get("init_args", {}), **init.get("dict_kwargs", {})})


def instantiate_module(class_type: type[M], config: Mapping[str, Any]) -> M:
    """Create a task or data module from the configuration saved by `TrainerCLI`.

    It imports the classes named in the hyper-parameters. It calls only subclasses of `class_type`, and subclasses of
    the annotated type of the constructor argument that receives them.

    Args:
        class_type: The class, or a base class of the one that the hyper-parameters name.
        config: The hyper-parameters.

    Returns:
        The object.

    Raises:
        ConfigurationError: The hyper-parameters do not fit the class.
        CheckpointError: They name something that is not a subclass of the annotated class.
    """
    return recreate(class_type, config, {}, instantiate=True)


def recreate(class_type: type[M], saved: Mapping[str, Any], given: Mapping[str, Any], instantiate: bool) -> M:
    """Create a task or data module from the hyper-parameters that a `TrainerCLI` saved in a checkpoint.

    `given` are constructor arguments that replace saved ones. Without `instantiate`, saved values that describe objects
    raise `CheckpointError`.
    """
    require_jsonargparse("load_from_checkpoint")
    kind = _chosen_class(class_type, saved.get(CLASS_PATH), instantiate)
    config = {**saved, **given}
    arguments = {name: value for name, value in config.items() if name not in (CLASS_PATH, INSTANTIATOR)}
    types = argument_types(kind)
    if not types.pop("**", None) and (unknown := [name for name in arguments if name not in types]):
        raise ConfigurationError(
            f"{kind.__name__} cannot be created from its hyper-parameters: its constructor has no argument "
            f"{', '.join(unknown)}. It has {', '.join(types) or 'no arguments'}.",
        )
    values = {
        name: _made(types.get(name, Any), value, name, instantiate or name in given)
        for name, value in arguments.items()
    }
    with hyper_parameters_given(kind, config):
        return kind(**values)


def argument_types(kind: type) -> dict[str, Any]:
    """Return the constructor arguments of the class `kind` with their annotations, to create objects from files.

    A missing annotation gives `Any`. An annotation that cannot be resolved gives `Any` too. If the constructor has
    `**kwargs`, the arguments of its base constructor and an entry `**` are included.
    """
    found: dict[str, Any] = {}
    # With `**kwargs`, a constructor passes further arguments to its base class, so that class is read too.
    for base in kind.__mro__:
        init = base.__dict__.get("__init__")
        if init is None or base is object:
            continue
        try:
            hints = typing.get_type_hints(init)
        except (NameError, TypeError, AttributeError):  # annotations that only a type checker can resolve
            hints = {}
        # Without `self`.
        parameters = list(inspect.signature(init).parameters.values())[1:]
        for each in parameters:
            if each.kind is each.VAR_KEYWORD:
                continue
            hint = hints.get(each.name, each.annotation)
            found.setdefault(each.name, Any if hint is each.empty or isinstance(hint, str) else hint)
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            return found
    return {**found, "**": True}


def names_an_object(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "class_path" in value or any(map(names_an_object, value.values()))
    return isinstance(value, list | tuple) and any(map(names_an_object, value))


def is_plain(hint: Any) -> bool:
    """Return True if an annotation allows only plain values, such as numbers and strings."""
    # `None` as an annotation means NoneType.
    if hint is None or get_origin(hint) is Literal:
        return True
    arguments = [each for each in get_args(hint) if each is not Ellipsis]
    if get_origin(hint) is Annotated:
        return is_plain(arguments[0])
    if arguments:
        return _container(hint) is not None and all(map(is_plain, arguments))
    if not isinstance(hint, type):
        return False
    # Exact types only: for a subclass of `str`, the parser would look for a class with the name in the string.
    return hint in _PLAIN or issubclass(hint, Enum | PurePath) or hint.__module__ == "jsonargparse.typing"


_PLAIN = (int, float, bool, str, complex, bytes, type(None), os.PathLike, timedelta, date, datetime)
_UNIONS = (Union, UnionType)


def _container(hint: Any) -> Any:
    origin = get_origin(hint)
    if origin in _UNIONS:
        return Union
    is_container = isinstance(origin, type) and issubclass(origin, list | tuple | set | frozenset | dict | Iterable)
    return origin if is_container else None


def _chosen_class(class_type: type[M], path: Any, instantiate: bool) -> type[M]:
    if path is None:
        return class_type
    if (loaded := loaded_subclass(class_type, str(path))) is not None:
        return loaded
    if not instantiate:
        raise CheckpointError(
            f"The checkpoint names the class {path!r}, which is not imported without your consent. If you trust the "
            "file, use load_from_checkpoint(instantiate=True). Otherwise, import the class and call its own "
            "load_from_checkpoint."
        )
    found: type[M] = _class_at(path, [class_type], "the task")
    return found


def _class_at(path: Any, bases: Sequence[type], name: str) -> Any:
    """Import the class at `path`, which must be a subclass of one of `bases`.

    This guards against foreign checkpoints.
    """
    module, _, last = str(path).rpartition(".")
    try:
        found = getattr(importlib.import_module(module), last)
    except (ImportError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"The checkpoint names {path!r} for {name}, which cannot be imported: {error}. Pass an object instead."
        ) from None
    # Not `issubclass`, which a metaclass of the imported class could override.
    if isinstance(found, type) and any(base in found.__mro__ for base in bases):
        return found
    raise CheckpointError(
        f"The checkpoint names {path!r} for {name}, which is not called, because it is not a subclass of "
        f"{' or '.join(base.__name__ for base in bases)}. Pass an object instead."
    )


def _made(hint: Any, value: Any, name: str, instantiate: bool) -> Any:
    # A checkpoint is data from elsewhere: it must not be able to import and call code unasked.
    if not instantiate and names_an_object(value):
        raise CheckpointError(
            f"The hyper-parameter {name!r} describes an object, {_shortened(value)}, whose class is not imported and "
            "called without your consent. If you trust the file, use load_from_checkpoint(instantiate=True). "
            f"Otherwise, pass the object itself: load_from_checkpoint({name}=...)."
        )
    if value is None:
        return None
    if is_plain(hint):
        return _converted(hint, value, name)
    if isinstance(value, Mapping) and "class_path" in value:
        return _object(hint, value, name)
    if isinstance(value, str):
        return _named(hint, value, name)
    for each in _alternatives(hint):
        fields = _fields(each)
        if fields is not None and isinstance(value, Mapping) and set(value) <= set(fields):
            return each(**{key: _made(fields[key], item, key, instantiate) for key, item in value.items()})
        container, arguments = _container(each), [item for item in get_args(each) if item is not Ellipsis]
        if container is not None and isinstance(value, Mapping) and len(arguments) == 2:
            return {key: _made(arguments[1], item, name, instantiate) for key, item in value.items()}
        if isinstance(value, list | tuple) and container is not None and arguments:
            # `tuple[int, str]` has a type for each item, `list[int]` one for all.
            kinds = arguments if len(arguments) == len(value) else [arguments[0]] * len(value)
            made = [_made(kind, item, name, instantiate) for kind, item in zip(kinds, value, strict=True)]
            # Abstract types such as `Sequence` and `Iterable` get a list.
            return container(made) if container in (list, tuple, set, frozenset) else made
        if isinstance(value, list) and each in (tuple, set, frozenset):
            return each(value)
    if names_an_object(value):
        raise ConfigurationError(
            f"No object can be created from {_shortened(value)} for {name!r}, which is not annotated with a class. "
            f"Annotate the argument, or pass the object itself: load_from_checkpoint({name}=...).",
        )
    return value


def _converted(hint: Any, value: Any, name: str) -> Any:
    from jsonargparse import ArgumentError, ArgumentParser

    # jsonargparse converts as it does on the command line, so that both give equal values.
    parser = ArgumentParser(exit_on_error=False, default_env=False)
    parser.add_argument("--value", type=hint)
    try:
        return parser.parse_object({"value": value}).value
    except ArgumentError as error:
        raise ConfigurationError(f"The hyper-parameter {name!r} has the wrong type: {error}") from None


def _object(hint: Any, value: Mapping[str, Any], name: str) -> Any:
    plain, makers = _classes(hint)
    if not plain and not makers:
        raise ConfigurationError(
            f"{value['class_path']!r} is not created for {name!r}, which is not annotated with a class. Annotate the "
            f"argument, or pass the object itself: load_from_checkpoint({name}=...).",
        )
    kind = _class_at(value["class_path"], [*plain, *makers], name)
    types = argument_types(kind)
    given = {**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})}
    arguments = {key: _made(types.get(key, Any), item, key, True) for key, item in given.items()}
    # `Callable[..., Optimizer]` receives a factory, `Optimizer` the object.
    is_made = any(base in kind.__mro__ for base in plain)
    return kind(**arguments) if is_made else functools.partial(kind, **arguments)


def _named(hint: Any, value: str, name: str) -> Any:
    # A string may be the name of an object to import, so it is passed on only if the annotation allows text.
    takes_text = any(each in (Any, object, str) for each in _alternatives(hint))
    if takes_text or not _classes(hint, names_only=True)[0]:
        return value
    raise CheckpointError(
        f"The hyper-parameter {name!r} is {value!r}, the name of an object, which is not imported. Pass the object "
        f"itself: load_from_checkpoint({name}=...)."
    )


def _alternatives(hint: Any) -> list[Any]:
    if get_origin(hint) is Annotated:
        return _alternatives(get_args(hint)[0])
    if get_origin(hint) in _UNIONS:
        return [found for each in get_args(hint) for found in _alternatives(each)]
    return [hint]


def _classes(hint: Any, names_only: bool = False) -> tuple[list[type], list[type]]:
    # `A | Callable[..., B]` gives `[A], [B]`. With `names_only`, the first list contains all types that are not plain
    # values, such as callables and types.
    plain: list[Any] = []
    makers: list[Any] = []
    for each in _alternatives(hint):
        if get_origin(each) is collections.abc.Callable:
            # The last argument of `Callable[[...], X]` is the return type.
            makers += [found for found in _alternatives(get_args(each)[-1]) if _is_own_class(found)]
            plain += [each] if names_only else []
        elif _is_own_class(each) or (names_only and (get_origin(each) or each) in (collections.abc.Callable, type)):
            plain.append(each)
    return plain, makers


def _is_own_class(hint: Any) -> bool:
    return isinstance(hint, type) and hint.__module__ not in ("builtins", "typing", "collections.abc")


def _fields(hint: Any) -> dict[str, Any] | None:
    # None if the type is no dataclass, pydantic or attrs class.
    if not isinstance(hint, type):
        return None
    is_one = dataclasses.is_dataclass(hint) or hasattr(hint, "model_fields") or hasattr(hint, "__attrs_attrs__")
    return typing.get_type_hints(hint) if is_one else None


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def hyper_parameters_of(configured: Mapping[str, Any]) -> dict[str, Any]:
    if "class_path" not in configured:
        return dict(configured)
    own = {**(configured.get("init_args") or {}), **(configured.get("dict_kwargs") or {})}
    return {**own, CLASS_PATH: configured["class_path"]}


def configuration_of(
    saved: Mapping[str, Any], configured: Mapping[str, Any], kind: type, subclass_mode: bool
) -> dict[str, Any]:
    # Values of a checkpoint must not make the command line import a class that the user has not named.
    own = {name: value for name, value in saved.items() if name not in (CLASS_PATH, INSTANTIATOR)}
    path = saved.get(CLASS_PATH)
    here = hyper_parameters_of(configured)
    if subclass_mode and path is not None:
        named = loaded_subclass(kind, path)
        if named is None and path == here.get(CLASS_PATH):
            named = _class_at(path, [object], "model")
        if named is None:
            raise CheckpointError(
                f"The checkpoint names the class {path!r}, which is not imported without your consent. If you trust "
                f"it, choose it with --model={path}, or with --config and the file of the run that saved the "
                "checkpoint."
            )
        kind = named
    types = argument_types(kind)
    changed = {name: value for name, value in own.items() if name not in here or value != here[name]}
    for name, value in changed.items():
        if not is_plain(types.get(name, Any)) and not _is_harmless(value, types.get(name, Any)):
            raise CheckpointError(
                f"The hyper-parameter {name!r} in the checkpoint may name an object, {_shortened(value)}, which is not "
                f"imported without your consent. If you trust it, set it with --model.{name}, or with --config and the "
                "file of the run that saved the checkpoint."
            )
    if not changed:
        return {}
    # Without subclass mode, the options of the class have no class path around them.
    return {"class_path": path, "init_args": changed} if subclass_mode and path is not None else changed


def _is_harmless(value: Any, hint: Any) -> bool:
    # True if jsonargparse parses the value without importing a class, and returns it unchanged.
    if value is None or isinstance(value, bool | int | float):
        return True
    if isinstance(value, str):
        # These characters begin or build YAML structures.
        return not set("{[:?&*!|>") & set(value) and all(each in (Any, object, str) for each in _alternatives(hint))
    if isinstance(value, list | tuple):
        return all(_is_harmless(each, Any) for each in value) and not _classes(hint, names_only=True)[0]
    return False
