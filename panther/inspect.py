"""A model's modules as a table: names, classes, shapes, parameters, bytes, and what is sketched or quantized."""

__all__ = ["ModuleTree", "TreeComparison", "TreeRow", "tree"]

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from panther._text import counted, format_bytes, format_table
from panther.errors import check_size
from panther.nn import LearnedLinearAttention
from panther.nn.attention.feature_map import FeatureMap
from panther.nn.attention.linearized import CHILD
from panther.nn.attention.record import is_attention_record
from panther.nn.protocol import CompressedModule, allowed_layers, arguments_of
from panther.nn.sketch_record import plain_state

_MODEL = "(the model)"


@dataclass(frozen=True)
class TreeRow:
    """One module.

    Attributes:
        name: The name, as in ``model.named_modules()``; ``""`` for the model itself.
        kind: The name of the class; ``""`` if only tensors are known.
        parameters: Number of entries of all parameters, including children. Shared parameters count once.
        bytes: Bytes of all tensors as saved, including children. Shared tensors count once.
        form: The compressed form, such as ``"sketched, 1 term of rank 16"``, a tensor that the module shares, or
            ``""``.
        shapes: Shapes of the parameters without children, such as ``"weight 8x64, bias 8"``; for files of all tensors.
        trainable: Number of trained entries; None if only tensors are known.
    """

    name: str
    kind: str
    parameters: int
    bytes: int
    form: str = ""
    shapes: str = ""
    trainable: int | None = None

    @property
    def label(self) -> str:
        """Return the end of the name, indented by its depth."""
        indent = "  " * (self.name.count(".") + 1) if self.name else ""
        return indent + (self.name.rpartition(".")[2] or _MODEL)


@dataclass(frozen=True)
class ModuleTree:
    """A model and its modules, as a table if printed."""

    rows: tuple[TreeRow, ...]
    """The rows: the model first, and parents before their children."""
    changed: int = 0
    """Number of modules that were sketched, quantized or given linear attention, including unlisted levels."""

    def __str__(self) -> str:
        """Return a table with children indented below their parents."""
        lines = [("module", "class", "shapes", "parameters", "trained", "bytes", "form")]
        lines += [
            (row.label, row.kind, row.shapes, f"{row.parameters:,}", _trained(row), format_bytes(row.bytes), row.form)
            for row in self.rows
        ]
        text = format_table(lines, align="<<<><><")
        return f"{text}\n{counted(self.changed, 'module')} sketched, quantized or with linear attention"

    def to_dict(self) -> dict[str, Any]:
        """Return the rows as plain numbers and strings."""
        return {"rows": [asdict(row) for row in self.rows]}

    def compare(self, other: "ModuleTree") -> "TreeComparison":
        """Return what is different in another tree, such as the tree of the compressed model.

        Example:
            >>> model = nn.Sequential(
            ...     nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)
            ... )
            >>> small = nn.Sequential(
            ...     model[0], nn.ReLU(), nn.Linear(64, 8, bias=False)
            ... )
            >>> print(tree(model).compare(tree(small)))
            module       class       parameters      trained  bytes               form
            (the model)  Sequential  4,680 -> 4,672  yes      18.7 kB
              2          Linear      520 -> 512      yes      2.08 kB -> 2.05 kB
            2 of 4 modules are different, and the model has 99.8 % of its bytes
        """
        return TreeComparison(self, other)


