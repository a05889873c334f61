"""MonarchLinear: its formula, its numbers of blocks and ranks, the blockwise SVD, and its stacks under Muon."""

import copy
import math

import pytest
import torch
from covering import all_pairs
from tolerances import KERNEL_RMS, assert_close, factorisation, rms_error
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import panther as pr
from panther.errors import PerformanceWarning, ShapeError
from panther.nn import MonarchLinear, monarch
from panther.optim import MuonAdamW, param_groups

pytestmark = pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")
SIZES = [(64, 48, None), (53, 37, None), (1, 1, None), (1, 7, None), (13, 1, None), (60, 42, (2, 14)), (10, 9, (5, 1))]


def layer_of(sizes, rank=1, **options):
    torch.manual_seed(0)
    inputs, outputs, num_blocks = sizes
    return MonarchLinear(inputs, outputs, rank, num_blocks=num_blocks, **options)


def blocks_of(weight, layer):
    """Return the blocks (b, i) of a weight by slices, as the docstring defines them."""
    m1, n2 = layer.num_blocks
    m2 = layer.down.shape[1]
    return {(b, i): weight[b::n2, i * m2 : (i + 1) * m2] for b in range(n2) for i in range(m1)}


@pytest.mark.parametrize(
    ("sizes", "rank", "bias", "dtype"),
    all_pairs(SIZES, [1, 2, 5], [True, False], [torch.float64, torch.float32, torch.bfloat16]),
)
def test_the_formula(sizes, rank, bias, dtype):
    layer = layer_of(sizes, rank, bias=bias, dtype=dtype)
    m1, n2 = layer.num_blocks
    x = torch.randn(3, sizes[0], dtype=torch.float64).to(dtype)
    expected = torch.zeros(3, sizes[1], dtype=torch.float64)
    m2, n1 = layer.down.shape[1], layer.up.shape[2]
    for b in range(n2):
        count = len(range(b, sizes[1], n2))
        for i in range(m1):
            part = x[:, i * m2 : (i + 1) * m2].double()
            A = layer.down[i, : part.shape[1], b::n2].double()  # (m2, r)
            B = layer.up[b, i * rank : (i + 1) * rank].double()  # (r, n1)
            assert A.shape[1] == rank
            assert B.shape == (rank, n1)
            expected[:, b::n2] += (part @ A @ B)[:, :count]
    if bias:
        expected += layer.bias.double()
    assert rms_error(layer(x), expected) < KERNEL_RMS[dtype]
    twin = layer.double()
    assert_close(nn.functional.linear(x.double(), twin.weight, twin.bias), expected)


