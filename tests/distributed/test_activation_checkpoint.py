"""Checkpointing that saves the inner products of sketched layers: equal gradients, and what is sent and done again."""

from functools import partial

import pytest
import torch
from blocks import block
from ranks import gradients_of, on_ranks
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from panther.distributed import CommunicationCounter, inner_product_policy, make_mesh, tensor_parallel
from panther.nn import SKLinear

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")]
R, ROWS = 3, 14


def sketched(n, m):
    return SKLinear(n, m, R)


def batch():
    return torch.randn(2, ROWS // 2, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def measure(model, how, *others):
    """Gradients, collectives of backward, flops, and numbers that are saved of products."""
    saved = []

    def recorded(context, operation, *args, **kwargs):
        choice = policy(context, operation, *args, **kwargs)
        if choice is CheckpointPolicy.MUST_SAVE and not context.is_recompute:
            saved.append(context.op_output.numel())
        return choice

    policy = inner_product_policy(model)
    contexts = {"selective": {"context_fn": partial(create_selective_checkpoint_contexts, recorded)}}.get(how, {})
    model.zero_grad()
    x = batch().requires_grad_()
    with FlopCounterMode(display=False) as flops:
        y = model(x, *others) if how == "none" else checkpoint(model, x, *others, use_reentrant=False, **contexts)
        with CommunicationCounter() as traffic:
            y.square().sum().backward()
    return {"x": x.grad, **gradients_of(model)}, traffic.calls, flops.get_total_flops(), sum(saved)


def test_nothing_is_sent_again_and_half_of_the_products_are_saved():
    def rank():
        model = block(sketched).double()
        tensor_parallel(model, make_mesh(tp=2)["tp"])
        return [measure(model, how) for how in ("none", "all", "selective")]

    for none, everything, selective in on_ranks(rank):
        for gradients, *_ in (everything, selective):
            for name, gradient in none[0].items():
                torch.testing.assert_close(gradients[name], gradient, rtol=1e-12, atol=1e-13, msg=name)
        assert (none[1], everything[1], selective[1]) == (2, 4, 2)
        # q, k, v, gate and up once; o and down before and after the sum over ranks.
        assert selective[3] == ROWS * 2 * R * (5 + 2 * 2)
        first = 2 * ROWS * 2 * R * (5 * 24 + 12 + 18)
        assert everything[2] - selective[2] == first


def test_one_process_and_a_policy_of_one_s_own():
    model = nn.Sequential(SKLinear(40, 60, R), nn.Tanh(), nn.Linear(60, 50), nn.Tanh(), SKLinear(50, 24, R)).double()
    x = torch.randn(9, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def gradients(policy=None):
        model.zero_grad()
        with FlopCounterMode(display=False) as flops:
            if policy is None:
                y = model(x)
            else:
                contexts = partial(create_selective_checkpoint_contexts, policy)
                y = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
            y.square().sum().backward()
        return gradients_of(model), flops.get_total_flops()

    ours = inner_product_policy(model)

    def dense_too(context, operation, *args, **kwargs):
        if operation is torch.ops.aten.addmm.default and args[2].shape == (60, 50):
            return CheckpointPolicy.MUST_SAVE
        return ours(context, operation, *args, **kwargs)

    expected, flops = gradients()
    for policy, again in ((ours, 2 * 9 * (2 * R * (60 + 24) + 60 * 50)), (dense_too, 2 * 9 * 2 * R * (60 + 24))):
        found, more = gradients(policy)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-13)
        assert more - flops <= again


@pytest.mark.parametrize("how", ["all", "selective"])
def test_attention_to_another_sequence(how):
    """The layers of one input stay together in a checkpointed region, so that backward computes what forward did."""
    other = batch().flip(0)

    def rank():
        model = block(sketched).double()
        tensor_parallel(model, make_mesh(tp=2)["tp"])
        return [measure(model, how, other)[0] for _ in range(2)], measure(model, "none", other)[0]

    expected = measure(block(sketched).double(), "none", other)[0]
    for found, plain in on_ranks(rank):
        for gradients in (*found, plain):
            for name, gradient in expected.items():
                torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-12, msg=name)
