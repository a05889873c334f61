"""The house rules that no linter knows: imports go only downward, the package stays light, names do not collide.

Each rule is one test that lists all offenders, and one that shows that its check objects.
"""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import panther

ROOT = Path(__file__).resolve().parents[1]

# Lowest first. `panther` itself, the face that gathers the layers, stands above all but the adapters and the command
# line; `_version`, `_text`, `_random_state`, `_safetensors` and the base of settings below all. A layer may import
# itself and every lower one; `kernels` knows nothing of panther.
LAYERS = (
    "_version", "_text", "_random_state", "errors", "_safetensors", "_setting_names", "_settings", "kernels", "sketch",
    "linalg", "nn", "optim", "compat", "distributed", "train", "compression", "tuning", "", "integrations", "cli",
    "__main__",
)  # fmt: skip
FORBIDDEN = {"kernels": {"_version", "_text", "_random_state", "errors", "_safetensors", "_setting_names", "_settings"}}

# Within `distributed`: the level of each sub-package. One may import itself and all of lower levels, never another one
# of its own level. The lazy `__init__` may import all.
LEVELS = {
    "_error_file": -1, "comm": 0,
    "_layer_configs": 1, "launcher": 1, "preflight": 1, "sync": 1,
    "data": 2, "tensor": 2, "pipeline": 2,
    "checkpoint": 3, "hybrid": 3, "materialize": 4,
    "advisor": 4,
    "": 5,
}  # fmt: skip
MAXIMUM_FILES = 14


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


def imported_modules(tree: ast.Module, module: str, is_package: bool) -> list[tuple[int, str]]:
    """Line and dotted name of whatever is imported, at top level, in a function or by ``import_module``.

    ``from panther import nn`` counts as ``panther.nn``, and ``from panther.nn import SKLinear`` as
    ``panther.nn.SKLinear``: names beyond a module do not matter here.
    """
    package = module if is_package else module.rpartition(".")[0]
    found = []
    for node in ast.walk(tree):
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
    own, own_part = (*module.split("."), "", "")[1:3]
    if own not in LAYERS:
        return [f"{module} is in no layer: give {own!r} its place in LAYERS"]
    if own == "distributed" and own_part not in LEVELS:
        return [f"{module} has no level: give {own_part!r} its place in LEVELS"]
    allowed = set(LAYERS[: LAYERS.index(own) + 1]) - FORBIDDEN.get(own, set())
    wrong = []
    for line, name in imported_modules(ast.parse(source), module, is_package):
        root, target, part = (*name.split("."), "", "")[:3]
        if root != "panther":
            continue
        if target not in LAYERS:  # a name of the package itself: `from panther import SKLinear`
            target = ""
        if target not in allowed:
            wrong.append(f"{module}:{line} imports {name}: {own or 'panther'} may not import {target or 'panther'}")
        elif own == target == "distributed":
            part = part if part in LEVELS else ""
            if part != own_part and LEVELS[part] >= LEVELS[own_part]:
                wrong.append(f"{module}:{line} imports {name}: {own_part} may not import {part or 'the whole package'}")
    return wrong


def test_imports_go_only_downward():
    found = []
    for module, path in MODULES.items():
        found += upward_imports(path.read_text(), module, module in PACKAGES)
    assert found == []


@pytest.mark.parametrize(
    ("module", "sources"),
    [
        (
            "panther.nn.linear",
            (
                "from panther.distributed import launch",
                "import panther.train.trainer as t",
                "from panther import distributed",
                "from .. import compression",
                "from ..compression.config import Config",
                "import panther as pr",
                "from panther import SKLinear",
                "def f():\n    from panther.cli import main",
                "if TYPE_CHECKING:\n    import panther.distributed",
                "importlib.import_module('panther.train')",
            ),
        ),
        ("panther.sketch.dense", ("from panther.linalg import qb", "from ..nn import functional")),
        (
            "panther.kernels.ops",
            (
                "from panther.errors import ShapeError",
                "from ..errors import ShapeError",
                "from panther._version import __version__",
                "import panther.sketch",
            ),
        ),
        ("panther.errors", ("from .kernels import backend",)),
        ("panther._version", ("from .errors import PantherError",)),
        ("panther.train.trainer", ("from panther.cli import main", "import panther.compression")),
        ("panther.elsewhere", ("",)),
        ("panther.distributed.elsewhere", ("",)),
        (
            "panther.distributed.tensor.unshard",
            (
                "from panther.distributed.data import strategies",
                "from panther.distributed.hybrid import HybridParallelTrainer",
                "from panther.distributed import init",
                "from ..pipeline import stages",
            ),
        ),
        ("panther.distributed.comm.mesh", ("from panther.distributed.sync.sketches import sync_sketches",)),
    ],
)
def test_the_import_check_objects(module, sources):
    assert [len(upward_imports(source, module)) for source in sources] == [1] * len(sources)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("panther.nn.linear", "import torch\nfrom panther.errors import ShapeError\nfrom ._sketched import Base"),
        ("panther.nn.linear", "from ..sketch import signs\nfrom panther._version import __version__"),
        ("panther.nn.linear", "import panthera\nfrom other.panther import cli"),
        ("panther.kernels.ops", "from . import reference\nfrom panther.kernels._backend import backend"),
        ("panther.cli.demo", "import panther as pr\nfrom panther.distributed import launch\nfrom panther import nn"),
        ("panther.train.trainer", "from panther.distributed import launch\nimport panther.distributed.data.blocks"),
        ("panther.distributed.tensor.unshard", "from panther.nn import SKLinear\nfrom ..comm import mesh"),
        ("panther.distributed.advisor.plan", "from panther.distributed.hybrid import HybridParallelTrainer"),
    ],
)
def test_the_import_check_allows(module, source):
    assert upward_imports(source, module) == []


