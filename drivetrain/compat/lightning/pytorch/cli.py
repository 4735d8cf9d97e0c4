"""`LightningCLI` with Lightning's options, environment variables and configuration files."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_warn
from drivetrain.compat.lightning.fabric.utilities.seed import seed_everything
from drivetrain.compat.lightning.pytorch.class_paths import as_lightning, as_lightning_text
from drivetrain.compat.lightning.pytorch.core import LightningDataModule, LightningModule
from drivetrain.compat.lightning.pytorch.trainer import Trainer
from drivetrain.compat.lightning.pytorch.trainer.arguments import ONLY_HERE, show_all_arguments
from drivetrain.compat.lightning.version import VERSION
from drivetrain.trainer.cli import (
    ArgsType,
    LRSchedulerCallable,
    OptimizerCallable,
    ReduceLROnPlateau,
    SaveConfigCallback,
    TrainerArgumentParser,
    TrainerCLI,
    instantiate_class,
    instantiate_module,
)
from drivetrain.trainer.cli.instantiation import IS_INSTALLED as _JSONARGPARSE_SIGNATURES_AVAILABLE
from drivetrain.trainer.cli.parser import LRSchedulerType, LRSchedulerTypeTuple, LRSchedulerTypeUnion

__all__ = [
    "_JSONARGPARSE_SIGNATURES_AVAILABLE",
    "ArgsType",
    "LRSchedulerCallable",
    "LRSchedulerType",
    "LRSchedulerTypeTuple",
    "LRSchedulerTypeUnion",
    "LightningArgumentParser",
    "LightningCLI",
    "ModuleType",
    "OptimizerCallable",
    "ReduceLROnPlateau",
    "SaveConfigCallback",
    "instantiate_class",
    "instantiate_module",
]

if TYPE_CHECKING:
    from torch.optim import Optimizer

ModuleType = TypeVar("ModuleType")

show_all_arguments(Trainer)


class LightningArgumentParser(TrainerArgumentParser):
    """`drivetrain.TrainerArgumentParser` with Lightning's environment variables and names."""

    def __init__(
        self,
        *args: Any,
        description: str = "Lightning Trainer command line tool",
        env_prefix: str = "PL",
        default_env: bool = False,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("allow_abbrev", True)
        super().__init__(*args, description=description, env_prefix=env_prefix, default_env=default_env, **kwargs)

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        return as_lightning(_without_unset(super().parse_args(*args, **kwargs)))

    def parse_object(self, *args: Any, **kwargs: Any) -> Any:
        return as_lightning(_without_unset(super().parse_object(*args, **kwargs)))

    def dump(self, cfg: Any, *args: Any, **kwargs: Any) -> str:
        return as_lightning_text(super().dump(_without_resume(_without_unset(cfg)), *args, **kwargs))

    def add_lightning_class_args(
        self,
        lightning_class: type | Callable[..., Any],
        nested_key: str,
        subclass_mode: bool = False,
        required: bool = True,
    ) -> list[str]:
        """Add the arguments of a class's constructor. See `add_class_args`."""
        return self.add_class_args(lightning_class, nested_key, subclass_mode, required)


_OF_CALLBACKS = {"EarlyStopping": {"restore_best_weights": False, "start_from_epoch": 0}}
"""By class, the arguments of callbacks that Lightning's do not have, with their defaults."""


def _without_unset(config: Any) -> Any:
    """Return the configuration without unset arguments that only the mirror has."""
    kept = config.clone()
    defaults = inspect.signature(Trainer.__init__).parameters
    for values in (kept, *vars(kept).values()):  # for one subcommand or for all
        options: Any = getattr(values, "trainer", None)
        if not hasattr(options, "pop"):
            continue
        for name in ONLY_HERE:
            if options.get(name) == defaults[name].default:
                options.pop(name, None)
        given = options.get("callbacks")
        for callback in given if isinstance(given, list) else [given]:
            arguments: Any = getattr(callback, "init_args", None)
            kind = str(getattr(callback, "class_path", "")).rpartition(".")[2]
            for name, default in _OF_CALLBACKS.get(kind, {}).items() if arguments is not None else ():
                if arguments.get(name) == default:
                    arguments.pop(name, None)
    return kept


def _without_resume(config: Any) -> Any:
    """Return the configuration without the `resume` argument of `fit` if it is not set."""
    kept = config.clone()
    for values in (kept, *vars(kept).values()):
        if hasattr(getattr(values, "trainer", None), "pop") and values.get("resume") is None:
            values.pop("resume", None)
    return kept


class LightningCLI(TrainerCLI):
    """`drivetrain.TrainerCLI` with the seed arguments and environment variables of Lightning's CLI."""

    base_model = LightningModule
    base_data = LightningDataModule
    instantiator_path: ClassVar[str] = "lightning.pytorch.cli.instantiate_module"

    def __init__(
        self,
        model_class: Any = None,
        datamodule_class: Any = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None,
        trainer_class: Any = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: dict[str, Any] | None = None,
        parser_class: type[LightningArgumentParser] = LightningArgumentParser,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: ArgsType = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        load_from_checkpoint_support: bool = True,
    ) -> None:
        super().__init__(
            model_class,
            datamodule_class,
            save_config_callback,
            save_config_kwargs,
            trainer_class,
            trainer_defaults,
            seed_everything_default,
            parser_kwargs,
            parser_class,
            subclass_mode_model,
            subclass_mode_data,
            args,
            run,
            auto_configure_optimizers,
            load_from_checkpoint_support,
        )

    def version_line(self) -> str:
        return f"lightning.pytorch=={VERSION}"

    @staticmethod
    def configure_optimizers(lightning_module: Any, optimizer: Optimizer, lr_scheduler: Any = None) -> Any:
        """Return the result for `configure_optimizers`. Override it to change the scheduler's configuration."""
        return TrainerCLI.configure_optimizers(lightning_module, optimizer, lr_scheduler)

    def warn(self, message: str) -> None:
        rank_zero_warn(message)

    def seed(self, seed: int | None) -> int:
        return seed_everything(seed, workers=True)
