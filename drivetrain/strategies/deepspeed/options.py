"""The strategy's arguments as DeepSpeed's configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.strategies.deepspeed.config import AUTO, DEVICES, STAGES, Config, read_config, stage_of


def build_config(
    given: Mapping[str, Any] | str | os.PathLike[str] | None,
    stage: int | None,
    offload: Mapping[str, str | Mapping[str, Any] | None],
    nvme_path: str | os.PathLike[str] | None,
    general: Mapping[str, Any],
    zero_options: Mapping[str, Any],
) -> tuple[Config, int]:
    """Put arguments into the user's configuration.

    Args:
        given: The configuration.
        stage: The ZeRO stage; the configuration's if None, else 2.
        offload: By `offload_optimizer` and `offload_param`, where to.
        nvme_path: The folder for NVMe.
        general: Further top-level values.
        zero_options: Further values of the section `zero_optimization`.

    Returns:
        The configuration, and its stage.

    Raises:
        ConfigurationError: An argument contradicts the configuration, or cannot be.
    """
    config = read_config(given)
    zero = config.setdefault("zero_optimization", {})
    _add(zero, "zero_optimization.stage", "stage", stage)
    found = stage_of(config)
    if found is None:
        found = zero["stage"] = 2
    if found not in STAGES:
        raise ConfigurationError(f"stage={found!r}: allowed are {', '.join(map(str, STAGES))}.", code="DT-001")
    for key, value in offload.items():
        _add(zero, f"zero_optimization.{key}", key, _offload(key, value, nvme_path))
    for key, value in zero_options.items():
        _add(zero, f"zero_optimization.{key}", key, value)
    for key, value in general.items():
        _add(config, key, key, value)
    if _device(zero.get("offload_param")) not in ("none", AUTO) and found != 3:
        raise ConfigurationError(
            f"offload_param needs stage=3, which is where parameters are spread; this is stage {found}.", code="DT-005"
        )
    if _device(zero.get("offload_optimizer")) not in ("none", AUTO) and found == 0:
        raise ConfigurationError(
            "offload_optimizer needs stage 1, 2 or 3; at stage 0 nothing is spread.", code="DT-005"
        )
    return config, found


def check_zero_options(config: Config) -> None:
    """Refuse names in `zero_optimization` that the installed DeepSpeed does not have.

    Raises:
        ConfigurationError: Names the nearest one.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields
    allowed = {*fields, *(field.alias for field in fields.values() if field.alias)}
    for key in config["zero_optimization"]:
        if key not in allowed:
            raise ConfigurationError(
                f"DeepSpeed has no zero_optimization option {key!r}.{nearest(key, allowed)} Allowed: "
                f"{', '.join(sorted(allowed))}.",
                code="DT-006",
            )


def uses_nvme(config: Config) -> bool:
    """Whether anything is offloaded to NVMe."""
    zero = config["zero_optimization"]
    return any(_device(zero.get(key)) == "nvme" for key in ("offload_optimizer", "offload_param"))


def _add(target: dict[str, Any], path: str, argument: str, value: Any) -> None:
    """Put an argument's value into the configuration, unless that has another value."""
    if value is None:
        return
    key = path.rpartition(".")[2]
    here = target.get(key)
    if here not in (None, AUTO) and here != value:
        raise ConfigurationError(
            f"The DeepSpeed configuration says {path}={here!r}, but {argument}={value!r}. Give one.", code="DT-055"
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
            code="DT-001",
        )
    if device == "nvme":
        if nvme_path is not None:
            section.setdefault("nvme_path", os.fspath(nvme_path))
        if section.get("nvme_path") is None:
            raise ConfigurationError(f"{key}='nvme' needs a folder: nvme_path='/local_nvme'.", code="DT-005")
    return section


def _device(section: Any) -> str:
    return str(section.get("device", "none")) if isinstance(section, Mapping) else "none"
