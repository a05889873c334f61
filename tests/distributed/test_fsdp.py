"""Data parallelism of every strategy, and gradients that travel in other forms, against one process."""

import warnings

import pytest
import torch
import torch.distributed as dist
from compressed_layers import with_stored_sketches
from ranks import on_ranks, take_steps, weights_of, whole
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from panther.distributed import (
    ColwiseSKParallel,
    CommunicationCounter,
    HybridParallelTrainer,
    RowwiseSKParallel,
    data_parallel,
    init,
    make_mesh,
    no_sync,
    shutdown,
    verify_sketches,
)
from panther.distributed.data.comm_hooks import DEFAULTS, register_hook
from panther.distributed.sync.replicas import broadcast_model
from panther.errors import DistributedError, ShapeError
from panther.nn import SKLinear

pytestmark = pytest.mark.distributed


def network(seed, fitted=False, dtype=torch.float64):
    torch.manual_seed(seed)
    middle = with_stored_sketches(SKLinear(48, 48, 3)) if fitted else SKLinear(48, 48, 3)
    return nn.Sequential(SKLinear(40, 48, 2), nn.ReLU(), middle, nn.Tanh(), nn.Linear(48, 5)).to(dtype)


def data(n=12, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 40, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randn(n, 5, generator=generator, dtype=torch.float64).to(dtype)


def train(model, x, y, optimizer=None, steps=10, clip=None):
    # Plain steps also show a gradient that is wrong by a factor, and need a tenth of the sharded operations of Adam.
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.5)
    losses, _ = take_steps(optimizer, lambda: nn.functional.mse_loss(model(x), y), steps, clip)
    return losses, list(weights_of(model).values())


