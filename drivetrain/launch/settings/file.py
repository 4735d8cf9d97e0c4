"""Configuration files: YAML or JSON as `accelerate config` writes it, of any version, and what is written for both."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.launch.settings.processes import TOP
from drivetrain.launch.settings.setting import Setting
from drivetrain.launch.settings.sharding import check_grid
from drivetrain.launch.settings.table import GROUPS, SETTINGS
from drivetrain.runtime.errors import ConfigurationError, nearest

CONFIG_FILE_VARIABLE = "DRIVETRAIN_CONFIG_FILE"
_MULTI = ("GPU", "CPU", "XPU", "HPU", "NPU", "MLU", "SDAA", "MUSA", "NEURON")
DISTRIBUTED_TYPES = (
    "NO",
    *(f"MULTI_{kind}" for kind in _MULTI),
    *("FSDP", "DEEPSPEED", "MEGATRON_LM", "TP", "XLA", "TPU", "MPS"),
)
_SWITCH_OF = {"FSDP": "use_fsdp", "DEEPSPEED": "use_deepspeed", "MEGATRON_LM": "use_megatron_lm"}
_KINDS = {"MULTI_CPU": "cpu", "XLA": "tpu", "TPU": "tpu"}
_TOP_KEYS = {key: setting for setting in TOP for key in (setting.name, *setting.keys)}
# What only a file has, and what files of older versions had.
_TYPE = Setting("distributed_type", "What the processes are for.", "choice", choices=DISTRIBUTED_TYPES)
_PLACE = Setting(
    "compute_environment", "Where.", "choice", choices=("LOCAL_MACHINE", "AMAZON_SAGEMAKER", "CUSTOM_CLUSTER")
)
_FP16 = Setting("fp16", "Older: mixed_precision.", "bool")
_OLD_GROUPS: dict[str, dict[str, Setting | None]] = {
    "ipex_config": {"ipex": None, "use_xpu": None},  # torch has taken over what that extension did
    "tp_config": {"tp_size": SETTINGS["parallelism_config_tp_size"]},
}
KEYS = (*_TOP_KEYS, *GROUPS, *_OLD_GROUPS, _TYPE.name, _PLACE.name, _FP16.name, "dynamo_backend")


def default_config_file(environ: Mapping[str, str] | None = None) -> Path:
    """Where the configuration is unless a file is named: `DRIVETRAIN_CONFIG_FILE`, else in the user's folder."""
    variables = os.environ if environ is None else environ
    named = variables.get(CONFIG_FILE_VARIABLE)
    if named:
        return Path(named).expanduser()
    home = variables.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "drivetrain" / "default_config.yaml"


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a configuration file.

    Args:
        path: YAML, or JSON where the name ends in `.json`.

    Returns:
        Values by name of setting.

    Raises:
        ConfigurationError: There is no such file, it cannot be read, a key is unknown, or a value cannot be. The
            message names the file and the key.
    """
    given = _load(Path(path))
    return settings_of(given, str(path))


def settings_of(given: Any, where: str) -> dict[str, Any]:
    """The settings in the mapping that a configuration file holds.

    Args:
        given: The mapping.
        where: The file, for messages.

    Raises:
        ConfigurationError: As with `read_config`.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"{where} holds {type(given).__name__}, but must be a mapping of keys to values.", code="DT-003"
        )
    reader = _Reader(where)
    for key, value in given.items():
        reader.read(key, value)
    reader.settle()
    return reader.found


