"""The Triton kernels of the sketched product with sparse sketches against dense matrices in float64."""

import pytest
import torch
from folded_operands import exact, operands
from panther.kernels import sketched_matmul
from panther.kernels.ops import folded
from panther.kernels.ops._crossover import using_path
from tolerances import KERNEL_RMS, kernel_rms, rms_error

# in, out, R: size one, R that divides the features and does not, a group of places or many in a tile, several tiles of
# ranks, and R above in, above out and above both.
SIZES = [
    (1, 1, 1), (70, 130, 3), (33, 129, 33), (300, 40, 64), (130, 260, 150), (200, 330, 16), (700, 300, 4), (3, 4, 11),
    (20, 200, 100), (200, 20, 100), (128, 256, 32),
]  # fmt: skip


def on(device, sizes, dtype=torch.float32, rows=5, bias=True):
    args = operands(sizes, dtype, rows, bias, requires_grad=True)
    return [arg if arg is None else arg.detach().to(device).requires_grad_(arg.requires_grad) for arg in args]


@pytest.mark.parametrize("reduced", [0, 1 << 40])
@pytest.mark.parametrize("sizes", SIZES)
def test_values_and_inner_product(device, sizes, reduced, poison, monkeypatch):
    from panther.kernels._triton import folded as kernels

    monkeypatch.setattr(kernels, "_REDUCED_BYTES", reduced)
    rows = {1: 1, 33: 65, 32: 40}.get(sizes[2], 5)
    args = on(device, sizes, rows=rows, bias=sizes[2] != 3)
    with using_path("pair"), torch.no_grad():
        out, inner = torch.ops.panther.folded_matmul(*args, 0.25)
        assert len(folded._plans) == 1
    assert rms_error(out, exact(*args, 0.25)) < KERNEL_RMS[torch.float32]
    assert rms_error(inner, folded.folded_inner(args[0].double(), args[1].double(), args[4].double(), 0.25)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(130, 200, 20), (260, 300, 130)])
def test_half_precision(device, sizes, dtype, poison):
    args = on(device, sizes, dtype, rows=70)
    with using_path("pair"), torch.no_grad():
        assert rms_error(sketched_matmul(*args, 0.25), exact(*args, 0.25)) < kernel_rms(dtype, device)


def test_float16_is_scaled_before_it_is_rounded(device):
    x, S1, out_signs, S2, in_signs, bias = on(device, (1024, 40, 1), torch.float16)
    x, in_signs = torch.full_like(x, 100), torch.ones_like(in_signs)  # x U2 is 102,400, and float16 ends at 65,504
    args = x, S1 * 1e-2, out_signs, S2 * 1e-2, in_signs, bias, 1 / 64
    with using_path("pair"), torch.no_grad():
        assert rms_error(sketched_matmul(*args), exact(*args)) < KERNEL_RMS[torch.float16]


@pytest.mark.parametrize("frozen", [(), (0,), (1,), (3,), (5,), (0, 1), (1, 3), (0, 3)])
def test_every_gradient(device, frozen):
    args = on(device, (40, 70, 6))
    for i in frozen:
        args[i] = args[i].detach()
    wanted = [arg for arg in args if arg.requires_grad]
    upstream = torch.randn(5, 70).to(device)
    with using_path("pair"):
        ours = torch.autograd.grad(sketched_matmul(*args, 0.25), wanted, upstream)
    theirs = torch.autograd.grad(exact(*args, 0.25), wanted, upstream.double())
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.dtype is torch.float32
        assert rms_error(mine, expected) < KERNEL_RMS[torch.float32]


