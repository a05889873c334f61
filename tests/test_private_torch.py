"""Private names of torch stay in ``panther/_torch`` and ``kernels/_torch.py``, which say why each is needed.

Source is scanned for imports of private names, for private attributes of torch and of its modules, under any name that
they are imported as, and for private attributes of torch's objects, such as ``module._parameters``.
"""

import ast
import importlib
import inspect
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from panther._torch import OVERRIDDEN_METHODS

ROOT = Path(__file__).resolve().parents[1]
# The kernels do not import Panther, so they have a file of their own.
ALLOWED = {*(ROOT / "panther" / "_torch").glob("*.py"), ROOT / "kernels" / "_torch.py"}
FILES = [path for folder in ("panther", "kernels") for path in sorted((ROOT / folder).rglob("*.py"))]

# Private attributes that are read of the objects of other libraries.
OTHER_LIBRARIES = {
    "argparse": {"_SubParsersAction", "_actions", "_option_string_actions"},
    "collections.namedtuple": {"_asdict", "_fields", "_make", "_replace"},
    "multiprocessing": {"_inheriting"},
    "os": {"_exit"},
    "sys": {"_current_frames", "_getframe"},
    "peft": {
        "_check_target_module_exists", "_hf_hook", "_prepare_adapter_config", "_maybe_include_all_linear_layers",
        "_register_custom_module",
    },
    "transformers": {
        "_apply_gate", "_attn_implementation", "_auto_class", "_attn_implementation_internal", "_hf_peft_config_loaded",
        "_init_weights", "_is_expert_parallel", "_keys_to_ignore_on_load_unexpected", "_name_or_path", "_tp_plan",
        "_tp_size",
    },
}  # fmt: skip

# Attributes of torch's classes that are methods or attributes of Panther's classes too, and mean these.
PANTHERS_OWN = {"_check_inputs", "_device", "_scale", "_values"}


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def is_private(name: str) -> bool:
    return name.startswith("_") and name != "_" and not name.endswith("__")


@cache
def names_of_others() -> set[str]:
    """Return the names of Panther's modules and what they define, and the attributes of other libraries."""
    names = set().union(*OTHER_LIBRARIES.values())
    names |= {part for path in FILES for part in path.relative_to(ROOT).with_suffix("").parts}
    for path in FILES:
        for node in nodes_of(path) if path not in ALLOWED else ():
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
                names |= {argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant)}
    return names


@cache
def attributes_of_torch() -> set[str]:
    """Return private attributes of the objects of torch that Panther meets most often."""
    module = nn.LSTM(1, 1)
    instances = [module, torch.optim.SGD(module.parameters(), 0.1), torch.amp.GradScaler("cpu")]
    classes = [
        torch.Tensor,
        DTensor,
        DeviceMesh,
        PipelineStage,
        nn.MultiheadAttention,
        nn.parallel.DistributedDataParallel,
    ]
    names = {name for instance in instances for name in vars(instance)}
    for cls in (*classes, *map(type, instances), torch.fx.Node, torch.fx.Graph, torch.fx.GraphModule):
        names |= {name for base in cls.__mro__ for name in vars(base)}
    return {name for name in names if is_private(name)} - PANTHERS_OWN


def is_in_torch(path: str) -> bool:
    return path.partition(".")[0] == "torch"


def names_bound_to_torch(nodes: list[ast.AST]) -> set[str]:
    """Return the names of a module that are torch, or something in it."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.asname or "torch" for alias in node.names if is_in_torch(alias.name)}
        elif isinstance(node, ast.ImportFrom) and not node.level and is_in_torch(node.module):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def calls_of_overridden(nodes: list[ast.AST]) -> set[ast.AST]:
    """Return the attributes ``super()._name`` inside of methods ``_name`` that are listed in OVERRIDDEN_METHODS."""
    methods = (node for node in nodes if isinstance(node, ast.FunctionDef) and node.name in OVERRIDDEN_METHODS)
    return {
        node
        for method in methods
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == f"super().{method.name}"
    }


def private_uses(nodes: list[ast.AST]) -> list[str]:
    """Return the private names of torch that a module uses, with their lines."""
    torch_names, overridden, uses = names_bound_to_torch(nodes), calls_of_overridden(nodes), set()

    def check(node: ast.expr, owner: ast.expr, name: str) -> None:
        while isinstance(owner, ast.Attribute):
            owner = owner.value
        of_torch = isinstance(owner, ast.Name) and owner.id in torch_names
        if is_private(name) and (of_torch or name in attributes_of_torch() or name not in names_of_others()):
            uses.add((node.lineno, ast.unparse(node)))

    for node in nodes:
        if isinstance(node, ast.Attribute) and node not in overridden:
            check(node, node.value, node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in attributes_of_torch():  # as in `module.__dict__["_parameters"]`
                uses.add((node.lineno, repr(node.value)))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            is_by_name = node.func.id in ("getattr", "setattr", "hasattr", "delattr")
            if is_by_name and isinstance(node.args[1], ast.Constant):
                check(node, node.args[0], node.args[1].value)
        elif isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
            package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            paths = [package + alias.name for alias in node.names if is_in_torch(package + alias.name)]
            uses |= {(node.lineno, path) for path in paths if any(map(is_private, path.split(".")))}
    return [f"{line}: {name}" for line, name in sorted(uses)]


def test_private_names_of_torch_are_in_one_place():
    uses = {str(path.relative_to(ROOT)): private_uses(nodes_of(path)) for path in FILES if path not in ALLOWED}
    # A method of SketchingOperator, which is no module of torch.
    assert uses.pop("panther/sketch/operator.py")[0].endswith(": base._apply")
    assert {path: names for path, names in uses.items() if names} == {}
    assert sum(len(private_uses(nodes_of(path))) for path in ALLOWED) > 75


def overridden_methods(classes: list[type]) -> set[str]:
    """Return the private methods of torch's classes that these classes define anew."""
    overridden = set()
    for cls in classes:
        bases = [base for base in cls.__mro__[1:] if base.__module__.partition(".")[0] == "torch"]
        methods = {name for name, value in vars(cls).items() if inspect.isfunction(value) and is_private(name)}
        overridden |= {name for name in methods if any(name in vars(base) for base in bases)}
    return overridden


def test_private_methods_of_torch_are_overridden_where_listed():
    classes = []
    for path in FILES:
        module = path.relative_to(ROOT).with_suffix("")
        name = ".".join(
            part for part in ("panther", *module.parts[module.parts[0] == "panther" :]) if part != "__init__"
        )
        if name.startswith("panther.integrations.") or name == "panther.__main__":
            continue  # an adapter can be imported where its library is
        imported = importlib.import_module(name)
        classes += [value for value in vars(imported).values() if inspect.isclass(value) and value.__module__ == name]
    assert set() < overridden_methods(classes) <= set(OVERRIDDEN_METHODS)
    # Some methods are those of an older torch than this one.
    assert set(OVERRIDDEN_METHODS) <= {name for cls in classes for name in vars(cls)}
