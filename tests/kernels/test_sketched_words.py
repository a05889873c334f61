"""The sketched product with signs packed into words, and the choice of its path."""

import pytest
import torch
from panther.kernels import pack_signs, reference, sketched_matmul, unpack_signs
from panther.kernels.ops._crossover import choose_path, using_path
from tolerances import KERNEL_RMS, rms_error
from torch.func import grad, jvp, vmap

SEED, TAG = 5, 0x10001


def operands(rows, n_in, n_out, R, *, dtype=torch.float32, bias=True):
    """x, S1, U1, S2, U2, bias, scale, with packed signs, and the same with dense signs in float64."""
    generator = torch.Generator().manual_seed(rows + n_in)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    x, S1, S2, b = draw(rows, n_in), draw(n_in, R), draw(R, n_out), draw(n_out)
    U1 = reference.random_block("sign", SEED, 0, TAG, range(R), range(n_out), dtype=dtype, device="cpu")
    U2 = reference.random_block("sign", SEED, 1, TAG, range(n_in), range(R), dtype=dtype, device="cpu")
    return x, S1, pack_signs(U1), S2, pack_signs(U2.mT), b if bias else None, 0.25


def exact(x, S1, U1, S2, U2, bias, scale):
    U1, U2 = unpack_signs(U1, S2.shape[1], torch.float64), unpack_signs(U2, S1.shape[0], torch.float64).mT
    x, S1, S2 = x.double(), S1.double(), S2.double()
    return scale * (x @ S1 @ U1 + x @ U2 @ S2) + (0 if bias is None else bias.double())


@pytest.mark.parametrize("needs_x", [False, True])
def test_every_gradient(needs_x):
    args = list(operands(5, 40, 70, 6))
    args[0] = args[0].detach().requires_grad_(needs_x)
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    upstream = torch.randn(5, 70)
    ours = torch.autograd.grad(sketched_matmul(*args), wanted, upstream)
    theirs = torch.autograd.grad(exact(*args), wanted, upstream.double())
    assert len(wanted) == (4 if needs_x else 3)
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.dtype is torch.float32
        assert rms_error(mine, expected) < KERNEL_RMS[torch.float32]


def test_double_backward():
    args = operands(4, 20, 30, 3)
    leaves = [args[0], args[1], args[3]]

    def second(function):
        first = torch.autograd.grad(function(*args).double().sin().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.double().square().sum() for g in first), leaves)

    for mine, expected in zip(second(sketched_matmul), second(exact), strict=True):
        assert rms_error(mine, expected) < 5 * KERNEL_RMS[torch.float32]


@pytest.mark.parametrize("shape", [(0, 3, 4, 2), (3, 0, 4, 2), (3, 4, 0, 2), (3, 4, 5, 0)])
def test_sizes_of_zero(shape):
    args = operands(*shape)
    with torch.no_grad():
        assert rms_error(sketched_matmul(*args), exact(*args)) < KERNEL_RMS[torch.float32]
    sketched_matmul(*args).sum().backward()
    assert args[0].grad.shape == args[0].shape


