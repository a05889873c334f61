"""Kernels run in Triton's interpreter where there is no GPU, which Triton must know before it is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
