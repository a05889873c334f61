"""QuantizedLinear with a packed copy of its codes for torch's kernel: the same function, and never an old one."""

import copy
import io
import pickle

import pytest
import torch
from panther.kernels import PackedCodes
from panther.kernels.cpu import native
from tolerances import assert_close
from torch import nn

from panther.nn import QuantizedLinear
from panther.nn.sketch_record import plain_state

bf16 = torch.bfloat16


def layer(columns=128, rows=48, group_size=32, **kwargs):
    torch.manual_seed(0)
    dense = nn.Linear(columns, rows, bias=kwargs.pop("bias", True), dtype=bf16)
    return QuantizedLinear.from_linear(dense, 4, group_size=group_size, **kwargs).hold_packed_()


def rows_of(count, columns=128):
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(1)).to(bf16)


def exact(module, x):
    wide = copy.deepcopy(module).double()
    bias = 0 if wide.bias is None else wide.bias
    return (x.double() @ wide.weight.mT + bias).detach()


@pytest.fixture(autouse=True)
def without_compiled_kernel(monkeypatch):
    monkeypatch.setattr(native, "takes", lambda *_: False)


@pytest.fixture
def made(monkeypatch):
    """How many copies were packed."""
    found = []
    original = PackedCodes.__init__
    monkeypatch.setattr(PackedCodes, "__init__", lambda self, *args: (found.append(1), original(self, *args))[1])
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    return found


@pytest.mark.parametrize(
    ("columns", "rows", "group_size"), [(32, 16, 32), (128, 48, 64), (256, 80, 256), (384, 64, 128)]
)
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"low_rank": 3}])
def test_the_function_is_the_same(columns, rows, group_size, options, made):
    module = layer(columns, rows, group_size, **options)
    for count in (1, 3, 32, 33):
        x = rows_of(count, columns)
        with torch.no_grad():
            assert_close(module(x), exact(module, x), bf16)
            assert module(x.view(1, count, columns)).shape == (1, count, rows)
    assert len(made) == 1
    with torch.no_grad():
        assert module(rows_of(0, columns)).shape == (0, rows)


def test_inputs_that_are_not_contiguous(made):
    module = layer()
    wide = rows_of(5, 3 * 128).view(5, 3, 128)
    for x in (wide[:, 1], rows_of(5).mT.contiguous().mT):
        with torch.no_grad():
            assert_close(module(x), exact(module, x), bf16)
    assert made


def test_zero_points_far_from_the_middle_cost_no_accuracy(made):
    module = layer()
    with torch.no_grad():
        codes, zeros = (torch.randint(16, shape, dtype=torch.uint8) for shape in ((48, 128), module.zeros.shape))
        module.set_codes_(codes, module.scales, zeros)
        x = rows_of(5).abs()
        assert_close(module(x), exact(module, x), bf16)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.scales.mul_(2),
        lambda m: m.set_codes_(torch.zeros(48, 128, dtype=torch.uint8), m.scales, m.zeros),
        lambda m: m.load_state_dict(QuantizedLinear(128, 48, group_size=32, dtype=bf16).state_dict()),
        lambda m: m.load_state_dict(QuantizedLinear(128, 48, group_size=32, dtype=bf16).state_dict(), assign=True),
        lambda m: m.reset_parameters(),
    ],
)
def test_changes_are_followed(change, made):
    module, x = layer(), rows_of(4)
    with torch.no_grad():
        first_output = module(x)
        change(module)
        assert not torch.equal(module(x), first_output)
        assert_close(module(x), exact(module, x), bf16)
    assert len(made) == 2


def test_copies_and_files_are_without_it(made):
    module, x = layer(), rows_of(4)
    with torch.no_grad():
        expected = module(x)
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), module.to("cpu")):
            assert twin._packed is None
            assert torch.equal(twin(x), expected)
    plain = QuantizedLinear(128, 48, group_size=32, dtype=bf16)
    assert module.state_dict().keys() == plain.state_dict().keys()
    file = io.BytesIO()
    torch.save(module, file)
    assert file.tell() < 2 * sum(tensor.nbytes for tensor in plain_state(module).values()) + 20_000


def test_where_it_does_not_serve_the_weight_is_expanded(made):
    module, x = layer(), rows_of(4)
    copy.deepcopy(module).train_scales_()(x).sum().backward()
    with torch.no_grad():
        many = rows_of(33)
        assert_close(module(many), exact(module, many), bf16)
        assert_close(copy.deepcopy(module).float()(x.float()), exact(module, x), torch.float32)
        trained = copy.deepcopy(module).hold_scales_(torch.float32)
        trained.scales *= 1.001  # which bfloat16 would round away
        assert_close(trained(x), exact(trained, x), bf16)
    assert not made
    with torch.inference_mode():
        inferred = layer()
        assert_close(inferred(x), exact(inferred, x), bf16)
        assert len(made) == 1  # its buffers count their versions, although inference mode made it
        assert_close(module(x), exact(module, x), bf16)
    with torch.no_grad():
        assert_close(module(x), exact(module, x), bf16)
        module.hold_packed_(False)
        assert_close(module(x), exact(module, x), bf16)
    assert len(made) == 2


@pytest.mark.parametrize(
    ("form", "match"),
    [
        ({"bits": 3, "group_size": 32}, "codes of 4 bits and this layer bits=3"),
        ({"bits": None, "low_rank": 2}, "codes of 4 bits and this layer bits=None"),
        ({"group_size": 16}, "here group_size=16 of 128 columns"),
        ({"group_size": None, "in_features": 100}, "here group_size=100 of 100 columns"),
        ({"group_size": 64, "in_features": 96}, "here group_size=64 of 96 columns"),
        ({"out_features": 40}, "multiple of 16, and here are 40"),
    ],
)
def test_layers_that_the_kernel_does_not_take(form, match):
    module = QuantizedLinear(**{"in_features": 128, "out_features": 48} | form)
    with pytest.raises(ValueError, match=match):
        module.hold_packed_()
    assert not module.hold_packed_(False).packed_copy
