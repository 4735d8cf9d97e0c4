"""DeepSpeed's own configuration: the user's, with what the loop was given filled in, and contradictions named."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.strategies.base import Given
from drivetrain.strategies.capabilities import ConfiguredPrecision
from drivetrain.strategies.deepspeed.dummies import DummyOptim, DummyScheduler
from drivetrain.strategies.precision import Precision, resolve_precision

Config = dict[str, Any]
AUTO = "auto"
STAGES = (0, 1, 2, 3)
DEVICES = ("none", "cpu", "nvme")

_BUCKET = 500_000_000  # elements
# A model of fewer elements is reduced at once. ZeRO-3 has work for each bucket that a small one does not pay for.
_SMALL_BUCKET, _SMALL_BUCKET_OF_3 = 2**18, 2**24

_PRECISIONS = {"bf16": "bf16-true", "fp16": "fp16", "torch_autocast": "bf16"}
# which precision asks for which part of a configuration
_SECTIONS = {"bf16-true": "bf16", "fp16": "fp16", "fp16-true": "fp16"}


def read_config(given: Mapping[str, Any] | str | os.PathLike[str] | None) -> Config:
    """A configuration as a dict of its own.

    Args:
        given: A dict, the path of a JSON file, JSON text, or None.

    Raises:
        ConfigurationError: It is none of them.
    """
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
            f"config={text!r} is no DeepSpeed configuration that can be read: {error.strerror}. Give the path of a "
            "JSON file, or a dict.",
            code="DT-010",
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"config={text!r} is not JSON: {error}.", code="DT-011") from error
    if not isinstance(found, dict):
        raise ConfigurationError(
            f"config={text!r} holds a {type(found).__name__}; a DeepSpeed configuration is a dict.", code="DT-011"
        )
    return _normalised(found)


def _normalised(config: Config) -> Config:
    """Bring older and other spellings of a precision's section to those that are read here."""
    if "bfloat16" in config:
        config.setdefault("bf16", config.pop("bfloat16"))
    for name in _PRECISIONS:
        section = config.get(name)
        if isinstance(section, dict) and str(section.get("enabled")).lower() in ("true", "false"):
            section["enabled"] = str(section["enabled"]).lower() == "true"
    return config


@dataclass
class Known:
    """What the loop, the model and the optimizer give, for `"auto"` and for contradictions.

    Attributes:
        world_size: Processes.
        precision: The number formats; None before they are known.
        given: By the configuration's name, the argument of the same meaning, and its value.
        optimizer: The user's optimizer; None before it is known.
        scheduler: What stands for the configuration's scheduler.
        model: The model; None before it is known.
    """

    world_size: int
    precision: Precision | None = None
    given: dict[str, Given] = field(default_factory=dict)
    optimizer: Optimizer | None = None
    scheduler: DummyScheduler | None = None
    model: nn.Module | None = None


def complete(config: Config, known: Known) -> Config:
    """Fill what is `"auto"` or missing, and refuse what contradicts the loop.

    Returns:
        A configuration that DeepSpeed takes.

    Raises:
        ConfigurationError: Two values contradict each other; both are named.
    """
    done = copy.deepcopy(config)
    _fill_given(done, known)
    _fill_batch(done, known)
    _fill_precision(done, known)
    _fill_zero(done.setdefault("zero_optimization", {}), known)
    _fill_optimizer(done, known)
    _fill_scheduler(done, known)
    done.setdefault("zero_allow_untested_optimizer", True)
    done.setdefault("zero_force_ds_cpu_optimizer", False)
    left = sorted(_autos(done))
    if left:
        raise ConfigurationError(
            f"The DeepSpeed configuration says 'auto' for {', '.join(left)}, which nothing here decides. Give values.",
            code="DT-056",
        )
    return done


def stage_of(config: Mapping[str, Any]) -> int | None:
    """The ZeRO stage that a configuration names."""
    found = config.get("zero_optimization", {}).get("stage")
    return None if found is None or found == AUTO else int(found)


def precision_of(config: Mapping[str, Any]) -> str | None:
    """Return the name of the precision that a configuration switches on; None if it decides none, or several."""
    switched = [meaning for section, meaning in _PRECISIONS.items() if config.get(section, {}).get("enabled") is True]
    return switched[0] if len(switched) == 1 else None


class OwnPrecision(ConfiguredPrecision):
    """The precision of a configuration.

    Args:
        config: The configuration.
    """

    # Of weights in low precision beside 32-bit ones.
    _NAMES: ClassVar[dict[str, str]] = {"32": "no", "bf16-true": "bf16", "fp16-true": "fp16"}

    def __init__(self, config: Config) -> None:
        self._config = config

    def choose(self, given: str | Precision | None) -> str | Precision | None:
        """Return the configuration's precision if none was given, or the same one by its other name."""
        own = precision_of(self._config)
        if own is None or given is None:
            return own or given
        return own if self._NAMES.get(own) == resolve_precision(given).name else given

    def accelerate_name(self, precision: Precision) -> str:
        """Return DeepSpeed's name of a precision, which is also Accelerate's."""
        return self._NAMES.get(precision.name, precision.name)


