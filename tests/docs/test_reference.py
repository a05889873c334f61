"""The reference is complete: public names, commands, settings, environment variables and errors."""

import ast
import enum
import importlib
import inspect
import re
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

import panther
from panther.cli import _COMMANDS

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs/reference"
# Public for Panther's own modules, not for users: helpers of errors, and what a library finds by registration.
INTERNAL = {
    "panther.errors": {
        "check_device",
        "check_flag",
        "check_floating",
        "check_size",
        "check_version",
        "install_command",
        "require_extra",
    },
    "panther.integrations.import_hook": {"MARKS", "register_with_transformers"},  # used by panther itself
    "panther.integrations.pretrained": {"read_config", "without_hub_kernels"},
    "panther.integrations.transformers": {"PantherQuantizer"},
    "panther.integrations.peft": {"CompressedLoraModel"},
}

FROM_TORCH = (panther.distributed.ReduceOp,)  # has no signature; torch describes it


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


def public_modules(adapters=True):
    """Panther's modules that a user names: those that another public one lists, and the adapters."""
    found, open_ = {}, [panther]
    while open_:
        module = open_.pop()
        found[module.__name__] = module
        members = [getattr(module, name) for name in module.__all__]
        open_ += [m for m in members if isinstance(m, ModuleType) and m.__name__ not in found]
    for path in (ROOT / "panther/integrations").iterdir() if adapters else ():
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
    unlisted = []
    for module_name, module in public_modules().items():
        for name in module.__all__:
            member = getattr(module, name)
            hidden = isinstance(member, ModuleType) or name in INTERNAL.get(module_name, ()) or name == "__version__"
            shown = f"{module_name}.{name}" in names or module_name in whole or id(member) in objects
            if not hidden and not shown:
                unlisted.append(f"{module_name}.{name}")
    assert not unlisted


def _resolve(name):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def described(member):
    """The arguments that a docstring describes, and the fields of a class that have one of their own."""
    sections = re.split(r"^(\w[\w ]*):\n", inspect.getdoc(member) or "", flags=re.M)
    names = set()
    for head, body in zip(sections[1::2], sections[2::2], strict=True):
        if head in ("Args", "Attributes"):
            for found in re.finditer(r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \(.*?\))?:", body, re.M):
                names |= {name.strip().lstrip("*") for name in found[1].split(",")}
    # Of a class, also the fields that it inherits from ours.
    for ours in [base for base in getattr(member, "__mro__", ()) if base.__module__.startswith("panther.")]:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(ours))).body
        names |= {
            field.target.id
            for field, below in zip(tree.body, tree.body[1:], strict=False)
            if isinstance(field, ast.AnnAssign)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        }
    return names


def undescribed(modules):
    """Arguments of public functions and classes that no docstring describes, except for private ones."""
    arguments, seen = set(), set()
    for module_name, module in modules.items():
        for name in module.__all__:
            member = getattr(module, name)
            hidden = inspect.ismodule(member) or name in INTERNAL.get(module_name, ()) or id(member) in seen
            if hidden or not callable(member):
                continue
            seen.add(id(member))
            if inspect.isclass(member) and (issubclass(member, BaseException | enum.Enum) or member in FROM_TORCH):
                continue
            names = described(member) | (described(member.__init__) if inspect.isclass(member) else set())
            arguments |= {
                f"{module_name}.{name}({argument})"
                for argument in inspect.signature(member).parameters
                if argument not in names and not argument.startswith("_")
            }
    return arguments


def test_every_argument_is_described():
    modules = public_modules(adapters=False)
    assert len(modules) > 10
    assert undescribed(modules) == set()


@pytest.mark.slow  # imports every adapter's library
def test_every_argument_of_an_adapter_is_described():
    assert undescribed(public_modules()) == set()


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
    for folder, pattern in (("panther", "**/*.py"), ("kernels", "**/*.py"), ("docs", "*.py")):
        for path in (ROOT / folder).glob(pattern):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call | ast.Subscript | ast.Compare) and "environ" in ast.unparse(node):
                    used |= {
                        value.value
                        for value in ast.walk(node)
                        if isinstance(value, ast.Constant)
                        and isinstance(value.value, str)
                        and re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|RANK", value.value)
                    }
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        used |= set(re.findall(r"\bPANTHER_[A-Z_]+\b", path.read_text()))  # theirs are set by their readers
    assert len(used) > 15
    assert {name for name in used if f"``{name}``" not in page} == set()
