"""Forms of the linear layers of a network that is trained from scratch, and the optimizer of each.

At a kept fraction of a layer's numbers the sketch of an SKLinear and the rank of a plain product of two trained factors
are the same R, since both store ``R (in + out)`` numbers. The sketch multiplies by twice as many, and reaches twice the
rank.
"""

__all__ = [
    "EQUAL_BYTES",
    "FORMS",
    "OPTIMIZERS",
    "Form",
    "LowRank",
    "build",
    "linear_flops",
    "optimizer_of",
    "stored_bytes",
]

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import panther as pr
from benchmarks.train.scratch_tasks import PARTIAL_KEPT, Task
from panther.errors import PerformanceWarning
from panther.nn.sketch_record import plain_state


class LowRank(nn.Module):
    """A weight ``A B`` of rank R with two trained factors, of nn.Linear's variance at the start."""

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool) -> None:
        super().__init__()
        std = (3 * in_features * rank) ** -0.25  # then an entry of A B has variance 1 / (3 in)
        self.A = nn.Parameter(torch.randn(in_features, rank) * std)
        self.B = nn.Parameter(torch.randn(rank, out_features) * std)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(*, in)`` to ``(*, out)``."""
        rows = x.reshape(-1, x.shape[-1]) @ self.A
        y = rows @ self.B if self.bias is None else torch.addmm(self.bias, rows, self.B)
        return y.unflatten(0, x.shape[:-1])


OPTIMIZERS = ("Muon", "AdamW")


@dataclass(frozen=True)
class Form:
    """What stands for the layers of a network.

    Attributes:
        name: Of the form.
        layer: ``"dense"``, ``"sketched"`` or ``"low rank"``.
        partial: Whether the network is narrower, and only the few layers of ``task.partial`` are of this kind.
        share: Numbers stored, as a multiple of what a task keeps; None keeps all.
        at_equal_time: Whether it is trained for the time of the sketched form too.
        smaller: Name of the form of equal bytes whose rate, or half of it, a larger one takes.
        optimizers: It is trained by these. To orthogonalise the matrices of the whole dense network takes several times
            as long as all else.
    """

    name: str
    layer: str
    share: float | None = 1.0
    partial: bool = False
    at_equal_time: bool = True
    smaller: str | None = None
    optimizers: tuple[str, ...] = OPTIMIZERS


FORMS = (  # the first one's time is what the others get at equal time
    Form("sketched", "sketched"),
    Form("sketched in part", "sketched", partial=True),
    Form("low rank", "low rank"),
    Form("low rank in part", "low rank", partial=True, at_equal_time=False),
    Form("dense, narrower", "dense"),
    Form("low rank, twice R", "low rank", 2.0, at_equal_time=False, smaller="low rank"),
    Form("dense", "dense", None, at_equal_time=False, smaller="dense, narrower", optimizers=("AdamW",)),
)
EQUAL_BYTES = 5  # so many of them


def build(task: Task, form: Form, seed: int) -> nn.Module:
    """Return a new network of the task in this form, from a seed."""
    torch.manual_seed(seed)
    kept = 1.0 if form.share is None else form.share * task.kept
    if form.layer == "dense":
        return task.build(kept)
    model = task.build_partial() if form.partial else task.build(1.0)
    for name, factor in task.replaced(model).items():
        if form.partial:
            kept = PARTIAL_KEPT
            if name.rpartition(".")[2] not in task.partial:
                continue
        parent, _, attribute = name.rpartition(".")
        dense = model.get_submodule(name)
        assert isinstance(dense, nn.Linear)
        setattr(model.get_submodule(parent), attribute, _small(dense, form.layer, kept, factor))
    return model


def optimizer_of(task: Task, model: nn.Module, name: str, lr: float) -> torch.optim.Optimizer:
    """Return AdamW for all parameters, or Muon for the matrices of the layers in question and AdamW for the rest."""
    names = task.replaced(model)
    groups = pr.optim.param_groups(model, lr=lr, include=lambda layer, _: layer in names)
    if name == "AdamW":  # the same groups without Muon's
        parameters = [[p for _, p in group["params"]] for group in groups]
        decays = [{"params": group, "weight_decay": 0.1 if group[0].ndim > 1 else 0.0} for group in parameters]
        return torch.optim.AdamW(decays, lr=lr, betas=(0.9, 0.98))
    return pr.optim.MuonAdamW(groups)


def stored_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's distinct numbers as saved."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in plain_state(model).values()}.values())


def linear_flops(task: Task, model: nn.Module) -> int:
    """Return the flops of a forward through the layers that forms replace, for one row through each."""
    total = 0
    for name in task.replaced(model):
        layer = model.get_submodule(name)
        numbers = sum(p.numel() for p in layer.parameters() if p.ndim == 2)
        total += (4 if isinstance(layer, pr.nn.SKLinear) else 2) * numbers
    return total


def _small(dense: nn.Linear, kind: str, kept: float, factor: float) -> nn.Module:
    """Return a layer of the kept fraction of a dense one's numbers, its initial weight multiplied by a factor."""
    sizes = dense.in_features, dense.out_features
    R = max(1, int(kept * math.prod(sizes) / sum(sizes)))
    if kind == "low rank":
        layer: nn.Module = LowRank(*sizes, R, dense.bias is not None)
        factor = math.sqrt(factor)  # each of two factors of one product
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PerformanceWarning)  # small layers, and a question of bytes
            layer = pr.nn.SKLinear(*sizes, R, bias=dense.bias is not None, sketch="signs")
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.ndim == 2:
                parameter.mul_(factor)
    return layer
