"""Causal linear attention, in torch and in Triton, against all n^2 scores in float64."""

from functools import partial

import pytest
import torch
from attention_kernels import (
    assert_memory_is_linear,
    assert_one_graph_for_every_length,
    second_derivatives,
)
from covering import half_of
from panther.kernels import causal_linear_attention, reference
from panther.kernels.ops import attention as planned
from panther.kernels.reference import attention as chunked
from tolerances import assert_close
from torch.autograd import forward_ad

# Triton 3.6 interprets a loop's bounds in a way that numpy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

INF = torch.inf
ops = torch.ops.panther
on_cpu = torch.device("cpu")


def naive(q, k, v, log_scale=None):
    """The definition: all scores, the scale of each row its largest exponent so far."""
    scores = (q @ k.mT).tril()
    if log_scale is not None:
        seen = log_scale.detach().cummax(-1).values
        shift = torch.where(seen == -INF, 0.0, seen)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores * (log_scale[..., None, :] - shift[..., None]).masked_fill(later, -INF).exp()
    den = scores.sum(-1, keepdim=True)
    return torch.where(den == 0, 0.0, scores @ v / torch.where(den == 0, 1.0, den))


def operands(*batch, n, D, E, scaled=False, dtype=torch.float32, device=on_cpu, grad=True):
    """Positive features; exponents over 300 and more, with masked keys at the start and within."""
    generator = torch.Generator().manual_seed(n + D + 7 * E)
    q, k = (0.1 + torch.rand(*batch, n, D, generator=generator) for _ in "qk")
    v = torch.randn(*batch, n, E, generator=generator)
    result = [x.to(dtype) for x in (q, k, v)]
    if scaled:
        c = 2 * torch.randn(*batch, n, generator=generator)
        if n > 4:
            c[..., n // 3 :] += 300
            c[..., [0, 1, n // 2]] = -INF
        result.append(c.double() if dtype is torch.float64 else c)
    return [x.to(device).requires_grad_(grad) for x in result]


def with_gradients(function, args, grad):
    y = function(*args)
    return [y, *torch.autograd.grad(y, args, grad)]


def against_naive(function, args, dtype=None):
    exact = [x.detach().double().requires_grad_() for x in args]
    grad = torch.randn(args[2].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grad = grad.to(args[2].dtype).to(args[2].device)
    results = with_gradients(function, args, grad)
    for ours, theirs in zip(results, with_gradients(naive, exact, grad.double()), strict=True):
        assert_close(ours, theirs, dtype or args[0].dtype)
    assert [x.dtype for x in results] == [args[2].dtype, *(x.dtype for x in args)]


# Chunks have 64 rows, and more where D E is large: (320, 20, 70) has five, a scan and a tile cut in each dimension.
SHAPES = [
    ((), 7, 2, 3),
    ((2, 3), 3, 5, 1),
    ((1,), 64, 16, 16),
    ((2,), 65, 7, 20),
    ((1,), 320, 20, 70),
    ((1,), 200, 130, 33),
]


@pytest.mark.parametrize(("shape", "scaled"), half_of(SHAPES, (False, True)))
def test_kernel_and_gradients(device, shape, scaled):
    batch, n, D, E = shape
    against_naive(causal_linear_attention, operands(*batch, n=n, D=D, E=E, scaled=scaled, device=device))


def test_a_plan_serves_other_addresses_and_no_other_operands(device, monkeypatch):
    for scaled in (False, True):
        args = operands(2, n=70, D=4, E=3, scaled=scaled, device=device)
        against_naive(causal_linear_attention, args)
    plans = (planned._forward_plans, planned._backward_plans)
    assert [len(cache) for cache in plans] == [2, 2]
    with monkeypatch.context() as patch:
        patch.setattr(planned, "_check", None)  # A planned call checks nothing.
        against_naive(causal_linear_attention, [x.detach().clone().requires_grad_() for x in args])
    assert [len(cache) for cache in plans] == [2, 2]
    with pytest.raises(ValueError, match="takes q and k of shape"):
        causal_linear_attention(args[0], args[1][:, :-1], *args[2:])
    strided = [x.detach().repeat_interleave(2, -1)[..., ::2].requires_grad_() for x in args]
    against_naive(causal_linear_attention, strided)
    assert [len(cache) for cache in plans] == [3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("batch", "n", "D", "E"), [*SHAPES, ((3,), 0, 2, 3), ((0,), 5, 2, 3), ((2,), 4200, 3, 2)])
def test_without_derivatives(batch, n, D, E, dtype):
    """On a CPU a form of its own, from strided operands too: one entry of the batch after another."""
    q, k, v = operands(*batch, n=n, D=D, E=E, dtype=dtype, grad=False)
    y = causal_linear_attention(q, k, v)
    assert y.dtype is dtype
    assert_close(y, naive(q.double(), k.double(), v.double()), dtype)
    strided = torch.cat((v, v), -1).mT.contiguous().mT[..., :E]
    assert torch.equal(causal_linear_attention(q, k, strided), y)


@pytest.mark.parametrize("bad", [torch.nan, INF, 3e38])
@pytest.mark.parametrize("n", [150, 4200])
def test_without_derivatives_nothing_looks_ahead(n, bad):
    q, k, v = operands(2, n=n, D=5, E=6, grad=False)
    output = causal_linear_attention(q, k, v)
    for cut in (1, 70, 128, n - 1):
        values = v.clone()
        values[0, cut:, 3] = bad
        after = causal_linear_attention(q, k, values)
        assert torch.equal(after[:, :cut], output[:, :cut])
        if bad != 3e38:
            assert not after[0, cut:, 3].isfinite().any()
        assert torch.equal(after[0, cut:, 4:], output[0, cut:, 4:])
        assert torch.equal(after[1], output[1])
        for changed in ((q.clone(), k, v), (q, k.clone(), v)):
            changed[0 if changed[0] is not q else 1][:, cut:] = bad
            assert torch.equal(causal_linear_attention(*changed)[:, :cut], output[:, :cut])
    k[:, : n // 2, 2:] = 0  # nothing in common with any key so far
    q[:, : n // 2, :2] = 0
    assert not causal_linear_attention(q, k, v)[:, : n // 2].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scaled", [False, True])
def test_kernel_in_half_precision(device, dtype, scaled):
    against_naive(causal_linear_attention, operands(1, n=130, D=20, E=7, scaled=scaled, dtype=dtype, device=device))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("batch", "n", "D", "E"), [*SHAPES, ((), 1300, 4, 3)])
def test_reference_and_gradients(batch, n, D, E, scaled, dtype):
    args = operands(*batch, n=n, D=D, E=E, scaled=scaled, dtype=dtype)
    against_naive(reference.causal_linear_attention, args)
    if dtype.itemsize > 2 or n > 64:  # y, rounded, is part of a difference that cancels in the gradients of few rows
        against_naive(lambda *args: ops.causal_linear_attention(*args, *[None] * (4 - len(args)))[0], args)


@pytest.mark.parametrize("scaled", [False, True])
def test_one_position_gets_its_own_value(device, scaled):
    q, k, v, *c = operands(2, n=1, D=3, E=4, scaled=scaled, device=device)
    y = causal_linear_attention(q, k, v, *c)
    assert_close(y, v)
    dq, dk, dv = torch.autograd.grad(y.sum(), (q, k, v))
    assert_close(dv, torch.ones_like(dv))
    assert dq.abs().max() < 1e-6
    assert dk.abs().max() < 1e-6


def test_one_positive_feature_is_a_weighted_mean(device):
    """The query cancels, so it has no gradient; nor has one feature of the keys more than the mean's."""
    q, k, v = operands(1, n=70, D=1, E=1, device=device)
    y = causal_linear_attention(q, k, v)
    assert_close(y, (k * v).cumsum(1) / k.cumsum(1), torch.float32)
    dq, dv = torch.autograd.grad(y.sum(), (q, v))
    assert dq.abs().max() < 1e-5
    assert_close(dv, k * (1 / k.cumsum(1)).flip(1).cumsum(1).flip(1), torch.float32)


@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 5, 3), (0, 3)])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kernel", [False, True])
def test_empty(device, shape, scaled, kernel):
    function = causal_linear_attention if kernel else reference.causal_linear_attention
    q, k = (torch.empty(shape, device=device, requires_grad=True) for _ in "qk")
    v = torch.empty(*shape[:-1], 2, device=device, requires_grad=True)
    c = [torch.empty(shape[:-1], device=device, requires_grad=True)] if scaled else []
    y = function(q, k, v, *c)
    assert y.shape == v.shape
    if kernel or not scaled:
        assert [g.shape for g in torch.autograd.grad(y.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("width", [0, 257])
def test_widths_the_kernel_does_not_take(device, width, monkeypatch):
    q = torch.rand(3, width, device=device)
    v = torch.rand(3, 2, device=device)
    with pytest.raises(RuntimeError, match=f"takes 1 to 256 features and as many values, not D={width} and E=2"):
        causal_linear_attention(q, q, v)
    with pytest.raises(RuntimeError, match=r"takes float32, float16 and bfloat16, not torch\.float64"):
        causal_linear_attention(v.double(), v.double(), v.double())
    monkeypatch.setenv("PANTHER_KERNELS", "auto")
    assert_close(causal_linear_attention(q, q, v), naive(q.double(), q.double(), v.double()), torch.float32)


@pytest.mark.parametrize("kernel", [False, True])
def test_strides(device, kernel):
    """Heads behind positions, every second feature, a value shared by all heads, and a stride-0 gradient."""
    function = causal_linear_attention if kernel else reference.causal_linear_attention
    q, k, v = operands(2, 70, 3, n=5, D=8, E=4, device=device, grad=False)[:3]
    q = q[..., 0, ::2].transpose(1, 2).requires_grad_()
    k = k[..., 0, 1::2].transpose(1, 2).requires_grad_()
    v = v[:, :, :1, 0].transpose(1, 2).expand(-1, 3, -1, -1).requires_grad_()
    c = torch.zeros(70, device=device).expand(2, 3, 70)
    y = function(q, k, v, c)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = naive(*exact)
    assert_close(y, expected, torch.float32)
    for ours, theirs in zip(
        torch.autograd.grad(y.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), exact), strict=True
    ):
        # dq and dk are differences that cancel, here to exactly 0 in sum
        assert (ours - theirs).abs().max() < 1e-5 * expected.abs().max()


class Poisoned:
    """Torch, whose new memory is full of NaN."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *args, **kwargs):
        return torch.full(args[0] if isinstance(args[0], tuple | torch.Size) else args, torch.nan, **kwargs)

    def empty_like(self, x):
        return torch.full_like(x, torch.nan)


def poison_memory(module, monkeypatch):
    """Let a module of kernels take memory full of NaN, so that a number that is not written is seen."""
    monkeypatch.setattr(module, "torch", Poisoned())


@pytest.mark.parametrize("scaled", [False, True])
def test_every_number_is_written(device, scaled, monkeypatch):
    from panther.kernels._triton import attention

    poison_memory(attention, monkeypatch)
    against_naive(causal_linear_attention, operands(1, n=150, D=18, E=5, scaled=scaled, device=device))


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize(
    ("kernel", "dtype", "scaled"), half_of((False, True), (torch.float32, torch.bfloat16), (False, True))
)
def test_nothing_looks_ahead(device, kernel, dtype, scaled):
    """Whatever comes later, however large, earlier outputs keep every bit; and so do earlier gradients of q."""
    function = causal_linear_attention if kernel else reference.causal_linear_attention
    args = operands(1, n=150, D=5, E=3, scaled=scaled, dtype=dtype, device=device)
    y, dq = with_gradients(function, args, torch.ones_like(args[2]))[:2]
    for cut, fill in ((1, 1e30), (63, -1e4), (64, 1e30), (101, 1e30), (140, 0.0)):
        changed = [x.detach().clone() for x in args]
        for x in changed:
            x[:, cut:] = fill
        assert torch.equal(function(*changed)[:, :cut], y[:, :cut])
    (changed_dq,) = torch.autograd.grad(function(changed[0].requires_grad_(), *changed[1:])[:, :cut].sum(), changed[:1])
    assert torch.equal(changed_dq[:, :cut], dq[:, :cut])


@pytest.mark.parametrize("kernel", [False, True])
def test_keys_left_out_have_no_influence(device, kernel):
    """All of the first chunks left out, or of one within: 0 so far, no NaN, whatever the keys hold."""
    function = causal_linear_attention if kernel else reference.causal_linear_attention
    q, k, v, c = operands(1, n=210, D=4, E=3, scaled=True, device=device, grad=False)
    out = torch.zeros(210, dtype=torch.bool, device=device)
    out[:70] = out[128:192] = out[200] = True
    c[:, out], c[:, ~out] = -INF, -300.0
    kept = [x.clone() for x in (q, k, v, c)]
    for fill in (0.0, torch.nan):
        k[:, out] = v[:, out] = fill
        args = [x.clone().requires_grad_() for x in (q, k, v, c)]
        y, *grads = with_gradients(function, args, torch.ones_like(v))
        if fill == 0.0:
            first = [y, *grads]
        assert all(torch.equal(a, b) for a, b in zip(first, [y, *grads], strict=True))
    assert not y[:, :70].any()
    assert not grads[0][:, :70].any()
    assert all(not g[:, out].any() for g in grads[1:])
    assert_close(y, naive(*(x.double() for x in kept)), torch.float32)


@pytest.mark.parametrize("kernel", [False, True])
def test_a_denominator_of_zero(device, kernel):
    """Rows with nothing in common with any key so far, as ReLU features have, get 0 and no gradient."""
    function = causal_linear_attention if kernel else reference.causal_linear_attention
    q, k, v = operands(1, n=70, D=4, E=3, device=device, grad=False)
    k[:, :66, 2:] = 0
    q[:, 64:66, :2] = 0
    args = [x.requires_grad_() for x in (q, k, v)]
    y, *grads = with_gradients(function, args, torch.ones_like(v))
    assert not y[:, 64:66].any()
    assert not grads[0][:, 64:66].any()
    exact = [x.detach().double().requires_grad_() for x in args]
    for ours, theirs in zip([y, *grads], with_gradients(naive, exact, torch.ones_like(exact[2])), strict=True):
        assert (ours - theirs).abs().max() < 1e-5


def test_exponents_cover_what_features_cannot(device):
    """Half precision, exponents from -1000 to 1000: the scaled features would be infinite, or all be 0."""
    q, k, v, _ = operands(1, n=100, D=8, E=4, scaled=True, dtype=torch.float16, device=device)
    c = torch.linspace(-1000, 1000, 100, device=device)[None].requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, c)]
    ours = with_gradients(causal_linear_attention, [q, k, v, c], torch.ones_like(v))
    theirs = with_gradients(naive, exact, torch.ones_like(exact[2]))
    assert_close(ours[0], theirs[0])
    assert_close(ours[3], theirs[3], torch.float16)
    assert all(g.isfinite().all() for g in ours)  # the others are small beside what they are differences of
    down = c.detach().flip(-1)
    assert_close(causal_linear_attention(q, k, v, down), naive(*(x.double() for x in (q, k, v, down))))


@pytest.mark.parametrize("scaled", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_kernel_is_deterministic(device, scaled):
    args = operands(2, n=70, D=9, E=5, scaled=scaled, device=device)
    first, second = (with_gradients(causal_linear_attention, args, torch.ones_like(args[2])) for _ in "ab")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("scaled", [False, True])
def test_derivatives_of_the_reference(scaled, monkeypatch):
    monkeypatch.setattr(chunked, "_CHUNK", 3)
    monkeypatch.setattr(chunked, "_CHUNKS", 2)
    args = operands(1, n=7, D=2, E=2, scaled=scaled, dtype=torch.float64)
    if scaled:  # finite differences of -inf are not
        args[3] = args[3].detach().clamp_min(-3).sub(300 * (args[3].detach() > 200)).requires_grad_()
    check = partial(torch.autograd.gradcheck, reference.causal_linear_attention, args)
    assert check(check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert torch.autograd.gradgradcheck(reference.causal_linear_attention, args, fast_mode=True)


@pytest.mark.parametrize("scaled", [False, True])
def test_second_derivatives_on_the_kernels_path(device, scaled):
    args = operands(1, n=70, D=4, E=3, scaled=scaled, device=device)
    exact = [x.detach().double().requires_grad_() for x in args]
    grad = torch.randn(1, 70, 3, generator=torch.Generator().manual_seed(0)).to(device)

    computed = second_derivatives(causal_linear_attention, args, grad.clone())
    for ours, theirs in zip(computed, second_derivatives(naive, exact, grad.double()), strict=True):
        assert_close(ours, theirs, torch.float32)


def test_forward_derivatives_on_the_kernels_path(device):
    args = operands(1, n=70, D=4, E=3, scaled=True, device=device, grad=False)
    tangents = [torch.randn_like(x) for x in args]
    exact = torch.func.jvp(naive, tuple(x.double() for x in args), tuple(t.double() for t in tangents))[1]
    assert_close(torch.func.jvp(causal_linear_attention, tuple(args), tuple(tangents))[1], exact, torch.float32)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(args, tangents, strict=True)]
        tangent = forward_ad.unpack_dual(causal_linear_attention(*duals)).tangent
    assert_close(tangent, exact, torch.float32)


@pytest.mark.parametrize("kernel", [False, True])
def test_vmap(device, kernel):
    """Mapped over some operands, and over gradients."""
    function = causal_linear_attention if kernel else reference.causal_linear_attention
    q, k, v, c = operands(2, 3, n=66, D=4, E=3, scaled=True, device=device, grad=False)
    together = torch.func.vmap(function, in_dims=(1, None, 1, None), out_dims=1)(q, k[:, 0], v, c[:, 0])
    apart = torch.stack([function(q[:, i], k[:, 0], v[:, i], c[:, 0]) for i in range(3)], 1)
    assert_close(together, apart)

    def loss(q, k, v):
        return function(q, k, v).square().sum()

    apart = torch.stack([torch.func.grad(loss)(q[:, i], k[:, i], v[:, 0]) for i in range(3)])
    assert_close(torch.func.vmap(torch.func.grad(loss), in_dims=(1, 1, None))(q, k, v[:, 0]), apart)


def check_operator(name, args):
    args = [*args, None][:4]
    if name == "forward":
        torch.library.opcheck(ops.causal_linear_attention.default, tuple(args))
        return
    fixed = [None if x is None else x.detach() for x in args]
    y, den = ops.causal_linear_attention(*fixed)
    grad = torch.ones_like(y).requires_grad_()
    # y and den get no gradient by design, so they are not asked for one
    torch.library.opcheck(ops.causal_linear_attention_backward.default, (grad, *args, y, den))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_operators_pass_opcheck(device, name):
    check_operator(name, operands(2, n=5, D=4, E=3, scaled=True, device=device))


@pytest.mark.parametrize("name", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_operators_pass_opcheck_in_torch(name):
    check_operator(name, operands(2, n=5, D=4, E=3, dtype=torch.float64))


def check_compiled(device):
    def check(compiled, n):
        against_naive(compiled, operands(2, n=n, D=4, E=3, scaled=True, device=device))

    assert_one_graph_for_every_length(causal_linear_attention, check)


def test_compiled(device):
    check_compiled(device)


def test_compiled_in_torch():
    check_compiled(on_cpu)


def test_autocast(device):
    """Features and values are cast, exponents are not; and sums stay in float32."""
    q, k, v, _ = operands(1, n=70, D=4, E=3, scaled=True, device=device, grad=False)
    c = (torch.arange(70.0, device=device)[None] / 16).add(256)  # bfloat16 would round them to multiples of 2
    exact = naive(*(x.double() for x in (q, k, v, c)))
    for function in (causal_linear_attention, torch.compile(causal_linear_attention, fullgraph=True, backend="eager")):
        with torch.autocast(device.type, torch.bfloat16):
            y = function(q, k, v, c)
        assert y.dtype == torch.bfloat16
        assert_close(y, exact)
    with torch.autocast("cpu", torch.bfloat16):
        y = reference.causal_linear_attention(q.cpu(), k.cpu(), v.cpu(), c.cpu())
    assert y.dtype == torch.float32
    assert_close(y, exact.cpu())


def test_long_half_precision_sums_do_not_overflow(device):
    """Scores of 1e5 and states beyond them, above what float16 holds."""
    q, k, v = operands(1, n=140, D=16, E=16, dtype=torch.float16, device=device)
    q, k = (x.detach().mul(64).requires_grad_() for x in (q, k))
    against_naive(causal_linear_attention, [q, k, v])


A = torch.ones(2, 5, 3)
WRONG = [
    ((A[0, 0], A[0, 0], A[0, 0]), ValueError, r"q and k of shape \(\*batch, n, D\) and v of \(\*batch, n, E\)"),
    ((A, A[:, :4], A), ValueError, r"not \(2, 5, 3\), \(2, 4, 3\) and \(2, 5, 3\): expand"),
    ((A, A, A[:1]), ValueError, "expand the batch dimensions"),
    ((A, A.double(), A), TypeError, "one floating dtype, not torch.float32, torch.float64 and torch.float32: cast"),
    ((A.int(), A.int(), A.int()), TypeError, "one floating dtype"),
    ((A, A.to("meta"), A), ValueError, "on one device, not q on cpu, k on meta, v on cpu: move"),
    ((A, A, A, A[0, :, 0]), ValueError, r"log_scale .* shape \(\*batch, n\) = \(2, 5\), not \(5,\): expand"),
    ((A, A, A, A[..., 0].bool()), TypeError, "log_scale .* floating, not torch.bool: cast"),
    ((A, A, A, A[..., 0].to("meta")), ValueError, "on one device, not q on cpu, .* log_scale on meta: move"),
]


@pytest.mark.parametrize(("args", "error", "message"), WRONG)
def test_bad_operands(args, error, message):
    with pytest.raises(error, match=message):
        causal_linear_attention(*args)


def test_memory_is_linear_in_length():
    assert_memory_is_linear(lambda q, v: reference.causal_linear_attention(q, q, v))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # by numpy, which interprets
@pytest.mark.parametrize(("kernel", "scaled", "bad"), half_of((False, True), (False, True), (torch.nan, INF)))
def test_what_is_not_finite_moves_nothing_before_it(device, kernel, scaled, bad):
    """Nor anything at all where it is left out; and what comes after it is not finite."""
    function = causal_linear_attention if kernel else reference.causal_linear_attention
    q, k, v, *c = operands(1, n=130, D=5, E=6, scaled=scaled, device=device, grad=False)
    c = [x.nan_to_num(neginf=0.0) for x in c]
    output = function(q, k, v, *c)
    for cut in (1, 70, 128):
        values = v.clone()
        values[:, cut:, 3] = bad
        after = function(q, k, values, *c)
        assert torch.equal(after[:, :cut], output[:, :cut])
        assert not after[:, cut:, 3].isfinite().any()
        assert torch.equal(after[:, cut:, 4:], output[:, cut:, 4:])
        for changed in ((q.clone(), k, v), (q, k.clone(), v)):
            changed[0 if changed[0] is not q else 1][:, cut:] = bad
            assert torch.equal(function(*changed, *c)[:, :cut], output[:, :cut])
        if scaled:
            values[:, cut:] = bad
            left_out = c[0].clone()
            left_out[:, cut:] = -INF
            assert torch.equal(function(q, k, values, left_out), function(q, k, v, left_out))


def continued(q, k, v, log_scale, chunks):
    """Attention in chunks. Each chunk continues the state of the chunk before."""
    state = q.new_zeros(*q.shape[:-2], q.shape[-1], v.shape[-1] + 1)
    units = None if log_scale is None else q.new_full((*q.shape[:-2], 1), -INF)
    scales = [None] * 99 if log_scale is None else log_scale.split(chunks, -1)
    outputs = []
    for *parts, scale in zip(*(x.split(chunks, -2) for x in (q, k, v)), scales, strict=False):
        y, state, units = chunked.continued_attention(*parts, scale, state, units)
        outputs.append(y)
    return torch.cat(outputs, -2), state, units


@pytest.mark.parametrize("with_scale", [False, True])
@pytest.mark.parametrize("chunks", [1, 70, [3, 0, 1, 130, 16]])
def test_chunks_continue_a_state(chunks, with_scale):
    torch.manual_seed(0)
    q, k = torch.rand(2, 2, 3, 150, 5, dtype=torch.float64).unbind()
    v = torch.randn(2, 3, 150, 4, dtype=torch.float64)
    log_scale = None
    if with_scale:
        log_scale = 300 * torch.randn(2, 3, 150, dtype=torch.float64)
        log_scale[0, :, :7] = log_scale[:, 1, 40:43] = -INF
    if chunks == 1:
        q, k, v = (x[..., :40, :] for x in (q, k, v))
        log_scale = None if log_scale is None else log_scale[..., :40]
    y, state, units = continued(q, k, v, log_scale, chunks)
    assert_close(y, chunked.causal_linear_attention(q, k, v, log_scale))
    empty, no_units = torch.zeros_like(state), None if units is None else torch.full_like(units, -INF)
    absorbed, absorbed_units = chunked.absorb_keys(k, v, log_scale, empty, no_units)
    assert_close(absorbed, state)
    assert units is None or torch.equal(absorbed_units, units)


@pytest.mark.parametrize("with_scale", [False, True])
@pytest.mark.parametrize("chunks", [1, [3, 2]])
def test_derivatives_through_a_state(chunks, with_scale):
    torch.manual_seed(0)
    leaves = [torch.rand(5, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    if with_scale:
        leaves.append(torch.randn(5, dtype=torch.float64, requires_grad=True))

    def function(q, k, v, log_scale=None):
        return continued(q, k, v, log_scale, chunks)[0]

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("chunks", [1, 5])
def test_a_state_after_masked_and_infinite_operands(chunks):
    """A masked key has no influence, and a value that is not finite only on its column of later rows."""
    torch.manual_seed(0)
    q, k = torch.rand(2, 20, 3, dtype=torch.float64).unbind()
    v = torch.randn(20, 2, dtype=torch.float64)
    log_scale = torch.zeros(20, dtype=torch.float64)
    log_scale[4] = -INF
    expected, _, _ = continued(q, k, v, log_scale, chunks)
    k[4] = v[4] = torch.nan
    assert torch.equal(continued(q, k, v, log_scale, chunks)[0], expected)
    v[11, 1] = torch.inf
    y, _, _ = continued(q, k, v, log_scale, chunks)
    assert torch.equal(y[:11], expected[:11])
    assert_close(y[:, 0], expected[:, 0])
    assert not y[11:, 1].isfinite().any()
