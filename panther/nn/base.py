"""The base class of sketched layers: the seed, the two modes, saving and loading.

In a *seeded* layer the sketches are fixed functions of ``seed`` and non-persistent buffers. In a *fitted* layer, which
loaded a checkpoint with sketches of its own, they are Parameters. ``sketch_seed`` in the state_dict stores the mode and
the seed.
"""

__all__ = ["SketchedModule"]

import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from panther._text import counted
from panther._torch import buffers_of, parameters_of, unsaved_buffers_of
from panther.errors import ShapeError, SketchMismatchError, check_device, check_flag, check_floating
from panther.nn.protocol import CompressedModule
from panther.nn.sketch_record import (
    RECORD_MARK,
    check_mark,
    has_values,
    is_rounded,
    make_record,
    read_record,
    recorded_sketch,
)
from panther.nn.sketch_sizes import warn_unless_smaller
from panther.sketch import check_seed, signs

_STACKED = ("S1s", "S2s", "U1s", "U2s")


class SketchedModule(CompressedModule):
    """Base of sketched layers, with their life cycle. A subclass names its factors and sketches."""

    size_arguments = ("num_terms", "low_rank")
    saved_buffer_names = ("sketch_seed",)
    # The sketches have the dtype and device of the first factor. The i-th is drawn from stream i of the seed.

    seed: int | None
    """The seed of a seeded layer, None for a fitted one. The truth; the buffer ``sketch_seed`` mirrors it."""

    seed_is_given: bool = True
    """Whether the constructor's caller chose the seed, so that initialisation by another seed must keep it."""

    sketch: str = "signs"
    """Kind of the sketches: matrices of random ``"signs"``, or ``"sparse"`` ones with a sign an input and an output."""

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
        sketches = {} if self.sketch == "sparse" else self.sketch_shapes()  # Sparse sketches multiply by signs alone.
        sketched = sum(math.prod(shape) for shape in (*factors.values(), *sketches.values()))
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

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of input, output and parameters."""
        return self.sketch_like().dtype

    @property
    def record_mode(self) -> str:
        """The kind of the sketches, "fitted", "seeded" for signs, or "sparse"."""
        return "fitted" if self.is_fitted else "seeded" if self.sketch == "signs" else self.sketch

    @property
    def is_seeded(self) -> bool:
        """Whether the sketches are drawn from the seed."""
        return not self.is_fitted

    @property
    def inner_rank(self) -> int:
        """Numbers between factors and sketches, 2 L k."""
        return 2 * self.num_terms * self.low_rank

    @property
    def _is_trained(self) -> bool:
        return self.sketch_like().requires_grad

    @classmethod
    def from_record(
        cls, record: Mapping[str, Any], *, dtype: torch.dtype, device: torch.device | str, seed: int | None = None
    ) -> Self:
        """Return a new layer of the arguments and the mode in a record; sketches of a fitted layer are zeros."""
        make: Any = cls
        mode = record.get("mode")
        kind = {"sketch": "sparse" if mode == "sparse" else "signs"} if cls.has_sparse_sketches else {}
        layer: Self = make(**record["args"], **kind, dtype=dtype, device=device, seed=seed)
        if mode == "fitted":
            like = layer.sketch_like()
            layer.set_fitted_({name: like.new_zeros(shape) for name, shape in layer.sketch_shapes().items()})
        return layer

    def drawn_names(self) -> tuple[str, ...]:
        """Return the names of the sketches of a seeded layer, and of the record of its seed."""
        # A class that overrides the initialisation may draw further values in it, whose order matters.
        is_own = type(self).reset_parameters is not SketchedModule.reset_parameters
        return () if self.is_fitted or is_own else (*self.sketch_names, "sketch_seed")

    @classmethod
    def describe_form(cls, arguments: Mapping[str, Any], mode: str = "seeded") -> str:
        """Return the numbers of terms and ranks, and whether the sketches are stored."""
        kind = "" if mode == "seeded" else f"{mode}, "
        return f"sketched, {kind}{counted(arguments['num_terms'], 'term')} of rank {arguments['low_rank']}"

    def adopt_values_(self, name: str, *, is_shared: bool = False) -> None:
        """Draw the sketches of the seed that was put into ``sketch_seed``."""
        del is_shared  # Sketched layers are never tied.
        seed = read_record(self.sketch_seed, self.num_terms, f"{name}.sketch_seed")
        if seed is not None:
            self._adopt(seed, recorded_sketch(self.sketch_seed))

    def _adopt(self, seed: int, sketch: str) -> None:
        """Draw the sketches of this seed and kind."""
        if sketch != self.sketch:
            self._set_kind(sketch)
        self.set_seeded_(seed)

    def sketch_shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shape of each sketch as a matrix, by name."""
        raise NotImplementedError

    has_sparse_sketches: bool = False
    """Whether the constructor takes ``sketch="sparse"``."""

    def _set_kind(self, sketch: str) -> None:
        """Set the kind of the sketches, and the names under which they are held, without drawing them."""
        for name in self.sketch_names:
            self._forget(name)
        self.sketch = sketch
        names = type(self).sketch_names
        self.sketch_names = names if sketch == "signs" else tuple(f"{name}_signs" for name in names)

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
        stream = self._stream_of(name)
        return signs(self.seed, stream, range(rows), range(cols), dtype=dtype, device=device)  # type: ignore[arg-type]

    def _stream_of(self, name: str) -> int:
        """Return the stream of the seed from which a sketch, or its signs, are drawn."""
        return type(self).sketch_names.index(name.removesuffix("_signs"))

    def _draw_matrix(self, name: str, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a sketch of the current seed as a matrix with entries +-1, or 0 in a sparse one."""
        return self._draw_signs(name, dtype=dtype, device=device)

    @property
    def is_fitted(self) -> bool:
        """Whether the sketches are Parameters, fitted to data, instead of functions of a seed."""
        return self.seed is None

    @property
    def scale(self) -> float:
        """The number that multiplies the product of factors and sketches."""
        if self.sketch == "sparse":
            return 1.0 / (4 * self.num_terms)
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
        # 1/(2 L sqrt(k)), so it has variance s^2 / (2 L g); uniform on (-a, a) has variance a^2 / 3. With sparse
        # sketches it sums two of them.
        level = self._fitted_level if self.is_fitted else 1.0
        bound = level * math.sqrt(2 * self.num_terms * self.groups / self.fan_in)
        if self.sketch == "sparse":
            bound = 1 / (self.scale * math.sqrt(2 * self.fan_in))
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
        self._set_kind("signs")
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
        record = make_record(self.seed, self.num_terms, self.sketch)
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
            expected = make_record(self.seed, self.num_terms, self.sketch)
            if record.dtype is torch.int64 and not is_rounded(record, expected):
                raise
            self._mirror_seed() if self.seed is None else self.set_seeded_(self.seed)
            return
        if seed == self.seed and recorded_sketch(record) == self.sketch:
            return
        if seed is None or self.seed is None:
            modes = [f"has {'trained sketches' if each is None else f'seed {each}'}" for each in (seed, self.seed)]
            raise SketchMismatchError(
                f"sketch_seed was written in place by a layer that {modes[0]}, and this layer {modes[1]}: call "
                "layer.load_state_dict(other.state_dict()), which changes the mode"
            )
        self._adopt(seed, recorded_sketch(record))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load everything or nothing, in the checkpoint's mode, and draw the sketches again."""
        state = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        try:
            state = self._from_stacked(state)
        except ShapeError as error:  # strict=False would hide that nothing is loaded
            args[-1].append(f"{type(self).__name__} {prefix[:-1]!r} cannot take {error}")
            return
        fitted, seed, sketch = type(self).sketch_names[0] in state, self.seed, self.sketch
        record = state.get("sketch_seed")
        if isinstance(record, Tensor) and record.shape == (4,) and has_values(record):
            seed = read_record(record, self.num_terms, prefix + "sketch_seed")
            fitted, sketch = seed is None, recorded_sketch(record)

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
        elif not fitted and (self.is_fitted or (seed, sketch) != (self.seed, self.sketch)):
            self._adopt(check_seed(seed), sketch)  # draws the sketches if the checkpoint is on the meta device
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
        for name in type(self).sketch_names:
            if seed is None:
                factors[name] = factors[name] / (2 * self.num_terms)
            else:
                del factors[name]
        kind = "signs" if seed is None else self.sketch
        return rest | factors | {"sketch_seed": torch.tensor(make_record(seed, self.num_terms, kind))}

    def _are_sketches_of_seed(self, factors: dict[str, Tensor]) -> bool:
        """Return whether sketches, scaled as in the layer's formula, equal those of its seed."""
        level = 2 * self.num_terms * self.scale
        return all(
            torch.allclose(
                factors[name] / level,
                self._draw_matrix(name, dtype=factors[name].dtype, device=factors[name].device),
                rtol=4 * torch.finfo(factors[name].dtype).eps,
                atol=0.0,
            )
            for name in type(self).sketch_names
        )
