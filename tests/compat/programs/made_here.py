"""A small model, tokenizer and text made in place, and where a program writes its losses: no hub is asked."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def report(values: dict[str, float]) -> None:
    """Write what was measured, on the first process, for the test to compare."""
    if os.environ.get("RANK", "0") == "0":
        Path(os.environ["COMPAT_RESULT"]).write_text(json.dumps(values))


_KEPT: list[object] = []


def keep(*objects: object) -> None:
    """Hold what a program is done with to its end: to destroy a DDP model beside another one may wait for ever."""
    _KEPT.extend(objects)


def options() -> list[str]:
    """What the program is asked for."""
    return sys.argv[1:]


def folder() -> str:
    """Where the program may write; the same on all processes."""
    return os.environ["COMPAT_FOLDER"]


def words(count: int = 64) -> list[str]:
    """Short texts, always the same."""
    nouns = ("cat", "dog", "bird", "fish", "tree", "stone", "river", "cloud")
    verbs = ("sees", "hears", "follows", "finds", "leaves")
    return [
        f"the {nouns[i % 8]} {verbs[i % 5]} the {nouns[(3 * i + 1) % 8]} near the {nouns[(5 * i) % 8]}"
        for i in range(count)
    ]


def tokenizer():
    """A tokenizer of whole words, built from the texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(["<pad>", "<unk>", "<s>", "</s>"])}
    for text in words():
        for word in text.split():
            vocabulary.setdefault(word, len(vocabulary))
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def sentences(first: int, last: int) -> list[dict]:
    """Encoded texts with labels that can be learned from them."""
    encode = tokenizer()
    nouns = ("cat", "dog", "bird", "fish")
    return [{**encode(text), "labels": int(text.split()[1] in nouns)} for text in words(last)[first:]]


def loaders(batch_size: int = 8, last: int = 48, drop_last: bool = False):
    """Loaders of batches that are padded to their longest text: one to train on, shuffled, and one to evaluate on."""
    from torch.utils.data import DataLoader

    encode = tokenizer()

    def collate(rows):
        return encode.pad(rows, padding="longest", return_tensors="pt")

    train = DataLoader(sentences(0, 32), shuffle=True, collate_fn=collate, batch_size=batch_size, drop_last=drop_last)
    return train, DataLoader(sentences(32, last), shuffle=False, collate_fn=collate, batch_size=6)


def classifier(seed: int = 0, positions: int = 32):
    """A BERT with one layer that tells two kinds of text apart; without dropout unless it is in training mode."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=positions,
        pad_token_id=0,
    )
    return BertForSequenceClassification(config)


def language_model(seed: int = 0):
    """A causal language model with two layers, its weights drawn from the seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
    )
    return LlamaForCausalLM(config)
