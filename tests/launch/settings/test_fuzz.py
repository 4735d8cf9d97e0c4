"""Whatever a file or a command line holds, it is taken or refused by name, and never with a traceback."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drivetrain import ConfigurationError
from drivetrain.cli.launch import launch
from drivetrain.launch import LaunchOptions
from drivetrain.launch.options import GROUPS, SETTINGS
from drivetrain.launch.settings.sources import collect, settings_in_environment, settings_of
from tests.launch.settings.test_file import FILES, TOP

FILE = "fuzzed.yaml"
EMPTY = os.devnull  # a configuration file that holds nothing
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**12),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["auto", "none", "NO", "true", "1e8", "-1", "\0", "0:0", ",", "1:2", "inf", "nan"]),
    st.lists(st.integers() | st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)
KEYS = st.one_of(
    st.sampled_from(
        [*SETTINGS, *GROUPS, "fp16", "ipex_config", "tp_config", "distributed_type", "compute_environment"]
    ),
    st.text(max_size=12),
    st.integers(),
    st.none(),
)


def names_something_of(message: str, config: Any) -> bool:
    """Whether a message names a key or a value that the file holds, or the file."""
    if isinstance(config, dict):
        return any(str(key or "?") in message or names_something_of(message, value) for key, value in config.items())
    return False


@st.composite
def mutated(draw: st.DrawFn) -> dict[Any, Any]:
    """A file of Accelerate's in which some keys are others, some are gone, and some have odd values."""
    config: dict[Any, Any] = yaml.safe_load(TOP) | yaml.safe_load(FILES[draw(st.sampled_from(list(FILES)))][0])
    for _ in range(draw(st.integers(1, 4))):
        mappings = [config, *(value for value in config.values() if isinstance(value, dict))]
        target = mappings[draw(st.integers(0, len(mappings) - 1))]
        key = draw(st.sampled_from(list(target))) if target and draw(st.booleans()) else draw(KEYS)
        match draw(st.sampled_from(["value", "value", "misspelled", "gone"])):
            case "value":
                target[key] = draw(ODD)
            case "misspelled" if isinstance(key, str) and key in target:
                place = draw(st.integers(0, len(key)))
                target[key[:place] + draw(st.sampled_from(["", "x", "_"])) + key[place + 1 :]] = target.pop(key)
            case _:
                target.pop(key, None)
    return config


def check_file(config: dict[Any, Any]) -> None:
    """Take a mutated file as the launcher would, and hand what it means to a process."""
    message = None
    try:
        variables = LaunchOptions.from_sources(settings_of(yaml.safe_load(yaml.safe_dump(config)), FILE)).variables
        assert all(isinstance(value, str) and "\0" not in value for value in variables.values())
        settings_in_environment(variables)
    except ConfigurationError as refused:
        message = str(refused)
    assert message is None or names_something_of(message, config), message


FLAGS = [f"--{name}" for name in SETTINGS] + [
    "-m",
    "-t",
    "--nnodes",
    "--num-processes",
    "--vm",
    "--bogus",
    "--num_proceses",
]
VALUES = st.one_of(
    st.text(max_size=6),
    st.sampled_from(
        ["2", "0", "-1", "true", "bf16", "bf61", "auto", "1:2", "cpu", "FULL_SHARD", "0,1", "10.0.0.1", "a=b"]
    ),
)


def check_flags(arguments: list[str]) -> None:
    """Take a command line as far as the script's start."""
    message = None
    names = [argument.split("=")[0].lstrip("-").replace("-", "_") for argument in arguments]
    names.append("SCRIPT")  # which a flag that lacks its value has taken
    try:
        with launch.make_context("launch", [*arguments, "script.py"]) as context:
            flags = {name: value for name, value in context.params.items() if name in SETTINGS and value != ()}
        options = LaunchOptions.from_given(collect(flags, {"DRIVETRAIN_CONFIG_FILE": EMPTY}))
        settings_in_environment(options.variables)
    except click.ClickException as refused:
        message = refused.format_message()
    except ConfigurationError as refused:
        message, names = str(refused), [*flags, *(SETTINGS[name].flag for name in flags)]
    assert message is None or any(name in message for name in names), message


def lists_of_flags() -> st.SearchStrategy[list[str]]:
    long = [flag for flag in FLAGS if flag.startswith("--")]
    pairs = st.tuples(st.sampled_from(long), VALUES).map(lambda pair: [f"{pair[0]}={pair[1]}"])
    alone = st.sampled_from(FLAGS).map(lambda flag: [flag])
    apart = st.tuples(st.sampled_from(FLAGS), VALUES).map(list)
    return st.lists(st.one_of(pairs, alone, apart), min_size=1, max_size=5).map(lambda parts: [*chain(*parts)])


QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
LONG = settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@QUICK
@given(mutated())
def test_a_mutated_file_is_taken_or_refused_by_name(config: dict[Any, Any]) -> None:
    check_file(config)


@QUICK
@given(lists_of_flags())
def test_a_mutated_command_line_is_taken_or_refused_by_name(arguments: list[str]) -> None:
    check_flags(arguments)


@pytest.mark.slow
@LONG
@given(mutated())
def test_2000_mutated_files_are_taken_or_refused_by_name(config: dict[Any, Any]) -> None:
    check_file(config)


@pytest.mark.slow
@LONG
@given(lists_of_flags())
def test_2000_mutated_command_lines_are_taken_or_refused_by_name(arguments: list[str]) -> None:
    check_flags(arguments)


@pytest.mark.slow
def test_a_file_of_scrambled_bytes_is_taken_or_refused_by_name(tmp_path: Path) -> None:
    from drivetrain.launch.settings.sources import read_config

    randomness = random.Random(0)
    path = tmp_path / FILE
    for _ in range(1000):
        data = bytearray((TOP + FILES[randomness.choice(list(FILES))][0]).encode())
        for _ in range(randomness.randint(1, 6)):
            data[randomness.randrange(len(data))] = randomness.randrange(256)
        path.write_bytes(data)
        with suppress(ConfigurationError):
            LaunchOptions.from_sources(read_config(path))
