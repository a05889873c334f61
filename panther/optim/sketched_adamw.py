"""AdamW whose moments are sketches of the gradients, the same in every layout."""

__all__ = ["SketchedAdamW"]

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from panther._hints import explain_keywords
from panther.errors import CheckpointError, ConfigError, ShapeError, check_flag, check_size
from panther.optim.adamw_step import CheckedGroups, step_adamw
from panther.optim.parameter_groups import split_groups
from panther.optim.sketched_update import UPDATES, PeriodSigns, SketchedUpdate, apply_sketched
from panther.sketch import check_seed

# Under these names wrappers hold a module: DistributedDataParallel, DataParallel and AveragedModel, torch.compile,
# activation checkpointing, the older FSDP, and Lightning Fabric.
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"}
_PLAIN = ("step", "exp_avg", "exp_avg_sq")
_SKETCHED = ("step", "sketch_avg", "sketch_avg_sq", "update_norm")
_Entry: TypeAlias = tuple[str, Tensor, dict[str, Any]]
"""The name of a parameter, the parameter and its group."""


class _BackwardSteps:
    """Hooks of an optimizer's parameters; a hook takes the step of its parameter in the backward pass.

    Parameters hold their hooks, and Python's garbage collector does not look into them. Therefore hooks refer weakly to
    this object, and this object to the optimizer; both end with the optimizer, and hooks then do nothing.
    """

    def __init__(self, step_one: Callable[[int, int], None]) -> None:
        self._step_one = weakref.WeakMethod(step_one)
        self._handles: list[RemovableHandle] = []
        self._trained: set[Tensor] = set()
        self._stepped: set[Tensor] = set()
        self._is_checked = False

    def add(self, number: int, index: int, name: str, parameter: Tensor) -> None:
        """Register the hook of a parameter; the numbers are the arguments of ``step_one``."""
        if parameter.requires_grad:
            hook = partial(_call, weakref.WeakMethod(self._run), number, index, name)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
            self._trained.add(parameter)
            self._is_checked = False

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def end_step(self) -> None:
        """Allow each parameter its next step."""
        self._stepped.clear()

    def _run(self, number: int, index: int, name: str, parameter: Tensor) -> None:
        step_one = self._step_one()
        if parameter.grad is None or step_one is None:
            return
        if not self._is_checked:
            _refuse_ddp(self._trained)
            self._is_checked = True
        if parameter in self._stepped:
            raise RuntimeError(
                f"{name} took its step in a backward pass already, and gets a second gradient before "
                "optimizer.step(): call optimizer.step() after every backward pass, and step_in_backward_(False) to "
                "accumulate gradients"
            )
        step_one(number, index)
        parameter.grad = None
        self._stepped.add(parameter)


def _call(reference: "weakref.WeakMethod[Callable[..., None]]", *arguments: Any) -> None:
    method = reference()
    if method is not None:
        method(*arguments)


