"""InterpolativeLinear, a linear layer of low rank that stores some rows or columns of its weight and their mixtures."""

__all__ = ["InterpolativeLinear", "stored_bytes"]

import math
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther._docstrings import inherit_arguments
from panther._torch import buffers_of, parameters_of
from panther.errors import ShapeError, SketchMismatchError, check_device, check_flag, check_floating, check_size
from panther.linalg import interpolative
from panther.nn.factors import check_dense, check_shapes, fittable, leading_factors
from panther.nn.pairs import LinearPair
from panther.nn.protocol import LinearGeometry, allow_saving, check_linear_input
from panther.nn.sketch_record import has_values

_INDEX_BYTES = 4


@inherit_arguments(LinearGeometry)
class InterpolativeLinear(LinearGeometry):
    r"""A drop-in for :class:`torch.nn.Linear` whose weight of rank r is stored in r (in + out - r) numbers.

    .. math:: W_{\mathtt{order}} = \begin{pmatrix} I \\ C \end{pmatrix} P \quad\text{or}\quad
        W_{:,\,\mathtt{order}} = P \begin{pmatrix} I & C \end{pmatrix}

    An interpolative decomposition: the *skeleton* P consists of r rows of the weight, or of r columns, and the
    *coefficients* C express the remaining rows or columns as combinations of them. The product of two factors of rank r
    is the same matrix, but takes r (in + out) numbers, and more multiplications in proportion. With 75 % of a square
    weight's numbers, the rank is 1/2 of its size instead of 3/8; with 50 %, it is 0.29 instead of 0.25.

    The skeleton has rows if there are fewer outputs than inputs, and columns otherwise, so that the shorter of input
    and output has to be reordered. Entries of C are at most 2 in magnitude after :meth:`set_factors_` and
    :meth:`from_linear`, so that rounding them costs little. P, C and the bias are parameters; ``order`` is fixed.

    Args:
        low_rank: Rank r of the weight, at most the smaller of both sizes.

    Shape:
        Input ``(*, in_features)``, output ``(*, out_features)``.

    Attributes:
        skeleton: The Parameter P, (r, in) for rows and (out, r) for columns.
        coefficients: The Parameter C, (out - r, r) for rows and (r, in - r) for columns.
        order: int32. With columns, shape (in,): the input at each place. With rows, shape (out,): the place of each
            output.
        bias: A Parameter (out,), or None.
        keeps_rows: Whether the skeleton consists of rows: whether ``out < in``.

    Cost: ``2 r (in + out - r)`` flops for each row, and one copy of the input or the output in a different order, which
    takes as long as 10 to 50 multiplications for each of its entries on a CPU: from a tenth of the products' time in
    float32 to as much as them in bfloat16, where products are native.

    Example:
        >>> import torch
        >>> layer = InterpolativeLinear(1024, 1024, low_rank=512)
        >>> layer(torch.randn(8, 1024)).shape
        torch.Size([8, 1024])
        >>> from panther.nn.interpolative import stored_bytes
        >>> stored_bytes(1024, 1024, 512, torch.float32) / (4 * 1024**2)
        0.7509765625

    Reference: an interpolative decomposition instead of two factors: J. Zhao et al., "Pivoting factorization: a
    compact meta low-rank representation of sparsity for efficient inference in large language models", 2025,
    arXiv:2501.19090, which keeps rows; H. Cheng, Z. Gimbutas, P. G. Martinsson and V. Rokhlin, "On the compression of
    low rank matrices", 2005, doi:10.1137/030602678.
    """

    size_arguments = ("low_rank",)
    saved_buffer_names = ("order",)
    checked_names = ("order",)
    form_name = "interpolative"
    skeleton: nn.Parameter
    coefficients: nn.Parameter
    order: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        low_rank: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._set_sizes(in_features, out_features)
        columns, rows = self.in_features, self.out_features
        self.low_rank = rank = _checked_rank(columns, rows, low_rank)
        self.keeps_rows = rows < columns  # A property would take time in each call.
        check_flag("bias", bias)
        check_device(device)
        check_floating("dtype", dtype)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))

        self.skeleton = parameter(rank, columns) if self.keeps_rows else parameter(rows, rank)
        self.coefficients = parameter(rows - rank, rank) if self.keeps_rows else parameter(rank, columns - rank)
        self.bias = parameter(rows) if bias else None
        with torch.inference_mode(False):  # Inference tensors do not count writes.
            self.register_buffer("order", torch.empty(min(rows, columns), dtype=torch.int32, device=device))
        self.reset_parameters()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of input, output and parameters."""
        return self.skeleton.dtype

    @property
    def record_mode(self) -> str:
        """The kind of the tensors, "interpolative"."""
        return "interpolative"

    @property
    def inner_rank(self) -> int:
        """The rank r."""
        return self.low_rank

    @property
    def _is_trained(self) -> bool:
        return self.skeleton.requires_grad

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the parameters, with nn.Linear's variance, and the order from torch's generator."""
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.skeleton, -bound, bound)
        # An entry of C P or C x is a sum of r terms. With this variance it has the variance of an entry of P or x.
        bound_of_mix = math.sqrt(3 / self.low_rank)
        nn.init.uniform_(self.coefficients, -bound_of_mix, bound_of_mix)
        # The order is random, as in fitted layers. Neighbouring columns would be copied faster, and timings would be
        # wrong.
        self.order.copy_(torch.randperm(len(self.order), device=self.order.device))
        self.note_writes()
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(*, in_features)`` to ``(*, out_features)``."""
        self.check_writes()
        check_linear_input(input, self.in_features, self.skeleton.dtype)
        if input.is_nested or input.layout is not torch.strided:
            # Such an input has no columns to select, so two dense factors multiply it.
            left, right = self.factors()
            return F.linear(F.linear(input, right), left, self.bias)
        P, C, bias = self.skeleton, self.coefficients, self.bias
        # Columns of matrices are copied several times faster than columns of tensors with more dimensions.
        x = input if input.dim() == 2 else input.reshape(math.prod(input.shape[:-1]), self.in_features)
        if self.keeps_rows:
            z = F.linear(x, P)
            output = _in_order(torch.cat((z, F.linear(z, C)), -1), self.order)
            if bias is not None:
                output = output + bias.to(output.dtype)  # Under autocast, the bias has the layer's dtype.
        else:
            x = _in_order(x, self.order)
            output = F.linear(torch.addmm(x[:, : self.low_rank], x[:, self.low_rank :], C.mT), P, bias)
        return output if input.dim() == 2 else output.reshape(*input.shape[:-1], self.out_features)

    def factors(self) -> tuple[Tensor, Tensor]:  # (out, r), (r, in)
        """Return two factors whose product is the weight, including the unit matrix; differentiable."""
        self.check_writes()
        unit = torch.eye(self.low_rank, dtype=self.dtype, device=self.skeleton.device)
        if self.keeps_rows:
            return torch.cat((unit, self.coefficients)).index_select(0, self.order), self.skeleton
        return self.skeleton, torch.cat((unit, self.coefficients), 1).index_select(1, self.order.argsort())

    def plain(self) -> LinearPair:
        """Return the pair of both factors."""
        return LinearPair.of_factors(*self.factors(), self.bias, self._is_trained)

    @torch.no_grad()
    def plus_product(self, left: Tensor, right: Tensor) -> "InterpolativeLinear | None":  # (out, r'), (r', in)
        """Return the layer of rank r + r', or None if that is not less than both sizes."""
        rank = self.low_rank + len(right)
        if rank >= min(self.in_features, self.out_features):
            return None
        outer, inner = (factor.to(torch.promote_types(factor.dtype, torch.float32)) for factor in self.factors())
        new = InterpolativeLinear(
            self.in_features, self.out_features, rank, bias=self.bias is not None, device=self.skeleton.device,
            dtype=self.dtype,
        )  # fmt: skip
        if self.bias is not None and new.bias is not None:
            new.bias.copy_(self.bias)
        return new.set_factors_(torch.cat((outer, left), 1), torch.cat((inner, right)))

    @property
    def weight(self) -> Tensor:  # (out, in)
        """The dense effective weight, for inspection: differentiable, made anew at each access in 2 r in out flops."""
        left, right = self.factors()
        return left @ right

    @classmethod
    def from_linear(cls, linear: nn.Linear, low_rank: int) -> Self:
        """Return the layer with the truncated SVD of a dense weight, on its device and in its dtype.

        The dense layer is not changed. Only the weight determines the fit, while :func:`panther.compress` also weighs
        errors by the data.

        Args:
            linear: The layer to approximate.
            low_rank: As in the constructor.

        Raises:
            ValueError: If the weight has no values, or NaN or infinite ones.
            ShapeError: If ``low_rank`` is out of range.
            TypeError: If ``linear`` is not an nn.Linear.

        Cost: a truncated SVD and :meth:`set_factors_`.

        Example:
            >>> import torch
            >>> dense = torch.nn.Linear(64, 48)
            >>> layer = InterpolativeLinear.from_linear(dense, low_rank=48)
            >>> torch.allclose(layer.weight, dense.weight, atol=1e-6)
            True
        """
        check_dense(linear, nn.Linear, "from_linear")
        A = fittable(linear.weight.detach())
        layer = cls.in_place_of(linear, low_rank=low_rank)
        layer.set_factors_(*leading_factors(A, layer.low_rank))
        return layer._with_bias_of(linear)

    @torch.no_grad()
    def set_factors_(
        self,
        left: Tensor,  # (out, r)
        right: Tensor,  # (r, in)
    ) -> Self:
        """Make ``left @ right`` the weight, exactly except for rounding.

        :func:`panther.linalg.interpolative` chooses the skeleton, in float64 and without forming the product, so that
        no coefficient is above 2 in size.

        Raises:
            ShapeError: If a shape differs.
            ValueError: If an entry is not finite.

        Cost: ``O(r^2 (in + out))`` in float64.

        Example:
            >>> import torch
            >>> left, right = torch.randn(48, 5), torch.randn(5, 64)
            >>> layer = InterpolativeLinear(64, 48, 5).set_factors_(left, right)
            >>> torch.allclose(layer.weight, left @ right, atol=1e-4)
            True
        """
        outer, inner = (self.out_features, self.low_rank), (self.low_rank, self.in_features)
        check_shapes(left=(left, outer), right=(right, inner))
        for name, factor in (("left", left), ("right", right)):
            if not factor.isfinite().all():
                raise ValueError(f"{name} has entries that are NaN or infinite")
        left, right = left.double(), right.double()
        if not self.keeps_rows:  # The columns of a product are the rows of its transpose.
            left, right = right.mT, left.mT
        # With orthonormal rows on the right, the rows of ``left`` have the angles and norms of the product's rows.
        J, T, *_ = interpolative(left @ torch.linalg.qr(right.mT, mode="r").R.mT, self.low_rank, dim=-2, seed=0)
        is_mixed = torch.ones(len(left), dtype=torch.bool, device=left.device).index_fill_(0, J, False)
        order = torch.cat((J, is_mixed.nonzero()[:, 0]))
        skeleton, coefficients = left[J] @ right, T[is_mixed]
        if self.keeps_rows:
            order = order.argsort()
        else:
            skeleton, coefficients = skeleton.mT, coefficients.mT
        self.order.copy_(order)
        self.note_writes()
        self.skeleton.copy_(skeleton)
        self.coefficients.copy_(coefficients)
        return self

    def stored_names(self) -> tuple[str, ...]:
        """Return the names of the tensors that the weight is computed from."""
        return ("skeleton", "coefficients", "order")

    def check_record(self) -> None:
        """Raise SketchMismatchError unless ``order`` is a permutation."""
        if reason := _order_fault(self.order, len(self.order)):
            raise SketchMismatchError(
                f"order {reason}: average and cast only floating tensors, and load a sound checkpoint into the layer"
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load everything or nothing."""
        state = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        layer_tensors = {**parameters_of(self), **buffers_of(self)}
        expected = {name: tensor.shape for name, tensor in layer_tensors.items() if tensor is not None}
        if not self._fits(state, expected, prefix, *args):
            return
        if reason := _order_fault(state["order"], len(self.order)):
            args[-1].append(f"{prefix}order {reason}: use a sound checkpoint, and cast only its floating tensors.")
            return
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply ``fn``, but keep the dtype of ``order``, which becomes the identity when it leaves the meta device."""
        was_meta = self.order.is_meta

        def keep(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if tensor.is_floating_point() or moved.dtype is tensor.dtype else tensor.to(moved.device)

        super()._apply(keep, recurse)
        if was_meta and not self.order.is_meta:
            with torch.no_grad():
                self.order.copy_(torch.arange(len(self.order), device=self.order.device))
        return self


allow_saving(InterpolativeLinear)


def stored_bytes(in_features: int, out_features: int, low_rank: int, dtype: torch.dtype) -> int:
    """Return the size of an :class:`InterpolativeLinear` in a file, in bytes, without its bias."""
    columns = check_size("in_features", in_features, least=1)
    rows = check_size("out_features", out_features, least=1)
    rank = _checked_rank(columns, rows, low_rank)
    return rank * (columns + rows - rank) * dtype.itemsize + min(rows, columns) * _INDEX_BYTES


def _checked_rank(columns: int, rows: int, low_rank: int) -> int:
    rank = check_size("low_rank", low_rank, least=1)
    if rank > (most := min(columns, rows)):
        raise ShapeError(f"low_rank={rank} must be at most {most}, the smaller of in_features and out_features")
    return rank


def _in_order(x: Tensor, order: Tensor) -> Tensor:  # (rows, columns)
    """Return the columns of a matrix in a different order."""
    # On a CPU, for matrices of 512 rows, index_select takes 0.5 ns per entry in float32 and 2.4 ns in bfloat16, where
    # gather takes 1.0 ns (Zen 4, one thread).
    if x.dtype is torch.float32:
        return x.index_select(1, order)
    return x.gather(1, order.long().expand(x.shape))


def _order_fault(order: Tensor, size: int) -> str | None:
    """Return what is wrong with an order, or None if it is a permutation or has no values."""
    if order.dtype is not torch.int32:
        return f"is {order.dtype} and must be torch.int32"
    if (
        type(order) is Tensor
        and has_values(order)
        and not torch.equal(order.sort().values, torch.arange(size, device=order.device).int())
    ):
        return f"must hold each number from 0 to {size - 1} once"
    return None
