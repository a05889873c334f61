"""What :func:`panther.sketch_layers_` makes of layers."""

__all__ = ["SketchConfig"]

from dataclasses import dataclass

from panther.errors import check_size

_INITS = ("svd", "lstsq", "random")


@dataclass(frozen=True, kw_only=True)
class SketchConfig:
    """How layers are sketched without data.

    Example:
        >>> SketchConfig(low_rank=64).rank
        128
    """

    num_terms: int = 1
    """Terms L of each layer."""
    low_rank: int
    """Rank k of each half of a term; the layer has rank ``2 num_terms low_rank``."""
    init: str = "svd"
    """``"svd"``, ``"lstsq"`` or ``"random"``, as for :meth:`panther.nn.SKLinear.from_linear`."""

    def __post_init__(self) -> None:
        """Check the values."""
        check_size("num_terms", self.num_terms, least=1)
        check_size("low_rank", self.low_rank, least=1)
        if self.init not in _INITS:
            raise ValueError(f"init={self.init!r} is unknown: use one of {', '.join(map(repr, _INITS))}")

    @property
    def rank(self) -> int:
        """Rank of a layer's weight."""
        return 2 * self.num_terms * self.low_rank
