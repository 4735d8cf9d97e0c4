"""Sources of launch settings: flags, environment variables, SLURM jobs and configuration files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.launch.options import GROUPS, SETTINGS, TOP, Given, merge
from drivetrain.launch.settings.setting import FP8_SETTINGS_OF, Setting, check_grid
from drivetrain.runtime.errors import ConfigurationError, nearest

# Environment variables


_SWITCHES = tuple(group.switch for group in GROUPS.values() if group.switch)
_NOT_GIVEN = ("", "none")
_FP8_OVERRIDES = tuple(f"ACCELERATE_FP8_OVERRIDE_{product}" for product in ("FPROP", "DGRAD", "WGRAD"))
_FSDP_VERSION = "FSDP_VERSION"
_VARIABLES = frozenset(
    {name for setting in SETTINGS.values() for name in (setting.variable, setting.theirs) if name}
    | {*_FP8_OVERRIDES, _FSDP_VERSION}
)


def settings_in_environment(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the launch settings that environment variables give."""
    everything = os.environ if environ is None else environ
    # Every Accelerator calls this several times, so search the environment once instead of twice per setting.
    variables = {name: everything[name] for name in _VARIABLES.intersection(everything)}
    if not variables:
        return {}
    found: dict[str, Any] = {}
    for setting in SETTINGS.values():
        read = setting.variable is not None and not setting.of_launcher and not setting.inert
        given = variables.get(str(setting.variable)) if read else None
        if given and setting.name == "mixed_precision":
            found[setting.name] = given  # not parsed here: the script may have registered a precision of this name
        elif given is not None and (value := setting.parse(given, str(setting.variable))) is not None:
            found[setting.name] = value
    theirs = _settings_of_other_launcher(variables)
    if any(found.get(switch) for switch in _SWITCHES):
        # If drivetrain's variables select a strategy, ignore the one that another launcher has selected.
        groups = {group.name for group in GROUPS.values() if group.switch}
        theirs = {
            name: value
            for name, value in theirs.items()
            if name not in _SWITCHES and SETTINGS[name].group not in groups
        }
    return {**theirs, **found}


