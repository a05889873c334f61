"""The parameters that are trained: changes during a run, and parameters of the loss, which no optimizer has."""

__all__ = [
    "MAX_SAMPLES", "LossParameters", "TrainableSet", "average_gradients", "list_names", "nonfinite_parameters",
    "reduced_parameters",
]  # fmt: skip

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from panther._torch import version_of
from panther.distributed.comm.agreement import gather_objects
from panther.distributed.comm.ranks import name_ranks
from panther.errors import ConfigError

MAX_SAMPLES = 16  # an error message lists at most this many samples of a rank


def list_names(names: Sequence[str], limit: int = 8) -> str:
    """Return the first names for a message, and the number of further names."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def nonfinite_parameters(by_name: Mapping[str, Any]) -> list[str]:
    """Return the names of parameters that are not finite on some rank. Every rank must call it."""
    locals_by_name = {name: p.to_local() if hasattr(p, "to_local") else p for name, p in by_name.items()}
    names = [name for name, p in locals_by_name.items() if not p.isfinite().all()]
    return sorted({name for names_of_rank in gather_objects(names, None) for name in names_of_rank})


class TrainableSet:
    """The parameters of this rank that require a gradient, by the last agreement of all ranks.

    Callbacks may freeze and unfreeze parameters between steps. If only some ranks did it, the ranks would train
    different models, so every change is compared before the optimizer takes its step.

    Args:
        by_name: This rank's parameters by their names in the model that the user built.
    """

    def __init__(self, by_name: Mapping[str, nn.Parameter]) -> None:
        self.by_name = dict(by_name)
        self._tensors = list(by_name.values())
        self._at_start = dict(zip(by_name, self._flags(), strict=True))
        self._agreed = self._flags()
        self.changes: dict[str, bool] = {}
        """For parameters of all ranks that were frozen or unfrozen since the start: whether they are trained now."""

    def _flags(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._tensors]

    def changed(self) -> list[str]:
        """Return the names of the parameters that this rank has frozen or unfrozen since the last agreement."""
        flags = self._flags()
        if flags == self._agreed:
            return []
        return [name for name, now, agreed in zip(self.by_name, flags, self._agreed, strict=True) if now != agreed]

    def check_stage(self, changed: Sequence[str]) -> None:
        """Raise ConfigError if parameters of a pipeline stage that had none to train at the start were unfrozen."""
        if not any(self._at_start.values()) and any(self.by_name[name].requires_grad for name in changed):
            raise ConfigError(
                f"{list_names(changed)} was unfrozen, and every parameter of its pipeline stage was frozen at the "
                "start, when torch's stages note which of them send gradients back: freeze them in a callback after "
                "the first step instead, or use another strategy"
            )

    def agree(self) -> list[str]:
        """Compare the changes of all ranks, and return the names of this rank's parameters that were unfrozen.

        Every rank must call it.

        Raises:
            ConfigError: On every rank, if a parameter requires a gradient on some ranks only.
        """
        changed = self.changed()
        flags = dict(zip(self.by_name, self._flags(), strict=True))
        now = {name: flag for name, flag in flags.items() if flag != self._at_start[name]}
        # All flags are sent, because a different rank may have changed a flag. Pipeline stages have different
        # parameters.
        flags_of_ranks, changes_of_ranks = zip(*gather_objects((flags, now), None), strict=True)
        ranks_by_flag: dict[str, tuple[list[int], list[int]]] = {}
        for rank, flags_of_rank in enumerate(flags_of_ranks):
            for name, flag in flags_of_rank.items():
                ranks_by_flag.setdefault(name, ([], []))[flag].append(rank)
        for name, (frozen, trained) in ranks_by_flag.items():
            if frozen and trained:
                raise ConfigError(
                    f"the parameter {name!r} requires a gradient on {name_ranks(trained)} only, and the ranks would "
                    "train different models: freeze and unfreeze parameters on every rank, in the same step"
                )
        self.changes = {name: flag for changes in changes_of_ranks for name, flag in changes.items()}
        self._agreed = list(flags.values())
        return [name for name in changed if flags[name]]

    def late(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters that require a gradient and did not at the start."""
        return {name: p for name, p in self.by_name.items() if p.requires_grad and not self._at_start[name]}

    def restore(self, changes: Mapping[str, bool]) -> list[str]:
        """Freeze and unfreeze the parameters as they were in a checkpoint; return the names that this changed."""
        restored = []
        for name, flag in changes.items():
            if name in self.by_name and self.by_name[name].requires_grad != flag:
                self.by_name[name].requires_grad_(flag)
                restored.append(name)
        return restored