def test_default_numbers_of_blocks():
    for size in range(1, 700):
        number = MonarchLinear(size, 64, device="meta").num_blocks[0]
        root = math.sqrt(size)
        near = [k for k in range(1, 2 * size + 1) if root / 2 <= k <= 2 * root]
        assert number in near
        divisors = [k for k in near if size % k == 0]
        padding = -size % number
        assert (padding == 0) == bool(divisors)
        assert padding < -(-size // number)  # no block is empty
        assert all(-size % k >= padding for k in near)
    assert MonarchLinear(192, 768).num_blocks == (12, 24)
    assert MonarchLinear(1024, 4096, device="meta").num_blocks == (32, 64)
    assert MonarchLinear(37, 41).num_blocks == (5, 6)


def test_the_weight_has_full_rank_and_the_variance_of_torch():
    layer = layer_of((64, 64, None), dtype=torch.float64)
    assert torch.linalg.matrix_rank(layer.weight) == 64
    for sizes, rank in (((256, 256, None), 1), ((331, 256, (48, 16)), 3)):  # 48 blocks of 7 inputs are 336
        layer = layer_of(sizes, rank)
        variance = layer.weight.var().item()
        # 256 independent blocks of relative variance 0.1, by |a|^2 |b|^2 of 16 uniform numbers each: five times 2 %.
        assert abs(variance * 3 * sizes[0] - 1) < 0.1
        assert layer.bias.abs().max() <= 1 / math.sqrt(sizes[0])


@pytest.mark.parametrize(("sizes", "rank"), all_pairs(SIZES, [1, 2, 40]))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_from_linear_is_the_truncated_svd_of_each_block(sizes, rank, dtype):
    torch.manual_seed(1)
    dense = nn.Linear(*sizes[:2], dtype=dtype)
    layer = MonarchLinear.from_linear(dense, rank, num_blocks=sizes[2])
    assert torch.equal(layer.bias, dense.bias)
    weight = dense.weight.detach().double()
    tails = [torch.linalg.svdvals(block)[rank:].square().sum() for block in blocks_of(weight, layer).values()]
    error = (layer.weight.double() - weight).norm()
    assert abs(error - sum(tails).sqrt()) < factorisation(dtype) * weight.norm()


def test_no_change_of_the_factors_is_nearer():
    torch.manual_seed(2)
    dense = nn.Linear(53, 48, dtype=torch.float64)
    layer = MonarchLinear.from_linear(dense, 2)
    error = (layer.weight - dense.weight).square().sum()
    gradients = torch.autograd.grad(error, [layer.down, layer.up])
    assert all(gradient.abs().max() < 1e-12 for gradient in gradients)
    factors = [layer.down.detach().clone(), layer.up.detach().clone()]
    with torch.no_grad():
        for size in (1e-4, 1e-2, 1.0):
            for _ in range(20):
                for parameter, factor in zip((layer.down, layer.up), factors, strict=True):
                    parameter.copy_(factor + size * torch.randn_like(factor) * factor.std())
                assert (layer.weight - dense.weight).square().sum() > error


def test_unused_components_add_nothing_and_still_learn():
    dense = nn.Linear(24, 16, dtype=torch.float64)
    nn.init.zeros_(dense.weight)
    layer = MonarchLinear.from_linear(dense, 3)
    assert not layer.weight.any()
    layer(torch.randn(20, 24, dtype=torch.float64)).square().sum().backward()
    assert layer.down.grad.abs().amin() > 0


def test_fraction_chooses_the_rank():
    dense = 256 * 192
    for fraction in (1e-6, 0.1, 0.25, 0.5, 1):
        layer = MonarchLinear(256, 192, fraction=fraction, bias=False)
        step = sum(p.numel() for p in layer.parameters()) / layer.rank
        numbers = sum(p.numel() for p in layer.parameters())
        assert layer.rank == 1 or abs(numbers - fraction * dense) <= step / 2
        assert f"rank={layer.rank}" in repr(layer)
    assert MonarchLinear.from_linear(nn.Linear(256, 192), fraction=0.5).rank > 1
    for fraction in (0, -1, 1.5, math.nan, math.inf):
        with pytest.raises(ValueError, match="must be above 0 and at most 1"):
            MonarchLinear(64, 48, fraction=fraction)
    for fraction in (True, "0.5"):
        with pytest.raises(TypeError, match="fraction must be a number, not"):
            MonarchLinear(64, 48, fraction=fraction)
    with pytest.raises(ValueError, match=r"rank=2 and fraction=0\.5 both choose the rank: give one of them"):
        MonarchLinear(64, 48, 2, fraction=0.5)


def test_numbers_of_blocks_that_do_not_fit():
    assert MonarchLinear(64, 48, num_blocks=4).num_blocks == (4, 4)
    with pytest.raises(ShapeError, match="num_blocks=9 would leave blocks of 10 features empty: 5 blocks of 2 have"):
        MonarchLinear(64, 10, num_blocks=(8, 9))
    with pytest.raises(ShapeError, match=r"num_blocks\[1\]=0 must be at least 1"):
        MonarchLinear(64, 10, num_blocks=(8, 0))
    with pytest.raises(TypeError, match=r"num_blocks must be an integer, not str"):
        MonarchLinear(64, 10, num_blocks="8")


def test_padding_has_no_gradient():
    layer = layer_of((10, 7, (4, 4)))  # blocks of 3 inputs and of 2 outputs
    layer(torch.randn(5, 10)).square().sum().backward()
    assert not layer.down.grad[3, 1:].any()
    assert not layer.up.grad[3, :, 1].any()
    assert layer.down.grad[3, 0].abs().min() > 0


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_forward_copies_only_its_output():
    layer, x = MonarchLinear(64, 48, rank=3), torch.randn(20, 64)
    with torch.no_grad(), Operations() as operations:
        layer(x)
    views = {"view", "_unsafe_view", "transpose", "permute", "slice", "unsqueeze", "expand", "detach", "alias"}
    assert sorted(set(operations.names) - views) == ["baddbmm", "bmm", "clone"]
    assert operations.names.count("clone") == 1


@pytest.mark.parametrize("rows", [136, 137, 300])
@pytest.mark.parametrize("bias", [True, False])
def test_many_rows_are_multiplied_in_parts(rows, bias):
    layer = layer_of((53, 37, None), 2, bias=bias)
    x, gradient = torch.randn(53, rows).mT.requires_grad_(), torch.randn(rows, 37)
    twin, exact_x = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    results = layer(x), twin(exact_x)
    assert rms_error(*results) < KERNEL_RMS[torch.float32]
    ours = torch.autograd.grad(results[0], [x, *layer.parameters()], gradient)
    exact = torch.autograd.grad(results[1], [exact_x, *twin.parameters()], gradient.double())
    for our, their in zip(ours, exact, strict=True):
        assert rms_error(our, their) < KERNEL_RMS[torch.float32]


@pytest.fixture
def products(monkeypatch):
    """Return a list to which each product by blocks appends its rows."""
    rows = []
    blockwise_product = monarch._blockwise_product

    def counted(blocks, *args, **kwargs):
        rows.append(len(blocks))
        return blockwise_product(blocks, *args, **kwargs)

    monkeypatch.setattr(monarch, "_blockwise_product", counted)
    return rows


def test_rows_that_are_multiplied_at_once(products):
    layer = layer_of((53, 37, None))
    for rows, expected in ((8, [8]), (9, [9]), (136, [136]), (300, [136, 136, 28])):
        x = torch.randn(rows, 53, requires_grad=True)
        for mode in (torch.enable_grad, torch.inference_mode):
            products.clear()
            with mode():
                layer(x)
            assert products == expected
    products.clear()
    layer.bfloat16()(torch.randn(255, 53, dtype=torch.bfloat16))
    assert products == [255]


@pytest.mark.parametrize(("rows", "dtype"), [(20, torch.float32), (300, torch.bfloat16)])
@pytest.mark.parametrize("frozen", [(), ("down",), ("up", "bias"), ("down", "up", "bias")])
def test_gradients_of_what_is_trained(rows, dtype, frozen, products, monkeypatch):
    monkeypatch.setattr(monarch, "_DENSE_LIMITS", {})
    layer = layer_of((256, 200, None), dtype=dtype)
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    x = torch.randn(rows, 256).to(dtype).requires_grad_(len(frozen) != 1)
    twin, exact_x = copy.deepcopy(layer).double(), x.detach().double().requires_grad_(x.requires_grad)
    leaves = [[y for y in (x, *layer.parameters()) if y.requires_grad] for x, layer in ((x, layer), (exact_x, twin))]
    y, exact = layer(x), twin(exact_x)
    assert products == ([20, 20] if rows == 20 else [264, 36, 300])
    gradient = torch.randn(rows, 200).to(dtype)
    ours = torch.autograd.grad(y, leaves[0], gradient)
    for our, their in zip(ours, torch.autograd.grad(exact, leaves[1], gradient.double()), strict=True):
        assert our.dtype is dtype
        assert rms_error(our, their) < KERNEL_RMS[dtype]


def test_second_derivatives_in_float32():
    layer, x = layer_of((53, 37, None), 2), torch.randn(20, 53, requires_grad=True)
    twin, exact_x = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    second = []
    for module, leaf in ((layer, x), (twin, exact_x)):
        first = torch.autograd.grad(module(leaf).pow(3).sum(), [leaf, module.up], create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in first)
        second.append(torch.autograd.grad(penalty, [leaf, *module.parameters()]))
    for our, their in zip(*second, strict=True):
        assert rms_error(our, their) < 10 * KERNEL_RMS[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 3])
