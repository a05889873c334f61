"""Base classes of compressed layers and of sketched layers: the seed, the two modes, saving and loading.

In a *seeded* layer the sketches are fixed functions of ``seed`` and non-persistent buffers. In a *fitted* layer, which
loaded a checkpoint with sketches of its own, they are Parameters. ``sketch_seed`` in the state_dict stores the mode and
the seed.
"""

__all__ = [
    "CompressedModule",
    "SketchedModule",
    "arguments_of",
    "check_linear_input",
    "is_autocasting",
    "keep_own_forward",
]

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from panther._keywords import explain_keywords_of_class
from panther._torch import (
    buffers_of,
    children_of,
    is_transformed,
    parameters_of,
    put_forward_pre_hooks,
    unsaved_buffers_of,
    version_of,
)
from panther.errors import DTypeError, ShapeError, SketchMismatchError, check_device, check_flag, check_floating
from panther.kernels.ops.library import can_autocast
from panther.nn.factors import inherit_settings
from panther.nn.sketch_record import (
    RECORD_MARK,
    check_mark,
    has_values,
    is_rounded,
    make_record,
    read_record,
    record_mark,
)
from panther.nn.sketch_sizes import warn_unless_smaller
from panther.sketch import check_seed, signs

_STACKED = ("S1s", "S2s", "U1s", "U2s")
_MAKERS = ("from_linear", "from_conv", "from_embedding", "from_weight")


def keep_own_forward(module: nn.Module, args: Any) -> None:
    """Do nothing, as a forward pre-hook: torch's fast paths are off for a module that has a hook.

    nn.TransformerEncoderLayer in eval mode reads the weights of its linear layers and its attention instead of calling
    them. Of a sketched layer that would be a dense product, and of a sharded one a rank's shard.
    """


class _UncalledHooks(OrderedDict[int, Callable[..., Any]]):
    """Forward pre-hooks that are false while :func:`keep_own_forward` is the only one.

    nn.TransformerEncoderLayer counts hooks, and nn.Module tests whether there are hooks. Calling this hook would take
    as long as a small product.
    """

    def __bool__(self) -> bool:
        return len(self) > 1


def arguments_of(layer: nn.Module, names: tuple[str, ...]) -> dict[str, Any]:
    """Return arguments of a constructor as JSON has them, read from the attributes of a sketched or a dense layer."""
    values = {name: getattr(layer, name) for name in names}
    if "bias" in values:
        values["bias"] = layer.bias is not None
    return {name: _as_in_json(value) for name, value in values.items()}


def _as_in_json(value: Any) -> Any:
    return [_as_in_json(entry) for entry in value] if isinstance(value, tuple) else value


def is_autocasting(device_type: str) -> bool:
    """Return whether autocast is enabled for a type of device, so that inputs of other dtypes are cast."""
    return can_autocast(device_type) and torch.is_autocast_enabled(device_type)


def check_linear_input(x: Tensor, in_features: int, dtype: torch.dtype) -> None:
    """Raise unless the input fits a linear layer of ``in_features`` inputs and this dtype."""
    if not isinstance(x, Tensor):
        raise TypeError(f"the input must be a tensor, not {type(x).__name__}: use torch.as_tensor")
    if x.dtype is not dtype and not is_autocasting(x.device.type):
        other = f", or the layer, layer.to({x.dtype}), or run under torch.autocast" if x.is_floating_point() else ""
        raise DTypeError(f"the input is {x.dtype} and the layer {dtype}: cast the input, x.to({dtype}){other}")
    # Tracing would warn about a comparison of sizes, which are tensors.
    if not (torch.jit.is_tracing() or x.is_nested) and (not x.dim() or x.shape[-1] != in_features):
        features = f"{x.shape[-1]} features" if x.dim() else "no dimension"
        raise ShapeError(f"the input has {features} and the layer takes {in_features}")


