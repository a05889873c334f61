"""Healing that a time limit ends, that computes nothing twice, and on several processes."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from healing_models import WIDTH, checkpointed_options, compressed, data, healed, same, state
from ranks import on_ranks

import panther as pr
from panther.compression import HealConfig, healing
from panther.compression.calibration.runner import Runner
from panther.compression.healing import check_ranks
from panther.errors import DistributedError
from panther.nn import LowRankLinear


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves where a test says so, in seconds."""
    now = [0.0]
    monkeypatch.setattr("panther.compression.healing.time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def ticking(clock, seconds=1.0):
    """Return a forward that takes this long where the compressed model runs, and nothing for the original."""

    def call(model, batch):
        clock[0] += seconds * any(isinstance(module, LowRankLinear) for module in model.modules())
        return model(batch)

    return call


def test_healing_ends_in_time_at_the_end_of_its_schedule(clock, tmp_path):
    options = {"call": ticking(clock), "max_steps": 1000, "checkpoint_dir": tmp_path, "validate_every_n_steps": 15}
    result = healed(*compressed(), max_seconds=60.0, **options)
    assert result.seconds == clock[0]
    assert 55 < result.seconds <= 61
    assert 35 < result.steps < 52
    assert not result.diverged
    assert result.loss_after < 0.5 * result.loss_before
    assert result.history[-1][0] == result.steps
    assert result.history[-1][2] is not None
    records = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    rates = [record["learning_rate"] for record in records if "learning_rate" in record]
    peak = rates.index(max(rates))
    assert 2 < peak < 10
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < 0.02 * max(rates)


def test_a_bound_that_is_not_reached_changes_nothing(clock):
    model, new = compressed()
    expected = healed(model, new, max_steps=12)
    other, news = compressed()
    assert healed(other, news, call=ticking(clock), max_steps=12, max_seconds=1e6) == expected
    assert same(state(model), state(other))


def test_no_step_is_done_where_there_is_no_time_for_one(clock):
    model, new = compressed()
    first_state = {name: value.clone() for layer in new.values() for name, value in layer.state_dict().items()}
    result = healed(model, new, call=ticking(clock), max_seconds=2.0)
    assert (result.steps, result.best_step, result.loss_after) == (0, 0, result.loss_before)
    assert all(torch.equal(value, first_state[name]) for name, value in [*new.values()][-1].state_dict().items())


def test_a_continued_run_counts_the_time_that_is_used(clock, tmp_path):
    options = checkpointed_options(tmp_path) | {"max_steps": 1000, "max_seconds": 60.0}
    once = ticking(clock)
    whole = healed(*compressed(), call=once, **options | {"checkpoint_dir": None})
    begun = clock[0]

    def call(model, batch):
        if clock[0] - begun > 30:
            raise KeyboardInterrupt
        return once(model, batch)

    with pytest.raises(KeyboardInterrupt):
        healed(*compressed(), call=call, **options)
    clock[0] += 1000.0  # time in which nothing is healed
    result = healed(*compressed(), call=once, **options)
    assert 55 < result.seconds <= 61
    assert abs(result.steps - whole.steps) <= 2
    assert healed(*compressed(), call=once, **options).steps == result.steps


@pytest.mark.distributed
def test_ranks_whose_clocks_differ_stop_at_the_same_step():
    def rank():
        rank, now = dist.get_rank(), [0.0]
        model, new = compressed()
        options = {"call": ticking(now, 1.0 + rank), "group": dist.group.WORLD, "max_steps": 1000}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(healing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
            return healed(model, new, max_seconds=60.0, **options), state(model)

    first, second = on_ranks(rank)
    assert first[0] == second[0]
    assert same(first[1], second[1])
    assert 15 < first[0].steps < 40


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
    assert kept.kept_bytes == 12 * tensors
    assert calls == 1 + 12 + 3  # to see how large they are, once each, and for the final error
    partly, others, more = run(7 * tensors + 1)
    assert partly.kept_bytes == 7 * tensors + 1
    assert more == calls + 5  # batches of training that do not fit, two epochs in place of one
    never, without, most = run(0)
    assert never.kept_bytes == 0
    assert most == 1 + 18 + 3 * (1 + len(never.history) // 10 + 1) + 3
    assert kept == partly == never
    assert same(values, others)
    assert same(values, without)


def test_checks_take_a_twentieth_of_the_cost():
    assert HealConfig(max_steps=1000).check_interval(6) == 40
    assert HealConfig(max_steps=100).check_interval(6) == 25
    assert HealConfig(max_steps=1).check_interval(6) == 25
    assert HealConfig(max_steps=100, validate_every_n_steps=7).check_interval(6) == 7


@pytest.mark.distributed
def test_ranks_heal_together(tmp_path):
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
        run(rank, world, checkpoint_dir=tmp_path)
        resumed = run(rank, world, checkpoint_dir=tmp_path)
        errors = []
        for change in (lambda: healed(*compressed(rank=3 + rank), group=world), lambda: check_ranks(None)):
            try:
                change()
            except DistributedError as error:
                errors.append(str(error))
        return same_batches, whole, resumed, errors

    model, new = compressed()
    expected = healed(model, new, max_steps=10), state(model)
    first, second = on_ranks(rank)
    for (result, end), *_ in (first, second):
        assert result == expected[0]
        assert same(end, expected[1])
    assert first[1][0] == second[1][0] == first[2][0]
    assert same(first[1][1], second[1][1])
    assert same(first[1][1], first[2][1])
    alone = [run(rank, None)[0] for rank in (0, 1)]
    result = first[1][0]
    assert result.loss_after < 0.8 * result.loss_before
    assert result.history[0][1] == pytest.approx(sum(r.history[0][1] for r in alone) / 2, rel=1e-5)
    assert result.loss_before == pytest.approx(sum(r.loss_before for r in alone) / 2, rel=1e-5)
    assert first[3] == second[3]
    assert "0.up.down is (24, 6) torch.float32 on rank 0 and (24, 8) torch.float32 on rank 1" in first[3][0]
    assert first[3][1].startswith("healing trains on all 2 ranks together, and the group of this call has 1")


def test_a_launcher_s_process_that_heals_alone_is_told_so_at_once(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    model, _ = compressed()
    first_state = state(model)
    with pytest.raises(DistributedError, match="all 2 ranks together, and the group of this call has 1: call compress"):
        pr.compress(model, 0.5, [], heal=HealConfig())
    assert same(state(model), first_state)
