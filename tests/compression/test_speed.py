"""Choices by time: with multiplications in place of seconds, so that no test depends on a clock."""

import copy
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from compressing import assert_untouched, batches_of, state_of
from ranks import on_ranks
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import panther as pr
from panther.compression import preparation
from panther.compression.calibration.runner import Runner
from panther.compression.calibration.survey import select_targets
from panther.compression.forms import FormSettings, Option, default_forms
from panther.compression.selection import timing, trials
from panther.compression.selection.allocation import choose_global, choose_uniform, seconds
from panther.compression.selection.timing import Times
from panther.errors import CompressionError, PerformanceWarning
from panther.files import signed
from panther.nn import QuantizedLinear


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 128), nn.GELU(), nn.Linear(128, 96), nn.Tanh(), nn.Linear(96, 24))


def multiplications(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops() + 1000  # what does not depend on the layers


def counted(old, new, device, budget_s=0.0, within=nullcontext):
    """Stand for ``compared``, with a second for every 1e9 multiplications."""
    with torch.no_grad():
        old_count = multiplications(old)
        with within():
            return 1e-9 * old_count, old_count / multiplications(new)


@pytest.fixture
def count(monkeypatch):
    for module in (timing, trials):
        monkeypatch.setattr(module, "compare_speed", counted)


def compress(model, **options):
    return pr.compress(model, calibration=batches_of(320), seed=0, **options)


def test_times_between_the_ranks_that_were_timed():
    times = Times(5.0, {"low_rank": ([8, 16, 32], [1.0, 2.0, 3.0]), "int8": ([0], [4.0])})
    expected = {8: 1.0, 12: 1.5, 16: 2.0, 24: 2.5, 32: 3.0}
    assert {rank: times.of(Option("low_rank", 1, rank)) for rank in expected} == expected
    assert times.of(Option("int8", 1, bits=8)) == 4.0
    assert times.of(Option("dense", 1)) == 5.0


def test_the_choice_by_time_is_nearly_the_best_of_all():
    generator = torch.Generator().manual_seed(0)
    targets = select_targets(nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))).targets
    cost = seconds(dict.fromkeys(targets, Times(1.0, {})))
    for _ in range(20):
        options, step = {}, 0.0
        for target in targets:
            losses, times = torch.rand(2, 6, generator=generator).tolist()
            several = [Option("some", 1, loss=a, time_s=b) for a, b in zip(losses, times, strict=True)]
            options[target] = [*several, Option("dense", 1024, time_s=1.0)]
            step = max(step, *losses)
        every = itertools.product(*options.values())
        totals = [sum(o.loss for o in several) for several in every if sum(o.time_s for o in several) <= 1.8]
        choice = choose_global(options, 1.8, cost)
        assert cost.total(choice) <= 1.8
        assert min(totals) <= sum(option.loss for option in choice.values()) <= min(totals) + step
        assert cost.total(choose_uniform(options, 1.8, cost)) <= 1.8


def test_layers_of_one_shape_share_a_measurement(count, monkeypatch):
    model = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 48), nn.Linear(48, 40))
    runner = Runner(model, batches_of(), None, None, None, False)
    forms = FormSettings(default_forms())
    targets = select_targets(model, smallest=forms.smallest_bytes).targets
    calls = []
    monkeypatch.setattr(timing, "compare_speed", lambda *given: calls.append(given) or counted(*given))
    times = timing.time_layers(runner, targets, forms)
    assert times[targets[0]] == times[targets[1]] != times[targets[2]]
    assert len(calls) == sum(len(values) for target in targets[1:] for _, values in times[target].curves.values())
    assert set(times[targets[0]].curves) == set(default_forms()) - {"dense"}
    rank = Option("low_rank", 1, 8)
    assert times[targets[0]].of(rank) == pytest.approx(1e-9 * (1000 + 2 * 64 * 8 * (48 + 48)))


def test_the_clock_counts_what_runs():
    """Measured times, so that only their signs and number can be tested."""
    x = torch.randn(4, 8)
    seconds, ratio = timing.compare_speed(lambda: x @ x.T, lambda: x @ x.T, x.device, 0.0)
    assert seconds > 0
    assert ratio > 0


low_rank = {"forms": ("dense", "low_rank")}


