"""The house rules that no linter knows: imports go only downward, the package stays light, names do not collide."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Lowest first. `panther` itself, the face that gathers the layers, stands above all but the command line; `_version`
# below all. A layer may import itself and every lower one; `kernels` knows nothing of panther, not even its errors.
LAYERS = (
    "_version", "errors", "kernels", "sketch", "linalg", "nn", "distributed", "train", "compression", "",
    "cli", "__main__",
)  # fmt: skip
FORBIDDEN = {"kernels": {"_version", "errors"}}


def module_files() -> dict[str, Path]:
    """Source file of each of Panther's modules, by dotted name."""
    files = {}
    for folder, package in (("panther", "panther"), ("kernels", "panther.kernels")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            files[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return files


MODULES = module_files()
PACKAGES = {name for name, path in MODULES.items() if path.name == "__init__.py"}


def layer_of(module: str) -> str:
    """``panther.nn.linear`` -> ``nn``; ``panther`` -> the empty name."""
    return f"{module}.".split(".")[1]


def imported_modules(source: str, module: str, is_package: bool) -> list[tuple[int, str]]:
    """Line and dotted name of whatever ``source`` imports, at top level, in a function or by ``import_module``.

    ``from panther import nn`` counts as ``panther.nn``, and ``from panther.nn import SKLinear`` as
    ``panther.nn.SKLinear``: what comes after the second dot does not matter here.
    """
    package = module if is_package else module.rpartition(".")[0]
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            name = node.args[0].value
            if called in ("import_module", "__import__") and isinstance(name, str):
                found.append((node.lineno, importlib.util.resolve_name(name, package)))
    return found


def upward_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """One sentence for each import of ``source`` that the order forbids."""
    own = layer_of(module)
    if own not in LAYERS:
        return [f"{module} is in no layer: give {own!r} its place in LAYERS"]
    allowed = set(LAYERS[: LAYERS.index(own) + 1]) - FORBIDDEN.get(own, set())
    wrong = []
    for line, name in imported_modules(source, module, is_package):
        if name.split(".")[0] != "panther":
            continue
        target = layer_of(name)
        if target not in LAYERS:  # a name of the package itself: `from panther import SKLinear`
            target = ""
        if target not in allowed:
            wrong.append(f"{module}:{line} imports {name}: {own or 'panther'} may not import {target or 'panther'}")
    return wrong


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_only_downward(module):
    assert upward_imports(MODULES[module].read_text(), module, module in PACKAGES) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("panther.nn.linear", "from panther.distributed import launch"),
        ("panther.nn.linear", "import panther.train.trainer as t"),
        ("panther.nn.linear", "from panther import distributed"),
        ("panther.nn.linear", "from .. import compression"),
        ("panther.nn.linear", "from ..compression.config import Config"),
        ("panther.nn.linear", "import panther as pr"),
        ("panther.nn.linear", "from panther import SKLinear"),
        ("panther.nn.linear", "def f():\n    from panther.cli import main"),
        ("panther.nn.linear", "if TYPE_CHECKING:\n    import panther.distributed"),
        ("panther.nn.linear", "importlib.import_module('panther.train')"),
        ("panther.sketch.dense", "from panther.linalg import qb"),
        ("panther.sketch.dense", "from ..nn import functional"),
        ("panther.kernels.ops", "from panther.errors import ShapeError"),
        ("panther.kernels.ops", "from ..errors import ShapeError"),
        ("panther.kernels.ops", "from panther._version import __version__"),
        ("panther.kernels.ops", "import panther.sketch"),
        ("panther.errors", "from .kernels import backend"),
        ("panther._version", "from .errors import PantherError"),
        ("panther.train.trainer", "from panther.cli import main"),
        ("panther.elsewhere", ""),
    ],
)
def test_the_checker_objects(module, source):
    assert len(upward_imports(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("panther.nn.linear", "import torch\nfrom panther.errors import ShapeError\nfrom ._sketched import Base"),
        ("panther.nn.linear", "from ..sketch import signs\nfrom panther._version import __version__"),
        ("panther.nn.linear", "import panthera\nfrom other.panther import cli"),
        ("panther.kernels.ops", "from . import reference\nfrom panther.kernels._backend import backend"),
        ("panther.cli.demo", "import panther as pr\nfrom panther.distributed import launch\nfrom panther import nn"),
    ],
)
def test_the_checker_allows(module, source):
    assert upward_imports(source, module) == []


