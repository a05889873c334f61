"""What CUDA graphs and torch.compile record of a sketched product, on a GPU that fake tensors stand for."""

import pytest
import torch
from panther.kernels import causal_linear_attention, selection, sketched_matmul
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from panther.nn import SKLinear
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


def test_attention_on_a_gpu_is_one_operator(on_a_gpu):
    x = torch.empty(2, 40, 16, device=on_a_gpu)
    graph = make_fx(lambda x: causal_linear_attention(x, x, x))(x)
    assert [target for target in targets(graph) if "panther" in target] == ["panther.causal_linear_attention.default"]


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


@pytest.fixture(params=["sparse", "signs"])
def layer_on_a_gpu(request):
    return SKLinear(256, 256, 16, sketch=request.param, seed=0, device="cuda", dtype=torch.bfloat16)


@pytest.fixture
def row_on_a_gpu():
    return torch.randn(1, 256, generator=torch.Generator().manual_seed(2)).to("cuda", torch.bfloat16)


@pytest.mark.gpu
def test_a_graph_of_cuda_replays_a_layer(layer_on_a_gpu, row_on_a_gpu):
    with torch.no_grad():
        expected = layer_on_a_gpu(row_on_a_gpu)
        x = torch.zeros_like(row_on_a_gpu)
        layer_on_a_gpu(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer_on_a_gpu(x)
        for _ in range(2):
            x.copy_(row_on_a_gpu)
            graph.replay()
            assert torch.equal(y, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("trains", [False, True])
def test_a_compiled_layer_runs_in_graphs_of_cuda(layer_on_a_gpu, row_on_a_gpu, trains):
    compiled = torch.compile(layer_on_a_gpu, mode="reduce-overhead", fullgraph=True)
    with torch.set_grad_enabled(trains):
        expected = layer_on_a_gpu(row_on_a_gpu)
        for _ in range(4):  # Warm up, record, and replay twice.
            torch.compiler.cudagraph_mark_step_begin()
            y = compiled(row_on_a_gpu)
            assert torch.equal(y, expected)
            if trains:
                y.float().square().sum().backward()
    if trains:
        assert torch.isfinite(layer_on_a_gpu.S1.grad).all()


@pytest.mark.gpu
def test_launches_go_to_the_stream_that_is_current(layer_on_a_gpu, row_on_a_gpu):
    with torch.no_grad():
        expected = layer_on_a_gpu(row_on_a_gpu)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            x = row_on_a_gpu * 2  # after the sleep, on this stream alone
            y = layer_on_a_gpu(x)
        stream.synchronize()
        bias = layer_on_a_gpu.bias
        assert torch.allclose((y - bias).float(), 2 * (expected - bias).float(), rtol=0.05, atol=0.05)


@pytest.mark.gpu
def test_later_launches_do_without_the_front_end_of_triton(layer_on_a_gpu, row_on_a_gpu, monkeypatch):
    from panther.kernels._triton import _launch

    bound = []

    def bind(*args):
        bound.append(unpatched(*args))
        return bound[-1]

    unpatched = _launch.bind
    monkeypatch.setattr(_launch, "bind", bind)
    with torch.no_grad():
        first, second = layer_on_a_gpu(row_on_a_gpu), layer_on_a_gpu(row_on_a_gpu)
    assert bound
    assert None not in bound
    assert torch.equal(first, second)