@pytest.mark.parametrize(
    "more",
    [
        {}, low_rank, {"allocate": "uniform", **low_rank},
        {"method": "activation", **low_rank},
    ],
)  # fmt: skip
def test_a_speed_up_is_met(count, more):
    model = network()
    exact, x = copy.deepcopy(model), batches_of()[0]
    report = compress(model, speedup=1.6, **more)
    with torch.no_grad():
        reached = multiplications(lambda: exact(x)) / multiplications(lambda: model(x))
    assert report.measured_speedup == pytest.approx(reached, rel=0.05)  # of a batch of the same size
    assert 1.6 <= report.measured_speedup < 2.1
    slower = compress(network(), speedup=1.1, **more)
    assert slower.measured_speedup >= 1.1
    assert slower.measured_error <= report.measured_error
    assert all(layer.time_s for layer in report.layers if layer.form != "dense")


def test_a_latency_is_met(count):
    dense_ms = 1e-6 * multiplications(lambda: network()(batches_of()[0]))
    report = compress(network(), max_latency_ms=dense_ms / 1.5)
    assert 0.7 * dense_ms < 1.5e3 * report.measured_latency_s <= dense_ms
    assert f"{1e3 * report.measured_latency_s:.3g} ms a batch" in str(report)


def test_a_speed_up_with_healing(count):
    report = compress(network(), speedup=2, heal=pr.HealConfig(max_steps=3), **low_rank)
    assert report.measured_speedup >= 2
    assert report.healed.steps == 3
    assert report.healed_error is not None


def test_a_speed_out_of_reach_names_the_best(count):
    model = network()
    original = state_of(model)
    with pytest.raises(
        CompressionError, match=r"speedup=900 cannot be reached: .* best feasible is speedup="
    ) as caught:
        compress(model, speedup=900)
    assert_untouched(model, original)
    best = float(str(caught.value).rpartition("=")[2])
    assert compress(model, speedup=best).measured_speedup >= best
    model = network()
    with pytest.raises(CompressionError, match=r"max_latency_ms=1e-06 cannot be .* best feasible is max_latency_ms="):
        compress(model, max_latency_ms=1e-6)


def test_a_speed_that_the_model_has(count):
    model = network()
    original = state_of(model)
    for size in ({"speedup": 1}, {"max_latency_ms": 1e3}):
        report = compress(model, **size)
        assert report.notes[-1].endswith("is met by the dense model, so nothing is compressed")
        assert_untouched(model, original)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"speedup": 2, "bits": 4}, ValueError, "exactly one of .* must be given, not bits and speedup"),
        ({"speedup": 2, "max_latency_ms": 4}, ValueError, "not speedup and max_latency_ms"),
        ({"speedup": 0.5}, ValueError, r"speedup=0\.5 must be finite and at least 1"),
        ({"max_latency_ms": -1}, ValueError, "max_latency_ms=-1 must be positive and finite"),
        ({"speedup": "fast"}, TypeError, "speedup must be a number, not str"),
        ({"speedup": 2, "measure_speed": False}, ValueError, "speedup needs measured times, and measure_speed=False"),
        ({"speedup": 2, "method": "svd", "calibration": None}, ValueError, "speedup needs calibration="),
        ({"bits": 5, "allow_slower": False, "measure_speed": False}, ValueError, "allow_slower=False needs measured"),
        ({"bits": 5, "allow_slower": 1}, TypeError, "allow_slower must be None, True or False, not int"),
        ({"bits": 5, "allow_slower": "no"}, TypeError, "allow_slower must be None, True or False, not str"),
        ({"bits": 5, "forms": 3}, TypeError, r"forms must be names of forms, such as \('int4', 'low_rank'\), not int"),
    ],
)  # fmt: skip
def test_options_that_exclude_each_other(options, kind, message):
    model = network()
    original = state_of(model)
    with pytest.raises(kind, match=message):
        pr.compress(model, **{"calibration": batches_of(), **options})
    assert_untouched(model, original)


def slow(*names):
    """Return a stand-in for ``time_layers`` to which the named forms are half as fast as dense."""

    def timed(runner, targets, forms, anew):
        return {
            target: Times(1.0, {name: ([0], [2.0 if name in names else 0.9]) for name in forms.names})
            for target in targets
        }

    return timed


quantized = tuple(f"int{bits}" for bits in (8, 6, 5, 4, 3, 2))


