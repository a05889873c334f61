"""What goes wrong between ranks: each case ends in time, with an error that names the ranks and the thing."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
import waits
from ranks import on_ranks
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import panther as pr
from panther.distributed import (
    AdvancedDistributedTrainer,
    DistributedMetricsCollector,
    HybridParallelTrainer,
    all_gather,
    all_reduce,
    broadcast,
    data_parallel,
    make_mesh,
    make_schedule,
    reduce_scatter,
    split_stages,
    sync_sketches,
    tensor_parallel,
)
from panther.distributed.comm.diagnostics import gather_all
from panther.distributed.comm.process_group import start_group
from panther.errors import DistributedError, SketchMismatchError
from panther.nn import SKLinear
from panther.optim import MuonAdamW

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")]

STRATEGIES = {
    "ddp": lambda model: data_parallel(model),
    "fsdp": lambda model: data_parallel(model, strategy="fsdp"),
    "replicate": lambda model: data_parallel(model, strategy="replicate"),
    "tensor_parallel": lambda model: tensor_parallel(model, make_mesh(tp=dist.get_world_size())["tp"]),
    "split_stages": lambda model: split_stages(model, dist.get_world_size()),
    "hybrid": lambda model: HybridParallelTrainer(model, {"data_parallel": "ddp"}),
    "advanced": lambda model: AdvancedDistributedTrainer(model, dist.get_rank(), dist.get_world_size()),
    "sync_sketches": sync_sketches,
}


def model(width=16, depth=2, seed=3, dtype=None, terms=1):
    torch.manual_seed(seed)
    blocks = [SKLinear(16, width, num_terms=terms, low_rank=2), nn.ReLU(), nn.Linear(width, 16), nn.LayerNorm(16)]
    for _ in range(depth - 1):
        blocks += [nn.Linear(16, 16), nn.ReLU()]
    return nn.Sequential(*blocks).to(dtype)


def changed(i, layer):
    found = model()
    found[i] = layer
    return found


def error_of(fn):
    try:
        fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def alike(fn, nproc=2, fresh=False):
    """What every rank raised, the same."""
    errors = on_ranks(lambda: error_of(fn), nproc, fresh=fresh)
    assert errors == [errors[0]] * nproc
    return errors[0]


def survivors(tmp_path, fn, victim, world=3, timeout_s=2.0):
    """Run processes that nobody watches, of which the victim may end as it likes, and collect what the others raise."""
    pids, timeout_s = [], waits.scaled(timeout_s)
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            try:
                torch.set_num_threads(1)
                start_group(rank, world, "gloo", timeout_s, dist.FileStore(str(tmp_path / "store"), world))
                (tmp_path / str(rank)).write_text(str(error_of(fn)))
            finally:
                os._exit(0)
        pids.append(pid)
    waits.join(pids)
    return [(tmp_path / str(rank)).read_text() for rank in range(world) if rank != victim]


# Ranks that differ


SLOW = ("replicate", "advanced", "fsdp")
CHOSEN = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in STRATEGIES]


@pytest.mark.parametrize("name", CHOSEN)
def test_a_layer_of_another_shape(name):
    def rank():
        STRATEGIES[name](model(width=24 if dist.get_rank() == 1 else 16))

    error = alike(rank)
    assert error.startswith("SketchMismatchError: sketches differ between ranks: layer '0' is sparse SKLinear in")
    assert "U2 (16, 2) on rank 0 and" in error


@pytest.mark.parametrize("name", CHOSEN[:-1])
def test_another_number_of_layers(name):
    def rank():
        STRATEGIES[name](model(depth=3 if dist.get_rank() == 1 else 2))

    error = alike(rank)
    rule = "DistributedError: models or settings differ between ranks: parameter '6.weight' is missing on rank 0 and "
    assert error.startswith(rule + "trained torch.float32 (16, 16) on rank 1; parameter '6.bias'")
    assert error.endswith("build the same model and pass the same arguments on every rank")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda: model(dtype=torch.float64), "layer '0' is sparse SKLinear in torch.float32 .* on rank 0 and"),
        (lambda: model(terms=2), "num_terms=1, .* on rank 0 and .* num_terms=2"),
        (lambda: changed(2, model()[2].double()), "parameter '2.weight' is trained torch.float32 .* torch.float64"),
        (
            lambda: changed(2, model()[2].requires_grad_(False)),
            "parameter '2.weight' is trained .* on rank 0 and frozen",
        ),
        (lambda: changed(3, nn.RMSNorm(16)), "parameter '3.bias' is .* on rank 0 and missing on rank 1"),
        (lambda: nn.ModuleList(model()), "model is Sequential on rank 0 and ModuleList on rank 1"),
    ],
    ids=["dtype", "terms", "one dtype", "frozen", "kind", "class"],
)
def test_different_models(change, expected):
    def rank():
        data_parallel(model() if dist.get_rank() == 0 else change())

    with pytest.raises((DistributedError, SketchMismatchError), match=f"(?s){expected}"):
        raise DistributedError(alike(rank))


def test_different_seeds_and_weights_are_made_the_same():
    """No error: the first rank's are taken."""

    def rank():
        parallel = data_parallel(model(seed=dist.get_rank()))
        return parallel.module[0].seed, parallel.module[2].weight.sum().item()

    first, second = on_ranks(rank)
    assert first == second


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"strategy": "fsdp"}, "strategy='ddp' on rank 0 and 'fsdp' on rank 1"),
        ({"strategy": "fsdp", "mixed_precision": "bf16"}, "mixed_precision=None on rank 0 and 'bf16'"),
        ({"comm_hook": "powersgd"}, "comm_hook=None on rank 0 and 'powersgd' on rank 1"),
        ({"gradient_as_bucket_view": True}, "gradient_as_bucket_view=missing on rank 0 and True on rank 1"),
        ({"strategy": "zero"}, "rank 1: strategy='zero' is unknown: use one of 'ddp', 'fsdp', 'replicate'"),
    ],
    ids=str,
)
def test_different_arguments(settings, expected):
    def rank():
        data_parallel(model(), **(settings if dist.get_rank() == 1 else {}))

    assert expected in alike(rank)