def test_packing_is_undone_by_unpacking():
    for rows, n in [(1, 1), (3, 31), (2, 32), (5, 33), (1, 300), (0, 5), (4, 0)]:
        signs = reference.random_block("sign", 1, 2, TAG, range(rows), range(n), dtype=torch.float32, device="cpu")
        packed = pack_signs(signs)
        assert packed.shape == (rows, -(-n // 32))
        assert packed.dtype is torch.int32
        assert torch.equal(unpack_signs(packed, n, torch.float32), signs)
    packed = pack_signs(
        reference.random_block("sign", 1, 2, TAG, range(3), range(256), dtype=torch.float32, device="cpu")
    )
    stream = reference.philox._philox_block(1, 2, TAG, range(3), range(256), 128, "cpu")
    assert torch.equal(packed.long() & 0xFFFFFFFF, stream)  # the layout is the stream's


@torch.no_grad()
def test_words_are_unpacked_block_by_block(monkeypatch):
    monkeypatch.setattr("panther.kernels.cpu.sketched._UNPACKED", 32 * 4 * 2)
    for rows, bias in [(1, True), (9, False)]:
        args = operands(rows, 200, 130, 4, bias=bias)
        assert rms_error(sketched_matmul(*args), exact(*args)) < KERNEL_RMS[torch.float32]
        half = operands(rows, 200, 130, 4, bias=bias, dtype=torch.bfloat16)
        assert rms_error(sketched_matmul(*half), exact(*half)) < KERNEL_RMS[torch.bfloat16]


def test_compiles_whole_for_any_batch():
    args = operands(3, 40, 70, 5)
    compiled = torch.compile(sketched_matmul, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5):
        x = torch.randn(rows, 40, requires_grad=True)
        out = compiled(x, *args[1:])
        assert rms_error(out, exact(x, *args[1:])) < KERNEL_RMS[torch.float32]
        (ours,) = torch.autograd.grad(out.sum(), x)
        assert rms_error(ours, torch.autograd.grad(exact(x, *args[1:]).sum(), x)[0]) < KERNEL_RMS[torch.float32]


def test_transforms():
    x, *rest = operands(3, 40, 70, 5)
    batch = torch.randn(2, 3, 40)
    expected = torch.stack([exact(sample, *rest) for sample in batch])
    assert rms_error(vmap(lambda sample: sketched_matmul(sample, *rest))(batch), expected) < KERNEL_RMS[torch.float32]

    def loss(sample, S1, function):
        return function(sample, S1, *rest[1:]).double().square().mean()

    stack = torch.stack([rest[0].detach(), -rest[0].detach()])
    ours = vmap(grad(loss, argnums=(0, 1)), in_dims=(0, 0, None))(batch, stack, sketched_matmul)
    theirs = vmap(grad(loss, argnums=(0, 1)), in_dims=(0, 0, None))(batch, stack, exact)
    for mine, right in zip(ours, theirs, strict=True):
        assert rms_error(mine, right) < KERNEL_RMS[torch.float32]
    tangent = torch.randn(3, 40)
    _, mine = jvp(lambda sample: sketched_matmul(sample, *rest), (x.detach(),), (tangent,))
    _, right = jvp(lambda sample: exact(sample, *rest), (x.detach(),), (tangent,))
    assert rms_error(mine, right) < KERNEL_RMS[torch.float32]


def test_autocast():
    args = operands(3, 40, 70, 5)
    with torch.autocast("cpu", torch.bfloat16):
        out = sketched_matmul(*args)
    assert out.dtype is torch.bfloat16
    assert rms_error(out, exact(*args)) < 2e-2
    out.sum().backward()
    assert args[1].grad.dtype is torch.float32


@pytest.mark.parametrize(
    ("U1", "U2", "message"),
    [
        (torch.zeros(3, 2, dtype=torch.int32), torch.zeros(4, 5), "both be dense or both int32 words"),
        (torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 1, dtype=torch.int32), r"\(2, 3\) and \(2, 2\)"),
        (
            torch.zeros(2, 3, dtype=torch.int16),
            torch.zeros(2, 2, dtype=torch.int16),
            "both be dense or both int32 words",
        ),
    ],
)
def test_bad_words(U1, U2, message):
    with pytest.raises(ValueError, match=message):
        sketched_matmul(torch.ones(1, 40), torch.ones(40, 2), U1, torch.ones(2, 70), U2)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("x", (3, 39)), ("S1", (40, 4)), ("U1", (5, 4)), ("S2", (5, 69)), ("U2", (4, 2)), ("bias", (1,)), ("x", (40,))],
)
def test_shapes_are_checked(name, shape):
    args = dict(zip(("x", "S1", "U1", "S2", "U2", "bias", "scale"), operands(3, 40, 70, 5), strict=True))
    args[name] = torch.zeros(shape, dtype=args[name].dtype)
    with pytest.raises(ValueError, match=r"sketched_matmul takes x|must have the shapes"):
        sketched_matmul(*args.values())


def test_operands_on_several_devices():
    args = operands(3, 40, 70, 5)
    with pytest.raises(ValueError, match=r"operands on one device, not x on meta, S1 on cpu, .*: move them"):
        sketched_matmul(args[0].to("meta"), *args[1:])


def test_every_shape_has_a_path():
    assert [choose_path(rows, 16, triton=False) for rows in (63, 64)] == ["chain", "joined"]
    assert {choose_path(rows, 64, triton=True) for rows in (1, 64, 65, 1 << 20)} == {"pair"}
    assert [choose_path(rows, 65, triton=True) for rows in (64, 65)] == ["pair", "joined"]
    with pytest.raises(ValueError, match="chain, joined, pair"), using_path("other"):
        pass
    with using_path("pair"):
        assert choose_path(5, 3, triton=False) == "chain"
