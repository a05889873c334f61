"""ONNX files of compressed models: small, equal to the model, and for batches and lengths that differ."""

import numpy as np
import pytest
import torch
from torch import nn

import panther as pr
from panther.errors import PantherError, SketchMismatchError
from panther.nn import QuantizedConv2d, QuantizedEmbedding, QuantizedLinear
from panther.nn.sketch_record import plain_state

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")
onnx_files = pytest.importorskip("panther.integrations.onnx")

pytestmark = pytest.mark.extra
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class Tokens(nn.Module):
    """An embedding and linear layers, with a head that may share the embedding's codes."""

    def __init__(self, embedding, *layers):
        super().__init__()
        self.embedding, self.layers = embedding, nn.Sequential(*layers)

    def forward(self, input_ids):
        return {"logits": self.layers(self.embedding(input_ids))}


def linear(columns, rows, bits, group_size, *, offset=0.0, bias=True, **form):
    """Return a quantized layer; an offset of its weights makes its zero points differ from the middle code."""
    dense = nn.Linear(columns, rows, bias=bias)
    with torch.no_grad():
        dense.weight += offset
    return QuantizedLinear.from_linear(dense, bits, group_size=group_size, **form)


def written(model, sample, tmp_path):
    """Return the graph of the file, a function that runs the file, and the size of the file."""
    path = tmp_path / "model.onnx"
    onnx_files.write_onnx(model, path, sample)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(inputs):
        return [torch.as_tensor(x) for x in session.run(None, {k: np.ascontiguousarray(v) for k, v in inputs.items()})]

    return onnx.load(path).graph, run, path.stat().st_size


def operators(graph):
    return [node.op_type for node in graph.node]


LINEARS = [
    (64, 48, 2, 32, {}, "MatMulNBits"),
    (64, 48, 3, None, {"offset": 0.1}, "MatMulNBits"),
    (72, 33, 4, 32, {"offset": -0.1, "low_rank": 3}, "MatMulNBits"),  # the last group is smaller
    (9, 1, 4, None, {"bias": False}, "MatMulNBits"),
    (96, 40, 4, 96, {}, "MatMulNBits"),
    (100, 40, 4, 48, {"offset": 0.1}, "MatMulNBits"),  # blocks of 16
    (70, 30, 4, 12, {"offset": 0.1}, "DequantizeLinear"),  # no block divides a group
    (70, 31, 5, 35, {"low_rank": 2}, "DequantizeLinear"),
    (64, 48, 6, 16, {"bias": False}, "DequantizeLinear"),
    (64, 48, 7, None, {}, "DequantizeLinear"),
    (65, 48, 8, None, {"offset": 0.1}, "DequantizeLinear"),
    (65, 48, 8, 32, {"offset": 0.1, "low_rank": 1}, "DequantizeLinear"),
]


