"""Attention exact in a window and linear beyond it, against all n^2 weights in float64."""

from functools import partial

import pytest
import torch
from attention_kernels import (
    assert_memory_is_linear,
    assert_one_graph_for_every_length,
    second_derivatives,
)
from panther.kernels import reference, windowed_linear_attention
from panther.kernels.reference import windowed_attention as blocked
from tolerances import KERNEL_RMS, assert_close

from panther.errors import ShapeError
from panther.nn.functional import windowed_linear_attention as functional

INF = torch.inf
ops = torch.ops.panther


def naive(q, k, v, phi_q, phi_k, log_q=None, log_k=None, *, window, is_causal=False):
    """The definition: the logarithms of all weights, and their softmax."""
    position = torch.arange(q.shape[-2], device=q.device)
    block = position // window
    near = (block[:, None] - block).abs() <= 1
    logits = (phi_q @ phi_k.mT).log()
    if log_q is not None:
        logits = logits + log_q[..., None] + log_k[..., None, :]
    logits = torch.where(near, q @ k.mT, logits)
    if is_causal:
        logits = logits.masked_fill(position[:, None] < position, -INF)
    if log_k is not None:
        logits = logits.masked_fill((log_k == -INF)[..., None, :], -INF)
    empty = (logits == -INF).all(-1, keepdim=True)
    weights = logits.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
    return weights @ v


