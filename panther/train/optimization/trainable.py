"""The parameters that are trained: changes during a run, and parameters of the loss, which no optimizer has."""

__all__ = [
    "MAX_SAMPLES", "LossParameters", "TrainableSet", "nonfinite_parameters",
]  # fmt: skip

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from panther._text import list_names
from panther.distributed import get_rank
from panther.distributed.comm.agreement import gather_objects
from panther.errors import ConfigError

MAX_SAMPLES = 16  # an error message lists at most this many samples of a rank


def nonfinite_parameters(by_name: Mapping[str, Any]) -> list[str]:
    """Return the names of parameters that are not finite on some rank. Every rank must call it."""
    locals_by_name = {name: p.to_local() if hasattr(p, "to_local") else p for name, p in by_name.items()}
    names = [name for name, p in locals_by_name.items() if not p.isfinite().all()]
    return sorted({name for names_of_rank in gather_objects(names, None) for name in names_of_rank})


class TrainableSet:
    """The parameters that require a gradient, by their names in the model that the user built.

    Callbacks may freeze and unfreeze parameters between steps. If only some ranks did it, the ranks would train
    different models, so every change is compared before the optimizer takes its step.
    """

    def __init__(self, by_name: Mapping[str, nn.Parameter]) -> None:
        self.by_name = dict(by_name)
        self._tensors = list(by_name.values())
        self._at_start = dict(zip(by_name, self._flags(), strict=True))
        self._agreed = self._flags()
        self.changes: dict[str, bool] = {}
        """For parameters that were frozen or unfrozen since the start: whether they are trained now."""

    def _flags(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._tensors]

    def changed(self) -> list[str]:
        """Return the names of the parameters that this rank has frozen or unfrozen since the last agreement."""
        flags = self._flags()
        if flags == self._agreed:
            return []
        return [name for name, now, agreed in zip(self.by_name, flags, self._agreed, strict=True) if now != agreed]

    def agree(self) -> dict[str, nn.Parameter]:
        """Compare the changes of all ranks, and return what was unfrozen and was frozen at the start, by name."""
        changed = self.changed()
        for rank, other in enumerate(gather_objects(changed, None)):
            if differing := set(changed) ^ set(other):
                raise ConfigError(
                    f"rank {get_rank()} and rank {rank} do not both freeze or unfreeze {min(differing)!r}, and the "
                    "ranks would train different models: freeze and unfreeze parameters on every rank, in the same step"
                )
        self._agreed = self._flags()
        now = dict(zip(self.by_name, self._agreed, strict=True))
        self.changes = {name: flag for name, flag in now.items() if flag != self._at_start[name]}
        return {name: self.by_name[name] for name in changed if now[name] and not self._at_start[name]}

    def restore(self, changes: Mapping[str, bool]) -> list[str]:
        """Freeze and unfreeze the parameters as they were in a checkpoint; return the names that this changed."""
        restored = []
        for name, flag in changes.items():
            if name in self.by_name and self.by_name[name].requires_grad != flag:
                self.by_name[name].requires_grad_(flag)
                restored.append(name)
        return restored


class LossParameters:
    """Trainable parameters of a loss that is a module and that the model does not have: no optimizer trains them."""

    def __init__(self, loss_fn: Callable[..., Tensor] | None, model: nn.Module) -> None:
        pairs = loss_fn.named_parameters() if isinstance(loss_fn, nn.Module) else ()
        trained = set(model.parameters())
        self._named = {name: p for name, p in pairs if p.requires_grad and p not in trained}
        for parameter in self._named.values():
            parameter.grad = None

    def check(self) -> None:
        """Raise ConfigError if the backward pass has reached such a parameter; it does not reach a frozen teacher."""
        if reached := [name for name, parameter in self._named.items() if parameter.grad is not None]:
            raise ConfigError(
                f"the loss has trainable parameters of its own ({list_names(reached)}), which are not the model's and "
                "would never be trained: make a module that has the model and the loss, whose forward(input, target) "
                "returns the loss, and pass it as the model without loss_fn; or set requires_grad=False for them"
            )
