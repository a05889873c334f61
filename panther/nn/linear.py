"""SKLinear, a linear layer whose weight is a sum of sketched low-rank terms."""

__all__ = ["SKLinear"]

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from panther._docstrings import inherit_arguments
from panther._torch import buffers_of, parameters_of
from panther.errors import check_flag
from panther.kernels import pack_signs, unpack_signs
from panther.kernels.reference import dense_sketch
from panther.nn.base import SketchedModule
from panther.nn.factors import check_dense, check_init, fittable, lstsq_factors
from panther.nn.functional import sketched_linear, sketched_product
from panther.nn.low_rank import LowRankLinear
from panther.nn.pairs import LinearPair
from panther.nn.protocol import LinearGeometry, allow_saving
from panther.nn.sketch_record import SKETCH_VERSIONS
from panther.nn.sketch_sizes import default_low_rank, terms_and_rank
from panther.sketch import signs

_BLOCK = 1 << 18  # signs that are drawn at a time for packing

torch.fx.wrap("sketched_linear")  # A symbolic trace must not branch on the input's dtype.


@inherit_arguments(LinearGeometry)
class SKLinear(LinearGeometry, SketchedModule):
    r"""A drop-in for :class:`torch.nn.Linear` whose weight is a sum of sketched low-rank terms.

    .. math:: y = x W + b, \qquad W = \frac{1}{2L} \sum_{i=1}^{L} (S_{1,i} U_{1,i} + U_{2,i} S_{2,i})

    with trained :math:`S_{1,i}` (in, k) and :math:`S_{2,i}` (k, out) and fixed random sketches U
    (S. P. Kasiviswanathan, N. Narodytska and H. Jin, "Deep neural network approximation using tensor sketching", 2017,
    arXiv:1710.07850). With ``R = num_terms * low_rank`` the layer stores ``S1`` (in, R) and ``S2`` (R, out) and draws
    the signs of ``U1`` (R, out) and ``U2`` (in, R) from its seed. At fixed R, ``num_terms`` changes only the scale.

    With ``sketch="sparse"``, the default, :math:`U = \pm 1/2`, once for each input i, in column ``i mod R`` of U2, and
    once for each output j, in row ``j mod R`` of U1: x U2 folds a row into R sums and (x S1) U1 tiles R numbers over
    the row, without products. The place ``mod R`` gives neighbouring outputs different functions. With
    ``sketch="signs"`` all entries are random signs, :math:`U = \pm 1/\sqrt k`, which takes twice the products.

    There are two ways to specify the size: ``SKLinear(in_features, out_features, sketch_size)`` has one term of rank
    ``sketch_size``, and ``SKLinear(in_features, out_features, num_terms, low_rank)`` has L terms of rank k. These
    arguments may also be keywords, and all further arguments must be keywords. Without a size, the sketch is the
    largest that costs at most half of the dense layer.

    A new layer is *seeded*: U1 and U2 are fixed, and saved as one number. Compare :class:`LowRankLinear`, which has
    the least error of its rank and trains all numbers of both factors. A checkpoint of panther-ml, or of a development
    version of Panther, can have sketches of its own: loading it makes the layer *fitted*, with U1 and U2 as trained
    parameters, which are saved like S1 and S2; make the optimizer after that.

    Args:
        *sizes: ``sketch_size``, or ``num_terms`` and ``low_rank``, by position.
        num_terms: Number of terms L.
        low_rank: Rank k of each of a term's two halves.
        sketch_size: Short for ``num_terms=1, low_rank=sketch_size``.
        sketch: ``"sparse"`` or ``"signs"``, the kind of U1 and U2. Loading a checkpoint sets the kind that it has.
        packed: Whether to hold the signs of U1 and U2 as one bit each while their kind is ``"signs"``; see
            :meth:`pack_`. A sparse layer has no matrix to pack, and is not changed.
        seed: Seed of the sketches, in ``[0, 2^63)``; None draws one from torch's default CPU generator.

    Shape:
        Input ``(*, in_features)``, output ``(*, out_features)``.

    Attributes:
        S1: Trained factor (in, R), drawn so that W has nn.Linear's variance.
        S2: Trained factor (R, out), likewise.
        U1: Sketch (R, out): of a sparse layer, which holds ``U1_signs`` (out,) and ``U2_signs`` (in,), computed at each
            access, with entries +-1 and 0; of signs a buffer of exactly +-1, or int32 words (R, out / 32) when packed;
            a Parameter when fitted.
        U2: Sketch (in, R), likewise; when packed, (R, in / 32).
        bias: A Parameter (out,), or None.
        scale: The number that multiplies S1 U1 + U2 S2: 1/(4 L) when sparse, 1/(2 L sqrt(k)) with signs, 1 when
            fitted.
        packed: Whether U1 and U2 are held as bits: False of a sparse layer, whatever the argument.
        seed: Python int, None when fitted.

    Raises:
        ShapeError: If a size is not positive, or both size forms are mixed.
        ValueError: If ``sketch`` is unknown.

    Warns:
        PerformanceWarning: If the dense layer would not be larger.

    Cost: ``2 R (in + out)`` flops for each row forward and twice that backward, as a pair of nn.Linear of as many
    numbers; with signs, ``4 R (in + out)`` and 1.5 times that; dense, ``2 in out`` and twice that.

    Example:
        >>> import torch
        >>> layer = SKLinear(1024, 1024, num_terms=1, low_rank=16)
        >>> layer(torch.randn(8, 1024)).shape
        torch.Size([8, 1024])
        >>> sum(p.numel() for p in layer.parameters())
        33792
    """

    factor_names = ("S1", "S2")
    sketch_names = ("U1", "U2")
    checked_names = ("U1", "U2", "U1_signs", "U2_signs", "sketch_seed")
    sharded_dims: ClassVar[Mapping[int, Mapping[str, int]]] = {
        0: {"S2": 1, "U1": 1, "U1_signs": 0, "bias": 0},
        1: {"S1": 0, "U2": 0, "U2_signs": 0},
    }
    has_sparse_sketches = True
    S1: nn.Parameter
    S2: nn.Parameter
    U1: Tensor
    U2: Tensor
    packed: bool = False
    _packs_signs: bool = False  # A sparse layer remembers it for a checkpoint of signs.

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *sizes: int,  # sketch_size alone, or num_terms and low_rank
        num_terms: int | None = None,
        low_rank: int | None = None,
        sketch_size: int | None = None,
        bias: bool = True,
        sketch: str = "sparse",
        packed: bool = False,
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._set_sizes(in_features, out_features)
        self.fan_in = self.in_features
        size = terms_and_rank(sizes, num_terms, low_rank, sketch_size)
        self.num_terms = size.get("num_terms", 1)
        if sketch not in SKETCH_VERSIONS:
            raise ValueError(f"sketch={sketch!r} is unknown: use one of {', '.join(map(repr, SKETCH_VERSIONS))}")
        check_flag("packed", packed)
        self._packs_signs = packed
        self._set_kind(sketch)
        products = 1 if sketch == "sparse" else 2
        self.low_rank = size.get("low_rank") or default_low_rank(self.in_features, self.out_features, products=products)
        R = self.num_terms * self.low_rank
        factors = {"S1": (self.in_features, R), "S2": (R, self.out_features)}
        self._build(factors, self.out_features, bias=bias, seed=seed, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(*, in_features)`` to ``(*, out_features)``."""
        self.check_writes()
        if (
            type(input) is Tensor
            and not (torch.jit.is_tracing() or torch.compiler.is_compiling())
            and (operands := self._plain_operands(input)) is not None
        ):
            return sketched_product(input, *operands, self.scale)
        S1, U1, U2 = self.S1, *(getattr(self, name) for name in self.sketch_names)
        # Code that moves only parameters and buffers, such as FSDP, does not move packed sketches.
        if self.packed and U1.device != S1.device:
            self.U1, self.U2 = U1, U2 = U1.to(S1.device), U2.to(S1.device)
        elif not self.packed and U1.dtype is not S1.dtype:  # FSDP's mixed precision casts parameters and not buffers.
            U1, U2 = U1.to(S1.dtype), U2.to(S1.dtype)
        return sketched_linear(input, S1, U1, self.S2, U2, self.bias, scale=self.scale)

    def _plain_operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None] | None:
        """Return S1, U1, S2, U2 and the bias for a strided input in their dtype, outside autocast, or else None.

        This is the common case, without the general checks, which take longer than the products of a small batch.
        nn.Module's ``__getattr__`` takes 0.5 us, and a look-up in its dictionaries 0.1 us.
        """
        parameters: Any = parameters_of(self)
        sketches: Any = self.__dict__ if self.packed else parameters if self.seed is None else buffers_of(self)
        try:
            S1, S2, (U1, U2) = parameters["S1"], parameters["S2"], map(sketches.__getitem__, self.sketch_names)
        except KeyError:  # The layer is parametrized, or a replica of DataParallel.
            return None
        bias, dtype = parameters.get("bias"), S1.dtype
        if x.dtype is not dtype or x.is_nested or not (x.is_cpu or x.is_cuda):
            return None
        shape = x.shape
        if len(shape) < 2 or shape[-1] != self.in_features or torch.is_autocast_enabled(x.device.type):
            return None
        if S2.dtype is not dtype or (bias is not None and bias.dtype is not dtype):
            return None
        if self.packed:
            fits = U1.dtype is U2.dtype is torch.int32 and U1.device == S1.device
        else:
            fits = U1.dtype is U2.dtype is dtype
        return (S1, U1, S2, U2, bias) if fits else None

    @property
    def weight(self) -> Tensor:  # (out, in)
        """The dense effective weight, for inspection: differentiable, made anew at each access in 4 R in out flops."""
        U1, U2 = self._dense_sketches()
        return self.scale * (self.S1 @ U1 + U2 @ self.S2).mT

    @property
    def S1s(self) -> Tensor:  # (L, in, k)
        """S1 by terms: a view."""
        return self._by_columns(self.S1)

    @property
    def S2s(self) -> Tensor:  # (L, k, out)
        """S2 by terms: a view."""
        return self._by_rows(self.S2)

    @property
    def U1s(self) -> Tensor:  # (L, k, out)
        """U1 by terms, scaled as in the layer's formula: entries +-1/2 when sparse, +-1/sqrt(k) with signs."""
        return self._by_rows(self._dense_sketches()[0] * (2 * self.num_terms * self.scale))

    @property
    def U2s(self) -> Tensor:  # (L, in, k)
        """U2 by terms, scaled as in the layer's formula: entries +-1/2 when sparse, +-1/sqrt(k) with signs."""
        return self._by_columns(self._dense_sketches()[1] * (2 * self.num_terms * self.scale))

    def _by_rows(self, factor: Tensor) -> Tensor:  # (R, out) -> (L, k, out)
        stacked: Tensor = factor.detach().unflatten(0, (self.num_terms, self.low_rank))
        return stacked

    def _by_columns(self, factor: Tensor) -> Tensor:  # (in, R) -> (L, in, k)
        stacked: Tensor = factor.detach().unflatten(1, (self.num_terms, self.low_rank)).movedim(1, 0)
        return stacked

    def unstack(self, stacked: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return S1, S2, U1 and U2 from S1s, S2s, U1s and U2s."""
        return {
            "S1": stacked["S1s"].movedim(0, 1).flatten(1),
            "S2": stacked["S2s"].flatten(0, 1),
            "U1": stacked["U1s"].flatten(0, 1),
            "U2": stacked["U2s"].movedim(0, 1).flatten(1),
        }

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *sizes: int,  # sketch_size alone, or num_terms and low_rank
        num_terms: int | None = None,
        low_rank: int | None = None,
        sketch_size: int | None = None,
        init: str = "lstsq",
        sketch: str = "sparse",
        seed: int | None = None,
    ) -> Self:
        r"""Return a sketched approximation of a dense layer, on its device and in its dtype.

        Args:
            linear: The layer to approximate. It is not changed.
            *sizes: As in the constructor.
            num_terms: As in the constructor.
            low_rank: As in the constructor; R = L k.
            sketch_size: As in the constructor.
            init: ``"lstsq"``: the best S1 and S2 for the seed's sketches, of least norm.
                ``"random"``: the unbiased estimator. Its error exceeds the weight itself while R is below
                (in + out) / 6, with signs (in + out) / 4, so it is for studies, not for keeping a model.
                The best approximation of rank 2R, by SVD, is :meth:`LowRankLinear.from_linear`.
            sketch: As in the constructor.
            seed: As in the constructor.

        Raises:
            ValueError: If ``init`` is unknown, or the weight has no values, or NaN or infinite ones.
            TypeError: If ``linear`` is not an nn.Linear.

        Cost: ``"lstsq"`` O(R in out + R^2 (in + out)), ``"random"`` O(R in out).

        Example:
            >>> import torch
            >>> dense = torch.nn.Linear(64, 48)
            >>> layer = SKLinear.from_linear(dense, num_terms=1, low_rank=12)
            >>> bool((layer.weight - dense.weight).norm() < dense.weight.norm())
            True
        """
        check_dense(linear, nn.Linear, "from_linear")
        check_init(init)
        A = fittable(linear.weight.detach()).mT
        size = terms_and_rank(sizes, num_terms, low_rank, sketch_size)
        layer = cls.in_place_of(linear, **size, sketch=sketch, seed=seed)
        U1, U2 = layer.U1.to(A.dtype), layer.U2.to(A.dtype)
        if init == "lstsq":
            S1, S2 = lstsq_factors(A / layer.scale, U1, U2)
        else:
            # The mean over sketches of S1 U1 + U2 S2, times the scale, is A. Rows of U2 have this squared norm.
            norm = 1 if sketch == "sparse" else len(U1)
            S1, S2 = (product / (2 * layer.scale * norm) for product in (A @ U1.mT, U2.mT @ A))
        with torch.no_grad():
            layer.S1.copy_(S1)
            layer.S2.copy_(S2)
        return layer._with_bias_of(linear)

    @torch.no_grad()
    def to_low_rank(self) -> LowRankLinear:
        r"""Return the :class:`LowRankLinear` of rank 2R with this layer's weight and bias, for inference.

        Its factors are :math:`[S_1 \mid U_2]` and :math:`[U_1; S_2]`, scaled, so that a forward takes two products,
        instead of four with signs. It has no seed: the sketches are numbers in its files, and would be trained.

        Example:
            >>> import torch
            >>> layer, x = SKLinear(256, 128, 4), torch.randn(2, 256)
            >>> torch.allclose(layer(x), layer.to_low_rank()(x), atol=1e-5)
            True
        """
        U1, U2 = self._dense_sketches()
        # x U2 could overflow in float16. A power of two keeps its signs exact.
        power = 2.0 ** math.floor(math.log2(self.scale))
        down = torch.cat((self.S1 * self.scale, U2 * power), 1)
        up = torch.cat((U1, self.S2 * (self.scale / power)))
        layer = LowRankLinear.from_factors(down, up, None if self.bias is None else self.bias.clone())
        for new, old in ((layer.down, self.S1), (layer.up, self.S1), (layer.bias, self.bias)):
            if new is not None and old is not None:
                new.requires_grad_(old.requires_grad)
        return layer.train(self.training)

    def factors(self) -> tuple[Tensor, Tensor]:  # (out, 2R), (2R, in)
        """Return the factors of :meth:`to_low_rank`, whose product is the weight."""
        return self.to_low_rank().factors()

    def plain(self) -> LinearPair:
        """Return the pair of both factors, balanced for tools that round weights with one scale per row."""
        outer, inner = self.factors()
        return LinearPair.of_factors(*_balanced(outer, inner), self.bias, self._is_trained)

    def plus_product(self, left: Tensor, right: Tensor) -> LowRankLinear | None:  # (out, r), (r, in)
        """Return the LowRankLinear of rank 2R + r, or None if it would not be smaller than the dense layer."""
        return self.to_low_rank().plus_product(left, right)

    def follow_record_(self, record: Mapping[str, Any]) -> None:
        """Pack the signs if the recorded layer held them packed."""
        if record.get("packed") is True and not self.is_fitted:
            self.pack_()

    def extra_repr(self) -> str:
        """Return sizes and mode, as shown by print."""
        parts = [super().extra_repr(), "fitted" if self.is_fitted else f"seed={self.seed}"]
        parts += ["sketch='sparse'"] * (self.sketch == "sparse") + ["packed=True"] * self.packed
        return ", ".join(parts)

    def sketch_shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shape of each sketch, by name."""
        return {"U1": tuple(self.S2.shape), "U2": tuple(self.S1.shape)}  # type: ignore[dict-item]

    def pack_(self) -> Self:
        r"""Store U1 and U2 as one bit for each entry, for inference; the layer computes the same function.

        The ``2 R (in + out)`` numbers that a product reads become ``R (in + out)`` numbers and as many bits: 0.53 of
        the bytes in half precision, 0.52 in float32. Triton kernels expand the bits in registers (library products, for
        R above 64 and many rows, unpack them first). On the CPU each product unpacks them block by block, which costs
        time if the batch is small. A packed layer can be trained and saved like any other (a
        checkpoint holds the seed, so packed and unpacked layers load each other's). :meth:`unpack_` undoes it. A sparse
        layer holds no matrix to pack: it stays as it is, unless it loads a checkpoint of signs, which it then packs.

        Raises:
            ValueError: If the layer is fitted: its sketches are trained numbers, not signs.

        Example:
            >>> import torch
            >>> layer = SKLinear(256, 128, 4, sketch="signs", dtype=torch.bfloat16)
            >>> before = layer.U1.nbytes
            >>> before // layer.pack_().U1.nbytes
            16
        """
        if self.is_fitted:
            raise ValueError(
                "pack_ holds signs as bits, and the sketches of this fitted layer are trained numbers: keep it as it "
                "is, or use SKLinear.from_linear(linear, ...), whose sketches are signs"
            )
        return self._hold(packed=True)

    def unpack_(self) -> Self:
        """Store U1 and U2 as numbers again, +1 and -1 in the layer's dtype, which is faster to train with."""
        return self._hold(packed=False)

    def _hold(self, *, packed: bool) -> Self:
        self._packs_signs = packed
        packed = packed and self.sketch == "signs"
        if packed != self.packed:
            self.packed = packed
            self.set_seeded_(self.seed)  # type: ignore[arg-type]
        return self

    def set_fitted_(self, sketches: dict[str, Tensor]) -> None:
        """Make the layer fitted, with these sketches as Parameters, frozen if the factors are. It is not packed."""
        self.packed = self._packs_signs = False
        super().set_fitted_(sketches)

    def _set_kind(self, sketch: str) -> None:
        super()._set_kind(sketch)
        self.packed = self._packs_signs and sketch == "signs"

    def __getattr__(self, name: str) -> Any:
        if self.__dict__.get("sketch") == "sparse" and name in ("U1", "U2"):
            return self._dense_sketches()[name == "U2"]
        return super().__getattr__(name)

    def _draw_signs(self, name: str, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.sketch == "signs":
            return super()._draw_signs(name, dtype=dtype, device=device)
        stream, columns = self._stream_of(name), self._features_of(name)
        return signs(self.seed, stream, range(1), columns, dtype=dtype, device=device).squeeze(0)  # type: ignore[arg-type]

    def _features_of(self, name: str) -> range:
        """Return the outputs or inputs whose signs a sparse sketch has."""
        return range(self.out_features if name == "U1_signs" else self.in_features)

    def _draw_matrix(self, name: str, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.sketch == "signs":
            return super()._draw_matrix(name, dtype=dtype, device=device)
        sketch = dense_sketch(self._draw_signs(f"{name}_signs", dtype=dtype, device=device), self.inner_rank // 2)
        return sketch.mT if name == "U1" else sketch

    def draw_sketch(self, name: str) -> Tensor:
        """Return a sketch of the current seed in the layer's format: entries +-1, or words of packed signs."""
        if not self.packed:
            return super().draw_sketch(name)
        rank, stream = self.S2.shape[0], self._stream_of(name)
        features = range(self.out_features if name == "U1" else self.in_features)
        # A block of rows at a time, because the unpacked numbers and temporaries take more than a hundred times the
        # memory of the words. One draw gives 128 columns of U2.
        step = max(1, _BLOCK // len(features) // 128) * 128
        words = []
        for first in range(0, rank, step):
            rows = range(first, min(first + step, rank))
            block = (rows, features) if name == "U1" else (features, rows)
            entries = signs(self.seed, stream, *block, dtype=self.S1.dtype, device=self.S1.device)  # type: ignore[arg-type]
            # The bits of a word are neighbouring features.
            words.append(pack_signs(entries if name == "U1" else entries.mT))
        return torch.cat(words)

    def _dense_sketches(self) -> tuple[Tensor, Tensor]:
        """Return U1 (R, out) and U2 (in, R) as numbers."""
        self.check_writes()
        if self.sketch == "sparse":
            rank, names = self.inner_rank // 2, self.sketch_names  # DeepSpeed empties S1 and S2 between calls
            U1, U2 = (dense_sketch(getattr(self, name), rank, self._features_of(name).start) for name in names)
            return U1.mT.contiguous(), U2
        if not self.packed:
            return self.U1, self.U2
        dtype = self.S1.dtype
        return unpack_signs(self.U1, self.out_features, dtype), unpack_signs(self.U2, self.in_features, dtype).mT


@torch.no_grad()
def _balanced(outer: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:  # (out, R), (R, in)
    """Move powers of two from the outer to the inner factor, so that columns of the outer factor have similar norms.

    Tools that round weights use one scale per row. Rows of a seeded layer contain signs and much smaller factors. In
    int8 the output's error is 6 % without this step and 0.6 % with it.
    """
    norms = torch.linalg.vector_norm(outer.double(), dim=0)
    exponents = torch.where(norms > 0, norms, 1).log2().round()
    exponents = (exponents - exponents.median()).clamp(-6, 6)  # a smaller range than float16's
    powers = exponents.exp2().to(outer.dtype)
    return outer / powers, inner * powers[:, None]


allow_saving(SKLinear)
