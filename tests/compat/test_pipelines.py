"""Models of transformers spread over two processes for inference: the same as on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pool import run_in_processes

SMALL = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 32, "n_layer": 4, "n_head": 2, "vocab_size": 99}),
    "LlamaForCausalLM": ("LlamaConfig", {**SMALL, "num_key_value_heads": 2, "vocab_size": 99}),
    "BertForSequenceClassification": ("BertConfig", {**SMALL, "vocab_size": 99}),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4, "vocab_size": 99},
    ),
    "BartForConditionalGeneration": (
        "BartConfig",
        {"d_model": 32, "vocab_size": 99, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 16}
        | {
            f"{part}_{key}": n
            for part in ("encoder", "decoder")
            for key, n in (("ffn_dim", 64), ("attention_heads", 2))
        },
    ),
    "ViTForImageClassification": ("ViTConfig", {**SMALL, "image_size": 32, "patch_size": 8}),
}


# Registered after the blocks, and used before them.
PLACED = {"BartForConditionalGeneration": {"model.decoder.layernorm_embedding": 0}}


def built(name: str) -> Any:
    import transformers

    config, options = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**options)).eval()


def inputs(name: str, rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name.startswith("ViT"):
        return {"pixel_values": torch.randn(rows, 3, 32, 32, generator=generator)}
    tokens = torch.randint(1, 99, (rows, 7), generator=generator)
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return {**given, "decoder_input_ids": tokens[:, :3]} if name.endswith("ConditionalGeneration") else given


def spread() -> dict[str, list[Tensor]]:
    from drivetrain.compat.accelerate import prepare_pippy

    found = {}
    for name in MODELS:
        model = prepare_pippy(built(name), gather_output=True, pp_place=PLACED.get(name))
        found[name] = [model(**inputs(name, rows)).logits for rows in (5, 1, 2)]
    return found


@pytest.mark.compat
@pytest.mark.timeout(240)
def test_a_model_over_two_processes_computes_what_one_does() -> None:
    ranks = run_in_processes(spread, 2, timeout=200)
    for name in MODELS:
        model = built(name)
        for number, rows in enumerate((5, 1, 2)):
            whole = inputs(name, rows)
            with torch.no_grad():
                parts = [
                    model(**{key: value.tensor_split(min(2, rows))[part] for key, value in whole.items()}).logits
                    for part in range(min(2, rows))
                ]
            assert all(torch.equal(rank[name][number], torch.cat(parts)) for rank in ranks), (name, rows)