def test_different_configurations():
    def rank():
        config = {"gradient_clipping": 1.0 + dist.get_rank(), "num_microbatches": 2 + dist.get_rank()}
        config["pipeline_parallel_size"] = 2
        HybridParallelTrainer(model(), config)

    error = alike(rank)
    assert "num_microbatches=2 on rank 0 and 3 on rank 1; gradient_clipping=1.0 on rank 0 and 2.0 on rank 1" in error


def test_different_settings_of_the_library():
    def rank():
        if dist.get_rank() == 1:
            torch.set_default_dtype(torch.float64)
            torch.use_deterministic_algorithms(True)
        data_parallel(model(dtype=torch.float32))

    error = alike(rank)
    assert "the default dtype is torch.float32 on rank 0 and torch.float64 on rank 1" in error
    assert "use_deterministic_algorithms is False on rank 0 and True on rank 1" in error


def test_another_version(monkeypatch):
    def rank():
        if dist.get_rank() == 1:
            monkeypatch.setattr("panther.distributed.sync.replicas.__version__", "0.0.1")
        data_parallel(model())

    assert f"Panther's version is {pr.__version__} on rank 0 and 0.0.1 on rank 1" in alike(rank, fresh=True)


def test_different_stages():
    def rank():
        last = dist.get_rank() == 1
        return [
            error_of(lambda: split_stages(model(), 2, ["3" if last else "2"])),
            error_of(lambda: split_stages(model(), 4 if last else 2)),
        ]

    first, second = on_ranks(rank)
    assert first == second
    assert "points=['2'] on rank 0 and ['3'] on rank 1" in first[0]
    assert "n=2 on rank 0 and 4 on rank 1" in first[1]


def test_different_schedules_and_batches():
    def rank():
        last = dist.get_rank() == 1
        stages = split_stages(model(), 2)
        schedule = make_schedule("gpipe", stages, 2, nn.MSELoss())
        x, y = torch.ones(4 + 4 * last, 16), torch.ones(4 + 4 * last, 16)
        return [
            error_of(lambda: make_schedule("1f1b" if last else "gpipe", stages, 2, nn.MSELoss())),
            error_of(lambda: make_schedule("gpipe", stages, 4 if last else 2, nn.MSELoss())),
            error_of(lambda: make_schedule("gpipe", stages, 2, nn.MSELoss(reduction="sum" if last else "mean"))),
            error_of(lambda: schedule.step(x, y)),
            error_of(lambda: schedule.step(x[: 3 if last else 4], y[: 3 if last else 4])),
        ]

    first, second = on_ranks(rank)
    assert first == second
    assert "schedules differ between ranks: name='gpipe' on rank 0 and '1f1b' on rank 1" in first[0]
    assert "num_microbatches=2 on rank 0 and 4 on rank 1" in first[1]
    assert "the loss's reduction is mean on rank 0 and sum on rank 1" in first[2]
    assert "batches differ between ranks: the input is torch.float32 (4, 16) on rank 0 and torch.fl" in first[3]
    assert "rank 1: 3 samples cannot be split into num_microbatches=2 of equal size" in first[4]