def test_slower_forms_are_taken_where_much_is_lost_otherwise(count, monkeypatch):
    monkeypatch.setattr(preparation, "time_layers", slow(*quantized))
    model = network()
    report = compress(model, bits=5)
    assert any(isinstance(layer, QuantizedLinear) for layer in model)
    (note,) = [note for note in report.notes if "speed are used" in note]
    start = "forms below 0.8 of the dense layer's speed are used, in 3 layers, because the held-out error would"
    assert note.startswith(start)
    fast = compress(network(), bits=5, allow_slower=False)
    assert not any(layer.form.startswith("int") and layer.form != "interpolative" for layer in fast.layers)
    assert fast.measured_error > 2 * report.measured_error
    assert fast.eligible_bytes_after <= 5 / 32 * fast.eligible_bytes_before
    assert not any("speed are used" in note for note in compress(network(), bits=5, allow_slower=True).notes)


def test_slower_forms_are_left_out_where_little_is_lost(count, monkeypatch):
    monkeypatch.setattr(preparation, "time_layers", slow("int8", "int6", "int2"))
    report = compress(network(), bits=5.5)
    assert {layer.form for layer in report.layers} & set(quantized) <= {"int5", "int4", "int3"}
    assert not any("speed are used" in note for note in report.notes)


@pytest.mark.slow
def test_slower_forms_for_a_largest_error(count, monkeypatch):
    monkeypatch.setattr(preparation, "time_layers", slow(*quantized))
    report = compress(network(), max_error=0.05)
    assert report.measured_error <= 0.05
    assert "the layers would take" in report.notes[-1]


def test_named_forms_may_be_slower_unless_forbidden(count, monkeypatch):
    monkeypatch.setattr(preparation, "time_layers", slow("int4", "int8"))
    report = compress(network(), bits=8.5, forms=("int4", "int8"))
    assert {layer.form for layer in report.layers} <= {"int4", "int8"}
    model = network()
    original = state_of(model)
    with pytest.raises(CompressionError, match=r"that were not measured slower than dense: .* or allow_slower=True"):
        compress(model, bits=8.5, forms=("int4", "int8"), allow_slower=False)
    assert_untouched(model, original)


def test_a_size_that_only_slower_forms_reach(count, monkeypatch):
    monkeypatch.setattr(preparation, "time_layers", slow(*(set(default_forms()) - {"dense"})))
    report = compress(network(), bits=3)
    assert "the size cannot be reached without them" in report.notes[-1]


def test_slow_layers_are_warned_of_unless_allowed(monkeypatch):
    fast = counted

    def halved(old, new, *rest, **more):
        seconds, _ = fast(old, new, *rest, **more)
        return seconds, 0.5

    for module in (timing, trials):
        monkeypatch.setattr(module, "compare_speed", halved)
    with pytest.warns(PerformanceWarning, match="slowest at 0.50 of their speed: allow_slower=False keeps such layers"):
        compress(network(), bits=5, forms="int4")
    compress(network(), bits=5, forms="int4", allow_slower=True)  # warnings are errors


