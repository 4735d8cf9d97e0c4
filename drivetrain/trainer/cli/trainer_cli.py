"""`TrainerCLI`: a training script's command line, derived from the signatures of its task, data module and Trainer."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

import yaml

from drivetrain.callbacks.base import Callback
from drivetrain.runtime import observer
from drivetrain.runtime.collectives import broadcast_object_list
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, DrivetrainError
from drivetrain.runtime.exports import package_version
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.seeds import recorded_seed, set_seed
from drivetrain.trainer.cli.instantiation import (
    configuration_of,
    hyper_parameters_of,
    instantiate_class,
    is_of_jsonargparse,
    require_jsonargparse,
)
from drivetrain.trainer.cli.parser import (
    AUTOMATIC,
    ArgsType,
    LRSchedulerTypeTuple,
    ReduceLROnPlateau,
    TrainerArgumentParser,
    class_of,
    load_named_classes,
)
from drivetrain.trainer.data_module import DataModule
from drivetrain.trainer.given_hyper_parameters import INSTANTIATOR, hyper_parameters_given
from drivetrain.trainer.task import Task
from drivetrain.trainer.trainer import Trainer

if TYPE_CHECKING:
    from jsonargparse import Namespace
    from torch.optim import Optimizer


# Optimizers from the command line, which replace a task's `configure_optimizers`


def with_class_path(kind: type) -> Callable[[Any], dict[str, Any]]:
    def add_class_path(init_args: Any) -> dict[str, Any]:
        return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": _plain(init_args)}

    return add_class_path


@dataclass(frozen=True)
class ConfiguredOptimizers:
    optimizer: Mapping[str, Any]
    lr_scheduler: Mapping[str, Any] | None
    arrange: Callable[..., Any]

    def __call__(self, task: Task) -> Any:
        """Create the optimizer and scheduler for the task's current parameters."""
        optimizer = instantiate_class(task.parameters(), self.optimizer)
        if self.lr_scheduler is None:
            return self.arrange(task, optimizer=optimizer, lr_scheduler=None)
        return self.arrange(task, optimizer=optimizer, lr_scheduler=instantiate_class(optimizer, self.lr_scheduler))


def chosen_configuration(
    added: Mapping[str, tuple[Any, str]], config: Mapping[str, Any], what: str
) -> dict[str, Any] | None:
    automatic = {key: kind for key, (kind, link_to) in added.items() if link_to == AUTOMATIC}
    if len(automatic) > 1:
        raise ConfigurationError(
            f"Several keys configure an {what} for the task: {', '.join(automatic)}. Only one {what} can be set "
            f'automatically. Use link_to="model.{next(iter(automatic))}" for the others, and create them in '
            "configure_optimizers with instantiate_class.",
        )
    for key, kind in automatic.items():
        init = config.get(key)
        if init is not None:
            return _plain(init) if isinstance(kind, tuple) else with_class_path(kind)(init)
    return None


def _plain(init: Any) -> dict[str, Any]:
    values: dict[str, Any] = init.as_dict() if hasattr(init, "as_dict") else dict(init)
    return values


# `SaveConfigCallback`, which saves the configuration of a run


class ConfigExistsError(DrivetrainError, RuntimeError):
    """Raised if a run would overwrite the configuration file of another run."""