class CompressedModule(nn.Module):
    """Base of layers that replace a dense layer with fewer numbers or bits. The inference format can store them."""

    dense_class: type[Any]
    """The class of torch.nn that the layer replaces."""

    dense_arguments: tuple[str, ...]
    """Names of the constructor's arguments that the dense class has too."""

    size_arguments: tuple[str, ...]
    """Names of those that say how much is stored."""

    saved_buffer_names: tuple[str, ...]
    """Names of the buffers that are saved with the parameters."""

    factor_names: tuple[str, ...] = ()
    """Names of the parameters that are factors of the weight, where the products of factors are the weight."""

    checked_names: tuple[str, ...] = ()
    """Names of the buffers on which arithmetic has no meaning, such as codes and seeds; the record is the last."""

    _checked: list[tuple[int, int]] | None = None
    """Which tensors :meth:`check_writes` last saw, and how often they had been written to."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        explain_keywords_of_class(cls)

    def __init__(self) -> None:
        super().__init__()
        put_forward_pre_hooks(self, _UncalledHooks())
        self.register_forward_pre_hook(keep_own_forward)
        self.register_buffer(RECORD_MARK, None)  # Tools that look up the names of a state_dict find this one.

    def __setattr__(self, name: str, value: Any) -> None:
        self._check_settable(name)
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, or raise AttributeError if the layer computes a tensor of this name."""
        self._check_settable(name)  # torchao registers quantized weights
        super().register_parameter(name, param)

    def _check_settable(self, name: str) -> None:
        # nn.Module raises a KeyError without a reason if a Parameter has the name of a property.
        attribute = getattr(type(self), name, None)
        if isinstance(attribute, property) and attribute.fset is None:
            raise AttributeError(
                f"{name} of {type(self).__name__} is computed from {', '.join(self.stored_names())} and cannot be set: "
                "change these tensors, make a new layer from a dense layer by "
                f"{next(name for name in _MAKERS if hasattr(self, name))}, or call pr.to_linears_(model) "
                "first for a tool that looks for torch's layers"
            )

    bias: nn.Parameter | None

    def stored_names(self) -> tuple[str, ...]:
        """Return the names of the tensors that the weight is computed from."""
        raise NotImplementedError

    @classmethod
    def _in_place_of(cls, dense: Any, **size: Any) -> Self:
        """Return a new layer of this size with the arguments, the device and the dtype of a dense layer."""
        make: Any = cls  # The constructors of subclasses have arguments.
        weight, arguments = dense.weight, arguments_of(dense, cls.dense_arguments)
        layer: Self = make(**arguments, **size, device=weight.device, dtype=weight.dtype)
        return layer

    @torch.no_grad()
    def _with_bias_of(self, dense: Any) -> Self:
        """Copy the bias and the settings of the dense layer that this layer replaces, and return this layer."""
        if self.bias is not None:
            self.bias.copy_(dense.bias)
        inherit_settings(self, dense)
        return self

    @torch.no_grad()
    def _to_dense(self) -> Any:
        """Return a dense layer with copies of the effective weight and the bias, in the same training mode."""
        weight: Any = self.weight
        arguments = arguments_of(self, self.dense_arguments)
        dense = self._new_dense(**arguments, device=weight.device, dtype=weight.dtype)
        dense.weight.copy_(weight)
        if self.bias is not None:
            dense.bias.copy_(self.bias)
        return dense.train(self.training)

    def _new_dense(self, **arguments: Any) -> Any:
        """Return a new dense layer with these arguments of its constructor."""
        return self.dense_class(**arguments)

    def check_record(self) -> None:
        """Make the record of the layer's form valid for saving, or raise SketchMismatchError."""
        raise NotImplementedError

    def check_writes(self) -> None:
        """Call :meth:`follow_writes` if a checked buffer was written to or replaced since the last call.

        Other code writes to buffers in place: it broadcasts or copies them, which the layer has to follow, or averages
        them, which destroys codes and seeds. A forward only compares the versions of a few tensors.

        Raises:
            SketchMismatchError: If the buffers do not belong together.
        """
        if not torch.compiler.is_compiling() and (writes := self._writes()) != self._checked:
            tensors = self._checked_tensors()
            # Tensors without values, shards, and tensors inside of vmap or a trace cannot be compared.
            plain = all(type(tensor) is Tensor and has_values(tensor) for tensor in tensors)
            if plain and not torch.jit.is_tracing() and not any(map(is_transformed, tensors)):
                self._take_mark()
                self.follow_writes(writes)
                self._checked = self._writes()

    def _take_mark(self) -> None:
        """Compare the mark, and remove it, if a tool has set each tensor of a state_dict by its name."""
        if self.checked_names and (mark := buffers_of(self).get(RECORD_MARK)) is not None:
            check_mark(mark, buffers_of(self)[self.checked_names[-1]])
            buffers_of(self)[RECORD_MARK] = None

    def _writes(self) -> list[tuple[int, int]]:
        """Return the identity and the number of writes of each checked buffer; inference tensors count no writes."""
        tensors = map(buffers_of(self).get, self.checked_names)
        try:
            return [(id(tensor), version_of(tensor)) for tensor in tensors if tensor is not None]
        except RuntimeError:
            return [(id(tensor), -1) for tensor in self._checked_tensors()]

    def note_writes(self) -> None:
        """Regard the present values of the checked buffers as valid, if there are values."""
        self._checked = self._writes() if all(map(has_values, self._checked_tensors())) else None

    def _checked_tensors(self) -> list[Tensor]:
        return [tensor for name in self.checked_names if (tensor := buffers_of(self).get(name)) is not None]

    def follow_writes(self, writes: list[tuple[int, int]]) -> None:
        """Compute with what other code wrote to the checked buffers, or raise SketchMismatchError."""
        self.check_record()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save, unless the checked buffers do not belong together: the error names the layer."""
        try:
            self._take_mark()
            self.check_record()
        except SketchMismatchError as error:
            if self._checked is not None:  # Otherwise the values are still being loaded.
                raise SketchMismatchError(f"layer {prefix[:-1]!r}: {error}" if prefix else str(error)) from None
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.checked_names and (mark := record_mark(destination.get(prefix + self.checked_names[-1]))) is not None:
            destination[prefix + RECORD_MARK] = mark

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load, if the mark, which earlier versions did not save, belongs to the record."""
        state_dict = dict(state_dict)
        mark = state_dict.pop(prefix + RECORD_MARK, None)
        check_mark(mark, state_dict.get(prefix + self.checked_names[-1]) if self.checked_names else None, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply ``fn``, which moves or casts the values of checked buffers, and does not change them."""
        was_checked = self._checked is not None and self._checked == self._writes()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if was_checked:
            self._checked = self._writes()
        return self

    def _fits(self, state: dict[str, Any], expected: Mapping[str, torch.Size], prefix: str, *args: Any) -> bool:
        """Return whether a checkpoint has all tensors in the expected shapes; report differences as torch does."""
        missing_keys, unexpected_keys, error_msgs = args[-3:]
        strange = [name for name in expected if name in state and not isinstance(state[name], Tensor)]
        if strange:
            error_msgs += [f"{prefix}{name} must be a tensor, not {type(state[name]).__name__}." for name in strange]
            return False
        missing = [prefix + name for name in expected if name not in state]
        unexpected = [
            prefix + name
            for name in state
            if name not in {*expected, RECORD_MARK} and name.partition(".")[0] not in children_of(self)
        ]
        wrong = [
            f"size mismatch for {prefix}{name}: copying a param with shape {tuple(state[name].shape)} from checkpoint, "
            f"the shape in current model is {tuple(shape)}."
            for name, shape in expected.items()
            if name in state and state[name].shape != shape
        ]
        matching = [name for name in expected if name in state and name != "bias"]
        if missing and matching:  # strict=False would hide that these are not loaded
            wrong.append(
                f"{type(self).__name__} {prefix[:-1]!r} needs all of its tensors, and the state_dict only has "
                f"{', '.join(matching)}: load the shards of a checkpoint as one state_dict, or by pr.from_pretrained."
            )
        elif missing:
            missing = [prefix + name for name in expected]
        missing_keys += missing
        unexpected_keys += unexpected
        error_msgs += wrong
        return not (missing or wrong)


class SketchedModule(CompressedModule):
    """Base of sketched layers, with their life cycle. A subclass names its factors and sketches."""

    size_arguments = ("num_terms", "low_rank")
    saved_buffer_names = ("sketch_seed",)
    # The sketches have the dtype and device of the first factor.
    sketch_names: tuple[str, ...]
    """Names of the sketches, which are attributes of the layer; the i-th is drawn from stream i of the seed."""

    seed: int | None
    """The seed of a seeded layer, None for a fitted one. The truth; the buffer ``sketch_seed`` mirrors it."""

    seed_is_given: bool = True
    """Whether the constructor's caller chose the seed, so that initialisation by another seed must keep it."""

    num_terms: int
    low_rank: int
    groups: int = 1
    fan_in: int
    """Number of inputs that an output is a sum over."""
    sketch_seed: Tensor
    bias: nn.Parameter | None

    def _build(
        self,
        factors: Mapping[str, tuple[int, ...]],
        outputs: int,
        *,
        bias: bool,
        seed: int | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Check the arguments that all constructors have, make factors of these shapes, and draw everything."""
        check_device(device)
        check_flag("bias", bias)
        check_floating("dtype", dtype)
        self.seed_is_given, seed = seed is not None, check_seed(seed)
        for name, shape in factors.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device=device)))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype, device=device)) if bias else None
        sketched = sum(math.prod(shape) for shape in (*factors.values(), *self.sketch_shapes().values()))
        warn_unless_smaller(
            type(self).__name__, f"nn.{self.dense_class.__name__}",
            f"num_terms={self.num_terms} and low_rank={self.low_rank}", sketched, self.fan_in, outputs,
            stacklevel=4,  # the caller of the class, whose __init__ is decorated
        )  # fmt: skip
        self.seed = seed
        self.reset_parameters()  # draws the sketches, too

    def stored_names(self) -> tuple[str, ...]:
        """Return the names of factors and sketches."""
        return self.factor_names + self.sketch_names

    def sketch_shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shape of each sketch, by name."""
        raise NotImplementedError

    def unstack(self, stacked: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return factors and sketches in the layer's layout from the tensors of each term."""
        raise NotImplementedError

    def sketch_like(self) -> Tensor:
        """Return the parameter whose dtype and device the sketches share."""
        factor: Tensor = getattr(self, self.factor_names[0])
        return factor

    def draw_sketch(self, name: str) -> Tensor:
        """Return the sketch ``name`` of the current seed, with entries +-1."""
        like = self.sketch_like()
        return self._draw_signs(name, dtype=like.dtype, device=like.device)

    def _draw_signs(self, name: str, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        rows, cols = self.sketch_shapes()[name]
        stream = self.sketch_names.index(name)
        return signs(self.seed, stream, range(rows), range(cols), dtype=dtype, device=device)  # type: ignore[arg-type]

    @property
    def is_fitted(self) -> bool:
        """Whether the sketches are Parameters, fitted to data, instead of functions of a seed."""
        return self.seed is None

    @property
    def scale(self) -> float:
        """The number that multiplies the product of factors and sketches."""
        return 1.0 if self.is_fitted else 1.0 / (2 * self.num_terms * math.sqrt(self.low_rank))

    def reset_parameters(self) -> None:
        """Draw new factors and bias from torch's generator, and the sketches again from the present seed.

        The weight gets the variance of torch's default, 1 / (3 fan_in). A fitted layer starts from fresh signs and
        stays fitted.
        """
        if self.is_fitted:
            level, seed = self._fitted_level, check_seed(None)
            with torch.no_grad():
                for stream, name in enumerate(self.sketch_names):
                    U = getattr(self, name)
                    rows, cols = U.shape
                    U.copy_(level * signs(seed, stream, range(rows), range(cols), dtype=U.dtype, device=U.device))
            self._mirror_seed()
        else:
            self.set_seeded_(self.seed)  # type: ignore[arg-type]
        self.reset_factors()

    def reset_factors(self) -> None:
        """Draw new factors and bias, as :meth:`reset_parameters` does, and leave the sketches."""
        # With entries of variance s^2 in the factors, an entry of the weight sums 2 L k / g of them with signs, times
        # 1/(2 L sqrt(k)), so it has variance s^2 / (2 L g); uniform on (-a, a) has variance a^2 / 3.
        level = self._fitted_level if self.is_fitted else 1.0
        bound = level * math.sqrt(2 * self.num_terms * self.groups / self.fan_in)
        for name in self.factor_names:
            nn.init.uniform_(getattr(self, name), -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -1 / math.sqrt(self.fan_in), 1 / math.sqrt(self.fan_in))

    @property
    def _fitted_level(self) -> float:
        """The level of U and S of a fitted layer at which U S has the scale of a seeded layer."""
        level: float = (2 * self.num_terms) ** -0.5 * self.low_rank**-0.25
        return level

    def set_seeded_(self, seed: int) -> None:
        """Make the layer seeded, with the sketches of ``seed``."""
        self.seed = seed
        for name in self.sketch_names:
            with torch.inference_mode(False):  # The layer can be trained even if it was built in inference mode.
                sketch = self.draw_sketch(name)
            self._forget(name)
            if sketch.is_floating_point():
                self.register_buffer(name, sketch, persistent=False)
            else:
                # Packed bits are no buffer, because code that averages, broadcasts or casts buffers would change them.
                setattr(self, name, sketch)
        self._mirror_seed()

    def set_fitted_(self, sketches: dict[str, Tensor]) -> None:
        """Make the layer fitted, with these sketches as Parameters, which are frozen if the factors are."""
        self.seed = None
        trained = self.sketch_like().requires_grad
        for name in self.sketch_names:
            self._forget(name)
            self.register_parameter(name, nn.Parameter(sketches[name], requires_grad=trained))
        self._mirror_seed()

    def _forget(self, name: str) -> None:
        """Remove the sketch ``name`` from wherever it is."""
        for place in (parameters_of(self), buffers_of(self), self.__dict__):
            place.pop(name, None)
        unsaved_buffers_of(self).discard(name)  # torch's set must not contain the name of a Parameter.

    def _mirror_seed(self) -> None:
        record = make_record(self.seed, self.num_terms)
        with torch.inference_mode(False):
            mirror = torch.tensor(record, dtype=torch.int64, device=self.sketch_like().device)
        buffers_of(self).pop("sketch_seed", None)  # Averaged models pair buffers by their order, so it is always last.
        self.register_buffer("sketch_seed", mirror)
        self.note_writes()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Draw the sketches when the layer leaves the meta device, for example by ``to_empty``."""
        was_meta = self.sketch_like().is_meta
        super()._apply(fn, recurse)
        if was_meta and not self.sketch_like().is_meta:
            if self.seed is None:
                self._mirror_seed()
            else:
                self.set_seeded_(self.seed)
            return self
        for name in self.sketch_names:
            if isinstance(bits := self.__dict__.get(name), Tensor):
                moved = fn(bits)
                setattr(self, name, moved if moved.dtype is bits.dtype else bits.to(moved.device))
        return self

    def follow_writes(self, writes: list[tuple[int, int]]) -> None:
        """Draw the sketches of a seed that was written in place; refuse sketches that were written without a seed."""
        if self._checked is None or writes[-1] != self._checked[-1]:
            self.check_record()
        elif not self.is_fitted:
            for name in self.sketch_names:
                if (sketch := buffers_of(self).get(name)) is not None and not torch.equal(
                    sketch.sign(), self.draw_sketch(name).to(sketch.dtype)
                ):
                    raise SketchMismatchError(
                        f"{name} was written in place and is not the sketch of seed {self.seed}: copy parameters and "
                        "all buffers together, or call layer.load_state_dict(other.state_dict())"
                    )
            self.set_seeded_(self.seed)  # type: ignore[arg-type]  # An average may have rounded the signs.

    def check_record(self) -> None:
        """Make ``sketch_seed`` and the layer consistent, if possible, and raise SketchMismatchError otherwise.

        A valid record of a different seed was written in place, by a broadcast or a copy of another layer: the layer
        adopts the seed and draws the sketches. An average of models with one seed (SWA and EMA with their buffers)
        rounds the record, which is then rewritten.
        """
        record = self.sketch_seed
        if type(record) is not Tensor or not has_values(record):
            return
        try:
            seed = read_record(record, self.num_terms, "sketch_seed")
        except SketchMismatchError:
            # module.type() casts integers, too.
            if record.dtype is torch.int64 and not is_rounded(record, make_record(self.seed, self.num_terms)):
                raise
            self._mirror_seed() if self.seed is None else self.set_seeded_(self.seed)
            return
        if seed == self.seed:
            return
        if seed is None or self.seed is None:
            modes = [f"has {'trained sketches' if each is None else f'seed {each}'}" for each in (seed, self.seed)]
            raise SketchMismatchError(
                f"sketch_seed was written in place by a layer that {modes[0]}, and this layer {modes[1]}: call "
                "layer.load_state_dict(other.state_dict()), which changes the mode"
            )
        self.set_seeded_(seed)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load everything or nothing, in the checkpoint's mode, and draw the sketches again."""
        state = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        try:
            state = self._from_stacked(state)
        except ShapeError as error:  # strict=False would hide that nothing is loaded
            args[-1].append(f"{type(self).__name__} {prefix[:-1]!r} cannot take {error}")
            return
        fitted, seed = self.sketch_names[0] in state, self.seed
        record = state.get("sketch_seed")
        if isinstance(record, Tensor) and record.shape == (4,) and has_values(record):
            seed = read_record(record, self.num_terms, prefix + "sketch_seed")
            fitted = seed is None

        # Tensors that users add, such as a pruning mask, are loaded too. Child modules load themselves.
        expected = {
            name: tensor.shape
            for name, tensor in (*parameters_of(self).items(), *buffers_of(self).items())
            if tensor is not None and name not in self.sketch_names and name not in unsaved_buffers_of(self)
        }
        if fitted:
            expected |= {name: torch.Size(shape) for name, shape in self.sketch_shapes().items()}

        if not self._fits(state, expected, prefix, *args):
            return
        check_mark(state.get(RECORD_MARK), state["sketch_seed"], prefix)

        if fitted and not self.is_fitted:
            like = self.sketch_like()
            self.set_fitted_({name: like.new_empty(shape) for name, shape in self.sketch_shapes().items()})
        elif not fitted and (self.is_fitted or seed != self.seed):
            self.set_seeded_(check_seed(seed))  # draws the sketches if the checkpoint is on the meta device
        state = {prefix + name: state[name] for name in expected}
        super()._load_from_state_dict(state, prefix, *args)
        if not self.is_fitted:
            self.set_seeded_(self.seed)  # type: ignore[arg-type]

    def _from_stacked(self, state: dict[str, Any]) -> dict[str, Any]:
        """Translate the stacked keys of other libraries' checkpoints, if ``state`` has them.

        The layer stays seeded if the checkpoint has the sketches of its seed, and becomes fitted otherwise. Raise
        ShapeError if sizes differ.
        """
        if not any(name in state for name in _STACKED):
            return state
        layer_shapes = {name: tuple(getattr(self, name).shape) for name in _STACKED if hasattr(type(self), name)}
        state_shapes = {name: tuple(getattr(state.get(name), "shape", ())) for name in layer_shapes}
        if state_shapes != layer_shapes:
            shapes = "; ".join(
                f"{name} {state_shapes[name] or 'missing'} for {shape}" for name, shape in layer_shapes.items()
            )
            raise ShapeError(
                f"stacked factors of different shapes ({shapes}): build the layer with the num_terms and low_rank of "
                f"the checkpoint, which are here {self.num_terms} and {self.low_rank}"
            )
        factors = self.unstack({name: state[name] for name in layer_shapes})
        rest = {name: value for name, value in state.items() if name not in layer_shapes}
        seed = self.seed if self.seed is not None and self._are_sketches_of_seed(factors) else None
        for name in self.sketch_names:
            if seed is None:
                factors[name] = factors[name] / (2 * self.num_terms)
            else:
                del factors[name]
        return rest | factors | {"sketch_seed": torch.tensor(make_record(seed, self.num_terms))}

    def _are_sketches_of_seed(self, factors: dict[str, Tensor]) -> bool:
        """Return whether sketches with entries +-1/sqrt(k) equal the sketches of the layer's seed."""
        root = math.sqrt(self.low_rank)
        return all(
            torch.allclose(
                factors[name] * root,
                self._draw_signs(name, dtype=factors[name].dtype, device=factors[name].device),
                rtol=4 * torch.finfo(factors[name].dtype).eps,
                atol=0.0,
            )
            for name in self.sketch_names
        )