def operands(*batch, n, D=3, E=2, m=4, scaled=False, dtype=torch.float32, grad=True):
    """Positive features; exponents over 80 and more, with masked keys at the start and within."""
    generator = torch.Generator().manual_seed(n + D + 7 * E + 49 * m)
    q, k = (torch.randn(*batch, n, D, generator=generator) for _ in "qk")
    v = torch.randn(*batch, n, E, generator=generator)
    phi_q, phi_k = (0.1 + torch.rand(*batch, n, m, generator=generator) for _ in "qk")
    result = [x.to(dtype) for x in (q, k, v, phi_q, phi_k)]
    if scaled:
        # In sixteenths, whose sums are exact in float32.
        log_q, log_k = (torch.randn(*batch, n, generator=generator).mul(32).round().div(16) for _ in "qk")
        if n > 4:
            log_q -= 40
            log_q[..., : n // 2] += 40
            log_k[..., n // 3 :] += 40
            log_k[..., [0, 1, n // 2]] = -INF
        result += [x.double() if dtype is torch.float64 else x for x in (log_q, log_k)]
    return [x.requires_grad_(grad) for x in result]


def with_gradients(function, args, grad, **settings):
    y = function(*args, **settings)
    return [y, *torch.autograd.grad(y, args, grad, materialize_grads=True)]


def against_naive(function, args, **settings):
    exact = [x.detach().double().requires_grad_() for x in args]
    grad = torch.randn(args[2].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grad = grad.to(args[2].dtype)
    results = with_gradients(function, args, grad, **settings)
    expected = with_gradients(naive, exact, grad.double(), **settings)
    # A gradient may be a small difference of large terms, one of them y, rounded: they have the size of others.
    scale = max(x.square().mean().sqrt() for x in expected[1:])
    bound, share = KERNEL_RMS[args[0].dtype], 0.5 if args[0].dtype.itemsize == 2 else 0.1
    for ours, theirs in zip(results, expected, strict=True):
        error = (ours - theirs).square().mean().sqrt()
        assert error <= bound * max(theirs.square().mean().sqrt(), share * scale)
    assert [x.dtype for x in results] == [args[2].dtype, *(x.dtype for x in args)]


def plain(q, k, v, phi_q, phi_k, log_q=None, log_k=None, *, window, is_causal=False):
    return reference.windowed_linear_attention(q, k, v, phi_q, phi_k, log_q, log_k, window, is_causal)


# Of the sequence, the window, D, E and m: one block, two, a remainder, sizes of one.
SHAPES = [
    ((), 1, 4, 3, 2, 4),
    ((), 7, 1, 1, 3, 1),
    ((2, 3), 12, 4, 5, 1, 3),
    ((1,), 13, 4, 3, 4, 2),
    ((1,), 30, 64, 7, 5, 9),
    ((2,), 130, 64, 16, 16, 16),
    ((2,), 331, 16, 5, 6, 7),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("batch", "n", "window", "D", "E", "m"), SHAPES)
def test_operator_and_gradients(batch, n, window, D, E, m, scaled, is_causal, dtype, monkeypatch):
    monkeypatch.setattr(blocked, "_POSITIONS", 2 * window)  # several segments
    args = operands(*batch, n=n, D=D, E=E, m=m, scaled=scaled, dtype=dtype)
    against_naive(windowed_linear_attention, args, window=window, is_causal=is_causal)
    if dtype is torch.float64:
        against_naive(plain, args, window=window, is_causal=is_causal)


def test_second_derivatives():
    args = operands(1, n=13, scaled=True)
    exact = [x.detach().double().requires_grad_() for x in args]
    grad = torch.randn(args[2].shape, generator=torch.Generator().manual_seed(0))

    computed = second_derivatives(partial(windowed_linear_attention, window=4), args, grad.clone())
    expected = second_derivatives(partial(naive, window=4), exact, grad.double())
    for ours, theirs in zip(computed, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max().clamp_min(1)


@pytest.mark.parametrize("is_causal", [False, True])
def test_exact_features_make_softmax_attention(is_causal):
    """With features whose products are the weights themselves, the window does not matter."""
    q, k, v = operands(2, n=50, D=1, E=3, dtype=torch.float64, grad=False)[:3]
    shared = k[..., :1, :].expand_as(k)
    phi_q, phi_k = (q * shared).sum(-1, keepdim=True).exp(), torch.ones_like(q)
    expected = torch.nn.functional.scaled_dot_product_attention(q, shared, v, is_causal=is_causal, scale=1.0)
    for window in (1, 7, 64):
        assert_close(
            windowed_linear_attention(q, shared, v, phi_q, phi_k, window=window, is_causal=is_causal), expected
        )


@pytest.mark.parametrize("is_causal", [False, True])
def test_keys_left_out_have_no_influence(is_causal):
    """Blocks of them at the start, within and at the end: no NaN, whatever they hold, 0 where there is no key."""
    args = operands(1, n=45, scaled=True, grad=False)
    mask = torch.ones(1, 45, dtype=torch.bool)
    mask[:, :9] = mask[:, 16:32] = mask[:, 35] = mask[:, 40:] = False
    results = []
    for fill in (0.0, torch.nan, INF):
        filled = [x.clone() for x in args]
        for i in (1, 2, 4, 6):
            filled[i].masked_fill_(~mask if i == 6 else ~mask[..., None], 0.0 if i == 6 else fill)
        filled = [x.requires_grad_() for x in filled]
        y = windowed_linear_attention(*filled, mask, window=8, is_causal=is_causal)
        results.append([y, *torch.autograd.grad(y, filled, torch.ones_like(y))])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))
    y, _, dk, dv, _, dphi_k, _, dlog_k = results[0]
    if is_causal:
        assert not y[:, :9].any()
    assert all(not x[~mask].any() for x in (dk, dv, dphi_k, dlog_k))
    exact = [x.detach().double() for x in args]
    exact[6] = exact[6].masked_fill(~mask, -INF)
    assert_close(y, naive(*exact, window=8, is_causal=is_causal), torch.float32)
    # without exponents too
    y = windowed_linear_attention(*args[:5], key_mask=mask, window=8, is_causal=is_causal)
    none = exact[6].clamp_max(0).nan_to_num(neginf=-INF).masked_fill(mask, 0)
    assert_close(y, naive(*exact[:5], torch.zeros_like(none), none, window=8, is_causal=is_causal), torch.float32)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [1e30, -1e4, torch.nan, INF])
def test_nothing_looks_ahead(dtype, scaled, bad):
    """Whatever comes later, earlier outputs keep every bit; and so do earlier gradients of q, if it is finite."""
    args = operands(1, n=45, scaled=scaled, dtype=dtype)
    settings = {"window": 8, "is_causal": True}
    y, dq = with_gradients(windowed_linear_attention, args, torch.ones_like(args[2]), **settings)[:2]
    for cut in (1, 7, 8, 20, 24, 44):
        changed = [x.detach().clone() for x in args]
        for x in changed:
            x[:, cut:] = bad
        assert torch.equal(windowed_linear_attention(*changed, **settings)[:, :cut], y[:, :cut])
        if bad == bad and abs(bad) < INF:
            again = windowed_linear_attention(changed[0].requires_grad_(), *changed[1:], **settings)
            (changed_dq,) = torch.autograd.grad(again[:, :cut].sum(), changed[:1])
            assert torch.equal(changed_dq[:, :cut], dq[:, :cut])
        values = args[2].detach().clone()
        values[:, cut:, 1] = bad
        after = windowed_linear_attention(*args[:2], values, *args[3:], **settings)
        assert torch.equal(after[..., 0], y[..., 0])
        if bad != bad:
            assert after[:, cut:, 1].isnan().all() or scaled


@pytest.mark.parametrize("is_causal", [False, True])
def test_exponents_and_logits_far_apart(is_causal):
    """Logits of a thousand beside exponents of a thousand, in either order, as softmax would have them."""
    args = operands(1, n=60, scaled=True, dtype=torch.float32, grad=False)
    args[0] = args[0] * 300
    args[5] = torch.linspace(-1000, 1000, 60)[None].flip(-1)
    args[6] = torch.linspace(-1000, 1000, 60)[None]
    args = [x.requires_grad_() for x in args]
    exact = [x.detach().double().requires_grad_() for x in args]
    settings = {"window": 8, "is_causal": is_causal}
    ours = with_gradients(windowed_linear_attention, args, torch.ones_like(args[2]), **settings)
    theirs = with_gradients(naive, exact, torch.ones_like(exact[2]), **settings)
    for a, b in zip(ours, theirs, strict=True):  # exponents have 12 bits behind the point
        assert (a - b).abs().max() < 1e-2 * max(1.0, b.abs().max())


def test_features_without_a_common_entry():
    """Rows that share no feature with a far key attend to their window alone, and the features get no gradient."""
    args = operands(1, n=20, dtype=torch.float64, grad=False)
    args[3][..., 2:] = 0
    args[4][..., :2] = 0
    args = [x.requires_grad_() for x in args]
    for is_causal in (False, True):
        y, *grads = with_gradients(
            windowed_linear_attention, args, torch.ones_like(args[2]), window=3, is_causal=is_causal
        )
        assert_close(y, naive(*args, window=3, is_causal=is_causal))
        assert not grads[3].any()


@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 5, 3), (0, 3)])
@pytest.mark.parametrize("scaled", [False, True])
def test_empty(shape, scaled):
    q, k, phi_q, phi_k = (torch.empty(shape, requires_grad=True) for _ in range(4))
    v = torch.empty(*shape[:-1], 2, requires_grad=True)
    logs = [torch.empty(shape[:-1], requires_grad=True) for _ in range(2 * scaled)]
    args = [q, k, v, phi_q, phi_k, *logs]
    for function in (windowed_linear_attention, plain):
        y = function(*args, window=2)
        assert y.shape == v.shape
        grads = torch.autograd.grad(y.sum(), args, allow_unused=True, materialize_grads=True)
        assert [g.shape for g in grads] == [x.shape for x in args]


