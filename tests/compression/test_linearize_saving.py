"""Files of models with linear attention: they come back linear, with the saved window, or are refused with the fix.

People expected a saved model to come back as they had saved it, and got the softmax model or another window.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import panther as pr
from panther.distributed import checkpoint
from panther.errors import CheckpointError, FormatError, SketchMismatchError
from panther.nn import LearnedLinearAttention, RandMultiHeadAttention

WIDTH, LENGTH = 16, 30
WITHOUT_RECORDS = Path(__file__).parent / "linearized_without_records"  # written by an earlier version


class Model(nn.Module):
    """Two attention modules, one of which has two names."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = (nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))
        self.again, self.head = self.first, nn.Linear(WIDTH, 24)

    def forward(self, x):
        for attention in (self.first, self.last, self.again):
            x = x + attention(x, x, x, need_weights=False)[0]
        return self.head(x)


def batches():
    return list(torch.randn(5, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).split(1))


def linear(**options):
    """Return a model whose parameters are those of no fresh one, so that they have to come from a file."""
    model = Model().eval()
    pr.linearize_(model, **({"num_features": 4, "window": 3} | options))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def output(model):
    with torch.no_grad():
        return model(batches()[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_plain_model_becomes_the_saved_one(device, dtype, tmp_path):
    model = linear(exclude="last").to(dtype)
    pr.save_compressed(model, tmp_path)
    restored = pr.load_compressed(tmp_path, Model().eval().to(device))
    assert restored.again is restored.first
    assert restored.first.linear_attention.query_weight.dtype is dtype
    assert type(restored.last) is nn.MultiheadAttention
    torch.testing.assert_close(output(restored.float()), output(model.float()), rtol=0, atol=0)


def test_projections_may_be_compressed_too(tmp_path):
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

        def forward(self, x):
            return self.down(self.up(self.attention(x, x, x)[0]).relu())

    model = Split().eval()
    pr.linearize_(model, batches(), num_features=4, window=3, steps=2, measure_speed=False)
    pr.compress(model, 0.5, batches(), forms=["int8"], measure_speed=False)
    pr.save_compressed(model, tmp_path)
    torch.testing.assert_close(output(pr.load_compressed(tmp_path, Split().eval())), output(model), rtol=0, atol=0)


def test_another_window_is_refused_before_anything_changes(tmp_path):
    model, other = linear(), linear(window=5)
    pr.save_compressed(model, tmp_path)
    first_state = copy.deepcopy(other.state_dict())
    with pytest.raises(FormatError, match=r"'window': 3.*'window': 5.*softmax attention, which will be converted"):
        pr.load_compressed(tmp_path, other)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="saved with window=3 and this module has window=5"):
            other.load_state_dict(model.state_dict(), strict=strict)
    own = other.state_dict()
    assert all(torch.equal(value, own[name]) for name, value in first_state.items() if "linear_attention" in name)
    same = linear()
    assert pr.load_compressed(tmp_path, same) is same


def test_an_error_leaves_the_softmax(tmp_path):
    pr.save_compressed(linear(), tmp_path)
    model = Model()
    model.head = nn.Linear(WIDTH, 5)
    with pytest.raises(FormatError, match="different shape"):
        pr.load_compressed(tmp_path, model)
    assert type(model.first) is type(model.last) is nn.MultiheadAttention
    narrow = Model()
    narrow.first = narrow.again = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    with pytest.raises(FormatError, match=r"2 heads of width 8.*\(4, 4\)"):
        pr.load_compressed(tmp_path, narrow)
    narrow.first = narrow.again = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(FormatError, match="has a Linear there"):
        pr.load_compressed(tmp_path, narrow)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"class": "Linear"}, "class 'Linear', which is not allowed"),
        ({"args": {"window": 3}}, "is built from num_heads"),
        ({"args": {"num_heads": 2, "head_dim": 8, "num_features": 4, "window": -1}}, "'window': -1"),
        ({"args": {"num_heads": 2, "head_dim": 8, "num_features": "4", "window": 3}}, "'num_features': '4'"),
    ],
)
def test_a_strange_record_is_refused(change, message, tmp_path):
    pr.save_compressed(linear(), tmp_path)
    path = tmp_path / "panther.json"
    manifest = json.loads(path.read_text())
    manifest["modules"]["last"] |= change
    manifest["checksum"] = pr.nn.io.record_checksum({key: manifest[key] for key in manifest if key != "checksum"})
    path.write_text(json.dumps(manifest))
    with pytest.raises(FormatError, match=message):
        pr.load_compressed(tmp_path, Model())


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()


