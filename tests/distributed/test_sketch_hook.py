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


def test_the_decoder_is_a_multiple_of_an_orthogonal_projection_and_has_no_bias():
    """With c rows in a column, arrived / c is a projection onto the signs, and arrived has the mean x."""

    def run(size, fraction, steps=300):
        torch.manual_seed(size)
        parameter, x = torch.zeros(size, dtype=torch.float64), torch.randn(size, dtype=torch.float64)
        hook, arrived = Sketch(dist.group.WORLD, fraction), []
        columns = torch.arange(size) % math.ceil(size * fraction)
        rows = columns.bincount()[columns]
        for _ in range(steps):
            arrived.append(sent(hook, x, parameter))
            projection = arrived[-1] / rows
            per_column = torch.zeros(size, dtype=torch.float64).index_add_(0, columns, projection * (x - projection))
            assert per_column.abs().max() <= 1e-12 * (x @ x).item()
        errors = torch.stack(arrived) - x
        # The squared error of an entry is the sum of the squares of the others in its column.
        variance = torch.zeros(size, dtype=torch.float64).index_add_(0, columns, x.square())[columns] - x.square()
        torch.testing.assert_close(errors.square().mean(0).sum(), variance.sum(), rtol=0.4, atol=1e-12)
        bound = 6 * (variance / steps).sqrt() + 1e-12  # an entry exceeds it with a probability of 2e-9
        assert (errors.mean(0).abs() <= bound).all(), (size, fraction)

    cases = [(1, 0.1), (7, 0.3), (12, 0.5), (1001, 0.1), (999, 0.6)]
    on_ranks(lambda: [run(*case) for case in cases] and None, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_message_has_the_dtype_of_the_gradients(dtype):
    def run():
        torch.manual_seed(0)
        parameter, x = torch.zeros(501, dtype=dtype), torch.randn(501).to(dtype)
        exact, rounded = Sketch(dist.group.WORLD, 0.25), Sketch(dist.group.WORLD, 0.25)
        for _ in range(5):
            expected = sent(exact, x.double(), parameter)
            arrived = sent(rounded, x, parameter)
            assert arrived.dtype is dtype
            assert (arrived.double() - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()

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
