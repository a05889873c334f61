"""The house rules that no linter knows: imports go only downward, the package stays light, names do not collide.

Each rule is one test that lists all offenders.
"""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
import waits
from panther.kernels import has_compiled_kernel
from torch import nn

import panther

ROOT = Path(__file__).resolve().parents[1]

# Lowest first. `panther` itself, the face that gathers the layers, stands above all but the adapters and the command
# line; modules with an underscore, `errors`, `files` and the base of settings below all. A layer may import
# itself and every lower one; `kernels` knows nothing of panther.
LAYERS = (
    "_version", "_text", "_docstrings", "_logs", "_hints", "_descriptions", "_model_libraries", "errors",
    "files", "_settings", "_torch", "_process_settings",
    "kernels", "sketch", "linalg", "nn", "inspect", "compat", "distributed", "optim", "train",
    "compression", "tuning", "", "integrations", "cli", "__main__",
)  # fmt: skip
FORBIDDEN = {"kernels": set(LAYERS[: LAYERS.index("kernels")])}

# Within these packages: the level of each sub-package. A sub-package may import itself and all lower levels, but no
# other sub-package of its own level, and not the package as a whole (""), whose `__init__` may import all.
LEVELS = {
    "distributed": {
        "comm": 0,
        "launcher": 1, "preflight": 1, "sync": 1,
        "context": 2, "data": 2, "tensor": 2, "pipeline": 2,
        "checkpoint": 3, "parallelize": 3,
        "guide": 4, "materialize": 4,
        "advisor": 5,
        "": 6,
    },
    "compression": {
        "calibration": 0, "readers": 0, "moments": 1, "forms": 2,
        "config": 3, "selection": 3, "weights": 3,
        "report": 4,
        "healing": 5,
        "linearization": 6, "preparation": 6,
        "_compress": 7, "streaming": 8, "": 9,
    },
    "tuning": {
        "goal": 0, "guards": 0, "plan": 0,
        "attention": 1, "config": 1, "plots": 1,
        "compressed_models": 2, "evaluation": 3, "result": 3,
        "space": 3, "study": 4, "runners": 5,
        "search": 6, "": 7,
    },
}  # fmt: skip
MAXIMUM_FILES = 20
MAXIMUM_ENTERED = 40  # by a small pr.compress


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


@cache
def parsed(source: str) -> ast.Module:
    """Return the syntax tree of a source, which no caller changes."""
    return ast.parse(source)


def imported_modules(tree: ast.Module, module: str, is_package: bool) -> list[tuple[int, str]]:
    """Line and dotted name of each import, at the top level or in a function, also by ``import_module`` and the like.

    ``from panther import nn`` counts as ``panther.nn``, and ``from panther.nn import SKLinear`` as
    ``panther.nn.SKLinear``: names beyond a module do not matter here.
    """
    package = module if is_package else module.rpartition(".")[0]
    imports = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            imports += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            name = node.args[0].value
            if called in ("import_module", "__import__", "require_extra") and isinstance(name, str):
                imports.append((node.lineno, importlib.util.resolve_name(name, package)))
    return imports


def upward_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """One sentence for each import of ``source`` that the order forbids."""
    layer, part = (*module.split("."), "", "")[1:3]
    if layer not in LAYERS:
        return [f"{module} is in no layer: give {layer!r} its place in LAYERS"]
    levels = LEVELS.get(layer, {"": 0})
    in_subpackage = is_package or module.count(".") > 2
    if part not in levels and layer in LEVELS and (in_subpackage or layer == "distributed"):
        return [f"{module} has no level: give {part!r} its place in LEVELS[{layer!r}]"]
    allowed = set(LAYERS[: LAYERS.index(layer) + 1]) - FORBIDDEN.get(layer, set())
    complaints = []
    for line, name in imported_modules(parsed(source), module, is_package):
        root, target, target_part = (*name.split("."), "", "")[:3]
        if root != "panther":
            continue
        if target not in LAYERS:  # a name of the package itself: `from panther import SKLinear`
            target = ""
        complaint = f"{module}:{line} imports {name}: "
        if target not in allowed:
            complaints.append(f"{complaint}{layer or 'panther'} may not import {target or 'panther'}")
        elif layer == target and part in levels:
            if f"panther.{layer}.{target_part}" not in MODULES:  # a name of the sub-package's parent
                target_part = ""
            if target_part != part and levels.get(target_part, -2) >= levels[part]:
                complaints.append(f"{complaint}{part} may not import {target_part or 'the whole package'}")
    return complaints


def test_imports_go_only_downward():
    complaints = []
    for module, path in MODULES.items():
        complaints += upward_imports(path.read_text(), module, module in PACKAGES)
    assert complaints == []


