"""Checkpointing that saves the inner products of sketched layers: equal gradients, and what is sent and done again."""

import inspect
from functools import partial

import pytest
import torch
from blocks import block
from ranks import gradients_of, on_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from panther.distributed import (
    CommunicationCounter,
    HybridParallelTrainer,
    inner_product_policy,
    make_mesh,
    tensor_parallel,
)
from panther.distributed.tensor import activation_checkpoint
from panther.distributed.tensor.activation_checkpoint import checkpoint_blocks_
from panther.errors import ConfigError
from panther.nn import SKLinear
from panther.train import TrainConfig, Trainer

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")]
R, ROWS = 3, 14

# torch 2.11 shows no outputs to the policies of selective checkpointing, so nothing can be counted there.
shows_outputs = pytest.mark.skipif(
    "op_output" not in inspect.signature(SelectiveCheckpointContext.__init__).parameters,
    reason="this version of torch shows no outputs to policies",
)


def sketched(n, m):
    return SKLinear(n, m, R)


def signs(n, m):
    return SKLinear(n, m, R, sketch="signs")


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


@shows_outputs
@pytest.mark.parametrize(("make", "products"), [(sketched, 1), (signs, 2)], ids=["sparse", "signs"])
def test_nothing_is_sent_again_and_half_of_the_products_are_saved(make, products):
    def rank():
        model = block(make).double()
        tensor_parallel(model, make_mesh(tp=2)["tp"])
        return [measure(model, how) for how in ("none", "all", "selective")]

    for none, everything, selective in on_ranks(rank):
        for gradients, *_ in (everything, selective):
            for name, gradient in none[0].items():
                torch.testing.assert_close(gradients[name], gradient, rtol=1e-12, atol=1e-13, msg=name)
        assert (none[1], everything[1], selective[1]) == (5, 7, 5)
        # The products of q, k, v, gate and up; those of o and down, and their sum over ranks. Folds are computed again.
        assert selective[3] == ROWS * R * (products * (5 + 2) + 2 * 2)
        first = 2 * ROWS * products * R * (5 * 24 + 12 + 18)
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


@pytest.mark.parametrize("how", ["all", pytest.param("selective", marks=shows_outputs)])
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


class Feedforward(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.inner = nn.Sequential(make(24, 48), nn.GELU(), make(48, 24))

    def forward(self, x):
        return x + self.inner(self.norm(x))


def saved_by_the_policy(block, **options):
    """The policy, and bytes and widths of what it saves."""
    policy, saved = inner_product_policy(block, **options), []

    def recorded(context, operation, *args, **kwargs):
        choice = policy(context, operation, *args, **kwargs)
        if choice is CheckpointPolicy.MUST_SAVE and not context.is_recompute:
            saved.append(context.op_output)
        return choice

    return recorded, saved


@shows_outputs
@pytest.mark.parametrize(
    ("make", "calls", "saved"),
    [
        # Six sums over ranks in three blocks, and those of the forward again where everything is recomputed.
        (sketched, {"none": 6, "selective": 6, "full": 9}, 3 * (R + R + 2 * R)),
        (signs, {"none": 6, "selective": 6, "full": 9}, 3 * (2 * R + 2 * 2 * R)),
        # The first product and the sum of the second; full stops before the sum, which no gradient needs.
        (nn.Linear, {"none": 6, "selective": 6, "full": 6}, 3 * (48 // 2 + 24)),
    ],
    ids=["sparse", "signs", "dense"],
)
def test_what_three_sharded_blocks_of_a_trainer_send_and_keep(make, calls, saved, monkeypatch):
    """TrainConfig's "selective" sends nothing again; of sketched layers it keeps the 2R numbers a row and no more."""
    x = batch().flatten(0, 1).float()
    kept = []

    def policy(block, **options):
        recorded, some = saved_by_the_policy(block, **options)
        kept.append(some)
        return recorded

    def trained(kind):
        kept.clear()
        torch.manual_seed(0)
        model = nn.Sequential(*(Feedforward(make) for _ in range(3)))
        config = TrainConfig(max_steps=2, batch_size=ROWS, strategy="tp", activation_checkpointing=kind)
        trainer = Trainer(model, torch.optim.SGD, nn.MSELoss(), config)
        with CommunicationCounter() as traffic:
            trainer.fit(TensorDataset(x, x.flip(0)))
        loss = [p.detach().to_local() for p in trainer.model.parameters()]
        return traffic.calls_by_operation["all_reduce"], sum(t.nbytes for some in kept for t in some), loss

    def rank():
        monkeypatch.setattr(activation_checkpoint, "inner_product_policy", policy)
        return {kind: trained(kind) for kind in calls}

    found = on_ranks(rank, 2, fresh=True)[0]
    assert {kind: one[0] for kind, one in found.items()} == {kind: 2 * count for kind, count in calls.items()}
    assert {kind: one[1] for kind, one in found.items()} == {"none": 0, "selective": 2 * 4 * ROWS * saved, "full": 0}
    for _, _, parameters in found.values():
        assert all(map(torch.equal, parameters, found["none"][2]))


def test_hybrid_parallelism_recomputes_blocks_too():
    """The layers of a pair are blocks of their own here: they are sharded first, and then wrapped."""
    x, y = batch().flatten(0, 1), torch.zeros(ROWS, 24, dtype=torch.float64)

    def trained(kind, sizes):
        torch.manual_seed(0)
        layers = [SKLinear(24, 48, R), nn.GELU(), SKLinear(48, 24, R), nn.Tanh(), Feedforward(sketched)]
        config = {**sizes, "activation_checkpointing": kind}
        trainer = HybridParallelTrainer(nn.Sequential(*layers).double(), config)
        optimizer = torch.optim.SGD(trainer.model.parameters(), 0.1)
        losses = [trainer.train_step((x, y), optimizer, nn.MSELoss()) for _ in range(3)]
        modules = [module for module in trainer.model.modules() if isinstance(module, CheckpointWrapper)]
        return losses, len(modules), trainer.report and [entry.action for entry in trainer.report.placements]

    def rank(kinds, sizes):
        return [trained(kind, sizes) for kind in kinds]

    [[(expected, _, _)]] = on_ranks(rank, 1, ["none"], {})
    for sizes, wrapped in (({"tensor_parallel_size": 2}, [3, 3]), ({"pipeline_parallel_size": 2}, [2, 1])):
        for found in zip(*on_ranks(rank, 2, ["selective", "full"], sizes), strict=True):
            assert [count for _, count, _ in found] == wrapped
            for losses, _, actions in found:
                assert losses == pytest.approx(expected, rel=1e-12)
                assert actions is None or actions[:2] == ["outputs sharded", "inputs sharded"]
    with pytest.raises(ConfigError, match="activation_checkpointing='all' is unknown"):
        HybridParallelTrainer(nn.Linear(2, 2), {"activation_checkpointing": "all"})
    config = {"pipeline_parallel_size": 2, "schedule": "zero_bubble", "activation_checkpointing": "selective"}
    with pytest.raises(ValueError, match="and schedule='zero_bubble' do not go together: torch saves selectively for"):
        HybridParallelTrainer(nn.Linear(2, 2), config)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ConfigError, match="activation_checkpointing='full' needs blocks, the modules of a ModuleList"):
        checkpoint_blocks_(nn.Linear(2, 2), [], "full")