def test_a_folder_without_records_loads_into_a_converted_model():
    expected = load_file(WITHOUT_RECORDS / "expected.safetensors")
    with pytest.raises(FormatError, match=r"holds linear attention.*convert it by pr.linearize_\(model, num_features"):
        pr.load_compressed(WITHOUT_RECORDS, encoder())
    model = encoder()
    pr.linearize_(model, num_features=4, window=3)
    pr.load_compressed(WITHOUT_RECORDS, model)
    with torch.no_grad():
        torch.testing.assert_close(model(expected["input"]), expected["output"])
    # So does a state_dict, and strictly.
    state = {name: x for name, x in load_file(WITHOUT_RECORDS / "model.safetensors").items()}
    again = encoder()
    pr.linearize_(again, num_features=4, window=3)
    again.load_state_dict(state)
    assert not any(name.endswith(".record") for name in state)
    with torch.no_grad():
        torch.testing.assert_close(again(expected["input"]), expected["output"])


def test_a_model_on_the_meta_device_is_converted_and_filled(tmp_path):
    model = linear()
    pr.save_compressed(model, tmp_path)
    restored = checkpoint.restore_architecture(tmp_path, lambda: Model().eval())
    assert restored.first.linear_attention.record.is_meta
    pr.distributed.materialize_(restored, tmp_path)
    torch.testing.assert_close(output(restored), output(model), rtol=0, atol=0)


def test_a_training_checkpoint_builds_linear_attention_again(tmp_path):
    model = linear()
    checkpoint.save(tmp_path, model, step=1)
    with pytest.raises(CheckpointError, match="restore_architecture"):
        checkpoint.load(tmp_path, Model())
    with pytest.raises(CheckpointError, match="window"):
        checkpoint.load(tmp_path, linear(window=5))
    restored = checkpoint.restore_architecture(tmp_path, Model().eval())
    checkpoint.load(tmp_path, restored)
    torch.testing.assert_close(output(restored), output(model), rtol=0, atol=0)
    checkpoint.export(tmp_path, tmp_path / "exported")
    exported = pr.load_compressed(tmp_path / "exported", Model().eval())
    torch.testing.assert_close(output(exported), output(model), rtol=0, atol=0)


def test_a_training_checkpoint_without_records_loads(tmp_path):
    model = linear()
    for module in model.modules():
        if isinstance(module, LearnedLinearAttention):  # as an earlier version made it
            del module.record
    checkpoint.save(tmp_path, model, step=1)
    restored = linear()
    checkpoint.load(tmp_path, restored)
    torch.testing.assert_close(output(restored), output(model), rtol=0, atol=0)


def test_the_record_is_there_after_to_empty():
    with torch.device("meta"):
        module = LearnedLinearAttention(2, 8, 4, window=7)
    module.to_empty(device="cpu").reset_parameters()
    assert module.record.tolist()[1] == 7


@pytest.mark.parametrize("change", [{"kernel_fn": "relu"}, {"kernel_fn": "oprf"}, {"iscausal": True}])
def test_another_kernel_of_random_features_is_refused(change):
    """Its tensors have the same shapes."""
    settings = {"kernel_fn": "softmax", "seed": 0}
    layer, other = RandMultiHeadAttention(16, 2, 8, **settings), RandMultiHeadAttention(16, 2, 8, **(settings | change))
    state = layer.state_dict()
    with pytest.raises(SketchMismatchError, match="kernel_fn='softmax' and iscausal=False"):
        other.load_state_dict(state)
    state["_extra_state"][2] &= (1 << 40) - 1  # as an earlier version wrote it
    other.load_state_dict(state)
    RandMultiHeadAttention(16, 2, 8, **settings).load_state_dict(layer.state_dict())
