"""`TrainerArgumentParser`: command-line options from the signatures of Trainers, tasks, callbacks and optimizers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, Optional, Union, get_type_hints

import torch
import yaml
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from drivetrain import callbacks
from drivetrain.callbacks.base import Callback
from drivetrain.runtime.errors import nearest
from drivetrain.runtime.yaml_text import check_yaml
from drivetrain.strategies import Strategy
from drivetrain.trackers import Tracker
from drivetrain.trainer import profilers
from drivetrain.trainer.cli.instantiation import IS_INSTALLED, require_jsonargparse
from drivetrain.trainer.data_module import DataModule
from drivetrain.trainer.task import Task
from drivetrain.trainer.trainer import Trainer

# Types for arguments of tasks on the command line


if TYPE_CHECKING:
    from jsonargparse import Namespace
else:
    Namespace = Any


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """Torch's `ReduceLROnPlateau` with the name of the metric to monitor.

    Args:
        optimizer: The optimizer.
        monitor: The name of the logged metric.
        *args: Positional arguments of torch's scheduler.
        **kwargs: Keyword arguments of torch's scheduler.
    """

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


# Tasks use these types in annotations, which jsonargparse reads.
LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = Union[LRScheduler, ReduceLROnPlateau]  # noqa: UP007
LRSchedulerType = Union[type[LRScheduler], type[ReduceLROnPlateau]]  # noqa: UP007

ArgsType = Optional[Union[list[str], dict[str, Any], Namespace]]  # noqa: UP007, UP045
"""Type of the argument `args` of `TrainerCLI`."""

OptimizerCallable = Callable[[Iterable], Optimizer]  # type: ignore[type-arg]
"""Type of a task's argument that creates an optimizer from parameters."""

LRSchedulerCallable = Callable[[Optimizer], Union[LRScheduler, ReduceLROnPlateau]]  # noqa: UP007
"""Type of a task's argument that creates a learning-rate scheduler from an optimizer."""


if TYPE_CHECKING or IS_INSTALLED:
    from jsonargparse import ActionConfigFile, ArgumentParser, class_from_function, get_loader, set_loader
else:
    ArgumentParser = object

AUTOMATIC = "AUTOMATIC"
"""Value of `link_to` for optimizers and schedulers that the command line itself passes to the task."""

PARSER_MODE = "drivetrain"
"""Parser mode that reads YAML like jsonargparse, but refuses aliases that expand to too many values."""

_NAMED = (Callback, Tracker, Strategy, Task, DataModule, Optimizer, LRScheduler)
"""Classes whose subclasses an option chooses by name."""

_SHORT = 1000
"""Number of characters up to which a text without aliases cannot be nested too deeply."""

_CLASS = re.compile(r"dot import path string: (\w+)")
_OPTION = re.compile(r"--([\w.]+)")
_KEY = re.compile(r"(?:Group '([\w.]+)' )?does not accept option '([\w.]+)'")