def test_the_import_check_resolves_a_package_from_within():
    assert upward_imports("from ..cli import main", "panther.nn", is_package=True) == [
        "panther.nn:1 imports panther.cli.main: nn may not import cli"
    ]
    assert upward_imports("from . import cli", "panther", is_package=True)
    assert upward_imports("from . import errors, nn", "panther", is_package=True) == []


def circles() -> list[list[str]]:
    """Groups of modules that import each other, in functions too; not for annotations, and without ``__init__`` files.

    Strongly connected components of the graph of imports: what each module reaches, intersected with what reaches it.
    """
    graph = {}
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text())
        tree.body = [node for node in tree.body if "TYPE_CHECKING" not in ast.unparse(node).partition(":")[0]]
        names = {name for _, name in imported_modules(tree, module, module in PACKAGES)}
        names |= {name.rpartition(".")[0] for name in names}
        graph[module] = {name for name in names if name in MODULES and name not in PACKAGES and name != module}
    reached = {}
    for module in graph:
        seen, waiting = set(), [module]
        while waiting:
            for name in graph[waiting.pop()] - seen:
                seen.add(name)
                waiting.append(name)
        reached[module] = seen
    return sorted({tuple(sorted(o for o in reached[m] if m in reached[o])) for m in reached if m in reached[m]})


def test_no_import_circle_and_no_crowded_folder():
    assert circles() == []
    crowded = {}
    for path in MODULES.values():
        crowded[path.parent.name] = crowded.get(path.parent.name, 0) + 1
    assert {folder: count for folder, count in crowded.items() if count > MAXIMUM_FILES} == {}


def test_import_is_light():
    """The package alone does not wait for torch, and its layers load nothing that only some users need."""
    code = (
        "import sys, panther, panther.errors; assert 'torch' not in sys.modules; import torch;"
        "before = set(sys.modules); panther.nn.SKLinear, panther.compress;"
        "print(*sorted(set(sys.modules) - before), sep='\\n')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    loaded = set(run.stdout.split())
    assert "panther.nn.linear" in loaded
    heavy = {"triton", "sklearn", "matplotlib", "scipy", "panther.distributed", "panther.train.trainer", "panther.cli"}
    assert loaded & heavy == set()


def test_a_name_that_is_missing_comes_with_its_place():
    for name, place in {"SKLinear": "nn.SKLinear", "Trainer": "train.Trainer", "compres": "compress"}.items():
        with pytest.raises(AttributeError, match=f"panther has no attribute '{name}': use panther.{place}$"):
            getattr(panther, name)
    with pytest.raises(AttributeError, match=r"panther has no attribute 'zzz'$"):
        panther.zzz
    assert set(panther.__all__) <= set(dir(panther))


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
            return [part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
    return None


def clashes(module: str, names: set[str], modules: set[str]) -> set[str]:
    """Those of ``names``, defined in ``module``, that a module of the same package already has."""
    package = module if module in PACKAGES else module.rpartition(".")[0]
    return {f"{package}.{name}" for name in names if f"{package}.{name}" in modules}


def test_names_are_listed_documented_and_hide_no_module():
    found = []
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text())
        found += [
            f"{name} is a function and a module"
            for name in clashes(module, public_definitions(path.read_text()), set(MODULES))
        ]
        if not ast.get_docstring(tree):
            found.append(f"{module} needs a docstring")
        # _version holds one name, which setuptools reads.
        if listed_names(tree) is None and module != "panther._version":
            found.append(f"{module} needs __all__")
    for package in PACKAGES:
        parent, _, library = package.rpartition(".")
        if parent == "panther.integrations" and importlib.util.find_spec(library) is None:
            continue  # an adapter is imported where its library is
        imported = importlib.import_module(package)
        for name in imported.__all__:
            if not inspect.ismodule(getattr(imported, name)) and f"{package}.{name}" in MODULES:
                found.append(f"{package}.{name} hides a module")
    assert found == []


def test_the_name_check_objects():
    source = "__all__ = ['qb', 'other']\ndef qb(): ...\ndef _private(): ..."
    assert clashes("panther.linalg.qb", public_definitions(source), {"panther.linalg.qb"}) == {"panther.linalg.qb"}
    assert clashes("panther.linalg._qb", public_definitions(source), {"panther.linalg._qb"}) == set()


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
