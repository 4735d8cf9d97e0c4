"""YAML that damages or attacks its reader: every reader ends at once, with the reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from drivetrain import CheckpointError
from drivetrain.runtime.yaml_text import load_yaml
from drivetrain.trainer.hyper_parameters import hyper_parameters_in
from tests.commands import drivetrain

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghij", "bcdefghijk", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
HOSTILE = {
    "aliases that expand": (LAUGHS, "anchors expand to more than"),
    "merges that expand": (MERGES, "anchors expand to more than"),
    "an alias of itself": ("a: &a [*a]" + " " * 100, "anchor"),
    "too deep": ("[" * 5000, "nested too deeply"),
    "too deep in blocks": ("- " * 5000 + "x", "nested too deeply"),
    "no date": ("x: 2001-99-99", "cannot be read"),
    "a number without end": (f"x: {'9' * 5000}", "cannot be read"),
    "code": ("!!python/object/apply:os.mkdir [called]", "could not determine a constructor"),
}


@pytest.mark.parametrize(("text", "reason"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_yaml_ends_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(yaml.YAMLError, match=reason):
        load_yaml(text)


def test_aliases_of_ordinary_size_are_read() -> None:
    text = (
        "base: &base {lr: 0.1, betas: &betas [0.9, 0.99]}\nrun: {<<: *base, lr: 0.2, again: *betas}\n"
        + "# "
        + "x" * 100
    )
    assert load_yaml(text)["run"] == {"lr": 0.2, "betas": [0.9, 0.99], "again": [0.9, 0.99]}


def command(*args: str) -> Callable[[Path], str]:
    """A command that is given the file; its error, which the reason is in."""

    def run(file: Path) -> str:
        with pytest.raises(Exception) as found:
            drivetrain(*(file if each == "FILE" else each for each in args))
        return str(found.value)

    return run


def hparams_file(file: Path) -> str:
    with pytest.raises(CheckpointError) as found:
        hyper_parameters_in(file)
    return str(found.value)


def training_script(file: Path) -> str:
    from tests.trainer.cli.made import command as train

    with pytest.raises(SystemExit):
        train("fit", "--config", str(file))
    return ""


READERS: dict[str, Callable[[Path], Any]] = {
    "drivetrain launch": command("launch", "--config_file", "FILE", "train.py"),
    "drivetrain env": command("env", "--config_file", "FILE"),
    "drivetrain to-fsdp2": command("to-fsdp2", "--overwrite", "--config_file", "FILE"),
    "hparams_file": hparams_file,
    "--config": training_script,
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS.keys())
def test_every_reader_of_yaml_is_bounded(
    reader: Callable[[Path], str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("hostile.yaml")
    file.write_text(LAUGHS)
    said = reader(file)
    assert "anchors expand to more than" in said + capsys.readouterr().err
    assert os.listdir() == ["hostile.yaml"]
