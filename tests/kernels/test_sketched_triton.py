"""The Triton kernels of the sketched product: every path and form of signs against float64 and the reference."""

import pytest
import torch
from covering import half_of
from panther.kernels import pack_signs, reference, sketched_matmul, unpack_signs
from panther.kernels.ops import sketched as ops
from panther.kernels.ops._crossover import PATHS, choose_path, using_path
from tolerances import KERNEL_RMS, kernel_rms, rms_error
from torch.func import grad, jvp, vmap

SEED, TAG = 5, 0x10001
FORMS = ["dense", "words"]
# rows, in, out, R: size one, odd sizes, several tiles each way, and a rank of several tiles.
SHAPES = [(1, 1, 1, 1), (3, 70, 130, 3), (65, 33, 129, 33), (7, 300, 40, 64), (2, 130, 260, 150)]
GRID = [case for case in half_of(PATHS, SHAPES, FORMS) if case.values[0] != "fused" or case.values[1][3] <= 64]


def operands(rows, n_in, n_out, R, *, dtype=torch.float32, device="cpu", form="dense", bias=True):
    generator = torch.Generator().manual_seed(rows + n_in)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    x, S1, S2, b = draw(rows, n_in), draw(n_in, R), draw(R, n_out), draw(n_out)
    U1 = reference.random_block("sign", SEED, 0, TAG, range(R), range(n_out), dtype=dtype, device="cpu").to(device)
    U2 = reference.random_block("sign", SEED, 1, TAG, range(n_in), range(R), dtype=dtype, device="cpu").to(device)
    if form == "words":
        U1, U2 = pack_signs(U1), pack_signs(U2.mT)
    return x, S1, U1, S2, U2, b if bias else None, 0.25


def exact(x, S1, U1, S2, U2, bias, scale):
    U1, U2 = ops.dense_signs(S1, U1, S2, U2)
    x, S1, U1, S2, U2 = (t.double() for t in (x, S1, U1, S2, U2))
    return scale * (x @ S1 @ U1 + x @ U2 @ S2) + (0 if bias is None else bias.double())


@pytest.mark.parametrize(("path", "shape", "form"), GRID)
def test_values_and_inner_product(device, path, shape, form, poison):
    args = operands(*shape, device=device, form=form, bias=shape[0] != 3)
    with using_path(path), torch.no_grad():
        out, inner = torch.ops.panther.sketched_matmul(*args)
    assert rms_error(out, exact(*args)) < KERNEL_RMS[torch.float32]
    x, S1, U1, S2, U2, _, scale = args
    U1, U2 = ops.dense_signs(S1, U1, S2, U2)
    assert rms_error(inner, scale * x.double() @ torch.cat((S1, U2), 1).double()) < KERNEL_RMS[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", ["pair", "fused"])
def test_half_precision(device, path, form, dtype):
    args = operands(5, 130, 200, 20, dtype=dtype, device=device, form=form)
    with using_path(path), torch.no_grad():
        assert rms_error(sketched_matmul(*args), exact(*args)) < kernel_rms(dtype, device)


@pytest.mark.parametrize("path", ["pair", "fused"])
def test_float16_is_scaled_before_it_is_rounded(device, path):
    x, S1, U1, S2, U2, bias, _ = operands(2, 1024, 40, 4, dtype=torch.float16, device=device)
    x, U2 = torch.full_like(x, 100), torch.ones_like(U2)  # x U2 is 102,400, and float16 ends at 65,504
    args = x, S1 * 1e-2, U1, S2 * 1e-2, U2, bias, 1 / 64
    with using_path(path), torch.no_grad():
        out = sketched_matmul(*args)
    assert out.isfinite().all()
    assert rms_error(out, exact(*args)) < KERNEL_RMS[torch.float16]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", ["pair", "fused"])
@pytest.mark.parametrize("needs_x", [False, True])
def test_every_gradient(device, path, form, needs_x):
    args = list(operands(5, 40, 70, 6, device=device, form=form))
    args[0] = args[0].detach().requires_grad_(needs_x)
    if form == "dense":  # fitted: the sketches are trained
        args[2], args[4] = args[2].requires_grad_(), args[4].requires_grad_()
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    upstream = torch.randn(5, 70).to(device)
    with using_path(path):
        ours = torch.autograd.grad(sketched_matmul(*args), wanted, upstream)
    theirs = torch.autograd.grad(exact(*args), wanted, upstream.double())
    assert len(wanted) == (4 if needs_x else 3) + 2 * (form == "dense")
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.dtype is torch.float32
        assert rms_error(mine, expected) < KERNEL_RMS[torch.float32]


@pytest.mark.parametrize("form", FORMS)
def test_double_backward(device, form):
    args = operands(4, 20, 30, 3, device=device, form=form)
    leaves = [args[0], args[1], args[3]]

    def second(function):
        out = function(*args)
        first = torch.autograd.grad((out.double().sin()).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.double().square().sum() for g in first), leaves)

    with using_path("pair"):
        ours = second(sketched_matmul)
    for mine, expected in zip(ours, second(exact), strict=True):
        assert rms_error(mine, expected) < 5 * KERNEL_RMS[torch.float32]