def _refuse_ddp(parameters: set[Tensor]) -> None:
    """Raise ConfigError on several ranks without sharded parameters, as under DistributedDataParallel.

    Its averages come after the hooks, and it leaves no trace at its parameters.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    if torch.distributed.get_world_size() > 1 and not any(hasattr(p, "to_local") for p in parameters):
        raise ConfigError(
            "no parameter is sharded, and step_in_backward_() takes steps before DistributedDataParallel averages the "
            "gradients: shard the model by fully_shard, or do not call step_in_backward_()"
        )


class SketchedAdamW(CheckedGroups):
    r"""AdamW with the moments of :math:`P G` in place of those of the gradient G, for matrices.

    P has ``rank`` rows of random signs over the root of ``rank``, and acts on the shorter side of G, so that the two
    moments of an (m, n) matrix take :math:`2\,\mathrm{rank} \max(m, n)` numbers in place of :math:`2 m n`. P is a
    function of the seed, of the parameter's name and of the number of its period: no checkpoint has it, and each rank
    draws the columns that its shard needs, and keeps their bits for a period. With R the quotient of Adam for
    :math:`P G`, the update is

    - ``"channel"``: G with each row or column along the longer side scaled by the ratio of the norms of this part of R
      and of G, after APOLLO (arXiv:2412.05270), which has the norm of :math:`P G` in place of that of G,
    - ``"tensor"``: G scaled by the ratio of the norms of R and G, after APOLLO-Mini,
    - ``"projected"``: :math:`P^T R` (Flora, arXiv:2402.03293; GaLore, arXiv:2403.03507, with random projections).

    The first two are multiplied by the root of :math:`\min(m, n) / \mathrm{rank}`, so that the entries of all have at
    most the root mean square of the entries of R, and 1 in the first step. Parts of G that are zero are left out of R.
    The norm of the first two may grow by 1 % from step to step, or up to a root mean square of 0.5. Weight decay is
    decoupled. Finite gradients of any size give finite updates. A gradient with NaN makes its matrix NaN, or with
    ``"projected"`` a part of it, and no other parameter.
    Tensors that are not real matrices, and groups with ``rank=None``, get AdamW; leave embeddings and heads to it, as
    :func:`sketched_param_groups` does.

    Args:
        params: Named parameters, parameters, or groups of them. With names (``model.named_parameters()``), the
            projections do not depend on the order of the parameters, which pipelines change.
        lr: Learning rate.
        rank: Rows of P; None for AdamW. Unless a group has its own rank, hidden matrices with a longer shorter side are
            selected by their names and shapes, and embeddings, heads and smaller matrices get AdamW.
        update: ``"channel"``, ``"tensor"`` or ``"projected"``.
        period: Steps after which P changes. The moments stay.
        betas: Decay rates of the moments.
        eps: Term of the denominator.
        weight_decay: Weight decay.
        seed: Seed of the projections, equal on all ranks; None is 0, so that replicas are equal whatever their
            generators are.
        bf16_stochastic_round: Whether parameters in bfloat16 are rounded at random, so that their mean is not rounded:
            updates and decay below half of a unit in the last place are lost otherwise. The random bits depend on the
            seed, the name, the step and the index, in every layout alike.

    Raises:
        ValueError: If a setting is out of range.
        TypeError: If ``rank`` or ``period`` is not an integer.
        ShapeError: If one of them is below 1, or a matrix has a side shorter than ``rank``.

    Cost: a step takes ``2 rank m n`` flops for an (m, n) matrix, twice as many with ``"projected"``; ``rank min(m, n)``
    signs are drawn once a period, and kept as one bit each. Ranks that shard a matrix add up two numbers (none with
    ``"projected"``), and ``rank max(m, n)`` numbers if the shorter side is sharded, with ``"channel"`` one more row.
    Moments of half-precision parameters are float32.

    Example:
        >>> import torch, panther as pr
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(64, 256),
        ...     torch.nn.ReLU(),
        ...     torch.nn.Linear(256, 10),
        ... )
        >>> optimizer = pr.optim.SketchedAdamW(
        ...     model.named_parameters(), rank=4, seed=0
        ... )
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.state[model[0].weight]["sketch_avg"].shape
        torch.Size([256, 4])
    """

    # Copies and unpickled optimizers have the attributes of the class, and only settings and states of their own.
    _has_agreed = False
    _backward_steps: _BackwardSteps | None = None
    # benchmarks.train.sketch_variants replaces it, to compare kinds of sketches.
    _update_class: type[SketchedUpdate] = SketchedUpdate

    @explain_keywords
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        rank: int | None = 32,
        update: str = "channel",
        period: int = 200,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        seed: int | None = None,
        bf16_stochastic_round: bool = False,
    ) -> None:
        self.selects_matrices = False
        if rank is not None:
            params, self.selects_matrices = split_groups(params, "rank", (rank, None), rank + 1, {2})
        settings = {"lr": lr, "rank": rank, "update": update, "period": period, "betas": betas, "eps": eps}
        settings |= {"weight_decay": weight_decay, "seed": 0 if seed is None else seed}
        super().__init__(params, settings | {"bf16_stochastic_round": bf16_stochastic_round})
        self.period_signs = PeriodSigns()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.period_signs = PeriodSigns()  # copies and unpickled optimizers are not made by __init__

    def _check_group(self, number: int) -> None:
        group = self.param_groups[number]
        super()._check_group(number)
        _check_group_settings(group)
        group["seed"] = check_seed(0 if group["seed"] is None else group["seed"])
        for index in range(len(self.param_groups[number]["params"])):
            _check_sketch(*self.entry(number, index))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, unless its settings or parameters are refused."""
        super().add_param_group(param_group)
        self._has_agreed = False
        if self._backward_steps is not None:
            self._add_hooks(self._backward_steps, len(self.param_groups) - 1)

    @property
    def steps_in_backward(self) -> bool:
        """Whether parameters take their steps in the backward pass."""
        return self._backward_steps is not None

    @property
    def depends_on_order(self) -> bool:
        """Whether the projection of a matrix depends on its place in the groups, because it has no name."""
        return any(
            not group.get("param_names") and any(_is_sketched(p, group) for p in group["params"])
            for group in self.param_groups
        )

    def step_in_backward_(self, enabled: bool = True) -> Self:
        """Take the step of each parameter in the backward pass, as soon as its gradient is complete, and free it.

        Then the gradients of a model are never in memory at the same time. The steps are those of :meth:`step`. The
        loop does not change: ``step()`` after each backward pass allows the next one, and takes the steps of parameters
        whose gradients the caller has assigned. Gradients are None after the backward pass, so what reads them before
        ``step()`` has no effect: clip neither by norm nor by value. Every backward pass is a step: to accumulate
        gradients, call ``step_in_backward_(False)``. Call it after the model was sharded by ``fully_shard`` or by
        tensor parallelism, and on every rank; under FSDP2 a step follows the reduction of the gradient, and
        ``set_requires_gradient_sync(False)`` accumulates gradients as without hooks. An error in a backward pass leaves
        the parameters that have taken their step changed.

        Args:
            enabled: Whether steps are taken in the backward pass; False removes the hooks.

        Returns:
            The optimizer.

        Raises:
            RuntimeError: In a second backward pass before ``step()``.
            ConfigError: In the first backward pass on several ranks without a sharded parameter, as under
                DistributedDataParallel.

        Cost: ranks that shard a matrix send the messages of a step for each matrix, in place of for all together.

        Example:
            >>> import torch, panther as pr
            >>> model = torch.nn.Linear(64, 256)
            >>> optimizer = pr.optim.SketchedAdamW(
            ...     model.named_parameters(), rank=4, seed=0
            ... ).step_in_backward_()
            >>> model(torch.randn(8, 64)).square().mean().backward()
            >>> model.weight.grad is None
            True
            >>> optimizer.step()
        """
        if self._backward_steps is not None:
            self._backward_steps.remove()
        self._backward_steps = _BackwardSteps(self._step_one) if enabled else None
        if self._backward_steps is not None:
            for number in range(len(self.param_groups)):
                self._add_hooks(self._backward_steps, number)
        return self

    def _add_hooks(self, steps: _BackwardSteps, number: int) -> None:
        for index in range(len(self.param_groups[number]["params"])):
            name, p, _ = self.entry(number, index)
            steps.add(number, index, name, p)

    def _step_all(self) -> None:
        self._step_parameters(self._places())
        if self._backward_steps is not None:
            self._backward_steps.end_step()

    @torch.no_grad()
    def _step_one(self, number: int, index: int) -> None:
        self._refuse_capture()
        self._step_parameters([(number, index)])

    def _step_parameters(self, places: Sequence[tuple[int, int]]) -> None:
        """Take the step of parameters, by the numbers of their groups and their indices there."""
        entries = [self.entry(number, index) for number, index in places]
        sketched = [entry for entry in entries if _is_sketched(entry[1], entry[2])]
        self._agree_on_sketches()
        layouts = self._agreed_layouts((name, p) for name, p, _ in sketched)
        for name, p, group in entries:
            self._refuse_sparse(name, p)
            _check_moments(name, p, self.state.get(p, {}), group, ShapeError)
        updates = [
            self._update_class(name, p, group, self.state[p], layouts.get(p), self.period_signs)
            for name, p, group in sketched
            if p.grad is not None
        ]
        apply_sketched(updates)
        plain: dict[int, dict[Tensor, str]] = {}
        for (number, _), (name, p, group) in zip(places, entries, strict=True):
            if p.grad is not None and not _is_sketched(p, group):
                plain.setdefault(number, {})[p] = name
        for number, names in plain.items():
            step_adamw(self.param_groups[number], list(names), self.state, names)

    def _places(self) -> list[tuple[int, int]]:
        return [(number, i) for number, group in enumerate(self.param_groups) for i in range(len(group["params"]))]

    def entry(self, number: int, index: int) -> _Entry:
        """Return a parameter with its group and its name, equal in all layouts that keep names or else the order."""
        group = self.param_groups[number]
        names = group.get("param_names")
        name = _plain_name(names[index]) if names else f"parameter {index} of group {number}"
        return name, group["params"][index], group

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of :meth:`state_dict`; moments are float32 or wider, where torch has the parameter's dtype.

        Ranks, seeds and other settings are those of the state, as in torch's optimizers.

        Raises:
            CheckpointError: Before anything changes, if the state is of another kind of optimizer, or if its moments do
                not fit a parameter.
        """
        groups = state_dict["param_groups"]
        indices = [index for group in groups for index in group["params"]]
        places = self._places()
        # torch has an error for other numbers of groups and of parameters.
        if len(groups) == len(self.param_groups) and len(indices) == len(places):
            for (number, place), index in zip(places, indices, strict=True):
                name, p, _ = self.entry(number, place)
                state, subject = state_dict["state"].get(index, {}), f"the state of {name}"
                self._check_kind(subject, groups[number], ("rank", "update", "period", "seed"))
                if state:
                    self._check_kind(subject, state, _SKETCHED if _is_sketched(p, groups[number]) else _PLAIN)
                _check_moments(name, p, state, groups[number], CheckpointError)
        super().load_state_dict(state_dict)
        self._has_agreed = False  # the groups may have other seeds now

    def _agree_on_sketches(self) -> None:
        """Raise on every rank, once, unless the ranks that share matrices have the same sketches of the same names."""
        # Parameters are plain tensors if nothing has imported DTensor, whose import takes a while.
        if self._has_agreed or "torch.distributed.tensor" not in sys.modules:
            return
        from panther.distributed.comm.agreement import agree
        from panther.optim.shards import layout_of

        descriptions: dict[Any, dict[str, str]] = {}
        for name, p, group in (self.entry(*place) for place in self._places()):
            if _is_sketched(p, group) and (layout := layout_of(p)) is not None:
                settings = "sketched with the seed {seed}, rank={rank}, update={update!r} and period={period}"
                sketches = descriptions.setdefault(layout.group, {})
                # Matrices of several models may have equal names.
                sketches[name] = " and ".join(filter(None, (sketches.get(name), settings.format(**group))))
        fix = "give all ranks the same settings and names of parameters"
        for ranks, sketches in descriptions.items():
            agree("SketchedAdamW.step", lambda sketches=sketches: sketches, ranks, fix, "sketches")  # type: ignore[misc]
        self._has_agreed = True


def _plain_name(name: str) -> str:
    """Return the name of a parameter without modules that are named as wrappers name theirs, equal in every layout."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _is_sketched(p: Tensor, group: Mapping[str, Any]) -> bool:
    """Return whether the moments of a parameter are sketches, as those of real matrices in groups with a rank are."""
    return group["rank"] is not None and p.dim() == 2 and p.numel() > 0 and not p.is_complex()


