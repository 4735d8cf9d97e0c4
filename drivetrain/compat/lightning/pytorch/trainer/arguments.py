"""Constructor arguments of Lightning's `Trainer`: hardware, plugins and callbacks."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from importlib.util import find_spec
from typing import Any, get_type_hints

from drivetrain.callbacks import Callback, ModelSummary, RichModelSummary
from drivetrain.callbacks import ModelCheckpoint as CoreModelCheckpoint
from drivetrain.callbacks import TQDMProgressBar as CoreProgressBar
from drivetrain.callbacks.model_summary import ModuleTable
from drivetrain.callbacks.rich_progress_bar import require_rich
from drivetrain.compat.lightning.accelerators import (
    Accelerator,
    CPUAccelerator,
    CUDAAccelerator,
    MPSAccelerator,
    XLAAccelerator,
)
from drivetrain.compat.lightning.checkpoint_io import CheckpointIO
from drivetrain.compat.lightning.fabric.plugins.environments import ClusterEnvironment
from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.compat.lightning.fabric.utilities.registry import made_by_entry_points
from drivetrain.compat.lightning.plugins import Precision, TorchSyncBatchNorm
from drivetrain.compat.lightning.pytorch.callbacks.model_checkpoint import ModelCheckpoint
from drivetrain.compat.lightning.pytorch.callbacks.progress.tqdm_progress import TQDMProgressBar
from drivetrain.compat.lightning.pytorch.profilers import Profiler
from drivetrain.compat.lightning.reasons import PLUGIN
from drivetrain.compat.lightning.registry import STRATEGIES
from drivetrain.compat.lightning.strategy_members import StrategyMembers
from drivetrain.runtime.devices import get_device_kind
from drivetrain.runtime.errors import ConfigurationError, DeviceNotAvailableError, UnknownArgumentError
from drivetrain.strategies.precision import resolve_precision
from drivetrain.trackers import Tracker
from drivetrain.trainer import Trainer as CoreTrainer
from drivetrain.trainer.cli.parser import subclasses
from drivetrain.trainer.options import Option

# Arguments of Lightning's `Trainer` with types, from which command lines create options.


class AnyOf(type):
    """Metaclass of annotation types whose subclasses are another class's, with the mirror's before the core's.

    jsonargparse rejects ambiguous class names, and the mirror's classes often extend a core class of the same name.
    """

    of: type

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, cls.of)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.of)

    def __subclasses__(cls) -> list[Any]:
        every = list(subclasses(cls.of))
        mirrored = {each.__name__ for each in every if each.__module__.startswith(_MIRROR)}
        hidden = {each for each in every if each.__name__ in mirrored and not each.__module__.startswith(_MIRROR)}
        return [each for each in every if each not in hidden and not hidden & set(subclasses(each))]


_MIRROR = "drivetrain.compat.lightning."


def any_of(kind: type) -> Any:
    """Return an annotation type that stands for a class. See `AnyOf`."""
    return AnyOf(kind.__name__, (), {"of": kind, "__module__": kind.__module__, "__doc__": kind.__doc__})


_PLUGIN = Precision | TorchSyncBatchNorm | str
_CALLBACK, _LOGGER, _PROFILER = any_of(Callback), any_of(Tracker), any_of(Profiler)
_TYPES: dict[str, Any] = {
    "accelerator": str | Accelerator,
    "callbacks": list[_CALLBACK] | _CALLBACK | None,  # type: ignore[valid-type]
    "logger": _LOGGER | Iterable[_LOGGER] | bool | None,  # type: ignore[valid-type]
    "plugins": _PLUGIN | list[_PLUGIN] | None,
    "precision": str | int | None,
    "profiler": _PROFILER | str | None,
}
"""The types of what the mirror takes beside, or in the place of, what the core does."""

_DEFAULTS: dict[str, Any] = {"accumulate_grad_batches": 1}
"""What Lightning's command line expects where the core leaves a value open."""

