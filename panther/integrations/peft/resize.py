r"""Reduce the ranks of saved LoRA adapters exactly: the SVD of B A from QR decompositions of the factors.

With :math:`B = Q_B R_B` and :math:`A^T = Q_A R_A`, the SVD of the r x r matrix :math:`R_B R_A^T` gives the SVD of B A,
which is never formed: :math:`O((in + out) r^2)` instead of :math:`O(in\,out \min(in, out))`.
"""

__all__ = ["ResizeReport", "ResizedLayer", "resize_lora"]

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from panther._text import counted, format_bytes, format_table
from panther.errors import ConfigError, FormatError, check_size
from panther.files import read_json, write_json
from panther.files.tensors import write_file

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Suffixes of the names of A (r x n) and B (n x r); for convolutions, A and B are unfolded.
_PAIRS = {".lora_A.weight": ".lora_B.weight", ".lora_embedding_A": ".lora_embedding_B"}
# Settings with which the model is not the original base model plus s B A.
_VARIANTS = (
    "use_dora", "alora_invocation_tokens", "arrow_config", "use_bdlora", "velora_config", "monteclora_config",
    "kasa_config", "target_parameters", "megatron_config",
)  # fmt: skip
# Values of init_lora_weights that do not change the base weights.
_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
Allocate = Literal["uniform", "global"]


class ResizedLayer(NamedTuple):
    """The adapter of a layer."""

    name: str
    """Name of the layer in the base model."""
    rank_before: int
    """Rank of the adapter before."""
    rank: int
    """Rank of the adapter after resizing."""
    energy: float
    """Share of the adapter's squared Frobenius norm that is kept."""
    error: float
    """Relative error of the adapter's matrix in the Frobenius norm."""


@dataclass(frozen=True)
class ResizeReport:
    """The result of :func:`resize_lora`; ``print`` shows a table."""

    layers: tuple[ResizedLayer, ...]
    """The result for each layer."""
    error: float
    """Relative error in the Frobenius norm, over the adapters of all layers."""
    bytes_before: int
    """Bytes of the tensors that were read."""
    bytes_after: int
    """Bytes of the tensors that were written."""

    def __str__(self) -> str:
        """Return a line for each layer."""
        heading = ("layer", "rank before", "rank", "energy kept", "error")
        rows = [(a.name, str(a.rank_before), str(a.rank), f"{a.energy:.4f}", f"{a.error:.4f}") for a in self.layers]
        sizes = f"{format_bytes(self.bytes_before)} to {format_bytes(self.bytes_after)}"
        first = f"resized {counted(len(self.layers), 'adapter')}, {sizes}, error {self.error:.4f} of all together"
        return f"{first}\n{format_table([heading, *rows], '<>')}"


