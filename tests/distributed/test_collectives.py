"""Collectives, and their gradients against one process that holds what all ranks hold."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from panther.distributed import (
    ReduceOp,
    all_gather,
    all_reduce,
    broadcast,
    get_distributed_info,
    get_rank,
    get_world_size,
    make_mesh,
    reduce_scatter,
)
from panther.distributed.comm.collectives import on_first_rank
from panther.distributed.comm.mesh import chunk_sizes
from panther.errors import DistributedError, ShapeError

pytestmark = pytest.mark.distributed


def given(rank, *shape):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def differentiated(function, parts):
    """Outputs and gradients of the sum of rank r's (r + 1) sin(output), for a function of all ranks' inputs."""
    leaves = [part.clone().requires_grad_() for part in parts]
    outputs = function(leaves)
    loss = sum((rank + 1) * out.sin().sum() for rank, out in enumerate(outputs))
    return [out.detach() for out in outputs], torch.autograd.grad(
        loss, leaves, allow_unused=True, materialize_grads=True
    )


OPERATIONS = {
    "all_reduce": (lambda x, **kw: all_reduce(x, **kw), lambda xs: [sum(xs)] * len(xs)),
    "mean": (lambda x, **kw: all_reduce(x, "mean", **kw), lambda xs: [sum(xs) / len(xs)] * len(xs)),
    "all_gather": (lambda x, **kw: all_gather(x, 1, **kw), lambda xs: [torch.cat(list(xs), 1)] * len(xs)),
    "broadcast": (lambda x, **kw: broadcast(x, 1, **kw), lambda xs: [xs[1]] * len(xs)),
}


def tied(parts):
    """Equal values on ranks 0 and 1 in the first row, zeros on all in the last one."""
    for part in parts:
        part[0], part[-1] = parts[0][0], 0.0
    return parts


REDUCTIONS = {
    "max": (dist.ReduceOp.MAX, lambda xs: torch.stack(list(xs)).amax(0)),  # amax and amin share between ties
    "min": (dist.ReduceOp.MIN, lambda xs: torch.stack(list(xs)).amin(0)),
    "product": (dist.ReduceOp.PRODUCT, lambda xs: torch.stack(list(xs)).prod(0)),
    "sum": (dist.ReduceOp.SUM, sum),
    "mean": (dist.ReduceOp.AVG, lambda xs: sum(xs) / len(xs)),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_and_their_gradients_are_those_of_one_process(name):
    """By name and by torch's value, for a loss a rank and for one loss, and scattered in chunks of 2, 2 and 1 rows."""
    value, joint = REDUCTIONS[name]
    parts = tied([given(rank, 5, 2) for rank in range(3)])

    def rank():
        found = []
        for run in (
            lambda x: all_reduce(x, name, grad="partial"),
            lambda x: all_reduce(x, value, grad="partial"),
            lambda x: reduce_scatter(x, op=value),
        ):
            x = parts[dist.get_rank()].clone().requires_grad_()
            out = run(x)
            found += [out.detach(), *torch.autograd.grad((dist.get_rank() + 1) * out.sin().sum(), x)]
        x = parts[dist.get_rank()].clone().requires_grad_()
        found += torch.autograd.grad(all_reduce(x, name).sin().sum(), x)
        return found, all_reduce(torch.tensor([3 - dist.get_rank()]), name)

    outputs, gradients = differentiated(lambda xs: [joint(xs)] * 3, parts)
    chunks, scattered = differentiated(lambda xs: joint(xs).chunk(3), parts)
    leaves = [part.clone().requires_grad_() for part in parts]
    shared = torch.autograd.grad(joint(leaves).sin().sum(), leaves)
    for r, (found, integer) in enumerate(on_ranks(rank, 3)):
        wanted = [*[outputs[r], gradients[r]] * 2, chunks[r], scattered[r], shared[r]]
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        assert integer.item() == {"max": 3, "min": 1, "product": 6, "sum": 6, "mean": 2}[name]


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("n", [2, 3])
def test_every_rank_with_a_loss_of_its_own(name, n):
    """The sum of the losses is what one process minimises that holds everything."""
    ours, theirs = OPERATIONS[name]
    parts = [given(rank, 4, 2 if name != "all_gather" else 2 + rank) for rank in range(n)]

    def rank():
        x = parts[dist.get_rank()].clone().requires_grad_()
        out = ours(x, grad="partial")
        (gradient,) = torch.autograd.grad((dist.get_rank() + 1) * out.sin().sum(), x)
        return out.detach(), gradient

    outputs, gradients = differentiated(theirs, parts)
    for (out, gradient), expected, expected_gradient in zip(on_ranks(rank, n), outputs, gradients, strict=True):
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("name", OPERATIONS)
def test_all_ranks_continue_with_equal_results(name):
    """One loss, computed everywhere: its gradient is not counted once a rank."""
    ours, theirs = OPERATIONS[name]
    parts = [given(rank, 4, 2) for rank in range(2)]

    def rank():
        x = parts[dist.get_rank()].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(ours(x).sin().sum(), x)
        return gradient

    leaves = [part.clone().requires_grad_() for part in parts]
    loss = theirs(leaves)[0].sin().sum()
    expected = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    for gradient, right in zip(on_ranks(rank), expected, strict=True):
        torch.testing.assert_close(gradient, right)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_may_take_the_place_of_the_dimension(name):
    """As in reduce_scatter(tensor, ReduceOp.AVERAGE)."""
    value, combine = REDUCTIONS[name]

    def rank():
        x = given(dist.get_rank(), 4, 3)
        return [reduce_scatter(x, second) for second in (value, name)] + [reduce_scatter(x, 0, op=value)]

    chunks = combine([given(0, 4, 3), given(1, 4, 3)]).chunk(2)
    for found, wanted in zip(on_ranks(rank), chunks, strict=True):
        for one in found:
            torch.testing.assert_close(one, wanted, rtol=1e-12, atol=0)


