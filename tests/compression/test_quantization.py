"""Rounding weights with error feedback in two metrics, against plain loops in float64."""

from itertools import pairwise

import pytest
import torch
from panther.kernels.reference.codes import spread
from torch import Tensor

from panther.compression.forms.codes import RoundingTask, fit_quantized, quantize_weights
from panther.compression.forms.metric import Metric, QuantizedWeight
from panther.nn.quantized.matrix import quantization_grid, quantize

DOUBLE = torch.float64


def metric(size: int, seed: int, decay: float = 2.0) -> Tensor:
    """Return a positive definite matrix whose eigenvalues fall to 10^-decay, in random directions."""
    generator = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(size, size, dtype=DOUBLE, generator=generator))[0]
    return (Q * torch.logspace(0, -decay, size, dtype=DOUBLE)) @ Q.mT


def loss(found: QuantizedWeight, W: Tensor, A: Tensor, G: Tensor) -> float:
    E = found.dense() - W
    return torch.einsum("ij,ik,kl,jl->", G, E, A, E).item()


def rounded(W: Tensor, A: Tensor | None, G: Tensor | None, bits: int, group_size: int) -> QuantizedWeight:
    """Round one matrix."""
    A, G = (None if M is None else M[None] for M in (A, G))
    [quantized] = quantize_weights(W[None], A, G, [[bits]], group_size)
    return quantized[bits]


def nearest_plane(W: Tensor, A: Tensor, G: Tensor, bits: int, group_size: int) -> Tensor:
    """Return the codes as the textbook has it: one triangular basis of all entries, rounded from its last on."""
    outer, inner = W.shape
    scales, zeros = (spread(x.double(), group_size, inner) for x in quantization_grid(W, bits, group_size))
    rows, columns = G.diagonal().argsort(descending=True).flip(0), A.diagonal().argsort(descending=True).flip(0)
    R = torch.kron(
        torch.linalg.cholesky(G[rows][:, rows], upper=True), torch.linalg.cholesky(A[columns][:, columns], upper=True)
    )
    w, s, z = (x[rows][:, columns].flatten() for x in (W, scales, zeros))
    codes, E = torch.zeros_like(w), torch.zeros_like(w)
    for k in reversed(range(len(w))):
        target = w[k] - R[k, k + 1 :] @ E[k + 1 :] / R[k, k]
        codes[k] = (target / s[k] + z[k]).round().clamp(0, 2**bits - 1)
        E[k] = s[k] * (codes[k] - z[k]) - w[k]
    result = torch.empty(outer, inner, dtype=torch.uint8)
    result[rows[:, None], columns] = codes.to(torch.uint8).reshape(outer, inner)
    return result


