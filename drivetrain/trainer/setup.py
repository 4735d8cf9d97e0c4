"""Creation of a Trainer's parts from its arguments: processes, engine, trackers and callbacks."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from drivetrain.accelerator import Accelerator
from drivetrain.accelerator.accelerate_names import Launched, TorchDynamoPlugin
from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.model_checkpoint import ModelCheckpoint
from drivetrain.callbacks.model_summary import ModelSummary
from drivetrain.callbacks.progress_bar import TQDMProgressBar
from drivetrain.callbacks.report.run_report import RunReport
from drivetrain.launch import relaunch_script
from drivetrain.runtime import observer
from drivetrain.runtime.devices import DeviceKind, cpu_is_requested, detect_device_kind, get_device, get_device_kind
from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import ConfigurationError, LaunchError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.seeds import make_deterministic, set_seed
from drivetrain.strategies import Strategy, resolve_ddp, started_by_verbs
from drivetrain.strategies.base import Given, RunOptions
from drivetrain.strategies.precision import Precision
from drivetrain.strategies.registry import Spawned
from drivetrain.trackers import Tracker, TrackerGroup, resolve_trackers
from drivetrain.trackers.group import AbsentTracker
from drivetrain.trainer.options import TrainerOptions
from drivetrain.trainer.task_checks import described

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


logger = get_logger(__name__)


class TwinCallbacksError(ConfigurationError, RuntimeError):
    """Raised if two callbacks of a Trainer have the same key in checkpoints."""


def make_accelerator(
    accelerator: str | Accelerator,
    strategy: str | Strategy,
    devices: int | str | Sequence[int],
    num_nodes: int,
    precision: str | int | Precision | None,
    accumulate_grad_batches: int | None,
    sync_batchnorm: bool,
    compilation: TorchDynamoPlugin | None = None,
) -> Accelerator:
    """Create the `Accelerator` for a Trainer's arguments.

    The script is first restarted under a launcher if it runs without one but needs several processes. An `Accelerator`
    that the Trainer received is returned unchanged.
    """
    # An existing engine has its devices and strategy already, so the Trainer cannot choose them.
    if isinstance(accelerator, Accelerator):
        changed = [
            name
            for name, value, default in (
                ("strategy", strategy, "auto"),
                ("devices", devices, "auto"),
                ("precision", precision, None),
                ("sync_batchnorm", sync_batchnorm, False),
                ("compile", compilation, None),
            )
            if value != default
        ]
        if changed:
            raise ConfigurationError(
                f"Trainer(accelerator=<Accelerator>) uses the settings of that Accelerator, so {', '.join(changed)} "
                "cannot be passed to the Trainer. Pass them to the Accelerator.",
            )
        return accelerator
    if accelerator == "auto" and cpu_is_requested():
        accelerator = "cpu"
    kind = None if accelerator == "auto" else get_device_kind(accelerator)
    count, numbers = _chosen_devices(devices)
    if numbers and (kind or detect_device_kind()).name == "cpu" and sorted(numbers) != list(range(len(numbers))):
        raise ConfigurationError(
            f"devices={devices!r} is not valid for the CPU, which has no device indices. Use the number of processes: "
            f"devices={len(numbers)}."
        )
    environment = ProcessEnvironment.detect()
    spawned = started_by_verbs(strategy)
    if spawned is not None:
        strategy, count = _spawning_or_ddp(environment, spawned, kind, count, numbers, num_nodes)
    starts_later = spawned is not None and strategy is spawned
    # Does not return in a script that is restarted under the launcher.
    _start_processes(environment, kind, count, numbers, num_nodes)
    if sync_batchnorm and not starts_later:
        launched = Launched().strategy() if strategy == "auto" else None
        if launched is not None:
            raise ConfigurationError(
                f"Trainer(sync_batchnorm=True) works only with strategy='ddp', but the launcher selected "
                f"strategy={launched.name!r}. Launch without it, use Trainer(strategy='ddp'), or remove sync_batchnorm "
                "and convert the model in configure_model: torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).",
            )
        strategy = resolve_ddp(strategy, environment, "sync_batchnorm=True", sync_batchnorm=True)
    device = kind.name if kind else None
    if spawned is not None and starts_later and spawned.start_method == "fork":
        device = "cpu"  # CUDA cannot be used in a forked process
    elif numbers is not None:
        device = f"{(kind or detect_device_kind()).name}:{numbers[environment.local_rank]}"
    return Accelerator(
        strategy=strategy,
        # Precisions have names; 16 and 32 are common shorthands.
        mixed_precision=str(precision) if isinstance(precision, int) else precision,
        gradient_accumulation_steps=accumulate_grad_batches,
        device=device,
        dynamo_plugin=compilation,
    )


def complete_options(accumulate: int | None, engine: Accelerator, options: TrainerOptions) -> TrainerOptions:
    # The launcher passes its options in environment variables.
    launched = Launched().settings.get("gradient_accumulation_steps")
    if accumulate is None:
        chosen = engine.accumulation.plugin.num_steps
        if chosen != 1 and chosen == launched:
            logger.warning_once(
                "The Trainer uses accumulate_grad_batches=%d, because the launcher was started with "
                "--gradient_accumulation_steps %d.",
                chosen,
                chosen,
            )
        options = replace(options, accumulate_grad_batches=chosen)
    elif launched not in (None, 1, accumulate):
        logger.warning_once(
            "Trainer(accumulate_grad_batches=%d) replaces the launcher's --gradient_accumulation_steps %d.",
            accumulate,
            launched,
        )
    strategy = engine.strategy
    strategy.check(
        RunOptions(
            engine.precision,
            Given("Trainer(accumulate_grad_batches)", options.accumulate_grad_batches),
            Given("Trainer(gradient_clip_val)", options.gradient_clip_val),
        )
    )
    if options.auto_micro_batch and not strategy.repeats_steps:
        raise ConfigurationError(
            f"Trainer(auto_micro_batch=True) does not work with {strategy!r}, whose processes exchange tensors within "
            "a step, so that a step cannot be repeated on one of them. It works with strategy='single', and with 'ddp' "
            "without comm_hook and sync_batchnorm. Otherwise use a smaller batch size, which "
            "Tuner(trainer).scale_batch_size finds, and a larger accumulate_grad_batches.",
        )
    return options


def _chosen_devices(devices: Any) -> tuple[Any, list[int] | None]:
    """Parse the argument `devices` into a number of processes and device indices."""
    if isinstance(devices, str) and "," in devices:
        numbers: Any = [part.strip() for part in devices.split(",") if part.strip()]
    elif isinstance(devices, list | tuple):
        numbers = list(devices)
    else:
        is_number = isinstance(devices, str) and devices.removeprefix("-").isdigit()
        count = int(devices) if is_number else devices
        # True is an int, but no number of processes.
        if count != "auto" and (not isinstance(count, int) or isinstance(count, bool) or (count < 1 and count != -1)):
            raise ConfigurationError(
                f"devices={count!r} is not valid. Use the number of processes on this machine, a list of device "
                "indices ([0, 1]), -1 for all devices, or 'auto'.",
            )
        return count, None
    texts = [str(each) for each in numbers if not isinstance(each, bool)]
    if not texts or len(texts) < len(numbers) or not all(map(str.isdigit, texts)) or len(set(texts)) < len(texts):
        raise ConfigurationError(
            f"devices={devices!r} is not valid. Use different device indices, such as [0, 1] or '0,1'."
        )
    return len(texts), [int(each) for each in texts]


def _spawning_or_ddp(
    environment: ProcessEnvironment,
    spawned: Spawned,
    kind: DeviceKind | None,
    count: Any,
    numbers: list[int] | None,
    num_nodes: int,
) -> tuple[Strategy, Any]:
    # Started processes, launched scripts and runs with one process use plain DDP. Also returns the number of processes
    # that must exist before `fit`.
    if environment.is_launched:
        # No warning in processes that a Trainer itself has started.
        if multiprocessing.parent_process() is None:
            logger.warning_once(
                f"The Trainer uses strategy 'ddp' instead of {spawned.name!r}, because a launcher "
                f"({environment.source}) has already started the processes of this run."
            )
        return spawned.within(), count
    found, wanted = _wanted_processes(kind, count, numbers)
    # A single process needs no other, and several machines need a launcher on each.
    if num_nodes > 1 or wanted <= 1:
        return spawned.within(), 1 if num_nodes == 1 else count
    from drivetrain.launch.launcher import LaunchPlan
    from drivetrain.launch.options import LaunchOptions  # here, because few Trainers start processes

    # Raises an error now rather than in `fit` if the processes cannot be started.
    LaunchPlan.make(LaunchOptions(num_processes=wanted, cpu=found.name == "cpu"))
    spawned.num_processes, spawned.kind = wanted, found.name
    return spawned, 1


def _wanted_processes(kind: DeviceKind | None, count: Any, numbers: list[int] | None) -> tuple[DeviceKind, int]:
    found = kind or detect_device_kind()
    for number in numbers or ():
        get_device(f"{found.name}:{number}")  # raises here, before processes are started
    return found, int(found.default_processes() if count in ("auto", -1) else count)


def _start_processes(
    environment: ProcessEnvironment, kind: DeviceKind | None, count: Any, numbers: list[int] | None, num_nodes: int
) -> None:
    # Restarts the script in each new process.
    if environment.is_launched:
        here = environment.local_world_size
        is_replaced = observer.current is not None and observer.current.strategy() is not None
        if isinstance(count, int) and count not in (here, -1) and not is_replaced:
            raise ConfigurationError(
                f"devices={count}, but the launcher ({environment.source}) started {here} process(es) on this "
                f"machine. Use devices='auto', or start {count} with: "
                f"drivetrain launch --num_processes {count} script.py.",
            )
        if num_nodes not in (1, environment.num_nodes):
            raise ConfigurationError(
                f"num_nodes={num_nodes}, but the launcher ({environment.source}) started {environment.num_nodes} "
                "node(s). Remove num_nodes, or change the number in the launcher.",
            )
        return
    if num_nodes > 1:
        raise ConfigurationError(
            f"num_nodes={num_nodes} needs a launcher on every machine: drivetrain launch --num_machines {num_nodes} "
            "--machine_rank <0…> --main_process_ip <address> script.py, or srun.",
        )
    found, wanted = _wanted_processes(kind, count, numbers)
    if wanted <= 1:
        return
    try:
        relaunch_script(wanted, cpu=found.name == "cpu")
    # A notebook or REPL has no script to restart. An explicit number of devices must not be ignored.
    except LaunchError:
        if count != "auto":
            raise
        warnings.warn(
            f"This machine has {wanted} {found.name} devices, but an interactive session cannot start processes for "
            "them, so only one is used. Use drivetrain.notebook_launcher to train on all of them.",
            stacklevel=5,
        )


def set_randomness(seed: int | None, deterministic: bool | str | None, benchmark: bool | None) -> None:
    """Seed all random generators, and set torch's determinism and benchmark switches."""
    if seed is not None:
        set_seed(seed)
    # Checked before it is used as a truth value, in which any string is True.
    if deterministic not in (None, True, False, "warn"):
        raise ConfigurationError(f"deterministic={deterministic!r} is not valid. Use True, False or 'warn'.")
    if deterministic:
        make_deterministic(deterministic)
    if benchmark is not None:
        torch.backends.cudnn.benchmark = benchmark