class SaveConfigCallback(Callback):
    """Callback that saves the configuration of a run at its start.

    `fit --config FILE` repeats the run. `TrainerCLI` adds it. One process writes the file, and it appears only after it
    is complete.

    Args:
        parser: The parser that parsed the configuration.
        config: The configuration.
        config_filename: The name of the file.
        overwrite: True to replace an existing file.
        multifile: True to write configurations that were read from separate files to separate files again.
        save_to_log_dir: True to write to the first tracker's directory. False to only call `save_config`.

    Raises:
        ConfigurationError: The callback would do nothing.
        ConfigExistsError: The file already exists. Raised when the run begins.

    Example:
        ```python
        from drivetrain.trainer.cli import SaveConfigCallback

        class LogConfig(SaveConfigCallback):
            def save_config(self, trainer, task, stage):
                trainer.logger.log_hyperparams({"config": self.parser.dump(self.config, skip_none=False)})
        ```
    """

    def __init__(
        self,
        parser: TrainerArgumentParser,
        config: Any,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        self.parser = parser
        self.config = config
        self.config_filename = config_filename
        self.overwrite = overwrite
        self.multifile = multifile
        self.save_to_log_dir = save_to_log_dir
        self.already_saved = False
        if not save_to_log_dir and type(self).save_config is SaveConfigCallback.save_config:
            raise ConfigurationError(
                "`save_to_log_dir=False` only makes sense for a subclass of SaveConfigCallback that overrides "
                "save_config, because otherwise nothing is saved.",
            )

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        if self.already_saved:
            return
        if self.save_to_log_dir:
            self._save(trainer)
        if trainer.is_global_zero:
            self.save_config(trainer, task, stage)
        self.already_saved = True

    def save_config(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Override this method to save the command line's configuration elsewhere, such as in an experiment tracker.

        It is called in one process only, so it must not use collectives.

        Args:
            trainer: The running Trainer.
            task: The task that the Trainer runs.
            stage: `"fit"`, `"validate"`, `"test"` or `"predict"`.
        """

    def _save(self, trainer: Trainer) -> None:
        path = Path(trainer.local_dir, self.config_filename)
        # Only rank 0 looks: other ranks might look after it has written the file.
        refused = [trainer.is_global_zero and not self.overwrite and path.is_file()]
        if broadcast_object_list(refused)[0]:
            raise ConfigExistsError(
                f"{type(self).__name__} expected {path} not to exist. Aborting to avoid overwriting the configuration "
                "of another run. Remove the file, choose another --trainer.default_root_dir, or use a logger with a "
                'directory for each run. To replace the file, use save_config_kwargs={"overwrite": True}. To save no '
                "file, use save_config_callback=None."
            )
        if trainer.is_global_zero:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write(path)

    def _write(self, path: Path) -> None:
        if self.multifile:
            self.parser.save(self.config, path, skip_none=False, overwrite=self.overwrite, multifile=True)
            return
        # Written under another name and then renamed, so that no reader sees half a file.
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(self.parser.dump(self.config, skip_none=False), encoding="utf-8")
        os.replace(beside, path)


logger = get_logger(__name__)


class ModuleInstantiator:
    def __init__(self, cli: TrainerCLI, key: str) -> None:
        self._cli = cli
        self._key = key

    def __call__(self, class_type: type, *args: Any, applied_instantiation_links: dict[str, Any], **kwargs: Any) -> Any:
        """Create a task or data module for the parser, and record its configuration in `hparams`."""
        configured = self._cli.config_dump.get(self._key) or {}
        path = configured.get("class_path")
        # jsonargparse calls this for subclasses in nested options too.
        if path is not None and path.rpartition(".")[2] != class_type.__name__:
            return class_type(*args, **kwargs)
        values = hyper_parameters_of(configured)
        # Linked values are known only now, so the parsed configuration lacks them.
        for target, value in applied_instantiation_links.items():
            key, _, rest = target.partition(".")
            if key == self._key and rest:
                _set_nested(values, rest.removeprefix("init_args.") if path is not None else rest, value)
        values[INSTANTIATOR] = self._cli.instantiator_path
        with hyper_parameters_given(class_type, values):
            return class_type(*args, **kwargs)


def _set_nested(values: dict[str, Any], path: str, value: Any) -> None:
    *outer, last = path.split(".")
    for key in outer:
        if not isinstance(values.get(key), dict):
            values[key] = {}
        values = values[key]
    values[last] = value


class TrainerCLI:
    """Command line with the subcommands `fit`, `validate`, `test` and `predict`.

    The constructor parses the command line, creates task, data module and Trainer, and runs the subcommand. Options
    come from the signatures of the classes: `--trainer.max_epochs`, `--model.lr`, `--data.batch_size`. Files given by
    `--config` set them too. Later files and options win. `--print_config` prints all options as such a file. Requires
    `pip install "drivetrain[cli]"`.

    Args:
        model_class: The task's class, or a function that returns a task. If None, `--model` chooses a subclass of
            `Task`.
        datamodule_class: The data module's class, or a function that returns one. If None, `--data` may choose one.
        save_config_callback: The callback class that saves the configuration of each run, or None.
        save_config_kwargs: Its arguments: `config_filename`, `overwrite`, `multifile`, `save_to_log_dir`.
        trainer_class: The Trainer's class, or a function that returns a Trainer.
        trainer_defaults: Defaults for the Trainer's arguments. Its `callbacks` are part of every run.
        seed_everything_default: The default seed. True uses a seed that was set before, or else 0. False seeds nothing.
        parser_kwargs: Arguments of the parser, such as `{"default_env": True}` to read environment variables
            (`TRAINER_FIT__MODEL__LR`), or dicts of arguments by subcommand.
        parser_class: The parser's class.
        subclass_mode_model: True if `--model` chooses a subclass of `model_class`.
        subclass_mode_data: True if `--data` chooses a subclass of `datamodule_class`.
        args: A list of arguments, or a dict of values, to parse instead of the command line.
        run: True to have subcommands and run one. False to only create task and Trainer.
        auto_configure_optimizers: True to add `--optimizer` and `--lr_scheduler`, which replace the task's
            `configure_optimizers`.
        load_from_checkpoint_support: True if `save_hyperparameters` records the configuration instead of objects, so
            that `load_from_checkpoint` needs no arguments.

    Attributes:
        parser: The parser.
        config: The parsed configuration.
        config_init: The configuration with objects created from it.
        subcommand: The subcommand, or None with `run=False`.
        model: The task.
        datamodule: The data module, or None.
        trainer: The Trainer.

    Raises:
        ConfigurationError: The package jsonargparse is not installed.
        SystemExit: The command line is invalid, which is printed, or asks for help.

    Example:
        ```python
        import torch
        from drivetrain import Task, TrainerCLI

        class Line(Task):
            def __init__(self, lr: float = 0.1):
                super().__init__()
                self.layer, self.lr = torch.nn.Linear(1, 1), lr

            def training_step(self, batch, batch_idx):
                return self.layer(batch).square().mean()

            def train_dataloader(self):
                return torch.utils.data.DataLoader(torch.ones(8, 1))

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=self.lr)

        if __name__ == "__main__":
            TrainerCLI(Line, args=["fit", "--trainer.max_epochs", "1", "--model.lr", "0.01"])
        ```
    """

    base_model: ClassVar[type[Task]] = Task
    base_data: ClassVar[type[DataModule]] = DataModule
    instantiator_path: ClassVar[str] = "drivetrain.trainer.cli.instantiate_module"
    """Import path of the function that creates a task from recorded hyper-parameters."""

    def __init__(
        self,
        model_class: type[Task] | Callable[..., Task] | None = None,
        datamodule_class: type[DataModule] | Callable[..., DataModule] | None = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None,
        trainer_class: type[Trainer] | Callable[..., Trainer] = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: dict[str, Any] | None = None,
        parser_class: type[TrainerArgumentParser] = TrainerArgumentParser,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: ArgsType = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        load_from_checkpoint_support: bool = True,
    ) -> None:
        require_jsonargparse(type(self).__name__)
        self.model_class = model_class
        self.datamodule_class = datamodule_class
        self.save_config_callback = save_config_callback
        self.save_config_kwargs = save_config_kwargs or {}
        self.trainer_class = trainer_class
        self.trainer_defaults = trainer_defaults or {}
        self.seed_everything_default = seed_everything_default
        self.parser_kwargs = parser_kwargs or {}
        self.parser_class = parser_class
        self.subclass_mode_model = model_class is None or subclass_mode_model
        self.subclass_mode_data = datamodule_class is None or subclass_mode_data
        self.auto_configure_optimizers = auto_configure_optimizers
        self.config_dump: dict[str, Any] = {}
        self._subparsers: dict[str, TrainerArgumentParser] = {}
        self._method_arguments: dict[str, list[str]] = {}

        names = self.subcommands()
        main_kwargs = {name: value for name, value in self.parser_kwargs.items() if name not in names}
        subparser_kwargs = {name: value for name, value in self.parser_kwargs.items() if name in names}
        self.setup_parser(run, main_kwargs, subparser_kwargs)
        self.parse_arguments(self.parser, args)
        self.subcommand: str | None = self.config["subcommand"] if run else None
        self._take_checkpoint_hyper_parameters()
        self._seed()
        if load_from_checkpoint_support:
            self._add_instantiators()
        self.before_instantiate_classes()
        self.instantiate_classes()
        self.after_instantiate_classes()
        if self.subcommand is not None:
            self._run_subcommand(self.subcommand)

    # the parser

    def init_parser(self, **kwargs: Any) -> TrainerArgumentParser:
        """Create a parser with the option `--config`, for the main command or a subcommand.

        Args:
            **kwargs: The parser's arguments.
        """
        # The version shows which release wrote a saved configuration.
        kwargs.setdefault("dump_header", [self.version_line()])
        parser = self.parser_class(**kwargs)
        parser.add_config_option()
        return parser

    def version_line(self) -> str:
        """Return the first line of a saved configuration: a comment with the package's version."""
        return f"drivetrain=={package_version()}"

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Create the main parser and the parsers of the subcommands, with all options.

        Args:
            add_subcommands: True to add subcommands.
            main_kwargs: Arguments of the main parser.
            subparser_kwargs: Arguments of subcommands' parsers, by name.
        """
        load_named_classes()
        self.parser = self.init_parser(**main_kwargs)
        if not add_subcommands:
            self._add_arguments(self.parser)
            return
        commands = self.parser.add_subcommands()
        trainer_type = class_of(self.trainer_class)
        for name in self.subcommands():
            if not hasattr(trainer_type, name):
                raise TypeError(f"{trainer_type.__name__} has no method for the subcommand {name!r}.")
            parser = self._make_subparser(trainer_type, name, **subparser_kwargs.get(name, {}))
            commands.add_subcommand(name, parser, help=_first_line(getattr(trainer_type, name)))

    def _make_subparser(self, trainer_type: type, name: str, **kwargs: Any) -> TrainerArgumentParser:
        kwargs.setdefault("description", _first_line(getattr(trainer_type, name)))
        parser = self.init_parser(**kwargs)
        self._add_arguments(parser)
        # Without the task and the loaders, which the command line passes itself.
        added = parser.add_method_arguments(trainer_type, name, skip=set(self.subcommands()[name]))
        self._method_arguments[name] = added
        self._subparsers[name] = parser
        return parser

    def add_default_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
        """Add the option `--seed_everything` to a parser.

        Args:
            parser: The parser of a subcommand, or the main parser without subcommands.
        """
        parser.add_argument(
            "--seed_everything",
            type=bool | int,
            default=self.seed_everything_default,
            help="Seed of all random generators: a number, true for the default seed, or false for no seed.",
        )

    def add_core_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
        """Add the command-line options of the Trainer, the task and the data module to a parser.

        Args:
            parser: The parser of a subcommand, or the main parser without subcommands.
        """
        parser.add_class_args(self.trainer_class, "trainer")
        defaults = {f"trainer.{name}": value for name, value in self.trainer_defaults.items() if name != "callbacks"}
        parser.set_defaults(defaults)
        parser.add_class_args(self.model_class or self.base_model, "model", self.subclass_mode_model)
        required = self.datamodule_class is not None
        parser.add_class_args(self.datamodule_class or self.base_data, "data", self.subclass_mode_data, required)

    def add_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
        """Override this method to add command-line options, link arguments, or change defaults.

        Args:
            parser: The parser of a subcommand, or the main parser without subcommands.
        """

    def _add_arguments(self, parser: TrainerArgumentParser) -> None:
        self.add_default_arguments_to_parser(parser)
        self.add_core_arguments_to_parser(parser)
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers:
            if not parser.optimizers:
                parser.add_optimizer_args()
            if not parser.lr_schedulers:
                parser.add_lr_scheduler_args(LRSchedulerTypeTuple)
        self.link_optimizers_and_lr_schedulers(parser)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the subcommands, each with the arguments of its Trainer method that get no command-line option."""
        return {
            "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"},
            "validate": {"model", "dataloaders", "datamodule"},
            "test": {"model", "dataloaders", "datamodule"},
            "predict": {"model", "dataloaders", "datamodule"},
        }

    @staticmethod
    def link_optimizers_and_lr_schedulers(parser: TrainerArgumentParser) -> None:
        """Link the optimizer and scheduler options to the task arguments named in `add_optimizer_args(link_to=...)`.

        Args:
            parser: The parser of a subcommand, or the main parser without subcommands.
        """
        for key, (kind, link_to) in {**parser.optimizers, **parser.lr_schedulers}.items():
            if link_to == AUTOMATIC:
                continue
            if isinstance(kind, tuple):
                parser.link_arguments(key, link_to)
            else:
                parser.link_arguments(key, link_to, compute_fn=with_class_path(kind))

    def parse_arguments(self, parser: TrainerArgumentParser, args: ArgsType) -> None:
        """Parse the command line, or `args` if given, and store the result in `self.config`.

        Args:
            parser: The parser.
            args: A list of arguments, a dict or a namespace. None parses the command line.
        """
        if args is not None and len(sys.argv) > 1:
            self.warn(
                f"{type(self).__name__} parses its args parameter instead of the command line, so the options on the "
                f"command line are ignored: {sys.argv[1:]}."
            )
        if args is None or isinstance(args, list | tuple):
            self.config = parser.parse_args(args if observer.current is None else observer.current.command_line(args))
        else:
            self.config = parser.parse_object(args)

    def _own_parser(self) -> TrainerArgumentParser:
        return self.parser if self.subcommand is None else self._subparsers[self.subcommand]

    def _own(self, config: Namespace) -> Namespace:
        own: Namespace = config if self.subcommand is None else config[self.subcommand]
        return own

    def warn(self, message: str) -> None:
        """Log a warning about the command line. Override it to show warnings differently.

        Args:
            message: The text of the warning.
        """
        logger.warning(message)

    def _refuse(self, error: Exception) -> NoReturn:
        self._own_parser().error(str(error), error)

    # the parsed configuration

    def _take_checkpoint_hyper_parameters(self) -> None:
        """Set the task's options to the hyper-parameters in the checkpoint given by `--ckpt_path`."""
        path = self._own(self.config).get("ckpt_path")
        # `"best"`, `"last"` and URLs are resolved later, by the Trainer.
        if not path or not Path(path).exists():
            return
        parser, own = self._own_parser(), self._own(self.config)
        configured = yaml.safe_load(parser.dump(own, skip_link_targets=False, skip_none=False)).get("model") or {}
        kind = class_of(self.model_class or self.base_model)
        try:
            saved = self.base_model.saved_hyper_parameters(path)
            # May raise: values that could import code are not taken from a checkpoint.
            values = {"model": configuration_of(saved, configured, kind, self.subclass_mode_model)}
        except CheckpointError as error:
            self._refuse(error)
        if not values["model"]:
            return
        try:
            given = values if self.subcommand is None else {self.subcommand: values}
            self.config = self.parser.parse_object(given, self.config)
        except SystemExit:
            sys.stderr.write(
                f"Parsing of ckpt_path hyperparameters failed: {path} has other hyper-parameters than the model.\n"
            )
            raise

    def _seed(self) -> None:
        config = self._own(self.config)
        # False means no seeding, and 0 is a valid seed.
        given = config["seed_everything"]
        if given is not False:
            config["seed_everything"] = self.seed(None if given is True else given)

    def seed(self, seed: int | None) -> int:
        """Seed the random generators of Python, NumPy and PyTorch.

        Args:
            seed: The seed. None uses one that was set before, or else 0.

        Returns:
            The seed.
        """
        chosen = (recorded_seed() or 0) if seed is None else seed
        try:
            set_seed(chosen)
        except DrivetrainError as error:
            self._refuse(error)
        return chosen

    def _add_instantiators(self) -> None:
        parser, config = self._own_parser(), self._own(self.config)
        self.config_dump = yaml.safe_load(parser.dump(config, skip_link_targets=False, skip_none=False))
        for kind, key, chosen in (
            (self.model_class or self.base_model, "model", self.subclass_mode_model),
            (self.datamodule_class or self.base_data, "data", self.subclass_mode_data),
        ):
            self.parser.add_instantiator(ModuleInstantiator(self, key), class_of(kind), subclasses=chosen)

    # creation of the objects

    def before_instantiate_classes(self) -> None:
        """Override this method to change `self.config` after the command line is parsed."""

    def instantiate_classes(self) -> None:
        """Create the data module, the task and the Trainer from the parsed options."""
        try:
            self.config_init = self.parser.instantiate_classes(self.config)
            own = self._own(self.config_init)
            self.datamodule: Any = own.get("data")
            self.model: Any = own.get("model")
            self._configure_optimizers()
            self.trainer = self.instantiate_trainer()
        except DrivetrainError as error:
            self._refuse(error)
        except (TypeError, ValueError) as error:
            if is_of_jsonargparse(error):  # one error for all member types of a union
                self._refuse(error)
            raise

    def after_instantiate_classes(self) -> None:
        """Override this method to run code after the task, data module and Trainer are created."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Return a new Trainer with the parsed options and configured callbacks.

        Args:
            **kwargs: Arguments that replace configured ones.
        """
        own = self._own(self.config_init)
        configured = own.get("trainer")
        config = {**(configured.as_dict() if configured is not None else {}), **kwargs}
        return self._instantiate_trainer(config, [own[key] for key in self._own_parser().callback_keys])

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        # Callbacks of `trainer_defaults` may be configurations, which parsing has not turned into objects.
        always = self.trainer_defaults.get("callbacks")
        every = [*_listed(config.get("callbacks")), *callbacks, *map(_made, _listed(always))]
        # A `fast_dev_run` writes no files.
        if self.save_config_callback is not None and not config.get("fast_dev_run"):
            parser, parsed = self._own_parser(), self._own(self.config)
            every.append(self.save_config_callback(parser, parsed, **self.save_config_kwargs))
        if "callbacks" in config:
            config["callbacks"] = every
        elif every:
            name = getattr(self.trainer_class, "__name__", self.trainer_class)
            self.warn(
                f"The `{name}` class does not expose the `callbacks` argument, so these are ignored: "
                f"{', '.join(type(each).__name__ for each in every)}."
            )
        return self.trainer_class(**config)

    @staticmethod
    def configure_optimizers(task: Task, optimizer: Optimizer, lr_scheduler: Any = None) -> Any:
        """Return the chosen optimizer and scheduler as a value that `Task.configure_optimizers` may return.

        Override it to change how a scheduler is used.

        Args:
            task: The task.
            optimizer: The chosen optimizer.
            lr_scheduler: The chosen learning-rate scheduler, or None.
        """
        if lr_scheduler is None:
            return optimizer
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            watching = {"scheduler": lr_scheduler, "monitor": lr_scheduler.monitor}
            return {"optimizer": optimizer, "lr_scheduler": watching}
        return [optimizer], [lr_scheduler]

    def _configure_optimizers(self) -> None:
        parser, config = self._own_parser(), cast("Mapping[str, Any]", self._own(self.config))
        optimizer = chosen_configuration(parser.optimizers, config, "optimizer")
        lr_scheduler = chosen_configuration(parser.lr_schedulers, config, "lr_scheduler")
        if optimizer is not None:
            made = ConfiguredOptimizers(optimizer, lr_scheduler, self.configure_optimizers)
            # An overridden method may be the better choice for the task, so the user must know.
            if type(self.model).configure_optimizers is not Task.configure_optimizers:
                self.warn(
                    f"`{type(self.model).__name__}.configure_optimizers` will be overridden by "
                    f"`{type(self).__name__}.configure_optimizers`: an optimizer was given on the command line or in a "
                    "configuration."
                )
            self.model.configure_optimizers = MethodType(made, self.model)

    # running

    def _run_subcommand(self, name: str) -> None:
        before, after = getattr(self, f"before_{name}", None), getattr(self, f"after_{name}", None)
        # A subclass may define the subcommand itself.
        run = getattr(self, name, None) or getattr(self.trainer, name)
        if callable(before):
            before()
        config = self.config_init[name]
        given = {key: config[key] for key in self._method_arguments[name]}
        if self.datamodule is not None:
            given["datamodule"] = self.datamodule
        try:
            run(model=self.model, **given)
        except CheckpointError as error:
            path = given.get("ckpt_path")
            # A mistyped path is an error of the command line; other errors need their traceback.
            if path and "://" not in str(path) and not Path(path).exists():
                self._refuse(error)
            raise
        if callable(after):
            after()


def _first_line(component: Any) -> str:
    text = (component.__doc__ or "").strip()
    return text.partition("\n")[0].strip()


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def _made(callback: Any) -> Any:
    return instantiate_class((), callback) if isinstance(callback, Mapping) else callback
