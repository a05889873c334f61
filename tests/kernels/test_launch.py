"""Launches without Triton's front end: on a GPU that runs nothing, and in the interpreter."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import waits
from panther.kernels import sketched_matmul
from panther.kernels.ops import _plans, library
from panther.kernels.ops import sketched as ops
from tolerances import KERNEL_RMS, rms_error
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def comparisons():
    """The number of comparisons of each kernel, from a process in which kernels are not interpreted."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "tests/support/checked_launches.py", "25"]
    done = waits.run(command, 250, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    _, *lines = done.stdout.splitlines()
    return {name: int(count) for name, count in (line.split() for line in lines)}


def test_a_direct_launch_passes_what_triton_would_pass(comparisons):
    assert len(comparisons) == 13
    assert all(count > 0 for count in comparisons.values()), comparisons


def operands(rows=3, n_in=40, n_out=70, R=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    shapes = ((rows, n_in), (n_in, R), (R, n_out), (R, n_out), (n_in, R), (n_out,))
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


def test_a_plan_serves_later_calls(device, monkeypatch):
    args = [operand.to(device) for operand in operands()]
    expected = sketched_matmul(*args)
    assert len(ops._plans) == 1
    monkeypatch.setattr(ops, "_check", None)
    assert torch.equal(sketched_matmul(*args), expected)
    later = [operand.to(device) for operand in operands()]
    assert torch.equal(sketched_matmul(*later), expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: torch.cat((x, x)),
        lambda x: x.mT.contiguous().mT,
        lambda x: torch.cat((x.flatten(), x.flatten()))[1 : x.numel() + 1].view_as(x),
    ],
    ids=["rows", "strides", "address"],
)
def test_other_operands_get_other_plans(device, change):
    x, *factors = [operand.to(device) for operand in operands()]
    sketched_matmul(x, *factors)
    other = change(x)
    result = sketched_matmul(other, *factors)
    assert len(ops._plans) == 2
    S1, U1, S2, U2, bias = (factor.double() for factor in factors)
    exact = other.double() @ S1 @ U1 + other.double() @ U2 @ S2 + bias
    assert rms_error(result, exact) < KERNEL_RMS[torch.float32]


def test_a_change_of_precision_gets_another_plan(device):
    args = [operand.to(device) for operand in operands()]
    previous_precision = torch.backends.cuda.matmul.fp32_precision
    try:
        for precision in ("ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = precision
            sketched_matmul(*args)
    finally:
        torch.backends.cuda.matmul.fp32_precision = previous_precision
    assert len(ops._plans) == 2


def test_wrong_shapes_are_refused_after_a_plan_was_made(device):
    x, *factors = [operand.to(device) for operand in operands()]
    sketched_matmul(x, *factors)
    with pytest.raises(ValueError, match="sketched_matmul takes x"):
        sketched_matmul(x[:, :-1], *factors)


def test_the_number_of_plans_is_bounded(monkeypatch):
    monkeypatch.setattr(_plans, "_MOST_PLANS", 4)
    plans = _plans.Plans()
    for key in range(11):
        assert plans.add(key, lambda: None) is plans[key]
        assert len(plans) <= 4


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0"])
def test_an_unknown_launcher_is_not_used(version, monkeypatch):
    """What is not known goes through ``kernel[grid](...)``, which is public."""
    triton = pytest.importorskip("triton")
    from panther.kernels._triton import _runtime

    class Launcher:
        def __call__(self, gridX, gridY, gridZ, stream, function, *args):
            pass

    class Other:
        def __call__(self, grid, stream, *args):
            pass

    monkeypatch.setattr(triton, "__version__", "3.6.0")
    assert _runtime._is_known(Launcher())
    assert not _runtime._is_known(Other())
    monkeypatch.setattr(triton, "__version__", version)
    assert not _runtime._is_known(Launcher())
    kernel = SimpleNamespace(arg_names=["x", "N"])
    assert _runtime.bind(kernel, object(), (1,), (), {"N": 1}) is None


@pytest.mark.parametrize("enters", [True, False])
def test_a_profiler_sees_every_launch(enters, monkeypatch):
    triton = pytest.importorskip("triton")
    from panther.kernels._triton import _launch, _runtime

    direct, observed = [], []
    launch = _launch.Launch(None, (1,))
    launch._direct = lambda *pointers: direct.append(pointers)
    launch._is_bound = True
    launch._kernel = {(1,): lambda *tensors: observed.append(tensors)}
    launch(None)
    assert (len(direct), len(observed)) == (1, 0)
    runtime = triton.knobs.runtime
    chain = runtime.launch_enter_hook if enters else runtime.launch_exit_hook

    def hook(metadata):
        pass

    chain.add(hook)
    try:
        assert _runtime.are_launches_observed()
        launch(None)
    finally:
        chain.remove(hook)
    assert (len(direct), len(observed)) == (1, 1)


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_mode_sees_the_operator(device):
    args = [operand.to(device).requires_grad_() for operand in operands()]
    with Recording() as mode:
        out = sketched_matmul(*args)
    assert "panther.sketched_matmul.default" in mode.names
    reference = sketched_matmul(*args)
    assert torch.equal(out, reference)
    for gradients in zip(*(torch.autograd.grad(y.sum(), args) for y in (out, reference)), strict=True):
        assert torch.equal(*gradients)


def test_the_operator_is_not_called_where_nothing_observes(device, monkeypatch):
    called = []
    function = library._without_dispatch(
        lambda x: called.append("operator") or x.clone(),
        lambda x: called.append("implementation") or x.clone(),
        None,
        lambda ctx, grad: grad * 2,
    )
    x = torch.ones(2, device=device)
    function(x)
    function(torch.nn.Parameter(x)).sum().backward()
    with torch.device(device):  # as torch.set_default_device
        function(x)
    assert called == ["implementation"] * 3
    with Functions():
        function(x)
    torch.func.vmap(function)(x)
    with torch.autograd.forward_ad.dual_level():
        function(x)
    assert called[3:] == ["operator"] * 3


def test_second_derivatives_without_the_operator(device):
    args = [operand.to(device).double().requires_grad_() for operand in operands(2, 5, 4, 3)]
    single = [operand.detach().float().requires_grad_() for operand in args]
    results = []
    for x, S1, U1, S2, U2, bias in (args, single):
        y = sketched_matmul(x, S1, U1, S2, U2, bias) if x.dtype is torch.float32 else x @ S1 @ U1 + x @ U2 @ S2 + bias
        first = torch.autograd.grad(y.sin().sum(), (x, S1, S2), create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), (x, S1, U1, S2, U2)))
    for exact, ours in zip(*results, strict=True):
        assert rms_error(ours, exact) < 4 * KERNEL_RMS[torch.float32]
