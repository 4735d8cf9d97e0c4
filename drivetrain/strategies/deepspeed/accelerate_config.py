"""Accelerate's `deepspeed_config`: its keys, as `accelerate config` writes them, as arguments of `DeepSpeed`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.logging import get_logger

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
# What chooses how DeepSpeed's own launcher finds machines: torch's agent is used here.
_LAUNCHER = (
    "deepspeed_exclusion_filter",
    "deepspeed_hostfile",
    "deepspeed_inclusion_filter",
    "deepspeed_multinode_launcher",
)


def arguments_from(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `DeepSpeed` that keys of Accelerate's `deepspeed_config` mean.

    Raises:
        ConfigurationError: There is no such key.
    """
    for key in given:
        if key not in KEYS:
            raise ConfigurationError(
                f"Unknown key {key!r} in deepspeed_config. Allowed: {', '.join(KEYS)}.{nearest(key, KEYS)}",
                code="DT-006",
            )
    idle = sorted(key for key in _LAUNCHER if given.get(key) not in (None, "", "standard", "pdsh"))
    if idle:
        _log.warning_once(
            f"{', '.join(idle)}: these choose machines for DeepSpeed's own launcher and mean nothing here; start the "
            "processes with `drivetrain launch --num_machines ... --machine_rank ...`, or srun."
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
    for key, name in (
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
        ("gradient_clipping", "gradient_clipping"),
    ):
        value = given.get(key)
        if value not in (None, "auto", "none"):
            arguments[name] = float(value) if key == "gradient_clipping" else int(value)
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
    raise ConfigurationError(f"{key}={value!r}: give true or false.", code="DT-001")
