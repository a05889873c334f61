r"""Healing: a short distillation of a compressed model against the original, on unlabelled batches.

AdamW on the loss of :mod:`panther.compression.distillation`, with the best point kept and a way back from divergence.
The schedule is that of L. N. Smith and N. Topin, "Super-convergence", 2018, arXiv:1708.07120 (one cycle).
"""

__all__ = ["HealConfig", "HealResult", "heal"]

import io
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from panther.compression.distillation import Pair
from panther.errors import DistributedError, FormatError

_MATCHES = ("hidden", "output")
_TRAINS = ("factors", "all")
_WARM_UP = 0.1  # of all steps
_FIRST_RATE = 0.04  # of the peak
_BETAS = (0.9, 0.95)  # a short memory of squares: 2 to 6 % less loss after 200 steps than with 0.999
_ROLLBACKS = 3
_DIVERGED = 2.0  # times the best held-out loss
_CHECKPOINT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class HealConfig:
    """How a compressed model is healed.

    Raises:
        ValueError: If a number is out of its range or a name is unknown.
        TypeError: If a value is of another type.

    Example:
        >>> HealConfig(steps=200, match="output").learning_rate
        0.0005
    """

    steps: int = 300
    """Optimizer steps, one batch each (one on every rank of a group)."""

    learning_rate: float = 5e-4
    """Peak of the one-cycle schedule: a tenth of the steps up to it, the rest down to zero, both cosines."""

    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""

    gradient_clipping: float = 1.0
    """Largest norm of the gradient of all trained parameters together; ``math.inf`` leaves it as it is."""

    match: str = "hidden"
    """``"hidden"``: the outputs of the blocks and of the model. ``"output"``: the model's output only."""

    train: str = "factors"
    """``"factors"``: only the parameters of the new layers. ``"all"``: also every other one that requires grad.

    The new layers' are trained also where the model is frozen; the flags are put back afterwards."""

    check_every: int = 25
    """Steps between two checks on the held-out batches, from which the best point is kept."""

    checkpoint: str | os.PathLike[str] | None = None
    """File that holds the state of healing, written at each check; if it is there already, its run is continued."""

    def __post_init__(self) -> None:
        for name, fix in (("steps", "for no healing, give no HealConfig"), ("check_every", "use 25, say")):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, not {type(value).__name__}: use {name}=25, say")
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1: {fix}")
        for name, least, rule, fix in (
            ("learning_rate", math.ulp(0.0), "positive and finite", "use 5e-4, say"),
            ("weight_decay", 0.0, "at least 0 and finite", "use 0 for none"),
            ("gradient_clipping", math.ulp(0.0), "positive", "use math.inf for none"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, not {type(value).__name__}: {fix}")
            if not value >= least or (math.isinf(value) and name != "gradient_clipping"):
                raise ValueError(f"{name}={value} must be {rule}: {fix}")
        for name, known in (("match", _MATCHES), ("train", _TRAINS)):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name}={value!r} is unknown: use one of {', '.join(map(repr, known))}")
        if self.checkpoint is not None and not isinstance(self.checkpoint, str | os.PathLike):
            raise TypeError(
                f"checkpoint must be the path of a file, not {type(self.checkpoint).__name__}: use 'healing.pt', say"
            )


@dataclass(frozen=True)
class HealResult:
    """What healing did.

    Losses are shares of variance lost: 0 is the original, 1 to 2 has nothing of it.
    """

    steps: int
    """Steps done: fewer than asked for only where healing gave up."""

    loss_before: float
    """Mean loss on the held-out batches before the first step."""

    loss_after: float
    """The same of the model as it is now: never above ``loss_before``."""

    best_step: int
    """The step whose parameters the model now has; 0 is the start."""

    diverged: bool
    """Whether healing was given up, diverging again after its last rollback."""

    rollbacks: int
    """How often healing diverged and went back to its best point, with half the learning rate from there on."""

    history: tuple[tuple[int, float, float | None], ...]
    """Step, loss on its batch before it, and, where it was checked, loss on the held-out batches after it."""


def heal(
    model: nn.Module,
    replaced: Mapping[nn.Module, nn.Module],
    batches: Sequence[Any],
    held_out: Sequence[Any],
    call: Callable[[Any], Tensor],
    mask: Callable[[Any], Tensor | None],
    config: HealConfig,
    *,
    seed: int,
    group: dist.ProcessGroup | None = None,
    progress: Callable[[Iterable[int], str, int], Iterable[int]] | None = None,
) -> HealResult:
    r"""Train a compressed model, in place, to do as the original does.

    AdamW with a one-cycle schedule and clipping, in eval mode. Where a parameter has half precision, the optimizer
    works on a float32 copy of it, which is rounded into the model. A loss that is not finite, or a held-out loss above
    twice the best, is divergence: healing goes back to the best point, warms up anew and goes on with half the
    learning rate, three times at most. The model ends with the best parameters seen on the held-out batches, those
    from before the first step included.

    What is matched are the outputs of the *blocks*: the elements of the outermost ModuleLists and Sequentials that
    contain a new layer (see the code for stacks within wrappers). Of a tuple or a ModelOutput it is the first tensor.
    A block that gives other shapes than in the original, as routing may make it do, is left out for that batch.

    The result is a function of the arguments and ``seed``; torch's generators are left as they are, and a model that
    draws from them draws the same at every call. Flags (``training``, ``requires_grad``) are put back, after an
    exception too; after one, every parameter that the original has is as it was, the factors are those of the last
    step.

    Args:
        model: The compressed model.
        replaced: For each new layer the dense one that stood in its place, on the same device.
        batches: What to train on, in a seeded order, as often as the steps need.
        held_out: What to check on.
        call: Runs ``model`` on a batch and returns its main output.
        mask: The positions of a batch that count, bool (N, T), or None for all. It applies to tensors of shape
            (N, T, ...) with at least one further dimension.
        config: How.
        seed: Seed of the order of the batches.
        group: Processes that heal together, each on batches of its own: gradients and held-out losses are averaged,
            and all start from the first rank's parameters. None is this process alone.
        progress: Wraps the iteration over steps, given the steps, a description and their number.

    Returns:
        What it did.

    Raises:
        ValueError: If there are no batches, a new layer is not in the model, the loss is not finite to begin with or
            does not depend on what is to be trained.
        FormatError: If the checkpoint is of another run, or no checkpoint.
        DistributedError: If the processes of the group differ in what they train.

    Cost: a step costs a forward of the original and a forward and backward of the compressed model. Extra memory:
    five times the trained parameters (gradient and what is left of it by clipping, two moments, best point), a copy
    of those that are of half precision or belong to the original too, and the hidden states of one batch, twice.
    """
    for name, given in (("batches", batches), ("held_out", held_out)):
        if not len(given):
            raise ValueError(f"{name} is empty and must hold at least one batch: give more calibration batches")
    pair = Pair(model, replaced, call, mask, seed, hidden=config.match == "hidden")
    trained = _trained(model, replaced, every=config.train == "all")
    pair.keep(trained.values())
    try:
        with _flags(model, replaced, trained.values()), _surroundings(pair.devices):
            return _Healing(pair, trained, batches, held_out, config, seed, group).run(progress)
    except BaseException:
        pair.put_back()
        raise


class _Healing:
    """The course of healing: its steps, checks and rollbacks, and how they are saved."""

    def __init__(
        self,
        pair: Pair,
        trained: Mapping[str, nn.Parameter],
        batches: Sequence[Any],
        held_out: Sequence[Any],
        config: HealConfig,
        seed: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.pair, self.config, self.seed, self.group = pair, config, seed, group
        self.batches, self.held_out = batches, held_out
        self.parameters = list(trained.values())
        # Copies of half-precision parameters, views of the others; no gradient of the user's is touched.
        self.masters = [p.detach().to(torch.promote_types(p.dtype, torch.float32)) for p in self.parameters]
        self.device = self.masters[0].device
        self.identity = self._identity(trained)
        if group is not None:
            for master in self.masters:
                dist.broadcast(master, src=dist.get_global_rank(group, 0), group=group)
            self._round()
        self._new_optimizer()
        self.best = [master.clone() for master in self.masters]
        self.step = self.best_step = self.rollbacks = self.restarted = 0
        self.loss_before = self.best_loss = math.nan
        self.diverged = False
        self.loss_scale = 2.0**16 if any(p.dtype is torch.float16 for p in self.parameters) else 1.0
        self.history: list[tuple[int, float, float | None]] = []

    def run(self, progress: Callable[[Iterable[int], str, int], Iterable[int]] | None) -> HealResult:
        """Heal from the start or from the checkpoint, and leave the best parameters in the model."""
        if not self._load():
            self.loss_before = self.best_loss = self._held_out_loss()
            if not math.isfinite(self.loss_before):
                raise ValueError(
                    f"the loss on the held-out batches is {self.loss_before} before the first step and must be finite: "
                    "look for NaN or infinite values in the model's output, or in float16 that overflows"
                )
            self._save()
        left = range(self.step, 0 if self.diverged else self.config.steps)
        order = _order(len(self.batches), self.seed, self.step)
        for step in left if progress is None else progress(left, "healing", len(left)):
            self._advance(step, self.batches[next(order)])
            if self.diverged:
                break
        self._restore(self.best)
        return HealResult(
            steps=self.step,
            loss_before=self.loss_before,
            loss_after=self.best_loss,
            best_step=self.best_step,
            diverged=self.diverged,
            rollbacks=self.rollbacks,
            history=tuple(self.history),
        )

    def _advance(self, step: int, batch: Any) -> None:
        """One step, and what may follow it: a check, a rollback, a checkpoint."""
        loss, sound = self._train(batch, self._rate(step))
        self.step = step + 1
        check = self.step % self.config.check_every == 0 or self.step == self.config.steps
        held_out = self._held_out_loss() if check and sound else None
        self.history.append((self.step, loss, held_out))
        if held_out is not None and held_out < self.best_loss:
            self.best_loss, self.best_step = held_out, self.step
            for best, master in zip(self.best, self.masters, strict=True):
                best.copy_(master)
        if not sound or (held_out is not None and not held_out <= _DIVERGED * self.best_loss):
            self._roll_back()
        if check or self.diverged:
            self._save()

    def _rate(self, step: int) -> float:
        """The learning rate of a step: one cycle, halved by each rollback and warmed up after it."""
        warm_up = max(1, round(_WARM_UP * self.config.steps))
        rate = self.config.learning_rate * 0.5**self.rollbacks
        rate *= _rise(min(1.0, (step - self.restarted + 1) / warm_up))
        return rate * _fall(max(0.0, (step - warm_up + 1) / (self.config.steps - warm_up + 1)))

    def _train(self, batch: Any, rate: float) -> tuple[float, bool]:
        """One step of AdamW: its loss, and whether loss and gradients were finite, without which no step is made."""
        loss = self.pair.loss(batch)
        if not loss.requires_grad:
            raise ValueError(
                "the loss must depend on the trained parameters differentiably, and the model's output carries no "
                "gradient: take no_grad, detach or sampling out of its forward"
            )
        while True:
            half = self.loss_scale > 1.0
            gradients = torch.autograd.grad(
                loss * self.loss_scale, self.parameters, retain_graph=half, allow_unused=True
            )
            mean_loss, averaged = self._average(loss.detach(), gradients)
            norm = torch.stack([torch.linalg.vector_norm(g).to(self.device) for g in averaged]).norm()
            norm = norm / self.loss_scale
            sound = math.isfinite(mean_loss) and bool(norm.isfinite())
            if sound or not half or not math.isfinite(mean_loss):
                break
            self.loss_scale /= 2  # the gradients of float16 overflowed
        if sound:
            clip = min(1.0, self.config.gradient_clipping / max(norm.item(), 1e-30)) / self.loss_scale
            for master, gradient in zip(self.masters, averaged, strict=True):
                master.grad = gradient * clip
            self.optimizer.param_groups[0]["lr"] = rate
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._round()
        return mean_loss, sound

    def _average(self, loss: Tensor, gradients: Sequence[Tensor | None]) -> tuple[float, list[Tensor]]:
        """Loss and gradients in the masters' dtypes, averaged over the group by one all-reduce."""
        full = [
            torch.zeros_like(master) if gradient is None else gradient.to(master.dtype)
            for gradient, master in zip(gradients, self.masters, strict=True)
        ]
        if self.group is None:
            return loss.item(), full
        flat = torch.cat([part.reshape(-1).to(self.device) for part in (loss, *full)])
        dist.all_reduce(flat, group=self.group)
        flat /= dist.get_world_size(self.group)
        parts = flat[1:].split([master.numel() for master in self.masters])
        return flat[0].item(), [part.view_as(m).to(m) for part, m in zip(parts, self.masters, strict=True)]

    def _held_out_loss(self) -> float:
        """Mean loss over the held-out batches of all ranks."""
        with torch.no_grad():
            losses = [self.pair.loss(batch).item() for batch in self.held_out]
        if self.group is None:
            return math.fsum(losses) / len(losses)
        total = torch.tensor([sum(losses), len(losses)], dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.group)
        return (total[0] / total[1]).item()

    def _roll_back(self) -> None:
        """Go back to the best point, or give up."""
        if self.rollbacks == _ROLLBACKS:
            self.diverged = True
            return
        self.rollbacks += 1
        self.restarted = self.step
        self._restore(self.best)
        self._new_optimizer()  # its moments are those of the way that diverged

    def _new_optimizer(self) -> None:
        decay = self.config.weight_decay
        self.optimizer = torch.optim.AdamW(self.masters, lr=0.0, betas=_BETAS, weight_decay=decay)

    def _restore(self, values: Sequence[Tensor]) -> None:
        for master, value in zip(self.masters, values, strict=True):
            master.copy_(value)
        self._round()

    def _round(self) -> None:
        """Put the masters' values in the model: nothing to do for those that are the parameters themselves."""
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if parameter.dtype is not master.dtype:
                    parameter.copy_(master)

    def _identity(self, trained: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        """What two runs share if one may continue the other; the same on all ranks, which is checked."""
        identity = {
            "version": _CHECKPOINT_VERSION,
            "seed": self.seed,
            **asdict(replace(self.config, checkpoint=None)),
            "parameters": [[name, list(p.shape), str(p.dtype)] for name, p in trained.items()],
            "original": self.pair.checksum() if self.config.checkpoint is not None or self.group is not None else 0,
        }
        check = zlib.crc32(repr(identity).encode())
        own = torch.tensor([len(self.batches), len(self.held_out), check], device=self.device)
        rows = [own]
        if self.group is not None:
            rows = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
            dist.all_gather(rows, own, group=self.group)
        *counts, checks = zip(*(row.tolist() for row in rows), strict=True)
        if len(set(checks)) > 1:
            raise DistributedError(
                "the processes that heal together must have one model, config and seed, and theirs differ (checksums "
                f"{', '.join(map(str, checks))}): load the same weights and pass the same arguments on every rank"
            )
        return identity | {"batches": [list(count) for count in counts]}

    def _save(self) -> None:
        """Write the checkpoint, whole or not at all; the first rank does."""
        path = self.config.checkpoint
        if path is None or (self.group is not None and dist.get_rank(self.group) != 0):
            return
        state = {"identity": self.identity, "parameters": self.masters, "optimizer": self.optimizer.state_dict()}
        state |= {name: getattr(self, name) for name in _PROGRESS}
        partial = f"{os.fspath(path)}.tmp"
        try:
            torch.save(state, partial)
            os.replace(partial, path)
        finally:
            if os.path.exists(partial):
                os.remove(partial)

    def _load(self) -> bool:
        """Continue the checkpoint's run, if there is one."""
        if (content := self._read()) is None:
            return False
        path = self.config.checkpoint
        try:
            state = torch.load(io.BytesIO(content), map_location=self.device, weights_only=True)
            identity = state["identity"]
            values = [state["parameters"], state["optimizer"], *(state[name] for name in _PROGRESS)]
        except Exception as error:
            raise FormatError(
                f"checkpoint={path} must be a file that healing wrote, and cannot be read as one: give another "
                "path, or delete it to start anew"
            ) from error
        differing = [name for name in self.identity if identity.get(name) != self.identity[name]]
        if differing:
            shown = [
                f"{name} {identity.get(name)} instead of {self.identity[name]}"
                if isinstance(self.identity[name], int | float | str) and name != "original"
                else f"other {'weights of the original' if name == 'original' else name}"
                for name in differing
            ]
            raise FormatError(
                f"checkpoint={path} is of another run ({', '.join(shown)}): give another path, or delete it to start "
                "anew"
            )
        masters, optimizer, *rest = values
        self._restore(masters)
        self.optimizer.load_state_dict(optimizer)
        for name, value in zip(_PROGRESS, rest, strict=True):
            setattr(self, name, value)
        return True

    def _read(self) -> bytes | None:
        """The checkpoint's bytes, those of the first rank on every rank."""
        path, content = self.config.checkpoint, None
        if path is None:
            return None
        first = self.group is None or dist.get_rank(self.group) == 0
        if first and os.path.exists(path):
            with open(path, "rb") as file:
                content = file.read()
        if self.group is None:
            return content
        source = dist.get_global_rank(self.group, 0)
        size = torch.tensor([len(content or b"")], device=self.device)
        dist.broadcast(size, src=source, group=self.group)
        if not size.item():
            return None
        raw = torch.empty(int(size.item()), dtype=torch.uint8, device=self.device)
        if content is not None:
            raw.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        dist.broadcast(raw, src=source, group=self.group)
        return raw.cpu().numpy().tobytes()


_PROGRESS = (
    "step", "best", "best_step", "best_loss", "loss_before", "rollbacks", "restarted", "diverged", "loss_scale",
    "history",
)  # fmt: skip
"""What of a run, beside parameters and optimizer, a checkpoint holds. The order of batches follows from the step."""


def _trained(model: nn.Module, replaced: Mapping[nn.Module, nn.Module], *, every: bool) -> dict[str, nn.Parameter]:
    """The parameters to train by name, each once: the new layers', and with ``every`` all that require grad."""
    factors = {parameter for layer in replaced for parameter in layer.parameters()}
    return {name: p for name, p in model.named_parameters() if p in factors or (every and p.requires_grad)}


@contextmanager
def _flags(
    model: nn.Module, replaced: Mapping[nn.Module, nn.Module], trained: Iterable[nn.Parameter]
) -> Iterator[None]:
    """Eval mode, and gradients of the trained parameters alone; both as before afterwards."""
    modules = {module for root in (model, *replaced.values()) for module in root.modules()}
    training = [(module, module.training) for module in modules]
    requiring = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for module, _ in training:
            module.training = False
        chosen = set(trained)
        for parameter, flag in requiring:
            if flag is not (parameter in chosen):
                parameter.requires_grad_(not flag)
        yield
    finally:
        for module, flag in training:
            module.training = flag
        for parameter, flag in requiring:
            parameter.requires_grad_(flag)


@contextmanager
def _surroundings(devices: Sequence[int]) -> Iterator[None]:
    """Gradients on, torch's generators as before afterwards, no fast path of attention: its states are nested."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.random.fork_rng(devices), torch.enable_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _order(count: int, seed: int, start: int) -> Iterator[int]:
    """Indices of the batches from step ``start`` on: one seeded permutation after another."""
    generator = torch.Generator().manual_seed(seed)
    skip = start
    while True:
        permutation = torch.randperm(count, generator=generator).tolist()
        yield from permutation[skip:]
        skip = max(0, skip - count)


def _rise(share: float) -> float:
    return _FIRST_RATE + (1 - _FIRST_RATE) * (1 - math.cos(math.pi * share)) / 2


def _fall(share: float) -> float:
    return (1 + math.cos(math.pi * share)) / 2
