"""Where the value of each setting comes from: a flag, the environment, a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.launch.settings.environment import settings_of_launch
from drivetrain.launch.settings.file import CONFIG_FILE_VARIABLE, default_config_file, read_config
from drivetrain.launch.settings.table import ALTERNATIVES, GROUPS, SETTINGS
from drivetrain.runtime.errors import ConfigurationError, nearest


@dataclass(frozen=True)
class Given:
    """A value of a setting.

    Args:
        value: The value.
        source: What gave it, such as `"flag --num_processes"`.
    """

    value: Any
    source: str


def collect(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    config_file: str | None = None,
    job: Mapping[str, Any] | None = None,
) -> dict[str, Given]:
    """The settings that are in force: a flag wins over the environment, that over a job, and that over a file.

    Args:
        flags: Values by name of setting; None is not given.
        environ: Environment variables.
        config_file: A configuration file; the user's own if None and it is there.
        job: What follows from a scheduler's job: a file is written for one machine, before there is a job.

    Raises:
        ConfigurationError: A value cannot be, or a flag has no effect without another.
    """
    from_flags = {}
    for name, value in flags.items():
        flag = SETTINGS[name].flag
        parsed = SETTINGS[name].parse(value, flag) if value is not None else None
        if parsed is not None:
            from_flags[name] = Given(parsed, f"flag {flag}")
    from_environment = {
        name: Given(value, f"environment {variable}") for name, (value, variable) in settings_of_launch(environ).items()
    }
    file = find_config_file(config_file, environ)
    from_file = (
        {name: Given(_beside(file, name, value), f"file {file}") for name, value in read_config(file).items()}
        if file
        else {}
    )
    from_job = {name: Given(value, "the SLURM job") for name, value in (job or {}).items()}
    merged = merge((_with_endpoint(from_flags), from_environment, from_job, from_file))
    for name, given in merged.items():
        group = GROUPS.get(SETTINGS[name].group)
        switch = group.switch if group is not None else ""
        if name in from_flags and switch and (switch not in merged or not merged[switch].value):
            raise ConfigurationError(
                f"--{name} {given.value} has no effect without --{switch}. Add that flag, or leave --{name} out.",
                code="DT-005",
            )
    if "ray_address" in from_flags and ("launcher" not in merged or merged["launcher"].value != "ray"):
        raise ConfigurationError(
            "--ray_address has no effect without --launcher ray. Add that flag, or leave --ray_address out.",
            code="DT-005",
        )
    return merged


def _beside(file: Path, name: str, value: Any) -> Any:
    """Return a value of a configuration file; a path that is not here is looked up beside the file."""
    if name == "deepspeed_config_file" and not Path(value).expanduser().exists():
        found = file.parent / value
        return str(found) if found.exists() else value
    return value


def find_config_file(named: str | None, environ: Mapping[str, str]) -> Path | None:
    """The configuration file in force: the one named, else the user's own if it is there.

    A file that a flag or `DRIVETRAIN_CONFIG_FILE` names is returned even where it does not exist, so that reading it
    reports so.
    """
    if named is not None:
        return Path(named).expanduser()
    file = default_config_file(environ)
    return file if environ.get(CONFIG_FILE_VARIABLE) or file.is_file() else None


def merge(sources: Iterable[Mapping[str, Given]]) -> dict[str, Given]:
    """Merge sources, the strongest first.

    Raises:
        ConfigurationError: There is no setting of some name.
    """
    merged: dict[str, Given] = {}
    for source in sources:
        chosen = {name for name, given in merged.items() if given.value}
        taken = {other for names in ALTERNATIVES if chosen & {*names} for other in names}
        taken |= {"gpu_ids"} if "cpu" in chosen else {"cpu"} if "gpu_ids" in chosen else set()
        for name, given in source.items():
            if name not in SETTINGS:
                raise ConfigurationError(
                    f"There is no launch option {name!r}.{nearest(name, SETTINGS)} "
                    f"Allowed: {', '.join(sorted(SETTINGS))}.",
                    code="DT-006",
                )
            if given.value is not None and name not in taken:
                merged.setdefault(name, given)
    return merged


def _with_endpoint(flags: dict[str, Given]) -> dict[str, Given]:
    """The flags with `--rdzv_endpoint` taken apart into an address and a port."""
    given = flags.get("rdzv_endpoint")
    if given is None:
        return flags
    address, _, port = given.value.rpartition(":") if ":" in given.value else (given.value, "", "")
    if not address or (port and not port.isdigit()):
        raise ConfigurationError(
            f"--rdzv_endpoint={given.value!r}: give an address and a port, such as 10.0.0.1:29500.", code="DT-007"
        )
    rest = {name: value for name, value in flags.items() if name != "rdzv_endpoint"}
    for name, value in (("main_process_ip", address), ("main_process_port", int(port) if port else None)):
        if value is not None and rest.setdefault(name, Given(value, given.source)).value != value:
            raise ConfigurationError(
                f"--rdzv_endpoint={given.value!r} contradicts --{name}. Give one of the two.", code="DT-004"
            )
    return rest
