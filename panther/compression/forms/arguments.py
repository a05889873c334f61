"""Check the arguments of compression before anything runs; each message states the rule, the value and the fix."""

__all__ = ["CALIBRATED", "METHODS", "check_adapters", "check_model", "check_options", "checked_forms"]

import math
import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from panther.compression.config import HealConfig
from panther.compression.forms.options import DEFAULT_FORMS, DENSE, INT8_LOW_RANK, KNOWN_FORMS, LOW_RANK, Forms
from panther.errors import CompressionError, check_size
from panther.nn.quantized.activations import check_activations

METHODS = ("two_sided", "activation", "svd", "random")
CALIBRATED = ("two_sided", "activation")


def check_model(model: Any) -> None:
    """Raise unless the argument is a module whose layers can be replaced."""
    if not isinstance(model, nn.Module):
        instance = f"the class {model.__name__}: pass an instance of it" if isinstance(model, type) else None
        raise TypeError(f"the model must be an nn.Module, not {instance or f'a {type(model).__name__}'}")
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        raise CompressionError(
            f"the model is wrapped in {type(model).__name__}, which keeps references to the old parameters: compress "
            "model.module, and wrap it again"
        )
    for name, parameter in model.named_parameters():
        # A DTensor is recognized by its method, because torch may be built without DTensor.
        if hasattr(parameter, "full_tensor"):
            raise CompressionError(
                f"{name!r} is a DTensor, on a device mesh: compress the model before it is sharded, or compress "
                "panther.distributed.unshard_module(model)"
            )


def check_adapters(model: nn.Module) -> None:
    """Raise if layers have adapters of PEFT.

    PEFT merges adapters into a dense weight, and would lose them if the layer was replaced. The adapters themselves are
    pairs of nn.Linear, and would be compressed too.
    """
    peft: Any = sys.modules.get("peft.tuners.tuners_utils")  # no model has adapters before this module is imported
    if peft is None:
        return
    adapted = [name for name, module in model.named_modules() if isinstance(module, peft.BaseTunerLayer)]
    if adapted:
        raise CompressionError(
            f"{len(adapted)} of the layers have adapters of PEFT (first {adapted[0]!r}), which would be compressed "
            "too: detach them (unload() of the PEFT model) or merge them (merge_and_unload()), compress the base "
            "model, and attach adapters to the result (import panther.integrations.peft)"
        )


def checked_forms(
    forms: Any, rank_multiple: int, group_size: int | None, method: str, activations: str | None
) -> Forms:
    """Return the forms to choose from (by default all forms that the method can make), or raise if there are none."""
    if forms is None:
        forms = (DENSE, LOW_RANK) if method == "random" else DEFAULT_FORMS
    if not isinstance(forms, Iterable):
        raise TypeError(f"forms must be names of forms, such as ('int4', 'low_rank'), not {type(forms).__name__}")
    names = (forms,) if isinstance(forms, str) else tuple(forms)
    for name in names:
        if name not in KNOWN_FORMS:
            close = get_close_matches(str(name), KNOWN_FORMS, 1)
            guess = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"form {name!r} is unknown{guess}: use some of {', '.join(map(repr, KNOWN_FORMS))}")
    if not set(names) - {DENSE}:
        raise ValueError(f"forms={names} has no form but 'dense', which changes nothing: add one, such as 'low_rank'")
    if method == "random" and not {DENSE, LOW_RANK}.issuperset(names):
        raise ValueError("method='random' makes seeded sketches only: leave forms out, or use another method")
    if check_size("rank_multiple", rank_multiple, least=2) % 2:
        raise ValueError(f"rank_multiple={rank_multiple} must be even, because a low-rank layer has two halves")
    if group_size is not None:
        check_size("group_size", group_size, least=1)
    eligible_forms = Forms(tuple(dict.fromkeys(names)), rank_multiple, group_size, check_activations(activations))
    if activations is not None and not eligible_forms.widths and INT8_LOW_RANK not in names:
        raise ValueError(
            f"activations={activations!r} is for quantized forms, and forms={names} has none: add one, such as 'int8', "
            "or leave activations out"
        )
    return eligible_forms


def check_options(
    sizes: Mapping[str, Any], method: str, allocate: str | None, loss_fn: Any, sequential: bool, calibration: Any,
    heal: Any, measure_speed: bool, allow_slower: bool | None,
) -> None:  # fmt: skip
    """Raise if an option is unknown or out of range, or if options exclude each other."""
    choices = (("method", method, METHODS), ("allocate", allocate or "global", ("global", "uniform")))
    for name, value, names in choices:
        if value not in names:
            raise ValueError(f"{name}={value!r} is unknown: use one of {', '.join(map(repr, names))}")
    set_sizes = {name: value for name, value in sizes.items() if value is not None}
    *first_names, last_name = sizes
    if len(set_sizes) != 1:
        raise ValueError(
            f"exactly one of {', '.join(first_names)} and {last_name} must be given, not "
            f"{' and '.join(set_sizes) or 'none'}: budget=0.5 keeps half of the eligible layers' bytes"
        )
    for name, value in set_sizes.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(
                f"{name} must be a number, not {type(value).__name__}: give one, such as budget=0.5 or bits=4.25"
            )
        if not 0 < value < math.inf or (name == "budget" and value > 1) or (name == "speedup" and value < 1):
            rule = {"budget": "a fraction in (0, 1]", "speedup": "finite and at least 1"}.get(
                name, "positive and finite"
            )
            raise ValueError(f"{name}={value!r} must be {rule}")
    _check_calibrated(set_sizes, method, allocate, loss_fn, sequential, calibration, heal)
    if allow_slower is not None and not isinstance(allow_slower, bool):
        raise TypeError(f"allow_slower must be None, True or False, not {type(allow_slower).__name__}")
    targets = [name for name in ("speedup", "max_latency_ms") if name in set_sizes]
    timed = targets[0] if targets else "allow_slower=False" if allow_slower is False else None
    if timed and not measure_speed:
        raise ValueError(f"{timed} needs measured times, and measure_speed=False forbids them: leave measure_speed out")
    if timed and calibration is None:
        raise ValueError(f"{timed} needs calibration=, a list of batches, because layers are timed on one of them")


def _check_calibrated(
    sizes: Mapping[str, Any],
    method: str,
    allocate: str | None,
    loss_fn: Any,
    sequential: bool,
    calibration: Any,
    heal: Any,
) -> None:
    max_error = sizes.get("max_error")
    if calibration is None and (method in CALIBRATED or max_error is not None or heal is not None):
        option = f"method={method!r}" if method in CALIBRATED else "max_error" if max_error is not None else "heal"
        raise ValueError(f"{option} needs calibration=, a list of batches: or use method='svd' with a budget")
    if method != "two_sided" and (allocate == "global" or loss_fn is not None):
        option = "allocate='global'" if allocate == "global" else "loss_fn"
        raise ValueError(f"{option} needs method='two_sided', the only one that uses the output's gradients")
    if sequential and method not in CALIBRATED:
        raise ValueError(f"sequential=True fits layers to their inputs, which method={method!r} does not: leave it out")
    if heal is not None and not isinstance(heal, HealConfig):
        raise TypeError(f"heal must be a HealConfig, not {type(heal).__name__}")