def test_gradient_through_the_inner_product(device):
    """The operator's second output is differentiable, whatever is asked of it alone."""
    args = operands(4, 20, 30, 3, device=device)
    leaves = [args[0], args[1]]
    _, inner = torch.ops.panther.sketched_matmul(*args)
    ours = torch.autograd.grad(inner.square().sum(), leaves)
    x, S1, U2 = args[0].double(), args[1].double(), args[4].double()
    expected = (0.25 * x @ torch.cat((S1, U2), 1)).square().sum()
    for mine, right in zip(ours, torch.autograd.grad(expected, leaves), strict=True):
        assert rms_error(mine, right) < KERNEL_RMS[torch.float32]


@pytest.mark.parametrize("path", ["pair", "fused"])
def test_any_strides(device, path):
    """Transposed, sliced and expanded operands, and the gradient of a sum, whose strides are zero."""
    x, S1, U1, S2, U2, bias, scale = operands(6, 40, 70, 5, device=device)
    args = (
        x.mT.contiguous().mT,
        torch.cat((S1, S1), 1)[:, ::2],
        U1.mT.contiguous().mT,
        torch.cat((S2, S2), 0)[::2],
        U2[:1].expand(40, 5),
        bias[:1].expand(70),
        scale,
    )
    with using_path(path):
        out = sketched_matmul(*args)
        (ours,) = torch.autograd.grad(out.sum(), x)
    assert rms_error(out, exact(*args)) < KERNEL_RMS[torch.float32]
    assert rms_error(ours, torch.autograd.grad(exact(*args).sum(), x)[0]) < KERNEL_RMS[torch.float32]


def test_words_of_any_strides(device):
    x, S1, U1, S2, U2, bias, scale = operands(6, 40, 70, 5, device=device, form="words")
    args = (x, S1, U1.mT.contiguous().mT, S2, torch.cat((U2, U2), 1)[:, ::2], bias, scale)
    assert not args[2].is_contiguous()
    with torch.no_grad():
        out = sketched_matmul(x, S1, U1, S2, args[4].contiguous(), bias, scale)
        assert torch.equal(sketched_matmul(*args), out)


@pytest.mark.parametrize("shape", [(0, 3, 4, 2), (3, 0, 4, 2), (3, 4, 0, 2), (3, 4, 5, 0)])
def test_sizes_of_zero(device, shape):
    args = operands(*shape, device=device)
    out = sketched_matmul(*args)
    assert rms_error(out, exact(*args)) < KERNEL_RMS[torch.float32]
    out.sum().backward()
    assert args[0].grad.shape == args[0].shape


def test_the_small_batch_pair_repeats_itself(device):
    args = operands(3, 700, 300, 4, device=device)
    with using_path("pair"), torch.no_grad():
        assert torch.equal(sketched_matmul(*args), sketched_matmul(*args))


@pytest.mark.parametrize(("shape", "form"), half_of([(3, 700, 300, 4), (2, 130, 260, 150)], FORMS))
def test_parts_are_added_by_every_program_or_once_before(device, shape, form, monkeypatch, poison):
    """Few, they are added by each program in two launches; many, once, in a third: with the same result."""
    from panther.kernels._triton import sketched

    args = operands(*shape, device=device, form=form)
    results = []
    for most in (1 << 40, 0):
        monkeypatch.setattr(sketched, "_REDUCED_BYTES", most)
        with using_path("pair"), torch.no_grad():
            results.append(torch.ops.panther.sketched_matmul(*args))
    for ours, theirs in zip(*results, strict=True):
        assert rms_error(ours, theirs) < 1e-6
    assert rms_error(results[1][0], exact(*args)) < KERNEL_RMS[torch.float32]


@pytest.mark.parametrize("form", FORMS)
def test_tall_tiles_of_the_pair(device, form, monkeypatch, poison):
    """Thousands of rows take tiles of 128 rows: here from 100 rows on, two tiles, and the second one is not full."""
    from panther.kernels._triton import sketched

    monkeypatch.setattr(sketched, "_TALL_ROWS", 100)
    args = operands(200, 300, 150, 40, dtype=torch.float16, device=device, form=form)
    with using_path("pair"), torch.no_grad():
        assert rms_error(sketched_matmul(*args), exact(*args)) < KERNEL_RMS[torch.float16]


