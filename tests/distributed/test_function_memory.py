"""What every autograd function of ours holds at most under activation checkpointing, measured and predicted.

Recomputation ends by an exception, after which torch does not release what a function saved by other means than for the
backward pass. Such a function keeps the recomputed activations of every block, which no test of results shows.
"""

import ast
import gc
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from live_bytes import LiveBytes
from measuring import assert_holds_one_checkpointed_call
from panther.kernels.cpu.sketched import JoinedProduct
from panther.kernels.ops import library, sketched
from torch import nn
from torch.nn import functional as F

import panther as pr
from panther import kernels
from panther.compression.calibration import steps
from panther.distributed.advisor.cost import Layout, estimate
from panther.distributed.advisor.model_stats import ModelStats
from panther.distributed.comm import collectives
from panther.distributed.data.strategies import fsdp_blocks
from panther.distributed.tensor.activation_checkpoint import checkpoint_blocks_

pytestmark = pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")
ROWS, WIDTH, RANK = 96, 64, 4
PACKAGES = [Path(pr.__file__).parent, Path(kernels.__file__).parent]


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def factors():
    return draw(WIDTH, RANK), draw(RANK, WIDTH).sign(), draw(RANK, WIDTH), draw(WIDTH, RANK).sign()


def trained(*tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


def joined():
    S1, U1, S2, U2 = factors()
    S1, S2 = trained(S1, S2)
    return lambda x: JoinedProduct.apply(x, S1, U1, S2, U2, None, 0.5)[0]


def operator(name):
    """An operator of the dispatch as torch registers it; on the CPU its implementation is torch's own."""
    S1, U1, S2, U2 = factors()
    S1, S2 = trained(S1, S2)
    ops = torch.ops.panther
    return {
        "sketched_matmul": lambda x: ops.sketched_matmul(x, S1, U1, S2, U2, None, 0.5)[0],
        "folded_matmul": lambda x: ops.folded_matmul(x, S1, U1[0], S2, U2[:, 0], None, 0.5)[0],
        "sketched_inner": lambda x: ops.sketched_inner(x, S1, U2, 0.5).repeat(1, WIDTH // (2 * RANK)),
        "sketched_outer": lambda x: ops.sketched_outer(x[:, : 2 * RANK].contiguous(), U1, S2, None),
    }[name]


def direct():
    """A product on the short way that calls on a GPU take, without the operator."""
    S1, U1, S2, U2 = factors()
    S1, S2 = trained(S1, S2)

    def product(x):
        always = mock.patch.multiple(library, runs_kernels=lambda x: True, is_plain_call=lambda: True)
        with always:  # also where the live bytes are counted by a mode
            return sketched._sketched_matmul(x, S1, U1, S2, U2, None, 0.5)[0]

    return product


def halves():
    S1, U1, S2, U2 = factors()
    S1, S2 = trained(S1, S2)
    return lambda x: kernels.sketched_outer(kernels.sketched_inner(x, S1, U2, 0.5), U1, S2, None)


def folded():
    S1, U1, S2, U2 = factors()
    S1, S2 = trained(S1, S2)
    return lambda x: kernels.sketched_matmul(x, S1, U1[0], S2, U2[:, 0], None, 0.5)


def attention(name):
    def attend(x):
        q, k, v = (part.reshape(1, 2, ROWS, -1) for part in (x.exp(), x.neg().exp(), x))
        if name == "causal_linear_attention":
            return torch.ops.panther.causal_linear_attention(q, k, v, None)[0].reshape(ROWS, WIDTH)
        return kernels.windowed_linear_attention(q, k, v, q, k, window=8).reshape(ROWS, WIDTH)

    return attend


def quantized():
    layer = pr.nn.QuantizedLinear.from_linear(nn.Linear(WIDTH, WIDTH), bits=4, low_rank=2)
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    return layer


def sketch():
    S = pr.sketch.GaussianSketch(ROWS, ROWS, seed=0)
    return lambda x: S @ x


def tap():
    anchor = torch.zeros((), requires_grad=True)
    return lambda x: steps.Tap.apply(x, anchor, lambda gradient: None)


# The names of the classes, and of the nodes that registered operators get.
FUNCTIONS = {
    "JoinedProduct": joined,
    "FoldedProduct": folded,
    "Differentiable": direct,
    "InnerProduct and OuterProduct": halves,
    "quantized_product": quantized,
    "_Product": sketch,
    "Tap": tap,
    "_Collective": lambda: lambda x: collectives._Collective.apply(x, collectives._view, collectives._view),
    "_SumTogether": lambda: lambda x: collectives._SumTogether.apply(None, x)[0],
}
OPERATORS = ("sketched_matmul", "folded_matmul", "sketched_inner", "sketched_outer")
ATTENTIONS = ("causal_linear_attention", "windowed_linear_attention")
FUNCTIONS |= {name: partial(operator, name) for name in OPERATORS} | {
    name: partial(attention, name) for name in ATTENTIONS
}


def test_every_autograd_function_has_a_case():
    functions, operators, attentions = set(), 0, 0
    for path in (path for package in PACKAGES for path in package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and any(
                ast.unparse(base).endswith("autograd.Function") for base in node.bases
            ):
                functions.add(node.name)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "define":
                operators += any(keyword.arg == "backward" for keyword in node.keywords)
            attentions += isinstance(node, ast.Call) and ast.unparse(node.func) == "define_attention"
    cases = {part for name in FUNCTIONS for part in name.split(" and ")}
    assert functions - cases == {"Alias"}  # which saves nothing: it is a name for the memory of its input
    assert {"JoinedProduct", "_Product"} <= functions
    assert attentions == len(ATTENTIONS)
    # Beside quantized_product, define_attention makes the backward pass an operator too, for derivatives of second
    # order; csr_matmul refuses.
    assert operators == len(OPERATORS) + 1 + 2 + 1


def nodes_of(tensor):
    """The names of the functions in the graph of a tensor."""
    names, nodes = set(), [tensor.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None:
            names.add(node.name())
            nodes += [inner for inner, _ in node.next_functions]
    return names


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_checkpointed_function_holds_one_call_at_a_time(name, monkeypatch):
    monkeypatch.setattr(collectives, "_sum", lambda x, group: x.clone())  # as on one rank
    function, x = FUNCTIONS[name](), draw(ROWS, WIDTH).requires_grad_()
    nodes = nodes_of(function(x))
    for part in name.split(" and "):
        # A registered operator's node is named after it.
        assert any(part in node or part.replace("_", "") in node.lower() for node in nodes), nodes

    def block(x):
        return function(x.tanh()).tanh()  # which saves what is computed anew, too

    assert_holds_one_checkpointed_call(block, x)


class Block(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.norm = layer, nn.LayerNorm(256)

    def forward(self, x):
        return torch.tanh(self.norm(self.layer(x)))


def frozen():
    layer = pr.nn.QuantizedLinear.from_linear(nn.Linear(256, 256), bits=4, low_rank=2)
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    return layer


LAYERS = {
    "dense": lambda: nn.Linear(256, 256),
    "SKLinear": lambda: pr.nn.SKLinear(256, 256, 8),
    "several terms": lambda: pr.nn.SKLinear(256, 256, 3, 8),
    "FrozenProduct": frozen,
    "halves": lambda: nn.Sequential(*(pr.nn.SKLinear(256, 256, 8) for _ in range(2))),
}


@pytest.mark.parametrize("recomputed", ["full", pytest.param("none", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LAYERS)
def test_the_peak_of_a_step_is_what_the_advisor_predicts(name, recomputed):
    """All live tensors, also those that no hook of autograd sees, without gradients of parameters."""
    torch.manual_seed(0)
    blocks, samples = 8, 256
    model = nn.Sequential(*(Block(LAYERS[name]()) for _ in range(blocks)))
    x, target = draw(samples, 256), torch.zeros(samples, 256)
    stats = ModelStats.of(
        model, x[:2], loss_fn=lambda y: F.mse_loss(y, torch.zeros_like(y)), activation_checkpointing=recomputed
    )
    cluster = pr.distributed.ClusterSpec.preset("cpu", 1)
    predicted = estimate(stats, cluster, Layout(), samples).stages[0].parts()
    checkpoint_blocks_(model, fsdp_blocks(model), recomputed)

    def step():
        with LiveBytes() as live:
            F.mse_loss(model(x), target).backward()
        return live.peak

    F.mse_loss(model(x), target).backward()  # gradients stay, and caches of the first call
    gc.disable()
    try:
        peak = step()
    finally:
        gc.enable()
    # Besides what autograd keeps, a step holds gradients of a few activations and of one layer's parameters.
    most = predicted["activations"] + 5 * x.nbytes + 2 * 256 * 256 * 4
    assert 0.8 * predicted["activations"] <= peak <= most, (peak, predicted["activations"])