def slice_of(rank, n, total=12):
    return slice(total // n * rank, total // n * (rank + 1))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "replicate"])
@pytest.mark.parametrize(
    ("n", "fitted"),
    [
        (1, False),
        (2, False),
        pytest.param(3, False, marks=pytest.mark.slow),
        (1, True),
        pytest.param(2, True, marks=pytest.mark.slow),
        (3, True),
    ],
)
def test_ten_steps_are_those_of_one_process(strategy, n, fitted):
    x, y = data()

    def rank():
        r = dist.get_rank()
        model = network(100 + r, fitted)  # different weights and seeds on every rank
        model = data_parallel(model, strategy=strategy)
        losses, weights = train(model, x[slice_of(r, n)], y[slice_of(r, n)], clip=0.1)
        verify_sketches(model)
        return losses, weights, model(x).detach()

    single = network(100, fitted)
    losses, weights = train(single, x, y, clip=0.1)
    results = on_ranks(rank, n)
    means = torch.tensor([own for own, _, _ in results], dtype=torch.float64).mean(0).tolist()
    assert means == pytest.approx(losses, rel=1e-8)
    for _, theirs, out in results:
        for a, b in zip(weights, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(out, single(x), rtol=1e-7, atol=1e-9)


def test_copies_of_shards():
    x, y = data()

    def rank():
        mesh = make_mesh(replicate=2, dp=2)
        model = data_parallel(network(100 + dist.get_rank()), mesh["replicate", "dp"], "fsdp")
        own = slice_of(dist.get_rank(), 4)
        placements = [tuple(map(str, parameter.placements)) for parameter in model.parameters()]
        return train(model, x[own], y[own])[1], placements

    _, weights = train(network(100), x, y)
    for theirs, placements in on_ranks(rank, 4):
        assert placements[0] == ("R", "S(0)")
        assert placements[1] == ("R", "S(0)")  # S2 of R = 2, which 2 ranks divide
        assert placements[4] == ("R", "S(1)")  # S2 of R = 3: along out
        for a, b in zip(weights, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("replicate", marks=pytest.mark.slow)])
def test_with_layers_sharded_over_ranks(strategy):
    """dp = 2 by tp = 2, with gradient clipping over both."""
    x, y = data()
    plan = {"0": ColwiseSKParallel(), "2": RowwiseSKParallel()}

    def build(seed):
        torch.manual_seed(seed)
        return nn.Sequential(SKLinear(40, 48, 2), nn.ReLU(), SKLinear(48, 5, 2)).double()

    def rank():
        mesh = make_mesh(dp=2, tp=2)
        model = parallelize_module(build(100 + dist.get_rank()), mesh["tp"], plan)
        model = data_parallel(model, mesh["dp"], strategy)
        own = slice_of(mesh["dp"].get_local_rank(), 2)
        return train(model, x[own], y[own], clip=0.1)[1]

    _, weights = train(build(100), x, y, clip=0.1)
    for theirs in on_ranks(rank, 4):
        for a, b in zip(weights, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


def test_mixed_precision_and_offload():
    x, y = data(dtype=torch.float32)

    def rank():
        model = data_parallel(
            network(100, dtype=torch.float32), strategy="fsdp", mixed_precision="bf16", cpu_offload=True
        )
        own = slice_of(dist.get_rank(), 2)
        losses, _ = train(model, x[own], y[own], torch.optim.Adam(model.parameters(), 1e-2))
        return losses, model(x).dtype, next(model.parameters()).dtype

    for theirs, out, parameter in on_ranks(rank):
        assert (out, parameter) == (torch.float32, torch.float32)
        assert theirs[-1] < 0.8 * theirs[0]


class Views(nn.Module):
    """Blocks that return views, each of another kind, and what users do in place with them."""

    def __init__(self, kind, in_place):
        super().__init__()
        torch.manual_seed(3)
        self.kind, self.in_place = kind, in_place
        self.blocks = nn.ModuleList(Viewing(kind) for _ in range(2)).double()
        self.head = nn.Linear(8, 8).double()

    def forward(self, x):
        for block in self.blocks:
            y = block(x)
            if self.kind == "pair":
                y, other = y["first"], y["second"]
            if self.in_place:
                y *= 2  # which replaced the hook that gathers the block's parameters for backward
                y += 1
            x = y + other if self.kind == "pair" else y + x
        return self.head(x)


class Viewing(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(1, 4, 8))

    def forward(self, x):
        if self.kind == "input":
            return (x * self.scale).flatten(1).view(x.shape) if x.sum() > 1e9 else x.view(x.shape)
        y = self.layer(x)  # a view, as the input has three dimensions
        if self.kind == "saved":
            y = torch.tanh(y).transpose(0, 1).transpose(0, 1)
        if self.kind == "pair":
            return {"first": y[:, :, :], "second": y.view(y.shape)}
        return y


# In place on the result of tanh is an error everywhere, and on a view of an input it changes the input as well.
VIEWS = [("linear", False), ("linear", True), ("saved", False), ("pair", False), ("input", False)]


def test_outputs_that_are_views_neither_warn_nor_lose_their_gradient():
    """torch warns of each such output under FSDP2, as something in place on it would drop its hook."""
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def gradients(model):
        model(x).square().mean().backward()
        return {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}

    def rank():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = [
                gradients(data_parallel(Views(*case), strategy=strategy))
                for case in VIEWS
                for strategy in ("fsdp", "replicate")
            ]
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                gradients(data_parallel(Views("saved", True), strategy="fsdp"))
        return found

    expected = [gradients(Views(*case)) for case in VIEWS for _ in "12"]
    for found in on_ranks(rank):
        for ours, theirs, case in zip(found, expected, [case for case in VIEWS for _ in "12"], strict=True):
            assert ours.keys() == theirs.keys(), case
            for name, gradient in theirs.items():
                torch.testing.assert_close(ours[name], gradient, msg=f"{case} {name}")


def test_shared_parameters_are_left_to_the_root():
    def rank():
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 4)).double()
        model[2].weight = model[0].weight
        model = data_parallel(model, strategy="fsdp")
        x = torch.ones(2, 8, dtype=torch.float64)
        model(x).sum().backward()
        return whole(model[0].weight.grad), model[0].weight is model[2].weight

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 4)).double()
    model[2].weight = model[0].weight
    model(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
    for gradient, same in on_ranks(rank):
        assert same
        torch.testing.assert_close(gradient, model[0].weight.grad)


@pytest.mark.parametrize(("hook", "tolerance"), [("fp16", 2e-2), ("bf16", 1e-1), ("powersgd", 1e-6)])
def test_hooks(hook, tolerance):
    """PowerSGD's first ten steps are plain; the others round the gradients."""
    x, y = data(dtype=torch.float32)

    def rank():
        model = data_parallel(network(100 + dist.get_rank(), dtype=torch.float32), comm_hook=hook)
        own = slice_of(dist.get_rank(), 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with CommunicationCounter() as traffic:
            _, weights = train(model, x[own], y[own], optimizer, steps=1)
        return weights, traffic.bytes_by_operation["allreduce_"], sum(p.numel() for p in model.parameters())

    single = network(100, dtype=torch.float32)
    first_weights = [parameter.detach().clone() for parameter in single.parameters()]
    _, weights = train(single, x, y, torch.optim.SGD(single.parameters(), 0.1), steps=1)
    for theirs, sent, numbers in on_ranks(rank):
        for a, b, start in zip(weights, theirs, first_weights, strict=True):
            assert (a - b).norm() <= tolerance * (a - start).norm() + 1e-7
        assert sent == numbers * (4 if hook == "powersgd" else 2)


def test_powersgd_trains():
    x, y = data(dtype=torch.float32)

    def rank():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = data_parallel(network(100, dtype=torch.float32), comm_hook="powersgd")
            own = slice_of(dist.get_rank(), 2)
            return train(model, x[own], y[own], torch.optim.Adam(model.parameters(), 1e-2), steps=40)[0]

    for losses in on_ranks(rank):
        assert losses[-1] < 0.5 * losses[10]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_all_entries_of_a_hook_are_the_gradient_uncompressed(dtype):
    """Over three steps, for DDP forms other buckets after the first one."""

    def rank():
        found = []
        for settings in ({}, {"comm_hook": "sketch", "sketch_fraction": 1.0}):
            model = data_parallel(network(100, dtype=dtype), bucket_cap_mb=0.002, **settings)
            x, y = data(dtype=dtype)
            own, grads = slice_of(dist.get_rank(), 2), []
            for _ in range(3):
                model.zero_grad()
                nn.functional.mse_loss(model(x[own]), y[own]).backward()
                grads += [parameter.grad.clone() for parameter in model.parameters()]
            found.append(grads)
        return found

    for plain, compressed in on_ranks(rank):
        assert all(map(torch.equal, plain, compressed))


@pytest.mark.parametrize("settings", [{"sketch_fraction": 0.25}, {"powersgd_rank": 1, "powersgd_start_step": 2}])
def test_a_group_may_go_right_after_a_step(settings):
    """What a hook does with a message is dropped on a thread of gloo, a moment later; it aborted the process."""

    def rank():
        for _ in range(20):
            group = dist.new_group()
            parallel = DistributedDataParallel(nn.Linear(30, 30), process_group=group)
            register_hook(parallel, next(iter(settings)).partition("_")[0], DEFAULTS | settings)
            for _ in range(4):
                parallel(torch.ones(1, 30)).sum().backward()
            dist.destroy_process_group(group)
            del parallel, group
        return True

    assert all(on_ranks(rank))


def test_settings_of_powersgd():
    """Gradients have full rank up to the start, and from then on the rank that was asked for."""

    def rank():
        layer = data_parallel(
            nn.Linear(24, 16, bias=False), comm_hook="powersgd", powersgd_rank=2, powersgd_start_step=3
        )
        ranks = []
        for _ in range(5):
            layer.zero_grad()
            layer(torch.randn(32, 24)).square().sum().backward()
            values = torch.linalg.svdvals(layer.module.weight.grad.double())
            ranks.append(int((values > 1e-4 * values[0]).sum()))
        with pytest.raises(ValueError, match="powersgd_rank=2 needs comm_hook='powersgd', not 'fp16': set both"):
            data_parallel(nn.Linear(2, 2), comm_hook="fp16", powersgd_rank=2)
        return ranks

    for ranks in on_ranks(rank):
        assert ranks == [16, 16, 16, 2, 2]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "replicate", None])
