import copy
import re
import sys
import warnings
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import waits
from compressed_layers import with_stored_sketches
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

from panther.distributed import CommunicationCounter, DistributedSketchedModel, data_parallel, verify_sketches
from panther.distributed.data.comm_hooks import hook_state, load_hook_state
from panther.errors import PerformanceWarning, ShapeError
from panther.nn import SKLinear


def network(seed, fitted=False):
    torch.manual_seed(seed)
    middle = with_stored_sketches(SKLinear(48, 48, 3)) if fitted else SKLinear(48, 48, 3)
    return nn.Sequential(SKLinear(40, 48, 2), nn.ReLU(), middle, nn.Tanh(), nn.Linear(48, 5)).double()


def train(model, x, y, steps=10):
    """Ten steps of Adam on the mean squared error; the outputs, gradients and weights along the way."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    trace = []
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        trace.append([parameter.grad.clone() for parameter in model.parameters()])
        optimizer.step()
    return trace, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.distributed
def test_the_reducer_is_freed_before_the_group():
    def rank():
        attributes = list(vars(data_parallel(nn.Linear(4, 4))))
        return attributes.index("reducer") < attributes.index("process_group")

    assert on_ranks(rank, 1) == [True]


OUTLIVE = """
import torch
import torch.distributed as dist
from panther.distributed import data_parallel

torch.set_num_threads(1)
for _ in range(200):  # torch's own wrapper hangs in one of the first hundred, mostly
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = data_parallel(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    dist.destroy_process_group()
    del model
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_a_model_may_outlive_its_process_group():
    waits.run([sys.executable, "-c", OUTLIVE], check=True)


@pytest.mark.distributed
@pytest.mark.parametrize(("sketch", "numbers"), [("sparse", 2 * 256), ("signs", 2 * 256 * 4)])
def test_forwards_do_not_send_the_sketches_again(sketch, numbers):
    def rank():
        torch.manual_seed(dist.get_rank())
        layers = [SKLinear(256, 256, 4, sketch=sketch), nn.BatchNorm1d(256), SKLinear(256, 256, 4, sketch=sketch)]
        x = torch.randn(4, 256)
        ours, plain = data_parallel(nn.Sequential(*layers)), DistributedDataParallel(nn.Sequential(*layers))
        sent = []
        for model in (ours, plain):
            with CommunicationCounter() as forward:
                out = model(x)
            with CommunicationCounter() as backward:
                out.sum().backward()
            sent.append((forward.bytes, backward.bytes))
        return sent, sum(p.nbytes for p in ours.parameters())

    for (ours, plain), parameter_bytes in on_ranks(rank):
        batch_norm = 2 * 256 * 4 + 8
        sketches = 2 * (numbers * 4 + 32)
        assert ours == (batch_norm, parameter_bytes)
        assert plain == (batch_norm + sketches, parameter_bytes)


@pytest.mark.distributed
def test_buffers_that_users_add_are_synchronised_as_ddp_does():
    def rank():
        torch.manual_seed(dist.get_rank())
        layer = prune.random_unstructured(SKLinear(64, 48, 4), "S1", 0.5)
        model = data_parallel(nn.Sequential(layer))
        return model(torch.ones(2, 64)).detach(), layer.S1_mask

    first, second = on_ranks(rank)
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[0], second[0])