def _settings_of_other_launcher(variables: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for setting in SETTINGS.values():
        given = variables.get(setting.theirs, "") if setting.theirs and not setting.inert else ""
        # Values that the other launcher writes in every launch are left out.
        if given.strip().lower() not in _NOT_GIVEN:
            value = setting.parse(given, str(setting.theirs))
            if value is not None:
                found[setting.name] = value
    if any(variables.get(name, "").lower() == "true" for name in _FP8_OVERRIDES):
        setting = SETTINGS["fp8_override_linear_precision"]
        flags = ",".join(variables.get(name, "false") for name in _FP8_OVERRIDES)
        found[setting.name] = setting.parse(flags, "ACCELERATE_FP8_OVERRIDE_FPROP")
    _keep_one_sharding_key(found, variables.get(_FSDP_VERSION, "1"))
    _keep_backend_settings(found)
    return found


def _keep_one_sharding_key(found: dict[str, Any], version: str) -> None:
    # The other launcher always sets one key for each version of FSDP.
    resharding = found.get("fsdp_reshard_after_forward")
    if resharding not in (None, "true", "false") or version.strip() == "2":
        found.pop("fsdp_sharding_strategy", None)
    else:
        found.pop("fsdp_reshard_after_forward", None)
    if found.get("fsdp_auto_wrap_policy") != "SIZE_BASED_WRAP":
        found.pop("fsdp_min_num_params", None)


def _keep_backend_settings(found: dict[str, Any]) -> None:
    backend = found.get("fp8_backend")
    for name in [name for name in found if name.startswith("fp8_") and name != "fp8_backend"]:
        if backend is not None and name not in FP8_SETTINGS_OF[backend]:
            del found[name]


# Configuration files


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
# Keys of configuration files without a flag, some of them of older versions.
_TYPE = Setting("distributed_type", "Kind of parallelism.", "choice", choices=DISTRIBUTED_TYPES)
_PLACE = Setting(
    "compute_environment",
    "Kind of machine.",
    "choice",
    choices=("LOCAL_MACHINE", "AMAZON_SAGEMAKER", "CUSTOM_CLUSTER"),
)
_FP16 = Setting("fp16", "Old name of mixed_precision.", "bool")
_OLD_GROUPS: dict[str, dict[str, Setting | None]] = {
    "ipex_config": {"ipex": None, "use_xpu": None},  # obsolete: torch includes the extension's features
    "tp_config": {"tp_size": SETTINGS["parallelism_config_tp_size"]},
}
KEYS = (*_TOP_KEYS, *GROUPS, *_OLD_GROUPS, _TYPE.name, _PLACE.name, _FP16.name, "dynamo_backend")


def default_config_file(environ: Mapping[str, str] | None = None) -> Path:
    """Return where the user's configuration file is expected, even if it does not exist."""
    variables = os.environ if environ is None else environ
    named = variables.get(CONFIG_FILE_VARIABLE)
    if named:
        return Path(named).expanduser()
    home = variables.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "drivetrain" / "default_config.yaml"


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    given = _load(Path(path))
    return settings_of(given, str(path))


def settings_of(given: Any, where: str) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{where} contains {type(given).__name__}, but must be a mapping of keys to values.")
    reader = _Reader(where)
    for key, value in given.items():
        reader.read(key, value)
    reader.settle()
    return reader.found


class _Reader:
    """Reader of a configuration file, which converts its keys to launch settings."""

    def __init__(self, where: str) -> None:
        self.found: dict[str, Any] = {}
        self._where = where
        self._type: str | None = None
        self._half = False

    def read(self, key: Any, value: Any) -> None:
        if key in GROUPS or key in _OLD_GROUPS:
            self._read_group(key, value)
        elif key == _TYPE.name:
            self._type = _TYPE.parse(value, self._place(key))
        elif key == _PLACE.name:
            if _PLACE.parse(value, self._place(key)) == "AMAZON_SAGEMAKER":
                raise ConfigurationError(f"{self._place(key)}: {SETTINGS['aws_access_key_id'].refused}")
        elif key == _FP16.name:
            self._half = bool(_FP16.parse(value, self._place(key)))
        elif key == "dynamo_backend":
            self._take(SETTINGS[key], value, self._place(key))
        elif isinstance(key, str) and key in _TOP_KEYS:
            if key == "num_processes" and value in (-1, "-1"):
                value = None  # files contain -1 if no number was given
            self._take(_TOP_KEYS[key], value, self._place(key))
        else:
            inside = SETTINGS.get(key) if isinstance(key, str) else None
            if inside is not None and inside.group:
                raise ConfigurationError(f"{key!r} in {self._where} belongs under {inside.group}. Move it there.")
            raise ConfigurationError(
                f"Unknown key {key!r} in {self._where}.{nearest(str(key), KEYS)} "
                f"Allowed: {', '.join(sorted(set(KEYS)))}.",
            )

    def settle(self) -> None:
        found, kind = self.found, self._type
        if self._half:
            found.setdefault("mixed_precision", "fp16")
        check_grid(found, f"parallelism_config_sp_size in {self._where}")
        # Files have no switch for the device mesh. Any of its keys switches it on.
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
                f"{self._where} has distributed_type: {kind}, but also use_cpu: true. Remove use_cpu, or set "
                "distributed_type: MULTI_CPU.",
            )
        # The ids have no effect on the CPU, and the check of the options would reject them.
        if found.get("cpu"):
            found.pop("gpu_ids", None)

    def _read_group(self, name: str, value: Any) -> None:
        if value is None:
            return
        if not isinstance(value, Mapping):
            raise ConfigurationError(
                f"{self._place(name)} is {type(value).__name__}, but must be a mapping of keys to values.",
            )
        keys: Mapping[str, Setting | None] = GROUPS[name].keys() if name in GROUPS else _OLD_GROUPS[name]
        for key, each in value.items():
            if not isinstance(key, str) or key not in keys:
                raise ConfigurationError(
                    f"Unknown key {key!r} in {name} of {self._where}. Allowed: {', '.join(sorted(keys))}."
                    f"{nearest(str(key), keys)}",
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
                f"{place} is {parsed!r}, but the file also sets {setting.name} to {self.found[setting.name]!r} under "
                "another key. Remove one of the two keys.",
            )
        self.found[setting.name] = parsed

    def _place(self, key: str) -> str:
        return f"{key} in {self._where}"


