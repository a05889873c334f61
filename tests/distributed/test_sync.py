import os

import pytest
import torch
import torch.distributed as dist
from compressed_layers import with_stored_sketches
from ranks import on_ranks
from torch import nn
from torch.optim.swa_utils import AveragedModel

import panther as pr
from panther.distributed import CommunicationCounter, data_parallel, sync_sketches, verify_sketches
from panther.errors import DistributedError, SketchMismatchError
from panther.nn import RandMultiHeadAttention, SKLinear

pytestmark = pytest.mark.distributed


def model(seed=None, fitted=False, **kwargs):
    layer = with_stored_sketches(SKLinear(64, 64, 2)) if fitted else SKLinear(64, 64, 2, seed=seed, **kwargs)
    return nn.Sequential(nn.Linear(64, 64), layer, SKLinear(64, 64, num_terms=2, low_rank=1, seed=seed))


def error_of(fn, *args):
    try:
        fn(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("src", [0, -1])
def test_every_rank_gets_the_sources_seeds(n, src):
    def rank():
        torch.manual_seed(dist.get_rank())
        net = model()
        first_seeds = [net[1].seed, net[2].seed]
        with CommunicationCounter() as traffic:
            sync_sketches(net, src=src % n)
        verify_sketches(net)
        fresh = SKLinear(64, 64, 2, seed=net[1].seed)
        assert torch.equal(net[1].U1, fresh.U1)
        assert torch.equal(net[1].U2, fresh.U2)
        assert torch.equal(net[1].sketch_seed, fresh.sketch_seed)
        return first_seeds, [net[1].seed, net[2].seed], traffic.bytes

    results = on_ranks(rank, n)
    assert all(after == results[src][0] for _, after, _ in results)
    assert len({tuple(first_seeds) for first_seeds, _, _ in results}) == n
    # 16 bytes of fingerprint and 8 a layer, where U1 and U2 would be 2,048 bytes a layer.
    assert all(sent == 16 + 2 * 8 for _, _, sent in results)


def test_fitted_sketches_are_sent_whole_and_factors_left_alone():
    def rank():
        torch.manual_seed(dist.get_rank())
        net = model(fitted=True)
        net[1].U1.requires_grad_(False)
        S1, U1 = net[1].S1.detach().clone(), net[1].U1
        with CommunicationCounter() as traffic:
            sync_sketches(net)
        verify_sketches(net)
        assert net[1].U1 is U1  # an optimizer may hold it
        return torch.equal(net[1].S1, S1), net[1].U1.detach(), traffic.bytes_by_operation["broadcast_"]

    results = on_ranks(rank)
    assert all(kept for kept, _, _ in results)
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == 2 * 8 + 2 * (64 * 2 * 4)


def test_a_mismatch_names_layer_ranks_seeds_and_fix_on_every_rank():
    def rank():
        return error_of(verify_sketches, model(seed=7 if dist.get_rank() == 1 else 5))

    errors = on_ranks(rank, 3)
    assert len(set(errors)) == 1
    assert errors[0].startswith("SketchMismatchError: sketches differ between ranks: layer '1' is sparse SKLinear")
    assert "seed 5 on ranks 0, 2 and" in errors[0]
    assert "seed 7 on rank 1" in errors[0]
    assert "layer '2'" in errors[0]
    assert errors[0].endswith("call sync_sketches(model) on every rank before training")


def test_a_fitted_mismatch_of_order_alone_is_seen():
    def rank():
        torch.manual_seed(0)
        net = model(seed=1, fitted=True)
        if dist.get_rank() == 1:
            with torch.no_grad():
                net[1].U1.copy_(net[1].U1.flip(1))
        return error_of(verify_sketches, net)

    assert all("layer '1' is fitted" in error for error in on_ranks(rank))


def test_different_dtypes_are_refused_before_bytes_are_misread():
    def rank():
        torch.manual_seed(0)
        net = model(seed=1, fitted=True)
        return error_of(sync_sketches, net.bfloat16() if dist.get_rank() == 0 else net)

    first, second = on_ranks(rank)
    assert first == second
    assert "fitted SKLinear in torch.bfloat16" in first


def test_a_fitted_layer_without_values_is_told_to_all():
    def rank():
        net = model(seed=1, fitted=True)
        return error_of(sync_sketches, net.to("meta") if dist.get_rank() == 1 else net)

    first, second = on_ranks(rank)
    assert first == second
    assert "rank 1: a fitted layer is on the meta device and has no sketches to send" in first


def test_averaged_models_verify():
    def rank():
        layer = SKLinear(64, 64, 2, seed=2**62 + 12345)
        mean = AveragedModel(layer, use_buffers=True)
        for _ in range(3):
            mean.update_parameters(layer)
        verify_sketches(mean)
        sync_sketches(mean)
        return mean.module.seed

    assert on_ranks(rank) == [2**62 + 12345] * 2


def test_a_fitted_mismatch_is_seen_to_the_last_bit():
    def rank():
        torch.manual_seed(0)
        net = model(seed=1, fitted=True)
        verify_sketches(net)
        if dist.get_rank() == 1:
            with torch.no_grad():
                net[1].U2[-1, -1] = torch.nextafter(net[1].U2[-1, -1], torch.tensor(9.0))
        return error_of(verify_sketches, net)

    errors = on_ranks(rank)
    assert errors[0] == errors[1]
    assert "layer '1' is fitted SKLinear" in errors[0]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda: nn.Sequential(SKLinear(64, 64, 2)), "layer '1' is sparse .* on rank 0 and missing on rank 1"),
        (lambda: model(fitted=True), "sparse SKLinear .* on rank 0 and fitted SKLinear .* on rank 1"),
        (lambda: nn.Sequential(nn.Linear(2, 2), SKLinear(64, 60, 2), SKLinear(64, 64, 2, 1)), r"U1 \(2, 60\)"),
        (lambda: nn.Sequential(nn.Linear(2, 2), SKLinear(64, 64, 2), SKLinear(64, 64, 1, 2)), "num_terms=1"),
        (lambda: nn.Linear(2, 2), "missing on rank 1"),
    ],
)
def test_different_structures_are_refused_before_anything_is_sent(change, expected):
    def rank():
        net = model(seed=3) if dist.get_rank() == 0 else change()
        first_state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        error = error_of(sync_sketches, net)
        return error, all(torch.equal(tensor, first_state[name]) for name, tensor in net.state_dict().items())

    (first, kept), (second, also_kept) = on_ranks(rank)
    assert first == second
    assert first.startswith("SketchMismatchError")
    assert kept
    assert also_kept
    with pytest.raises(SketchMismatchError, match=f"(?s){expected}.*build the same model on every rank"):
        raise SketchMismatchError(first)


