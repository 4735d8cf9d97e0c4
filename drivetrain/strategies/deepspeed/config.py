"""DeepSpeed's configuration: `"auto"` values are filled in, and conflicts with the settings of the run are refused."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer

from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.logging import get_logger
from drivetrain.strategies.base import Given
from drivetrain.strategies.precision import Precision

# The keys of a `deepspeed_config` in a launcher's file, as arguments of `DeepSpeed`


_log = get_logger(__name__)

KEYS = (
    "deepspeed_config_file",
    "deepspeed_exclusion_filter",
    "deepspeed_hostfile",
    "deepspeed_inclusion_filter",
    "deepspeed_moe_layer_cls_names",
    "deepspeed_multinode_launcher",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "offload_optimizer_device",
    "offload_optimizer_nvme_path",
    "offload_param_device",
    "offload_param_nvme_path",
    "zero3_init_flag",
    "zero3_save_16bit_model",
    "zero_stage",
)
# Keys for DeepSpeed's own launcher, which drivetrain does not use to start processes.
_LAUNCHER = (
    "deepspeed_exclusion_filter",
    "deepspeed_hostfile",
    "deepspeed_inclusion_filter",
    "deepspeed_multinode_launcher",
)


def arguments_from(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the `deepspeed_config` section of a launcher's file to keyword arguments for `DeepSpeed`.

    Raise `ConfigurationError` if a key is unknown. Options of DeepSpeed's own launcher are ignored with a warning.
    """
    for key in given:
        if key not in KEYS:
            raise ConfigurationError(
                f"Unknown key {key!r} in deepspeed_config. Allowed: {', '.join(KEYS)}.{nearest(key, KEYS)}",
            )
    idle = sorted(key for key in _LAUNCHER if given.get(key) not in (None, "", "standard", "pdsh"))
    if idle:
        _log.warning_once(
            f"{', '.join(idle)} configure DeepSpeed's own launcher, which is not used, and have no effect. Start the "
            "processes with `drivetrain launch --num_machines ... --machine_rank ...`, or with srun."
        )
    arguments: dict[str, Any] = {}
    if given.get("deepspeed_config_file"):
        arguments["config"] = given["deepspeed_config_file"]
    if given.get("zero_stage") is not None:
        arguments["stage"] = int(given["zero_stage"])
    for key in ("offload_optimizer", "offload_param"):
        device = given.get(f"{key}_device")
        path = given.get(f"{key}_nvme_path")
        if device not in (None, "none"):
            arguments[key] = {"device": device, "nvme_path": path} if device == "nvme" else device
    names = given.get("deepspeed_moe_layer_cls_names")
    if names:
        arguments["moe_layers"] = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    for key, number in (("gradient_accumulation_steps", int), ("gradient_clipping", float)):
        if given.get(key) not in (None, "auto", "none"):
            arguments[key] = number(given[key])
    if given.get("zero3_init_flag") is not None:
        arguments["zero_init"] = _truth("zero3_init_flag", given["zero3_init_flag"])
    if given.get("zero3_save_16bit_model") is not None and arguments.get("stage", 3) == 3:
        save = _truth("zero3_save_16bit_model", given["zero3_save_16bit_model"])
        arguments["stage3_gather_16bit_weights_on_model_save"] = save
    return arguments


