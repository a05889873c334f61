"""What the programs that read the formats compressed-tensors and GGUF hold, as one table.

:func:`panther.compress` with ``target=`` fits only this, and ``panther export --to`` either format writes only this.
Grids are stored by groups of neighbouring columns. In compressed-tensors all grids are symmetric, and embeddings are
dense.
"""

__all__ = [
    "BLOCK", "FORMATS", "READERS", "Reader", "block_bytes", "decodes_in_silence", "default_reader", "reader_of",
    "why_weight_is_read",
]  # fmt: skip

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

from torch import nn

BLOCK = 32
"""Columns of a block of GGUF, which share a scale."""

_WORD = 32  # bits of an integer in which codes are packed
_INITIALIZES = re.compile(r"init|reset|tie")
_INITIALIZER = "_init_weights"  # of the models of transformers


@dataclass(frozen=True)
class Reader:
    """What a program holds of models in the format compressed-tensors.

    Attributes:
        name: The name by which users ask for it.
        version: The versions for which the table holds.
        was_run: Whether the program was run on exported folders; otherwise its source was read.
        widths: Widths of codes, in bits.
        group_sizes: Sizes of groups of columns, beside entire rows; None is any size.
        fused: Names of layers that the program fuses, which need one width and one group size. :func:`panther.compress`
            gives all layers one width for such a reader.
        packs_heads: Whether the layer that computes a model's logits may be quantized.
        takes_adapters: Whether a correction of low rank may be written as an adapter of PEFT.
        format: The format of the files that the program reads, a value of ``target``.
        zero_point_widths: Widths whose groups may have zero points; the grids of all other widths are symmetric.
        has_blocks: Whether rows are stored in blocks of 32 columns, which need not belong to an nn.Linear: tables of
            embeddings have them too.
    """

    name: str
    version: str
    was_run: bool
    widths: tuple[int, ...]
    group_sizes: tuple[int, ...] | None
    fused: tuple[tuple[str, ...], ...]
    packs_heads: bool
    takes_adapters: bool
    format: str = "compressed-tensors"
    zero_point_widths: tuple[int, ...] = ()
    has_blocks: bool = False

    @property
    def builds_modules(self) -> bool:
        """Return whether the program is written in torch, and puts its own layers into a model of transformers."""
        return not self.has_blocks

    @property
    def held_classes(self) -> str:
        """Return the names of the classes of layers that the program holds in codes."""
        return "nn.Linear and nn.Embedding" if self.has_blocks else "nn.Linear"

    @property
    def has_one_width(self) -> bool:
        """Return whether all layers get one width, so that fused layers have the same."""
        return bool(self.fused)

    def holds(self, layers: Sequence[nn.Module]) -> bool:
        """Return whether the reader holds codes in the place of layers of these classes."""
        kinds = (nn.Linear, nn.Embedding) if self.has_blocks else nn.Linear
        return all(isinstance(layer, kinds) for layer in layers)

    def why_no_group(self, columns: int, group_size: int | None) -> str | None:
        """Return why the reader does not hold groups of ``group_size`` columns (None: entire rows); None if it does."""
        if (group_size is None or group_size >= columns) and not self.has_blocks:
            return None
        if group_size is not None and columns % group_size:
            return f"has rows of {columns} columns, which groups of {group_size} do not divide"
        if self.group_sizes is not None and group_size not in self.group_sizes:
            sizes = ", ".join(map(str, self.group_sizes))
            return f"has groups of {group_size or columns} columns, and {self.name} holds groups of {sizes}"
        return None

    def widths_of(self, columns: int, group_size: int | None, widths: Sequence[int | None]) -> tuple[int, ...]:
        """Return which of ``widths`` a layer may have in a model whose layers have any of these widths.

        A width is left out if a program that decodes all layers with the widest width would take the layer for another
        one, see :func:`decodes_in_silence`.
        """
        held = [bits for bits in widths if bits is not None and bits in self.widths]
        if self.has_one_width or not self.builds_modules:
            return tuple(held)
        pairs = [(wider, first_group) for wider in held for first_group in (None, group_size)]
        return tuple(
            bits for bits in held if not any(decodes_in_silence(columns, bits, group_size, *pair) for pair in pairs)
        )


READERS = {
    reader.name: reader
    for reader in (
        Reader("transformers", "5.23.0 with compressed-tensors 0.20.0", True, (2, 3, 4, 5, 6, 8), None, (), True, True),
        # Kernels of all versions hold two widths and these groups; packed heads fail in some versions of vLLM (pull
        # request 52543), and packed embeddings in most (44340, 45535). Adapters on codes are not known to be right
        # (28791 was closed, and 50059 is open).
        Reader(
            "vllm", "not run; from its source", False, (4, 8), (32, 64, 128),
            (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")), False, False,
        ),
        Reader(
            "llama.cpp", "not run; from the tables of gguf 0.19.0", False, (4, 5, 8), (BLOCK,), (), True, False, "gguf",
            zero_point_widths=(4, 5), has_blocks=True,
        ),
    )
}  # fmt: skip
"""The readers by name."""

FORMATS = tuple(dict.fromkeys(reader.format for reader in READERS.values()))
"""Formats of other programs for which :func:`panther.compress` can fit a model."""


def default_reader(format_name: str) -> str:
    """Return the name of the reader of a format that is meant if no reader is named."""
    return next(name for name, reader in READERS.items() if reader.format == format_name)


def block_bytes(bits: int, *, is_symmetric: bool) -> int:
    """Return the bytes of a block of GGUF: its codes, a scale, and unless it is symmetric a minimum, both of fp16."""
    return BLOCK * bits // 8 + (2 if is_symmetric else 4)


def reader_of(name: str) -> Reader:
    """Return the reader of a name, or raise ValueError."""
    if name not in READERS:
        close = get_close_matches(str(name), READERS, 1)
        guess = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"reader {name!r} is unknown{guess}: use one of {', '.join(map(repr, READERS))}")
    return READERS[name]