@pytest.mark.distributed
def test_a_mesh_or_a_group_says_who_takes_part():
    def rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        errors = []
        try:
            data_parallel(network(0), mesh)
        except ShapeError as error:
            errors.append(str(error))
        over_mesh = data_parallel(network(dist.get_rank()), mesh["dp"]).module[0].seed
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        over_group = data_parallel(network(dist.get_rank()), groups[dist.get_rank() // 2]).module[0].seed
        return over_mesh, over_group, errors

    results = on_ranks(rank, 4)
    seeds = [network(rank)[0].seed for rank in range(4)]
    assert [mesh for mesh, _, _ in results] == [seeds[0], seeds[1], seeds[0], seeds[1]]
    assert [group for _, group, _ in results] == [seeds[0], seeds[0], seeds[2], seeds[2]]
    assert results[0][2] == [
        "strategy='ddp' takes a mesh of one axis, and the mesh has ('dp', 'tp') of sizes (2, 2): pass mesh['dp']"
    ]


@pytest.mark.distributed
def test_options_reach_ddp_and_wrapping_keeps_the_users_ignored_names():
    def rank():
        model = network(0)
        model._ddp_params_and_buffers_to_ignore = ["4.bias"]
        parallel = data_parallel(model, find_unused_parameters=True)
        assert parallel.find_unused_parameters
        assert "4.bias" in parallel.parameters_to_ignore
        return model._ddp_params_and_buffers_to_ignore

    assert on_ranks(rank)[0] == ["4.bias"]


@pytest.mark.distributed
def test_a_layer_that_becomes_fitted_between_wrappings_is_averaged():
    def rank():
        model = network(0)
        data_parallel(model)
        model[2].load_state_dict(network(1, fitted=True)[2].state_dict())
        parallel = data_parallel(model)
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
        parallel(x).square().sum().backward()
        return [model[2].U1.grad, model[2].U2.grad]

    first, second = on_ranks(rank)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.distributed
def test_the_guides_plain_ddp_works_too():
    """DDP around the model, as the guide writes it: it broadcasts every buffer, and the seeds are adopted."""

    def rank():
        torch.manual_seed(dist.get_rank())
        model = DistributedSketchedModel(64, [48, 32], 10, [0.05, 0.05, 0.05])
        parallel = DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=True)
        verify_sketches(parallel)
        x = torch.ones(3, 64)
        parallel(x).sum().backward()
        return parallel(x).detach(), copy.deepcopy(model).state_dict()

    first, second = on_ranks(rank)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


@pytest.mark.parametrize(
    ("strategy", "hint"),
    [
        ("sharded", "use one of 'ddp', 'fsdp', 'replicate'"),
        ("FSDP", "did you mean 'fsdp'?"),
        ("zero2", "use strategy='fsdp' with reshard_after_forward=False"),
        ("hsdp", "use strategy='fsdp' and a mesh of make_mesh"),
        ("tp", "use panther.distributed.tensor_parallel"),
    ],
)
def test_an_unknown_strategy_leads_to_the_known(strategy, hint):
    with pytest.raises(ValueError, match=re.escape(f"strategy={strategy!r} is unknown: {hint}")):
        data_parallel(network(0), strategy=strategy)


def test_a_model_that_cannot_be_trained_is_refused():
    with pytest.raises(ValueError, match="no parameter of the model requires one: train it as it is"):
        data_parallel(nn.ReLU())
    with pytest.raises(
        ValueError, match="tensors on the meta device, without values, and strategy='ddp' broadcasts values: call"
    ):
        data_parallel(network(0).to("meta"))
    with pytest.raises(TypeError, match=r"data parallelism takes an nn.Module, not 'network'"):
        data_parallel("network")
    with pytest.raises(TypeError, match="data_parallel takes a DeviceMesh, a process group or None, not 2"):
        data_parallel(network(0), 2)


@pytest.mark.parametrize("ratios", [[0.01, 0.02], [0.01, 0.02, 0.02]])
def test_distributed_sketched_model_has_the_guides_shape(ratios):
    model = DistributedSketchedModel(1000, [400, 300], 200, ratios)
    layers = [layer for layer in model.model if isinstance(layer, SKLinear)]
    assert [(layer.in_features, layer.out_features, layer.low_rank) for layer in layers] == [
        (1000, 400, 10),
        (400, 300, 8),
        (300, 200, 6),
    ]
    assert [type(layer) for layer in model.model] == [SKLinear, nn.ReLU, SKLinear, nn.ReLU, SKLinear]
    assert model(torch.randn(2, 1000)).shape == (2, 200)


def test_distributed_sketched_model_warns_once_and_says_both_figures():
    figures = "4 of 4 layers .* the model by 1,105,020, a dense one by 689,408"
    with pytest.warns(PerformanceWarning, match=figures) as record:
        DistributedSketchedModel(1024, [512, 256, 128], 10, [0.5, 0.6, 0.7, 0.8])
    assert len(record) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DistributedSketchedModel(1000, [400], 10, [0.001])


def test_distributed_sketched_model_takes_sequences():
    with pytest.raises(TypeError, match=r"hidden_sizes must be a list or tuple, not int: use \[512\]"):
        DistributedSketchedModel(1024, 512, 10, [0.02])
    with pytest.raises(TypeError, match=r"sketch_ratios must be a list or tuple, not float: use \[0.02\]"):
        DistributedSketchedModel(1024, [512], 10, 0.02)

    with pytest.raises(TypeError, match="input_size must be an integer, not str"):
        DistributedSketchedModel("1024", [512], 10, [0.02])
    with pytest.raises(TypeError, match=r"sketch_ratios=\['a'\] must all be numbers"):
        DistributedSketchedModel(1024, [512], 10, ["a"])


def test_options_that_ddp_does_not_have_are_errors_on_every_rank():
    def rank():
        with pytest.raises(TypeError, match="bucket_size_mb"):
            data_parallel(network(0), bucket_size_mb=25)

    on_ranks(rank)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((64, [48], 10, []), "one ratio for each of the 1 hidden layers, .* and has 0"),
        ((64, [48], 10, [0.1] * 3), "and has 3"),
        ((64, [48], 10, [0.1, 0.0]), r"sketch_ratios=\[0.1, 0.0\] must all be positive"),
        ((64, [48], 10, [0.1, float("nan")]), "must all be positive"),
        ((64, [48], 10, [0.1, float("inf")]), "must all be positive"),
        ((64, [0], 10, [0.1, 0.1]), "out_features=0 must be at least 1"),
    ],
)
def test_distributed_sketched_model_refuses(args, message):
    with pytest.raises(ShapeError, match=message):
        DistributedSketchedModel(*args)