def test_many_rows_are_multiplied_by_the_dense_weight_if_it_is_not_much_larger(rank, dtype, products):
    layer = layer_of((90, 70, None), rank, dtype=dtype)  # 10 x 9 blocks
    x = torch.randn(4, 128, 90).to(dtype).requires_grad_()
    y = layer(x)
    assert products == ([] if dtype is torch.bfloat16 or rank == 3 else [136, 136, 136, 104])
    twin, exact_x = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    exact = twin(exact_x)
    assert rms_error(y, exact) < KERNEL_RMS[dtype]
    gradient = torch.randn(4, 128, 70)
    ours = torch.autograd.grad(y, [x, *layer.parameters()], gradient.to(dtype))
    theirs = torch.autograd.grad(exact, [exact_x, *twin.parameters()], gradient.to(dtype).double())
    for our, their in zip(ours, theirs, strict=True):
        assert rms_error(our, their) < KERNEL_RMS[dtype]


def test_it_warns_if_it_is_not_smaller():
    with pytest.warns(PerformanceWarning, match="MonarchLinear with rank=4 multiplies by 3,072 numbers"):
        MonarchLinear(64, 48, 4)


def test_files_and_trees(tmp_path):
    model = nn.Sequential(layer_of((60, 42, (2, 14)), 3), nn.Linear(42, 4))
    assert "Monarch, 14 x 2 blocks of rank 3" in str(pr.inspect.tree(model))
    pr.save_compressed(model, tmp_path)
    restored = pr.load_compressed(tmp_path, nn.Sequential(nn.Linear(60, 42), nn.Linear(42, 4)))
    assert restored[0].num_blocks == (2, 14)
    x = torch.randn(3, 60)
    assert torch.equal(restored(x), model(x))


def test_plain_layers_are_dense():
    model, x = nn.Sequential(layer_of((53, 37, None))), torch.randn(3, 53)
    expected = model(x)
    model[0].down.requires_grad_(False)
    pr.to_linears_(model)
    assert type(model[0]) is nn.Linear
    assert not model[0].weight.requires_grad
    torch.testing.assert_close(model(x), expected)


def test_muon_takes_the_stacks():
    torch.manual_seed(0)
    model = nn.Sequential(MonarchLinear(64, 48, 2), nn.ReLU(), nn.Linear(48, 10))
    assert [name for group in param_groups(model) if group["orthogonalize"] for name, _ in group["params"]] == [
        "0.down",
        "0.up",
    ]
    optimizer = MuonAdamW(param_groups(model))
    original = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    x, target = torch.randn(256, 64), torch.randint(10, (256,))
    losses = []
    for step in range(20):
        loss = nn.functional.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if not step:  # each matrix of a stack is orthogonalised by itself
            for change in (model[0].down.detach() - original["0.down"], model[0].up.detach() - original["0.up"]):
                sigma = torch.linalg.svdvals(change.double())
                assert (sigma[:, -1] > 0.4 * sigma[:, 0]).all()
    assert losses[-1] < losses[0] - 0.05
