"""The dense architectures and inputs that ``panther export --model`` and ``--sample`` name, see ``cases``."""

__all__ = [
    "SelfAttention",
    "attention",
    "causal_attention",
    "convolution",
    "embedding",
    "linear",
    "linear_attention",
    "sample_attention",
    "sample_bfloat16",
    "sample_convolution",
    "sample_embedding",
    "sample_linear",
]

from typing import Any

from torch import Tensor, nn

from benchmarks.engines.reader import dense_layer, sample
from panther.nn import RandMultiHeadAttention


class SelfAttention(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, input: Tensor) -> Any:
        """Map (N, L, E) to (N, L, E)."""
        output = self.layer(input, input, input, need_weights=False)
        return output[0] if isinstance(output, tuple) else output


def linear() -> nn.Module:
    return nn.Sequential(dense_layer("linear"))


def embedding() -> nn.Module:
    return nn.Sequential(dense_layer("embedding"))


def convolution() -> nn.Module:
    return nn.Sequential(dense_layer("convolution"))


def attention() -> nn.Module:
    return SelfAttention(dense_layer("attention"))


def linear_attention() -> nn.Module:
    return SelfAttention(RandMultiHeadAttention(512, 8, 96, seed=0))


def causal_attention() -> nn.Module:
    return SelfAttention(RandMultiHeadAttention(512, 8, 96, iscausal=True, seed=0))


def sample_linear() -> dict[str, Tensor]:
    return {"input": sample("linear", 3)}


def sample_bfloat16() -> dict[str, Tensor]:
    return {"input": sample("linear", 3).bfloat16()}


def sample_embedding() -> dict[str, Tensor]:
    return {"input": sample("embedding", 3)}


def sample_convolution() -> dict[str, Tensor]:
    return {"input": sample("convolution", 3)}


def sample_attention() -> dict[str, Tensor]:
    return {"input": sample("attention", 3)}