def _check_group_settings(group: Mapping[str, Any]) -> None:
    """Raise an error if a setting of a group is out of range."""
    if group["update"] not in UPDATES:
        raise ValueError(f"update={group['update']!r} must be one of {', '.join(map(repr, UPDATES))}")
    check_size("period", group["period"], least=1)
    check_flag("bf16_stochastic_round", group["bf16_stochastic_round"])
    if group["rank"] is not None:
        check_size("rank", group["rank"], least=1)


def _check_sketch(name: str, p: Tensor, group: Mapping[str, Any]) -> None:
    """Raise ShapeError if the rank is above the shorter side of a matrix."""
    if _is_sketched(p, group) and group["rank"] > min(p.shape):
        raise ShapeError(
            f"rank={group['rank']} is above the shorter side of {name}, of shape {tuple(p.shape)}: give a smaller "
            "rank, or a group with rank=None, as panther.optim.sketched_param_groups does"
        )


def _check_moments(
    name: str, p: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], error: type[Exception]
) -> None:
    """Raise the error unless the moments of a state fit a parameter with the settings of a group."""
    shape = _moment_shape(p, group)
    for key in ("sketch_avg", "sketch_avg_sq", "exp_avg", "exp_avg_sq"):
        if key in state and tuple(state[key].shape) != shape:
            raise error(
                f"{key} of {name} has the shape {tuple(state[key].shape)}, and with the parameter's shape "
                f"{tuple(p.shape)} and rank={group['rank']} it has the shape {shape}: load the state of the same "
                "model, or make a new optimizer after a change of either"
            )


def _moment_shape(p: Tensor, group: Mapping[str, Any]) -> tuple[int, ...]:
    if not _is_sketched(p, group):
        return tuple(p.shape)
    return (p.shape[0], group["rank"]) if p.shape[0] >= p.shape[1] else (group["rank"], p.shape[1])