@pytest.mark.parametrize(("outer", "inner"), [(1, 1), (1, 7), (6, 1), (5, 9), (13, 11)])
@pytest.mark.parametrize(("bits", "group_size"), [(2, 4), (3, 5), (4, 128), (8, 3)])
def test_codes_are_those_of_the_nearest_plane(outer: int, inner: int, bits: int, group_size: int) -> None:
    W = torch.randn(outer, inner, dtype=DOUBLE, generator=torch.Generator().manual_seed(outer + inner))
    A, G = metric(inner, 1), metric(outer, 2)
    found = rounded(W, A, G, bits, group_size)
    expected = nearest_plane(W, A, G, bits, group_size)
    assert found.codes.dtype is torch.uint8
    assert found.scales.shape == found.zeros.shape == (outer, -(-inner // group_size))
    assert torch.equal(found.codes, expected)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    W = torch.randn(37, 50, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    A, G = metric(50, 1), metric(37, 2)
    whole = rounded(W, A, G, 3, 16)
    for block in (1, 7, 16):
        monkeypatch.setattr("panther.compression.forms.codes._BLOCK", block)
        codes = rounded(W, A, G, 3, 16).codes
        # Sums in another order can round an entry that is near a tie to its other side, and those after it.
        assert loss(QuantizedWeight(codes, whole.scales, whole.zeros, 16), W, A, G) == pytest.approx(
            loss(whole, W, A, G), rel=0.05
        )


def same(first: QuantizedWeight, second: QuantizedWeight) -> bool:
    return all(torch.equal(getattr(first, name), getattr(second, name)) for name in ("codes", "scales", "zeros"))


@pytest.mark.parametrize(("outer", "inner"), [(1, 9), (1, 1), (3, 70), (70, 5), (130, 67)])
@pytest.mark.parametrize("metrics", ["none", "inputs", "outputs", "both"])
@pytest.mark.parametrize("joint_entries", [1, 700, 2**20])
def test_what_is_rounded_together_changes_nothing(
    outer: int, inner: int, metrics: str, joint_entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    W = torch.randn(4, outer, inner, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    A = torch.stack([metric(inner, seed) for seed in range(4)]) if metrics in ("inputs", "both") else None
    G = torch.stack([metric(outer, seed) for seed in range(4)]) if metrics in ("outputs", "both") else None
    monkeypatch.setattr("panther.compression.forms.codes.JOINT_ENTRIES", joint_entries)
    widths = [(3,), (2, 3, 8), (4, 3), (8,)]
    together = quantize_weights(W, A, G, widths, 4)
    for i, weights in enumerate(together):
        assert tuple(weights) == widths[i]
        for bits, weight in weights.items():
            assert same(weight, rounded(W[i], *(None if M is None else M[i] for M in (A, G)), bits, 4))


def test_weights_of_one_kind_are_fitted_together_as_one_after_the_other() -> None:
    def task(seed: int, groups: int, widths: tuple[int, ...]) -> RoundingTask:
        generator = torch.Generator().manual_seed(seed)
        L = torch.stack([torch.linalg.cholesky(metric(12, seed + k)) for k in range(groups)])
        R = torch.stack([torch.linalg.cholesky(metric(10, seed - k - 1)).mT for k in range(groups)])
        source = torch.randn(groups, 10, 12, dtype=DOUBLE, generator=generator)
        return RoundingTask(Metric(source, L, R, None), widths, 2, 0, torch.float32)

    tasks = [task(10, 1, (3,)), task(20, 3, (2, 8)), task(30, 1, (3, 4))]
    assert len({each.kind for each in tasks}) == 1
    assert [each.num_entries for each in tasks] == [120, 720, 240]
    for each, fits in zip(tasks, fit_quantized(tasks, 5), strict=True):
        (alone,) = fit_quantized([each], 5)
        assert tuple(fits) == tuple(alone) == tuple(each.widths)
        for bits, fit in fits.items():
            assert fit.weight.codes.shape == (10 * len(each.metric.source), 12)
            assert same(fit.weight, alone[bits].weight)
            assert torch.equal(fit.residual.tails, alone[bits].residual.tails)


def test_without_metrics_entries_are_rounded_to_the_nearest() -> None:
    W = torch.randn(20, 33, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))
    found = rounded(W, None, None, 4, 8)
    assert torch.equal(found.codes, quantize(W, found.scales, found.zeros, 8, 4))


@pytest.mark.parametrize("bits", [2, 3, 4, 6])
def test_each_metric_lowers_the_loss(bits: int) -> None:
    W = torch.randn(96, 130, dtype=DOUBLE, generator=torch.Generator().manual_seed(4))
    A, G = metric(130, 5), metric(96, 6)
    nearest, rows, both = (loss(rounded(W, *m, bits, 64), W, A, G) for m in ((None, None), (A, None), (A, G)))
    # The mean over the diagonal exceeds the geometric mean of the eigenvalues 2.5 times in each of the metrics.
    assert rows < 0.8 * nearest
    assert both < 0.8 * rows


def test_four_times_less_loss_for_each_bit() -> None:
    W = torch.randn(64, 64, dtype=DOUBLE, generator=torch.Generator().manual_seed(7))
    A, G = metric(64, 8), metric(64, 9)
    losses = [loss(rounded(W, A, G, bits, 64), W, A, G) for bits in (3, 4, 5, 6, 7, 8)]
    assert all(2.5 < a / b < 6.0 for a, b in pairwise(losses))


@pytest.mark.parametrize("value", [0.0, 0.75, -1e-6, 1e6])
def test_constant_weights_are_kept(value: float) -> None:
    W = torch.full((9, 10), value, dtype=DOUBLE)
    found = rounded(W, metric(10, 1), metric(9, 2), 3, 4)
    assert (found.dense() - W).abs().max() <= abs(value) * 2**-7  # bfloat16 of the scale


def test_large_and_small_weights_are_scaled_alike() -> None:
    W = torch.randn(12, 20, dtype=DOUBLE, generator=torch.Generator().manual_seed(10))
    A, G = metric(20, 1), metric(12, 2)
    expected = rounded(W, A, G, 4, 8).codes
    for scale in (2.0**-30, 2.0**30):
        assert torch.equal(rounded(W * scale, A, G, 4, 8).codes, expected)
    assert torch.equal(rounded(W, A * 2.0**-40, G * 2.0**40, 4, 8).codes, expected)