def test_the_checker_resolves_a_package_from_within():
    assert upward_imports("from ..cli import main", "panther.nn", is_package=True) == [
        "panther.nn:1 imports panther.cli.main: nn may not import cli"
    ]
    assert upward_imports("from . import cli", "panther", is_package=True)
    assert upward_imports("from . import errors, nn", "panther", is_package=True) == []


def test_import_is_light():
    """Measured against what torch itself loads."""
    code = (
        "import sys, torch; before = set(sys.modules); import panther; "
        "print(*sorted(set(sys.modules) - before), sep='\\n')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    loaded = set(run.stdout.split())
    assert "panther.nn.linear" in loaded
    heavy = {"triton", "sklearn", "matplotlib", "scipy", "panther.distributed", "panther.train", "panther.cli"}
    assert loaded & heavy == set()


def public_definitions(source: str) -> set[str]:
    """Functions and classes that a module defines at its top level and lists in ``__all__``."""
    tree = ast.parse(source)
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return defined & set(listed_names(tree) or ())


def listed_names(tree: ast.Module) -> list[str] | None:
    """The strings of ``__all__``, also where it is a sum of lists; None where there is no ``__all__``."""
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__":
            return [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return None


def clashes(module: str, names: set[str], modules: set[str]) -> set[str]:
    """Those of ``names``, defined in ``module``, that a module of the same package already has."""
    package = module if module in PACKAGES else module.rpartition(".")[0]
    return {name for name in names if f"{package}.{name}" in modules}


@pytest.mark.parametrize("module", MODULES)
def test_no_public_definition_has_the_name_of_a_module_beside_it(module):
    assert clashes(module, public_definitions(MODULES[module].read_text()), set(MODULES)) == set()


def test_the_name_check_objects():
    source = "__all__ = ['qb', 'other']\ndef qb(): ...\ndef _private(): ..."
    assert clashes("panther.linalg.qb", public_definitions(source), {"panther.linalg.qb"}) == {"qb"}
    assert clashes("panther.linalg._qb", public_definitions(source), {"panther.linalg._qb"}) == set()


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_package_exports_what_it_lists_and_hides_no_module(package):
    imported = importlib.import_module(package)
    for name in imported.__all__:
        value = getattr(imported, name)
        assert inspect.ismodule(value) or f"{package}.{name}" not in MODULES, f"{package}.{name} hides a module"


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_is_and_what_is_public(module):
    tree = ast.parse(MODULES[module].read_text())
    assert ast.get_docstring(tree), f"{module} needs a docstring"
    # _version holds one name, which setuptools reads.
    assert listed_names(tree) is not None or module == "panther._version", f"{module} needs __all__"


def machine_paths(text: str) -> list[str]:
    """Absolute paths in ``text`` that hold on one machine only: home and work folders, and this checkout's."""
    folders = ("root", "home/[a-z]", "Users/[A-Za-z]", "work", "workspace")
    pattern = rf"(?<![\w.\-:/]){re.escape('/')}(?:{'|'.join(folders)})[\w.\-]*/[\w.\-]+"
    return re.findall(pattern, text) + [
        path for path in {str(ROOT), str(Path.home())} if len(path) > 5 and path in text
    ]


def test_no_tracked_file_names_a_machine_path():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = {}
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        data = path.read_bytes() if path.is_file() else b""
        if b"\0" not in data and (paths := machine_paths(data.decode(errors="replace"))):
            found[name] = paths
    assert found == {}


def test_the_path_check_objects():
    slash = "/"
    assert machine_paths(f"open('{slash}root/data.csv')") == ["/root" + "/data.csv"]
    assert machine_paths(f"see {slash}home/ann/panther")
    assert machine_paths(f"{slash}work/main")
    assert machine_paths(f"in {ROOT}/tests")
    assert machine_paths(f"https://example.org/home/ann/x and a{slash}root{slash}b and /tmp/x and the root/leaf") == []
