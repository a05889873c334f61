"""The examples of ``panther.kernels``: pytest itself would import the folder under its own name, a second time."""

import doctest
import importlib
import pkgutil

import panther.kernels
import pytest

MODULES = [
    module.name
    for module in pkgutil.walk_packages(panther.kernels.__path__, "panther.kernels.")
    if "._triton" not in module.name
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_examples_are_found():
    found = doctest.DocTestFinder().find(importlib.import_module("panther.kernels.ops.philox"))
    assert sum(len(test.examples) for test in found) > 0
