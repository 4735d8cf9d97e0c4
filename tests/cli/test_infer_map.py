"""`drivetrain infer-map`: device maps for machines that need not be there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drivetrain import ConfigurationError
from tests.cli import models
from tests.commands import drivetrain

MODEL = ("tests.cli.models:Tagger", "--kwargs", '{"width": 64, "layers": 6}')


def run(*arguments: str) -> str:
    ended = drivetrain("infer-map", *arguments)
    assert ended.exit_code == 0, ended.output
    return ended.output


def test_a_model_is_spread_over_devices_in_whole_blocks() -> None:
    found = json.loads(run(*MODEL, "--device", "500KB", "--device", "500KB", "--json"))
    blocks = {name: device for name, device in found.items() if name.startswith("blocks.")}
    assert set(found.values()) == {0, 1}
    assert sorted(blocks) == [f"blocks.{number}" for number in range(6)]


def test_what_does_not_fit_goes_to_the_cpu_then_to_the_disk(tmp_path: Path) -> None:
    page = tmp_path / "map.html"
    printed = run(*MODEL, "--device", "300KB", "--cpu", "300KB", "--html", str(page))
    assert [line.split()[0] for line in printed.splitlines()[2:5]] == ["0", "cpu", "disk"]
    assert "no room to prefetch a block" in printed
    assert page.read_text().count('role="img"') == 3


def test_a_dtype_and_a_named_map_count() -> None:
    options = ("--device", "1MB", "--device", "1MB")
    assert set(json.loads(run(*MODEL, *options, "--json")).values()) == {0}
    assert set(json.loads(run(*MODEL, *options, "--map", "balanced", "--json")).values()) == {0, 1}
    assert set(json.loads(run(*MODEL, "--device", "220KB", "--dtype", "int8", "--json")).values()) == {0}


def test_files_of_weights_are_placed_by_the_names_of_their_tensors(tmp_path: Path) -> None:
    weights = {f"layers.{number}.{part}.weight": torch.zeros(10, 10) for number in range(11) for part in ("up", "down")}
    save_file(weights | {"embed.weight": torch.zeros(20, 10), "scale": torch.zeros(10)}, tmp_path / "model.safetensors")
    size = 22 * 400 + 800 + 40
    found = json.loads(run(str(tmp_path), "--device", f"{size // 2 + 900}B", "--device", f"{size // 2}B", "--json"))
    layers = [found[f"layers.{number}"] for number in range(11)]
    assert layers == sorted(layers)
    assert set(layers) == {0, 1}
    assert sum(device == 1 for device in layers) in (5, 6)


def test_a_config_of_transformers_is_placed_with_its_ties(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")
    config = transformers.GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=100, n_positions=16)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    found = json.loads(run(str(tmp_path / "config.json"), "--device", "150KB", "--device", "150KB", "--json"))
    assert found["lm_head"] == found["transformer.wte"]
    assert {found[f"transformer.h.{number}"] for number in range(4)} == {0, 1}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((*MODEL, "--device", "10KB"), "are missing"),
        ((*MODEL, "--device", "24 parsecs"), "'24 parsecs' is not a size"),
        (("tests.cli.models:Taggr", "--device", "1GB"), "'Tagger'"),
        ((*MODEL[:1], "--kwargs", "[1]", "--device", "1GB"), "must be a JSON object"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[str, ...], named: str) -> None:
    assert models.Tagger.__name__ == "Tagger"
    with pytest.raises(ConfigurationError, match=named):
        drivetrain("infer-map", *arguments)
