"""What the adapters of engines say where an engine is missing or too old."""

import importlib
import re
import sys
from types import ModuleType

import pytest

from panther.errors import ConfigError, MissingExtraError, install_command

ENGINES = {"ray": ("2.9.3", "2.60"), "deepspeed": ("0.14.5", "0.19")}


@pytest.fixture
def without(monkeypatch):
    """Remove an adapter and its engine from the modules, in whose place there is ``stand_in``."""

    def remove(engine, stand_in):
        adapter = f"panther.integrations.{engine}"
        monkeypatch.delitem(sys.modules, adapter, raising=False)
        monkeypatch.setitem(sys.modules, engine, stand_in)
        return adapter

    return remove


@pytest.mark.parametrize("engine", ENGINES)
def test_a_missing_engine(engine, without):
    adapter = without(engine, None)
    with pytest.raises(
        MissingExtraError, match=rf"^{engine} is needed here .* run {re.escape(install_command(engine))}"
    ):
        importlib.import_module(adapter)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_version_that_is_too_old(engine, without):
    old, minimum = ENGINES[engine]
    stand_in = ModuleType(engine)
    stand_in.__version__ = old
    adapter = without(engine, stand_in)
    with pytest.raises(
        ConfigError, match=rf"{engine} {old} is installed, and Panther needs {minimum} or newer: pip install"
    ):
        importlib.import_module(adapter)
