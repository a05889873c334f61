"""MonarchLinear, a layer of two block matrices with a permutation between them: full rank at any number of numbers."""

__all__ = ["MonarchLinear", "monarch_product"]

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther._docstrings import inherit_arguments
from panther.errors import ShapeError, check_size
from panther.kernels.ops.library import autocast, is_plain_call
from panther.nn.factors import check_dense, fittable, learnable_factors
from panther.nn.low_rank import FactoredModule
from panther.nn.protocol import LinearGeometry, allow_saving, check_linear_input
from panther.nn.sketch_sizes import per_dim

# Numbers of rows for which a copy between the products takes less time than a first product with the factor transposed:
# in float32 on a CPU (AMD EPYC, one thread), the layer without the copy takes 1.3 to 2.1 times as long for 2 to 8 rows,
# and 0.7 to 1.0 times for one row and for 16.
_FEW_ROWS = range(2, 9)
# Least rows, greatest ratio of the dense weight's numbers to the stored ones, and greatest number of the former, with
# which one product with the dense weight takes less time on a CPU than products by blocks (Intel Xeon, one thread).
_DENSE_LIMITS = {torch.float32: (512, 4.5, 2**18), torch.bfloat16: (256, 9, math.inf)}
# Least rows for which a CPU uses _Product, and rows that it multiplies at once: what stands between the products is so
# in the cache, at strides that are not multiples of a page.
_ROWS_AT_ONCE = {torch.float32: (9, 136), torch.bfloat16: (256, 264)}
torch.fx.wrap("monarch_product")  # A symbolic trace must not branch on the input.