@dataclass(frozen=True)
class TreeComparison:
    """Two trees, whose modules are compared by name. ``print`` shows the modules that differ.

    Attributes:
        before: The first tree.
        after: The second tree.
    """

    before: ModuleTree
    after: ModuleTree

    @property
    def pairs(self) -> list[tuple[TreeRow | None, TreeRow | None]]:
        """Return the pairs of rows that differ or occur in only one tree, and the pair of the models."""
        before, after = ({row.name: row for row in tree.rows} for tree in (self.before, self.after))
        names = [row.name for row in _ordered([*{**after, **before}.values()])]
        pairs = [(before.get(name), after.get(name)) for name in names]
        return [pair for name, pair in zip(names, pairs, strict=True) if not name or _differ(*pair)]

    def __str__(self) -> str:
        """Return a table of the modules that differ."""
        lines: list[tuple[str, ...]] = [("module", "class", "parameters", "trained", "bytes", "form")]
        for pair in self.pairs:
            present = next(row for row in pair if row is not None)
            cells = [
                ("-",) * 5
                if row is None
                else (row.kind or present.kind, f"{row.parameters:,}", _trained(row), format_bytes(row.bytes), row.form)
                for row in pair
            ]
            lines.append((present.label, *(_change(old, new) for old, new in zip(*cells, strict=True))))
        size = [tree.rows[0].bytes for tree in (self.before, self.after)]
        num_modules = len({row.name for tree in (self.before, self.after) for row in tree.rows})
        num_different = sum(_differ(*pair) for pair in self.pairs)
        share = f"{size[1] / size[0]:.1%}".replace("%", " %") if size[0] else "none"
        return (
            f"{format_table(lines)}\n{num_different} of {counted(num_modules, 'module')} are different, and the model "
            f"has {share} of its bytes"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the pairs as plain numbers and strings."""
        return {"rows": [[None if row is None else asdict(row) for row in pair] for pair in self.pairs]}


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
        >>> model = nn.Sequential(
        ...     nn.Linear(64, 64),
        ...     nn.ReLU(),
        ...     pr.nn.SKLinear(64, 8, 1, 2, bias=False, seed=0),
        ... )
        >>> _ = model[0].requires_grad_(False)
        >>> print(tree(model))
        module       class       shapes                 parameters  trained    bytes  form
        (the model)  Sequential                              4,304  144      17.2 kB
          0          Linear      weight 64x64, bias 64       4,160  no       16.6 kB
          1          ReLU                                        0               0 B
          2          SKLinear    S1 64x2, S2 2x8               144  yes        608 B  sketched, sparse, 1 term of rank 2
        1 module sketched, quantized or with linear attention
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"tree takes an nn.Module, not {type(model).__name__}")
    check_depth(depth)
    rows: list[TreeRow] = []
    names: set[str] = set()
    owners: dict[int, str] = {}

    def visit(module: nn.Module, name: str) -> None:
        if name in names:
            return
        names.add(name)
        form = _form(module)
        parameters = {p: 0 if is_lazy(p) else p.numel() for p in module.parameters()}
        own_shapes = {key: None if is_lazy(p) else tuple(p.shape) for key, p in module.named_parameters(recurse=False)}
        shared = next((owners[id(p)] for p in module.parameters(recurse=False) if id(p) in owners), None)
        for key, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), f"{name}.{key}".lstrip("."))
        rows.append(
            TreeRow(
                name, type(module).__name__, sum(parameters.values()), _bytes(module),
                form or ("" if shared is None else f"shares {shared}"), _shapes(own_shapes),
                sum(number for parameter, number in parameters.items() if parameter.requires_grad),
            )
        )  # fmt: skip
        if not isinstance(module, CompressedModule):
            for key, child in module.named_children():
                visit(child, f"{name}.{key}".lstrip("."))

    visit(model, "")
    changed = sum(bool(row.form) and not row.form.startswith("shares") for row in rows)
    return ModuleTree(tuple(row for row in rows if _is_listed(row.name, depth)), changed)


def tree_of_tensors(
    tensors: Mapping[str, tuple[tuple[int, ...], int, bool]],
    forms: Mapping[str, Mapping[str, Any]],
    depth: int | None = None,
) -> ModuleTree:
    """Return the tree of a file from its tensors by name: shape, bytes, and whether they are floating.

    ``forms`` has the file's record of each compressed module: its class and arguments.
    """
    check_depth(depth)
    # The record has the name of the attention module, but only its child has new tensors.
    forms = {f"{name}.{CHILD}" if is_attention_record(spec) else name: spec for name, spec in forms.items()}
    sums: dict[str, list[int]] = {"": [0, 0]}
    shapes: dict[str, dict[str, tuple[int, ...] | None]] = {}
    for key, (shape, nbytes, floating) in tensors.items():
        numbers = math.prod(shape)
        parts = key.split(".")[:-1]
        inside = next((i for i in range(len(parts) + 1) if ".".join(parts[:i]) in forms), len(parts))
        last = min(inside, len(parts))
        shapes.setdefault(".".join(parts[:last]), {})[".".join(key.split(".")[last:])] = shape
        for level in range(last + 1):
            entry = sums.setdefault(".".join(parts[:level]), [0, 0])
            entry[0] += numbers if floating else 0
            entry[1] += nbytes
    rows = []
    for name, (numbers, nbytes) in sums.items():
        if _is_listed(name, depth):
            record = forms.get(name, {})
            kind, form = str(record.get("class", "")), _recorded_form(record)
            rows.append(TreeRow(name, kind, numbers, nbytes, form, _shapes(shapes.get(name, {}))))
    return ModuleTree(tuple(_ordered(rows)), sum(name in forms for name in sums))


def _is_listed(name: str, depth: int | None) -> bool:
    return depth is None or not name or name.count(".") < depth


def check_depth(depth: int | None) -> None:
    """Raise unless a depth is None or at least 0."""
    if depth is not None:
        check_size("depth", depth, least=0)


def _ordered(rows: list[TreeRow]) -> list[TreeRow]:
    """Return the rows sorted by name, with parents first and numbers in numerical order."""

    def key(row: TreeRow) -> list[tuple[int, int | str]]:
        return [(0, int(part)) if part.isdigit() else (1, part) for part in row.name.split(".")] if row.name else []

    return sorted(rows, key=key)


def _shapes(shapes: Mapping[str, tuple[int, ...] | None]) -> str:
    """Describe shapes by name. None is the shape of an uninitialised parameter."""
    return ", ".join(
        f"{name} {'?' if shape is None else 'x'.join(map(str, shape)) or 'scalar'}" for name, shape in shapes.items()
    )


def _trained(row: TreeRow) -> str:
    if row.trainable is None or not row.parameters:
        return ""
    return "no" if not row.trainable else "yes" if row.trainable == row.parameters else f"{row.trainable:,}"


def _differ(before: TreeRow | None, after: TreeRow | None) -> bool:
    """Return whether two rows differ in values that are known for both."""
    if before is None or after is None:
        return bool((before or after).bytes)  # type: ignore[union-attr]  # Files do not have modules without tensors.
    if any(getattr(before, name) != getattr(after, name) for name in ("parameters", "bytes", "form")):
        return True
    both = ((before.kind, after.kind), (before.trainable, after.trainable))
    return any(old != new and not {old, new} & {"", None} for old, new in both)


def _change(before: str, after: str) -> str:
    return before if before == after else f"{before or '-'} -> {after or '-'}"


def _bytes(module: nn.Module) -> int:
    """Return the bytes of a module's saved tensors, counting each tensor once."""
    bytes_by_tensor: dict[Any, int] = {}
    for tensor in plain_state(module, keep_vars=True).values():
        if isinstance(tensor, Tensor) and not is_lazy(tensor):
            bytes_by_tensor[id(tensor)] = tensor.numel() * tensor.element_size()
    return sum(bytes_by_tensor.values())


def _form(module: nn.Module) -> str:
    if isinstance(module, CompressedModule):
        return module.describe_form(arguments_of(module, module.size_arguments), module.record_mode)
    if isinstance(module, FeatureMap):
        return f"linear attention, {module.num_random_features} features, {module.kernel_fn}"
    if isinstance(module, LearnedLinearAttention):
        return f"linear attention, {module.num_features} features, window {module.window}"
    return ""


def _recorded_form(record: Mapping[str, Any]) -> str:
    """Describe the form of a compressed module from its record."""
    if not record:
        return ""
    args: Any = record.get("args", {})
    if is_attention_record(record):
        features, kernel = args.get("num_features", args.get("num_random_features")), args.get("kernel_fn")
        return f"linear attention, {features} features, {kernel or 'window ' + str(args.get('window'))}"
    name = str(record.get("class"))
    kind = allowed_layers().get(name)
    # A file can be of a form that this process does not know, or damaged.
    if kind is None or not set(kind.size_arguments) <= args.keys():
        return name
    return kind.describe_form(args, str(record.get("mode")))
