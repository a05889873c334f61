"""The Triton kernels, demanded, on the CPU in the interpreter and on a GPU if the tests marked so are asked for."""

import functools
import inspect
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from panther.kernels import selection
from panther.kernels.ops._plans import forget_plans


@pytest.fixture(scope="session", autouse=True)
def _interpret_faster():
    """Spare Triton's interpreter work that changes no result, and takes a third of the time of these tests.

    At each call of a function in a kernel, it looks through all names of ``triton.language`` for those to replace: they
    are remembered here. Of each sum and product of integers, it computes whether they overflow, and does not look at
    the result, because its option ``debug`` is off: the check is turned off here.
    """
    if not (find_spec("triton") and selection.interpreting()):
        yield
        return
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @functools.cache
    def builtin_names(namespace):
        return [name for name, member in inspect.getmembers(namespace) if is_builtin(member)]

    def patch_builtin(namespace, *arguments):
        for name in builtin_names(namespace):
            member = getattr(namespace, name)
            if is_builtin(member):  # not replaced by a call further out
                interpreter._patch_attr(namespace, name, member, *arguments)

    builder = interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_builtin", patch_builtin)
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield


@pytest.fixture(autouse=True)
def _forget_plans():
    """Plan again in every test, because tests replace what plans are chosen by."""
    forget_plans()
    yield
    forget_plans()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """A device on which ``PANTHER_KERNELS=triton`` holds during the test."""
    pytest.importorskip("triton")
    if request.param == "cpu" and not selection.interpreting():
        pytest.skip("kernels run on the CPU only in the interpreter: set TRITON_INTERPRET=1")
    monkeypatch.setenv("PANTHER_KERNELS", "triton")
    selection.backend.cache_clear()
    yield torch.device(request.param)
    selection.backend.cache_clear()


@pytest.fixture
def poison(monkeypatch):
    """Fill what ``new_empty`` returns with NaN, as memory may be."""
    new_empty = torch.Tensor.new_empty

    def poisoned(*args, **kwargs):
        tensor = new_empty(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
