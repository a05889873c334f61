"""What tests of both attention kernels share: graphs of the compiler, derivatives, memory."""

import torch
from tolerances import assert_close
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func


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