def test_kernels_are_chosen_in_one_place():
    """Only ``kernels.ops`` decides which kernel computes a layer: layers import no backend of the kernels."""
    backends = re.compile(r"panther\.kernels\.(_|cpu\b|selection\b)")
    complaints = [
        f"{module}:{line} imports {name}"
        for module, path in MODULES.items()
        if module.split(".")[1:2] == ["nn"]
        for line, name in imported_modules(parsed(path.read_text()), module, module in PACKAGES)
        if backends.match(name)
    ]
    assert complaints == []


def named_layers(source: str) -> set[str]:
    """Names of classes of compressed layers that the code of a module names, imported or as attributes."""
    from panther.nn.protocol import CompressedModule

    kinds, waiting = set(), [CompressedModule]
    while waiting:
        waiting += waiting.pop().__subclasses__()
        kinds |= {kind.__name__ for kind in waiting if kind.__module__.startswith("panther.nn.")}
    nodes = list(ast.walk(parsed(source)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return kinds & (names | {node.name for node in nodes if isinstance(node, ast.alias)})


def test_adapters_ask_layers_by_their_protocol():
    """No adapter names a class of layers, so that it knows each layer that somebody adds."""
    complaints = {
        module: names
        for module, path in MODULES.items()
        if module.startswith("panther.integrations") and (names := named_layers(path.read_text()))
    }
    assert complaints == {}


def circles(sources: dict[str, str], packages: set[str]) -> list[tuple[str, ...]]:
    """Groups of modules that import each other, in functions too; imports for annotations do not count.

    Strongly connected components of the graph of imports: what each module reaches, intersected with what reaches it. A
    module of a package does not count as importing the package, unless it names it.
    """
    graph = {}
    for module, source in sources.items():
        statements = [
            node
            for node in parsed(source).body
            if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        ]
        tree = ast.Module(statements, [])
        names = {name for _, name in imported_modules(tree, module, module in packages)}
        graph[module] = {name if name in sources else name.rpartition(".")[0] for name in names} & set(sources) - {
            module
        }
    reached = {}
    for module in graph:
        visited, waiting = set(), [module]
        while waiting:
            for name in graph[waiting.pop()] - visited:
                visited.add(name)
                waiting.append(name)
        reached[module] = visited
    groups = {tuple(sorted(other for other in reached[m] if m in reached[other])) for m in reached}
    return sorted(group for group in groups if group)


def test_no_import_circle_and_no_crowded_folder():
    assert circles({module: path.read_text() for module, path in MODULES.items()}, PACKAGES) == []
    sizes = Counter(path.parent.relative_to(ROOT).as_posix() for path in MODULES.values())
    assert {folder: size for folder, size in sizes.items() if size > MAXIMUM_FILES} == {}


def test_a_small_compression_enters_few_files():
    """Whoever follows a call reads these files. The first call, which loads and compiles, is not counted."""
    compress, sources, entered = panther.compress, {str(path) for path in MODULES.values()}, set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename in sources:
            entered.add(Path(frame.f_code.co_filename).relative_to(ROOT).as_posix())

    batches = [torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    profiler = sys.getprofile()
    for function in (None, note):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))
        sys.setprofile(function or profiler)
        try:
            compress(model, bits=6, calibration=batches, measure_speed=False, seed=0)
        finally:
            sys.setprofile(profiler)
    assert "panther/compression/_compress.py" in entered
    entered.discard("panther/integrations/import_hook.py")  # Python asks it in each search for a module.
    without_compiler = not has_compiled_kernel()  # its codes are unpacked by a file more
    assert len(entered) <= MAXIMUM_ENTERED + without_compiler, sorted(entered)


def test_import_is_light():
    """The package alone does not wait for torch, and its layers load nothing that only some users need."""
    code = (
        "import sys, panther, panther.errors; assert 'torch' not in sys.modules; import torch;"
        "before = set(sys.modules); panther.nn.SKLinear, panther.compress;"
        "print(*sorted(set(sys.modules) - before), sep='\\n')"
    )
    run = waits.run([sys.executable, "-c", code], check=True)
    loaded = set(run.stdout.split())
    assert "panther.nn.linear" in loaded
    # Of panther.distributed, only the settings of parallelism are loaded, which need no torch.
    heavy = {"triton", "sklearn", "matplotlib", "scipy", "panther.train.trainer", "panther.cli"}
    heavy |= {"panther.distributed.comm", "panther.distributed.parallelize.build"}
    assert loaded & heavy == set()


def test_a_name_that_is_missing_comes_with_its_place():
    for name, place in {"SKLinear": "nn.SKLinear", "Trainer": "train.Trainer"}.items():
        with pytest.raises(AttributeError, match=f"panther has no attribute '{name}': use panther.{place}$"):
            getattr(panther, name)
    with pytest.raises(AttributeError, match=r"panther has no attribute 'compres': did you mean 'compress'\?$"):
        panther.compres
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
