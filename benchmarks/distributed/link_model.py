"""The transformer of train/trial_text.py with attention and feed-forward as modules, for tensor parallelism."""

__all__ = ["build"]

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from benchmarks.train import trial_text
from benchmarks.trials.text_model import Block


class Attention(nn.Module):
    """Causal attention with the layers of a block."""

    # The forward works on some of the heads: it counts them by their width.
    _tp_plan: ClassVar = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.num_heads, self.head_dim = block.heads, block.norm_1.normalized_shape[0] // block.heads
        self.q, self.k, self.v, self.o = block.q, block.k, block.v, block.o

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, context, width)`` to the same shape."""
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A block of two modules, with its weights, computing the same."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = block.norm_1, block.norm_2
        self.attention = Attention(block)
        self.feed_forward = nn.Sequential(block.up, nn.GELU(), block.down)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, context, width)`` to the same shape."""
        x = x + self.attention(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))


def build(kind: str) -> nn.Sequential:
    """Return the ``"dense"`` or ``"sketched"`` network, which reads its sizes as train/trial_text.py does."""
    model = getattr(trial_text, kind)()
    return nn.Sequential(*(Layer(layer) if isinstance(layer, Block) else layer for layer in model))