def test_a_damaged_seed_of_the_source_is_told_to_all_and_another_ranks_repaired():
    def rank(src, fn):
        net = model(seed=3)
        if dist.get_rank() == 1:
            net[1].sketch_seed[0] += 5  # more than the rounding of an average, after which it would be written anew
        return error_of(fn, net, src) if fn is sync_sketches else error_of(fn, net), net[1].sketch_seed.tolist()

    for src, fn in ((1, sync_sketches), (0, verify_sketches)):
        (first, _), (second, _) = on_ranks(lambda src=src, fn=fn: rank(src, fn))
        assert first == second
        assert "SketchMismatchError: rank 1: sketch_seed=[8, 1, 2" in first
    (first, record), (second, repaired) = on_ranks(lambda: rank(0, sync_sketches))
    assert first is second is None
    assert record == repaired


def test_ranks_that_ask_for_different_sources_all_hear_of_it():
    def rank():
        return error_of(sync_sketches, model(seed=1), dist.get_rank()), error_of(
            sync_sketches, model(seed=1), 5 * dist.get_rank()
        )

    (differ, outside), (also_differ, also_outside) = on_ranks(rank)
    assert differ == also_differ
    assert "src is 0 on rank 0 and 1 on rank 1" in differ
    assert outside == also_outside
    assert "rank 1: src=5 must be a global rank of the group, one of [0, 1]" in outside


def test_layers_without_values_can_be_compared():
    def rank():
        net = model(seed=1)
        if dist.get_rank() == 1:
            net = net.to("meta")
        return error_of(verify_sketches, net)

    assert on_ranks(rank) == [None, None]


def test_verify_adopts_seeds_that_a_broadcast_of_buffers_changed():
    """As plain DDP does with every buffer at construction."""

    def rank():
        torch.manual_seed(dist.get_rank())
        layer = SKLinear(64, 64, 2)
        dist.broadcast(layer.sketch_seed, 0)
        verify_sketches(layer)
        return layer.seed, layer.U1

    (seed, U1), (other_seed, other_U1) = on_ranks(rank)
    assert seed == other_seed
    assert torch.equal(U1, other_U1)


def test_subgroups_take_global_ranks():
    def rank():
        group = dist.new_group([1, 2])
        net = model(seed=dist.get_rank())
        if dist.get_rank() == 0:
            outside = error_of(sync_sketches, net, 1, group)
        else:
            outside = error_of(sync_sketches, net, 0, group)
            sync_sketches(net, src=2, group=group)
            verify_sketches(net, group)
        return net[1].seed, outside

    results = on_ranks(rank, 3)
    assert [seed for seed, _ in results] == [0, 2, 2]
    assert results[0][1] == "DistributedError: rank 0 is not in the group: only the group's ranks may call this"
    assert results[1][1] == "DistributedError: src=0 must be a global rank of the group, one of [1, 2]"


def test_without_a_process_group():
    with pytest.raises(TypeError, match=r"the model must be an nn.Module, not 'model'"):
        verify_sketches("model")
    assert not dist.is_initialized()
    for fn in (sync_sketches, verify_sketches, pr.distributed.data_parallel):
        with pytest.raises(DistributedError, match=r"call panther.distributed.init\(\) first"):
            fn(model())


def test_a_rank_that_dies_during_a_sync_is_reported():
    def rank():
        if dist.get_rank() == 1:
            os._exit(3)
        sync_sketches(model())

    with pytest.raises(DistributedError, match="rank 1"):
        on_ranks(rank, fresh=True)


def test_attention_redraws_equally_after_it_was_synchronised():
    def run():
        torch.manual_seed(dist.get_rank())
        layer = RandMultiHeadAttention(16, 2, num_random_features=8, redraw_interval=2)
        model = data_parallel(layer)
        for _ in range(5):
            model(*[torch.ones(1, 3, 16)] * 3)[0].sum().backward()
        return layer.directions.clone(), layer.get_extra_state().tolist()

    (first, state), (second, other) = on_ranks(run)
    assert torch.equal(first, second)
    assert state == other
    assert state[1] > 1
