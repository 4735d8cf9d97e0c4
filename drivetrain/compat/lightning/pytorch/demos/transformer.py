"""`Transformer`: the language model that many examples train."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
