"""`Transformer`, the language model that many examples train, and `WikiText2`, the text that they train it on."""

from __future__ import annotations

import math
import urllib.request
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from drivetrain.compat.lightning.pytorch.core.module import LightningModule

_TEXT = "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/train.txt"


class PositionalEncoding(nn.Module):
    """Adds sines and cosines of a position to embeddings (https://arxiv.org/abs/1706.03762).

    All tokens of a sequence get those of the position after the last one, as in Lightning's module of this name, so
    that examples have the same losses.

    Args:
        dim: Size of an embedding.
        dropout: Share of the sums that dropout zeroes.
        max_len: Positions of the longest sequence.
    """

    def __init__(self, dim: int, dropout: float = 0.1, max_len: int = 5000) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        self.dim, self.max_len = dim, max_len
        self.pe: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Add the encoding.

        Args:
            x: Embeddings, batch first.
        """
        if self.pe is None:
            self.pe = self._table().to(x.device)
        added: Tensor = self.dropout(x + self.pe[:, x.size(1)])
        return added

    def _table(self) -> Tensor:
        position = torch.arange(self.max_len, dtype=torch.float).unsqueeze(1)
        rates = torch.exp(torch.arange(0, self.dim, 2).float() * (-math.log(10000.0) / self.dim))
        made = torch.zeros(self.max_len, self.dim)
        made[:, 0::2], made[:, 1::2] = torch.sin(position * rates), torch.cos(position * rates)
        return made.unsqueeze(0)


class Transformer(nn.Module):
    """A small encoder-decoder language model, as in torch's tutorial on language modelling.

    Args:
        vocab_size: Number of tokens.
        ninp: Size of an embedding.
        nhead: Heads of attention.
        nhid: Size of the hidden layer in a feed-forward block.
        nlayers: Layers of the encoder, and of the decoder.
        dropout: Share of the activations that dropout zeroes.
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
        self.pos_encoder = PositionalEncoding(ninp, dropout)
        self.embedding = nn.Embedding(vocab_size, ninp)
        self.transformer = nn.Transformer(ninp, nhead, nlayers, nlayers, nhid, dropout, batch_first=True)
        self.decoder = nn.Linear(ninp, vocab_size)
        self.ninp, self.vocab_size = ninp, vocab_size

    def forward(self, inputs: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return log probabilities, a row for each token of all sequences.

        Args:
            inputs: Tokens, batch first.
            target: Tokens that the decoder reads.
            mask: What each position may attend to; what is before it if None.
        """
        if mask is None:
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        scale = math.sqrt(self.ninp)
        source = self.pos_encoder(self.embedding(inputs) * scale)
        wanted = self.pos_encoder(self.embedding(target) * scale)
        logits = self.decoder(self.transformer(source, wanted, tgt_mask=mask))
        return F.log_softmax(logits, dim=-1).view(-1, self.vocab_size)


class Dictionary:
    """Numbers words in the order in which they come first.

    Attributes:
        word2idx: The number of each word.
        idx2word: The words by number.
    """

    def __init__(self) -> None:
        self.word2idx: dict[str, int] = {}
        self.idx2word: list[str] = []

    def add_word(self, word: str) -> int:
        """The number of a word, which is new if it was not there.

        Args:
            word: The word.
        """
        if word not in self.word2idx:
            self.word2idx[word] = len(self.idx2word)
            self.idx2word.append(word)
        return self.word2idx[word]

    def __len__(self) -> int:
        return len(self.idx2word)


class WikiText2(Dataset[tuple[Tensor, Tensor]]):
    """A text in blocks: the words of a block, and the word after each.

    Args:
        data_dir: Where the file `wikitext-2.txt` is, or is downloaded to.
        block_size: Words of a block.
        download: Whether to download the file where it is not there.
    """

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
        """Number of different words."""
        return len(self.dictionary)

    def __len__(self) -> int:
        return len(self.data) // self.block_size - 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        first, last = index * self.block_size, (index + 1) * self.block_size
        return self.data[first:last], self.data[first + 1 : last + 1]

    @staticmethod
    def download(destination: Path) -> None:
        """Download the text to a file that is not there yet.

        Args:
            destination: The file.
        """
        if not destination.exists():
            destination.parent.mkdir(parents=True, exist_ok=True)
            urllib.request.urlretrieve(_TEXT, destination)


class LightningTransformer(LightningModule):
    """Trains a `Transformer` on `WikiText2`.

    Args:
        vocab_size: Number of words.
    """

    def __init__(self, vocab_size: int = 33278) -> None:
        super().__init__()
        self.model = Transformer(vocab_size=vocab_size)

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        """Return log probabilities; see `Transformer`."""
        log_probabilities: Tensor = self.model(inputs, target)
        return log_probabilities

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, target = batch
        return F.nll_loss(self(inputs, target), target.view(-1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def prepare_data(self) -> None:
        WikiText2(download=True)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(WikiText2())
