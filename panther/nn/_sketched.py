"""What every sketched layer shares: a seed, the two modes, and how both are saved and loaded.

*Seeded*: the sketches are fixed, a function of ``seed``; they are buffers outside the state_dict. *Fitted*: they are
Parameters like any other. ``sketch_seed``, in the state_dict, says which: (seed or -1, num_terms, stream version,
checksum of the three).
"""

__all__ = ["SketchedModule", "default_low_rank", "terms_and_rank"]

import struct
import zlib
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from panther.errors import ShapeError, SketchMismatchError, check_size
from panther.sketch import STREAM_VERSION, check_seed

_FITTED = -1


def _keep_sketched_forward(module: nn.Module, args: Any) -> None:
    """Does nothing; see SketchedModule.__init__."""


class SketchedModule(nn.Module):
    """Base of sketched layers. Subclasses say what their sketches are; the life cycle is here."""

    sketch_names: tuple[str, ...]
    """Names of the sketches, which are attributes of the layer."""

    seed: int | None
    """The seed of a seeded layer, None for a fitted one. The truth; the buffer ``sketch_seed`` mirrors it."""

    num_terms: int
    sketch_seed: Tensor

    def __init__(self) -> None:
        super().__init__()
        # nn.TransformerEncoderLayer's fast path reads `.weight` of its linear layers instead of calling them, and
        # is off as soon as one of them has a hook.
        self.register_forward_pre_hook(_keep_sketched_forward)

    @abstractmethod
    def sketch_shapes(self) -> dict[str, tuple[int, int]]:
        """Shape of each sketch, by name."""

    @abstractmethod
    def draw_sketch(self, name: str, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The sketch ``name`` of the present seed."""

    @abstractmethod
    def sketch_like(self) -> Tensor:
        """The parameter whose dtype and device the sketches share."""

    def stacked_to_factors(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Translate the stacked keys of other libraries' checkpoints, if ``state`` has them."""
        return state

    @property
    def is_fitted(self) -> bool:
        """Whether the sketches are Parameters, fitted to data, instead of functions of a seed."""
        return self.seed is None

    def freeze_sketches_(self) -> Self:
        """Stop training the sketches of a fitted layer; those of a seeded one are fixed anyway."""
        for name in self.sketch_names:
            getattr(self, name).requires_grad_(False)
        return self

    def set_seeded_(self, seed: int) -> None:
        """Make the layer seeded, with the sketches of ``seed``."""
        like = self.sketch_like()
        self.seed = seed
        for name in self.sketch_names:
            with torch.inference_mode(False):  # a layer built in inference mode can be trained afterwards
                sketch = self.draw_sketch(name, dtype=like.dtype, device=like.device)
            self._forget(name)
            if sketch.is_floating_point():
                self.register_buffer(name, sketch, persistent=False)
            else:  # bits: no buffer, because what averages, broadcasts or casts buffers takes them for numbers
                setattr(self, name, sketch)
        self._mirror_seed()

    def set_fitted_(self, sketches: dict[str, Tensor]) -> None:
        """Make the layer fitted, with the given sketches as Parameters, frozen if the factors are."""
        self.seed = None
        trained = self.sketch_like().requires_grad
        for name in self.sketch_names:
            self._forget(name)
            self.register_parameter(name, nn.Parameter(sketches[name], requires_grad=trained))
        self._mirror_seed()

    def _forget(self, name: str) -> None:
        """Take the sketch ``name`` out of wherever it is."""
        for place in (self._parameters, self._buffers, self.__dict__):
            place.pop(name, None)
        self._non_persistent_buffers_set.discard(name)

    def refresh_sketches_(self) -> bool:
        """Adopt ``sketch_seed`` if it was changed in place, by a broadcast say, and draw its sketches.

        Returns:
            Whether it had changed.

        Raises:
            SketchMismatchError: If it is no valid record, or says fitted for a seeded layer or the reverse.
        """
        if not _has_values(self.sketch_seed):
            return False
        seed = self._read_record(self.sketch_seed, "sketch_seed")
        if seed == self.seed:
            return False
        if seed is None or self.seed is None:
            raise SketchMismatchError(
                f"sketch_seed says {_mode(seed)} and the layer is {_mode(self.seed)}: load a state_dict to change "
                "the mode"
            )
        self.set_seeded_(seed)
        return True

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if _has_values(self.sketch_seed) and self.sketch_seed.tolist() != self._record(self.seed):
            self._settle_record()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _settle_record(self) -> None:
        """Make ``sketch_seed`` and the layer agree again, if it is plain how.

        A valid record was written by a broadcast, and is adopted. Averages of models with one seed (SWA and EMA with
        their buffers) leave a rounded record beside sound sketches: it is written anew. Where the sketches were
        averaged over different seeds the record stays broken, so that loading it fails.
        """
        try:
            self.refresh_sketches_()
        except SketchMismatchError:
            like = self.sketch_like()
            sound = (
                int(self.sketch_seed[0]) == _FITTED
                if self.is_fitted
                else all(
                    torch.equal(getattr(self, name), self.draw_sketch(name, dtype=like.dtype, device=like.device))
                    for name in self.sketch_names
                )
            )
            if sound:
                self._mirror_seed()

    def _mirror_seed(self) -> None:
        record = self._record(self.seed)
        with torch.inference_mode(False):
            mirror = torch.tensor(record, dtype=torch.int64, device=self.sketch_like().device)
        self._buffers.pop("sketch_seed", None)  # always last: averaged models pair buffers by their order
        self.register_buffer("sketch_seed", mirror)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Draw the sketches when the layer leaves the meta device, by ``to_empty`` say: nothing else would."""
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

    def check_record(self) -> None:
        """Settle ``sketch_seed`` as for saving, and raise SketchMismatchError if it is no valid record even then."""
        if _has_values(self.sketch_seed):
            self._settle_record()
            self._read_record(self.sketch_seed, "sketch_seed")

    def _record(self, seed: int | None) -> list[int]:
        head = [_FITTED if seed is None else seed, self.num_terms, STREAM_VERSION]
        return [*head, zlib.crc32(struct.pack("<3q", *head))]

    def _read_record(self, record: Tensor, key: str) -> int | None:
        """The seed a valid record holds, None for fitted."""
        if record.dtype is not torch.int64:
            raise SketchMismatchError(
                f"{key} is {record.dtype} and must be torch.int64: cast only the floating tensors of a state_dict"
            )
        seed, num_terms, version, checksum = values = record.tolist()
        if zlib.crc32(struct.pack("<3q", *values[:3])) != checksum:
            raise SketchMismatchError(
                f"{key}={values} does not match its checksum, as when seeds are averaged or the file is damaged: use "
                "models that share their seeds, or a sound checkpoint"
            )
        if version != STREAM_VERSION:
            raise SketchMismatchError(
                f"{key} is of stream version {version} and this Panther knows {STREAM_VERSION}: use the Panther that "
                "wrote it, or a newer one"
            )
        if num_terms != self.num_terms:
            raise SketchMismatchError(
                f"{key} was saved with num_terms={num_terms} and the layer has num_terms={self.num_terms}: build the "
                f"layer with num_terms={num_terms}"
            )
        return None if seed == _FITTED else seed

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load everything or nothing, in the checkpoint's mode, and draw the sketches anew."""
        state = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        state = self.stacked_to_factors(state)
        fitted, seed = self.sketch_names[0] in state, self.seed
        record = state.get("sketch_seed")
        if isinstance(record, Tensor) and record.shape == (4,) and _has_values(record):
            seed = self._read_record(record, prefix + "sketch_seed")
            fitted = seed is None

        # Whatever users add, a pruning mask say, is loaded with the rest; child modules load themselves.
        own = {**self._parameters, **self._buffers}
        expected = {
            name: tensor.shape
            for name, tensor in own.items()
            if tensor is not None and name not in self.sketch_names and name not in self._non_persistent_buffers_set
        }
        if fitted:
            expected |= {name: torch.Size(shape) for name, shape in self.sketch_shapes().items()}

        for name in [name for name in expected if name in state and not isinstance(state[name], Tensor)]:
            error_msgs.append(f"{prefix}{name} must be a tensor, not {type(state[name]).__name__}.")
            return
        missing = [prefix + name for name in expected if name not in state]
        unexpected = [
            prefix + name for name in state if name not in expected and name.partition(".")[0] not in self._modules
        ]
        wrong = [
            f"size mismatch for {prefix}{name}: copying a param with shape {tuple(state[name].shape)} from checkpoint, "
            f"the shape in current model is {tuple(shape)}."
            for name, shape in expected.items()
            if name in state and state[name].shape != shape
        ]
        found = [name for name in expected if name in state and name != "bias"]
        if missing and found:  # also with strict=False, which would otherwise not show that these are not loaded
            wrong.append(
                f"{type(self).__name__} {prefix[:-1]!r} loads all or nothing, and {', '.join(found)} came alone."
            )
        elif missing:
            missing = [prefix + name for name in expected]
        missing_keys += missing
        unexpected_keys += unexpected
        error_msgs += wrong
        if missing or wrong:
            return

        if fitted and not self.is_fitted:
            like = self.sketch_like()
            self.set_fitted_({name: like.new_empty(shape) for name, shape in self.sketch_shapes().items()})
        elif not fitted and (self.is_fitted or seed != self.seed):
            self.set_seeded_(check_seed(seed))  # drawn where the checkpoint is on the meta device
        state = {prefix + name: state[name] for name in expected}
        super()._load_from_state_dict(state, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if not self.is_fitted:
            self.set_seeded_(self.seed)  # type: ignore[arg-type]


def default_low_rank(inner: int, out: int, groups: int = 1) -> int:
    """Return the largest rank K of one term with which a layer costs at most half of the dense one.

    With ``inner`` inputs of each group: 2 K (inner + out / groups) <= inner * out / 2, rounded down to a multiple of 8
    groups if that leaves any, else to one of groups, and at least ``groups``. A rule of the shape alone, so that a
    checkpoint loads anywhere.
    """
    K = inner * out * groups // (4 * (inner * groups + out))  # times groups, so that all is in integers
    step = 8 * groups if 8 * groups <= K else groups
    return max(K // step * step, groups)


def terms_and_rank(
    sizes: tuple[int, ...], num_terms: int | None, low_rank: int | None, sketch_size: int | None, default: int
) -> tuple[int, int]:
    """Return L and k from the size of a sketch as users give it, by position or by name.

    Args:
        sizes: Positional numbers: none, ``(sketch_size,)`` or ``(num_terms, low_rank)``.
        num_terms: By name.
        low_rank: By name.
        sketch_size: By name.
        default: Size of the sketch where none is given.

    Raises:
        TypeError: If there are more positional numbers, or one is not an integer.
        ShapeError: If both forms are mixed, one is incomplete, or a number is not positive.
    """
    if len(sizes) > 2:
        raise TypeError(
            f"{len(sizes)} positional sketch sizes are given, and there are at most two, num_terms and low_rank: give "
            "all arguments after them by name"
        )
    names = ("sketch_size",) if len(sizes) == 1 and low_rank is None else ("num_terms", "low_rank")
    by_name = {"sketch_size": sketch_size, "num_terms": num_terms, "low_rank": low_rank}
    pairs = [*zip(names, sizes, strict=False), *((name, size) for name, size in by_name.items() if size is not None)]
    given = dict(pairs)
    if not pairs:
        return 1, default
    if len(given) < len(pairs) or given.keys() not in ({"sketch_size"}, {"low_rank"}, {"num_terms", "low_rank"}):
        raise ShapeError(
            f"{', '.join(f'{name}={size}' for name, size in pairs)}: give either sketch_size, which is one term of "
            "that rank, or both num_terms and low_rank"
        )
    checked = {name: check_size(name, size, least=1) for name, size in given.items()}
    return checked.get("num_terms", 1), checked.get("low_rank") or checked["sketch_size"]


def _integers(state: Tensor) -> list[int] | None:
    """The numbers of an ``_extra_state``, None where it has no values."""
    if not _has_values(state):
        return None
    if state.dtype is not torch.int64:
        raise SketchMismatchError(
            f"_extra_state is {state.dtype} and must be torch.int64: cast and average only the floating tensors of a "
            "state_dict"
        )
    return state.tolist()


def _has_values(tensor: Tensor) -> bool:
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def _mode(seed: int | None) -> str:
    return "fitted" if seed is None else "seeded"
