import pytest
import torch
from panther.kernels import backend, selection, sketched_matmul


@pytest.fixture(autouse=True)
def _forget():
    selection.backend.cache_clear()
    yield
    selection.backend.cache_clear()


@pytest.mark.parametrize("choice", [None, "auto", "torch"])
def test_backend_falls_back_to_torch(monkeypatch, choice):
    monkeypatch.delenv("PANTHER_KERNELS", raising=False)
    if choice:
        monkeypatch.setenv("PANTHER_KERNELS", choice)
    assert backend() == "torch"


def test_an_explicit_triton_that_cannot_run_raises(monkeypatch):
    monkeypatch.setenv("PANTHER_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    operands = [torch.ones(2, 2)] * 5
    for call in (backend, lambda: sketched_matmul(*operands)):
        with pytest.raises(RuntimeError, match=r"no GPU: use PANTHER_KERNELS=auto, or set TRITON_INTERPRET=1"):
            call()


def test_an_explicit_triton_that_is_not_installed_raises(monkeypatch):
    monkeypatch.setenv("PANTHER_KERNELS", "triton")
    monkeypatch.setattr(selection, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="run pip install triton"):
        backend()


def test_auto_takes_triton_on_a_gpu_unless_interpreting(monkeypatch):
    monkeypatch.delenv("PANTHER_KERNELS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(selection, "find_spec", lambda name: object())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend() == "torch"
    selection.backend.cache_clear()
    monkeypatch.delenv("TRITON_INTERPRET")
    assert backend() == "triton"
    assert not selection.use_triton("it", torch.device("cpu"))
    assert selection.use_triton("it", torch.device("cuda"))
    assert not selection.use_triton("it", torch.device("cuda"), "takes none")
    assert not selection.use_triton("it", torch.device("meta"))


def test_a_refusal_says_which_rule_failed_when_triton_is_demanded(monkeypatch):
    monkeypatch.setenv("PANTHER_KERNELS", "triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="the kernel of it takes float32, not float64: use PANTHER_KERNELS=auto"):
        selection.use_triton("it", torch.device("cuda"), "takes float32, not float64")
    with pytest.raises(RuntimeError, match="the kernel of it runs on a GPU, and the operands are on 'cpu'"):
        selection.use_triton("it", torch.device("cpu"))


def test_unknown_backend_names_the_known(monkeypatch):
    monkeypatch.setenv("PANTHER_KERNELS", "cuda")
    with pytest.raises(ValueError, match="auto, torch, triton"):
        backend()
