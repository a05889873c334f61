"""Records of converted attention in files, from which a new model is converted in the same way.

Records are in the same JSON object as the records of compressed layers, under the name of the attention module. A
record has everything that does not follow from the shapes in the state_dict, such as the window.
"""

__all__ = [
    "attention_as_saved", "attention_record", "attention_records", "check_attention", "check_recorded",
    "convert_as_saved_", "is_attention_record", "optional_names", "sizes_of",
]  # fmt: skip

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from panther._torch import children_of, put_child
from panther.errors import FormatError
from panther.nn.attention.feature_map import KERNELS
from panther.nn.attention.interface import calls_interface
from panther.nn.attention.learned import RECORD, LearnedLinearAttention
from panther.nn.attention.linearized import CHILD, convert_attention
from panther.nn.attention.random_features import RandomFeatureAttention

_MODE = "linear attention"
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # prefixes of activation checkpointing and torch.compile
_LARGEST_SIZE = 1 << 40
_SIZES: dict[str, tuple[str, ...]] = {
    "LearnedLinearAttention": ("num_heads", "head_dim", "num_features", "window"),
    "RandomFeatureAttention": ("num_heads", "head_dim", "num_random_features"),
}
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_WIDTHS = ("head_dim", "attention_head_size", "head_size")


def attention_record(module: nn.Module) -> dict[str, Any] | None:
    """Return the record of a converted attention module; None of all other modules."""
    children = children_of(module)  # the children of a ScriptModule have no get()
    attention: Any = children[CHILD] if CHILD in children else None  # noqa: SIM401
    if not isinstance(attention, LearnedLinearAttention | RandomFeatureAttention):
        return None
    kind = type(attention).__name__
    args = {name: getattr(attention, name) for name in _SIZES.get(kind, ())}
    if isinstance(attention, RandomFeatureAttention):
        args |= {"kernel_fn": attention.kernel_fn, "feature_norm": attention.feature_norm, "seed": attention.seed}
    tensors = (*attention.parameters(), *attention.buffers())
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
    return {"class": kind, "args": args, "mode": _MODE, "dtype": str(dtype).removeprefix("torch.")}