def config_of(values: Mapping[str, Any]) -> dict[str, Any]:
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
            key = "backend" if name == "fp8_backend" else name
            groups.setdefault(setting.group, {})[key] = _written(setting, value)
        else:
            config[name] = int(value) if name == "num_machines" and str(value).isdigit() else value
    return {**dict(sorted(config.items())), **dict(sorted(groups.items()))}


def write_config(path: Path, values: Mapping[str, Any]) -> None:
    import yaml

    text = yaml.safe_dump(config_of(values), sort_keys=False, allow_unicode=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Write a temporary file and rename it, so that an error leaves the old file intact.
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error}. Name another file with --config_file.") from None


def _written(setting: Setting, value: Any) -> Any:
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
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    import json

    import yaml

    from drivetrain.runtime.yaml_text import load_yaml

    try:
        return json.loads(text) if path.suffix == ".json" else load_yaml(text)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigurationError(f"{path} is not {kind}: {reason[:300]}.") from None


def collect(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    config_file: str | None = None,
    job: Mapping[str, Any] | None = None,
) -> dict[str, Given]:
    from_flags: dict[str, Given] = {}
    for name, value in flags.items():
        flag = SETTINGS[name].flag
        if value is not None and (parsed := SETTINGS[name].parse(value, flag)) is not None:
            from_flags[name] = Given(parsed, f"flag {flag}")
    if "rdzv_endpoint" in from_flags:
        _split_endpoint(from_flags)
    from_environment: dict[str, Given] = {}
    for setting in SETTINGS.values():
        text = environ.get(setting.variable) if setting.variable else None
        if text is not None and (parsed := setting.parse(text, str(setting.variable))) is not None:
            from_environment[setting.name] = Given(parsed, f"environment {setting.variable}")
    from_job = {name: Given(value, "the SLURM job") for name, value in (job or {}).items()}
    from_file: dict[str, Given] = {}
    if (file := find_config_file(config_file, environ)) is not None:
        for name, value in read_config(file).items():
            if name == "deepspeed_config_file" and not Path(value).expanduser().exists():
                # The path may be relative to the configuration file.
                beside = file.parent / value
                value = str(beside) if beside.exists() else value
            from_file[name] = Given(value, f"file {file}")
    # The first source that has a setting wins.
    merged = merge((from_flags, from_environment, from_job, from_file))
    for name, given in merged.items():
        group = GROUPS.get(SETTINGS[name].group)
        switch = group.switch if group is not None else ""
        if name in from_flags and switch and (switch not in merged or not merged[switch].value):
            raise ConfigurationError(
                f"--{name} {given.value} has no effect without --{switch}. Add --{switch}, or remove --{name}.",
            )
    if "ray_address" in from_flags and ("launcher" not in merged or merged["launcher"].value != "ray"):
        raise ConfigurationError(
            "--ray_address has no effect without --launcher ray. Add --launcher ray, or remove --ray_address.",
        )
    return merged


def find_config_file(named: str | None, environ: Mapping[str, str]) -> Path | None:
    """Return the configuration file that was named, or else the user's own, or None.

    A file that a flag or `DRIVETRAIN_CONFIG_FILE` names is returned even if it does not exist. Reading it then reports
    the error.
    """
    if named is not None:
        return Path(named).expanduser()
    file = default_config_file(environ)
    return file if environ.get(CONFIG_FILE_VARIABLE) or file.is_file() else None


def _split_endpoint(flags: dict[str, Given]) -> None:
    given = flags.pop("rdzv_endpoint")
    address, _, port = given.value.rpartition(":") if ":" in given.value else (given.value, "", "")
    if not address or (port and not port.isdigit()):
        raise ConfigurationError(
            f"--rdzv_endpoint is {given.value!r}, but must be an address and a port, such as 10.0.0.1:29500."
        )
    for name, value in (("main_process_ip", address), ("main_process_port", int(port) if port else None)):
        if value is not None and flags.setdefault(name, Given(value, given.source)).value != value:
            raise ConfigurationError(f"--rdzv_endpoint={given.value!r} contradicts --{name}. Use only one of them.")
