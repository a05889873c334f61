"""Collectives and bytes of one transformer block under tensor parallelism, forward and backward, as a table."""

import pytest
import torch
import torch.distributed as dist
from blocks import block, sequence_plan
from ranks import gradients_of, on_ranks
from torch import nn

from panther.distributed import CommunicationCounter, make_mesh, tensor_parallel
from panther.distributed.comm.collectives import all_gather
from panther.nn import SKLinear

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")]

WIDTH, INNER, HEADS, R, SAMPLES, LENGTH = 24, 36, 4, 3, 2, 10
NUMBER = 8  # bytes
ROWS = SAMPLES * LENGTH


def sketched(n, m):
    return SKLinear(n, m, R)


def encoder(make):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, dropout=0.0, batch_first=True, norm_first=True)
    layer.linear1, layer.linear2 = make(WIDTH, INNER), make(INNER, WIDTH)
    return layer


MAKERS = {"dense": nn.Linear, "sketched": sketched}
MODELS = {"block": block, "sequence": block, "encoder": encoder}


def results(model, x, part=slice(None)):
    leaf = x[:, part].clone().requires_grad_()
    out = model(leaf)
    (out.square().sum() / x.numel()).backward()
    return out.detach(), leaf.grad, gradients_of(model)


def count(kind, form):
    """Values and traffic of one rank; the second step's, because the first one compares shapes between ranks."""
    x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def rank():
        model = MODELS[kind](MAKERS[form]).double()
        tensor_parallel(model, make_mesh(tp=2)["tp"], sequence_plan() if kind == "sequence" else "auto")
        part = slice(None)
        if kind == "sequence":
            part = slice(5 * dist.get_rank(), 5 * dist.get_rank() + 5)
        out, dx, gradients = results(model, x, part)
        if kind == "sequence":
            out, dx = all_gather(out, 1), all_gather(dx, 1)
        model.zero_grad()
        leaf = x[:, part].clone().requires_grad_()
        with CommunicationCounter() as forward:
            y = model(leaf)
        with CommunicationCounter() as backward:
            y.sum().backward()
        return (out, dx, gradients), (forward.calls, forward.bytes, backward.calls, backward.bytes)

    expected = results(MODELS[kind](MAKERS[form]).double(), x)
    traffic = []
    for (out, dx, gradients), counted in on_ranks(rank):
        torch.testing.assert_close(out, expected[0], rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(dx, expected[1], rtol=1e-11, atol=1e-12)
        for name, gradient in expected[2].items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-12, msg=name)
        traffic.append(counted)
    assert traffic[0] == traffic[1]
    return traffic[0]


A_ROW = NUMBER * ROWS

# Of attention, then of the feed-forward block; dense q, k and v are one collective, and so are dense gate and up.
BYTES = {
    ("block", "dense"): (2 * A_ROW * WIDTH, 2 * A_ROW * WIDTH),
    ("block", "sketched"): (2 * A_ROW * 2 * R, A_ROW * 2 * R * (3 + 2)),
    # A gather counts what a rank gives. Backward: S1 of five layers, S2 and bias of two; dense biases send nothing.
    ("sequence", "dense"): (3 * A_ROW * WIDTH, 3 * A_ROW * WIDTH),
    ("sequence", "sketched"): (
        A_ROW * 2 * R * (3 + 2 + 4) // 2,
        A_ROW * 2 * R * (3 + 2 + 1) + NUMBER * (5 * WIDTH * R + 2 * WIDTH * (R + 1)),
    ),
    # The attention of an encoder is replicated.
    ("encoder", "dense"): (A_ROW * WIDTH, A_ROW * WIDTH),
    ("encoder", "sketched"): (A_ROW * 2 * R, A_ROW * 2 * R),
}
CALLS = {
    ("block", "dense"): (2, 2),  # was (2, 5)
    ("block", "sketched"): (2, 5),
    ("sequence", "dense"): (6, 4),  # was (12, 9); two of the six exchange shapes
    ("sequence", "sketched"): (12, 14),  # five of the twelve exchange shapes
    ("encoder", "dense"): (1, 1),
    ("encoder", "sketched"): (1, 1),
}


@pytest.mark.parametrize("form", MAKERS)
@pytest.mark.parametrize("kind", MODELS)
def test_collectives_and_bytes_of_a_block(kind, form):
    forward_calls, forward_bytes, backward_calls, backward_bytes = count(kind, form)
    assert (forward_calls, backward_calls) == CALLS[kind, form]
    shapes = (2 if form == "dense" else 5) * 9 * 8 if kind == "sequence" else 0  # ranks tell them before a gather
    assert (forward_bytes - shapes, backward_bytes) == BYTES[kind, form]


def test_a_model_s_sketches_are_sent_once():
    """Before anything is sharded: 8 bytes a layer, in one message; a layer then draws its shard from the seed."""

    def rank():
        model = nn.Sequential(sketched(WIDTH, INNER), nn.ReLU(), sketched(INNER, WIDTH), nn.ReLU(), sketched(WIDTH, 8))
        with CommunicationCounter() as traffic:
            tensor_parallel(model, make_mesh(tp=2)["tp"])
        parameters = [p for p in model.parameters()]
        size = sum(p.nbytes for p in parameters)
        return traffic.calls_by_operation["broadcast_"], traffic.bytes_by_operation["broadcast_"], len(parameters), size

    for calls, sent, parameters, size in on_ranks(rank):
        assert calls == 1 + parameters
        assert sent == 3 * 8 + size
