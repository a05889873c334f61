"""What kernels are told of the device, on devices that are not there."""

from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")
from panther.kernels._triton import _device  # noqa: E402


class Driver:
    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0


@pytest.fixture
def on(monkeypatch):
    """Pretend to be on a GPU of the given kind."""

    def pretend(backend, arch):
        target = SimpleNamespace(backend=backend, arch=arch)
        monkeypatch.setattr(triton.runtime.driver, "_active", Driver(target))
        monkeypatch.setattr(_device, "INTERPRETED", triton.language.constexpr(False))

    return pretend


@pytest.fixture(params=["old", "new"])
def precision(request):
    """Set float32's precision by torch's old function or its new attribute, after which the old one cannot be read."""
    matmul = torch.backends.cuda.matmul
    previous_precision = matmul.fp32_precision

    def choose(full):
        if request.param == "old":
            torch.set_float32_matmul_precision("highest" if full else "high")
        else:
            matmul.fp32_precision = "ieee" if full else "tf32"

    yield choose
    torch.set_float32_matmul_precision("highest")
    matmul.fp32_precision = previous_precision


@pytest.mark.parametrize(
    ("backend", "arch", "full", "expected"),
    [
        ("cuda", 80, True, "tf32x3"),
        ("cuda", 90, False, "tf32"),
        ("hip", "gfx942", True, "ieee"),
        ("hip", "gfx942", False, "tf32"),
        ("hip", "gfx90a", False, "ieee"),
    ],
)
def test_precision_of_products(on, precision, backend, arch, full, expected):
    on(backend, arch)
    precision(full)
    assert _device.dot_precision(torch.float32) == expected
    assert _device.dot_precision(torch.bfloat16) == "ieee"


@pytest.mark.parametrize(
    ("backend", "arch", "warpgroups", "tensor_memory"),
    [
        ("cuda", 80, False, False),
        ("cuda", 90, True, False),
        ("cuda", 100, True, True),
        ("cuda", 103, True, True),
        ("cuda", 120, False, False),
        ("hip", "gfx942", False, False),
    ],
)
def test_matrix_units_of_chips(on, backend, arch, warpgroups, tensor_memory):
    on(backend, arch)
    assert _device.has_warpgroups() is warpgroups
    assert _device.has_tensor_memory() is tensor_memory


def test_pipelines_are_shallow_on_amd(on):
    on("cuda", 90)
    assert _device.pipeline_stages(4) == 4
    on("hip", "gfx942")
    assert _device.pipeline_stages(4) == 2
    assert _device.pipeline_stages(1) == 1


def test_the_integers_of_the_host_are_those_of_triton():
    assert all(_device.next_power_of_2(n) == triton.next_power_of_2(n) for n in range(300))
    assert all(_device.cdiv(a, b) == triton.cdiv(a, b) for a in range(60) for b in range(1, 40))