ONLY_HERE = (
    *("max_duration", "enable_run_report", "num_workers", "auto_micro_batch", "optimizer_in_backward"),
    *("fused_optimizer", "compile", "on_interrupt", "seed", "advise", "suggest_integrations"),
)
"""Arguments that Lightning's `Trainer` does not take, and its command line refuses in a file."""


def show_all_arguments(kind: type) -> None:
    """Show the core's arguments in a constructor's signature, and resolve annotations of its methods.

    Args:
        kind: The class.
    """
    init: Any = kind.__init__  # type: ignore[misc]
    own = inspect.signature(inspect.unwrap(init)).parameters
    core = inspect.signature(CoreTrainer.__init__).parameters
    types = {**get_type_hints(CoreTrainer.__init__), **get_type_hints(inspect.unwrap(init)), **_TYPES}
    ordered = {**core, **own}  # in the core's order, followed by arguments that only the mirror has
    named = [
        each.replace(default=_DEFAULTS.get(each.name, each.default))
        for each in ordered.values()
        if each.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    init.__doc__ = CoreTrainer.__doc__  # its docstring describes the core's arguments
    init.__signature__ = inspect.Signature([each.replace(annotation=types.get(each.name, Any)) for each in named])
    for verb in ("fit", "validate", "test", "predict"):
        function = getattr(kind, verb)
        function.__signature__ = inspect.signature(function, eval_str=True)


# Arguments of earlier Lightning versions that many scripts still pass.

REMOVED = {
    "amp_backend": "precision='16-mixed' or 'bf16-mixed'",
    "amp_level": "precision='16-mixed' or 'bf16-mixed'",
    "auto_lr_find": "Tuner(trainer).lr_find(model), of lightning.pytorch.tuner",
    "auto_scale_batch_size": "Tuner(trainer).scale_batch_size(model), of lightning.pytorch.tuner",
    "auto_select_gpus": "devices=find_usable_cuda_devices(n), of lightning.pytorch.accelerators",
    "checkpoint_callback": "enable_checkpointing for a bool, callbacks for a ModelCheckpoint",
    "distributed_backend": "strategy",
    "early_stop_callback": "callbacks=[EarlyStopping(monitor=...)]",
    "flush_logs_every_n_steps": "CSVLogger(..., flush_logs_every_n_steps=n)",
    "gpus": "accelerator='gpu', devices={value}",
    "ipus": None,
    "log_gpu_memory": "callbacks=[DeviceStatsMonitor()]",
    "log_save_interval": "CSVLogger(..., flush_logs_every_n_steps=n)",
    "lr_schedulers": "what configure_optimizers returns",
    "max_nb_epochs": "max_epochs={value}",
    "min_nb_epochs": "min_epochs={value}",
    "move_metrics_to_cpu": None,
    "multiple_trainloader_mode": "CombinedLoader(loaders, mode={value}) as the training loader",
    "nb_gpu_nodes": "num_nodes={value}",
    "num_gpus": "accelerator='gpu', devices={value}",
    "num_processes": "accelerator='cpu', devices={value}",
    "optimizers": "what configure_optimizers returns",
    "prepare_data_per_node": "the attribute prepare_data_per_node of the module or the data module",
    "process_position": "callbacks=[TQDMProgressBar(process_position={value})]",
    "progress_bar_refresh_rate": "callbacks=[TQDMProgressBar(refresh_rate={value})]",
    "reload_dataloaders_every_epoch": "reload_dataloaders_every_n_epochs=1",
    "replace_sampler_ddp": "use_distributed_sampler={value}",
    "resume_from_checkpoint": "fit(..., ckpt_path={value})",
    "row_log_interval": "log_every_n_steps={value}",
    "show_progress_bar": "enable_progress_bar={value}",
    "stochastic_weight_avg": "callbacks=[StochasticWeightAveraging(swa_lrs=...)]",
    "terminate_on_nan": "detect_anomaly=True, or callbacks=[EarlyStopping(..., check_finite=True)]",
    "tpu_cores": "accelerator='tpu', devices={value}",
    "track_grad_norm": "self.log_dict(grad_norm(self, norm_type)) in on_before_optimizer_step",
    "train_percent_check": "limit_train_batches={value}",
    "truncated_bptt_steps": "automatic_optimization = False and a loop over the parts of a sequence",
    "use_amp": "precision='16-mixed' or 'bf16-mixed'",
    "val_percent_check": "limit_val_batches={value}",
    "weights_save_path": "callbacks=[ModelCheckpoint(dirpath={value})]",
    "weights_summary": "enable_model_summary for a bool, callbacks=[ModelSummary(max_depth=n)] for a depth",
}
"""By argument, what to give in its place; None where there is nothing in its place."""


def refuse_removed(options: Mapping[str, Any]) -> None:
    """Raise for an argument that Lightning has removed, and name its replacement."""
    name = next((each for each in options if each in REMOVED), None)
    if name is None:
        return
    value, instead = options[name], REMOVED[name]
    if name in ("gpus", "num_gpus", "tpu_cores") and value in (0, "0", [], None):
        instead = "accelerator='cpu'"
    hint = "Leave it out." if instead is None else f"Use {instead.format(value=repr(value))} instead."
    raise UnknownArgumentError(f"Trainer({name}={value!r}): Lightning has removed this argument. {hint}")


# Checks of the hardware arguments, with Lightning's error messages

_CLASSES = {kind.kind: kind.__name__ for kind in (CPUAccelerator, CUDAAccelerator, MPSAccelerator, XLAAccelerator)}


class AcceleratorNotAvailableError(ConfigurationError, DeviceNotAvailableError):
    """Raised if this machine has no device of the requested type."""


def kind_of(accelerator: Any) -> Any:
    """Return the device type that one of Lightning's accelerator objects stands for. Other values are unchanged."""
    if issubclass(type(accelerator), Accelerator):  # isinstance is True for our Accelerator too
        return accelerator.kind
    if accelerator == "gpu" and MPSAccelerator.is_available() and not CUDAAccelerator.is_available():
        return MPSAccelerator.kind
    return accelerator


def check_hardware(accelerator: Any, devices: Any) -> None:
    """Raise if the requested device type is not available, or if `devices` is 0 or empty."""
    if not isinstance(accelerator, str):
        return
    if devices in (0, "0") or (isinstance(devices, list | tuple) and not devices):
        raise ConfigurationError(
            f"`Trainer(devices={devices!r})` value is not a valid input using the accelerator {accelerator!r}: a run "
            "needs one device at least. Give a number from 1 on, the numbers of devices such as [0], or 'auto'.",
        )
    if accelerator == "auto":
        return
    try:
        get_device_kind(accelerator)
    except DeviceNotAvailableError as error:
        missing = (
            "No supported gpu backend found!"
            if accelerator == "gpu"
            else f"`{_CLASSES.get(accelerator, accelerator)}` can not run on your system since the accelerator is not "
            "available."
        )
        raise AcceleratorNotAvailableError(f"{missing} {error}") from None
    except ConfigurationError as error:
        raise ConfigurationError(
            f"You selected an invalid accelerator name: `accelerator={accelerator!r}`. {error.message}"
        ) from None


def check_precision(precision: Any) -> None:
    """Raise for an unknown precision."""
    try:
        resolve_precision(precision)
    except ConfigurationError as error:
        raise ConfigurationError(f"Precision {precision!r} is invalid. {error.message}") from None


# Options that plugins and strategies set


def spell(options: dict[str, Any]) -> None:
    """Convert option values to the core's spelling, in place."""
    if options.get("fast_dev_run") == 1:
        options["fast_dev_run"] = True
    strategy = STRATEGIES.made(options.get("strategy", "auto"))
    if isinstance(strategy, str):
        strategy = "single" if strategy.lower() == "single_device" else strategy.lower()
    options["strategy"] = strategy


def taken_from(plugins: Any, precision: Any, options: dict[str, Any]) -> Any:
    """Return the precision from the plugins, or the given one. Other plugins are written into the options."""
    given = _several(plugins)
    _refuse_two_of_a_kind(given)
    for plugin in given:
        if isinstance(plugin, TorchSyncBatchNorm):
            options["sync_batchnorm"] = True
        elif isinstance(plugin, Precision):
            precision = plugin.precision
        elif isinstance(plugin, ClusterEnvironment):
            plugin.publish(options.get("devices"), options.get("num_nodes", 1))
        elif not isinstance(plugin, CheckpointIO):
            raise ConfigurationError(f"Trainer(plugins={type(plugin).__name__}()) is not taken. {PLUGIN}")
    strategy = options.get("strategy")
    if isinstance(strategy, StrategyMembers):
        if strategy.cluster_environment is not None:
            strategy.cluster_environment.publish(options.get("devices"), options.get("num_nodes", 1))
        precision = strategy.given_precision if precision is None else precision
    return precision


def give_checkpoint_io(plugins: Any, strategy: Any) -> None:
    """Pass a `CheckpointIO` among the plugins to the strategy."""
    found = next((plugin for plugin in _several(plugins) if isinstance(plugin, CheckpointIO)), None)
    given = strategy.given_checkpoint_io
    if found is None or given is found:
        return
    if given is not None:
        raise ConfigurationError(
            "checkpoint_io set through both strategy class and plugins, choose one: "
            f"{type(strategy).__name__}(checkpoint_io={type(given).__name__}()) and plugins={type(found).__name__}().",
        )
    strategy.take_checkpoint_io(found)


def _several(plugins: Any) -> list[Any]:
    """Return the plugins as a list."""
    given = list(plugins) if isinstance(plugins, Sequence) and not isinstance(plugins, str) else [plugins]
    return [plugin for plugin in given if plugin is not None]


def _refuse_two_of_a_kind(plugins: list[Any]) -> None:
    kinds = (Precision, CheckpointIO, ClusterEnvironment)
    doubled = [kind.__name__ for kind in kinds if sum(isinstance(plugin, kind) for plugin in plugins) > 1]
    if doubled:
        raise ConfigurationError(
            f"Received multiple values for {', '.join(doubled)} flags in `plugins`. Give one of each at most.",
        )


# Default callbacks of Lightning's Trainer

ENTRY_POINTS = "lightning.pytorch.callbacks_factory"
"""The group of entry points by which packages add callbacks to every Trainer."""


def with_external(given: Any) -> list[Callback]:
    """Return the script's callbacks, followed by those that installed packages register."""
    own = [given] if isinstance(given, Callback) else list(given or [])
    return [*own, *made_by_entry_points(ENTRY_POINTS)]


def as_there(callbacks: Sequence[Callback], given: Sequence[Callback]) -> list[Callback]:
    """Replace callbacks that the core's Trainer has added by default with Lightning's versions.

    These are the checkpoint callback, the progress bar and, if rich is installed, the model summary. A summary draws
    the same random numbers as Lightning's.
    """
    has_rich = find_spec("rich") is not None
    found = [each if any(each is own for own in given) else _replaced(each, has_rich) for each in callbacks]
    for each in found:
        if isinstance(each, ModelSummary) and each.table_type is ModuleTable:
            each.table_type = DrawingTable
    return found


class DrawingTable(ModuleTable):
    """Model summary whose example forward pass draws from the global random generators, as Lightning's does."""

    @staticmethod
    def random_state() -> AbstractContextManager[Any]:
        return nullcontext()


def _replaced(added: Callback, has_rich: bool) -> Callback:
    if type(added) is CoreModelCheckpoint:
        return ModelCheckpoint()
    if type(added) is CoreProgressBar and not has_rich:
        return TQDMProgressBar.by_default()
    if type(added) is CoreProgressBar:
        require_rich("RichProgressBar")
        # Imports rich, an optional dependency.
        from drivetrain.compat.lightning.pytorch.callbacks.progress.rich_progress import RichProgressBar

        return RichProgressBar()
    return RichModelSummary() if has_rich and type(added) is ModelSummary else added


# Preprocessing of arguments, as in Lightning's Trainer

_NOTHING_AROUND = {
    "enable_checkpointing": (None, False),
    "logger": (None, False),
    "enable_progress_bar": (None, False),
    "enable_model_summary": (None, False),
    "log_every_n_steps": (None, 0),
    "num_sanity_val_steps": (None, 0),
    "fast_dev_run": (False,),
    "detect_anomaly": (False,),
    "profiler": (None,),
}

_LIMITS = {
    "overfit_batches": "per epoch",
    "limit_train_batches": "per epoch",
    "limit_val_batches": "in each validation",
    "limit_test_batches": "in each test",
    "limit_predict_batches": "in each prediction",
}


def from_environment(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor so that variables such as `PL_TRAINER_MAX_EPOCHS` give its defaults."""

    @wraps(init)
    def wrapped(self: Any, **given: Any) -> None:
        names = {*inspect.signature(init).parameters, *inspect.signature(CoreTrainer.__init__).parameters} - {"self"}
        found = {name: os.environ[f"PL_TRAINER_{name.upper()}"] for name in names if _is_set(name)}
        init(self, **{**{name: _value(text) for name, text in found.items()}, **given})

    # Programs generate options from the signature and pass only the arguments that it names.
    known = {**inspect.signature(CoreTrainer.__init__).parameters, **inspect.signature(init).parameters}
    named = [
        each for name, each in known.items() if each.kind is not inspect.Parameter.VAR_KEYWORD and name not in ONLY_HERE
    ]
    vars(wrapped)["__signature__"] = inspect.Signature(named)
    return wrapped


def _is_set(name: str) -> bool:
    return f"PL_TRAINER_{name.upper()}" in os.environ


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def check_barebones(given: Mapping[str, Any]) -> None:
    """Raise for options that `Trainer(barebones=True)` excludes, such as loggers and callbacks."""
    for name, allowed in _NOTHING_AROUND.items():
        value = given.get(name, allowed[0])
        if not any(value is each or (value == each and not isinstance(value, bool)) for each in allowed):
            raise ValueError(
                f"`Trainer(barebones=True, {name}={value!r})` was passed, but a barebones run has nothing around its "
                f"loop. Leave {name} or barebones out."
            )
    rank_zero_info(
        "You are running in `Trainer(barebones=True)` mode: no loggers, checkpoints, progress bar, model summary or "
        "sanity check, and `self.log` does nothing."
    )


def log_nothing(name: str, *_: Any) -> None:
    """Replace `log` in a barebones run: warn and discard the value."""
    rank_zero_warn(
        f"You are logging {name!r}, but `Trainer(barebones=True)` is configured: values are not kept. Leave barebones "
        "out to log.",
        stacklevel=5,
    )


def explain_ones(given: Mapping[str, Any]) -> None:
    """Log what a limit of 1 (one batch) or 1.0 (all batches) means, as the two are easily confused."""
    for name, where in _LIMITS.items():
        value = given.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value == 1:
            amount = "1 batch" if isinstance(value, int) else "100% of the batches"
            rank_zero_info(f"`Trainer({name}={value})` was configured so {amount} {where} will be used.")
    value = given.get("val_check_interval")
    if isinstance(value, int | float) and not isinstance(value, bool) and value == 1:
        when = "after every batch" if isinstance(value, int) else "at the end of the training epoch"
        rank_zero_info(f"`Trainer(val_check_interval={value})` was configured so validation will run {when}.")


class Shown(Option[Any]):
    """Trainer option that reads as a number if the user did not set it."""

    def __init__(self, default: float, left_open: float | None = None) -> None:
        self._default, self._left_open = default, left_open

    def __get__(self, trainer: Any, owner: type) -> Any:
        value = super().__get__(trainer, owner)
        return self._default if value == self._left_open else value