def reduced_parameters(model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Return the parameters whose gradients DDP averages, in the order of DDP; call it right after wrapping."""
    reduced: dict[nn.Parameter, str] = {}
    for module_name, module in model.module.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and f"{module_name}.{name}" not in model.parameters_to_ignore:
                whole_name = f"{module_name}.{name}".removeprefix(".").replace("_checkpoint_wrapped_module.", "")
                reduced.setdefault(parameter, whole_name)
    return {name: parameter for parameter, name in reduced.items()}


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Average gradients over all ranks, which must call it with the same parameters.

    A parameter gets no gradient if no rank has one.
    """
    present = torch.tensor([float(parameter.grad is not None) for parameter in parameters], device=parameters[0].device)
    dist.all_reduce(present)
    for parameter, ranks in zip(parameters, present.tolist(), strict=True):
        if ranks:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


class LossParameters:
    """Trainable parameters that a loss may depend on and the model does not have, so that no optimizer trains them.

    Args:
        loss_fn: The loss: a module, or a function that refers to modules, as a bound method, in a partial, or by the
            names in its code.
        model: The model before it is distributed.
    """

    def __init__(self, loss_fn: Callable[..., Tensor] | None, model: nn.Module) -> None:
        trained = set(model.parameters())
        self._named = {
            name: parameter
            for module in _modules_of(loss_fn, 3)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and parameter not in trained
        }
        self._gradients = [_gradient(parameter) for parameter in self._named.values()]

    def check(self) -> None:
        """Raise ConfigError if the backward pass has reached such a parameter; it does not reach a frozen teacher."""
        gradients = zip(self._named.items(), self._gradients, strict=True)
        reached = [name for (name, parameter), first in gradients if _gradient(parameter) != first]
        if reached:
            raise ConfigError(
                f"the loss has trainable parameters of its own ({list_names(reached)}), which are not the model's and "
                "would never be trained: make a module that has the model and the loss, whose forward(input, target) "
                "returns the loss, and pass it as the model without loss_fn; or set requires_grad=False for them"
            )


def _gradient(parameter: nn.Parameter) -> tuple[int, int] | None:
    """Return the identity and version of a gradient, which change when a backward pass reaches the parameter."""
    gradient = parameter.grad
    return None if gradient is None else (id(gradient), version_of(gradient))


def _modules_of(value: Any, depth: int) -> Iterator[nn.Module]:
    """Yield the modules that a function refers to."""
    if isinstance(value, nn.Module):
        yield value
    elif depth == 0 or value is None or isinstance(value, type):
        return
    elif isinstance(value, functools.partial):
        yield from _modules_of([value.func, *value.args, *value.keywords.values()], depth)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _modules_of(part, depth - 1)
    elif isinstance(value, dict):
        yield from _modules_of(list(value.values()), depth)
    elif (bound := getattr(value, "__self__", None)) is not None and callable(value):
        yield from _modules_of(bound, depth)
    elif (code := getattr(value, "__code__", None)) is not None:
        variables = getattr(value, "__globals__", {})
        cells = [_contents(cell) for cell in value.__closure__ or ()]
        globals_of_code = [variables[name] for name in code.co_names if name in variables]
        yield from _modules_of([*cells, *globals_of_code, *(value.__defaults__ or ())], depth)
    elif callable(value) and hasattr(value, "__dict__"):
        yield from _modules_of(list(vars(value).values()), depth)


def _contents(cell: Any) -> Any:
    """Return the value of a variable of a closure; None if it has not been assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