def test_strides():
    """Heads behind positions, every second feature, a value shared by all heads, and a stride-0 gradient."""
    q, k, v, phi_q, phi_k = operands(2, 50, 3, n=5, D=8, E=4, m=8, grad=False)
    heads = [x[..., 0, ::2].transpose(1, 2).requires_grad_() for x in (q, k, phi_q, phi_k)]
    v = v[:, :, :1, 0].transpose(1, 2).expand(-1, 3, -1, -1).requires_grad_()
    args = [*heads[:2], v, *heads[2:]]
    y = windowed_linear_attention(*args, window=8, is_causal=True)
    exact = [x.detach().double().requires_grad_() for x in args]
    expected = naive(*exact, window=8, is_causal=True)
    assert_close(y, expected, torch.float32)
    grads = zip(torch.autograd.grad(y.sum(), args), torch.autograd.grad(expected.sum(), exact), strict=True)
    assert all((ours - theirs).abs().max() < 1e-5 * expected.abs().max() for ours, theirs in grads)


@pytest.mark.parametrize(
    ("scaled", "is_causal"),
    [
        (True, True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(True, False), (False, True), (False, False)]),
    ],
)
def test_derivatives_of_the_reference(scaled, is_causal, monkeypatch):
    monkeypatch.setattr(blocked, "_POSITIONS", 4)
    args = operands(1, n=7, D=1, E=1, m=2, dtype=torch.float64)
    if scaled:
        args += [x.double().clamp(-2, 2).detach().requires_grad_() for x in operands(1, n=7, scaled=True)[5:]]

    def function(*args):
        return plain(*args, window=2, is_causal=is_causal)

    assert torch.autograd.gradcheck(function, args, check_forward_ad=True, fast_mode=scaled)

    def operator(*args):
        return windowed_linear_attention(*args, window=2, is_causal=is_causal)

    assert torch.autograd.gradcheck(operator, args)
    if not scaled:
        assert torch.autograd.gradgradcheck(operator, args)


