"""QuantizedExperts: read as the parameter that it replaces, by index, in grouped products and by any other function."""

import copy

import pytest
import torch
import torch.nn.functional as F
from expert_models import Experts
from torch import nn

from panther.errors import ShapeError
from panther.nn import QuantizedExperts
from panther.nn.quantized.stacked import StackedExperts, put_layer, stacked_layers, stacked_names
from panther.nn.sketch_record import plain_state

E, IN, OUT = 5, 24, 16


def layer_of(transposed=False, bits=4, group_size=10):
    torch.manual_seed(0)
    weight = torch.randn(E, IN, OUT) if transposed else torch.randn(E, OUT, IN)
    return QuantizedExperts.from_weight(weight, bits, group_size=group_size, transposed=transposed), weight


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bits", [2, 5, 8])
def test_a_rounded_weight_is_near_the_dense_one(transposed, bits):
    layer, weight = layer_of(transposed, bits)
    assert layer.weight.shape == layer.shape == weight.shape
    error = ((layer.weight - weight).norm() / weight.norm()).item()
    assert error < {2: 0.45, 5: 0.06, 8: 0.01}[bits]
    stored = sum(tensor.nbytes for tensor in plain_state(layer).values())
    assert stored == 12 + E * OUT * (-(-IN * bits // 8) + 3 * 3)


@pytest.mark.parametrize("transposed", [False, True])
def test_every_index_reads_the_weight(transposed):
    layer, _ = layer_of(transposed)
    weight = layer.weight
    indices = [
        3, -1, slice(1, 3), torch.tensor(2), torch.tensor([4, 0, 4]), torch.tensor([[1], [1]]), ..., (1, 2),
        (slice(None), 0), torch.tensor([True, False, True, False, False]), torch.tensor([], dtype=torch.long),
    ]  # fmt: skip
    for index in indices:
        assert torch.equal(layer[index], weight[index])
    assert [torch.equal(each, weight[number]) for number, each in enumerate(layer)] == [True] * E == [True] * len(layer)
    with pytest.raises(IndexError):
        layer[E]


@pytest.mark.parametrize("transposed", [False, True])
def test_a_grouped_product_leaves_out_experts_without_rows(transposed, monkeypatch):
    layer, _ = layer_of(transposed)
    x, ends = torch.randn(9, IN), torch.tensor([0, 4, 4, 9, 9], dtype=torch.int32)
    weight = layer if transposed else layer.transpose(-2, -1)
    expanded = weight.layer.weight.mT if not transposed else layer.weight
    multiplied = []
    monkeypatch.setattr(
        QuantizedExperts,
        "forward",
        lambda self, x, e, f=QuantizedExperts.forward: multiplied.append(e) or f(self, x, e),
    )
    y = F.grouped_mm(x, weight, offs=ends)
    assert multiplied == [1, 3]
    torch.testing.assert_close(y, torch.cat([x[:4] @ expanded[1], x[4:] @ expanded[3]]))
    # Rows after the last end, as of tokens of other ranks, are zeros.
    rest = F.grouped_mm(x, weight, offs=ends.clamp_max(6))
    torch.testing.assert_close(rest[:6], y[:6])
    assert not rest[6:].any()


@pytest.mark.parametrize("transposed", [False, True])
def test_other_functions_get_the_expanded_weight(transposed):
    layer, _ = layer_of(transposed)
    weight = layer.weight
    rows = torch.randn(E, 3, weight.shape[1])
    assert torch.equal(torch.bmm(rows, layer), torch.bmm(rows, weight))
    assert torch.equal(rows @ layer, rows @ weight)
    assert torch.equal(torch.einsum("ebi,eij->ebj", rows, layer), torch.einsum("ebi,eij->ebj", rows, weight))
    assert torch.equal(torch.stack([layer, weight])[0], weight)
    flipped = layer.mT
    assert flipped.shape == flipped.size() == weight.mT.shape
    assert (flipped.dim(), flipped.size(-1), layer.size(0), layer.dim(), layer.ndim) == (3, weight.shape[1], E, 3, 3)
    assert torch.equal(torch.bmm(rows @ layer, flipped), torch.bmm(rows @ weight, weight.mT))
    assert torch.equal(flipped[2], weight[2].mT)
    assert torch.equal(flipped[:, 0], weight.mT[:, 0])
    assert flipped.transpose(1, 2) is layer
    assert torch.equal(layer.transpose(0, 1), weight.transpose(0, 1))


def test_gradients_reach_inputs_and_trained_scales():
    layer, _ = layer_of()
    layer.train_scales_()
    x = torch.randn(6, IN, requires_grad=True)
    ends = torch.tensor([2, 2, 6, 6, 6], dtype=torch.int32)
    F.grouped_mm(x, layer.transpose(-2, -1), offs=ends).square().sum().backward()
    grouped, layer.scale_logs.grad, x.grad = (layer.scale_logs.grad, x.grad), None, None
    (F.linear(x[:2], layer[0]).square().sum() + F.linear(x[2:], layer[torch.tensor(2)]).square().sum()).backward()
    torch.testing.assert_close(grouped, (layer.scale_logs.grad, x.grad))
    used = layer.scale_logs.grad.view(E, -1).any(1)
    assert used.tolist() == [True, False, True, False, False]


def test_a_layer_survives_copies_casts_and_files():
    layer, _ = layer_of(transposed=True)
    twin = QuantizedExperts(E, IN, OUT, True, bits=4, group_size=10)
    twin.load_state_dict(layer.state_dict())
    for other in (twin, copy.deepcopy(layer), copy.deepcopy(layer).to(torch.bfloat16).to(torch.float32)):
        assert torch.equal(other.weight, layer.weight)
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert half.dtype is half.weight.dtype is half[1].dtype is torch.bfloat16
    assert half.codes.dtype is torch.uint8
    assert str(layer) == (
        "QuantizedExperts(5, in_features=24, out_features=16, transposed=True, bits=4, group_size=10)"
    )
    with pytest.raises(AttributeError, match="from_weight"):
        layer.weight = torch.zeros(())


@pytest.mark.slow  # 6 s to import torch.compile
def test_compiled_models_read_the_layer():
    layer, _ = layer_of()

    def product(x, expert, ends):
        return x @ layer[expert].mT, torch.bmm(x.expand(E, -1, -1), layer.transpose(-2, -1)), layer.mT[0] + ends

    x, expert = torch.randn(3, IN), torch.tensor(2)
    compiled = torch.compile(product, backend="eager", fullgraph=True)(x, expert, 1)
    torch.testing.assert_close(compiled, (x @ layer[2].mT, torch.matmul(x, layer.weight.mT), layer.weight[0].mT + 1))


def test_sizes_and_weights_that_no_layer_can_have():
    with pytest.raises(ShapeError, match=r"the weight must be \(experts, out, in\), and has shape \(4, 4\)"):
        QuantizedExperts.from_weight(torch.ones(4, 4))
    with pytest.raises(ValueError, match="NaN or infinite"):
        QuantizedExperts.from_weight(torch.full((2, 4, 4), torch.nan))
    with pytest.raises(TypeError, match="takes a tensor, not list"):
        QuantizedExperts.from_weight([[[1.0]]])
    with pytest.raises(ShapeError, match="num_experts"):
        QuantizedExperts(0, 4, 4)
    with pytest.raises(ShapeError, match="bits=9 must be 2 to 8"):
        QuantizedExperts(2, 4, 4, bits=9)


def test_a_layer_takes_the_place_of_a_parameter_and_gives_it_back():
    experts = Experts(3, 8, 6, bias=True)
    names, x = list(experts.state_dict()), torch.randn(4, 8)
    assert stacked_names(experts) == ("gate_up_proj", "down_proj")
    assert stacked_names(nn.Linear(2, 2)) == ()
    dense = stacked_layers(nn.Sequential(experts))["0.gate_up_proj"]
    assert (dense.num_experts, dense.in_features, dense.out_features) == (3, 8, 12)
    assert torch.equal(dense(x, 1), F.linear(x, experts.gate_up_proj[1]))
    weight = experts.gate_up_proj
    put_layer(experts, "gate_up_proj", QuantizedExperts.from_weight(weight, 8))
    assert not dense.is_in_place
    assert stacked_names(experts) == ("down_proj",)
    dense.put_back()
    assert dense.is_in_place
    assert experts.gate_up_proj is weight
    assert list(experts.state_dict()) == names
    transposed = StackedExperts.at(Experts(3, 8, 6, transposed=True), "down_proj")
    assert (transposed.in_features, transposed.out_features) == (6, 8)