@inherit_arguments(LinearGeometry)
class MonarchLinear(LinearGeometry, FactoredModule):
    r"""A drop-in for :class:`torch.nn.Linear` whose weight consists of blocks of rank r, a block tensor train.

    The inputs are divided into :math:`m_1` contiguous blocks of :math:`m_2` inputs, and the outputs into :math:`n_2`
    blocks of :math:`n_1` outputs, where output :math:`j` is output :math:`\lfloor j / n_2 \rfloor` of block
    :math:`j \bmod n_2`. Input block i contributes to output block b through a product of rank r:

    .. math:: y_b = \sum_{i=1}^{m_1} x_i\,A_{ib}\,B_{bi} + c_b,
        \qquad A_{ib} \in \mathbb{R}^{m_2 \times r},\ B_{bi} \in \mathbb{R}^{r \times n_1}

    Every block of the weight has rank r, and the weight itself can have full rank, where a product of two factors of as
    many numbers, a :class:`LowRankLinear`, has a fraction of it. With r = 1 and :math:`m_1 = n_2` it is the Monarch
    matrix of Dao et al. All A are one batched product, and all B another.

    Args:
        rank: Rank r of each block of the weight.
        fraction: Chooses the rank instead: the rank, at least 1, whose numbers come nearest to this fraction of the
            dense weight's. The number of blocks limits how small the fraction can be: about
            :math:`n_2 / n + m_1 / m` at rank 1, with n outputs and m inputs.
        num_blocks: Numbers of blocks :math:`m_1` of the inputs and :math:`n_2` of the outputs, or one number for both.
            None chooses each, of the numbers within a factor of 2 of the square root of its size, for the least padding
            first and the distance from the square root second.

    Sizes that the number of blocks does not divide are padded with zeros to the next multiple: prime sizes are, and by
    default sizes with a divisor within a factor of 2 of their square root are not. Padding stores numbers that do not
    affect the output.

    Shape:
        Input ``(*, in_features)``, output ``(*, out_features)``.

    Attributes:
        down: All A, as :math:`(m_1, m_2, r n_2)`. Column :math:`k n_2 + b` of block i is column k of :math:`A_{ib}`.
        up: All B, as :math:`(n_2, m_1 r, n_1)`. Row :math:`i r + k` of block b is row k of :math:`B_{bi}`.
        bias: A Parameter (out,), or None.
        num_blocks: The pair :math:`(m_1, n_2)`.

    Raises:
        ShapeError: If ``num_blocks`` would leave a block empty.
        ValueError: If ``fraction`` is not above 0 and at most 1, or both ``rank`` and ``fraction`` are given.

    Warns:
        PerformanceWarning: If the dense layer would not be larger.

    Cost: ``2 r (in n_2 + out m_1)`` flops for each row forward and twice that backward. A nested input is multiplied by
    the dense weight, which is computed for it, and so are many rows on a CPU where that is faster: 256 in bfloat16 with
    a ninth of the dense numbers, 512 in float32 with 2/9 of at most 2\ :sup:`18`. Fewer blocks are faster.

    Example:
        >>> import torch
        >>> layer = MonarchLinear(1024, 1024, fraction=0.125)
        >>> layer
        MonarchLinear(in_features=1024, out_features=1024, num_blocks=(32, 32), rank=2, bias=True)
        >>> layer(torch.randn(8, 1024)).shape
        torch.Size([8, 1024])
        >>> sum(p.numel() for p in layer.parameters())
        132096

    Reference: T. Dao et al., "Monarch: expressive structured matrices for efficient and accurate training", 2022,
    arXiv:2204.00595; ranks above 1: S. Qiu et al., "Compute better spent: replacing dense layers with structured
    matrices", 2024, arXiv:2406.06248.
    """

    size_arguments = ("num_blocks", "rank")  # reports take the last as the rank
    has_matrix_stacks = True
    num_blocks: tuple[int, int]
    sharded_dims: ClassVar[Mapping[int, Mapping[str, int]]] = {0: {"up": 2, "bias": 0}, 1: {"down": 0, "up": 1}}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int = 1,
        *,
        fraction: float | None = None,
        num_blocks: int | Sequence[int] | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._set_sizes(in_features, out_features)
        sizes = self.in_features, self.out_features
        self.fan_in = self.in_features
        if num_blocks is None:
            self.num_blocks = _default_blocks(sizes[0]), _default_blocks(sizes[1])
        else:
            inputs, outputs = per_dim("num_blocks", num_blocks, 2, least=1)
            self.num_blocks = _checked_blocks(inputs, sizes[0]), _checked_blocks(outputs, sizes[1])
        m1, n2 = self.num_blocks
        m2, n1 = self._block_sizes = -(-sizes[0] // m1), -(-sizes[1] // n2)
        self.rank = check_size("rank", rank, least=1)
        if fraction is not None:
            self.rank = _rank_of(fraction, rank, math.prod(sizes) / (n2 * m1 * (m2 + n1)))
        self._build((m1, m2, self.rank * n2), (n2, m1 * self.rank, n1), sizes[1], bias, device, dtype)

    @property
    def inner_rank(self) -> None:
        """None, because the weight is not a product of two matrices with fewer numbers than it has."""

    @property
    def rate_factors(self) -> Mapping[str, float]:
        """Factors of AdamW's learning rate, with which both factors move the outputs as much as a dense weight does."""
        return {"down": self.num_blocks[0] / 2, "up": self._block_sizes[0] / (2 * self.rank)}

    @property
    def muon_rate_factors(self) -> Mapping[str, float]:
        """Factors of Muon's learning rate: an update's norm is in proportion to the root of a matrix's longer side."""
        longest, (m1, n2), (m2, n1) = max(self.in_features, self.out_features), self.num_blocks, self._block_sizes
        sides = {"down": max(m2, self.rank * n2), "up": max(m1 * self.rank, n1)}
        return {name: math.sqrt(longest / (2 * side)) for name, side in sides.items()}

    @classmethod
    def describe_form(cls, arguments: Mapping[str, Any], mode: str = "stored") -> str:
        """Return the numbers of blocks and the rank in words."""
        inputs, outputs = arguments["num_blocks"]
        return f"Monarch, {outputs} x {inputs} blocks of rank {arguments['rank']}"

    def reset_parameters(self) -> None:
        """Draw both factors and the bias from torch's generator; the weight has the variance of torch's default."""
        # An entry of A x has the variance of an entry of x. An entry of the weight is a sum of r products, so its
        # variance is 1 / (3 in), also if the inputs are padded.
        block = self.down.shape[1]
        bound, bound_of_up = math.sqrt(3 / block), math.sqrt(block / (self.in_features * self.rank))
        nn.init.uniform_(self.down, -bound, bound)
        nn.init.uniform_(self.up, -bound_of_up, bound_of_up)
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def why_not_sharded(self, dim: int, ranks: int) -> str | None:
        """Return why ranks cannot have equally many outputs of each block, or equally many blocks of inputs."""
        inputs, outputs, m1, n2, m2, n1, _ = self._sizes()
        if dim == 0:
            padded, count, counted_things = n1 * n2 > outputs, n1, "outputs of a block"
        else:
            padded, count, counted_things = m1 * m2 > inputs, m1, "blocks of inputs"
        if padded:
            return f"its {'outputs' if dim == 0 else 'inputs'} are padded to blocks of equal size"
        return f"its {count} {counted_things} are not a multiple of {ranks} ranks" if count % ranks else None

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(*, in_features)`` to ``(*, out_features)``."""
        return monarch_product(input, self.down, self.up, self.bias, self._sizes())

    def _sizes(self) -> "_Sizes":
        """Return the sizes of the products that this process computes."""
        return _Sizes(self.in_features, self.out_features, *self.num_blocks, *self._block_sizes, self.rank)

    @property
    def weight(self) -> Tensor:  # (out, in)
        """The dense effective weight, for inspection: differentiable, made anew at each access in 2 r in out flops."""
        return _weight(self.down, self.up, self._sizes())

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        rank: int = 1,
        *,
        fraction: float | None = None,
        num_blocks: int | Sequence[int] | None = None,
        seed: int = 0,
    ) -> Self:
        r"""Return the layer with the truncated SVD of each block of a dense weight, on its device and in its dtype.

        No layer of these sizes is nearer in the Frobenius norm, because every block is a block of rank r of its own:
        the squared error is the sum over all blocks of the squared singular values after the r-th. The dense layer is
        not changed. Singular values are split evenly between the factors.

        Args:
            linear: The layer to approximate.
            rank: As in the constructor.
            fraction: As in the constructor.
            num_blocks: As in the constructor.
            seed: Seed of unused components.

        Raises:
            ValueError: If the weight has no values, or NaN or infinite ones.
            TypeError: If ``linear`` is not an nn.Linear.

        Cost: an SVD of each of the ``n_2 m_1`` blocks, O(in out min(m_2, n_1)).

        Example:
            >>> import torch
            >>> dense = torch.nn.Linear(64, 48)
            >>> layer = MonarchLinear.from_linear(dense, rank=3, num_blocks=8)
            >>> bool((layer.weight - dense.weight).norm() < dense.weight.norm())
            True
        """
        check_dense(linear, nn.Linear, "from_linear")
        A = fittable(linear.weight.detach())
        layer = cls.in_place_of(linear, rank=rank, fraction=fraction, num_blocks=num_blocks)
        layer._set_blocks(_blocks(A, layer._sizes()), seed)
        return layer._with_bias_of(linear)

    @torch.no_grad()
    def _set_blocks(self, A: Tensor, seed: int) -> None:  # (n2, m1, n1, m2)
        """Make the truncated SVD of each block the block of the weight."""
        P, sigma, Qt = torch.linalg.svd(A, full_matrices=False)
        root = sigma[..., : self.rank].sqrt()
        unused = self.rank - root.shape[-1]
        left = F.pad(P[..., : self.rank] * root[..., None, :], (0, unused))
        right = F.pad(Qt[..., : self.rank, :] * root[..., None], (0, 0, 0, unused))
        left, right = learnable_factors(left, right, seed)
        self.down.copy_(right.permute(1, 3, 2, 0).reshape(self.down.shape))
        self.up.copy_(left.permute(0, 1, 3, 2).reshape(self.up.shape))


allow_saving(MonarchLinear)


class _Sizes(NamedTuple):
    """Sizes of a layer as integers, which the shapes of tensors are not while torch.jit.trace runs."""

    inputs: int
    outputs: int
    m1: int
    n2: int
    m2: int
    n1: int
    rank: int


def _default_blocks(size: int) -> int:
    """Return a number of blocks near the square root, first for the least padding."""
    root = math.sqrt(size)
    return min(range(math.ceil(root / 2), math.floor(2 * root) + 1), key=lambda k: (-size % k, abs(k - root)))


def _checked_blocks(count: int, size: int) -> int:
    """Return a number of blocks, or raise if blocks of equal size, the last of them padded, would be fewer."""
    block = -(-size // count)
    if (count - 1) * block >= size:
        raise ShapeError(
            f"num_blocks={count} would leave blocks of {size} features empty: {-(-size // block)} blocks of {block} "
            "have them all"
        )
    return count


def _rank_of(fraction: float, rank: int, rank_of_dense: float) -> int:
    """Return the rank with which a layer stores nearly this fraction of the dense weight's numbers."""
    if rank != 1:
        raise ValueError(f"rank={rank} and fraction={fraction} both choose the rank: give one of them")
    if isinstance(fraction, bool) or not isinstance(fraction, Real):
        raise TypeError(f"fraction must be a number, not {type(fraction).__name__}")
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction} must be above 0 and at most 1")
    return max(1, round(fraction * rank_of_dense))