def make_trackers(
    given: bool | str | Tracker | Iterable[str | Tracker] | None, engine: Accelerator, options: TrainerOptions
) -> TrackerGroup:
    # None uses the engine's trackers, or a `CSVLogger` if it has none. A trial run (`fast_dev_run`) gets a tracker that
    # does nothing, so that hooks that use it still run. A barebones run gets none. A raw loop over the engine logs to
    # the same trackers, unless it has its own.
    found: list[Tracker]
    if options.is_quiet:
        found = [] if options.barebones or given is False else [AbsentTracker()]
    # Then a loop of your own and a Trainer with the same Accelerator log to the same run.
    elif given is None and engine.tracking.group.trackers:
        return engine.tracking.group
    elif given is False:
        found = []
    else:
        found = resolve_trackers(True if given is None else given, save_dir=options.default_root_dir)
    group = TrackerGroup(observer.observed(found), engine.tracking.group.is_main)
    if not engine.tracking.group.trackers:
        engine.tracking.group = group
    return group


# Callbacks that save checkpoints come last, so that they save the final state of the others. The sort keeps the rest.
_LAST = attrgetter("saves_checkpoints")


def make_callbacks(
    given: Callback | Sequence[Callback] | None,
    arguments: Mapping[str, Any],
    options: TrainerOptions,
    trackers: Sequence[Tracker],
) -> list[Callback]:
    """Return the Trainer's callbacks: the user's (`given`) and the default ones that its arguments enable.

    Those that save checkpoints come last.
    """
    quiet = options.is_quiet
    checkpointing = False if quiet else arguments["enable_checkpointing"]
    progress_bar = False if options.barebones else arguments["enable_progress_bar"]
    summary = False if options.barebones else arguments["enable_model_summary"]
    callbacks = [given] if isinstance(given, Callback) else list(given or [])
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigurationError(
                f"callbacks contains {described(callback)}. Pass instances of drivetrain.Callback."
            )
    saving = [callback for callback in callbacks if callback.saves_checkpoints]
    if saving and checkpointing is False and not quiet:
        raise ConfigurationError(
            f"`enable_checkpointing=False` but found `{type(saving[0]).__name__}` in callbacks. Remove one of the two.",
        )
    if quiet:  # a ModelCheckpoint stays, without effect, for scripts that read its attributes
        kept = () if options.barebones else (ModelCheckpoint,)
        callbacks = [each for each in callbacks if isinstance(each, kept) or not each.saves_checkpoints]
    elif checkpointing is not False and not saving:
        callbacks.append(ModelCheckpoint())
    bars = [callback for callback in callbacks if callback.is_progress_bar]
    if len(bars) > 1:
        raise ConfigurationError(
            f"You added multiple progress bar callbacks: {' and '.join(map(described, bars))}. They would draw over "
            "each other, so keep only one.",
        )
    if bars and arguments["enable_progress_bar"] is False:
        raise ConfigurationError(
            f"You set `enable_progress_bar=False` but found `{type(bars[0]).__name__}` in callbacks. Remove one of the "
            "two.",
        )
    if progress_bar is not False and not bars:
        callbacks.append(TQDMProgressBar())
    if summary is not False and not any(isinstance(callback, ModelSummary) for callback in callbacks):
        # A Rich progress bar brings its own kind of summary.
        kind = getattr(bars[0], "summary_type", ModelSummary) if bars else ModelSummary
        callbacks.append(kind())
    asked = False if quiet else arguments["enable_run_report"]
    # By default, a report is written if the run writes anything else.
    wanted = bool(asked or trackers) or any(callback.saves_checkpoints for callback in callbacks)
    if asked is not False and wanted and not any(isinstance(callback, RunReport) for callback in callbacks):
        callbacks.append(RunReport())
    # Only callbacks with a state of their own have to be told apart.
    keys = [callback.state_key for callback in callbacks if type(callback).state_dict is not Callback.state_dict]
    if twins := {key for key in keys if keys.count(key) > 1}:
        names = sorted({type(callback).__name__ for callback in callbacks if callback.state_key in twins})
        raise TwinCallbacksError(
            f"Found more than one stateful callback of type `{'`, `'.join(names)}` with the same state_key "
            f"{sorted(twins)}: a checkpoint could not tell them apart. Use different arguments, or override "
            "state_key."
        )
    return sorted(callbacks, key=_LAST)


def with_task_callbacks(callbacks: list[Callback], added: Any) -> list[Callback]:
    """Add the task's callbacks to the Trainer's `callbacks`, and return the resulting list.

    The task's callbacks replace callbacks of the same class or of a base class.
    """
    own = [added] if isinstance(added, Callback) else list(added or [])
    if not own:
        return callbacks
    # Base classes that all callbacks share replace nothing.
    replaced = {base for callback in own for base in type(callback).__mro__} - set(Callback.__mro__)
    return sorted([each for each in callbacks if type(each) not in replaced] + own, key=_LAST)


# Creation of modules on the device and in the dtype of the run


class WithoutValues(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Initialization functions return the tensor that they would have filled.
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextmanager
def init_module(trainer: Trainer, empty_init: bool | None) -> Iterator[None]:
    """Create modules in the `with` block on the run's device and in its dtype."""
    strategy = trainer.strategy
    # The strategy comes last, because sharding strategies create parameters on the meta device.
    with (
        torch.device(strategy.topology.device),
        trainer.accelerator.precision.init_context(),
        strategy.init_context(),
        WithoutValues() if empty_init else nullcontext(),
    ):
        yield
