"""The fused form of a sketched layer: its factors in two arrays, for two products per forward instead of four."""

__all__ = ["FusibleModule"]

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from panther._torch import buffers_of, parameters_of
from panther.nn.base import SketchedModule


class FusibleModule(SketchedModule):
    """A sketched module with factors S1 (in, R) and S2 (R, out) and sketches U1 (R, out) and U2 (in, R)."""

    S1: nn.Parameter
    S2: nn.Parameter
    U1: Tensor
    U2: Tensor
    packed: bool = False
    fused: bool = False
    _joined: "_JoinedFactors | None" = None

    def fuse_(self) -> Self:
        r"""Store [S1 | U2] and [U1; S2] as two arrays, for inference; the layer computes the same function.

        A forward that needs no gradient then takes two products, with :math:`[S_1 \mid U_2]` and
        :math:`[U_1; S_2]`, instead of four. S1, S2, U1 and U2 become views of these two arrays, so that no number is
        stored twice, and everything else works as before: training (by four products), ``to``, copies, loading,
        saving. There are two limits: ``state_dict()`` contains copies of the factors, because files need contiguous
        tensors, and torch's ``fully_shard`` refuses views. :meth:`unfuse_` undoes it.

        Raises:
            ValueError: If the layer is packed or sharded: bits and shards cannot be joined.

        Example:
            >>> import torch
            >>> from panther.nn import SKLinear
            >>> layer, x = SKLinear(256, 128, 4), torch.randn(2, 256)
            >>> with torch.no_grad():
            ...     torch.allclose(layer(x), layer.fuse_()(x), atol=1e-5)
            True
        """
        if reason := self.why_not_fused():
            raise ValueError(f"fuse_ joins dense factors, and {reason}")
        self.fused = True
        self._join()
        return self

    def unfuse_(self) -> Self:
        """Store each factor separately again."""
        if self.fused:
            self.fused = False
            self._join()
        return self

    def why_not_fused(self) -> str | None:
        """Return why :meth:`fuse_` refuses this layer, with the remedy, or None if it does not."""
        if self.packed:
            return "the signs of this layer are packed: call unpack_() first"
        held = {**buffers_of(self), **parameters_of(self)}
        if any(type(held.get(name)) not in (Tensor, nn.Parameter) for name in ("S1", "U1", "S2", "U2")):
            return "its factors are sharded or parametrized: call unshard_module or remove_parametrizations first"
        return None

    def _join(self) -> None:
        """Make S1, U1, S2 and U2 views of two arrays if the layer is fused, or else separate tensors."""
        joined, self._joined = self._joined, None
        if self.S1.is_meta or self.why_not_fused():
            return
        tensors = self.S1, self.U1, self.S2, self.U2
        if not self.fused:
            for tensor in tensors:
                tensor.data = tensor.detach().clone(memory_format=torch.contiguous_format)
        elif joined is not None and joined.update_addresses(*tensors):
            self._joined = joined
        elif not self.S1.is_shared():  # A shared layer must stay in shared memory.
            self._joined = _JoinedFactors(*tensors, self.scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Join the factors again after ``to`` and similar methods, which move them one by one."""
        super()._apply(fn, recurse)
        if self.fused:
            self._join()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the joined arrays: copies of the factors are no longer views of them."""
        return {name: value for name, value in self.__dict__.items() if name != "_joined"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Join the factors of a fused layer again after a copy or unpickling."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.fused:
            self._join()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save contiguous copies: safetensors refuses views, and torch.save writes all that they are views of."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._joined is not None and not keep_vars:
            for name in ("S1", "U1", "S2", "U2"):
                if (view := destination.get(prefix + name)) is not None:
                    destination[prefix + name] = view.clone(memory_format=torch.contiguous_format)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if self.fused:
            self._join()

    def set_seeded_(self, seed: int) -> None:
        """Make the layer seeded, with the sketches of ``seed``."""
        super().set_seeded_(seed)
        if self.fused:
            self._join()

    def set_fitted_(self, sketches: dict[str, Tensor]) -> None:
        """Make the layer fitted, with these sketches as Parameters, which are frozen if the factors are."""
        super().set_fitted_(sketches)
        if self.fused:
            self._join()


class _JoinedFactors:
    """[S1 | U2] (in, 2R) and [U1; S2] (2R, out). The layer's four tensors become views of these arrays.

    The Parameters stay the same objects, which optimizers reference, and no number is stored twice. In-place updates
    change both.
    """

    __slots__ = ("_places", "inner", "outer", "scale", "tensors")

    def __init__(self, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor, scale: float) -> None:
        self.tensors, self.scale = (S1, U1, S2, U2), scale
        with torch.inference_mode(False), torch.no_grad():
            self.inner, self.outer = torch.cat((S1, U2), 1), torch.cat((U1, S2), 0)
        for tensor, view in zip(self.tensors, self._views(), strict=True):
            tensor.data = view
        self._places = _places(S1, U1, S2, U2)

    def _views(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        R = len(self.outer) // 2
        return self.inner[:, :R], self.outer[:R], self.outer[R:], self.inner[:, R:]

    def update_addresses(self, *tensors: Tensor) -> bool:
        """Record new addresses, for example after ``share_memory``, and return whether the tensors are still views."""
        self._places = _places(*self._views())
        same = all(a is b and a.dtype is self.inner.dtype for a, b in zip(tensors, self.tensors, strict=True))
        return same and self.inner.device == tensors[0].device and self.are_views(*tensors)

    def are_views(self, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor) -> bool:
        """Return whether the tensors are still views, which ``.data = ...`` and functional_call would replace."""
        if torch.compiler.is_compiling():  # Traced tensors have no addresses.
            return all(a is b for a, b in zip((S1, U1, S2, U2), self.tensors, strict=True))
        try:
            # The comparisons are written out, because a function call would add 0.1 us to each forward.
            return (S1.data_ptr(), U1.data_ptr(), S2.data_ptr(), U2.data_ptr()) == self._places
        except RuntimeError:  # Parameters under torch.func.grad or torch.vmap have no addresses.
            return False


def _places(S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor) -> tuple[int, int, int, int]:
    return S1.data_ptr(), U1.data_ptr(), S2.data_ptr(), U2.data_ptr()
