"""The optimizers that project gradients, for the communication hook that sends only their projections."""

__all__ = ["PROJECTING_OPTIMIZERS"]

from typing import Any
from weakref import WeakKeyDictionary

PROJECTING_OPTIMIZERS: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
"""Optimizers with a method ``sent_projection(parameter)``, in the order in which they were made.

Parameters are looked up when a gradient is sent, because sharding a model exchanges those of its optimizer.
"""