def attention_records(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the records of all converted attention modules by name. The second name of a module is an alias."""
    records: dict[str, dict[str, Any]] = {}
    first_names: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for wrapper in _WRAPPERS:  # Inference files have no such prefixes.
            name = f"{name}.".replace(wrapper, "").removesuffix(".")
        if module in first_names:
            records[name] = {"alias_of": first_names[module]}
        elif (record := attention_record(module)) is not None:
            first_names[module] = name
            records[name] = record
    return records


def is_attention_record(record: Any) -> bool:
    """Return whether a record, or the record that it is an alias of, describes converted attention."""
    return isinstance(record, Mapping) and record.get("mode") == _MODE


def convert_as_saved_(model: nn.Module, records: Mapping[str, Any]) -> tuple[dict[str, Any], dict[nn.Module, Any]]:
    """Convert a model's attention as the records say, in place, without values.

    A module that is already converted as its record says is not changed. Return the records of all other modules, and
    the converted modules, each with the module that it replaced. Raise FormatError if a record does not fit the model,
    which is then not changed.
    """
    names = {name for name, record in records.items() if is_attention_record(record)}
    names |= {name for name, record in records.items() if _alias_of(record) in names}
    present = dict(model.named_modules(remove_duplicate=False))
    converted: dict[nn.Module, nn.Module] = {}
    for name in sorted(names):
        record = records[_alias_of(records[name]) or name]
        if name not in present:
            raise FormatError(
                f"attention {name!r} is linear in the saved model, and the model has no module of that name: give the "
                "saved architecture"
            )
        old = present[name]
        if old is model and attention_record(old) is None:
            raise FormatError(
                f"attention {name!r} is the model itself, which cannot be replaced: wrap it as the saved model"
            )
        if old not in converted and not _is_as_saved(name, record, old):
            converted[old] = _converted(name, record, old)
    _replace_modules(model, converted)
    return {name: record for name, record in records.items() if name not in names}, converted


@contextmanager
def attention_as_saved(model: nn.Module, records: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Convert attention as :func:`convert_as_saved_` does, and yield the other records. An error undoes it."""
    layer_records, converted = convert_as_saved_(model, records)
    try:
        yield layer_records
    except BaseException:
        _replace_modules(model, {new: old for old, new in converted.items()})
        raise


def check_attention(model: nn.Module) -> None:
    """Compare the windows that were loaded without ``load_state_dict`` with the windows of the modules.

    Raises:
        FormatError: If one is different.
    """
    for name, module in model.named_modules():
        if isinstance(module, LearnedLinearAttention) and (difference := module.recorded_difference(module.record)):
            raise FormatError(f"{name!r} {difference}: config.json and weights are of two models, save the model again")
        if isinstance(module, RandomFeatureAttention):
            module._note_center()


def optional_names(model: nn.Module) -> set[str]:
    """Return the names of entries of the state_dict that files of earlier versions do not have."""
    modules = model.named_modules(remove_duplicate=False)
    return {f"{name}.{RECORD}".lstrip(".") for name, module in modules if isinstance(module, LearnedLinearAttention)}


def check_recorded(names: Collection[str], model: nn.Module, source: object) -> None:
    """Raise FormatError if these tensor names belong to linear attention, and the model has no linear attention.

    Files of earlier versions have no record, so only the names of tensors show this. The names of modules are not
    compared, because transformers may save modules under other names.
    """
    places = sorted({name.rpartition(f".{CHILD}.")[0] for name in names if f".{CHILD}." in name})
    if places and not any(attention_record(module) for module in model.modules()):
        raise FormatError(
            f"{source} holds linear attention ({places[0]!r} and {len(places) - 1} more), has no record of how it was "
            "made, and the model has softmax attention: build the model, convert it by pr.linearize_(model, "
            "num_features=..., window=...) with the sizes of the saved model, and load the weights into it by "
            "pr.load_compressed or load_state_dict"
        )


def sizes_of(module: nn.Module) -> tuple[int, int] | None:
    """Return the number of query heads of an attention module and their width, or None if they are unknown."""
    places = [module, getattr(module, "config", None)]
    heads = _first(places, _HEADS)
    width = _first(places, _WIDTHS)
    if isinstance(module, nn.MultiheadAttention):
        return module.num_heads, module.head_dim
    if width is None and heads is not None:
        model_width = _first(places, ("embed_dim", "hidden_size"))
        width = None if model_width is None else model_width // heads
    return None if heads is None or width is None else (heads, width)


def _first(places: list[Any], names: tuple[str, ...]) -> int | None:
    values = (getattr(place, name, None) for place in places for name in names)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


def _alias_of(record: Any) -> str | None:
    alias = record.get("alias_of") if isinstance(record, Mapping) else None
    return alias if isinstance(alias, str) else None  # specs.py refuses other types.


def _checked(name: str, record: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the class and the arguments of a record, if they are allowed."""
    kind, args = record.get("class"), record.get("args")
    if not isinstance(kind, str) or kind not in _SIZES:
        raise FormatError(f"attention {name!r} has class {kind!r}, which is not allowed: only {', '.join(_SIZES)}")
    more = () if kind == "LearnedLinearAttention" else ("kernel_fn", "feature_norm", "seed")
    if (
        not isinstance(args, dict)
        or args.keys() != {*_SIZES[kind], *more}
        or not all(type(args[size]) is int and 0 < args[size] < _LARGEST_SIZE for size in _SIZES[kind])
        or (more and not (args["kernel_fn"] in KERNELS and type(args["seed"]) is int))
        or (more and not (type(args["feature_norm"]) is float and args["feature_norm"] > 0))
    ):
        raise FormatError(
            f"attention {name!r} has arguments {args!r}: {kind} is built from {', '.join((*_SIZES[kind], *more))}"
        )
    return kind, args


def _is_as_saved(name: str, record: Mapping[str, Any], old: nn.Module) -> bool:
    """Return whether a module is already converted. Raise FormatError if it is converted in a different way."""
    own_record = attention_record(old)
    if own_record is None:
        return False
    kind, args = _checked(name, record)
    sizes = {key: value for key, value in args.items() if key not in ("feature_norm", "seed")}
    own_sizes = {key: own_record["args"].get(key) for key in sizes}
    if kind != own_record["class"] or own_sizes != sizes:
        raise FormatError(
            f"attention {name!r} was saved as {kind} with {sizes}, and the model has {own_record['class']} there "
            f"with {own_sizes}: pass a model with softmax attention, which will be converted like the saved model"
        )
    return True


def _converted(name: str, record: Mapping[str, Any], old: nn.Module) -> nn.Module:
    """Return a copy of a module, converted as the record says, without values."""
    kind, args = _checked(name, record)
    if type(old) is not nn.MultiheadAttention and not calls_interface(old):
        raise FormatError(
            f"attention {name!r} is linear in the saved model, and the model has a {type(old).__name__} there, which "
            "cannot be converted: give the saved architecture"
        )
    if (sizes := sizes_of(old)) != (args["num_heads"], args["head_dim"]):
        raise FormatError(
            f"attention {name!r} was saved with {args['num_heads']} heads of width {args['head_dim']}, and the model "
            f"has {sizes}: give the saved architecture"
        )
    first = next((parameter for parameter in old.parameters() if parameter.is_floating_point()), None)
    options: Any = {"device": None if first is None else first.device, "dtype": None if first is None else first.dtype}
    attention: nn.Module
    if kind == "LearnedLinearAttention":
        attention = LearnedLinearAttention(*sizes, args["num_features"], window=args["window"], **options)
    else:
        options |= {"kernel_fn": args["kernel_fn"], "seed": args["seed"]}
        attention = RandomFeatureAttention(*sizes, args["num_random_features"], **options)
        attention.feature_norm = args["feature_norm"]
    if first is not None:
        attention.requires_grad_(first.requires_grad)
    new: nn.Module = convert_attention(old, attention)
    return new


def _replace_modules(model: nn.Module, replacement: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules by new modules in all places where they occur in the model."""
    for parent in list(model.modules()):
        for name, child in children_of(parent).items():
            if child is not None and child in replacement:
                put_child(parent, name, replacement[child])
