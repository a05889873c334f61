"""The Triton kernels, demanded, on the CPU in the interpreter and on a GPU if the tests marked so are asked for."""

import pytest
import torch
from panther.kernels import _backend


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """A device on which ``PANTHER_KERNELS=triton`` holds during the test."""
    pytest.importorskip("triton")
    if request.param == "cpu" and not _backend.interpreting():
        pytest.skip("kernels run on the CPU only in the interpreter: set TRITON_INTERPRET=1")
    monkeypatch.setenv("PANTHER_KERNELS", "triton")
    _backend.backend.cache_clear()
    yield torch.device(request.param)
    _backend.backend.cache_clear()
