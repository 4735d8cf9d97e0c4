"""Conversion of an `fsdp_config` of version 1 or 2 into arguments of `FSDP`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.logging import get_logger

logger = get_logger(__name__)

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")

# key -> why it has no effect
_WITHOUT_MEANING = {
    "use_orig_params": "parameters are always the model's own",
    "state_dict_type": "checkpoints are always sharded and can be loaded under any layout, and exports are complete",
    "backward_prefetch": "the next unit is always gathered while one computes its backward (BACKWARD_PRE); "
    "FSDP(backward_prefetch=...) gathers further ahead",
    "version": "there is only one implementation, based on fully_shard",
    "limit_all_gathers": "the number of concurrent all-gathers is always limited",
}


def options_from(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the section `fsdp_config` of a launcher's YAML file to keyword arguments of `FSDP`."""
    given: dict[str, Any] = {}
    for key, value in config.items():
        short = str(key).removeprefix("fsdp_")
        if short not in _KNOWN:
            allowed = [f"fsdp_{name}" for name in _KNOWN]
            raise ConfigurationError(
                f"Unknown key {key!r} in fsdp_config. Allowed: {', '.join(sorted(allowed))}."
                f"{nearest(f'fsdp_{short}', allowed)}",
            )
        if value is not None:
            given[short] = value
    for key in sorted(set(given) & set(_WITHOUT_MEANING)):
        logger.warning_once(f"fsdp_{key}={given[key]!r} has no effect: {_WITHOUT_MEANING[key]}.")
    options: dict[str, Any] = {}
    for read in (_sharding, _wrapping, _the_rest):
        options |= read(given)
    return options


def _sharding(given: Mapping[str, Any]) -> dict[str, Any]:
    strategy = given.get("sharding_strategy")
    resharding = given.get("reshard_after_forward")
    # Version 2 files may hold the name of a version 1 strategy under `reshard_after_forward`.
    if isinstance(resharding, str) and resharding.upper() in _STRATEGIES:
        strategy, resharding = strategy or resharding, None
    options: dict[str, Any] = {}
    if strategy is not None:
        name = _choice("fsdp_sharding_strategy", strategy, _STRATEGIES)
        if name == "NO_SHARD":
            raise ConfigurationError(
                "fsdp_sharding_strategy=NO_SHARD shards nothing. Use strategy='ddp', which is equivalent and faster.",
            )
        options["reshard_after_forward"] = name in ("FULL_SHARD", "HYBRID_SHARD")
        if name.startswith("HYBRID"):
            environment = ProcessEnvironment.detect()
            # HYBRID shards within a machine, and keeps one copy of the model on each machine.
            options["replicate_size"] = max(1, environment.world_size // environment.local_world_size)
    if resharding is not None:
        options["reshard_after_forward"] = (
            resharding
            if isinstance(resharding, int) and not isinstance(resharding, bool)
            else _boolean("fsdp_reshard_after_forward", resharding)
        )
    return options


def _wrapping(given: Mapping[str, Any]) -> dict[str, Any]:
    classes = given.get("transformer_layer_cls_to_wrap")
    if isinstance(classes, str):
        classes = [name.strip() for name in classes.split(",") if name.strip()]
    least = given.get("min_num_params")
    policy = given.get("auto_wrap_policy")
    if policy is None:
        return {"wrap": classes} if classes else {}
    name = _choice("fsdp_auto_wrap_policy", policy, _POLICIES)
    if name == "NO_WRAP":
        return {"wrap": None}
    if name == "TRANSFORMER_BASED_WRAP":
        return {"wrap": classes or "auto"}
    if not least:
        raise ConfigurationError("fsdp_auto_wrap_policy=SIZE_BASED_WRAP requires fsdp_min_num_params.")
    return {"wrap": int(float(least))}


def _the_rest(given: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for key, name in (
        ("offload_params", "cpu_offload"),
        ("cpu_offload", "cpu_offload"),
        ("activation_checkpointing", "activation_checkpointing"),
        ("sync_module_states", "sync_module_states"),
    ):
        if key in given:
            options[name] = _boolean(f"fsdp_{key}", given[key])
    if "forward_prefetch" in given:
        # True stands for one unit in advance.
        options["forward_prefetch"] = int(_boolean("fsdp_forward_prefetch", given["forward_prefetch"]))
    if "cpu_ram_efficient_loading" in given:
        # The value is only validated: `init="rank0"`, the default, suits both values.
        _boolean("fsdp_cpu_ram_efficient_loading", given["cpu_ram_efficient_loading"])
        options["init"] = "rank0"
    if given.get("ignored_modules"):
        ignored = given["ignored_modules"]
        options["ignored_modules"] = [ignored] if isinstance(ignored, str) else ignored
    return options


def _choice(key: str, value: Any, allowed: tuple[str, ...]) -> str:
    # Older files give the choice as a number, counted from 1.
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= len(allowed):
        return allowed[value - 1]
    name = str(value).upper()
    if name.isdigit() and 1 <= int(name) <= len(allowed):
        return allowed[int(name) - 1]
    if name not in allowed:
        raise ConfigurationError(f"Invalid {key}={value!r}. Allowed: {', '.join(allowed)}.{nearest(name, allowed)}")
    return name


def _boolean(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if str(value).lower() not in known:
        raise ConfigurationError(f"{key}={value!r} is not supported. Use true or false.")
    return known[str(value).lower()]


_KNOWN = (
    "sharding_strategy",
    "reshard_after_forward",
    "auto_wrap_policy",
    "transformer_layer_cls_to_wrap",
    "min_num_params",
    "offload_params",
    "cpu_offload",
    "activation_checkpointing",
    "sync_module_states",
    "forward_prefetch",
    "cpu_ram_efficient_loading",
    "ignored_modules",
    *_WITHOUT_MEANING,
)
