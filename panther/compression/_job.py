"""One call of compress: its plan, its statistics and fits, and what was found on the way."""

__all__ = ["Job"]

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from panther.compression.allocation import (
    Ranks,
    allocate_global,
    allocate_uniform,
    check_feasible,
    least_bytes,
    predicted,
)
from panther.compression.calibration import Loss, Statistics, Survey, drift, gather, passes, survey
from panther.compression.conversion import Fit, components, convert, convert_plainly, fit, inherit_flags, wide
from panther.compression.healing import HealConfig, HealResult, heal
from panther.compression.measuring import LayerFigures, layer_figures, model_speedup
from panther.compression.planning import Left, Plan, Target, replace_modules, swap_modules
from panther.compression.report import CompressionReport, LayerReport
from panther.compression.running import Runner, calibrating
from panther.errors import CompressionError, NumericalWarning

_ERROR_STEPS = 8  # halvings of the budget in the search for max_error
_DOUBLE = 8
_HEALING = 6  # times the trained numbers: gradients twice, two moments, the best point, a copy of half precision

Replacement = dict[nn.Module, nn.Module]


class Job:
    """What compress does, step by step."""

    def __init__(
        self, model: nn.Module, plan: Plan, runner: Runner | None, seed: int, method: str, allocate: str
    ) -> None:
        self.model, self.runner, self.seed, self.method, self.allocate = model, runner, seed, method, allocate
        self.targets, self.left = list(plan.targets), list(plan.left)
        self.seeded = method == "random"
        self.notes: list[str] = []
        self.found: Survey | None = None
        self.gradients = method == "two_sided"
        self.fits: dict[Target, Fit] = {}
        self.kept: dict[Target, Statistics] = {}
        self.scale: dict[Target, float] = {}
        self.positions: dict[Target, float] = {}
        self.passes = self.extra_bytes = 0
        self.figures: dict[Target, LayerFigures] = {}
        self.errors: dict[str, float] = {}
        self.predictable = False  # whether the moments tell the error of the output
        self.measured_speedup: float | None = None
        self.healed: HealResult | None = None
        self.original: dict[nn.Parameter, Tensor] = {}
        self.encoders: list[nn.TransformerEncoder] = []
        self.bytes_before = _bytes(model)

    def seed_of(self, index: int) -> int:
        """A seed of its own for every target."""
        return (self.seed + index) % 2**63

    def check_targets(self) -> None:
        """Raise if nothing can be compressed."""
        if not self.targets:
            shown = "; ".join(f"{entry.name!r} {entry.reason}" for entry in self.left[:5])
            raise CompressionError(f"the model has no layer to compress: {shown or 'it has no weights'}")

    def survey(self, loss_fn: Loss | None) -> None:
        """Run one batch, and leave what the batches say nothing of."""
        assert self.runner is not None
        if not self.targets:
            return
        self.found = found = survey(self.runner, self.targets, loss_fn)
        if self.gradients and not found.differentiable:
            self.gradients, self.allocate = False, "uniform"
            note = "the output has no gradient, so G is the identity and ranks are uniform (method 'activation')"
            self.notes.append(note)
            warnings.warn(f"method='two_sided' is not possible: {note}", NumericalWarning, stacklevel=3)
        for target in list(self.targets):
            reason = None
            if target in found.idle:
                reason = "is not called on the first calibration batch"
            elif self.gradients and target in found.blind:
                reason = "has no gradient: the output does not depend on it, or only through no_grad, detach or zeros"
            if reason is not None:
                self.targets.remove(target)
                self.left.append(Left(target.name, type(target.modules[0]).__name__, reason))
        kept = set(self.targets)
        found.inputs = [several for one in found.inputs if (several := [target for target in one if target in kept])]

    def limit(self, budget: float | None, max_bytes: int | None) -> int:
        """Bytes for the targets, at least what their smallest ranks take."""
        dense = sum(target.dense_bytes for target in self.targets)
        if budget is not None:
            limit, what, other = int(budget * dense * (1 + 1e-12)), f"budget={budget}", None  # 0.29 * 100 is 28.99...
        else:
            assert max_bytes is not None
            other = self.bytes_before - dense + 32 * sum(len(target.modules) for target in self.targets)  # sketch_seed
            limit, what = int(max_bytes) - other, f"max_bytes={max_bytes:,}"
        check_feasible(self.targets, limit, what, other_bytes=other, seeded=self.seeded)
        return min(limit, dense)

    def fit(self, limit: int | None, loss_fn: Loss | None, memory: int | None, *, keep: bool, healing: bool) -> None:
        """Gather statistics pass by pass, and factor every weight in their metric, to what ``limit`` bytes allow."""
        share = 1.0 if limit is None else limit / sum(target.dense_bytes for target in self.targets)
        if self.seeded:
            return
        if self.found is None:
            self.extra_bytes = self._most_bytes(0, limit, share, keep=False, healing=healing)
            for index, target in enumerate(self.targets):
                self.fits[target] = fit(target, None, most=components(target, share), seed=self.seed_of(index))
            return
        runner = self.runner
        assert runner is not None
        cut, largest = passes(self.found.inputs, self.gradients, memory)
        self.passes, self.extra_bytes = len(cut), self._most_bytes(largest, limit, share, keep=keep, healing=healing)
        runner.say(
            f"panther: {len(self.targets)} weights, {len(cut)} passes over {len(runner.batches)} batches, at most "
            f"{self.extra_bytes / 1e6:.0f} MB besides what the model's own forward and backward take"
        )
        seeds = {target: self.seed_of(index) for index, target in enumerate(self.targets)}
        for number, inputs in enumerate(cut):
            what = f"statistics {number + 1}/{len(cut)}"
            moments, energy = gather(runner, inputs, loss_fn, gradients=self.gradients, seed=self.seed, what=what)
            for target in list(moments):
                own = moments.pop(target)
                self.fits[target] = fit(target, own, most=components(target, share), seed=seeds[target])
                self.positions[target] = own.positions
                self.scale[target] = own.positions / energy if energy > 0 and loss_fn is None else own.positions
                if keep:
                    self.kept[target] = own
        self.predictable = loss_fn is None and self.gradients

    def _most_bytes(self, moments: int, limit: int | None, share: float, *, keep: bool, healing: bool) -> int:
        """Factors of all targets, and the most of what is held beside them: moments, new layers, healing."""
        factors = sum(wide(target).itemsize * target.numbers(components(target, share)) for target in self.targets)
        work = max(
            _DOUBLE * target.groups * (3 * (target.inner**2 + target.outer**2) + 6 * target.inner * target.outer)
            for target in self.targets
        )
        kept = _DOUBLE * sum(target.groups * (target.inner**2 + target.outer**2) for target in self.targets)
        new = sum(target.dense_bytes for target in self.targets) if limit is None else limit
        widest = max(wide(target).itemsize / target.weight.itemsize for target in self.targets)
        healed = int(_HEALING * widest * new) if healing else 0  # but for the hidden states
        return factors + max(moments + work + keep * kept, 2 * new + keep * kept, new + healed)

    def tails(self) -> dict[Target, Any]:
        """Share of the output's squared norm that is lost at every rank."""
        return {target: found.tails() * self.scale.get(target, 1.0) for target, found in self.fits.items()}

    def ranks(self, allocate: str, limit: int) -> Ranks:
        """Ranks within so many bytes."""
        if allocate == "global":
            tails = self.tails()
            return allocate_global({target: tails[target] for target in self.targets}, limit)
        return allocate_uniform(self.targets, limit, seeded=self.seeded)

    def choose(self, limit: int) -> Ranks:
        """The ranks to use: global ones only where uniform ones do no better on the held-out batches."""
        if self.allocate != "global":
            return self.ranks("uniform", limit)
        assert self.runner is not None
        both = {name: self.ranks(name, limit) for name in ("global", "uniform")}
        variants = [partial(replace_modules, self.model, self.replacement(ranks)) for ranks in both.values()]
        errors = dict(zip(both, self.runner.errors(variants, "global against uniform"), strict=True))
        self.errors["uniform"] = errors["uniform"]
        if errors["global"] > errors["uniform"]:
            self.allocate = "uniform"
            self.notes.append(
                f"uniform ranks are used: global ones have an error of {errors['global']:.3g} on the held-out batches, "
                f"uniform ones {errors['uniform']:.3g}"
            )
        return both[self.allocate]

    def least_limit(self, max_error: float) -> int:
        """The fewest bytes whose error on the held-out batches is within ``max_error``, by halving."""
        assert self.runner is not None
        low = least_bytes(self.targets, seeded=self.seeded)
        high = sum(target.dense_bytes for target in self.targets)

        def good(limit: int) -> bool:
            replacement = self.replacement(self.ranks(self.allocate, limit))
            return self.runner.errors([partial(replace_modules, self.model, replacement)], "error")[0] <= max_error  # type: ignore[union-attr]

        if good(low):
            return low
        for _ in range(_ERROR_STEPS):
            middle = (low + high) // 2
            low, high = (low, middle) if good(middle) else (middle, high)
        return high

    def replacement(self, ranks: Ranks) -> Replacement:
        """New layers for the old ones."""
        new: Replacement = {}
        for index, target in enumerate(self.targets):
            rank, seed = ranks[target], self.seed_of(index)
            if rank is None:
                continue
            if self.seeded:
                low_rank = rank // 2 * (target.groups if isinstance(target.modules[0], nn.Conv2d) else 1)
                new |= convert_plainly(target, 1, low_rank, "random", seed)
            else:
                new |= convert(target, self.fits[target], rank, seed)
        return new

    def refit(self, ranks: Ranks, max_error: float | None) -> Replacement:
        """New layers, each fitted to what it reads once those before it are replaced; not if that misses max_error."""
        assert self.runner is not None
        assert self.found is not None
        seeds = {target: self.seed_of(index) for index, target in enumerate(self.targets)}
        new: Replacement = {}
        for number, several in enumerate(self.found.inputs):
            chosen = [(target, rank) for target in several if (rank := ranks[target]) is not None]
            if not chosen:
                continue
            what = f"sequential {number + 1}/{len(self.found.inputs)}"
            calls = self.found.calls[several[0]]
            drifted = drift(self.runner, several, calls, partial(replace_modules, self.model, dict(new)), what)
            for target, rank in chosen:
                found = fit(target, self.kept.pop(target), most=rank, seed=seeds[target], drifted=drifted)
                new |= convert(target, found, rank, seeds[target])
        if max_error is not None:
            error = self.runner.errors([partial(replace_modules, self.model, new)], "error")[0]
            if error > max_error:
                self.notes.append(f"layers are not fitted in sequence, with which the error is {error:.3g}")
                return self.replacement(ranks)
        return new

    def measure(self, replacement: Replacement, speed: bool) -> None:
        """Errors and speed on the held-out batches."""
        if self.runner is None:
            return
        self.errors["measured"] = self.runner.errors([partial(self._all_replaced, replacement)], "error")[0]
        self.figures = layer_figures(self.runner, self.targets, replacement, speed=speed)
        if speed and replacement:
            self.measured_speedup = model_speedup(self.runner, replacement)

    @contextmanager
    def _all_replaced(self, replacement: Replacement) -> Iterator[None]:
        """The new layers stand in the model, and no old one is called from anywhere."""
        names = {module: target.name for target in self.targets for module in target.modules}

        def refuse(module: nn.Module, _: Any) -> None:
            raise CompressionError(
                f"layer {names[module]!r} is called also from where it is not registered, such as a plain list, and "
                "cannot be replaced there: use an nn.ModuleList, or exclude the layer"
            )

        with replace_modules(self.model, replacement), ExitStack() as hooks:
            for old in replacement:
                hooks.callback(old.register_forward_pre_hook(refuse).remove)
            yield

    def heal(self, replacement: Replacement, config: HealConfig) -> None:
        """Distil the original into the model, whose layers have been replaced."""
        runner = self.runner
        assert runner is not None
        if not replacement:
            self.notes.append("nothing was compressed, so there is nothing to heal")
            return
        if config.train == "all":  # the original has other values then
            self.original = {p: p.detach().clone() for p in self.model.parameters() if p.requires_grad}
        self.healed = heal(
            self.model,
            {new: old for old, new in replacement.items()},
            runner.batches,
            runner.held_out,
            runner.output,
            runner.mask,
            config,
            seed=self.seed,
            group=runner.group,
            progress=runner.progress,
        )

        @contextmanager
        def back() -> Iterator[None]:
            with replace_modules(self.model, {new: old for old, new in replacement.items()}):
                self.swap_values_()
                try:
                    yield
                finally:
                    self.swap_values_()

        with calibrating(self.model, self.seed, runner.device):
            self.errors["healed"] = runner.errors([nullcontext], "error, healed", reference=back)[0]

    def place(self, replacement: Replacement) -> None:
        """Put the new layers into the model."""
        swap_modules(self.model, replacement)
        inherit_flags(replacement)
        new = set(replacement.values())
        for name, module in self.model.named_modules():
            nested = isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor
            if nested and new.intersection(module.modules()):
                self.encoders.append(module)
                module.use_nested_tensor = False
                self.notes.append(
                    f"use_nested_tensor is off in {name or 'the model'!r}: with it torch reads the weight of sketched "
                    "layers where padding is masked, which forms them"
                )

    def undo(self, replacement: Replacement) -> None:
        """Make the model what it was."""
        swap_modules(self.model, {new: old for old, new in replacement.items()})
        self.swap_values_()
        for encoder in self.encoders:
            encoder.use_nested_tensor = True

    def swap_values_(self) -> None:
        """Exchange the values of healed parameters for the original ones, or back."""
        for parameter, value in self.original.items():
            parameter.data, self.original[parameter] = value, parameter.data

    def report(self, ranks: Ranks, replacement: Mapping[nn.Module, nn.Module]) -> CompressionReport:
        """What happened, once the layers have been replaced."""
        tails = self.tails() if self.gradients and self.scale else {}
        losses = {t: tails[t][r].item() if (r := ranks[t]) is not None else 0.0 for t in self.targets if t in tails}
        whole = sum(losses.values())
        layers = []
        work_before = work_after = 0.0
        for target in self.targets:
            rank, found, own = ranks[target], self.fits.get(target), self.figures.get(target)
            weight = target.weight
            times = self.positions.get(target, 1.0)
            work_before += times * target.dense_numbers
            work_after += times * (target.dense_numbers if rank is None else target.numbers(rank))
            layers.append(
                LayerReport(
                    names=target.names,
                    kind=type(target.modules[0]).__name__,
                    shape=tuple(weight.shape),
                    rank=rank,
                    bytes_before=target.dense_bytes,
                    bytes_after=target.bytes(rank, seeded=self.seeded or self.method.endswith(("lstsq", "random"))),
                    predicted_error=None if found is None else 0.0 if rank is None else found.local_error(rank),
                    measured_error=None if own is None else own.error if rank is not None else 0.0,
                    share=losses[target] / whole if target in losses and whole > 0 else None,
                    speedup=None if own is None else own.speedup,
                )
            )
        return CompressionReport(
            layers=tuple(layers),
            left=tuple(self.left),
            method=self.method,
            allocate=self.allocate,
            notes=tuple(self.notes),
            bytes_before=self.bytes_before,
            bytes_after=_bytes(self.model),
            eligible_bytes_before=sum(layer.bytes_before for layer in layers),
            eligible_bytes_after=sum(layer.bytes_after for layer in layers),
            predicted_error=predicted(tails, ranks) ** 0.5 if self.predictable else None,
            measured_error=self.errors.get("measured"),
            uniform_error=self.errors.get("uniform"),
            healed=self.healed,
            healed_error=self.errors.get("healed"),
            predicted_speedup=work_before / work_after if work_after else None,
            measured_speedup=self.measured_speedup,
            passes=self.passes,
            extra_bytes=self.extra_bytes,
            seed=self.seed,
        )


def _bytes(model: nn.Module) -> int:
    """Of all tensors, as saved: each storage once."""
    seen: dict[Any, int] = {}
    for tensor in model.state_dict().values():
        if isinstance(tensor, Tensor) and not is_lazy(tensor):
            key = tensor.data_ptr() if tensor.numel() and not tensor.is_meta else id(tensor)
            seen[key] = max(seen.get(key, 0), tensor.numel() * tensor.element_size())
    return sum(seen.values())
