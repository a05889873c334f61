"""The optimizer: AdamW, and Muon's updates for groups of matrices."""

__all__ = ["MuonAdamW"]

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from panther._hints import advice_for, explain_keywords
from panther._torch import default_store
from panther.errors import CheckpointError, DistributedError, DTypeError, ShapeError
from panther.kernels.selection import multiplies_by_instruction
from panther.optim.adamw_step import CheckedGroups, step_adamw
from panther.optim.matrix_updates import MatrixUpdate, batch_limit, batches_of, orthogonalize_batch
from panther.optim.parameter_groups import split_groups

_log = logging.getLogger(__name__)
_NAME = "MuonAdamW"


class MuonAdamW(CheckedGroups):
    r"""AdamW, except that groups with ``orthogonalize=True`` get Muon's orthogonalised updates.

    With the momentum :math:`M \leftarrow \mu M + G`, such a matrix changes by :math:`-0.2\,\eta \sqrt{\max(m, n)}\;
    \mathrm{orthogonalize}(G + \mu M)`: entries as large as Adam's usually are at the learning rate :math:`\eta`. Weight
    decay is decoupled in both. A parameter of three dimensions is a stack of matrices, such as experts.

    Unless a group says ``orthogonalize``, hidden matrices are selected by their names and shapes. Embeddings, heads and
    vectors get AdamW. Names tell more than the order (``model.named_parameters()``), and layers tell more than names:
    :func:`param_groups` makes groups of a model, with the usual learning rates.

    Matrices may be sharded, by FSDP2, hybrid sharding, tensor parallelism, or several of these. They are not gathered,
    and the steps are the steps of one process to rounding; see :doc:`/howto/muon`.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        betas: Decay rates of AdamW's moments.
        eps: Term of AdamW's denominator.
        weight_decay: Weight decay of both kinds of updates.
        momentum: Momentum of the orthogonalised updates.
        orthogonalize: Whether groups without this key are orthogonalised. None selects hidden matrices, if no group has
            the key. Groups that are added later get AdamW unless they have it.
        precision: ``"bfloat16"`` or ``"float32"``, for Newton-Schulz iterations. None is bfloat16 on GPUs and CPUs with
            instructions for it (AVX-512 BF16, AMX, ARM's BF16), and else float32; the first process that takes a step
            decides for a job, and checkpoints keep the choice. Float64 parameters, and matrices with a side below 64,
            iterate in float32 or wider.

    Raises:
        ValueError: If a setting is out of range, or if no group is orthogonalised.
        ShapeError: If an orthogonalised group has a parameter that is not a matrix.
        DTypeError: If an orthogonalised group has a complex parameter.

    Cost: the state has one number for each entry of an orthogonalised matrix and two for each entry of other
    parameters. :func:`orthogonalize` runs once for all matrices of a shape. For a matrix (m, n), m >= n, that is
    sharded over N ranks, a rank sends :math:`2 (N-1)/N^2\, m n` numbers of the dtype of the iteration. An agreement of
    16 bytes comes before.

    Example:
        >>> import torch, panther as pr
        >>> model = torch.nn.Sequential(
        ...     pr.nn.SKLinear(256, 256, 8),
        ...     torch.nn.ReLU(),
        ...     torch.nn.Linear(256, 10),
        ... )
        >>> optimizer = pr.optim.MuonAdamW(
        ...     pr.optim.param_groups(model, lr=1e-3)
        ... )
        >>> model(torch.randn(4, 256)).square().mean().backward()
        >>> optimizer.step()
    """

    @explain_keywords
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        orthogonalize: bool | None = None,
        precision: str | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.selects_matrices = False
        if orthogonalize is None:
            params, self.selects_matrices = split_groups(params, "orthogonalize", (True, False), 2, {2, 3})
        defaults |= {"momentum": momentum, "orthogonalize": bool(orthogonalize), "precision": precision}
        super().__init__(params, defaults)
        trained = sum(len(group["params"]) for group in self.param_groups)
        if trained and not any(group["orthogonalize"] for group in self.param_groups):
            raise ValueError(
                f"none of the {trained} parameters would be orthogonalised, because none is a hidden matrix: set "
                '"orthogonalize": True in the group of its matrices, or use torch.optim.AdamW'
            )

    def _check_group(self, number: int) -> None:
        super()._check_group(number)
        _check_matrices(self.param_groups[number])

    def _step_all(self) -> None:
        orthogonalized = [group for group in self.param_groups if group["orthogonalize"]]
        for group in orthogonalized:
            if group.get("precision") is None and group["params"]:
                group["precision"] = _job_precision(group["params"][0].device)
        layouts = self._agreed_layouts(_named_matrices(orthogonalized))
        for group in self.param_groups:
            for p in group["params"]:
                self._refuse_sparse(f"a parameter of shape {tuple(p.shape)}", p)
                _check_moments(p, self.state.get(p, {}))
        updates = [
            MatrixUpdate(p, group, self.state[p], layouts.get(p))
            for group in orthogonalized
            for p in group["params"]
            if p.grad is not None
        ]
        if sharded := [update for update in updates if update.layout is not None]:
            from panther.optim.exchange import Owners, update_shards

            owners = Owners()
            for batch in batches_of(sharded, batch_limit):
                update_shards(batch, owners)
        for batch in batches_of((update for update in updates if update.layout is None), batch_limit):
            orthogonalize_batch(batch)
        for group in self.param_groups:
            if not group["orthogonalize"]:
                step_adamw(group, [p for p in group["params"] if p.grad is not None], self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of :meth:`state_dict`, with its settings, as torch's optimizers do.

        Raises:
            CheckpointError: Before anything changes, if the state is of another kind of optimizer, or has updates of
                low rank, which earlier versions had.
        """
        for number, group in enumerate(state_dict["param_groups"]):
            subject = f"group {number} of the state"
            if group.get("rank") is not None and group.get("orthogonalize"):
                raise CheckpointError(f"{subject} has updates of rank {group['rank']}: {advice_for('rank', _NAME)}")
            self._check_kind(subject, group, ("orthogonalize", "momentum", "betas"))
            keys = ("momentum_buffer",) if group["orthogonalize"] else ("exp_avg", "exp_avg_sq", "step")
            for state in filter(None, map(state_dict["state"].get, group["params"])):
                self._check_kind(subject, state, keys)
        orthogonalized = [group["orthogonalize"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group.pop("rank", None)  # which groups of earlier versions have
        for number, (group, was_orthogonalized) in enumerate(zip(self.param_groups, orthogonalized, strict=True)):
            if was_orthogonalized and not group["orthogonalize"]:
                _log.warning(
                    "group %d continues with AdamW, as in the state; a Trainer keeps its learning rate", number
                )


def _job_precision(device: torch.device) -> str:
    """Return the dtype of iterations on a kind of device, the same on all ranks of a job."""
    if device.type == "cuda":
        is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        is_fast = device.type in ("cpu", "meta") and multiplies_by_instruction(torch.bfloat16)
    precision = "bfloat16" if is_fast else "float32"
    if device.type == "meta" or not (dist.is_available() and dist.is_initialized()):
        return precision
    # The first process writes its choice. No process waits, because some processes may never take a step.
    return default_store().compare_set(f"panther.MuonAdamW.{device.type}", "", precision).decode()


def _check_matrices(group: dict[str, Any]) -> None:
    if not 0 <= group["momentum"] < 1:
        raise ValueError(f"momentum must be in [0, 1), not {group['momentum']}")
    precision = group.get("precision")
    if precision not in (None, "bfloat16", "float32"):
        raise ValueError(f"precision={precision!r} must be 'bfloat16', 'float32' or None")
    if group["orthogonalize"]:
        if any(p.is_complex() for p in group["params"]):
            raise DTypeError(
                "a group with orthogonalize=True has a complex matrix, and orthogonalised updates are of real ones: "
                "put it into a group without orthogonalize, which gets AdamW"
            )
        wrong = next((tuple(p.shape) for p in group["params"] if p.dim() not in (2, 3)), None)
        if wrong is not None:
            raise ShapeError(
                "a group with orthogonalize=True takes matrices (m, n) and stacks of them (experts, m, n), not a "
                f"parameter of shape {wrong}: make the groups by panther.optim.param_groups(model)"
            )


def _named_matrices(groups: list[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    for number, group in enumerate(groups):
        names = group.get("param_names", ())
        for place, p in enumerate(group["params"]):
            shape = tuple(p.shape)
            yield names[place] if names else f"parameter {place} of matrix group {number}, of shape {shape},", p


def _check_moments(p: Tensor, state: Mapping[str, Any]) -> None:
    """Raise an error if a parameter has changed its shape since its state was made, or only it is sharded."""
    shape = tuple(p.shape)
    for key in state.keys() & {"momentum_buffer", "exp_avg"}:
        tensor = state[key]
        if tensor.shape != p.shape:
            raise ShapeError(
                f"{key} has the shape {tuple(tensor.shape)}, and its parameter now has the shape {shape}: make a new "
                "optimizer after parameters change their shape"
            )
        if hasattr(p, "to_local") and not hasattr(tensor, "to_local"):
            raise DistributedError(
                f"a parameter of shape {shape} is sharded, and its {key} is a complete tensor: load the state by "
                "panther.distributed.checkpoint.load"
            )