@pytest.mark.parametrize("path", ["pair", "joined"])
def test_double_backward_and_the_inner_product(device, path):
    args = on(device, (20, 30, 3), rows=4)
    leaves = [args[0], args[1], args[3]]

    def second(function):
        first = torch.autograd.grad(function(*args, 0.25).double().sin().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.double().square().sum() for g in first), leaves)

    def inner(function, x, S1, signs):
        return torch.autograd.grad(function(x, S1, signs).double().square().sum(), args[:2])

    with using_path(path):
        ours = second(sketched_matmul) + inner(
            lambda *_: torch.ops.panther.folded_matmul(*args, 0.25)[1], *args[:2], None
        )
    doubles = args[0].double(), args[1].double(), args[4].double()
    theirs = second(exact) + inner(lambda *operands: folded.folded_inner(*operands, 0.25), *doubles)
    for mine, expected in zip(ours, theirs, strict=True):
        assert rms_error(mine, expected) < 5 * KERNEL_RMS[torch.float32]


def test_any_strides(device):
    x, S1, out_signs, S2, in_signs, bias = on(device, (40, 70, 5), rows=6)
    args = (
        x.mT.contiguous().mT, torch.cat((S1, S1), 1)[:, ::2], torch.stack((out_signs, out_signs), 1)[:, 0],
        torch.cat((S2, S2), 0)[::2], in_signs[:1].expand(40), bias[:1].expand(70), 0.25,
    )  # fmt: skip
    with using_path("pair"):
        out = sketched_matmul(*args)
        (ours,) = torch.autograd.grad(out.sum(), x)
    assert rms_error(out, exact(*args)) < KERNEL_RMS[torch.float32]
    assert rms_error(ours, torch.autograd.grad(exact(*args).sum(), x)[0]) < KERNEL_RMS[torch.float32]


@pytest.mark.parametrize("sizes", [(3, 4, 2, 0), (0, 4, 2, 3), (3, 0, 2, 3)])
def test_sizes_of_zero(device, sizes):
    n_in, n_out, R, rows = sizes
    generator = torch.Generator(device).manual_seed(1)
    shapes = (rows, n_in), (n_in, R), (n_out,), (R, n_out), (n_in,), (n_out,)
    args = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
    args[0].requires_grad_()
    out = sketched_matmul(*args)
    assert out.shape == (rows, n_out)
    assert rms_error(out, exact(*args, 1.0)) < KERNEL_RMS[torch.float32]
    out.sum().backward()
    assert args[0].grad.shape == args[0].shape


def test_plans_transforms_and_autocast(device):
    args = on(device, (40, 70, 5), rows=3)
    expected = exact(*args, 0.25)
    assert torch.equal(sketched_matmul(*args, 0.25), sketched_matmul(*args, 0.25))
    assert len(folded._plans) == 1
    batch = torch.stack((args[0], args[0])).detach()
    assert rms_error(torch.func.vmap(lambda x: sketched_matmul(x, *args[1:], 0.25))(batch)[1], expected) < 1e-5
    with torch.autocast(device.type, torch.bfloat16):
        out = sketched_matmul(*args, 0.25)
    assert out.dtype is torch.bfloat16
    assert rms_error(out, expected) < 2e-2
    out.sum().backward()
    assert args[1].grad.dtype is torch.float32


def test_opcheck_and_compile(device):
    args = on(device, (40, 70, 5), rows=3)
    torch.library.opcheck(torch.ops.panther.folded_matmul.default, (*args, 0.25))
    if device.type == "cpu":  # where a compiled graph has the operations of torch
        return
    compiled = torch.compile(sketched_matmul, fullgraph=True, dynamic=True, backend="aot_eager")
    assert rms_error(compiled(*args, 0.25), exact(*args, 0.25)) < KERNEL_RMS[torch.float32]


def test_what_the_kernels_refuse(device):
    args = on(device, (4, 5, 2), rows=3)
    with pytest.raises(RuntimeError, match=r"folded_matmul takes float32, float16 and bfloat16, not torch.float64"):
        sketched_matmul(*(arg.double() for arg in args))
    with pytest.raises(RuntimeError, match=r"folded_matmul takes operands of the input's dtype, torch.float16"):
        sketched_matmul(args[0].half(), *args[1:])
    with pytest.raises(ValueError, match=r"folded_matmul takes x .* in_signs \(3,\)"):
        sketched_matmul(*args[:4], args[4][:3], args[5])
