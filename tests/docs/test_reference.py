"""The reference is complete: public names, commands, settings, environment variables and errors."""

import ast
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import panther
from panther.cli import _COMMANDS

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs/reference"
# Public for Panther's own modules, not for users: helpers of errors, and what a library finds by registration.
INTERNAL = {
    "panther.errors": {"check_device", "check_flag", "check_floating", "check_size", "require_extra"},
    "panther.integrations.transformers": {"PantherQuantizer"},
    "panther.integrations.peft": {"CompressedLoraModel"},
}


def documented():
    """Full names on the pages: those of autosummary, of autodoc's directives, and modules whose members are shown."""
    names, whole = set(), set()
    for page in REFERENCE.rglob("*.rst"):
        if "generated" in page.parts:
            continue
        module, summary, automodule = "", False, ""
        for line in page.read_text().splitlines():
            if found := re.match(r"\.\. (?:currentmodule|automodule):: (\S+)", line):
                module = found[1]
                automodule = module if "automodule" in line else automodule
            elif found := re.match(r"\.\. (?:autoclass|autofunction|data):: (\S+)", line):
                names.add(f"{module}.{found[1]}")
            elif line.startswith("   :members:") and automodule:
                whole.add(automodule)
            elif line.startswith(".. "):
                summary = "autosummary" in line
            elif summary and re.match(r"   \w+$", line):
                names.add(f"{module}.{line.strip()}")
            if line.startswith(".. ") and "automodule" not in line:
                automodule = ""
    return names, whole


def public_modules():
    """Panther's modules that a user names: those that another public one lists, and the adapters."""
    found, open_ = {}, [panther]
    while open_:
        module = open_.pop()
        found[module.__name__] = module
        members = [getattr(module, name) for name in module.__all__]
        open_ += [m for m in members if isinstance(m, ModuleType) and m.__name__ not in found]
    for path in (ROOT / "panther/integrations").iterdir():
        if not path.name.startswith("_"):
            name = f"panther.integrations.{path.stem}"
            try:
                found[name] = importlib.import_module(name)
            except ImportError:  # its library is not installed
                continue
    return found


@pytest.mark.slow  # imports every adapter's library
def test_every_public_name_is_in_the_reference():
    names, whole = documented()
    objects = {id(_resolve(name)) for name in names}
    missing = []
    for module_name, module in public_modules().items():
        for name in module.__all__:
            member = getattr(module, name)
            hidden = isinstance(member, ModuleType) or name in INTERNAL.get(module_name, ()) or name == "__version__"
            shown = f"{module_name}.{name}" in names or module_name in whole or id(member) in objects
            if not hidden and not shown:
                missing.append(f"{module_name}.{name}")
    assert not missing


def _resolve(name):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_every_command_has_its_help():
    page = (REFERENCE / "cli.rst").read_text()
    assert set(re.findall(r"command-help:: (\w+)$", page, re.M)) == set(_COMMANDS)


def test_every_error_has_a_cure():
    page = (REFERENCE / "errors.rst").read_text()
    classes = [name for name in panther.errors.__all__ if inspect.isclass(getattr(panther.errors, name))]
    assert [name for name in classes if f"`~panther.errors.{name}`" not in page] == []


def test_every_variable_that_is_read_or_set_is_listed():
    page = (REFERENCE / "environment.rst").read_text()
    used = set()
    for folder in ("panther", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call | ast.Subscript | ast.Compare) and "environ" in ast.unparse(node):
                    used |= {
                        value.value
                        for value in ast.walk(node)
                        if isinstance(value, ast.Constant)
                        and isinstance(value.value, str)
                        and re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|RANK", value.value)
                    }
    assert len(used) > 15
    assert {name for name in used if f"``{name}``" not in page} == set()