def test_no_sync_adds_up_gradients_and_sends_their_sum_once(strategy):
    x, y = data()

    def rank():
        model = network(100)
        run = model if strategy is None else data_parallel(model, strategy=strategy)
        own = slice_of(dist.get_rank(), 2)
        with no_sync(run), CommunicationCounter() as traffic:
            nn.functional.mse_loss(run(x[own]), y[own]).backward()
        quiet = not any("reduce" in name for name in traffic.calls_by_operation)
        nn.functional.mse_loss(run(2 * x[own]), y[own]).backward()
        return quiet, [whole(parameter.grad) for parameter in run.parameters()]

    model = network(100)
    losses = [nn.functional.mse_loss(model(scale * x), y) for scale in (1, 2)]
    sum(losses).backward()
    for r, (quiet, gradients) in enumerate(on_ranks(rank)):
        assert quiet
        if strategy is None:
            model.zero_grad()
            own = slice_of(r, 2)
            sum(nn.functional.mse_loss(model(scale * x[own]), y[own]) for scale in (1, 2)).backward()
        for ours, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-9, atol=1e-11)
    with pytest.raises(TypeError, match="no_sync takes the model that data_parallel returned, not a list"):
        no_sync([]).__enter__()


def test_no_sync_without_a_model_is_of_all_that_data_parallel_returned():
    """As guides write it: ``with no_sync():`` around the backward passes of all batches but the last."""
    x, y = data()

    def rank():
        own, quiet = slice_of(dist.get_rank(), 2), []
        models = [data_parallel(network(100), strategy=strategy) for strategy in ("ddp", "fsdp")]
        with no_sync():
            for model in models:
                with CommunicationCounter() as traffic:
                    nn.functional.mse_loss(model(x[own]), y[own]).backward()
                quiet.append(not any("reduce" in name for name in traffic.calls_by_operation))
        for model in models:
            nn.functional.mse_loss(model(2 * x[own]), y[own]).backward()
        return quiet, [[whole(parameter.grad) for parameter in model.parameters()] for model in models]

    model = network(100)
    sum(nn.functional.mse_loss(model(scale * x), y) for scale in (1, 2)).backward()
    for quiet, gradients in on_ranks(rank):
        assert quiet == [True, True]
        for ours in gradients:
            for gradient, parameter in zip(ours, model.parameters(), strict=True):
                torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-11)
    with no_sync():  # on one process there is nothing to send
        network(100)(x).sum().backward()


