"""Fitted SKLinear and SKConv2d layers in folders of earlier versions, which load as low-rank layers."""

__all__ = ["as_low_rank_layers"]

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from panther.errors import FormatError
from panther.nn.sketch_record import read_record

_CLASSES = {"SKLinear": "LowRankLinear", "SKConv2d": "LowRankConv2d"}
_FACTORS = {"SKLinear": ("S1", "U2", "U1", "S2"), "SKConv2d": ("S", "U")}
_SIZES = ("num_terms", "low_rank")


def as_low_rank_layers(
    modules: Mapping[str, Any], aliases: Mapping[str, str], state: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, str], dict[str, Tensor]]:
    """Return records, aliases and tensors of a folder with low-rank layers in the place of fitted layers.

    Formats 1 and 2 stored a weight of low rank as a fitted SKLinear of four factors, or as a fitted SKConv2d.

    Raises:
        FormatError: If the factors of a layer do not fit together.
        SketchMismatchError: If the record of a layer's sketch is damaged.
    """
    new_modules, new_aliases, new_state = dict(modules), dict(aliases), dict(state)
    factors_by_id: dict[tuple[int, ...], tuple[str, tuple[Tensor, Tensor]]] = {}
    for name, spec in modules.items():
        record = modules.get(spec.get("alias_of", name), spec)
        kind, args = record.get("class"), record.get("args")
        if (
            not isinstance(kind, str)
            or kind not in _CLASSES
            or record.get("mode") != "fitted"
            or not isinstance(args, dict)
        ):
            continue
        prefix = f"{name}." if name else ""
        keys = [prefix + key for key in (*_FACTORS[kind], "sketch_seed")]
        if not all(type(args.get(size)) is int for size in _SIZES) or not all(key in state for key in keys):
            continue  # Loading the layer says what is wrong.
        *old_factors, seed_record = (new_state.pop(key) for key in keys)
        read_record(seed_record, args["num_terms"], keys[-1])
        for key in keys:
            new_aliases.pop(key, None)
        identity = tuple(map(id, old_factors))
        if identity not in factors_by_id:
            factors_by_id[identity] = prefix, _joined(old_factors, name)
        first_prefix, factors = factors_by_id[identity]
        for key, factor in zip(("down", "up"), factors, strict=True):
            new_state[prefix + key] = factor
            if prefix != first_prefix:
                new_aliases[prefix + key] = first_prefix + key
        if "alias_of" not in spec:
            dense_arguments = {key: value for key, value in args.items() if key not in _SIZES}
            rank = 2 * args["num_terms"] * args["low_rank"]
            new_modules[name] = {
                **spec, "class": _CLASSES[kind], "args": dense_arguments | {"rank": rank}, "mode": "stored",
            }  # fmt: skip
    return new_modules, new_aliases, new_state


def _joined(factors: list[Tensor], name: str) -> tuple[Tensor, Tensor]:
    if len(factors) == 2:
        return factors[0], factors[1]
    S1, U2, U1, S2 = factors
    try:
        return torch.cat((S1, U2), 1), torch.cat((U1, S2))
    except (RuntimeError, IndexError) as error:
        raise FormatError(f"module {name!r} has factors that do not fit together ({error})") from None
