"""Thresholds of Python's garbage collector, with which it takes 1 instead of 5 % of the processor time of tests.

Torch and what comes with it are half a million objects, which each full collection goes through. A test that needs a
collection calls ``gc.collect``. conftest.py imports this file before torch, and processes that tests fork inherit the
thresholds.
"""

import gc

gc.set_threshold(20_000, 20, 20)
