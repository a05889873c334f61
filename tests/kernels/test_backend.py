import pytest
import torch
from panther.kernels import _backend, backend, sketched_matmul


@pytest.fixture(autouse=True)
def _forget():
    _backend.backend.cache_clear()
    yield
    _backend.backend.cache_clear()


@pytest.mark.parametrize("choice", [None, "auto", "torch"])
def test_backend_falls_back_to_torch(monkeypatch, choice):
    monkeypatch.delenv("PANTHER_KERNELS", raising=False)
    if choice:
        monkeypatch.setenv("PANTHER_KERNELS", choice)
    assert backend() == "torch"


def test_an_explicit_triton_that_cannot_run_raises(monkeypatch):
    monkeypatch.setenv("PANTHER_KERNELS", "triton")
    with pytest.raises(RuntimeError, match="PANTHER_KERNELS=auto"):
        backend()
    operands = [torch.ones(2, 2)] * 5
    with pytest.raises(RuntimeError, match="PANTHER_KERNELS=auto"):
        sketched_matmul(*operands)


def test_unknown_backend_names_the_known(monkeypatch):
    monkeypatch.setenv("PANTHER_KERNELS", "cuda")
    with pytest.raises(ValueError, match="auto, torch, triton"):
        backend()
