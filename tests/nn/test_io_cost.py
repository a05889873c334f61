"""What loading costs: the bytes of a file once, and a number of steps in proportion to the layers."""

import sys

import pytest
import torch
from live_bytes import LiveBytes
from torch import nn

import panther as pr
from panther.nn import QuantizedLinear
from panther.nn.specs import module_names_of


def large(device=None):
    torch.manual_seed(0)
    sizes = (500, 30, 400, 40, 700)
    return nn.Sequential(*[nn.Linear(500, size, device=device) for size in sizes])


def with_quantized(model):
    model[1] = QuantizedLinear.from_linear(model[1], bits=8)
    model[3] = QuantizedLinear.from_linear(model[3], bits=5, group_size=None, low_rank=3)
    return model


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_loading_takes_the_bytes_of_the_file_once(tmp_path, device):
    saved = with_quantized(large())
    pr.save_compressed(saved, tmp_path)
    model = large(device)
    with LiveBytes() as live:
        model = pr.load_compressed(tmp_path, model)
    num_bytes = (tmp_path / "model.safetensors").stat().st_size
    # LiveBytes also counts tensors on the meta device, which the small quantized layers begin with.
    assert 0.95 * num_bytes < live.peak < 1.05 * num_bytes
    state = saved.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_check_of_a_folder_holds_one_tensor_at_a_time(tmp_path):
    pr.save_compressed(large(), tmp_path)
    with LiveBytes() as live:
        pr.nn.io.check_folder(tmp_path)
    assert live.peak < 1.05 * 4 * 500 * 700


def test_steps_grow_in_proportion_to_the_layers(tmp_path):
    def steps(num_layers):
        saved = nn.Sequential(*[nn.Sequential(QuantizedLinear(6, 4, 3, low_rank=1)) for _ in range(num_layers)])
        folder = pr.save_compressed(saved, tmp_path / str(num_layers))
        model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 4)) for _ in range(num_layers)])
        calls = 0

        def count(frame, event, arg):
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            pr.load_compressed(folder, model)
        finally:
            sys.setprofile(None)
        return calls

    steps(1)
    few, some, many = map(steps, (5, 25, 65))
    assert many - some < 2.2 * (some - few)


def test_entries_go_to_the_module_that_contains_them(tmp_path):
    class Outer(nn.Module):
        def __init__(self, make):
            super().__init__()
            self.a = make(8, 6)
            self.ab = nn.ModuleDict({"a": make(6, 5), "1": make(5, 7)})
            self.a1 = nn.ModuleList([make(7, 7) for _ in range(12)])

        def forward(self, x):
            x = self.ab["1"](self.ab["a"](self.a(x)))
            for layer in self.a1:
                x = layer(x)
            return x

    torch.manual_seed(3)
    saved, x = Outer(QuantizedLinear), torch.randn(3, 8)
    restored = pr.load_compressed(pr.save_compressed(saved, tmp_path), Outer(nn.Linear))
    assert torch.equal(restored(x), saved(x))
    assert [*module_names_of("ab.1.codes")] == ["", "ab", "ab.1", "ab.1.codes"]
    assert [*module_names_of("codes")] == ["", "codes"]


def test_memory_that_was_shared_is_shared_again(tmp_path):
    def pair():
        model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
        model[1].running_mean = model[0].running_mean
        return model

    saved = pair()
    saved[0].running_mean.copy_(torch.tensor([1.0, 2.0, 3.0]))
    restored = pr.load_compressed(pr.save_compressed(saved, tmp_path), pair())
    restored[0].running_mean[1] = 7
    assert restored[1].running_mean.tolist() == [1, 7, 3]
    assert restored[1].running_var.data_ptr() != restored[0].running_var.data_ptr()
