"""QuantizedEmbedding and QuantizedEmbeddingBag against torch's layers with the same weight."""

import copy

import pytest
import torch
from torch import nn

import panther as pr
from panther._torch import buffers_of
from panther.errors import FormatError, ShapeError
from panther.nn import QuantizedEmbedding, QuantizedEmbeddingBag, QuantizedLinear

ROWS = 23


def table(dim=20, bits=4, group_size=8, padding_idx=None, dtype=torch.float32):
    torch.manual_seed(0)
    dense = nn.Embedding(ROWS, dim, padding_idx=padding_idx, dtype=dtype)
    return dense, QuantizedEmbedding.from_embedding(dense, bits, group_size=group_size)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize(("dim", "group_size"), [(64, 32), (30, 7), (1, 128), (17, None)])
def test_lookups_are_rows_of_the_weight(bits, dim, group_size):
    dense, layer = table(dim, bits, group_size)
    indices = torch.randint(ROWS, (4, 5), generator=torch.Generator().manual_seed(bits))
    assert torch.equal(layer(indices), layer.weight[indices])
    assert torch.equal(layer(indices.mT), layer(indices).transpose(0, 1))  # not contiguous
    assert torch.equal(layer(indices.int()[0, 0]), layer.weight[indices[0, 0]])
    assert layer(indices[:0]).shape == (0, 5, dim)
    error = (layer.weight - dense.weight).norm() / dense.weight.norm()
    assert error < 2.0 / (2**bits - 1)
    assert torch.equal(layer.to_embedding().weight, layer.weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    _, layer = table(dtype=dtype)
    indices = torch.arange(ROWS)
    assert layer(indices).dtype is layer.weight.dtype is dtype
    single = copy.deepcopy(layer).float()
    torch.testing.assert_close(layer(indices).float(), single(indices), atol=0, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("index", [[ROWS], [-1], [1.5]])
def test_bad_indices_raise_what_torch_raises(index):
    dense, layer = table()
    with pytest.raises((IndexError, RuntimeError)) as expected:
        dense(torch.tensor(index))
    with pytest.raises(type(expected.value)) as raised:
        layer(torch.tensor(index))
    assert str(raised.value) == str(expected.value)


def test_one_row_of_padding():
    dense = nn.Embedding(1, 6, padding_idx=-1)
    layer = QuantizedEmbedding.from_embedding(dense)
    assert layer.padding_idx == 0
    assert not layer(torch.zeros(2, dtype=torch.long)).any()
    assert not QuantizedEmbedding(5, 4, padding_idx=2).weight[2].any()


def test_a_new_layer_has_the_variance_of_torch():
    torch.manual_seed(0)
    for bits in (2, 5, 8):
        assert QuantizedEmbedding(500, 64, bits=bits).weight.var().item() == pytest.approx(1.0, rel=0.1)


def test_trained_scales_leave_the_padding():
    dense, layer = table(padding_idx=3)
    with torch.no_grad():
        dense.weight[3] = 0.5  # as of pretrained models, whose padding is not zero
    layer = QuantizedEmbedding.from_embedding(dense, 4, group_size=8).train_scales_()
    first_weight, indices = layer.weight.detach().clone(), torch.tensor([[3, 1], [4, 1]])
    layer(indices).square().sum().backward()
    gradient = layer.scale_logs.grad
    assert gradient[[1, 4]].all()
    assert not gradient[[row for row in range(ROWS) if row not in (1, 4)]].any()
    torch.optim.SGD(layer.parameters(), 0.1).step()
    weight = layer.train_scales_(False).weight
    assert not torch.equal(weight[1], first_weight[1])
    assert torch.equal(weight[3], first_weight[3])


def test_gradients_of_scales_are_those_of_the_weight():
    _, layer = table(dtype=torch.float64)
    layer.train_scales_().hold_scales_(torch.float64).hold_scale_logs_(torch.float64)
    indices = torch.tensor([0, 5, 5, 7])
    (by_lookup,) = torch.autograd.grad(layer(indices).pow(3).sum(), layer.scale_logs)
    (by_weight,) = torch.autograd.grad(layer.weight[indices].pow(3).sum(), layer.scale_logs)
    torch.testing.assert_close(by_lookup, by_weight)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("include_last_offset", [False, True])
def test_bags(mode, padding_idx, include_last_offset):
    torch.manual_seed(0)
    options = {"mode": mode, "padding_idx": padding_idx, "include_last_offset": include_last_offset}
    layer = QuantizedEmbeddingBag.from_embedding(nn.EmbeddingBag(11, 20, **options), 5, group_size=8)
    dense = layer.to_embedding()
    assert {name: getattr(dense, name) for name in options} == options
    indices, end = torch.tensor([1, 2, 2, 10, 0, 5]), [6] * include_last_offset
    offsets = torch.tensor([0, 0, 3, 5, *end])  # the first bag is empty
    weights = torch.rand(6) if mode == "sum" else None
    torch.testing.assert_close(layer(indices, offsets, weights), dense(indices, offsets, weights))
    torch.testing.assert_close(layer(indices.int(), offsets.int()), dense(indices, offsets))
    torch.testing.assert_close(layer(indices.view(2, 3)), dense(indices.view(2, 3)))
    torch.testing.assert_close(layer(indices.view(3, 2).mT), dense(indices.view(3, 2).mT))
    nothing = torch.tensor([0, *[0] * include_last_offset])
    torch.testing.assert_close(layer(indices[:0], nothing), dense(indices[:0], nothing))
    if weights is not None:
        weights.requires_grad_()
        gradients = [torch.autograd.grad(bag(indices, offsets, weights).sum(), weights)[0] for bag in (layer, dense)]
        torch.testing.assert_close(*gradients)


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"has max_norm=1.0, with which each lookup changes rows"):
        QuantizedEmbedding.from_embedding(nn.Embedding(4, 3, max_norm=1.0))
    with pytest.raises(ValueError, match="has max_norm"):
        QuantizedEmbeddingBag.from_embedding(nn.EmbeddingBag(4, 3, max_norm=1.0))
    with pytest.raises(TypeError, match=r"takes an nn\.Embedding, not Linear"):
        QuantizedEmbedding.from_embedding(nn.Linear(3, 4))
    with pytest.raises(ShapeError, match="padding_idx=4 must be within the 4 rows"):
        QuantizedEmbedding(4, 3, padding_idx=4)
    with pytest.raises(TypeError, match="padding_idx must be an integer or None, not float"):
        QuantizedEmbedding(4, 3, padding_idx=1.0)
    with pytest.raises(ValueError, match="mode='prod' is unknown: use one of 'sum', 'mean', 'max'"):
        QuantizedEmbeddingBag(4, 3, mode="prod")
    with pytest.raises(TypeError, match="bits"):
        QuantizedEmbedding(4, 3, bits=None)
    layer = QuantizedEmbedding(4, 3)
    with pytest.raises(AttributeError, match="make a new layer from a dense layer by from_embedding"):
        layer.weight = nn.Parameter(torch.zeros(4, 3))


def test_compiled_without_breaks():
    torch.compiler.reset()
    bag = QuantizedEmbeddingBag(ROWS, 20, "mean", padding_idx=1)
    indices = torch.tensor([[1, 2, 3], [4, 5, 1]])
    compiled = torch.compile(bag, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(indices), bag(indices))


def test_exported():
    _, layer = table()
    indices = torch.tensor([[1, 2, 3], [4, 5, 1]])
    program = torch.export.export(nn.Sequential(layer), (indices,), strict=True)
    torch.testing.assert_close(program.module()(indices), layer(indices))


@pytest.mark.parametrize("padding_idx", [None, 0])
def test_files(tmp_path, padding_idx):
    def dense():
        bag = nn.EmbeddingBag(9, 12, mode="max", padding_idx=padding_idx)
        return nn.ModuleList([nn.Embedding(ROWS, 12, padding_idx=padding_idx), bag, nn.Linear(12, 3)])

    model = dense()
    model[0] = QuantizedEmbedding.from_embedding(model[0], 3, group_size=5)
    model[1] = QuantizedEmbeddingBag.from_embedding(model[1], 6)
    pr.save_compressed(model, tmp_path)
    restored = pr.load_compressed(tmp_path, dense())
    assert repr(restored) == repr(model)
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), restored.state_dict().values(), strict=True)
    )
    wrong = dense()
    wrong[0] = nn.Embedding(ROWS, 12, padding_idx=5)
    with pytest.raises(FormatError, match=r"was saved for a Embedding with \{'padding_idx': (None|0)\}"):
        pr.load_compressed(tmp_path, wrong)