class TrainerArgumentParser(ArgumentParser):
    """jsonargparse parser with options for the constructor arguments of classes.

    Args:
        *args: Arguments of `jsonargparse.ArgumentParser`.
        description: The first text of `--help`.
        env_prefix: The prefix of environment variables.
        default_env: True to read environment variables.
        **kwargs: Arguments of `jsonargparse.ArgumentParser`.

    Attributes:
        callback_keys: The keys of callbacks that every run has.
        optimizers: For each key, the optimizer class or classes, and the target argument.
        lr_schedulers: For each key, the scheduler class or classes, and the target argument.
    """

    def __init__(
        self,
        *args: Any,
        description: str = "Train, validate, test and predict.",
        env_prefix: str = "TRAINER",
        default_env: bool = False,
        **kwargs: Any,
    ) -> None:
        require_jsonargparse(type(self).__name__)
        kwargs.setdefault("parser_mode", PARSER_MODE)
        kwargs.setdefault("allow_abbrev", False)  # an abbreviation that matches by accident would go unnoticed
        super().__init__(*args, description=description, env_prefix=env_prefix, default_env=default_env, **kwargs)
        self.callback_keys: list[str] = []
        self.optimizers: dict[str, tuple[Any, str]] = {}
        self.lr_schedulers: dict[str, tuple[Any, str]] = {}

    def add_config_option(self) -> None:
        """Add the option `--config`, which reads further options from a YAML or JSON file."""
        self.add_argument(
            "-c", "--config", action=ActionConfigFile, help="Path to a configuration file in json or yaml format."
        )

    def add_class_args(
        self, kind: type | Callable[..., Any], nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> list[str]:
        """Add command-line options for the constructor arguments of `kind`, such as a task or callback class.

        A callback added here is part of every run.

        Args:
            kind: The class of a Trainer, task, data module or callback, or a function that returns one.
            nested_key: The prefix of the options' names.
            subclass_mode: True to let an option choose a subclass.
            required: True if a subclass must be chosen.

        Returns:
            The names of the options.
        """
        made = class_of(kind)
        # The command line adds these callbacks to every Trainer that it creates.
        if issubclass(made, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            added = self.add_subclass_arguments(made, nested_key, fail_untyped=False, required=required)
            return list(added or [])
        if not isinstance(kind, type):
            # jsonargparse reads options from classes, so a function is wrapped as one.
            kind = class_from_function(kind, made)
        return self.add_class_arguments(
            kind, nested_key, fail_untyped=False, instantiate=not issubclass(made, Trainer), sub_configs=True
        )

    def add_optimizer_args(
        self,
        optimizer_class: type[Optimizer] | tuple[type[Optimizer], ...] = (Optimizer,),
        nested_key: str = "optimizer",
        link_to: str = AUTOMATIC,
    ) -> None:
        """Add command-line options, prefixed `nested_key`, that choose an optimizer and set its arguments.

        Args:
            optimizer_class: The optimizer class, or a tuple of base classes whose subclasses an option chooses.
            nested_key: The prefix of the options' names.
            link_to: The task's argument that receives the configuration, for `instantiate_class`. By default, the
                optimizer is created for the task's parameters.
        """
        self._add_of_optimizer(optimizer_class, nested_key, "params")
        self.optimizers[nested_key] = (optimizer_class, link_to)

    def add_lr_scheduler_args(
        self,
        lr_scheduler_class: Any = LRSchedulerTypeTuple,
        nested_key: str = "lr_scheduler",
        link_to: str = AUTOMATIC,
    ) -> None:
        """Add options that choose a learning-rate scheduler and set its constructor arguments.

        Args:
            lr_scheduler_class: The scheduler class, or a tuple of base classes whose subclasses an option chooses.
            nested_key: The prefix of the options' names.
            link_to: The task's argument that receives the configuration, for `instantiate_class`. By default, the
                scheduler is created for the optimizer.
        """
        self._add_of_optimizer(lr_scheduler_class, nested_key, "optimizer")
        self.lr_schedulers[nested_key] = (lr_scheduler_class, link_to)

    def _add_of_optimizer(self, kind: Any, key: str, left_out: str) -> None:
        # The parameters or the optimizer come from the task, not from an option.
        options: dict[str, Any] = {"fail_untyped": False, "skip": {left_out}, "instantiate": False}
        if isinstance(kind, tuple):
            self.add_subclass_arguments(kind, key, **options)
            (self.groups or {})[key].title = f"The {key.replace('_', ' ')}, by its class"
        else:
            self.add_class_arguments(kind, key, sub_configs=True, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Exit with an error message. If an option was misspelled, the message suggests the closest one."""
        guess = self._guess(message)
        super().error(f"{message.rstrip()}{'.' if guess else ''}{guess}", ex)

    def print_usage(self, *args: Any, **kwargs: Any) -> None:
        """Print nothing instead of the usage text, whose long list of options would hide the error message."""

    def _guess(self, message: str) -> str:
        classes = _CLASS.search(message)
        if classes is not None:
            return nearest(classes[1], {each.__name__ for kind in _NAMED for each in subclasses(kind)})
        found = _OPTION.search(message) if "nrecognized" in message else _KEY.search(message)
        if found is None:
            return ""
        given = ".".join(each for each in found.groups() if each)
        guess = nearest(given, self._known())
        if not guess and "." not in given:
            # `--max_epochs` without its prefix: suggest `trainer.max_epochs`.
            tails = {each.rpartition(".")[2]: each for each in self._known()}
            guess = f" Did you mean {tails[given]!r}?" if given in tails else nearest(given, tails)
        return guess

    def _known(self) -> list[str]:
        subcommands = self._subcommands_action.choices.values() if self._subcommands_action is not None else ()
        return [
            option.removeprefix("--")
            for parser in (self, *subcommands)
            for option in parser._option_string_actions
            if option.startswith("--")
        ]


def _load(text: str) -> Any:
    # Nested YAML aliases can expand to billions of values, so the text is checked first.
    if "*" in text or len(text) > _SHORT:
        check_yaml(text)
    return get_loader("yaml")(text)


if IS_INSTALLED:
    set_loader(PARSER_MODE, _load, (yaml.YAMLError,))


def load_named_classes() -> None:
    # Exports are loaded on first access. Only imported subclasses can be found by name.
    for room in (callbacks, profilers):
        for name in room.__all__:
            getattr(room, name)


def subclasses(kind: type) -> Iterator[type]:
    """Yield all currently imported subclasses of a class."""
    known: list[type] = kind.__subclasses__()
    for each in known:
        yield each
        yield from subclasses(each)


def class_of(kind: type | Callable[..., Any]) -> type:
    if isinstance(kind, type):
        return kind
    try:
        made = get_type_hints(kind).get("return")
    # An annotation that only a type checker can resolve.
    except NameError:
        made = inspect.signature(kind).return_annotation
    if not isinstance(made, type):
        raise TypeError(f"{kind} needs a return annotation that is a class, such as `-> Task`.")
    return made