def test_zero_optimizer_no_sync_and_uneven_inputs():
    """ZeRO-1, accumulation without sending, and ranks with other numbers of batches: torch's own, on our model."""
    x, y = data()

    def rank():
        r = dist.get_rank()
        model = data_parallel(network(100 + r))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
        own = slice_of(r, 2)
        with model.no_sync(), CommunicationCounter() as traffic:
            nn.functional.mse_loss(model(x[own]), y[own]).backward()
        quiet = traffic.bytes_by_operation["allreduce_"]
        _, weights = train(model, x[own], y[own], optimizer)
        batches = 2 + r
        with Join([model, optimizer]):
            for _ in range(batches):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x[own]), y[own]).backward()
                optimizer.step()
        return weights, quiet, [p.detach().clone() for p in model.parameters()]

    single = network(100)
    _, weights = train(single, x, y, torch.optim.Adam(single.parameters(), 1e-2))
    first, second = on_ranks(rank)
    for theirs, quiet, _ in (first, second):
        assert quiet == 0
        for a, b in zip(weights, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)
    assert all(torch.equal(a, b) for a, b in zip(first[2], second[2], strict=True))


def test_what_is_refused():
    def rank():
        mesh = make_mesh(dp=2, tp=1)
        cut = parallelize_module(SKLinear(256, 256, 4), mesh["tp"], ColwiseSKParallel())
        messages = []
        for call in (
            lambda: data_parallel(nn.Sequential(cut), mesh["dp"]),
            lambda: data_parallel(network(0), mesh, "replicate"),
            lambda: data_parallel(network(0), comm_hook="int8"),
            lambda: data_parallel(network(0), strategy="fsdp", comm_hook="fp16"),
            lambda: data_parallel(network(0), mixed_precision="bf16"),
            lambda: data_parallel(network(0), strategy="replicate", cpu_offload=True),
        ):
            with pytest.raises((ValueError, ShapeError, DistributedError)) as caught:
                call()
            messages.append(str(caught.value))
        return messages

    messages = on_ranks(rank)[0]
    assert messages[0].startswith(
        "layers of the model are sharded by tensor parallelism, and DistributedDataParallel loses"
    )
    assert messages[1].startswith("strategy='replicate' takes a mesh of one axis, and the mesh has")
    assert messages[1].endswith("pass mesh['dp']")
    assert messages[2] == "comm_hook='int8' is unknown: use one of 'fp16', 'bf16', 'powersgd', 'sketch', None"
    assert messages[3].startswith("comm_hook='fp16' is for strategy='ddp'")
    assert messages[4].startswith("mixed_precision is for strategy='fsdp'")
    assert messages[5].startswith("cpu_offload needs strategy='fsdp'")


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.ModuleDict({"a": nn.Linear(4, 4)})])
        self.scale = nn.Parameter(torch.ones(()))


