"""Tables and quantities as text, for reports and the command line."""

__all__ = ["counted", "format_bytes", "format_seconds", "format_table", "list_names"]

from collections.abc import Sequence


def format_table(rows: Sequence[Sequence[str]], align: str = "<") -> str:
    """Return rows as lines of aligned columns, two spaces apart, without spaces at the end of a line.

    Args:
        rows: The cells. All rows have the same length. The first row may be a heading.
        align: For each column ``"<"`` (left) or ``">"`` (right); the last character is for all further columns.

    Example:
        >>> print(
        ...     format_table([("layer", "bytes"), ("head", "12")], align="<>")
        ... )
        layer  bytes
        head      12
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = align.ljust(len(widths), align[-1])
    cells = ("  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths)) for row in rows)  # noqa: B905
    return "\n".join(line.rstrip() for line in cells)


def format_bytes(n: float) -> str:
    """Return a number of bytes in three digits, with a decimal unit.

    Example:
        >>> format_bytes(512), format_bytes(1_234_567)
        ('512 B', '1.23 MB')
    """
    return _scaled(n, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))) or f"{n:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return a time in three digits, in seconds, milliseconds or microseconds.

    Example:
        >>> format_seconds(0.01234), format_seconds(2.5)
        ('12.3 ms', '2.5 s')
    """
    return _scaled(seconds, (("s", 1.0), ("ms", 1e-3))) or f"{seconds * 1e6:.3g} us"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun.

    Example:
        >>> counted(1, "layer"), counted(1200, "layer")
        ('1 layer', '1,200 layers')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def list_names(names: Sequence[str], limit: int = 8) -> str:
    """Return the first names for a message, and the number of further names; "none" without names.

    Example:
        >>> list_names(["q", "k", "v"], 2)
        'q, k and 1 more'
    """
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more or "none"


def _scaled(value: float, units: Sequence[tuple[str, float]]) -> str:
    for unit, size in units:
        if value >= size:
            scaled = value / size
            return f"{scaled:.3g} {unit}" if scaled < 100 else f"{scaled:.0f} {unit}"
    return ""
