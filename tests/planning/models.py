"""Models that are planned, and trained with values for comparison."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        q, k, v = (part(y).unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2) for part in self._parts())
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.after(x))))

    def _parts(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.q, self.k, self.v


class LM(nn.Module):
    """Decoder of equal blocks that returns its loss.

    Args:
        width: Width of the residual stream.
        blocks: Number of blocks.
        vocabulary: Number of tokens.
        heads: Number of attention heads.
    """

    tp_plan = {  # noqa: RUF012
        "blocks.*.q": "colwise",
        "blocks.*.k": "colwise",
        "blocks.*.v": "colwise",
        "blocks.*.out": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
    }

    def __init__(self, width: int = 256, blocks: int = 4, vocabulary: int = 2000, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())