@pytest.fixture
def speed_files(tmp_path, monkeypatch):
    """The folder in which speeds are kept, which is empty."""
    monkeypatch.delenv("PANTHER_SPEEDS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    signed._key.cache_clear()
    yield tmp_path / "panther/speeds"
    signed._key.cache_clear()


def set_clock(monkeypatch, *speed):
    """Let every measurement give these seconds and this ratio, or fail if none are given."""

    def measured(*_):
        assert speed, "measured although the speed is on disk"
        return speed

    monkeypatch.setattr(timing, "compare_speed", measured)


def speed_of_codes(linear=nn.Linear, rows=4, further=((), {}), **options):
    (target,) = select_targets(nn.Sequential(linear(48, 64)), include=linear).targets
    layer = QuantizedLinear(48, 64, bits=4)
    return timing.speed_of(target, target.modules[0], layer, torch.zeros(rows, 48), further, **options)


def test_speeds_on_disk_make_the_choice_of_the_measured_ones(count, speed_files, monkeypatch):
    models = network(), network()
    report = compress(models[0], bits=5)
    set_clock(monkeypatch)
    again = compress(models[1], bits=5)
    assert again.layers == report.layers
    assert all(layer.speedup and layer.time_s for layer in report.layers if layer.form != "dense")
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(AssertionError, match="although the speed is on disk"):
        compress(network(), speedup=1.2)  # whose seconds are those of the present
    monkeypatch.setenv("PANTHER_SPEEDS", "off")
    with pytest.raises(AssertionError, match="although the speed is on disk"):
        compress(network(), bits=5)


def test_speeds_hold_for_one_call_on_one_processor(speed_files, monkeypatch):
    set_clock(monkeypatch, 1.0, 2.0)
    assert speed_of_codes() == speed_of_codes() == (1.0, 2.0)
    set_clock(monkeypatch, 3.0, 4.0)
    assert speed_of_codes() == (1.0, 2.0)
    assert speed_of_codes(rows=5) == (3.0, 4.0)
    monkeypatch.setattr(timing, "_processor", lambda device: "another")
    assert speed_of_codes() == (3.0, 4.0)
    monkeypatch.undo()


def test_a_speed_that_is_measured_anew_is_kept(speed_files, monkeypatch):
    for dense_s in (1.0, 2.0):
        set_clock(monkeypatch, dense_s, 1.0)
        assert speed_of_codes(anew=True) == (dense_s, 1.0)
    set_clock(monkeypatch)
    assert speed_of_codes() == (2.0, 1.0)


class OwnLinear(nn.Linear):
    """A layer whose code can change between two runs."""


@pytest.mark.parametrize("options", [{"linear": OwnLinear}, {"further": ((torch.zeros(1),), {})}])
def test_speeds_that_depend_on_what_no_name_says_are_not_kept(speed_files, monkeypatch, options):
    set_clock(monkeypatch, 1.0, 2.0)
    assert speed_of_codes(**options) == (1.0, 2.0)
    assert not speed_files.exists()


def flip(data):
    return data[:70] + bytes([data[70] ^ 1]) + data[71:]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(flip(path.read_bytes())),
        lambda path: path.write_bytes(b"\xff" * 99),
        lambda path: path.write_text("[0.5, 0.5]"),
        lambda path: path.write_bytes(max(path.parent.iterdir(), key=lambda other: other != path).read_bytes()),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), path.symlink_to(path.name)),
        lambda path: (path.unlink(), os.mkfifo(path)),
        lambda path: (path.parents[1] / "signing-key").write_bytes(b"short"),
        lambda path: (path.parents[1] / "signing-key").write_bytes(bytes(32)),
    ],
)
def test_damaged_and_foreign_files_are_measured_again(speed_files, monkeypatch, damage):
    set_clock(monkeypatch, 1.0, 2.0)
    speed_of_codes(rows=5)
    others = set(speed_files.iterdir())
    speed_of_codes()
    (path,) = set(speed_files.iterdir()) - others
    damage(path)
    signed._key.cache_clear()  # as in another process
    set_clock(monkeypatch, 3.0, 4.0)
    assert speed_of_codes() == (3.0, 4.0)
    assert {path, *others} == set(speed_files.iterdir())


def no_home():
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("obstacle", ["no home", "no folder", "full disk"])
def test_speeds_are_measured_where_no_file_can_be_written(speed_files, monkeypatch, obstacle):
    if obstacle == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", no_home)
    elif obstacle == "no folder":
        speed_files.parent.touch()
    else:
        monkeypatch.setattr(signed, "write_text", lambda *_: os.write(-1, b""))
    for speed in ((1.0, 2.0), (3.0, 4.0)):
        set_clock(monkeypatch, *speed)
        assert speed_of_codes() == speed


def test_files_that_are_written_at_once_are_complete(speed_files, monkeypatch):
    numbers = itertools.count(1)
    monkeypatch.setattr(timing, "compare_speed", lambda *_: (float(next(numbers)), 2.0))
    with ThreadPoolExecutor(4) as pool:
        speeds = list(pool.map(lambda number: speed_of_codes(anew=number % 2 == 0), range(40)))
    assert all(ratio == 2.0 for _, ratio in speeds)
    assert 20 <= next(numbers) <= 25  # the first readers may find no file; later ones find complete files
    assert len(list(speed_files.iterdir())) == 1


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_choose_by_one_table():
    every = batches_of(640, size=32)

    def rank():
        factor = 1 + dist.get_rank()  # the second rank's processor is half as fast

        def own(*given, **more):
            seconds, ratio = counted(*given, **more)
            return factor * seconds, ratio * (1 + 0.1 * dist.get_rank())

        for module in (timing, trials):
            module.compare_speed = own
        model = network()
        half = every[10 * dist.get_rank() :][:10]
        report = pr.compress(model, calibration=half, speedup=1.5, group=dist.group.WORLD, seed=0)
        return model.state_dict(), [(layer.form, layer.rank) for layer in report.layers], report.measured_speedup

    first, second = on_ranks(rank, fresh=True)  # attributes of modules are replaced
    assert first[1:] == second[1:]
    assert first[2] >= 1.5
    assert all(torch.equal(first[0][key], second[0][key]) for key in first[0])
