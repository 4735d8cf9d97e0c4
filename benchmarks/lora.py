"""A Llama of transformers with LoRA adapters of peft, as litgpt fine-tunes it. benchmarks/plan.py plans it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Llama(nn.Module):
    """Llama whose query and value projections have adapters of rank 8, which alone are trained.

    Args:
        **config: Keywords of `LlamaConfig`.
    """

    def __init__(self, **config: Any) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        adapters = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["q_proj", "v_proj"])
        self.model = get_peft_model(LlamaForCausalLM(LlamaConfig(use_cache=False, **config)), adapters)
        self.config = self.model.config

    def forward(self, tokens: Tensor) -> Any:
        return self.model(input_ids=tokens, labels=tokens)