@pytest.mark.parametrize("form", FORMS)
def test_float32_tiles_of_the_fused_kernel(device, form, monkeypatch, poison):
    """The tiles of sm_90, and several slices of the rank, smaller ones for packed signs."""
    from panther.kernels._triton import sketched

    monkeypatch.setattr(sketched, "has_warpgroups", lambda: True)
    monkeypatch.setattr(sketched, "multiprocessors", lambda device: 1)
    args = operands(70, 65, 70, 50, device=device, form=form)
    with using_path("fused"), torch.no_grad():
        assert rms_error(sketched_matmul(*args), exact(*args)) < KERNEL_RMS[torch.float32]


@pytest.mark.parametrize("form", FORMS)
def test_tall_tiles_of_the_fused_kernel_on_sm_100(device, form, monkeypatch, poison):
    """Two tiles of 128 rows and, for dense signs, 128 columns; the last ones are not full."""
    from panther.kernels._triton import sketched

    monkeypatch.setattr(sketched, "has_tensor_memory", lambda: True)
    monkeypatch.setattr(sketched, "multiprocessors", lambda device: 1)
    args = operands(200, 65, 150, 50, dtype=torch.float16, device=device, form=form)
    with using_path("fused"), torch.no_grad():
        assert rms_error(sketched_matmul(*args), exact(*args)) < KERNEL_RMS[torch.float16]


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
    words = reference.philox._philox_block(1, 2, TAG, range(3), range(256), 128, "cpu")
    stream = torch.stack(words, -1).flatten(1)
    assert torch.equal(packed.long() & 0xFFFFFFFF, stream)  # the layout is the stream's


def test_words_without_triton_are_unpacked_block_by_block(monkeypatch):
    monkeypatch.setattr("panther.kernels.cpu.sketched._UNPACKED", 32 * 4 * 2)
    for rows, bias in [(1, True), (9, False)]:
        args = operands(rows, 200, 130, 4, form="words", bias=bias)
        assert rms_error(sketched_matmul(*args), exact(*args)) < KERNEL_RMS[torch.float32]
        half = operands(rows, 200, 130, 4, form="words", bias=bias, dtype=torch.bfloat16)
        assert rms_error(sketched_matmul(*half), exact(*half)) < KERNEL_RMS[torch.bfloat16]


@pytest.mark.parametrize("form", FORMS)
def test_opcheck(device, form):
    args = operands(3, 40, 70, 5, device=device, form=form)
    torch.library.opcheck(torch.ops.panther.sketched_matmul.default, args)


def test_compiles_whole_for_any_batch():
    args = operands(3, 40, 70, 5, form="words")
    compiled = torch.compile(sketched_matmul, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5):
        x = torch.randn(rows, 40, requires_grad=True)
        out = compiled(x, *args[1:])
        assert rms_error(out, exact(x, *args[1:])) < KERNEL_RMS[torch.float32]
        (ours,) = torch.autograd.grad(out.sum(), x)
        assert rms_error(ours, torch.autograd.grad(exact(x, *args[1:]).sum(), x)[0]) < KERNEL_RMS[torch.float32]


@pytest.mark.parametrize("form", FORMS)
def test_transforms(device, form):
    x, *rest = operands(3, 40, 70, 5, device=device, form=form)
    batch = torch.randn(2, 3, 40).to(device)
    expected = torch.stack([exact(sample, *rest) for sample in batch])
    assert rms_error(vmap(lambda sample: sketched_matmul(sample, *rest))(batch), expected) < KERNEL_RMS[torch.float32]

    def loss(sample, S1, function):
        return function(sample, S1, *rest[1:]).double().square().mean()

    stack = torch.stack([rest[0].detach(), -rest[0].detach()])
    ours = vmap(grad(loss, argnums=(0, 1)), in_dims=(0, 0, None))(batch, stack, sketched_matmul)
    theirs = vmap(grad(loss, argnums=(0, 1)), in_dims=(0, 0, None))(batch, stack, exact)
    for mine, right in zip(ours, theirs, strict=True):
        assert rms_error(mine, right) < KERNEL_RMS[torch.float32]
    tangent = torch.randn(3, 40).to(device)
    _, mine = jvp(lambda sample: sketched_matmul(sample, *rest), (x.detach(),), (tangent,))
    _, right = jvp(lambda sample: exact(sample, *rest), (x.detach(),), (tangent,))
    assert rms_error(mine, right) < KERNEL_RMS[torch.float32]