def resize_lora(
    adapter: str | Path,
    output: str | Path,
    *,
    rank: int | None = None,
    error: float | None = None,
    allocate: Allocate = "uniform",
) -> ResizeReport:
    r"""Write a saved LoRA adapter at smaller ranks: the best approximation of every layer's B A, to rounding.

    Give either ``rank`` or ``error``. With ``allocate="uniform"``, every layer gets this rank, or the smallest rank
    with which its own error is within ``error``. With ``"global"``, a common threshold on the singular values of
    :math:`s B A` of all layers determines the ranks, such that their sum is ``rank`` times the number of layers, or the
    error over all layers is within ``error``. Every layer keeps at least rank 1, because PEFT supports no rank 0.

    The new folder has PEFT's format. Where ranks and ``lora_alpha`` differ between layers, they are in ``rank_pattern``
    and ``alpha_pattern``; each layer's scale s is unchanged, even with ``use_rslora``. All other tensors of the folder,
    such as ``modules_to_save``, are copied. The new ``B`` and ``A`` are balanced, with orthogonal columns and rows.

    Args:
        adapter: Folder that ``save_pretrained`` of a PEFT model wrote.
        output: Folder to write, which is made if it is missing, and must differ from ``adapter``.
        rank: Largest rank, at least 1; layers of a smaller rank are unchanged.
        error: Largest relative error in the Frobenius norm, in [0, 1); 0 removes directions that are zero to rounding.
        allocate: ``"uniform"`` or ``"global"``.

    Returns:
        The rank, the kept energy and the error of every layer.

    Raises:
        ConfigError: If not exactly one of ``rank`` and ``error`` is given, or one is out of range; if the adapter is
            not plain LoRA (DoRA and other variants); or if its start changed the base weights (PiSSA and others).
        FormatError: If the folder or its tensors are not a LoRA adapter.
        ShapeError: If ``rank`` is below 1.

    Cost: ``O((in + out) r^2)`` for each layer in float64: seconds for an adapter of a large model.

    Example:
        >>> import peft, tempfile, torch
        >>> config = peft.LoraConfig(r=16, target_modules=["0"], init_lora_weights=False)
        >>> model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(64, 48)), config)
        >>> folder, smaller = tempfile.mkdtemp(), tempfile.mkdtemp()
        >>> model.save_pretrained(folder)
        >>> resize_lora(folder, smaller, rank=4).layers[0].rank
        4
    """
    _check(rank, error, allocate)
    source, target = Path(adapter), Path(output)
    if source.resolve() == target.resolve():
        raise ConfigError(f"output is the adapter's own folder {str(source)!r}: name another one")
    config, state = _read(source)
    pairs = _pairs(state)
    scales = {name: _scale(config, name, len(state[A])) for name, (A, _) in pairs.items()}
    parts = {name: _svd(state[B], state[A]) for name, (A, B) in pairs.items()}
    sigmas = {name: abs(scales[name]) * S for name, (_, S, _) in parts.items()}
    ranks = _ranks(sigmas, rank, error, allocate)
    new = dict(state)
    layers = []
    lost = energy = 0.0
    for name, (A, B) in pairs.items():
        U, S, V = parts[name]
        k, energies = ranks[name], sigmas[name].square()
        root = S[:k].sqrt()
        for key, factor in ((A, root[:, None] * V[:, :k].mT), (B, U[:, :k] * root)):
            shape = list(state[key].shape)
            shape[0 if key == A else 1] = k
            new[key] = factor.reshape(shape).to(state[key].dtype).contiguous()
        tail, total = energies[k:].sum().item(), energies.sum().item()
        lost, energy = lost + tail, energy + total
        share = tail / total if total else 0.0
        layers.append(ResizedLayer(name, len(state[A]), k, 1 - share, share**0.5))
    target.mkdir(parents=True, exist_ok=True)
    write_file(target / _WEIGHTS, new, new.__getitem__)
    changed = config | _patterns(bool(config.get("use_rslora")), ranks, scales)
    write_json(target / _CONFIG, changed, indent=2)
    sizes = (sum(tensor.nbytes for tensor in tensors.values()) for tensors in (state, new))
    return ResizeReport(tuple(layers), (lost / energy) ** 0.5 if energy else 0.0, *sizes)


def _check(rank: Any, error: Any, allocate: Any) -> None:
    if (rank is None) == (error is None):
        raise ConfigError(f"give one of rank and error, not {'both' if rank is not None else 'neither'}: rank=8")
    if rank is not None:
        check_size("rank", rank, least=1)
    elif isinstance(error, bool) or not isinstance(error, int | float) or not 0 <= error < 1:
        raise ConfigError(f"error={error!r} must be a number from 0 to below 1: use 0.1, for a tenth of the norm")
    if allocate not in ("uniform", "global"):
        raise ConfigError(f"allocate={allocate!r} is unknown: use 'uniform' or 'global'")


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and the tensors of a plain LoRA adapter."""
    try:
        config = read_json(folder / _CONFIG)
        state = load_file(folder / _WEIGHTS)
    except FileNotFoundError as error:
        missing = Path(error.filename).name if error.filename else _WEIGHTS
        raise FormatError(
            f"{str(folder)!r} has no {missing}: give a folder that save_pretrained of a PEFT model wrote, with "
            "safetensors"
        ) from error
    except (ValueError, SafetensorError) as error:
        raise FormatError(f"{str(folder)!r} does not hold a sound adapter ({error}): save it again") from error
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise ConfigError(f"{str(folder)!r} holds an adapter of type {kind!r}, and this is for LoRA: resize no others")
    for name in _VARIANTS:
        if config.get(name):
            raise ConfigError(f"the adapter uses {name}, with which it is more than B A: resize plain LoRA only")
    start = config.get("init_lora_weights")
    if start not in _STARTS:
        raise ConfigError(
            f"the adapter was started by init_lora_weights={start!r}, which changes the base weights by its rank: save "
            "it by save_pretrained(folder, path_initial_model_for_weight_conversion=...) first, which makes it plain"
        )
    return config, state


def _pairs(state: Mapping[str, Tensor]) -> dict[str, tuple[str, str]]:
    """Return the keys of A and B by the name of the layer."""
    pairs: dict[str, tuple[str, str]] = {}
    for key in state:
        for first, second in _PAIRS.items():
            if key.endswith(first):
                name = key.removesuffix(first)
                A, B = state[key], state.get(name + second)
                if B is None or A.dim() < 2 or B.dim() != A.dim() or B.shape[1] != len(A) or math.prod(B.shape[2:]) > 1:
                    shape = "is missing" if B is None else f"has shape {tuple(B.shape)}"
                    raise FormatError(
                        f"{key!r} has shape {tuple(A.shape)} and its lora_B {shape}, which is not a product of rank "
                        "r: leave the adapter as it is"
                    )
                pairs[name.removeprefix("base_model.model.")] = (key, name + second)
    pair_keys = {key for pair in pairs.values() for key in pair}
    for key in state:
        if ".lora_" in key and key not in pair_keys and not key.endswith(".lora_B.bias"):
            raise ConfigError(f"the adapter has {key!r}, which plain LoRA has not (DoRA and others): resize plain LoRA")
    if not pairs:
        raise FormatError("the folder has no tensors lora_A and lora_B: give one that save_pretrained wrote")
    return pairs


def _scale(config: Mapping[str, Any], name: str, rank: int) -> float:
    """Return the scale s by which B A of a layer is multiplied."""
    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    alpha = next((value for key, value in patterns.items() if _matches(key, name)), config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _matches(key: str, name: str) -> bool:
    return re.match(rf"(.*\.)?({key})$", name) is not None  # PEFT's rule


def _svd(B: Tensor, A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return U, S and V in float64 with ``U diag(S) V^T = B A``."""
    if not (B.isfinite().all() and A.isfinite().all()):
        raise FormatError("the adapter has entries that are NaN or infinite: use a sound checkpoint")
    Q_B, R_B = torch.linalg.qr(B.flatten(1).double())
    Q_A, R_A = torch.linalg.qr(A.flatten(1).double().mT)
    U, S, Vh = torch.linalg.svd(R_B @ R_A.mT, full_matrices=False)
    return Q_B @ U, S, Q_A @ Vh.mT


