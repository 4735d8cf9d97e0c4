"""The memory of a key-value cache, from what a model's config.json gives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.runtime.errors import ConfigurationError

# What configurations call the same thing.
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "key_value_heads": ("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num"),
    "width": ("hidden_size", "n_embd", "d_model", "dim"),
    "head_width": ("head_dim", "d_kv", "kv_channels"),
}


def read_config(source: str) -> Mapping[str, Any]:
    """The config.json that a path names, or that is in its folder.

    Raises:
        ConfigurationError: There is none, or it is no JSON object.
    """
    path = Path(source)
    config = path / "config.json" if path.is_dir() else path
    if config.suffix != ".json" or not config.is_file():
        raise ConfigurationError(
            f"--seq needs the config.json of a transformers model or its folder; got {source!r}.", code="DT-131"
        )
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{config} is no JSON: {error}.", code="DT-011") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{config} holds no JSON object.", code="DT-011")
    return found


def kv_cache_values(config: Mapping[str, Any], batch: int, seq: int) -> int:
    """How many values the cache of a decoder holds: a key and a value for each layer, head, position and sequence.

    Layers with a sliding window keep no more positions than it has; an encoder-decoder keeps those of its encoder too,
    taken as long as the decoder's. Layers that keep a state instead of a cache (Mamba) count like the others.

    Args:
        config: The configuration.
        batch: Sequences at a time.
        seq: Positions of each.

    Raises:
        ConfigurationError: It lacks the sizes of the attention.
    """
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, Mapping) else config
    layers = _given(config, "layers")
    if config.get("is_encoder_decoder"):
        layers = int(config.get("num_decoder_layers") or config.get("decoder_layers") or layers)
        heads = int(config.get("decoder_attention_heads") or _given(config, "heads"))
        width = _given(config, "head_width", required=False) or _given(config, "width") // heads
        return 2 * 2 * layers * heads * width * seq * batch
    if "kv_lora_rank" in config:  # one compressed vector for keys and values, and the part with positions
        return layers * int(config["kv_lora_rank"] + config.get("qk_rope_head_dim", 0)) * seq * batch
    heads = _given(config, "heads")
    shared = 1 if config.get("multi_query") else _given(config, "key_value_heads", required=False) or heads
    width = _given(config, "head_width", required=False) or _given(config, "width") // heads
    return sum(2 * shared * width * positions for positions in _positions(config, layers, seq)) * batch


def _positions(config: Mapping[str, Any], layers: int, seq: int) -> list[int]:
    """How many positions each layer keeps."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return [seq] * layers
    kinds = config.get("layer_types") or ["sliding_attention"] * layers
    return [min(seq, window) if kind == "sliding_attention" else seq for kind in kinds[:layers]]


def _given(config: Mapping[str, Any], what: str, required: bool = True) -> int:
    for name in _NAMES[what]:
        if config.get(name):
            return int(config[name])
    if required:
        raise ConfigurationError(
            f"The configuration gives none of {', '.join(_NAMES[what])}, so the key-value cache cannot be counted.",
            code="DT-011",
        )
    return 0
