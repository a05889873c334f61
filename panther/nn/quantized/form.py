"""The form of a quantized weight: width, group size and rank, and the bytes that it takes."""

__all__ = ["checked_form", "stored_bytes"]

from panther.errors import ShapeError, check_size
from panther.kernels.reference.codes import code_bytes

_RECORD_BYTES, _KERNEL_BYTES = 12, 12


def stored_bytes(
    in_features: int,
    out_features: int,
    bits: int | None = 4,
    *,
    group_size: int | None = 128,
    low_rank: int = 0,
    conv: bool = False,
) -> int:
    """Return the size of a :class:`QuantizedLinear` of this form in a file, in bytes, without its bias.

    With ``conv`` return the size of a :class:`QuantizedConv2d`, whose ``in_features`` are in / groups * kernel.

    Example:
        >>> from panther.nn import QuantizedLinear
        >>> layer = QuantizedLinear(100, 60, 3, group_size=32, low_rank=2, bias=False)
        >>> stored_bytes(100, 60, 3, group_size=32, low_rank=2) == sum(t.nbytes for t in layer.state_dict().values())
        True
    """
    columns = check_size("in_features", in_features, least=1)
    rows = check_size("out_features", out_features, least=1)
    bits, group_size, low_rank = checked_form(columns, bits, group_size, low_rank)
    size = _RECORD_BYTES + conv * _KERNEL_BYTES + low_rank * (rows + columns + 2)
    if bits is not None and group_size is not None:
        size += rows * (code_bytes(columns, bits) + 3 * -(-columns // group_size))
    return size


def checked_form(
    columns: int, bits: int | None, group_size: int | None, low_rank: int
) -> tuple[int | None, int | None, int]:
    """Return bits, group size and rank as a layer stores them."""
    low_rank = check_size("low_rank", low_rank, least=0)
    size = columns if group_size is None else check_size("group_size", group_size, least=1)
    if bits is None:
        if not low_rank:
            raise ValueError("bits=None leaves low rank alone, and low_rank=0 none of it: give one of them")
        return None, None, low_rank
    bits = check_size("bits", bits, least=2)
    if bits > 8:
        raise ShapeError(f"bits={bits} must be 2 to 8, or None for low rank alone")
    return bits, min(size, columns), low_rank