def clipping_of(config: Mapping[str, Any]) -> float | None:
    """The norm that a configuration clips to, if it does."""
    found = config.get("gradient_clipping")
    return float(found) if isinstance(found, int | float) and found > 0 else None


def _fill_given(config: Config, known: Known) -> None:
    for key, (argument, value) in known.given.items():
        here = config.get(key)
        if here in (None, AUTO):
            config[key] = value
        elif value is not None and float(here) != float(value):
            raise ConfigurationError(
                f"The DeepSpeed configuration says {key}={here}, but {argument.removesuffix(')')}={value}). Give the "
                f'same, or "{key}": "auto".',
                code="DT-055",
            )
    for key, default in (("gradient_accumulation_steps", 1), ("gradient_clipping", 0.0)):
        if config.get(key) in (None, AUTO):
            config[key] = default


def _fill_batch(config: Config, known: Known) -> None:
    """Batch sizes, which DeepSpeed only counts samples with; the loaders decide them."""
    micro, whole = config.get("train_micro_batch_size_per_gpu"), config.get("train_batch_size")
    steps = config["gradient_accumulation_steps"]
    share = steps * known.world_size
    micro = None if micro == AUTO else micro
    whole = None if whole == AUTO else whole
    if micro is None:
        if whole is not None and whole % share:
            raise ConfigurationError(
                f"The DeepSpeed configuration says train_batch_size={whole}, which {steps} micro-batches on "
                f"{known.world_size} processes do not divide.",
                code="DT-042",
            )
        micro = 1 if whole is None else whole // share
    if whole is not None and whole != micro * share:
        raise ConfigurationError(
            f"The DeepSpeed configuration says train_batch_size={whole}, but train_micro_batch_size_per_gpu={micro} x "
            f"{steps} micro-batches x {known.world_size} processes are {micro * share}.",
            code="DT-055",
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
                f"{section}, which keeps the weights in {section} beside 32-bit master weights, is "
                f"precision={meaning!r} here, and precision='bf16' is autocast over 32-bit weights. Give the one that "
                'is meant, or "enabled": "auto".',
                code="DT-055",
            )
    if not config["fp16"]["enabled"]:
        config["fp16"] = {"enabled": False}  # scale options are "auto" even where nothing is scaled
    autocast = config.get("torch_autocast")
    if autocast is None:
        return
    if autocast.get("enabled", False) == AUTO:
        autocast["enabled"] = name == "bf16"
    if autocast.get("enabled") and name != "bf16":
        raise ConfigurationError(
            f"The DeepSpeed configuration says torch_autocast.enabled=true, but precision={name!r}. Give "
            "precision='bf16'.",
            code="DT-055",
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
                    code="DT-001",
                )
            for name in [name for name, value in section.items() if value == AUTO]:
                del section[name]
    if known.model is not None:
        # DeepSpeed allocates it whole on every process, 2 GB by default: as much as it spreads, for a small model.
        elements = sum(getattr(p, "ds_numel", p.numel()) for p in known.model.parameters())
        least = _SMALL_BUCKET_OF_3 if zero.get("stage") == 3 else _SMALL_BUCKET
        zero.setdefault("reduce_bucket_size", max(1, min(_BUCKET, elements, max(least, elements // 32))))


def _hidden_size(model: nn.Module | None) -> int | None:
    """The width of a transformer, as the configuration of a Hugging Face model has it."""
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
                "DummyOptim stands for the optimizer of the DeepSpeed configuration, which has none. Add an "
                '"optimizer" section to it, or build an optimizer such as torch.optim.AdamW.',
                code="DT-056",
            )
        return
    if dummy is None:
        raise ConfigurationError(
            f"The DeepSpeed configuration defines the optimizer {section.get('type')!r}, but a "
            f'{type(known.optimizer).__name__} was built too. Remove the "optimizer" section, or give '
            "DummyOptim(parameters) in place of the optimizer.",
            code="DT-055",
        )
    options = section.setdefault("params", {})
    given = {"lr": dummy.lr, "weight_decay": dummy.weight_decay, **dummy.kwargs}
    _fill_from(options, given)


def _fill_scheduler(config: Config, known: Known) -> None:
    section, dummy = config.get("scheduler"), known.scheduler
    if section is None:
        if dummy is not None and dummy.lr_scheduler_callable is None:
            raise ConfigurationError(
                "DummyScheduler stands for the scheduler of the DeepSpeed configuration, which has none. Add a "
                '"scheduler" section to it, give lr_scheduler_callable, or build a scheduler.',
                code="DT-056",
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
