"""A model's modules as a table: names, classes, parameters, bytes, and what is sketched or quantized."""

__all__ = ["ModuleTree", "TreeRow", "tree", "tree_of_tensors"]

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from panther._text import counted, format_bytes, format_table
from panther.errors import check_size
from panther.nn import LearnedLinearAttention, RandMultiHeadAttention
from panther.nn._sketched import CompressedModule, SketchedModule, arguments_of

_MODEL = "(the model)"


@dataclass(frozen=True)
class TreeRow:
    """One module.

    Attributes:
        name: Its name, as in ``model.named_modules()``; ``""`` for the model itself.
        kind: The name of its class; ``""`` where only tensors are known.
        parameters: Number of entries of its parameters, those of its children included, shared ones once.
        bytes: Bytes of its tensors as saved, those of its children included, shared ones once.
        form: What it was made into, such as ``"sketched, 1 term of rank 16"``; a tensor that it shares; or ``""``.
    """

    name: str
    kind: str
    parameters: int
    bytes: int
    form: str = ""


@dataclass(frozen=True)
class ModuleTree:
    """The rows of a model, the model itself first. ``print`` shows them."""

    rows: tuple[TreeRow, ...]
    """The rows, parents before their children."""

    def __str__(self) -> str:
        """Return the table, children indented below their parents."""
        lines = [("module", "class", "parameters", "bytes", "form")]
        for row in self.rows:
            own = row.name.rpartition(".")[2]
            indent = "  " * (row.name.count(".") + 1) if row.name else ""
            lines.append((indent + (own or _MODEL), row.kind, f"{row.parameters:,}", format_bytes(row.bytes), row.form))
        changed = sum(bool(row.form) and not row.form.startswith("shares") for row in self.rows)
        text = format_table(lines, align="<<>><")
        return f"{text}\n{counted(changed, 'module')} sketched, quantized or with linear attention"

    def to_dict(self) -> dict[str, Any]:
        """Return the rows as plain numbers and strings."""
        return {"rows": [asdict(row) for row in self.rows]}


def tree(model: nn.Module, depth: int | None = None) -> ModuleTree:
    """Return the modules of a model with their sizes, and what is sketched or quantized.

    Args:
        model: The model; it may be on the meta device. It is only read.
        depth: Levels to list below the model; None lists all. Compressed layers are not divided further.

    Raises:
        TypeError: If the model is not an nn.Module.
        ShapeError: If ``depth`` is below 0.

    Example:
        >>> import panther as pr
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), pr.nn.SKLinear(64, 8, 1, 2, seed=0))
        >>> print(tree(model))
        module       class       parameters    bytes  form
        (the model)  Sequential       4,312  17.3 kB
          0          Linear           4,160  16.6 kB
          1          ReLU                 0      0 B
          2          SKLinear           152    640 B  sketched, 1 term of rank 2
        1 module sketched, quantized or with linear attention
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"tree takes an nn.Module, not a {type(model).__name__}")
    check_depth(depth)
    rows: list[TreeRow] = []
    owners: dict[int, str] = {}

    def visit(module: nn.Module, name: str, level: int) -> None:
        if any(row.name == name for row in rows):
            return
        form = _form(module)
        parameters = {id(p): 0 if is_lazy(p) else p.numel() for p in module.parameters()}
        shared = next((owners[id(p)] for p in module.parameters(recurse=False) if id(p) in owners), None)
        for key, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), f"{name}.{key}".lstrip("."))
        rows.append(
            TreeRow(
                name, type(module).__name__, sum(parameters.values()), _bytes(module),
                form or ("" if shared is None else f"shares {shared}"),
            )
        )  # fmt: skip
        if not isinstance(module, CompressedModule) and (depth is None or level < depth):
            for key, child in module.named_children():
                visit(child, f"{name}.{key}".lstrip("."), level + 1)

    visit(model, "", 0)
    return ModuleTree(tuple(rows))


def tree_of_tensors(
    tensors: Mapping[str, tuple[int, int, bool]], forms: Mapping[str, Mapping[str, Any]], depth: int | None = None
) -> ModuleTree:
    """Return the tree of a file, from names of tensors alone.

    Args:
        tensors: For each name the number of entries, the bytes, and whether it is floating.
        forms: The file's record of each compressed module: its class and arguments.
        depth: As for :func:`tree`.
    """
    check_depth(depth)
    sums: dict[str, list[int]] = {"": [0, 0]}
    for key, (numbers, nbytes, floating) in tensors.items():
        parts = key.split(".")[:-1]
        inside = next((i for i in range(len(parts) + 1) if ".".join(parts[:i]) in forms), len(parts))
        for level in range(min(inside, len(parts)) + 1):
            entry = sums.setdefault(".".join(parts[:level]), [0, 0])
            entry[0] += numbers if floating else 0
            entry[1] += nbytes
    rows = []
    for name, (numbers, nbytes) in sums.items():
        if depth is None or not name or name.count(".") < depth:
            record = forms.get(name, {})
            rows.append(TreeRow(name, str(record.get("class", "")), numbers, nbytes, _recorded_form(record)))
    return ModuleTree(tuple(_ordered(rows)))


def check_depth(depth: int | None) -> None:
    """Raise unless a depth is None or at least 0."""
    if depth is not None:
        check_size("depth", depth, least=0)


def _ordered(rows: list[TreeRow]) -> list[TreeRow]:
    """Return rows with children after their parents, in the order of the file, numbers by value."""

    def key(row: TreeRow) -> list[tuple[int, int | str]]:
        return [(0, int(part)) if part.isdigit() else (1, part) for part in row.name.split(".")] if row.name else []

    return sorted(rows, key=key)


def _bytes(module: nn.Module) -> int:
    """Return the bytes of a module's tensors as saved, each once."""
    seen: dict[Any, int] = {}
    for tensor in module.state_dict(keep_vars=True).values():
        if isinstance(tensor, Tensor) and not is_lazy(tensor):
            seen[id(tensor)] = tensor.numel() * tensor.element_size()
    return sum(seen.values())


def _form(module: nn.Module) -> str:
    if isinstance(module, CompressedModule):
        names = (*module.dense_arguments, *module.size_arguments)
        mode = "" if not isinstance(module, SketchedModule) or not module.is_fitted else "fitted"
        return _recorded_form({"class": type(module).__name__, "args": arguments_of(module, names), "mode": mode})
    if isinstance(module, RandMultiHeadAttention):
        return f"linear attention, {module.num_random_features} features, {module.kernel_fn}"
    if isinstance(module, LearnedLinearAttention):
        return f"linear attention, {module.num_features} features, window {module.window}"
    return ""


def _recorded_form(record: Mapping[str, Any]) -> str:
    """Return the form of a compressed module in words, from its record."""
    if not record:
        return ""
    args: Any = record.get("args", {})
    rank, terms, bits = args.get("low_rank"), args.get("num_terms"), args.get("bits")
    if terms is not None:
        fitted = "fitted, " if record.get("mode") == "fitted" else ""
        return f"sketched, {fitted}{counted(terms, 'term')} of rank {rank}"
    if "bits" in args:
        rest = f"low rank {rank}" if rank else ""
        return " + ".join(filter(None, ("" if bits is None else f"int{bits}", rest)))
    return f"interpolative, rank {rank}"
