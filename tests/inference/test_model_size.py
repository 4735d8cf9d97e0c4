"""Models whose sizes are read without their weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain import ConfigurationError
from drivetrain.inference.model_size import read_model, size_of_module


def test_a_config_of_transformers_is_built_without_its_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100, n_positions=16)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    expected = sum(p.numel() for p in transformers.GPT2LMHeadModel(config).parameters())
    size = size_of_module(read_model(str(tmp_path / "config.json"), {}))
    assert size.parameters == expected


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 16)
    with pytest.raises(ConfigurationError, match="not a safetensors file"):
        read_model(str(tmp_path), {})