def test_forward_derivatives():
    args = operands(1, n=30, scaled=True, grad=False)
    tangents = [torch.randn(x.shape, generator=torch.Generator().manual_seed(0)) for x in args]

    def derivative(function, dtype):
        given = [tuple(x.to(dtype) for x in xs) for xs in (args, tangents)]
        return torch.func.jvp(lambda *args: function(*args, window=4), *given)[1]

    assert_close(derivative(windowed_linear_attention, torch.float32), derivative(naive, torch.float64), torch.float32)


@pytest.mark.parametrize("is_causal", [False, True])
def test_vmap(is_causal):
    """Mapped over some operands, and over gradients."""
    args = operands(2, 3, n=20, scaled=True, grad=False)

    def function(*args):
        return windowed_linear_attention(*args, window=4, is_causal=is_causal)

    dims = (1, None, 1, None, 1, None, 1)
    mapped = [x[:, 0] if dim is None else x for x, dim in zip(args, dims, strict=True)]
    together = torch.func.vmap(function, in_dims=dims, out_dims=1)(*mapped)

    def entry(i):
        return [x if dim is None else x[:, i] for x, dim in zip(mapped, dims, strict=True)]

    assert_close(together, torch.stack([function(*entry(i)) for i in range(3)], 1))

    def loss(*args):
        return function(*args).square().sum()

    for given in (5, 7):
        gradient = torch.func.grad(loss, argnums=tuple(range(given)))
        together = torch.func.vmap(gradient, in_dims=dims[:given])(*mapped[:given])
        apart = zip(*(gradient(*entry(i)[:given]) for i in range(3)), strict=True)
        for ours, theirs in zip(together, apart, strict=True):
            assert_close(ours, torch.stack(theirs))