class Tied(nn.Module):
    """A head before the embedding whose weight it shares."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.words = nn.Linear(16, 50), nn.Embedding(50, 16)
        self.head.weight = self.words.weight

    def forward(self, indices):
        return self.head(self.words(indices))


def tied():
    """Return the model with one set of codes for both layers."""
    model = Tied()
    embedding, head = QuantizedEmbedding.from_embedding(model.words, 5), QuantizedLinear(16, 50, 5)
    head._with_bias_of(model.head)
    buffers_of(head).update(buffers_of(embedding))
    model.words, model.head = embedding, head
    return model


def assert_shared(model):
    embedding, head = buffers_of(model.words), buffers_of(model.head)
    assert embedding.keys() == head.keys()
    assert all(embedding[name] is head[name] for name in embedding)


@pytest.mark.parametrize(
    "change",
    [
        copy.deepcopy,
        lambda model: model.half(),
        lambda model: model.to(torch.float64),
        lambda model: model.to("meta"),
        lambda model: model.to("meta").to_empty(device="cpu"),
    ],
    ids=["deepcopy", "half", "double", "meta", "to_empty"],
)
def test_shared_codes_stay_shared(change):
    model = tied()
    assert_shared(model)
    assert_shared(change(model))


def test_shared_codes_in_states_and_files(tmp_path):
    model, indices = tied(), torch.arange(7)
    other = tied().to("meta").to_empty(device="cpu")
    other.load_state_dict(model.state_dict())
    assert_shared(other)
    assert torch.equal(other(indices), model(indices))
    pr.save_compressed(model, tmp_path)
    restored = pr.load_compressed(tmp_path, Tied())
    assert_shared(restored)
    assert torch.equal(restored(indices), model(indices))
    assert (tmp_path / "model.safetensors").stat().st_size < 1500  # 662 bytes of codes once, and the names


def test_expanded_while_loading(tmp_path):
    """An embedding and a tied head become plain layers of one weight again, as does a bag."""
    model = nn.Sequential(tied(), QuantizedEmbeddingBag(9, 4, mode="sum"))
    pr.save_compressed(model, tmp_path)
    plain = pr.load_compressed(tmp_path, nn.Sequential(Tied(), nn.EmbeddingBag(9, 4, mode="sum")), expand=True)
    assert [type(module) for module in plain.modules()][2:] == [nn.Linear, nn.Embedding, nn.EmbeddingBag]
    assert plain[0].words.weight is plain[0].head.weight
    assert torch.equal(plain[0].words.weight, model[0].words.weight)
    indices = torch.arange(7)
    torch.testing.assert_close(plain[0](indices), model[0](indices))


def test_shared_scales_are_trained_once():
    model = tied()
    for module in (model.words, model.head):
        assert not module.trains_scales
    pr.nn.quantized.state.train_scales_([model.words, model.head])
    assert model.words.scale_logs is model.head.scale_logs
    model(torch.arange(4)).sum().backward()
    pr.nn.quantized.state.train_scales_([model.words, model.head], train=False)
    assert_shared(model)


def test_back_to_torch():
    model, indices = tied(), torch.arange(7)
    expected = model(indices)
    report = pr.to_linears_(model)
    assert [entry.became for entry in report.replaced] == ["Linear(16, 50)", "Embedding(50, 16)"]
    assert model.words.weight is model.head.weight
    torch.testing.assert_close(model(indices), expected)
    bags = nn.Sequential(QuantizedEmbeddingBag(9, 4, mode="sum"))
    pr.to_linears_(bags)
    assert type(bags[0]) is nn.EmbeddingBag