def _truth(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text in ("true", "1", "yes"):
        return True
    if text in ("false", "0", "no"):
        return False
    raise ConfigurationError(f"{key}={value!r} is not valid. Use true or false.")


# The package deepspeed: whether it is there, and how it is imported


def require_deepspeed() -> None:
    """Raise `ConfigurationError` if the deepspeed package is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigurationError(
            "strategy='deepspeed' needs the package deepspeed, which is not installed. Install it: "
            "pip install 'drivetrain[deepspeed]' (torch first: another package may choose another build of it).",
        )


def import_deepspeed(kind: str) -> Any:
    """Import the deepspeed package, and set it up for a device type.

    Raise `ConfigurationError` if the package is not installed, or was imported earlier for another kind.
    """
    require_deepspeed()
    if "deepspeed" not in sys.modules:
        asked = os.environ.get("DS_ACCELERATOR")
        os.environ["DS_ACCELERATOR"] = asked or kind  # otherwise deepspeed would choose a GPU if it finds one
        try:
            importlib.import_module("deepspeed")
        finally:
            if asked is None:
                del os.environ["DS_ACCELERATOR"]
    from deepspeed.accelerator import get_accelerator

    found = get_accelerator()._name
    if found != kind:
        raise ConfigurationError(
            f"This run is on {kind!r}, but deepspeed was imported for {found!r} in this process. Import deepspeed "
            f"only after creating the Trainer or Accelerator, or set DS_ACCELERATOR={kind}.",
        )
    return importlib.import_module("deepspeed")


# Stand-ins for what a DeepSpeed configuration defines itself: an optimizer, a scheduler


class DummyOptim(Optimizer):
    """Placeholder to pass to `prepare` if the DeepSpeed configuration itself defines the optimizer.

    The arguments replace `"auto"` values in the `"optimizer"` section of the configuration.

    Args:
        params: The parameters or parameter groups.
        lr: Learning rate.
        weight_decay: Weight decay.
        **kwargs: Further values for `"auto"`, such as `betas`.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.0, **kwargs: Any) -> None:
        self.lr, self.weight_decay, self.kwargs = lr, weight_decay, kwargs
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **kwargs})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Raise `ConfigurationError`, because only the optimizer that `prepare` returns can be stepped."""
        raise ConfigurationError(
            "DummyOptim is a placeholder for the optimizer of a DeepSpeed configuration and cannot step. Prepare it "
            "together with its model under strategy='deepspeed', and step the optimizer that prepare returns.",
        )


class DummyScheduler:
    """Placeholder to pass to `prepare` if the DeepSpeed configuration defines the learning rate scheduler.

    Args:
        optimizer: The optimizer whose learning rate is scheduled.
        total_num_steps: Value for `total_num_steps` if that is `"auto"`.
        warmup_num_steps: Value for `warmup_num_steps` if that is `"auto"`.
        lr_scheduler_callable: Function that creates a scheduler from the engine's optimizer, if the configuration has
            no `"scheduler"` section.
        **kwargs: Further values for `"auto"`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Optimizer], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps, self.warmup_num_steps = total_num_steps, warmup_num_steps
        self.lr_scheduler_callable, self.kwargs = lr_scheduler_callable, kwargs
        self.scheduler: Any = None
        _STANDING_IN[optimizer] = self

    def attach(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because the DeepSpeed engine steps the real scheduler."""

    def get_last_lr(self) -> list[float]:
        """Return the current learning rate of each parameter group, as a list of floats."""
        if self.scheduler is None:
            return [group["lr"] for group in self.optimizer.param_groups]
        rates: list[float] = self.scheduler.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of DeepSpeed's scheduler, or an empty dict before `prepare` is called."""
        return {} if self.scheduler is None else self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state dict of the engine's scheduler.

        Does nothing before `prepare` or if the dict is empty.
        """
        if self.scheduler is not None and state:
            self.scheduler.load_state_dict(state)


def dummy_scheduler_of(optimizer: Optimizer) -> DummyScheduler | None:
    """Return the `DummyScheduler` that was created for an optimizer, or None."""
    return _STANDING_IN.get(optimizer)


# Placeholder schedulers by optimizer. `prepare` receives only the optimizer and finds its scheduler here.
_STANDING_IN: WeakKeyDictionary[Optimizer, DummyScheduler] = WeakKeyDictionary()


Config = dict[str, Any]
AUTO = "auto"
STAGES = (0, 1, 2, 3)
DEVICES = ("none", "cpu", "nvme")

_BUCKET = 500_000_000  # elements
# Smallest buckets: gradients of a smaller model are reduced at once. ZeRO-3 has more overhead for each bucket.
_SMALL_BUCKET, _SMALL_BUCKET_OF_3 = 2**18, 2**24

_PRECISIONS = {"bf16": "bf16-true", "fp16": "fp16", "torch_autocast": "bf16"}
# section of the configuration that each precision enables
_SECTIONS = {"bf16-true": "bf16", "fp16": "fp16", "fp16-true": "fp16"}


def read_config(given: Mapping[str, Any] | str | os.PathLike[str] | None) -> Config:
    """Return a DeepSpeed configuration, given as dict, path or JSON text, as a new dict."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return _normalised(copy.deepcopy(dict(given)))
    text = os.fspath(given)
    try:
        source = text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8")
        found = json.loads(source)
    except OSError as error:
        raise ConfigurationError(
            f"config={text!r} cannot be read as a DeepSpeed configuration: {error.strerror}. Pass the path of a JSON "
            "file, or a dict.",
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"config={text!r} is not valid JSON: {error}.") from error
    if not isinstance(found, dict):
        raise ConfigurationError(
            f"config={text!r} contains a {type(found).__name__}, but a DeepSpeed configuration is a dict."
        )
    return _normalised(found)


# Sections that the strategy reads itself, each with an example.
_READ = {
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
    "fp16": {"enabled": True},
    "torch_autocast": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
}
_COUNTS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Keys that make several processes share their data, each with the strategy that does so.
_SHARED_DATA = {
    "tensor_parallel.autotp_size": "Parallel(tp=...)",
    "tensor_parallel.tp.tp_size": "Parallel(tp=...)",
    "sequence_parallel_size": "Parallel(cp=...)",
    "expert_parallel.autoep_size": "Megatron(expert_parallel=...)",
}


def _normalised(config: Config) -> Config:
    config = {key: value for key, value in config.items() if value is not None}
    if "bfloat16" in config:
        config.setdefault("bf16", config.pop("bfloat16"))
    for key, example in _READ.items():
        if key in config and not isinstance(config[key], dict):
            raise ConfigurationError(
                f"The DeepSpeed configuration says {key}={config[key]!r}, but {key!r} is a section, such as "
                f"{json.dumps(example)}."
            )
    for key in ("optimizer", "scheduler"):
        if key in config and not config[key].get("type"):
            raise ConfigurationError(
                f'The section {key!r} of the DeepSpeed configuration has no "type". Write it such as '
                f"{json.dumps(_READ[key])}, or remove the section."
            )
    for section in config.values():
        if isinstance(section, dict) and str(section.get("enabled")).lower() in ("true", "false"):
            section["enabled"] = str(section["enabled"]).lower() == "true"
    for key in _COUNTS:
        count = _whole(config.get(key, AUTO))
        if key in config:
            config[key] = count
        if count != AUTO and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise ConfigurationError(
                f'The DeepSpeed configuration says {key}={count!r}. Use a whole number of at least 1, or "auto".'
            )
    for path, strategy in _SHARED_DATA.items():
        size = _at(config, path)
        if isinstance(size, int) and size > 1:
            raise ConfigurationError(
                f"The DeepSpeed configuration says {path}={size}, but under strategy='deepspeed' each process trains "
                f"on data of its own. Remove {path}, or use strategy={strategy} instead of DeepSpeed."
            )
    return config


def _at(config: Any, path: str) -> Any:
    for key in path.split("."):
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


@dataclass
class Known:
    """The settings and objects of a run that replace `"auto"` values in its DeepSpeed configuration.

    Attributes:
        world_size: Number of processes.
        precision: The numeric precision, or None if not yet known.
        given: Argument and value by the configuration key of the same meaning.
        optimizer: The user's optimizer, or None if not yet known.
        scheduler: The placeholder for the configuration's scheduler.
        model: The model, or None if not yet known.
    """

    world_size: int
    precision: Precision | None = None
    given: dict[str, Given] = field(default_factory=dict)
    optimizer: Optimizer | None = None
    scheduler: DummyScheduler | None = None
    model: nn.Module | None = None


def complete(config: Config, known: Known) -> Config:
    """Return a DeepSpeed configuration with missing and `"auto"` values filled in from the run's settings.

    Raise `ConfigurationError` if a value conflicts with the run, or if nothing determines an `"auto"` value.
    """
    done = copy.deepcopy(config)
    # First, because the batch sizes depend on the number of accumulation steps.
    _fill_given(done, known)
    _fill_batch(done, known)
    _fill_precision(done, known)
    _fill_zero(done.setdefault("zero_optimization", {}), known)
    _fill_optimizer(done, known)
    _fill_scheduler(done, known)
    _leave_out_disabled(done)
    # Otherwise DeepSpeed refuses optimizers that are not on its own lists.
    done.setdefault("zero_allow_untested_optimizer", True)
    if done.get("zero_force_ds_cpu_optimizer") and isinstance(known.optimizer, Optimizer):
        _keep_optimizer(done, known.optimizer)
    done.setdefault("zero_force_ds_cpu_optimizer", False)
    left = sorted(_autos(done))
    if left:
        placeholder = " or pass DummyScheduler(optimizer, ...)" if left[0].startswith("scheduler.params.") else ""
        raise ConfigurationError(
            f"The DeepSpeed configuration has 'auto' for {', '.join(left)}, which cannot be filled in. Set "
            f"{'it' if len(left) == 1 else 'them'}{placeholder}.",
        )
    return done


def _leave_out_disabled(config: Config) -> None:
    # DeepSpeed rejects features that it no longer has, and `"auto"` in a section, even if disabled.
    for key, value in list(config.items()):
        if isinstance(value, dict) and value.get("enabled") is False:
            if key in ("bf16", "fp16"):
                config[key] = {"enabled": False}
            else:
                del config[key]
        elif value is False and key in ("sparse_gradients", "graph_harvesting"):
            del config[key]


def _keep_optimizer(config: Config, optimizer: Optimizer) -> None:
    config["zero_force_ds_cpu_optimizer"] = False
    kind = type(optimizer)
    offloads = _device(config["zero_optimization"].get("offload_optimizer")) != "none"
    if offloads and not isinstance(optimizer, DummyOptim) and not kind.__module__.startswith("deepspeed."):
        _log.warning_once(
            f"zero_force_ds_cpu_optimizer has no effect: {kind.__name__} steps the offloaded state, with the same "
            "results. For DeepSpeed's faster one, pass deepspeed.ops.adam.DeepSpeedCPUAdam, or DummyOptim with an "
            '"optimizer" section.'
        )


def stage_of(config: Mapping[str, Any]) -> int | None:
    """Return the ZeRO stage that a DeepSpeed configuration sets, or None."""
    found = config.get("zero_optimization", {}).get("stage")
    return None if found is None or found == AUTO else _whole(found)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdigit() else value


def precision_of(config: Mapping[str, Any]) -> str | None:
    """Return the precision that a DeepSpeed configuration enables, or None."""
    switched = [meaning for section, meaning in _PRECISIONS.items() if config.get(section, {}).get("enabled") is True]
    return switched[0] if len(switched) == 1 else None


def clipping_of(config: Mapping[str, Any]) -> float | None:
    """Return the maximum gradient norm in a DeepSpeed configuration, or None."""
    found = config.get("gradient_clipping")
    return float(found) if isinstance(found, int | float) and found > 0 else None


def _fill_given(config: Config, known: Known) -> None:
    for key, (argument, value) in known.given.items():
        here = config.get(key)
        if here in (None, AUTO):
            config[key] = value
        elif value is not None and float(here) != float(value):
            raise ConfigurationError(
                f"The DeepSpeed configuration says {key}={here}, but {argument.removesuffix(')')}={value}). Use the "
                f'same value, or "{key}": "auto" in the configuration.',
            )
    for key, default in (("gradient_accumulation_steps", 1), ("gradient_clipping", 0.0)):
        if config.get(key) in (None, AUTO):
            config[key] = default


def _fill_batch(config: Config, known: Known) -> None:
    # The data loaders determine the actual batch sizes.
    micro, whole = config.get("train_micro_batch_size_per_gpu"), config.get("train_batch_size")
    steps = config["gradient_accumulation_steps"]
    # train_batch_size = train_micro_batch_size_per_gpu x accumulation steps x processes.
    share = steps * known.world_size
    micro = None if micro == AUTO else micro
    whole = None if whole == AUTO else whole
    if micro is None:
        if whole is not None and whole % share:
            raise ConfigurationError(
                f"The DeepSpeed configuration has train_batch_size={whole}, which is not a multiple of {steps} "
                f"micro-batches x {known.world_size} processes. Change it, or the gradient accumulation steps.",
            )
        micro = 1 if whole is None else whole // share
    if whole is not None and whole != micro * share:
        raise ConfigurationError(
            f"The DeepSpeed configuration says train_batch_size={whole}, but train_micro_batch_size_per_gpu={micro} x "
            f"{steps} micro-batches x {known.world_size} processes is {micro * share}. Set only one of the two sizes.",
        )
    config["train_micro_batch_size_per_gpu"], config["train_batch_size"] = micro, micro * share


def _fill_precision(config: Config, known: Known) -> None:
    if known.precision is None:
        return
    name = known.precision.name
    wanted = _SECTIONS.get(name)
    for section, meaning in (("bf16", "bf16-true"), ("fp16", "fp16")):
        own = config.setdefault(section, {})
        enabled = own.get("enabled", AUTO)
        if enabled == AUTO:
            own["enabled"] = wanted == section
        elif bool(enabled) != (wanted == section):
            raise ConfigurationError(
                f"The DeepSpeed configuration says {section}.enabled={enabled}, but precision={name!r}. DeepSpeed's "
                f"{section} is precision={meaning!r}: weights in {section} with 32-bit master weights. "
                "precision='bf16' is autocast with 32-bit weights. Change one of the two, or set "
                '"enabled": "auto".',
            )
    autocast = config.get("torch_autocast")
    if autocast is None:
        return
    if autocast.get("enabled", False) == AUTO:
        autocast["enabled"] = name == "bf16"
    if autocast.get("enabled") and name != "bf16":
        raise ConfigurationError(
            f"The DeepSpeed configuration says torch_autocast.enabled=true, but precision={name!r}. Use "
            "precision='bf16', or disable torch_autocast.",
        )
    if autocast.get("dtype", AUTO) == AUTO:
        autocast["dtype"] = "bfloat16"


def _fill_zero(zero: Config, known: Known) -> None:
    size = _hidden_size(known.model)
    sized = {
        "reduce_bucket_size": size and size * size,
        "stage3_prefetch_bucket_size": size and int(0.9 * size * size),
        "stage3_param_persistence_threshold": size and 10 * size,
    }
    for key, value in list(zero.items()):
        if value != AUTO:
            continue
        if sized.get(key):
            zero[key] = sized[key]
        elif key == "stage":
            zero[key] = 2
        else:
            del zero[key]  # DeepSpeed's own default
    for key in ("offload_optimizer", "offload_param"):
        section = zero.get(key)
        if isinstance(section, dict):
            device = section.get("device", "none")
            if device in (AUTO, "none", None):
                del zero[key]
                continue
            if device not in DEVICES:
                raise ConfigurationError(
                    f"{key}: unknown device {device!r}. Allowed: {', '.join(DEVICES)}.{nearest(str(device), DEVICES)}",
                )
            for name in [name for name, value in section.items() if value == AUTO]:
                del section[name]
    if known.model is not None:
        # DeepSpeed allocates a full bucket on every process, 2 GB by default, which can exceed a small model.
        elements = sum(getattr(p, "ds_numel", p.numel()) for p in known.model.parameters())
        least = _SMALL_BUCKET_OF_3 if zero.get("stage") == 3 else _SMALL_BUCKET
        zero.setdefault("reduce_bucket_size", max(1, min(_BUCKET, elements, max(least, elements // 32))))


def _hidden_size(model: nn.Module | None) -> int | None:
    config: Any = getattr(model, "config", None)
    for owner in (config, getattr(config, "text_config", None)):
        size = getattr(owner, "hidden_size", None) or max(getattr(owner, "hidden_sizes", None) or [0])
        if isinstance(size, int) and size:
            return size
    return None


def _fill_optimizer(config: Config, known: Known) -> None:
    section = config.get("optimizer")
    if known.optimizer is None:
        return
    dummy = known.optimizer if isinstance(known.optimizer, DummyOptim) else None
    if section is None:
        if dummy is not None:
            raise ConfigurationError(
                "DummyOptim is a placeholder for the optimizer of the DeepSpeed configuration, which has none. Add "
                'an "optimizer" section to it, or create an optimizer such as torch.optim.AdamW.',
            )
        return
    if dummy is None:
        raise ConfigurationError(
            f"The DeepSpeed configuration defines the optimizer {section.get('type')!r}, but a "
            f'{type(known.optimizer).__name__} was created too. Remove the "optimizer" section, or use '
            "DummyOptim(parameters) instead of the optimizer.",
        )
    options = section.setdefault("params", {})
    given = {"lr": dummy.lr, "weight_decay": dummy.weight_decay, **dummy.kwargs}
    _fill_from(options, given)


def _fill_scheduler(config: Config, known: Known) -> None:
    section, dummy = config.get("scheduler"), known.scheduler
    if section is None:
        if dummy is not None and dummy.lr_scheduler_callable is None:
            raise ConfigurationError(
                "DummyScheduler is a placeholder for the scheduler of the DeepSpeed configuration, which has none. "
                'Add a "scheduler" section to it, pass lr_scheduler_callable, or create a scheduler.',
            )
        return
    if known.optimizer is None:
        return
    lr = known.optimizer.param_groups[0].get("lr")
    given: Config = {"warmup_min_lr": 0.0, "warmup_max_lr": lr}
    if dummy is not None:
        given["warmup_num_steps"] = dummy.warmup_num_steps
        given |= dummy.kwargs
        if dummy.total_num_steps is not None:
            given["total_num_steps"] = dummy.total_num_steps
    _fill_from(section.setdefault("params", {}), given)


def _fill_from(options: Config, given: Mapping[str, Any]) -> None:
    for key, value in list(options.items()):
        if value != AUTO:
            continue
        if key in given:
            options[key] = given[key]
        elif key in ("betas", "eps"):
            del options[key]  # the optimizer's own default


def _autos(value: Any, path: str = "") -> list[str]:
    if value == AUTO and isinstance(value, str):
        return [path]
    if isinstance(value, Mapping):
        return [found for key, item in value.items() for found in _autos(item, f"{path}.{key}" if path else str(key))]
    return []


# The strategy's arguments as DeepSpeed's configuration


def build_config(
    given: Mapping[str, Any] | str | os.PathLike[str] | None,
    stage: int | None,
    offload: Mapping[str, str | Mapping[str, Any] | None],
    nvme_path: str | os.PathLike[str] | None,
    general: Mapping[str, Any],
    zero_options: Mapping[str, Any],
) -> tuple[Config, int]:
    # `given` is the user's configuration. The other arguments are options of `DeepSpeed`, which must not contradict it.
    # The ZeRO stage is also returned.
    config = read_config(given)
    zero = config.setdefault("zero_optimization", {})
    _set_option(zero, "zero_optimization.stage", "stage", stage)
    found = stage_of(config)
    if found is None:
        found = zero["stage"] = 2
    if found not in STAGES:
        raise ConfigurationError(f"stage={found!r} is not a ZeRO stage. Allowed: {', '.join(map(str, STAGES))}.")
    for key, value in offload.items():
        _set_option(zero, f"zero_optimization.{key}", key, _offload(key, value, nvme_path))
    for key, value in zero_options.items():
        _set_option(zero, f"zero_optimization.{key}", key, value)
    for key, value in general.items():
        _set_option(config, key, key, value)
    if _device(zero.get("offload_param")) not in ("none", AUTO) and found != 3:
        raise ConfigurationError(
            f"offload_param needs stage=3, because other stages do not shard parameters, but this is stage {found}."
        )
    if _device(zero.get("offload_optimizer")) not in ("none", AUTO) and found == 0:
        raise ConfigurationError("offload_optimizer needs stage 1, 2 or 3, because stage 0 shards nothing.")
    return config, found


def check_zero_options(config: Config) -> None:
    """Raise an error if `zero_optimization` has a key that DeepSpeed does not know."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields
    allowed = {*fields, *(field.alias for field in fields.values() if field.alias)}
    for key in config["zero_optimization"]:
        if key not in allowed:
            raise ConfigurationError(
                f"DeepSpeed has no zero_optimization option {key!r}.{nearest(key, allowed)} Allowed: "
                f"{', '.join(sorted(allowed))}.",
            )


# Advice for sections that DeepSpeed rejects
_INSTEAD = {
    "compile": "To compile the model, use Trainer(compile=...) or Accelerator(dynamo_backend=...).",
}
# Too common in messages to name a key.
_COMMON = ("device", "enabled", "params", "type")


@contextmanager
def explain_rejection(config: Config) -> Iterator[None]:
    """Context manager that makes DeepSpeed's configuration errors readable.

    It raises a `ConfigurationError` of one line. The message has the key and DeepSpeed's words. Errors from outside
    DeepSpeed, torch and pydantic are not changed, nor are those of a resource, such as memory.
    """
    try:
        yield
    except (ConfigurationError, OSError):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
            raise
        frames = traceback.walk_tb(error.__traceback__)
        packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames]
        origin = [package for package in packages if package not in sys.stdlib_module_names][-1]
        path = _rejected_key(config)
        if path is None and origin not in ("deepspeed", "torch"):
            raise
        details: Any = getattr(error, "errors", None)  # pydantic's
        if callable(details):
            words = "; ".join(
                ": ".join([*filter(None, [".".join(map(str, each["loc"]))]), each["msg"]]) for each in details()
            )
        else:
            words = str(error) or f"{type(error).__name__} at `{traceback.extract_tb(error.__traceback__)[-1].line}`"
        path = path or ", ".join(_keys_in(words, config)) or "a value"
        raise ConfigurationError(
            f"DeepSpeed {importlib.import_module('deepspeed').__version__} rejects {path} in the DeepSpeed "
            f"configuration: {' '.join(words.split()).rstrip('.')}. Change or remove it. "
            f"{_INSTEAD.get(path.partition('.')[0], '')}".rstrip()
        ) from error


def _rejected_key(config: Config) -> str | None:
    from deepspeed import DeepSpeedConfig

    def is_read(given: Config) -> bool:
        try:
            DeepSpeedConfig(copy.deepcopy(given))
        except Exception:
            return False
        return True

    if is_read(config):
        return None
    for key, section in config.items():
        others = {other: value for other, value in config.items() if other != key}
        if is_read(others):
            for name in section if isinstance(section, Mapping) else ():
                if is_read({**others, key: {other: value for other, value in section.items() if other != name}}):
                    return f"{key}.{name}"
            return key
    return None


def _keys_in(words: str, config: Any, path: str = "") -> list[str]:
    found = []
    for key, value in config.items():
        here = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            found += _keys_in(words, value, here)
            continue
        names = [key, *(value if isinstance(value, list) else [value])]
        texts = [name for name in names if isinstance(name, str) and name and name not in _COMMON]
        if any(re.search(rf"\b{re.escape(text)}\b", words) for text in texts):
            found.append(here)
    return found


def uses_nvme(config: Config) -> bool:
    """Return True if parameters or optimizer state are offloaded to NVMe."""
    zero = config["zero_optimization"]
    return any(_device(zero.get(key)) == "nvme" for key in ("offload_optimizer", "offload_param"))


def _set_option(target: dict[str, Any], path: str, argument: str, value: Any) -> None:
    # `argument` is the user's argument for the option, for the error message.
    if value is None:
        return
    key = path.rpartition(".")[2]
    here = target.get(key)
    if here not in (None, AUTO) and here != value:
        raise ConfigurationError(
            f"The DeepSpeed configuration says {path}={here!r}, but {argument}={value!r}. Set only one of the two."
        )
    target[key] = value


def _offload(
    key: str, given: str | Mapping[str, Any] | None, nvme_path: str | os.PathLike[str] | None
) -> dict[str, Any] | None:
    if given is None or given == "none":
        return None
    section = {"device": given} if isinstance(given, str) else dict(given)
    device = section.get("device")
    if device not in DEVICES:
        raise ConfigurationError(
            f"{key}={given!r}: unknown device {device!r}. Allowed: {', '.join(DEVICES)}."
            f"{nearest(str(device), DEVICES)}",
        )
    if device == "nvme":
        if nvme_path is not None:
            section.setdefault("nvme_path", os.fspath(nvme_path))
        if section.get("nvme_path") is None:
            raise ConfigurationError(f"{key}='nvme' needs a folder, such as nvme_path='/local_nvme'.")
    return section


def _device(section: Any) -> str:
    return str(section.get("device", "none")) if isinstance(section, Mapping) else "none"


# One DeepSpeed configuration with what belongs to it; a strategy may hold several


@dataclass
class Settings:
    """DeepSpeed configuration of a `DeepSpeed` strategy, and the strategy's options that are not part of it.

    Attributes:
        config: The configuration, in which `"auto"` values are not yet filled in.
        stage: The ZeRO stage.
        zero_init: True to shard parameters while a model is constructed.
        moe_layers: Module classes, or their names, whose parameters ZeRO-3 gathers together.
        shards_frozen: True to shard models without an optimizer too.
    """

    config: Config
    stage: int
    zero_init: bool = False
    moe_layers: Sequence[str | type[nn.Module]] = field(default_factory=list)
    shards_frozen: bool = False

    @property
    def clipping(self) -> float | None:
        return clipping_of(self.config)

    @property
    def without_training(self) -> Config:
        # For models that are only evaluated.
        return {key: value for key, value in self.config.items() if key not in ("optimizer", "scheduler")}
