"""Settings as environment variables: how a launcher passes them to the processes, drivetrain's or Accelerate's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from drivetrain.launch.settings.numbers import FP8_SETTINGS_OF
from drivetrain.launch.settings.setting import Setting
from drivetrain.launch.settings.table import GROUPS, SETTINGS

_SWITCHES = tuple(group.switch for group in GROUPS.values() if group.switch)
_NOT_GIVEN = ("", "none")
_FP8_OVERRIDES = tuple(f"ACCELERATE_FP8_OVERRIDE_{product}" for product in ("FPROP", "DGRAD", "WGRAD"))
_FSDP_VERSION = "FSDP_VERSION"
_VARIABLES = frozenset(
    {name for setting in SETTINGS.values() for name in (setting.variable, setting.theirs) if name}
    | {*_FP8_OVERRIDES, _FSDP_VERSION}
)


def settings_in_environment(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What the environment asks of this process: drivetrain's variables, then those of Accelerate's launcher.

    Args:
        environ: The variables; `os.environ` if None.

    Returns:
        Values by name of setting, those that are given.

    Raises:
        ConfigurationError: A variable's value cannot be; the message names the variable.
    """
    everything = os.environ if environ is None else environ
    # The environment is searched once rather than twice for each setting: each Accelerator asks for this several times.
    variables = {name: everything[name] for name in _VARIABLES.intersection(everything)}
    if not variables:
        return {}
    found: dict[str, Any] = {}
    for setting in SETTINGS.values():
        read = setting.variable is not None and not setting.of_launcher and not setting.inert
        given = variables.get(str(setting.variable)) if read else None
        if given is not None and (value := _parsed(setting, given, str(setting.variable))) is not None:
            found[setting.name] = value
    theirs = _theirs(variables)
    if any(found.get(switch) for switch in _SWITCHES):
        # The strategy is drivetrain's choice, so that of another launcher does not count.
        theirs = {name: value for name, value in theirs.items() if not _of_strategy(name)}
    return {**theirs, **found}


def settings_of_launch(environ: Mapping[str, str] | None = None) -> dict[str, tuple[Any, str]]:
    """What the environment asks of the launcher: values, each with its variable, by name of setting.

    Raises:
        ConfigurationError: A variable's value cannot be.
    """
    variables = os.environ if environ is None else environ
    found = {}
    for setting in SETTINGS.values():
        given = variables.get(setting.variable) if setting.variable else None
        if given is not None and (value := setting.parse(given, str(setting.variable))) is not None:
            found[setting.name] = (value, str(setting.variable))
    return found


def variables_of(values: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables through which settings reach the processes.

    Args:
        values: Values by name of setting; of a group whose switch is off, none is passed on.
    """
    variables = {}
    for name, value in values.items():
        setting = SETTINGS[name]
        switch = GROUPS[setting.group].switch if setting.group else ""
        if value is None or setting.variable is None or setting.of_launcher or setting.inert:
            continue
        if (switch and not values.get(switch)) or (setting.kind == "switch" and not value):
            continue
        variables[setting.variable] = setting.text(value)
    return variables


def _parsed(setting: Setting, given: str, variable: str) -> Any:
    if setting.name == "mixed_precision":
        return given or None  # by a name that the script may have registered: the registry checks it
    return setting.parse(given, variable)


def _of_strategy(name: str) -> bool:
    setting = SETTINGS[name]
    return name in _SWITCHES or bool(setting.group and GROUPS[setting.group].switch)


def _theirs(variables: Mapping[str, str]) -> dict[str, Any]:
    """What Accelerate's launcher has set, without the defaults that it sets beside what was asked for."""
    found: dict[str, Any] = {}
    for setting in SETTINGS.values():
        given = variables.get(setting.theirs, "") if setting.theirs and not setting.inert else ""
        if given.strip().lower() not in _NOT_GIVEN:
            value = setting.parse(given, str(setting.theirs))
            if value is not None:
                found[setting.name] = value
    if any(variables.get(name, "").lower() == "true" for name in _FP8_OVERRIDES):
        setting = SETTINGS["fp8_override_linear_precision"]
        flags = ",".join(variables.get(name, "false") for name in _FP8_OVERRIDES)
        found[setting.name] = setting.parse(flags, "ACCELERATE_FP8_OVERRIDE_FPROP")
    _settle_sharding(found, variables.get(_FSDP_VERSION, "1"))
    _settle_fp8(found)
    return found


def _settle_sharding(found: dict[str, Any], version: str) -> None:
    """Of the two ways to name how FSDP shards, both of which Accelerate always sets, keep the one that was chosen."""
    resharding = found.get("fsdp_reshard_after_forward")
    if resharding not in (None, "true", "false") or version.strip() == "2":
        found.pop("fsdp_sharding_strategy", None)
    else:
        found.pop("fsdp_reshard_after_forward", None)
    if found.get("fsdp_auto_wrap_policy") != "SIZE_BASED_WRAP":
        found.pop("fsdp_min_num_params", None)


def _settle_fp8(found: dict[str, Any]) -> None:
    """Keep the recipe of the backend in use: the others' are defaults."""
    backend = found.get("fp8_backend")
    for name in [name for name in found if name.startswith("fp8_") and name != "fp8_backend"]:
        if backend is not None and name not in FP8_SETTINGS_OF[backend]:
            del found[name]
