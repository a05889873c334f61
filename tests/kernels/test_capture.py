"""What CUDA graphs and torch.compile record of a sketched product, on a GPU that fake tensors stand for."""

import pytest
import torch
from panther.kernels import selection, sketched_matmul
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from panther.nn.functional import sketched_linear

SHAPES = ((3, 40), (40, 5), (5, 70), (5, 70), (40, 5), (70,))


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Fake tensors on a GPU, for which the dispatch chooses Triton. Autograd on them needs a build for CUDA."""
    monkeypatch.setattr(selection, "backend", lambda: "triton")
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        yield torch.device("cuda")


def targets(graph):
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def test_a_call_on_a_gpu_is_one_operator(on_a_gpu):
    """A graph of CUDA cannot wait for a value on the host, and a compiler must see each product as one operator."""
    operands = [torch.empty(*shape, device=on_a_gpu) for shape in SHAPES]
    graph = make_fx(lambda *operands: sketched_matmul(*operands, 0.5))(*operands)
    assert "panther.sketched_matmul.default" in targets(graph)
    assert {name for name in targets(graph) if "getitem" not in name} == {"panther.sketched_matmul.default"}


def test_a_product_compiles_whole_for_a_gpu(on_a_gpu):
    graphs = []

    def record(graph, inputs):
        graphs.append(graph)
        return graph.forward

    operands = [torch.empty(*shape, device=on_a_gpu) for shape in SHAPES]
    assert torch.compile(sketched_linear, fullgraph=True, backend=record)(*operands).shape == (3, 70)
    (graph,) = graphs
    assert "panther.sketched_matmul.default" in targets(graph)


def test_a_step_compiles_whole():
    """Forward and backward each call the operator once, for which a graph of CUDA has the launches."""
    graphs = []

    def record(graph, inputs):
        graphs.append(targets(graph))
        return make_boxed_func(graph.forward)

    def product(*operands):
        return torch.ops.panther.sketched_matmul(*operands, 0.5)[0]

    generator = torch.Generator().manual_seed(1)
    operands = [torch.randn(*shape, generator=generator) for shape in SHAPES]
    for place in (0, 1, 3, 5):
        operands[place].requires_grad_()
    compiled = torch.compile(product, fullgraph=True, backend=aot_autograd(fw_compiler=record))
    trained = [operand for operand in operands if operand.requires_grad]
    gradients = [torch.autograd.grad(f(*operands).sin().sum(), trained) for f in (compiled, product)]
    for ours, reference in zip(*gradients, strict=True):
        assert torch.equal(ours, reference)
    assert [names.count("panther.sketched_matmul.default") for names in graphs] == [1, 1]


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_a_planned_call_allocates_and_launches_and_does_nothing_else(device):
    """A stream may be captured then: the call does not wait for the device, move data or draw memory of the host."""
    from panther.kernels.ops import sketched as ops

    operands = [torch.ones(*shape, device=device) for shape in SHAPES]
    with torch.no_grad():
        sketched_matmul(*operands)
        with Counting() as mode:
            ops._implementation(*operands, 1.0)
    allocations = {"new_empty", "empty"}
    if device.type == "cuda":
        assert set(mode.names) <= allocations
    else:  # The interpreter itself computes with tensors.
        assert mode.names[:3] == ["new_empty"] * 3
