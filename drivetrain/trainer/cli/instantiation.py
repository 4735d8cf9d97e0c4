"""Making objects of configurations, so that checkpoints can make them again."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.trainer.cli.package import require_jsonargparse
from drivetrain.trainer.given_hyper_parameters import CLASS_PATH, INSTANTIATOR, hyper_parameters_given
from drivetrain.trainer.hyper_parameters import annotations_of

if TYPE_CHECKING:
    from drivetrain.trainer.cli.trainer_cli import TrainerCLI

M = TypeVar("M")


def instantiate_class(args: Any, init: Mapping[str, Any]) -> Any:
    """Make an object of a configuration.

    Args:
        args: The first argument of its constructor, or several as a tuple, that no configuration has.
        init: `class_path`, `init_args` and `dict_kwargs`.

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
    given = args if isinstance(args, tuple) else (args,)
    return kind(*given, **{**init.get("init_args", {}), **init.get("dict_kwargs", {})})


def instantiate_module(class_type: type[M], config: Mapping[str, Any]) -> M:
    """Make a task or a data module again of the hyper-parameters that a command line left in a checkpoint.

    What they name is imported, and made if it is a subclass of what the argument is annotated with: call it with
    files that you trust only.

    Args:
        class_type: The class, or a base of the one that the hyper-parameters name.
        config: The hyper-parameters.

    Raises:
        ConfigurationError: They do not fit the class, or name a class for an argument that has no annotation.
    """
    require_jsonargparse("instantiate_module")
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    arguments = {name: value for name, value in config.items() if name not in (CLASS_PATH, INSTANTIATOR)}
    if CLASS_PATH not in config:
        _refuse_unannotated(class_type, arguments)
    if CLASS_PATH in config:
        parser.add_subclass_arguments(class_type, "module", fail_untyped=False)
        chosen: dict[str, Any] = {"class_path": config[CLASS_PATH], "dict_kwargs": arguments}
    else:
        parser.add_class_arguments(class_type, "module", fail_untyped=False)
        chosen = arguments

    def make(kind: type, *args: Any, **kwargs: Any) -> Any:
        with hyper_parameters_given(kind, config):
            return kind(*args, **kwargs)

    parser.add_instantiator(make, class_type)  # type: ignore[arg-type]  # it makes what it is given
    try:
        parsed = parser.parse_object({"module": chosen})
    except ArgumentError as error:
        raise ConfigurationError(
            f"{class_type.__name__} cannot be made of its hyper-parameters: {error}", code="DT-131"
        ) from None
    made: M = parser.instantiate_classes(parsed).module
    return made


def _refuse_unannotated(kind: type, arguments: Mapping[str, Any], place: str = "") -> None:
    """Refuse a class for an argument that takes anything, which would be called whatever it is."""
    annotations = annotations_of(kind)
    for name, value in arguments.items():
        found = value if isinstance(value, list | tuple) else [value]
        for each in found:
            if not isinstance(each, Mapping) or "class_path" not in each:
                continue
            where = f"{place}.{name}" if place else name
            if annotations.get(name, Any) in (Any, object):
                raise ConfigurationError(
                    f"{where!r} of {kind.__name__} is annotated with no class, so {each['class_path']!r} is not made "
                    "for it. Annotate the argument, or give it by hand.",
                    code="DT-131",
                )
            made = _imported(str(each["class_path"]))
            if isinstance(made, type):
                _refuse_unannotated(made, {**(each.get("init_args") or {}), **(each.get("dict_kwargs") or {})}, where)


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name, None) if module else None


class ModuleInstantiator:
    """Makes the task or the data module of a command line so that its hyper-parameters are its configuration.

    Args:
        cli: The command line.
        key: Where the configuration of the object is.
    """

    def __init__(self, cli: TrainerCLI, key: str) -> None:
        self._cli = cli
        self._key = key

    def __call__(self, class_type: type, *args: Any, applied_instantiation_links: dict[str, Any], **kwargs: Any) -> Any:
        """Make an object; one of another class, such as a task within a task, is made as ever."""
        configured = self._cli.config_dump.get(self._key) or {}
        path = configured.get("class_path")
        if path is not None and path.rpartition(".")[2] != class_type.__name__:
            return class_type(*args, **kwargs)
        values = hyper_parameters_of(configured)
        for target, value in applied_instantiation_links.items():
            key, _, rest = target.partition(".")
            if key == self._key and rest:
                _set_nested(values, rest.removeprefix("init_args.") if path is not None else rest, value)
        values[INSTANTIATOR] = self._cli.instantiator_path
        with hyper_parameters_given(class_type, values):
            return class_type(*args, **kwargs)


def hyper_parameters_of(configured: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters that a configuration means, the same whether or not it names the class.

    Args:
        configured: Arguments by name, or `class_path`, `init_args` and `dict_kwargs`.
    """
    if "class_path" not in configured:
        return dict(configured)
    own = {**(configured.get("init_args") or {}), **(configured.get("dict_kwargs") or {})}
    return {**own, CLASS_PATH: configured["class_path"]}


def configuration_of(values: Mapping[str, Any], subclass_mode: bool) -> dict[str, Any]:
    """The configuration that saved hyper-parameters mean; the reverse of `hyper_parameters_of`.

    Args:
        values: The hyper-parameters.
        subclass_mode: Whether the configuration names the class.
    """
    own = {name: value for name, value in values.items() if name not in (CLASS_PATH, INSTANTIATOR)}
    if subclass_mode and CLASS_PATH in values:
        return {"class_path": values[CLASS_PATH], "init_args": own}
    return own


def _set_nested(values: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a path of keys, and make the dicts on the way."""
    *outer, last = path.split(".")
    for key in outer:
        if not isinstance(values.get(key), dict):
            values[key] = {}
        values = values[key]
    values[last] = value
