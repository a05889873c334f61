"""Sketched models on many processes, on torch's own engines."""

from .data import DistributedSketchedModel, data_parallel
from .launching import cleanup_distributed, init, launch, setup_distributed, shutdown
from .profiling import CommunicationCounter
from .sync import sync_sketches, verify_sketches

__all__ = [
    "CommunicationCounter",
    "DistributedSketchedModel",
    "cleanup_distributed",
    "data_parallel",
    "init",
    "launch",
    "setup_distributed",
    "shutdown",
    "sync_sketches",
    "verify_sketches",
]
