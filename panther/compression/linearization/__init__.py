"""Softmax attention converted to learned linear attention by :func:`panther.linearize_`.

``_linearize`` is the function with its report; ``survey`` finds the modules, and ``fitting`` records their queries,
keys and values and learns the feature maps from them.
"""

from ._linearize import LinearizationReport, LinearizedLayer, linearize_

__all__ = ["LinearizationReport", "LinearizedLayer", "linearize_"]