def test_autocast(device):
    args = operands(3, 40, 70, 5, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        out = sketched_matmul(*args)
    assert out.dtype is torch.bfloat16
    assert rms_error(out, exact(*args)) < 2e-2
    out.sum().backward()
    assert args[1].grad.dtype is torch.float32


def test_what_the_kernels_refuse(device):
    args = [a.double() if isinstance(a, torch.Tensor) else a for a in operands(3, 4, 5, 2, device=device)]
    with pytest.raises(RuntimeError, match=r"sketched_matmul takes float32, float16 and bfloat16, not torch.float64"):
        sketched_matmul(*args)
    x, *rest = operands(3, 4, 5, 2, device=device)
    with pytest.raises(RuntimeError, match=r"takes factors of the input's dtype, torch.float16"):
        sketched_matmul(x.half(), *rest)


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


def test_wide_strides_are_addressed_in_full():
    """A second index times its stride beyond 32 bits would wrap around in the kernels, so such operands are copied."""
    triton_sketched = pytest.importorskip("panther.kernels._triton.sketched")
    near, far = (torch.empty_strided((1, 70), (1, stride), device="meta") for stride in (30_000_000, 40_000_000))
    packed = torch.zeros(1, 70, dtype=torch.int32)
    assert triton_sketched.is_addressable(near)
    assert not triton_sketched.is_addressable(far)
    assert triton_sketched.is_addressable(packed)
    assert not triton_sketched.is_addressable(packed.expand(2, 70).mT)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("x", (3, 39)),
        ("x", (3, 41)),
        ("S1", (40, 4)),
        ("U1", (5, 71)),
        ("S2", (5, 69)),
        ("U2", (41, 5)),
        ("bias", (1,)),
        ("bias", (3, 70)),
        ("x", (40,)),
        ("x", (2, 3, 40)),
    ],
)
@pytest.mark.parametrize("form", ["dense", "words"])
def test_shapes_are_checked_before_a_kernel_reads(device, name, shape, form):
    args = dict(zip(("x", "S1", "U1", "S2", "U2", "bias", "scale"), operands(3, 40, 70, 5, form=form), strict=True))
    dtype = args[name].dtype if name in args else torch.float32
    args[name] = torch.zeros(shape, dtype=dtype)
    args = [value.to(device) if isinstance(value, torch.Tensor) else value for value in args.values()]
    with pytest.raises(ValueError, match=r"sketched_matmul takes x|must have the shapes"):
        sketched_matmul(*args)


def test_operands_on_several_devices():
    args = operands(3, 40, 70, 5, form="words")
    with pytest.raises(ValueError, match=r"operands on one device, not x on meta, S1 on cpu, .*: move them"):
        ops._implementation(args[0].to("meta"), *args[1:])


def test_tiles_of_a_program_never_pass_the_output(device, monkeypatch):
    """With more tiles of rows than multiprocessors, a program takes all columns once."""
    from panther.kernels._triton import sketched

    launched = []
    kernel = sketched._pair_outer_kernel

    class Recorder:
        def __getitem__(self, grid):
            launched.append(grid)
            return kernel[grid]

    monkeypatch.setattr(sketched, "_pair_outer_kernel", Recorder())
    monkeypatch.setattr(sketched, "multiprocessors", lambda device: 1)
    args = operands(40, 20, 200, 3, device=device)
    with using_path("pair"), torch.no_grad():
        assert rms_error(sketched_matmul(*args), exact(*args)) < KERNEL_RMS[torch.float32]
    assert launched[0][1] == 1


def test_what_is_aligned():
    x = torch.empty(5, 64, dtype=torch.bfloat16)
    factors = [torch.empty(64, 16), torch.empty(16, 32), torch.empty(16, 32), torch.empty(64, 16)]
    S1, U1, S2, U2 = (factor.bfloat16() for factor in factors)
    assert ops._aligned(x, S1, U1, S2, U2)
    assert ops._aligned(x, S1, pack_signs(U1), S2, pack_signs(U2.mT))
    assert not ops._aligned(torch.empty(5, 65, dtype=torch.bfloat16)[:, :64], S1, U1, S2, U2)
    assert not ops._aligned(x.flatten()[1:257].view(4, 64), S1, U1, S2, U2)
    assert not ops._aligned(x, *(factor.contiguous() for factor in (S1[:, :8], U1[:8], S2[:8], U2[:, :8])))
    assert not ops._aligned(x, S1, U1[:, :31].contiguous(), S2[:, :31].contiguous(), U2)


def test_every_shape_has_a_path():
    for rows in (1, 16, 64, 65, 512, 8192, 1 << 20):
        for rank in (1, 16, 64, 65, 1024):
            assert choose_path(rows, rank, triton=True) != "fused" or rank <= 64
    assert choose_path(8192, 16, triton=True) == "fused"
    assert choose_path(8192, 16, triton=True, aligned=False) != "fused"
    # Tiles of 32 or 64 rows would read the factors too often.
    assert [choose_path(rows, 64, triton=True) for rows in (4096, 8192, 12800)] == ["pair", "pair", "fused"]
    assert choose_path(8192, 64, triton=True, aligned=False) == "joined"
    with pytest.raises(ValueError, match="chain, joined, pair, fused"), using_path("other"):
        pass
    with using_path("fused"):
        assert choose_path(5, 3, triton=False) == "chain"
