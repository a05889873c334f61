"""Softmax attention converted to learned linear attention by :func:`panther.linearize_`.

``_linearize`` is the function; ``survey`` finds the modules, ``fitting`` records their queries, keys and
values and learns the feature maps from them, and ``report`` holds the results.
"""

from ._linearize import linearize_
from .report import LinearizationReport, LinearizedLayer

__all__ = ["LinearizationReport", "LinearizedLayer", "linearize_"]