def test_models_that_cannot_be_sharded_are_left_alone():
    """Torch says so only when it has sharded the blocks."""

    def rank():
        mesh, found = make_mesh(dp=2), []
        wrapped, sharded = data_parallel(network(0), mesh), data_parallel(network(0), mesh, "fsdp")
        for model, strategy in (
            (sharded, "fsdp"),
            (nn.Sequential(sharded), "replicate"),
            (wrapped, "ddp"),
            (nn.Sequential(wrapped), "fsdp"),
            (nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), "fsdp"),
            (nn.ModuleDict({"a": nn.Linear(4, 4)}), "replicate"),
            (Scaled(), "fsdp"),
        ):
            first_values = [p.to_local().clone() if isinstance(p, DTensor) else p.clone() for p in model.parameters()]
            for call in (
                lambda m=model, s=strategy: data_parallel(m, mesh, s),
                lambda m=model, s=strategy: HybridParallelTrainer(m, {"data_parallel": s}),
            ):
                with pytest.raises((DistributedError, ValueError)) as caught:
                    call()
                found.append(str(caught.value))
            for old, p in zip(first_values, model.parameters(), strict=True):
                assert torch.equal(old, p.to_local() if isinstance(p, DTensor) else p)
            assert (model in (sharded, wrapped)) or not isinstance(model, FSDPModule)
        return found

    first, second = on_ranks(rank)
    assert first == second
    assert first[::2] == first[1::2]
    assert [message.split(":")[0] for message in first[::2]] == [
        "a model can be wrapped or sharded once, and this one is sharded",
        "a model can be wrapped or sharded once, and '0' in it is sharded",
        "a model can be wrapped or sharded once, and this one is wrapped by DistributedDataParallel",
        "a model can be wrapped or sharded once, and '0' in it is wrapped by DistributedDataParallel",
        *(
            f"a model that is sharded must have a forward, in which its parameters are gathered, and a {kind} has none"
            for kind in ("ModuleList", "ModuleDict")
        ),
        "parameters that are sharded must have a dimension, and 'scale' has the shape ()",
    ]


def test_elements_without_a_forward_are_not_blocks():
    def rank():
        torch.manual_seed(0)
        model = Scaled()
        model.scale = nn.Parameter(torch.ones(1))
        data_parallel(model, make_mesh(dp=2), "fsdp")
        return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]

    assert on_ranks(rank) == [["", "layers.0"]] * 2


def test_parts_are_not_sent_over_the_ranks_that_share_them():
    def rank():
        mesh, found = make_mesh(dp=2), []
        model = nn.Linear(6, 4)
        for name, parameter in list(model.named_parameters()):
            setattr(model, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
        first_weight = model.weight.to_local().clone()
        group = mesh.get_group()
        for call in (
            lambda: broadcast_model(model, group),
            lambda: data_parallel(model, mesh, "fsdp"),
        ):
            with pytest.raises(DistributedError) as caught:
                call()
            found.append(str(caught.value))
        assert torch.equal(model.weight.to_local(), first_weight)
        return found

    first, second = on_ranks(rank)
    assert first == second
    for message in first:
        assert message.startswith("parameters must be replicated, and 'weight' and 1 more are sharded over ranks 0, 1")


def test_a_mesh_of_groups_that_are_gone():
    mesh, messages = None, []
    for _ in range(2):
        init()
        try:
            if mesh is None:
                group = dist.new_group([0])
                mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
            else:
                with pytest.raises(DistributedError) as caught:
                    data_parallel(nn.Linear(2, 2), mesh)
                messages.append(str(caught.value))
        finally:
            shutdown()
        with pytest.raises(
            DistributedError, match=r"there is no process group: call panther.distributed.init\(\) first"
        ):
            data_parallel(nn.Linear(2, 2), mesh)
    start = "the mesh with the axes ('dp',) of sizes (1,) belongs to process groups that no longer exist"
    assert messages == [f"{start}: make a new mesh after init"]