def decodes_in_silence(
    columns: int, bits: int, group_size: int | None, wider_bits: int, wider_group_size: int | None
) -> bool:
    """Return whether codes of ``bits`` give a weight of the right shape, and wrong values, when decoded as wider codes.

    ``from_pretrained`` of transformers with ``dequantize=True`` decodes all layers by the first scheme of config.json,
    whatever their own scheme is. Exported folders name the widest scheme first. Narrower layers then have too few
    columns, which is an error, except for the sizes for which this function returns True. A group size of None is
    entire rows.
    """
    if bits >= wider_bits:
        return False  # Groups that differ fail, or one scale for the entire row is right in any group.
    words = -(-columns * bits // _WORD)
    if wider_bits == 4:
        decoded = min(columns, words * _WORD // wider_bits)
    else:  # Words are padded to blocks of 32 codes.
        decoded = min(columns, -(-words // wider_bits) * _WORD)
    groups = 1 if group_size is None else -(-columns // group_size)
    if wider_group_size is None:
        return decoded == columns and groups in (1, columns)
    if decoded % wider_group_size:
        return False
    decoded_groups = decoded // wider_group_size
    if groups not in (1, decoded_groups) and decoded_groups != 1:
        return False
    return max(groups, decoded_groups) * wider_group_size == columns


def why_weight_is_read(model: nn.Module, name: str) -> str | None:
    """Return why a layer cannot be stored in codes if a module around it reads its weight; None if none does.

    A layer in codes has no ``weight`` until its first forward expands the codes. Two kinds of methods read the weight
    before: those of the module that contains the layer, as the feed-forward layers of T5 read the dtype of
    ``self.wo.weight``, and ``_init_weights`` of transformers' models, which runs at the end of loading.
    """
    *path, attribute = name.split(".")
    containers: list[Any] = [type(model.get_submodule(".".join(path[:length]))) for length in range(len(path) + 1)]
    parent = containers[-1]
    if attribute in _read_weights(parent):
        return f"has a weight that {parent.__name__} reads itself, and layers in codes have none before their forward"
    for kind in containers:
        if attribute in _initialized_weights(kind, parent):
            return f"has a weight that {kind.__name__} reads on loading, and layers in codes have none then"
    return None


@cache
def _read_weights(kind: type) -> frozenset[str]:
    """Return the names of layers whose weights the methods of a class read, apart from those that initialize them."""
    names: set[str] = set()
    for base in kind.__mro__:
        if base in (nn.Module, object):
            continue
        for method_name, method in vars(base).items():
            if inspect.isfunction(method) and not _INITIALIZES.search(method_name):
                names |= {node.value.attr for node in _attributes(_parsed(method), "self") if node.attr == "weight"}
    return frozenset(names)


@cache
def _initialized_weights(kind: type, parent: type) -> frozenset[str]:
    """Return the names of layers in a module of class ``parent`` whose weights ``kind._init_weights`` reads."""
    names: set[str] = set()
    for base in kind.__mro__:
        if not inspect.isfunction(vars(base).get(_INITIALIZER)):
            continue
        method = inspect.unwrap(vars(base)[_INITIALIZER])
        argument = [*inspect.signature(method).parameters][-1]
        for branch in ast.walk(_parsed(method)):
            if isinstance(branch, ast.If) and issubclass(parent, _tested_classes(branch.test, method.__globals__)):
                nodes = [node for statement in branch.body for node in _attributes(statement, argument)]
                names |= {node.value.attr for node in nodes if node.attr == "weight"}
    return frozenset(names)


def _parsed(method: Any) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, SyntaxError):  # of a class without a file, or a lambda in the middle of an expression
        return ast.Module([], [])


def _attributes(tree: ast.AST, name: str) -> Iterator[Any]:
    """Yield the expressions of the form ``name.layer.attribute``."""
    for node in ast.walk(tree):
        layer = node.value if isinstance(node, ast.Attribute) else None
        if isinstance(layer, ast.Attribute) and isinstance(layer.value, ast.Name) and layer.value.id == name:
            yield node


def _tested_classes(test: ast.AST, names: Mapping[str, Any]) -> tuple[type, ...]:
    """Return the classes that an expression with ``isinstance`` tests for."""
    calls = [node for node in ast.walk(test) if isinstance(node, ast.Call)]
    tests = [call.args[1] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "isinstance"]
    classes = [names.get(node.id) for each in tests for node in ast.walk(each) if isinstance(node, ast.Name)]
    return tuple(kind for kind in classes if isinstance(kind, type))