def test_the_reductions_are_those_of_torch():
    assert ReduceOp.AVERAGE is ReduceOp.AVG is dist.ReduceOp.AVG
    for name in ("SUM", "MAX", "MIN", "PRODUCT"):
        assert getattr(ReduceOp, name) is getattr(dist.ReduceOp, name)


@pytest.mark.parametrize("rows", [6, 7])
@pytest.mark.parametrize("dim", [0, -1])
def test_reduce_scatter_by_chunks(rows, dim):
    shape = (rows, 2) if dim == 0 else (2, rows)
    parts = [given(rank, *shape) for rank in range(3)]

    def rank():
        x = parts[dist.get_rank()].clone().requires_grad_()
        out = reduce_scatter(x, dim)
        (gradient,) = torch.autograd.grad((dist.get_rank() + 1) * out.sin().sum(), x)
        return out.detach(), gradient

    outputs, gradients = differentiated(lambda xs: sum(xs).chunk(3, dim), parts)
    for (out, gradient), expected, expected_gradient in zip(on_ranks(rank, 3), outputs, gradients, strict=True):
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(gradient, expected_gradient)


def test_double_backward():
    def rank():
        x = given(dist.get_rank(), 3, 2).requires_grad_()
        (first,) = torch.autograd.grad(all_gather(x, grad="partial").pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return first.detach(), second

    for number, (first, second) in enumerate(on_ranks(rank)):
        x = given(number, 3, 2)
        torch.testing.assert_close(first, 2 * 3 * x**2)  # two ranks' losses
        torch.testing.assert_close(second, 2 * 6 * x**2 * 12 * x)


def test_a_term_of_one_rank_has_its_whole_gradient_on_all_of_them():
    """A bias that one rank adds before a reduce_scatter: first and second derivatives are those of one process."""

    def derivatives(y, bias):
        (first,) = torch.autograd.grad(y.pow(3).sum(), bias, create_graph=True)
        return first.detach(), torch.autograd.grad(first.square().sum(), bias)[0]

    def rank():
        bias = given(7, 4).requires_grad_()
        return derivatives(reduce_scatter(given(dist.get_rank(), 5, 4) + on_first_rank(bias), 0), bias)

    bias = given(7, 4).requires_grad_()
    expected = derivatives(given(0, 5, 4) + given(1, 5, 4) + bias, bias)
    for found in on_ranks(rank):
        torch.testing.assert_close(found, expected)


def test_what_is_refused():
    def rank():
        messages = []
        for call in (
            lambda: all_gather(torch.zeros(2 + dist.get_rank(), 3 + dist.get_rank())),
            lambda: all_reduce(torch.zeros(1), "median"),
            lambda: all_reduce(torch.zeros(1), grad="sum"),
            lambda: reduce_scatter(torch.zeros(1)),
        ):
            with pytest.raises((ShapeError, ValueError)) as caught:
                call()
            messages.append(str(caught.value))
        return messages

    for messages in on_ranks(rank):
        assert messages[0] == "all_gather along dim=0 takes shapes that differ only there, not [(2, 3), (3, 4)]"
        assert messages[1].startswith("op='median' is unknown: use one of 'sum', 'mean', 'max', 'min', 'product', or R")
        assert messages[2].startswith("grad='sum' is unknown: use 'replicate' or 'partial'")
        assert messages[3].startswith("a dimension of 1 cannot be split into 2 chunks")
    with pytest.raises(DistributedError, match=r"call panther.distributed.init\(\) first"):
        all_reduce(torch.zeros(1))


@pytest.mark.parametrize(("size", "n"), [(10, 4), (7, 3), (8, 8), (9, 2)])
def test_chunks_are_those_of_torch(size, n):
    assert chunk_sizes(size, n) == [len(part) for part in torch.arange(size).chunk(n)]


def test_meshes():
    def rank():
        mesh = make_mesh(dp=2, tp=2)
        names = [make_mesh().mesh_dim_names, make_mesh(tp=2, replicate=2).mesh_dim_names]
        info = get_distributed_info()
        with pytest.raises(ShapeError) as caught:
            make_mesh(dp=2, pp=1, tp=3)
        with pytest.raises(ShapeError) as negative:
            make_mesh(dp=-4)
        return tuple(mesh.get_coordinate()), names, info, str(caught.value), str(negative.value)

    results = on_ranks(rank, 4)
    assert [coordinate for coordinate, *_ in results] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    _, names, info, message, negative = results[3]
    assert names == [("dp",), ("replicate", "tp")]
    assert (info.rank, info.world_size, info.backend, info.device.type) == (3, 4, "gloo", "cpu")
    rule = "dp * pp * tp = 2 * 1 * 3 = 6 must equal the world size (4)"
    assert message == f"{rule}: use tp=2, or start 6 processes"
    assert "dp=-4 must be at least 1" in negative
    assert (get_rank(), get_world_size(), get_distributed_info().backend) == (0, 1, None)
    assert (info["rank"], info["world_size"]) == (3, 4)
    with pytest.raises(KeyError, match="size"):
        info["size"]
    with pytest.raises(DistributedError, match="there is no process group"):
        make_mesh(dp=1)


def second_derivatives(operation):
    """Gradients of |d L / d x|^2 for L = sum(f(op(x_r))^3), on each rank, with a weight before the operation."""
    torch.manual_seed(dist.get_rank())
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    y = operation(x * weight)
    (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    # What each rank has of the first gradient is a part of one sum.
    (second,) = torch.autograd.grad(first.square().sum(), weight)
    return x.detach(), weight.detach(), second


def joint_second_derivatives(inputs, combine):
    xs = [x.clone().requires_grad_() for x, _ in inputs]
    weights = [w.clone().requires_grad_() for _, w in inputs]
    y = combine([x * w for x, w in zip(xs, weights, strict=True)])
    firsts = torch.autograd.grad(y.pow(3).sum(), xs, create_graph=True, allow_unused=True)
    penalty = sum(first.square().sum() for first in firsts if first is not None)
    grads = torch.autograd.grad(penalty, weights, allow_unused=True)
    return [torch.zeros(4, 3, dtype=torch.float64) if grad is None else grad for grad in grads]


@pytest.mark.parametrize(
    ("operation", "combine"),
    [
        (all_reduce, sum),
        (lambda x: all_reduce(x, "mean"), lambda parts: sum(parts) / len(parts)),
        (lambda x: all_gather(x, 1), lambda parts: torch.cat(parts, 1)),
        (lambda x: broadcast(x, 1), lambda parts: parts[1]),
        (lambda x: all_reduce(x, "max"), lambda parts: torch.stack(parts).amax(0)),
        (lambda x: all_reduce(x, "product"), lambda parts: torch.stack(parts).prod(0)),
    ],
    ids=["sum", "mean", "gather", "broadcast", "max", "product"],
)
def test_second_derivatives_are_those_of_one_process(operation, combine):
    results = on_ranks(second_derivatives, 3, operation)
    expected = joint_second_derivatives([(x, w) for x, w, _ in results], combine)
    for (_, _, found), wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_what_collectives_cannot_take_is_said():
    def run():
        messages = []
        for call in (
            lambda: all_gather(torch.ones(2, 3), 5),
            lambda: reduce_scatter(torch.ones(2, 4), -3),
            lambda: all_gather(torch.ones(())),
            lambda: all_reduce(torch.ones(2, dtype=torch.bool)),
            lambda: all_reduce(torch.ones(2, dtype=torch.bool), "max"),
            lambda: reduce_scatter(torch.ones(2, dtype=torch.bool), op="mean"),
            lambda: broadcast(torch.ones(2), 7),
            lambda: broadcast(torch.ones(2), "0"),
            lambda: all_gather(torch.ones(2), "0"),
            lambda: all_reduce(torch.ones(2), ["sum"]),
            lambda: all_reduce(torch.ones(2), ReduceOp.BAND),
            lambda: reduce_scatter(torch.ones(2), ReduceOp.MAX, op="mean"),
            lambda: reduce_scatter(torch.ones(2), "median"),
            lambda: all_reduce(3.0),
            lambda: all_reduce(torch.ones(2), group="world"),
        ):
            with pytest.raises(Exception) as caught:  # noqa: PT011 (each has a class of its own)
                call()
            messages.append(f"{type(caught.value).__name__}: {caught.value}")
        return messages

    messages, _ = on_ranks(run)
    reductions = "use one of 'sum', 'mean', 'max', 'min', 'product', or ReduceOp.SUM, AVG, MAX, MIN or PRODUCT"
    assert messages == [
        "ShapeError: all_gather along dim=5 needs a tensor with this dimension, and x has 2 dimensions",
        "ShapeError: reduce_scatter along dim=-3 needs a tensor with this dimension, and x has 2 dimensions",
        "ShapeError: all_gather along dim=0 needs a tensor with this dimension, and x has 0 dimensions: "
        "use x.unsqueeze(0)",
        "DTypeError: all_reduce with op='sum' takes integers and floating numbers, and x is torch.bool: use x.int()",
        "DTypeError: all_reduce with op='max' takes integers and floating numbers, and x is torch.bool: use x.int()",
        "DTypeError: reduce_scatter with op='mean' takes integers and floating numbers, and x is torch.bool: "
        "use x.int()",
        "DistributedError: src=7 must be a global rank of the group, one of [0, 1]",
        "TypeError: src must be an integer, not str",
        "TypeError: dim must be an integer, not str",
        f"ValueError: op=['sum'] is unknown: {reductions}",
        f"ValueError: op={ReduceOp.BAND!r} is unknown: {reductions}",
        f"TypeError: reduce_scatter has two reductions, {ReduceOp.MAX!r} and op='mean': give one",
        f"ValueError: op='median' is unknown: {reductions}",
        "TypeError: all_reduce takes a tensor, not a float",
        "TypeError: a group must be a process group, such as mesh['dp'].get_group(), or None, not str",
    ]
