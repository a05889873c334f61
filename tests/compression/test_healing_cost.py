"""Healing that computes nothing twice, and on several processes."""

import pytest
import torch
import torch.distributed as dist
from healing_models import WIDTH, compressed, data, healed, same, state
from ranks import on_ranks

import panther as pr
from panther.compression import HealConfig
from panther.compression.calibration.runner import Runner
from panther.compression.healing import check_ranks
from panther.errors import DistributedError
from panther.nn import LowRankLinear


@pytest.mark.parametrize("match", ["hidden", "output"])
def test_the_original_runs_once_for_each_batch_where_memory_suffices(match, monkeypatch):
    def run(spare):
        calls = []
        monkeypatch.setattr(Runner, "spare_bytes", lambda self, most: spare)

        def call(model, batch):
            if not any(isinstance(module, LowRankLinear) for module in model.modules()):
                calls.append(batch)
            return model(batch)

        model, new = compressed()
        return healed(model, new, call=call, max_steps=18, match=match), state(model), len(calls)

    tensors = 8 * 6 * (8 + 2 * WIDTH * (match == "hidden")) * 4  # of one batch
    kept, values, calls = run(2**30)
    assert calls == 12 + 3  # once each, and for the final error
    partly, others, more = run(7 * tensors + 1)
    assert more == calls + 5  # batches of training that do not fit, two epochs in place of one
    never, without, most = run(0)
    assert most == 18 + 3 * (1 + len(never.history) // 10 + 1) + 3
    assert kept == partly == never
    assert same(values, others)
    assert same(values, without)


def test_checks_take_a_twentieth_of_the_cost():
    assert HealConfig(max_steps=1000).check_interval(6) == 40
    assert HealConfig(max_steps=100).check_interval(6) == 25
    assert HealConfig(max_steps=1).check_interval(6) == 25
    assert HealConfig(max_steps=100, validate_every_n_steps=7).check_interval(6) == 7


@pytest.mark.distributed
def test_ranks_heal_together():
    """With one rank's batches they do as it does; with their own, and different values to start from, they average."""

    def run(rank, group, **options):
        model, new = compressed()
        if rank and group:
            with torch.no_grad():
                new[model[0].up].down.add_(1)  # the first rank's values are taken
        mine = data(6 - rank, seed=20 + rank)
        options |= {"max_steps": 20, "validate_every_n_steps": 10}
        result = healed(model, new, batches=mine[2:], held_out=mine[:2], group=group, **options)
        return result, state(model)

    def rank():
        rank, world = dist.get_rank(), dist.group.WORLD
        model, new = compressed()
        same_batches = healed(model, new, group=world, max_steps=10), state(model)
        whole = run(rank, world)
        errors = []
        for change in (lambda: healed(*compressed(rank=3 + rank), group=world), lambda: check_ranks(None)):
            try:
                change()
            except DistributedError as error:
                errors.append(str(error))
        return same_batches, whole, errors

    model, new = compressed()
    expected = healed(model, new, max_steps=10), state(model)
    first, second = on_ranks(rank)
    for (result, end), *_ in (first, second):
        assert result == expected[0]
        assert same(end, expected[1])
    assert first[1][0] == second[1][0]
    assert same(first[1][1], second[1][1])
    alone = [run(rank, None)[0] for rank in (0, 1)]
    result = first[1][0]
    assert result.loss_after < 0.8 * result.loss_before
    assert result.history[0][1] == pytest.approx(sum(r.history[0][1] for r in alone) / 2, rel=1e-5)
    assert result.loss_before == pytest.approx(sum(r.loss_before for r in alone) / 2, rel=1e-5)
    assert first[2] == second[2]
    assert "0.up.down is (24, 6) torch.float32 on rank 0 and (24, 8) torch.float32 on rank 1" in first[2][0]
    assert first[2][1].startswith("healing trains on all 2 ranks together, and the group of this call has 1")


def test_a_launcher_s_process_that_heals_alone_is_told_so_at_once(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    model, _ = compressed()
    first_state = state(model)
    with pytest.raises(DistributedError, match="all 2 ranks together, and the group of this call has 1: call compress"):
        pr.compress(model, 0.5, [], heal=HealConfig())
    assert same(state(model), first_state)
