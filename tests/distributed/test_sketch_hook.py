"""The hook that sends sums of gradient entries with random signs."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn

from panther.distributed import CommunicationCounter, data_parallel
from panther.distributed.data.comm_hooks.sketch import Sketch

pytestmark = pytest.mark.distributed


def sent(hook, x, parameter):
    """Return what arrives of a gradient in one step."""
    buffer = x.clone()
    bucket = SimpleNamespace(
        index=lambda: 0,
        is_last=lambda: True,
        buffer=lambda: buffer,
        parameters=lambda: [parameter],
        gradients=lambda: [buffer],
    )
    return hook.send(bucket).wait()


def test_the_decoder_is_an_orthogonal_projection_that_keeps_its_share():
    """The squared norms of what is sent and of what remains add up, and the first is 1 / c of a column on average."""

    def run(size, fraction):
        torch.manual_seed(size)
        parameter, x = torch.zeros(size, dtype=torch.float64), torch.randn(size, dtype=torch.float64)
        hook, shares = Sketch(dist.group.WORLD, fraction), []
        for _ in range(150):
            hook.load_state_dict(nn.Linear(1, 1), {"residuals": {}, "scale": 1.0, "step": hook.step})
            arrived = sent(hook, x, parameter)
            remaining = hook.residuals[parameter]
            torch.testing.assert_close(arrived + remaining, x, rtol=0, atol=1e-12)
            assert abs((arrived @ remaining).item()) <= 1e-12 * (x @ x).item()
            shares.append((arrived @ arrived / (x @ x)).item())
        num_columns = math.ceil(size * fraction)
        columns = torch.arange(size) % num_columns
        share = (x.square() / columns.bincount()[columns]).sum() / (x @ x)
        shares = torch.tensor(shares, dtype=torch.float64)
        bound = 5 * shares.std().item() / len(shares) ** 0.5 + 1e-12  # exceeded with a probability of 6e-7
        assert abs(shares.mean().item() - share.item()) <= bound, (size, fraction)

    cases = [(1, 0.1), (7, 0.3), (12, 0.5), (1001, 0.1), (999, 0.6)]
    on_ranks(lambda: [run(*case) for case in cases] and None, 1)


def test_rounding_is_sent_later():
    """The message is rounded to the dtype of the gradients, and the remaining part contains the error."""

    def run(dtype):
        torch.manual_seed(0)
        parameter, x = torch.zeros(501, dtype=dtype), torch.randn(501).to(dtype)
        hook, arrived = Sketch(dist.group.WORLD, 0.25), torch.zeros(501, dtype=torch.float64)
        for _ in range(20):
            arrived += sent(hook, x, parameter).double()
        total = arrived + hook.residuals[parameter].double()
        error = (total - 20 * x.double()).norm() / (20 * x.double()).norm()
        assert error <= 4 * torch.finfo(dtype).eps, dtype

    on_ranks(lambda: [run(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)] and None, 1)


def test_a_constant_gradient_arrives():
    """The stored part stays near c - 1 gradients."""

    def run():
        torch.manual_seed(1)
        parameter, x = torch.zeros(400, dtype=torch.float64), torch.randn(400, dtype=torch.float64)
        hook, steps = Sketch(dist.group.WORLD, 0.1), 400
        arrived = sum(sent(hook, x, parameter) for _ in range(steps))
        assert hook.residuals[parameter].norm() < 4 * 9 * x.norm()
        assert (arrived / steps - x).norm() < 0.1 * x.norm()

    on_ranks(run, 1)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3)).double()


def test_ranks_with_shares_of_a_batch_end_where_one_rank_does():
    """Sketches are linear, so that the same samples give the same steps on one, two and three ranks."""

    def run(ranks):
        model = data_parallel(build(), comm_hook="sketch", sketch_fraction=0.2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(12, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        x = x.view(ranks, -1, 7)[dist.get_rank()]
        with CommunicationCounter() as traffic:
            for _ in range(10):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()], traffic.bytes_by_operation

    one, two, three = (on_ranks(lambda ranks=ranks: run(ranks), ranks) for ranks in (1, 2, 3))
    for weights, sent_bytes in (*two, *three):
        for weight, expected in zip(weights, one[0][0], strict=True):
            torch.testing.assert_close(weight, expected, rtol=1e-10, atol=1e-12)
        assert sent_bytes["allreduce_"] == 10 * 8 * 30  # a fifth of 146 numbers, rounded up
