r"""Factors of sketched layers fitted to a dense weight.

There are two fits: the truncated SVD (Eckart and Young, 1936, doi:10.1007/BF02288367) for layers of low rank, and least
squares for fixed sketches. The unbiased estimator is a product that the layers compute. All fits compute in float32 or
float64.

For SKLinear, A is the weight as (in, out), approximated by :math:`S_1 U_1 + U_2 S_2`. For a convolution
(``.._by_groups``), A is the unfolded kernel of each group, (groups, out / groups, in / groups * kernel), approximated
by :math:`U^T S`.
"""

__all__ = [
    "check_dense", "check_init", "check_shapes", "fittable", "inherit_attributes", "inherit_settings",
    "leading_factors", "learnable_factors", "lstsq_by_groups", "lstsq_factors",
    "overrides_forward", "settings_refusal", "weight_refusal",
]  # fmt: skip

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from panther._torch import buffers_of, children_of, has_gradient_hooks, has_hooks, parameters_of
from panther.errors import ShapeError
from panther.linalg import randomized_svd
from panther.sketch import signs

# From this size on, and for ranks of at most an eighth of it, the randomized SVD is 2 to 13 times faster than LAPACK's.
# With ten iterations on a space twice as wide as the rank it is as accurate: its error exceeds the least error by 3e-4
# of it for a weight without structure, and not visibly in float32 if singular values fall as i^-0.3.
_RANDOMIZED_FROM = 256
_RANK_FRACTION = 8
_ITERATIONS = 10

_INITS = ("lstsq", "random")


def check_init(init: str) -> None:
    """Raise ValueError unless ``init`` names one of the two ways to fit a sketched layer."""
    if init == "svd":
        raise ValueError(
            'init="svd" makes no sketched layer: use LowRankLinear.from_linear or LowRankConv2d.from_conv, with twice '
            "the rank R of a sketch"
        )
    if init not in _INITS:
        raise ValueError(f"init={init!r} is unknown: use one of {', '.join(map(repr, _INITS))}")


def check_dense(dense: Any, kind: type[nn.Module], maker: str) -> None:
    """Raise unless a layer computes what a class of torch.nn does, and a new layer would lose no part of it.

    Hooks and parametrizations would be lost.
    """
    if not isinstance(dense, kind):
        raise TypeError(f"{maker} takes an nn.{kind.__name__}, not {type(dense).__name__}")
    name = type(dense).__name__
    if overrides_forward(dense, kind):
        raise TypeError(
            f"{maker} reads the weight of an nn.{kind.__name__}, and {name} is a subclass whose forward may do more: "
            "pass a layer of torch.nn with its weight, and apply the remaining part around the new layer"
        )
    weighted = dense.out_proj if isinstance(dense, nn.MultiheadAttention) else dense
    if reason := weight_refusal(weighted) or settings_refusal(dense):
        raise ValueError(f"{maker} cannot replace this {name}: it {reason}")


