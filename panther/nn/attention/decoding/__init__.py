"""Attention that reads a sequence token by token: its states, the window of exact attention, and transformers' cache.

`states.py` has the states and what all layers do with them. `windowed.py` continues attention that is exact in a
window. `cache.py` keeps states in the caches of transformers.
"""

__all__: list[str] = []