@pytest.mark.parametrize("name", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_operators_pass_opcheck(name):
    args = [*operands(2, n=7, dtype=torch.float64), None, None, 2, True]
    if name == "forward":
        torch.library.opcheck(ops.windowed_linear_attention.default, tuple(args))
        return
    y, log_den = ops.windowed_linear_attention(*(x.detach() if isinstance(x, torch.Tensor) else x for x in args))
    grad = torch.ones_like(y).requires_grad_()
    # y and log_den get no gradient by design, so they are not asked for one
    torch.library.opcheck(ops.windowed_linear_attention_backward.default, (grad, *args[:7], y, log_den, *args[7:]))


def test_compiled():
    def check(compiled, n):
        against_naive(compiled, operands(2, n=n, scaled=True), window=4, is_causal=True)

    assert_one_graph_for_every_length(windowed_linear_attention, check)


def test_autocast():
    """Queries, values and features are cast, exponents are not; and sums stay in float32."""
    args = operands(1, n=70, scaled=True, grad=False)
    args[6] = (torch.arange(70.0)[None] / 16).add(256)  # bfloat16 would round them to multiples of 2
    args[5] = -args[6]
    exact = naive(*(x.double() for x in args), window=8)
    with torch.autocast("cpu", torch.bfloat16):
        y = windowed_linear_attention(*args, window=8)
    assert y.dtype == torch.bfloat16
    assert_close(y, exact)
    with torch.autocast("cpu", torch.bfloat16):
        y = plain(*args, window=8)
    assert y.dtype == torch.float32
    assert_close(y, exact)


def test_functional_form():
    """Dtypes are promoted, and exponents and the mask broadcast over heads."""
    q, k, v, phi_q, phi_k, log_q, log_k = operands(2, 3, n=20, scaled=True, grad=False)
    mask = torch.rand(2, 1, 20, generator=torch.Generator().manual_seed(0)) < 0.7
    half = [x.bfloat16() for x in (q, k, v)]
    y = functional(*half, phi_q, phi_k, log_q, log_k[:, :1], mask, window=4, is_causal=True)
    assert y.dtype == torch.bfloat16
    exact = [x.double() for x in (*half, phi_q, phi_k, log_q)]
    log_k = log_k[:, :1].double().masked_fill(~mask, -INF).expand_as(log_q)
    assert_close(y, naive(*exact, log_k, window=4, is_causal=True))
    with pytest.raises(
        ShapeError, match=r"key_mask of shape \(2, 20\) must broadcast to \(\*batch, n\) = \(2, 3, 20\)"
    ):
        functional(*half, phi_q, phi_k, key_mask=mask[:, 0])
    with pytest.raises(ShapeError, match="window=0 must be at least 1"):
        functional(*half, phi_q, phi_k, window=0)


A = torch.ones(2, 5, 3)
B = A[..., 0]
WRONG = [
    ((B[0], B[0], B[0], B[0], B[0]), {}, ValueError, r"takes q and k of shape \(\*batch, n, D\), v of"),
    ((A, A[:, :4], A, A, A), {}, ValueError, r"not q \(2, 5, 3\), k \(2, 4, 3\), v .*: expand"),
    ((A, A, A[:1], A, A), {}, ValueError, "expand the batch dimensions"),
    ((A, A, A, A, A[..., 1:]), {}, ValueError, "expand the batch dimensions"),
    ((A, A.double(), A, A, A), {}, TypeError, r"one floating dtype, not q torch.float32, k torch.float64, .*: cast"),
    ((A.int(),) * 5, {}, TypeError, "one floating dtype"),
    ((A, A.to("meta"), A, A, A), {}, ValueError, "on one device, not q on cpu, k on meta, v on cpu, .*: move"),
    ((A, A, A, A, A, B[0]), {}, ValueError, r"log_q .* shape \(\*batch, n\) = \(2, 5\), not \(5,\): expand"),
    ((A, A, A, A, A, None, B.bool()), {}, TypeError, "log_k .* floating, not torch.bool: cast"),
    ((A, A, A, A, A, None, None, B), {}, TypeError, "key_mask .* boolean, True where a key takes part, not torch.flo"),
    ((A, A, A, A, A), {"window": 0}, ValueError, "window .* at least 1, not 0"),
]


@pytest.mark.parametrize(("args", "settings", "error", "message"), WRONG)
def test_bad_operands(args, settings, error, message):
    with pytest.raises(error, match=message):
        windowed_linear_attention(*args, **{"window": 2} | settings)


def test_memory_is_linear_in_length():
    settings = {"window": 64, "is_causal": True}
    assert_memory_is_linear(lambda q, v: windowed_linear_attention(0 * q, 0 * q, v, q, q, **settings))
