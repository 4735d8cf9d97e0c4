"""The data sets that Lightning's examples train on, under its names."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from drivetrain import ConfigurationError
from drivetrain.compat.lightning.pytorch.demos import LightningTransformer, WikiText2
from drivetrain.compat.lightning.pytorch.demos.boring_classes import Net
from drivetrain.compat.lightning.pytorch.demos.mnist_datamodule import MNIST
from drivetrain.compat.lightning.pytorch.utilities.model_helpers import get_torchvision_model


def test_a_text_is_read_in_blocks_and_the_words_after_each(tmp_path: Path) -> None:
    (tmp_path / "wikitext-2.txt").write_text("to be or\n\nnot to be\n")
    text = WikiText2(tmp_path, block_size=3)
    words = [text.dictionary.idx2word[number] for number in text.data]
    assert words == ["to", "be", "or", "<eos>", "<eos>", "not", "to", "be", "<eos>"]
    assert [[block.tolist() for block in text[number]] for number in range(len(text))] == [
        [[0, 1, 2], [1, 2, 3]],
        [[3, 3, 4], [3, 4, 0]],
    ]
    assert text.vocab_size == 5


def test_the_language_model_predicts_the_words_after_each(tmp_path: Path) -> None:
    (tmp_path / "wikitext-2.txt").write_text("to be or not to be\n" * 4)
    text = WikiText2(tmp_path, block_size=3)
    module = LightningTransformer(text.vocab_size).eval()
    inputs, target = (each[None] for each in text[0])
    log_probabilities = module(inputs, target)
    expected = -log_probabilities[range(3), target[0]].mean()
    assert torch.allclose(module.training_step((inputs, target), 0), expected)


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")
def test_the_small_network_gives_probabilities_of_ten_classes() -> None:
    network = Net().eval()
    assert [name for name, _ in network.named_children()] == ["conv1", "conv2", "dropout1", "dropout2", "fc1", "fc2"]
    found = network(torch.randn(2, 1, 28, 28))
    torch.testing.assert_close(found.exp().sum(1), torch.ones(2))
    assert found.shape == (2, 10)


def test_what_needs_torchvision_names_the_install_line(tmp_path: Path) -> None:
    for call in (lambda: MNIST(str(tmp_path)), lambda: get_torchvision_model("resnet18")):
        with pytest.raises(ConfigurationError, match='pip install "torchvision"'):
            call()