def _ranks(sigmas: Mapping[str, Tensor], rank: int | None, error: float | None, allocate: Allocate) -> dict[str, int]:
    """Return each layer's rank."""
    if allocate == "uniform":
        if rank is not None:
            return {name: min(rank, len(S)) for name, S in sigmas.items()}
        return {name: _least_rank(S, error or 0.0) for name, S in sigmas.items()}
    firsts = torch.tensor([S[0] for S in sigmas.values()], dtype=torch.float64)
    rest = torch.cat([S[1:] for S in sigmas.values()]).sort(descending=True).values
    if rank is not None:
        count = min((rank - 1) * len(sigmas), len(rest))
    else:
        # Each layer keeps its largest singular value. Of the rest, as many are kept as the error needs. Summing from
        # the smallest value avoids cancellation.
        tails = torch.cat((rest.square().flip(0).cumsum(0).flip(0), rest.new_zeros(1)))
        count = int((tails > _allowed_loss(error or 0.0, firsts.square().sum() + tails[0], firsts.max())).sum())
    threshold = rest[count - 1].item() if count else math.inf
    above = {name: int((S[1:] > threshold).sum()) for name, S in sigmas.items()}
    spare = count - sum(above.values())  # how many singular values equal to the threshold are kept
    ranks = {}
    for name, S in sigmas.items():
        equal = min(int((S[1:] == threshold).sum()), spare)
        spare -= equal
        ranks[name] = 1 + above[name] + equal
    return ranks


def _least_rank(S: Tensor, error: float) -> int:
    """Return the smallest rank, at least 1, whose tail is within the error."""
    tails = S.square().flip(0).cumsum(0).flip(0)
    return max(1, int((tails > _allowed_loss(error, tails[0], S[0])).sum()))


def _allowed_loss(error: float, energy: Tensor, largest: Tensor) -> float:
    """Return the squared norm that may be removed: at least the rounding of the factors, which are at most float32."""
    rounding = torch.finfo(torch.float32).eps / 4
    return max(error**2 * energy.item(), (rounding * largest.item()) ** 2)


def _patterns(rslora: bool, ranks: Mapping[str, int], scales: Mapping[str, float]) -> dict[str, Any]:
    """Return the settings of the new ranks: the most frequent rank and alpha, and patterns for the other layers."""
    alphas = {}
    for name, rank in ranks.items():
        alpha = scales[name] * (math.sqrt(rank) if rslora else rank)
        alphas[name] = round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha
    r, lora_alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    # PEFT takes the first key that a name ends with. If a name is the end of a different name, its key gets "^", so
    # that it matches only the full name.
    keys = {
        name: "^" * any(other.endswith(f".{name}") for other in ranks) + re.sub(r"([^\w.])", r"\\\1", name)
        for name in ranks
    }
    return {
        "r": r,
        "lora_alpha": lora_alpha,
        "rank_pattern": {keys[name]: rank for name, rank in ranks.items() if rank != r},
        "alpha_pattern": {keys[name]: alpha for name, alpha in alphas.items() if alpha != lora_alpha},
    }
