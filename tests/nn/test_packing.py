"""pr.pack_: what quantized layers run on, copies without a compiler, and files that stay the same."""

import pytest
import torch
from panther.kernels.cpu import native
from torch import nn

import panther as pr
from panther.nn import QuantizedConv2d, QuantizedEmbedding, QuantizedLinear


def model():
    torch.manual_seed(0)
    layers = QuantizedLinear(64, 48, 4, group_size=32), QuantizedLinear(48, 16, 3, group_size=16), nn.Linear(16, 8)
    return nn.Sequential(*layers, QuantizedLinear(8, 4, None, low_rank=2)).to(torch.bfloat16)


def saved(module, folder):
    pr.save_compressed(module, folder)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.skipif(native.library() is None, reason="needs a C++ compiler and AVX2")
def test_with_a_compiler_codes_are_multiplied_as_they_are():
    report = pr.pack_(model())
    assert [layer.runs_on for layer in report.layers] == ["compiled kernel", "compiled kernel", "factors"]
    assert report.added_bytes == 0
    assert str(report).startswith("compiled kernel: 2 layers, ")


def test_without_a_compiler_codes_of_4_bits_get_a_copy(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "takes", lambda *_: False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    module, x = model(), torch.randn(2, 64, dtype=torch.bfloat16)
    before = saved(module, tmp_path / "before")
    with torch.no_grad():
        unpacked = module(x)
        report = pr.pack_(module)
        packed = module(x)
    ways = [layer.runs_on for layer in report.layers]
    assert ways == ["torch's kernel for 4 bits", "expanded blocks", "factors"]
    assert report.added_bytes == module[0].codes.nbytes
    assert module[0].packed_copy
    torch.testing.assert_close(packed, unpacked, atol=0.05, rtol=0.05)
    assert saved(module, tmp_path / "packed") == before
    assert pr.unpack_(module) is module
    assert not module[0].packed_copy
    assert pr.pack_(module, rows=64).layers[0].runs_on == "expanded blocks"


def test_every_kind_of_layer_is_named():
    layers = {
        "conv": QuantizedConv2d(3, 8, 3, bits=4, group_size=9),
        "table": QuantizedEmbedding(10, 16, bits=8),
        "experts": pr.nn.QuantizedExperts(2, 32, 16, bits=4, group_size=32),
    }
    report = pr.pack_(nn.ModuleDict(layers))
    assert [layer.name for layer in report.layers] == list(layers)
    assert all(layer.stored_bytes > 0 for layer in report.layers)


def test_what_is_no_model_and_what_has_nothing_to_pack():
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, not str"):
        pr.pack_("model")
    with pytest.raises(ValueError, match="rows"):
        pr.pack_(model(), rows=0)
    assert str(pr.pack_(nn.Linear(2, 2))) == "no quantized layers"


def test_a_saved_model_is_loaded_packed(tmp_path):
    module = model()
    pr.save_compressed(module, tmp_path / "folder")
    like = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 16), nn.Linear(16, 8), nn.Linear(8, 4)).to(torch.bfloat16)
    loaded = pr.load_compressed(tmp_path / "folder", like, packed=True)
    pr.pack_(module)  # Without a compiler, torch's kernel rounds unlike an expanded weight.
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(loaded(x), module(x))
