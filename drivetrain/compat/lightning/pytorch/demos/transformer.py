"""`Transformer`, a small language model, and `WikiText2`, its dataset, for examples."""

from __future__ import annotations

import math
import urllib.request
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from drivetrain.compat.lightning.pytorch.core.module import LightningModule

_TEXT = "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/train.txt"

SLOWEST = 10_000.0
"""The longest wave of a positional encoding, over 2 pi (https://arxiv.org/abs/1706.03762, section 3.5)."""


def sinusoids(position: int, size: int, like: Tensor) -> Tensor:
    """Return the sinusoidal encoding of positions: sines at even and cosines at odd indices."""
    # Not computed as a power of SLOWEST, because rounding would change the last bit of losses.
    rates = torch.exp(torch.arange(0, size, 2, device=like.device).float() * (-math.log(SLOWEST) / size))
    angles = position * rates
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten().to(like)


class PositionalEncoding(nn.Module):
    """Add positional encodings to embeddings, then apply dropout.

    Every token gets the encoding of the position after the sequence's last one. Lightning's demo module does the same,
    so losses of examples are equal.
    """

    def __init__(self, dim: int, dropout: float = 0.1, max_len: int = 5000) -> None:
        super().__init__()
        self.dim = dim
        self.max_len = max_len
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return embeddings plus positional encodings, after dropout."""
        tokens = x.shape[1]
        if tokens >= self.max_len:
            raise IndexError(f"Sequences of {tokens} tokens: PositionalEncoding(max_len={self.max_len}) takes fewer.")
        added: Tensor = self.dropout(x + sinusoids(tokens, self.dim, like=x))
        return added


class Transformer(nn.Module):
    """A small encoder-decoder language model over `torch.nn.Transformer`.

    The decoder's attention is causal. The encoder attends to all input tokens.
    """

    def __init__(
        self,
        vocab_size: int = 33278,
        ninp: int = 200,
        nhead: int = 2,
        nhid: int = 200,
        nlayers: int = 2,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.ninp = ninp
        # The order determines each part's initial random values, and so the losses of seeded examples.
        self.embedding = nn.Embedding(vocab_size, ninp)
        self.transformer = nn.Transformer(ninp, nhead, nlayers, nlayers, nhid, dropout, batch_first=True)
        self.decoder = nn.Linear(ninp, vocab_size)
        self.pos_encoder = PositionalEncoding(ninp, dropout)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return token embeddings with positional encodings."""
        scaled = self.embedding(tokens).mul(math.sqrt(self.ninp))
        placed: Tensor = self.pos_encoder(scaled)
        return placed

    def forward(self, inputs: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return log probabilities, one row per token of all sequences."""
        if mask is None:
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        hidden = self.transformer(self.embed(inputs), self.embed(target), tgt_mask=mask)
        scores: Tensor = self.decoder(hidden).flatten(end_dim=1)
        return scores.log_softmax(dim=1)


class Dictionary:
    """Mapping between words and indices, which are assigned in order of first occurrence.

    Attributes:
        word2idx: Index of each word.
        idx2word: Words in the order of their indices.
    """

    def __init__(self) -> None:
        self.word2idx: dict[str, int] = {}
        self.idx2word: list[str] = []

    def add_word(self, word: str) -> int:
        """Return the index of a word. Adds the word if it is new."""
        if word not in self.word2idx:
            self.word2idx[word] = len(self.idx2word)
            self.idx2word.append(word)
        return self.word2idx[word]

    def __len__(self) -> int:
        return len(self.idx2word)


class WikiText2(Dataset[tuple[Tensor, Tensor]]):
    """Dataset of text blocks. The target is the block shifted by one word."""

    def __init__(self, data_dir: Path = Path("./data"), block_size: int = 35, download: bool = True) -> None:
        self.path = Path(data_dir) / "wikitext-2.txt"
        if download:
            self.download(self.path)
        self.dictionary, self.block_size = Dictionary(), block_size
        with open(self.path, encoding="utf8") as lines:
            words = [word for line in lines for word in (*line.split(), "<eos>")]
        self.data = torch.tensor([self.dictionary.add_word(word) for word in words])

    @property
    def vocab_size(self) -> int:
        """Number of distinct words."""
        return len(self.dictionary)

    def __len__(self) -> int:
        return len(self.data) // self.block_size - 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        first, last = index * self.block_size, (index + 1) * self.block_size
        return self.data[first:last], self.data[first + 1 : last + 1]

    @staticmethod
    def download(destination: Path) -> None:
        """Download the text unless the file exists."""
        if not destination.exists():
            destination.parent.mkdir(parents=True, exist_ok=True)
            urllib.request.urlretrieve(_TEXT, destination)


class LightningTransformer(LightningModule):
    """Module that trains a `Transformer` on `WikiText2`."""

    def __init__(self, vocab_size: int = 33278) -> None:
        super().__init__()
        self.model = Transformer(vocab_size=vocab_size)

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        """Return log probabilities. See `Transformer`."""
        log_probabilities: Tensor = self.model(inputs, target)
        return log_probabilities

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, target = batch
        return nn.functional.nll_loss(self(inputs, target), target.view(-1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def prepare_data(self) -> None:
        WikiText2(download=True)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(WikiText2())