def overrides_forward(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a subclass may compute something else than its base."""
    subclass: Any = type(module)
    if issubclass(kind, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        from panther.nn.conv.padded import only_convolves  # here, because panther.nn.conv imports this module

        return subclass.__call__ is not kind.__call__ or not only_convolves(module)
    return subclass.__call__ is not kind.__call__ or subclass.forward is not kind.forward


def weight_refusal(module: nn.Module) -> str | None:
    """Return why the weight of a dense layer is not a parameter that can be read, or None if it is."""
    if hasattr(module, "parametrizations"):
        return "is parametrized: remove the parametrizations first"
    if "weight" not in parameters_of(module):
        place = "a buffer" if "weight" in buffers_of(module) else "a plain tensor" if "weight" in vars(module) else ""
        if place and not any(name.startswith("weight_") for name in parameters_of(module)):
            return f"has a weight that is {place}: register it as an nn.Parameter first"
        return "has a weight that is computed (by pruning or weight_norm): make it permanent first"
    weight = parameters_of(module)["weight"]
    if weight is None or is_lazy(weight):
        return "has no weight yet: run the model once first"
    if weight.layout is not torch.strided:
        return f"has a sparse weight ({weight.layout}): make it dense first, with weight.to_dense()"
    if not weight.numel():
        return "has a weight without entries"
    # Subclasses of Tensor, such as DTensor and quantized tensors, define different arithmetic, and torch computes
    # nothing in eight bits.
    if type(weight) not in (nn.Parameter, Tensor) or not weight.is_floating_point() or weight.dtype.itemsize == 1:
        return f"has a weight of type {type(weight.data).__name__}, {weight.dtype}: compress a plain floating one"
    further = {*parameters_of(module), *buffers_of(module), *children_of(module)} - {"weight", "bias"}
    if further and type(module).__module__.startswith("torch.nn."):  # a subclass may use them to pad its input
        return f"also has {', '.join(sorted(further))}, which would be lost: remove what is not used"
    return None


def settings_refusal(module: nn.Module) -> str | None:
    """Return what a dense layer has that a new layer in its place would lose, or None."""
    if hasattr(module, "parametrizations"):  # of nn.MultiheadAttention, which has no weight
        return "is parametrized: remove the parametrizations first"
    for name in ("forward", "_conv_forward"):
        if name in vars(module):
            return f"has a {name} that was set on it (as accelerate does), which would be lost: remove it first"
    if has_hooks(module):
        return "has hooks, which would be lost: remove them first"
    if any(map(has_gradient_hooks, module.parameters())):
        return "has hooks on gradients, which would be lost: remove them first"
    return None


def check_shapes(**tensors: tuple[Tensor, tuple[int, ...]]) -> None:
    """Raise unless each of some tensors, given by name with a shape, is a tensor of this shape."""
    for name, (tensor, shape) in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
        if tensor.shape != shape:
            raise ShapeError(f"{name} must have shape {shape} in this layer, not {tuple(tensor.shape)}")


def inherit_settings(new: nn.Module, old: nn.Module) -> None:
    """Give a new layer what users set on the layer that it replaces: its modes, and attributes of it and its tensors.

    Parameters other than the bias are like the weight.
    """
    new.train(old.training)
    for name, parameter in new.named_parameters():
        like = parameters_of(old)["bias" if name == "bias" else "weight"]
        parameter.requires_grad_(like is not None and like.requires_grad)
        vars(parameter).update({} if like is None else vars(like))
    inherit_attributes(new, old)


def inherit_attributes(new: nn.Module, old: nn.Module) -> None:
    """Give a new layer the attributes that users set on the layer of torch.nn that it replaces."""
    kind = next((kind for kind in type(old).__mro__ if kind.__module__.startswith("torch.nn.")), nn.Module)
    own_names = vars(new).keys() | (_attribute_names(kind) if kind in _DENSE else vars(old).keys())
    vars(new).update({name: value for name, value in vars(old).items() if name not in own_names})


_DENSE: tuple[Any, ...] = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.EmbeddingBag, nn.MultiheadAttention,
)  # fmt: skip


@cache
def _attribute_names(kind: Any) -> frozenset[str]:
    """Return the names of the attributes that the constructor of a dense layer sets."""
    return frozenset(vars(kind(2, 2, 1, device="meta")))  # the third number is a valid argument of each class


def fittable(weight: Tensor) -> Tensor:
    """Return a dense weight in a dtype that can be factored, float32 at least; ValueError if it cannot be."""
    if weight.is_meta:
        raise ValueError("the weight is on the meta device and has no values to fit: load it first")
    if not weight.isfinite().all():
        raise ValueError("the weight has entries that are NaN or infinite: no layer can be fitted to it")
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def leading_factors(A: Tensor, rank: int, seed: int = 0) -> tuple[Tensor, Tensor]:  # (rows, rank), (rank, columns)
    """Return factors of the truncated SVD of A, singular values split evenly; past the rank of A they are zero."""
    P, sigma, Qt = _leading_svd(A, rank, seed)
    root, unused = sigma.sqrt(), rank - len(sigma)
    return F.pad(P * root, (0, unused)), F.pad(root[:, None] * Qt, (0, 0, 0, unused))


def learnable_factors(
    left: Tensor,  # (*groups, out, r)
    right: Tensor,  # (*groups, r, in)
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Return factors of the same product without a component that is zero in both, which would get no gradient.

    The column of ``left`` of such a component gets random signs of the mean magnitude of ``left``, and its row of
    ``right`` zeros, so that it adds nothing and can still learn.
    """
    energies = left.square().sum(-2)  # (*groups, r)
    least = energies.amax(-1, keepdim=True) * max(left.shape[-2:]) * torch.finfo(left.dtype).eps
    is_used = energies > least
    if is_used.all():
        return left, right
    rows, columns = is_used.numel(), left.shape[-2]
    level = left.square().mean().sqrt()
    entries = signs(seed, 0, range(rows), range(columns), dtype=left.dtype, device=left.device)
    entries = entries.view(*is_used.shape, columns).mT * torch.where(level > 0, level, 1.0)
    return torch.where(is_used[..., None, :], left, entries), torch.where(is_used[..., None], right, 0.0)


def lstsq_factors(A: Tensor, U1: Tensor, U2: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the S1 and S2 of least norm that minimise ||A - S1 U1 - U2 S2||_F.

    With P1 the projector on the rows of U1 and P2 on the columns of U2, the residual is (I - P2) A (I - P1). The part
    both halves can reach, P2 A P1, is split entry by entry in the singular bases of U1 and U2, where the problem
    separates into scalar ones of the form d1 m + d2 n = c.
    """
    V1, d1, Y1t = _compact_svd(U1)  # U1 = V1 diag(d1) Y1^T
    X2, d2, V2t = _compact_svd(U2)  # U2 = X2 diag(d2) V2^T
    AY = A @ Y1t.mT  # (in, r1)
    XA = X2.mT @ A  # (r2, out)
    shared = XA @ Y1t.mT  # (r2, r1)
    weight = d1.square() + d2[:, None].square()
    S1 = (((AY - X2 @ shared) / d1) + X2 @ (shared * d1 / weight)) @ V1.mT
    S2 = V2t.mT @ ((XA - shared @ Y1t) / d2[:, None] + (shared * d2[:, None] / weight) @ Y1t)
    return S1, S2


def lstsq_by_groups(
    A: Tensor,  # (groups, out / groups, in / groups * kernel)
    U: Tensor,  # (groups, rows, out / groups)
) -> Tensor:  # (groups, rows, in / groups * kernel)
    """Return the S of least norm that minimises ||A - U^T S||_F in each group."""
    factors = []
    for kernel, sketch in zip(A, U, strict=True):
        left, sigma, right = _compact_svd(sketch)
        factors.append((left / sigma) @ (right @ kernel))
    return torch.stack(factors)


def _leading_svd(A: Tensor, rank: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ``rank`` leading singular triplets, or all of them if there are fewer."""
    least = min(A.shape)
    if least < _RANDOMIZED_FROM or rank * _RANK_FRACTION > least:
        left, sigma, right = _compact_svd(A)
        return left[:, :rank], sigma[:rank], right[:rank]
    left, sigma, right = randomized_svd(A, rank, oversample=rank, n_iter=_ITERATIONS, seed=seed)
    is_nonzero = _nonzero(sigma, A)
    return left[:, is_nonzero], sigma[is_nonzero], right.mT[is_nonzero]


def _compact_svd(U: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the SVD without directions that are zero to rounding, which sketches larger than the layer have."""
    left, sigma, right = torch.linalg.svd(U, full_matrices=False)
    is_nonzero = _nonzero(sigma, U)
    return left[:, is_nonzero], sigma[is_nonzero], right[is_nonzero]


def _nonzero(sigma: Tensor, U: Tensor) -> Tensor:
    """Return which singular values of U are not zero to rounding."""
    return sigma > sigma[0] * max(U.shape) * torch.finfo(U.dtype).eps