class _Reader:
    """Takes a file's keys one by one.

    Args:
        where: The file, for messages.

    Attributes:
        found: Values by name of setting.
    """

    def __init__(self, where: str) -> None:
        self.found: dict[str, Any] = {}
        self._where = where
        self._type: str | None = None
        self._half = False

    def read(self, key: Any, value: Any) -> None:
        """Take one key of the top."""
        if key in GROUPS or key in _OLD_GROUPS:
            self._read_group(key, value)
        elif key == _TYPE.name:
            self._type = _TYPE.parse(value, self._place(key))
        elif key == _PLACE.name:
            if _PLACE.parse(value, self._place(key)) == "AMAZON_SAGEMAKER":
                raise ConfigurationError(f"{self._place(key)}: {SETTINGS['aws_access_key_id'].refused}", code="DT-008")
        elif key == _FP16.name:
            self._half = bool(_FP16.parse(value, self._place(key)))
        elif key == "dynamo_backend":
            self._take(SETTINGS[key], value, self._place(key))
        elif isinstance(key, str) and key in _TOP_KEYS:
            if key == "num_processes" and value in (-1, "-1"):
                value = None  # what Accelerate writes where the number was not given
            self._take(_TOP_KEYS[key], value, self._place(key))
        else:
            self._refuse_key(key)

    def settle(self) -> None:
        """Turn what only files have into settings."""
        found, kind = self.found, self._type
        if self._half:
            found.setdefault("mixed_precision", "fp16")
        check_grid(found, f"parallelism_config_sp_size in {self._where}")
        if any(SETTINGS[name].group == "parallelism_config" for name in found):
            found["use_parallelism_config"] = True
        if kind in _SWITCH_OF:
            found[_SWITCH_OF[kind]] = True
        elif kind in _KINDS:
            found[_KINDS[kind]] = True
        elif kind is not None and kind.startswith("MULTI_"):
            found["multi_gpu"] = True
        elif kind == "NO":
            found.setdefault("num_processes", 1)
        if found.get("cpu") and found.get("multi_gpu"):
            raise ConfigurationError(
                f"{self._where} has distributed_type: {kind}, but also use_cpu: true. Leave use_cpu out, or give "
                "distributed_type: MULTI_CPU.",
                code="DT-133",
            )
        if found.get("cpu"):
            found.pop("gpu_ids", None)

    def _read_group(self, name: str, value: Any) -> None:
        if value is None:
            return
        if not isinstance(value, Mapping):
            raise ConfigurationError(
                f"{self._place(name)} holds {type(value).__name__}, but must be a mapping of keys to values.",
                code="DT-003",
            )
        keys: Mapping[str, Setting | None] = GROUPS[name].keys() if name in GROUPS else _OLD_GROUPS[name]
        for key, each in value.items():
            if not isinstance(key, str) or key not in keys:
                raise ConfigurationError(
                    f"Unknown key {key!r} in {name} of {self._where}. Allowed: {', '.join(sorted(keys))}."
                    f"{nearest(str(key), keys)}",
                    code="DT-006",
                )
            setting = keys[key]
            if setting is not None:
                self._take(setting, each, f"{key} in {name} of {self._where}")

    def _take(self, setting: Setting, value: Any, place: str) -> None:
        parsed = setting.parse(value, place)
        if parsed is None:
            return
        if self.found.get(setting.name, parsed) != parsed:
            raise ConfigurationError(
                f"{place} is {parsed!r}, but the file gives {setting.name} as {self.found[setting.name]!r} too, in "
                "another spelling. Give one.",
                code="DT-133",
            )
        self.found[setting.name] = parsed

    def _refuse_key(self, key: Any) -> None:
        inside = SETTINGS.get(key) if isinstance(key, str) else None
        if inside is not None and inside.group:
            raise ConfigurationError(
                f"{key!r} in {self._where} belongs under {inside.group}. Move it there.", code="DT-133"
            )
        raise ConfigurationError(
            f"Unknown key {key!r} in {self._where}.{nearest(str(key), KEYS)} Allowed: {', '.join(sorted(set(KEYS)))}.",
            code="DT-006",
        )

    def _place(self, key: str) -> str:
        return f"{key} in {self._where}"


def config_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping that a configuration file holds, for drivetrain and for Accelerate.

    Args:
        values: Values by name of setting.
    """
    kind = next((kind for kind, switch in _SWITCH_OF.items() if values.get(switch)), None)
    if kind is None:
        devices = {"cpu": "MULTI_CPU", "multi_gpu": "MULTI_GPU", "tpu": "XLA"}
        kind = next((type_ for name, type_ in devices.items() if values.get(name)), "NO")
    if kind == "MULTI_CPU" and values.get("num_processes", 1) == 1:
        kind = "NO"
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": "no",
        "use_cpu": bool(values.get("cpu")),
        "debug": False,
        "num_machines": 1,
        "machine_rank": 0,
    }
    left_out = (*_SWITCH_OF.values(), "use_parallelism_config", "cpu", "multi_gpu", "tpu")
    groups: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        setting = SETTINGS[name]
        if value is None or name in left_out:
            continue
        if name == "gradient_accumulation_steps" and kind == "DEEPSPEED":
            groups.setdefault("deepspeed_config", {})[name] = value
        elif setting.group:
            groups.setdefault(setting.group, {})[_file_key(setting)] = _written(setting, value)
        else:
            config[name] = int(value) if name == "num_machines" and str(value).isdigit() else value
    return {**dict(sorted(config.items())), **dict(sorted(groups.items()))}


def write_config(path: Path, values: Mapping[str, Any]) -> None:
    """Write a configuration file; one that is there is replaced at once.

    Raises:
        ConfigurationError: It cannot be written there.
    """
    import yaml

    text = yaml.safe_dump(config_of(values), sort_keys=False, allow_unicode=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be written: {error}. Name another file with --config_file.", code="DT-010"
        ) from None


def _file_key(setting: Setting) -> str:
    return "backend" if setting.name == "fp8_backend" else setting.name


def _written(setting: Setting, value: Any) -> Any:
    """A value as Accelerate expects it in a file."""
    if setting.kind == "words":
        return ",".join(value)
    if setting.name in ("fp8_backend", "dynamo_backend"):
        return value.upper()
    if setting.name in ("fsdp_version", "zero_stage"):
        return int(value)
    if setting.name == "fsdp_reshard_after_forward" and value in ("true", "false"):
        return value == "true"
    return value


def _load(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        folder = path.parent if path.parent.is_dir() else Path()
        beside = [str(each) for pattern in ("*.yaml", "*.yml", "*.json") for each in folder.glob(pattern)]
        raise ConfigurationError(
            f"There is no configuration file {str(path)!r}.{nearest(str(path), beside)} Write one with "
            "`drivetrain config`, or name another with --config_file.",
            code="DT-010",
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}", code="DT-010") from None
    import json

    import yaml

    from drivetrain.runtime.yaml_text import load_yaml

    try:
        return json.loads(text) if path.suffix == ".json" else load_yaml(text)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigurationError(f"{path} is not {kind}: {reason[:300]}.", code="DT-011") from None