def test_different_batches_where_layers_are_shared():
    def rank():
        trainer = HybridParallelTrainer(model(), {"tensor_parallel_size": 2})
        optimizer = torch.optim.SGD(trainer.model.parameters(), 0.1)
        x = torch.ones(4 + dist.get_rank(), 16)
        trainer.train_step((x, x), optimizer, nn.MSELoss())

    error = alike(rank)
    assert "batches differ between ranks: the samples is torch.float32 (4, 16) on rank 0 and torch.float32 (5" in error


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda r: all_reduce(torch.ones(3 + r)), "the tensor is torch.float32 (3,) on rank 0 and torch.float32 (4,)"),
        (lambda r: all_reduce(torch.ones(3), op="mean" if r else "sum"), "op='sum' on rank 0 and 'mean' on rank 1"),
        (
            lambda r: broadcast(torch.ones(3).to(torch.bfloat16 if r else None)),
            "torch.float32 (3,) on rank 0 and torch.b",
        ),
        (lambda r: broadcast(torch.ones(3), src=r), "src=0 on rank 0 and 1 on rank 1"),
        (lambda r: reduce_scatter(torch.ones(4), dim=0) if r else all_reduce(torch.ones(4)), "ranks make different"),
        (lambda r: all_gather(torch.ones(2, dtype=torch.float64 if r else None)), "torch.float32 1 dim"),
        (lambda r: make_mesh(tp=2) and data_parallel(model()) if r else sync_sketches(model()), "ranks make different"),
    ],
    ids=["shape", "op", "dtype", "src", "operation", "gather", "call"],
)
def test_different_collectives(call, expected):
    assert expected in alike(lambda: call(dist.get_rank()))


# Ranks that are gone or late


def leave():
    os._exit(3)


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def pipeline_step():
    schedule = make_schedule("gpipe", split_stages(model(), 3), 2, nn.MSELoss())
    return lambda: schedule.step(torch.ones(4, 16), torch.ones(4, 16))


def trainer_step():
    trainer = HybridParallelTrainer(model(), {})
    optimizer = torch.optim.SGD(trainer.model.parameters(), 0.1)
    return lambda: trainer.train_step((torch.ones(4, 16), torch.ones(4, 16)), optimizer, nn.MSELoss())


def metrics():
    collector = DistributedMetricsCollector(dist.get_rank(), dist.get_world_size())
    collector.update_metric("loss", 1.0)
    return collector.compute_global_metrics


def muon_step():
    """Updates of a sharded matrix, with a gradient that is there already."""
    p = nn.Parameter(distribute_tensor(torch.ones(6, 6), make_mesh(dp=dist.get_world_size()), [Shard(0)]))
    p.grad = torch.ones_like(p)
    return MuonAdamW([p], orthogonalize=True).step


STEPS = {"pipeline": pipeline_step, "hybrid": trainer_step, "metrics": metrics, "Muon": muon_step}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("ddp", be_killed),
        ("split_stages", leave),
        *(pytest.param(name, how, marks=pytest.mark.slow) for name in STRATEGIES for how in (leave, be_killed)),
    ],
)
def test_a_rank_that_dies_before_a_strategy_is_named(name, how, tmp_path):
    def rank():
        if dist.get_rank() == 1:
            how()
        STRATEGIES[name](model())

    for error in survivors(tmp_path, rank, victim=1):
        assert "DistributedError: " in error
        assert "rank 1 did not take part and reported no error: see in their logs where these ranks hang" in error


@pytest.mark.parametrize("name", STEPS)
def test_a_rank_that_dies_before_a_step_is_named(name, tmp_path):
    def rank():
        step = STEPS[name]()
        step()
        if dist.get_rank() == 1:
            leave()
        step()

    for error in survivors(tmp_path, rank, victim=1):
        assert "DistributedError: " in error
        assert "rank 1 did not take part and reported no error" in error


@pytest.mark.parametrize("name", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES)])
def test_a_rank_that_never_comes_is_named_within_the_timeout(name, tmp_path):
    def rank():
        if dist.get_rank() == 1:  # It ends after the others, whom only the timeout can have told.
            waits.until(lambda: (tmp_path / "0").exists() and (tmp_path / "2").exists(), "the others have not failed")
            leave()
        STRATEGIES[name](model())

    for error in survivors(tmp_path, rank, victim=1, timeout_s=1.0):
        assert "rank 1 did not take part and reported no error" in error


def test_the_wait_for_nccl_names_who_is_missing(tmp_path):
    """NCCL's own wait would end the process; this one is in the store, whatever the backend."""

    def rank():
        gather_all("the first call")
        gather_all("the second call")
        if dist.get_rank() == 1:
            leave()
        gather_all("the third call")

    for error in survivors(tmp_path, rank, victim=1, timeout_s=1.0):
        assert error.startswith("DistributedError: the third call failed on rank")
        assert "rank 1 did not take part and reported no error" in error