@pytest.mark.parametrize(("columns", "rows", "bits", "group_size", "form", "operator"), LINEARS)
def test_weights_of_every_width_are_the_same_numbers(columns, rows, bits, group_size, form, operator, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(linear(columns, rows, bits, group_size, **form)).eval()
    graph, run, _ = written(model, {"input": torch.randn(3, columns)}, tmp_path)
    assert operators(graph).count(operator) == 1
    assert "forward" not in vars(model[0])
    assert [name for name, _ in model.named_modules()] == ["", "0"]
    for batch in (1, 3, 20):
        x = torch.randn(batch, columns)
        with torch.no_grad():
            torch.testing.assert_close(run({"input": x})[0], model(x), **CLOSE)


@pytest.mark.parametrize(
    ("bits", "group_size", "offset", "activations"),
    [
        (4, 32, 0.3, None),
        (4, 32, 0.0, "int8"),
        (3, 20, 0.3, None),
        (4, 7, 0.3, None),
        (8, None, 0.0, None),
        (6, 16, 0.3, None),
        (8, 16, 0.3, "int8"),
    ],
)
def test_a_head_that_shares_the_codes_of_an_embedding_shares_them_in_the_file(
    bits, group_size, offset, activations, tmp_path
):
    torch.manual_seed(0)
    dense = nn.Embedding(300, 60)
    with torch.no_grad():
        dense.weight += offset
    embedding = QuantizedEmbedding.from_embedding(dense, bits, group_size=group_size)
    head = QuantizedLinear(60, 300, bits, group_size=group_size, bias=False, activations=activations)
    for name in ("codes", "scales", "zeros"):
        setattr(head, name, getattr(embedding, name))
    model = Tokens(embedding, head).eval()
    graph, run, size = written(model, {"input_ids": torch.zeros(2, 7, dtype=torch.long)}, tmp_path)
    assert [value.name for value in graph.output] == ["logits"]
    if group_size in (None, 16, 32):
        padded = 300 * (60 if group_size is None else 64)  # codes, with the columns that fill the last group
        assert size < padded * (4 if bits <= 4 else 8) // 8 + 5 * embedding.scales.numel() + 6_000
    for batch, length in ((1, 1), (2, 7), (3, 11)):
        tokens = torch.randint(0, 300, (batch, length))
        with torch.no_grad():
            logits, expected = run({"input_ids": tokens})[0], model(tokens)["logits"]
        distance = torch.linalg.vector_norm(logits - expected) / torch.linalg.vector_norm(expected)
        assert distance < (1e-6 if activations is None else 0.02)


@pytest.mark.parametrize(("bits", "group_size", "low_rank"), [(8, None, 0), (4, 27, 2), (3, 25, 0)])
def test_convolutions(bits, group_size, low_rank, tmp_path):
    torch.manual_seed(0)
    dense = nn.Conv2d(6, 10, 3, padding=1, groups=2)
    model = QuantizedConv2d.from_conv(dense, bits, group_size=group_size, low_rank=low_rank).eval()
    graph, run, _ = written(model, {"input": torch.randn(3, 6, 8, 8)}, tmp_path)
    assert {"DequantizeLinear", "Conv"} <= set(operators(graph))
    x = torch.randn(1, 6, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(run({"input": x})[0], model(x), **CLOSE)


@pytest.mark.parametrize("bits", [4, 8])
def test_inputs_of_layers_that_are_rounded(bits, tmp_path):
    torch.manual_seed(0)
    layers = [linear(256, 256, bits, 64, activations="int8") for _ in range(2)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1]).eval()
    sample = {"input": torch.randn(4, 256)}
    graph, _, size = written(model, sample, tmp_path)
    assert operators(graph).count("MatMulNBits") == 2
    assert size < sum(t.nbytes for t in plain_state(model).values()) + 2 * 4 * 256 * 4 + 8_000
    agreement = onnx_files.compare_onnx(model, tmp_path / "model.onnx", [sample, {"input": torch.randn(1, 256)}])
    assert agreement.is_close
    assert 1e-3 < agreement.error < 0.02
    assert agreement.reference == "the output of the model in float32, with the inputs of layers not rounded"
    assert [layer.activations for layer in layers] == ["int8", "int8"]


@pytest.mark.parametrize("bits", [4, 8])
def test_half_precision(bits, tmp_path):
    torch.manual_seed(0)
    tiny = linear(64, 48, bits, 32)
    tiny.scales *= 1e-5  # below the numbers of float16
    model = nn.Sequential(linear(64, 64, bits, 32), tiny).half().eval()
    sample = {"input": torch.randn(3, 64, dtype=torch.float16)}
    _, run, _ = written(model, sample, tmp_path)
    assert run(sample)[0].dtype is torch.float16
    agreement = onnx_files.compare_onnx(model, tmp_path / "model.onnx", [sample])
    assert agreement.is_close
    assert model[0].dtype is torch.float16


def test_layers_in_float64_keep_their_own_forward(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(linear(64, 48, 4, 32).double()).eval()
    graph, run, _ = written(model, {"input": torch.randn(3, 64, dtype=torch.float64)}, tmp_path)
    assert "MatMulNBits" not in operators(graph)
    x = torch.randn(2, 64, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(run({"input": x})[0], model(x))


def test_trained_scales(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(linear(64, 48, 4, 32)).eval()
    model[0].train_scales_()
    with torch.no_grad():
        model[0].scale_logs += 0.3
    x = torch.randn(2, 64)
    _, run, _ = written(model, {"input": x}, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(run({"input": x})[0], model(x), **CLOSE)


def test_a_file_of_more_than_two_gigabytes_is_two_files(tmp_path, monkeypatch):
    monkeypatch.setattr("panther.integrations.onnx.writer._LARGEST_FILE", 100_000)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 200)).eval()
    _, run, size = written(model, {"input": torch.randn(3, 200)}, tmp_path)
    assert size < 10_000
    assert (tmp_path / "model.onnx.data").stat().st_size >= 160_000
    x = torch.randn(1, 200)
    with torch.no_grad():
        torch.testing.assert_close(run({"input": x})[0], model(x), **CLOSE)


class Several(nn.Module):
    def forward(self, ids, mask, decoder_ids, words, pixels):
        pooled = (ids * mask).sum(1) + decoder_ids.sum(1) + words.sum(1)
        return {"states": [ids + mask, 2 * ids], "pooled": pooled, "image": pixels * 2}


def test_names_of_inputs_outputs_and_sizes(tmp_path):
    sizes = {"mask": 7, "ids": 7, "decoder_ids": 5, "words": 4}
    sample = {name: torch.ones(2, length, dtype=torch.long) for name, length in sizes.items()}
    sample["pixels"] = torch.ones(2, 3)
    graph, _, _ = written(Several().eval(), sample, tmp_path)
    shapes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    assert shapes == {
        "mask": ["batch", "length"],
        "ids": ["batch", "length"],
        "decoder_ids": ["batch", "decoder_length"],
        "words": ["batch", "words_length"],
        "pixels": ["batch", 3],
        "states.0": ["batch", "length"],
        "states.1": ["batch", "length"],
        "pooled": ["batch"],
        "image": ["batch", 3],
    }
    assert [value.name for value in graph.input] == list(sample)


class Partial(nn.Module):
    def forward(self, x):
        return {"double": 2 * x, "absent": None, "sums": [x.sum(1), None]}


def test_absent_outputs_leave_the_names_of_the_others(tmp_path):
    model, sample = Partial().eval(), {"x": torch.randn(3, 5)}
    graph, run, _ = written(model, sample, tmp_path)
    assert [value.name for value in graph.output] == ["double", "sums.0"]
    x = torch.randn(2, 5)
    for output, expected in zip(run({"x": x}), (2 * x, x.sum(1)), strict=True):
        torch.testing.assert_close(output, expected)


def test_what_a_file_would_fix_is_refused(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    path = tmp_path / "model.onnx"
    with pytest.raises(PantherError, match=r"Sequential is in training mode, which a file would keep: call model.eval"):
        onnx_files.write_onnx(model, path, {"input": torch.ones(2, 4)})
    with pytest.raises(
        PantherError, match=r"input 'input' of the sample has the shape \(1, 4\), and the batch must be"
    ):
        onnx_files.write_onnx(model.eval(), path, {"input": torch.ones(1, 4)})
    with pytest.raises(PantherError, match="output 'output' of the Identity is one of its inputs"):
        onnx_files.write_onnx(nn.Identity().eval(), path, {"input": torch.ones(2, 4)})
    tokens = {"input": torch.ones(2, 1, dtype=torch.long)}
    with pytest.raises(PantherError, match="and the length must be at least 2"):
        onnx_files.write_onnx(model.eval(), path, tokens)
    assert not path.exists()


def test_grouped_products_of_experts_are_named(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MixtralConfig(vocab_size=11, num_key_value_heads=2, num_local_experts=2, **sizes)
    config.use_cache = False
    model = transformers.MixtralModel(config).eval()
    sample = {"input_ids": torch.ones(2, 3, dtype=torch.long)}
    with pytest.raises(PantherError, match=r"a product of experts, .*set_experts_implementation\('batched_mm'\)"):
        onnx_files.write_onnx(model, tmp_path / "model.onnx", sample)


def test_a_file_with_other_outputs_is_not_close(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(pr.nn.LowRankLinear(20, 10, 3)).eval()
    sample = {"input": torch.randn(3, 20)}
    written(model, sample, tmp_path)
    assert onnx_files.compare_onnx(model, tmp_path / "model.onnx", [sample]).is_close
    with torch.no_grad():
        model[0].bias += 0.1
    agreement = onnx_files.compare_onnx(model, tmp_path / "model.onnx", [sample])
    assert not agreement.is_close
    with torch.no_grad():
        model[0].bias.fill_(torch.nan)
    assert not onnx_files.compare_onnx(model, tmp_path / "model.onnx", [sample]).is_close


def test_codes_that_other_code_damaged_are_not_written(tmp_path):
    model = nn.Sequential(QuantizedLinear(64, 48, 4)).eval()
    model[0].codes.add_(1)
    with pytest.raises(SketchMismatchError, match="do not match the checksum"):
        onnx_files.write_onnx(model, tmp_path / "model.onnx", {"input": torch.randn(3, 64)})
    assert not (tmp_path / "model.onnx").exists()