def monarch_product(
    x: Tensor,  # (*, in)
    down: Tensor,  # (m1, m2, r n2)
    up: Tensor,  # (n2, m1 r, n1)
    bias: Tensor | None,  # (out,)
    sizes: _Sizes,
) -> Tensor:  # (*, out)
    """Return the output of a layer of these factors."""
    inputs, outputs, m1, n2, m2, n1, _ = sizes
    check_linear_input(x, inputs, down.dtype)
    x, down, up, bias = autocast(x.device, x, down, up, bias)
    rows = 0 if x.is_nested else math.prod(x.shape[:-1])
    # The rules for numbers of rows are those of the measured cases. A graph must serve every number of rows.
    has_rules = x.is_cpu and not torch.compiler.is_compiling() and is_plain_call()
    has_rules = has_rules and {type(x), type(down), type(up)} <= {Tensor, nn.Parameter}
    is_dense = False
    if has_rules and x.dtype in _DENSE_LIMITS:
        least_rows, ratio, numbers = _DENSE_LIMITS[x.dtype]
        is_dense = rows >= least_rows and inputs * outputs <= min(numbers, ratio * (down.numel() + up.numel()))
    if is_dense or x.is_nested or x.layout is not torch.strided:  # The last two kinds of input have no blocks.
        return F.linear(x, _weight(down, up, sizes), bias)
    blocks = x if m1 * m2 == inputs else F.pad(x, (0, m1 * m2 - inputs))
    blocks = blocks.reshape(rows, m1, m2)
    if bias is not None:
        padded = bias if n2 * n1 == outputs else F.pad(bias, (0, n2 * n1 - outputs))
        bias = padded.reshape(n1, n2).mT[:, None]  # (n2, 1, n1)
    if has_rules and rows >= _ROWS_AT_ONCE.get(x.dtype, (math.inf, 0))[0]:
        y: Tensor = _Product.apply(blocks, down, up, bias, sizes, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    else:
        copies = has_rules and x.dtype is torch.float32 and rows in _FEW_ROWS
        y = _blockwise_product(blocks, down, up, bias, sizes, copies=copies)[0]
    y = y.reshape(rows, n1 * n2)[:, :outputs]  # (rows, out)
    return y.contiguous().reshape(*x.shape[:-1], outputs)


def _blockwise_product(
    blocks: Tensor,  # (rows, m1, m2)
    down: Tensor,  # (m1, m2, r n2)
    up: Tensor,  # (n2, m1 r, n1)
    bias: Tensor | None,  # (n2, 1, n1)
    sizes: _Sizes,
    *,
    copies: bool = False,
) -> tuple[Tensor, Tensor]:  # (rows, n1, n2), (n2, rows, m1 r)
    """Return both products, and the first alone, as views; with ``copies``, the first is reordered by a copy."""
    rows, (_, _, m1, n2, _, _, rank) = blocks.shape[0], sizes
    if copies:
        h = torch.bmm(blocks.transpose(0, 1), down)  # (m1, rows, r n2)
        h = h.reshape(m1, rows, rank, n2).permute(3, 1, 0, 2).reshape(n2, rows, m1 * rank)
    else:
        # Both products read their operands without a copy: only the order of strides differs, which BLAS takes.
        h = torch.bmm(down.mT, blocks.permute(1, 2, 0))  # (m1, r n2, rows)
        h = h.reshape(m1 * rank, n2, rows).permute(1, 2, 0)  # (n2, rows, m1 r)
    y = torch.bmm(h, up) if bias is None else torch.baddbmm(bias, h, up)
    return y.permute(1, 2, 0), h


class _Product(torch.autograd.Function):
    """Both products with a backward that reorders only the gradients of the input and of the output."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, down: Tensor, up: Tensor, bias: Any, sizes: _Sizes, saves: bool) -> Tensor:
        ctx.sizes, saved = sizes, [blocks, down, up]
        rows_at_once = _ROWS_AT_ONCE[blocks.dtype][1]
        y = blocks.new_empty(len(blocks), sizes.n1, sizes.n2)
        for rows, y_of_rows in zip(blocks.split(rows_at_once), y.split(rows_at_once), strict=True):
            product, h = _blockwise_product(rows, down, up, None, sizes)
            y_of_rows.copy_(product)
            if bias is not None:
                y_of_rows.add_(bias.permute(1, 2, 0))
            saved += [h] * saves
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # (rows, n1, n2)
        blocks, down, up, *between = ctx.saved_tensors
        grad_of_bias = grad.sum(0).mT[:, None] if ctx.needs_input_grad[3] else None
        if torch.is_grad_enabled():  # The gradients will be differentiated themselves.
            results = torch.func.vjp(lambda x, A, B: _blockwise_product(x, A, B, None, ctx.sizes)[0], blocks, down, up)
            return *results[1](grad), grad_of_bias, None, None
        grad_of_blocks = torch.empty_like(blocks)
        # Sums over the steps are in float32, as the sums within a product.
        grad_of_down, grad_of_up = (x.new_zeros(x.shape, dtype=torch.float32) for x in (down.mT, up))
        add = Tensor.baddbmm_ if up.dtype is torch.float32 else lambda total, *factors: total.add_(torch.bmm(*factors))
        steps = (x.split(_ROWS_AT_ONCE[x.dtype][1]) for x in (blocks, grad_of_blocks, grad))
        for rows, grad_of_rows, grad_of_y, h in zip(*steps, between, strict=True):
            grad_of_y = grad_of_y.permute(2, 0, 1).contiguous()  # (n2, rows, n1)
            grad_of_h = torch.empty_like(h)  # (n2, rows, m1 r), at the strides of h
            torch.bmm(up, grad_of_y.mT, out=grad_of_h.mT)
            by_inputs = grad_of_h.permute(2, 0, 1).view(*grad_of_down.shape[:2], -1)  # (m1, r n2, rows)
            grad_of_rows.copy_(torch.bmm(by_inputs.mT, down.mT).transpose(0, 1))
            if ctx.needs_input_grad[1]:
                add(grad_of_down, by_inputs, rows.transpose(0, 1))
            if ctx.needs_input_grad[2]:
                add(grad_of_up, h.mT, grad_of_y)
        return grad_of_blocks, grad_of_down.mT.to(down.dtype), grad_of_up.to(up.dtype), grad_of_bias, None, None


def _weight(down: Tensor, up: Tensor, sizes: _Sizes) -> Tensor:  # (out, in)
    """Return the dense weight: output block b, output a in it, input block i, input c in it."""
    inputs, outputs, m1, n2, m2, n1, rank = sizes
    down = down.reshape(m1, m2, rank, n2).permute(3, 0, 2, 1).reshape(n2 * m1, rank, m2)
    blocks = torch.bmm(up.reshape(n2 * m1, rank, n1).mT, down)  # This order copies whole rows of blocks.
    return blocks.reshape(n2, m1, n1, m2).permute(2, 0, 1, 3).reshape(n1 * n2, m1 * m2)[:outputs, :inputs]


def _blocks(weight: Tensor, sizes: _Sizes) -> Tensor:  # (n2, m1, n1, m2)
    """Return the blocks of a dense weight, padded with zeros."""
    inputs, outputs, m1, n2, m2, n1, _ = sizes
    padded = F.pad(weight, (0, m1 * m2 - inputs, 0, n1 * n2 - outputs))
    return padded.reshape(n1, n2, m1, m2).permute(1, 2, 0, 3)
