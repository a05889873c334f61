"""What tests of both attention kernels share: poisoned memory, graphs of the compiler, derivatives, memory."""

import torch
from tolerances import assert_close
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func


class _Poisoned:
    """Torch, whose new memory is full of NaN."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *args, **kwargs):
        return torch.full(args[0] if isinstance(args[0], tuple | torch.Size) else args, torch.nan, **kwargs)

    def empty_like(self, x):
        return torch.full_like(x, torch.nan)


def poison_memory(module, monkeypatch):
    """Let a module of kernels take memory full of NaN, so that a number that is not written is seen."""
    monkeypatch.setattr(module, "torch", _Poisoned())


def assert_one_graph_for_every_length(function, check):
    """Compile a function and call ``check(compiled, n)`` for three lengths: one graph each way, with the operators."""
    torch._dynamo.reset()
    graphs = []

    def record(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=aot_autograd(fw_compiler=record))
    for n in (5, 70, 66):
        check(compiled, n)
    assert len(graphs) == 2
    assert f"panther.{function.__name__}.default" in graphs[0]
    assert f"panther.{function.__name__}_backward.default" in graphs[1]


def second_derivatives(function, args, grad):
    """Return the derivatives of a penalty on the gradients of a function, at its arguments and at ``grad``."""
    grad = grad.requires_grad_()
    first = torch.autograd.grad(function(*args), args, grad, create_graph=True)
    return torch.autograd.grad(sum(g.sin().sum() for g in first), [*args, grad])


def assert_memory_is_linear(attend):
    """``attend(q, v)`` over 16,384 positions, a mean of the values so far, holds nothing like n^2 scores: 1 GiB."""
    n = 16384
    q, v = torch.ones(n, 1), torch.arange(float(n))[:, None]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        y = attend(q, v)
    assert_close(y[:, 0], torch.arange(n) / 2.0)
    assert max(event.cpu_memory_usage for event in profile.key_averages()) < 64 * 2**20
