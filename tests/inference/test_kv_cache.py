"""The memory of key-value caches: the formulas, and what transformers' caches hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain import ConfigurationError
from drivetrain.inference.model_size import kv_cache_values, read_config

GPT2 = {"n_layer": 3, "n_head": 4, "n_embd": 64}
LLAMA = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
T5 = {"is_encoder_decoder": True, "num_layers": 5, "num_decoder_layers": 3, "num_heads": 4, "d_kv": 8, "d_model": 64}


@pytest.mark.parametrize(
    ("config", "values"),
    [
        pytest.param(GPT2, 2 * 3 * 64 * 10 * 2, id="every head"),
        pytest.param(LLAMA, 2 * 3 * 32 * 10 * 2, id="fewer heads for keys and values"),
        pytest.param(LLAMA | {"head_dim": 32}, 2 * 3 * 64 * 10 * 2, id="a head of its own width"),
        pytest.param(GPT2 | {"multi_query": True}, 2 * 3 * 16 * 10 * 2, id="one head"),
        pytest.param(LLAMA | {"sliding_window": 4}, 2 * 3 * 32 * 4 * 2, id="a window"),
        pytest.param(LLAMA | {"sliding_window": 4, "use_sliding_window": False}, 2 * 3 * 32 * 10 * 2, id="unused"),
        pytest.param(
            LLAMA | {"sliding_window": 4, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
            2 * 32 * (4 + 4 + 10) * 2,
            id="windows in some layers",
        ),
        pytest.param(LLAMA | {"kv_lora_rank": 16, "qk_rope_head_dim": 8}, 3 * 24 * 10 * 2, id="compressed"),
        pytest.param({"text_config": LLAMA, "hidden_size": 5}, 2 * 3 * 32 * 10 * 2, id="of images and text"),
        pytest.param(T5, 2 * 2 * 3 * 32 * 10 * 2, id="encoder and decoder"),
    ],
)
def test_values_of_two_sequences_of_ten_positions(config: dict[str, Any], values: int) -> None:
    assert kv_cache_values(config, batch=2, seq=10) == values


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("GPT2LMHeadModel", GPT2 | {"vocab_size": 20, "n_positions": 16}),
        ("LlamaForCausalLM", LLAMA | {"vocab_size": 20, "intermediate_size": 16}),
        ("MistralForCausalLM", LLAMA | {"vocab_size": 20, "intermediate_size": 16, "sliding_window": 64}),
        (
            "T5ForConditionalGeneration",
            {key: T5[key] for key in T5 if key != "is_encoder_decoder"} | {"vocab_size": 20},
        ),
    ],
)
def test_caches_of_transformers_hold_as_much(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")
    import torch

    model = getattr(transformers, name)
    model = model(model.config_class(**config)).eval()
    tokens = torch.zeros(2, 10, dtype=torch.long)
    inputs = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    cache = model(tokens, **inputs, use_cache=True).past_key_values
    parts = [cache.self_attention_cache, cache.cross_attention_cache] if model.config.is_encoder_decoder else [cache]
    held = sum(layer.keys.numel() + layer.values.numel() for part in parts for layer in part.layers)
    model.config.save_pretrained(tmp_path)
    assert kv_cache_values(read_config(str(tmp_path)), batch=2, seq=10) == held


def test_what_is_no_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"needs a transformers model's config.json"):
        read_config("tests.cli.models:Tagger")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="is not JSON"):
        read_config(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigurationError, match="is not a JSON object"):
        read_config(str(tmp_path / "config.json"))
    with pytest.raises(ConfigurationError, match="num_hidden_layers"):
        kv_cache_values({"hidden_size": 4}, 1, 1)