def test_powersgd_in_several_buckets():
    """gloo's threads send the factors of one bucket after the other: in a different order the processes abort."""

    def rank():
        torch.manual_seed(0)
        widths = [40, 48, 56, 40, 48, 56, 40]
        model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))
        parallel = data_parallel(model, comm_hook="powersgd", powersgd_start_step=2, bucket_cap_mb=0.001)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
        for _ in range(40):
            optimizer.zero_grad()
            parallel(torch.randn(4, 40)).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in parallel.parameters()]

    first, *others = on_ranks(rank, 3)
    assert all(p.isfinite().all() for p in first)
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize(
    "change",
    [{"powersgd_rank": 3}, {"bucket_cap_mb": 25}, {"comm_hook": "sketch", "sketch_fraction": 0.5}, {"comm_hook": None}],
    ids=str,
)
def test_a_hook_takes_what_it_can_use_of_another_s_state(change):
    def rank():
        settings = {"comm_hook": "powersgd", "powersgd_start_step": 2, "powersgd_rank": 2, "bucket_cap_mb": 0.001}
        start = {"powersgd_start_step": 2} if change.get("comm_hook", "powersgd") == "powersgd" else {}
        merged = change if "comm_hook" in change else settings | change
        saved = None
        for options in (settings, start | merged):
            model = data_parallel(network(3), **options)
            load_hook_state(model, saved)
            x, y = torch.ones(6, 40).double() * dist.get_rank(), torch.ones(6, 5).double()
            train(model, x, y)
            saved = hook_state(model)
        assert (saved is None) == (options.get("comm_hook") is None)
        return [p.detach().clone() for p in model.parameters()]

    first, second = on_ranks(rank)
    assert all(p.isfinite().all() for p in first)
    assert all(map(torch.equal, first, second))
