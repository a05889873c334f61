"""What every compressed layer computes under what users do to a layer of torch: one contract suite."""

import copy
import shutil

import pytest
import torch
from compressed_layers import LAYERS, every_layer, exact_twin, kinds_with
from covering import all_pairs
from measuring import assert_holds_one_checkpointed_call
from tolerances import KERNEL_RMS, assert_close, rms_error
from torch import nn
from torch.utils.checkpoint import checkpoint

from panther.errors import DTypeError, ShapeError

# A warning of torch about its own convolution, which the exact twin of conv1d is.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
HAS_COMPILER = shutil.which("g++") is not None and " " not in torch.__file__
INDUCTOR = [  # The first compilation takes half a minute, and it needs a C++ compiler and a path without spaces.
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_COMPILER, reason="no g++, or torch lies in a path with spaces"),
]


# Layers with the forward of another layer of the table, in make test compiled as that layer alone.
COMPILED_ALIKE = {"fitted", "int8", "int4", "conv1d", "conv2d", "conv3d", "conv2d int8"}


def assert_near(result, expected):
    """Compare numbers that are computed from the same float32 or bfloat16 tensors in another order."""
    rtol = 2e-2 if result.dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(result, expected, rtol=rtol, atol=1e-4 * max(1.0, expected.abs().max().item()))


def gradients(module, x, layer):
    """Return the output and the gradients of the sum of its squares at the input and at the layer's parameters."""
    output = module(x)
    return output, torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])


@every_layer("dense")
def test_batches_of_any_shape(kind):
    for bias in (True, False):
        layer = kind.layer(bias=bias)
        exact = exact_twin(layer)
        for batch in kind.batches:
            x = kind.x(*batch)
            for output in (layer(x), torch.no_grad()(layer)(x)):
                assert_close(output, exact(x.double()))


@every_layer()
def test_empty_batches(kind):
    layer = kind.layer()
    x = kind.x(0, requires_grad=True)
    output = layer(x)
    assert output.shape == (0, *layer(kind.x(3)).shape[1:])
    output.sum().backward()
    assert x.grad.shape == x.shape
    assert not any(parameter.grad.any() for parameter in layer.parameters() if parameter.grad is not None)


@every_layer()
@pytest.mark.parametrize("grad", [False, True])
def test_inputs_that_are_not_contiguous(kind, grad):
    layer = kind.layer()
    x = kind.x(6)
    with torch.set_grad_enabled(grad):
        expected = layer(x)
        stored_last = x.movedim(0, -1).contiguous().movedim(-1, 0)
        for view, rows in ((stored_last, expected), (stored_last[1::2], expected[1::2]), (x[::3], expected[::3])):
            assert_near(layer(view), rows)
        for formatted in kind.memory_formats(x):
            assert_near(layer(formatted), expected)


@every_layer("dense")
def test_memory_formats_are_kept(kind):
    layer = kind.layer()
    exact = exact_twin(layer).float()
    for x in kind.memory_formats(kind.x(3)):
        assert layer(x).stride() == exact(x).stride()


@every_layer()
def test_input_by_name(kind):
    layer, x = kind.layer(), kind.x(3)
    assert torch.equal(layer(input=x), layer(x))


@every_layer("input")
def test_inputs_that_do_not_fit(kind):
    layer, x = kind.layer(), kind.x(3)
    size = kind.sample[0]
    wrong = x[..., 1:] if len(kind.sample) == 1 else x[:, 1:]
    for shape_error in (wrong, torch.tensor(1.0)):
        with pytest.raises(ShapeError, match=rf"(?s)\b{size}\b"):
            layer(shape_error)
    with pytest.raises(DTypeError, match=r"the input is torch.float64 and the layer torch.float32: cast"):
        layer(x.double())
    with pytest.raises(TypeError, match=r"the input must be a tensor, not list: use torch.as_tensor"):
        layer([1.0])
    with pytest.raises(AttributeError, match=f"weight of {type(layer).__name__} is computed from .* by from_"):
        layer.weight = nn.Parameter(torch.zeros_like(layer.weight))


@pytest.mark.parametrize(
    ("kind", "dynamic", "backend"),
    [
        *(
            pytest.param(
                kind, True, "aot_eager", id=kind.name, marks=[pytest.mark.slow] * (kind.name in COMPILED_ALIKE)
            )
            for kind in kinds_with("compile")
        ),
        *(pytest.param(LAYERS[name], False, "aot_eager", id=f"{name}-static") for name in ("seeded", "conv2d")),
        *(
            pytest.param(kind, True, "inductor", id=f"{kind.name}-inductor", marks=INDUCTOR)
            for kind in kinds_with("compile")
        ),
    ],
)
def test_compile_without_graph_breaks(kind, dynamic, backend):
    torch.compiler.reset()
    layer = kind.layer()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=backend)
    for rows in (3, 20) if dynamic else (3,):
        x = kind.memory_formats(kind.x(rows, requires_grad=True))[-dynamic]  # contiguous where sizes are static
        output, ours = gradients(compiled, x, layer)
        expected, theirs = gradients(layer, x, layer)
        assert output.stride() == expected.stride()
        for result, reference in zip((output, *ours), (expected, *theirs), strict=True):
            assert_near(result, reference)
    if "trace" in kind.exempt:  # Forwards with branches take other branches without gradients.
        with torch.no_grad():
            assert_near(compiled(x), layer(x))


@every_layer("trace")
def test_symbolic_trace(kind):
    model = nn.Sequential(kind.layer(), nn.ReLU())
    traced = torch.fx.symbolic_trace(model)
    for x in (*kind.memory_formats(kind.x(3)), kind.x(20)):
        assert torch.equal(traced(x), model(x))


@every_layer()
@pytest.mark.parametrize("grad", [False, True])
def test_vmap_over_inputs(kind, grad):
    layer, x = kind.layer(), kind.x(2, 3)
    with torch.set_grad_enabled(grad):
        assert_near(torch.vmap(layer)(x), torch.stack([layer(sample) for sample in x]))


@every_layer("ensembles")
def test_vmap_over_models(kind):
    layers, x = [kind.layer(), kind.layer(seed=1)], kind.x(3)
    with torch.no_grad():
        state = torch.func.stack_module_state(layers)
        outputs = torch.vmap(lambda *state: torch.func.functional_call(layers[0], state, (x,)))(*state)
        for output, layer in zip(outputs, layers, strict=True):
            assert_near(output, layer(x))


@every_layer()
def test_gradients_of_each_sample(kind):
    layer, x = kind.layer(), kind.x(2, 3)
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    by_sample = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    layer(x[1]).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert_near(by_sample[name][1], parameter.grad)


@every_layer("linear")
def test_forward_derivative(kind):
    layer, (x, direction) = kind.layer(), kind.x(2, 3)
    output, tangent = torch.func.jvp(layer, (x,), (direction,))
    assert_near(output, layer(x))
    assert_near(tangent, layer(direction) - layer(torch.zeros_like(direction)))


@every_layer("derivatives")
@pytest.mark.parametrize("frozen", [False, True])
def test_first_and_second_derivatives(kind, frozen):
    layer = kind.in_float64().requires_grad_(not frozen)
    x = kind.x(20 if len(kind.sample) == 1 else 2, dtype=torch.float64, requires_grad=True)
    values = {} if frozen else {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def function(x, *factors):
        scaled = {name: factor * values[name] for name, factor in zip(values, factors, strict=True)}
        return torch.func.functional_call(layer, scaled, (x,)).sin()

    # Factors of the parameters, because the steps of finite differences are too large for parameters near 1e-6.
    leaves = (x, *(torch.ones_like(value, requires_grad=True) for value in values.values()))
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@every_layer("derivatives")
def test_forward_over_reverse(kind):
    """Products with the Hessian by torch.func are those of two backward passes."""
    layer = kind.in_float64()
    x = kind.x(2, dtype=torch.float64)
    values = {"input": x} | {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def loss(values):
        rest = {name: value for name, value in values.items() if name != "input"}
        return torch.func.functional_call(layer, rest, (values["input"],)).pow(3).sum()

    directions = {
        name: torch.linspace(-1, 1, value.numel(), dtype=value.dtype).view_as(value) for name, value in values.items()
    }
    _, ours = torch.func.jvp(torch.func.grad(loss), (values,), (directions,))
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    first = torch.autograd.grad(loss(leaves), list(leaves.values()), create_graph=True)
    product = sum((gradient * directions[name]).sum() for gradient, name in zip(first, leaves, strict=True))
    theirs = torch.autograd.grad(product, list(leaves.values()))
    for name, expected in zip(leaves, theirs, strict=True):
        torch.testing.assert_close(ours[name], expected)


@every_layer()
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(kind, reentrant):
    layer, x = kind.layer(), kind.x(20, requires_grad=True)
    expected, ours = gradients(layer, x, layer)
    output = checkpoint(layer, x, use_reentrant=reentrant)
    output.square().sum().backward()
    for result, reference in zip(
        (output, x.grad, *(p.grad for p in layer.parameters())), (expected, *ours), strict=True
    ):
        assert_near(result, reference)  # without gradients, some layers add products in another order


@every_layer("autocast")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(kind, dtype):
    bound = (3 if "dense" in kind.exempt else 1.5) * KERNEL_RMS[dtype]
    for bias in (True, False):
        layer = kind.trained(bias=bias)
        for x in kind.memory_formats(kind.x(20)):
            expected = layer(x)
            with torch.autocast("cpu", dtype=dtype):
                outputs = [layer(x), layer(x.to(dtype)), torch.no_grad()(layer)(x)]
                loss = layer(x).float().sum()
            for output in (*outputs, copy.deepcopy(layer).to(dtype)(x.to(dtype))):
                assert output.dtype is dtype
                assert rms_error(output, expected) < bound
            layer.zero_grad()
            loss.backward()
            assert all(parameter.grad.dtype is parameter.dtype for parameter in layer.parameters())


@every_layer("nested")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("grad", [False, True])
def test_nested_input(kind, layout, grad):
    layer, parts = kind.layer(), [kind.x(3), 2 * kind.x(5)]
    with torch.set_grad_enabled(grad):
        outputs = layer(torch.nested.nested_tensor(parts, layout=layout)).unbind()
    for output, part in zip(outputs, parts, strict=True):
        assert_near(output, layer(part))
    if grad:
        ours = torch.autograd.grad(torch.cat(outputs).square().sum(), list(layer.parameters()))
        theirs = torch.autograd.grad(layer(torch.cat(parts)).square().sum(), list(layer.parameters()))
        for result, expected in zip(ours, theirs, strict=True):
            assert_near(result, expected)


@pytest.mark.parametrize(
    ("kind", "training", "grad", "padded"),
    [
        pytest.param(*row, id=f"{row[0].name}-training={row[1]}-grad={row[2]}-padded={row[3]}")
        for row in all_pairs(kinds_with("dense", "nested"), *[[False, True]] * 3)
    ],
)
def test_an_encoder_layer_runs_the_forward(kind, training, grad, padded, monkeypatch):
    """The fast path of nn.TransformerEncoderLayer would read ``weight``, a dense product, and never call the layers."""
    torch.manual_seed(0)
    size = kind.sizes[0]
    block = nn.TransformerEncoderLayer(size, 4, kind.sizes[1], dropout=0.0, batch_first=True)
    block.linear1, block.linear2 = kind.layer(), kind.make(*reversed(kind.sizes), **kind.form)
    encoder = nn.TransformerEncoder(block, 2).train(training)
    calls, forward = [], kind.make.forward
    monkeypatch.setattr(kind.make, "forward", lambda self, x: calls.append(x) or forward(self, x))
    x, padding = torch.randn(2, 7, size), None
    if padded:
        padding = torch.zeros(2, 7, dtype=torch.bool)
        padding[1, 4:] = True
    with torch.set_grad_enabled(grad):
        output = encoder(x, src_key_padding_mask=padding)
        assert [call.is_nested for call in calls] == [padded and not training and not grad] * 4
        for layer in encoder.layers:
            layer.linear1, layer.linear2 = layer.linear1.to_linear(), layer.linear2.to_linear()
        expected = encoder(x, src_key_padding_mask=padding)
    visible = slice(None) if padding is None else ~padding
    assert_near(output[visible], expected[visible])


@every_layer()
def test_training_lowers_the_loss_and_leaves_the_buffers(kind):
    layer = kind.trained()
    buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    x = kind.x(4)
    target = torch.randn(layer(x).shape, generator=torch.Generator().manual_seed(1))
    sizes = {parameter: parameter.detach().abs().mean().item() for parameter in layer.parameters()}
    # Logarithms of factors are zero at first.
    optimizer = torch.optim.Adam(
        [{"params": [parameter], "lr": 1e-2 * (size or 1)} for parameter, size in sizes.items()]
    )
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(layer(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in layer.named_buffers())


@every_layer()
def test_checkpointing_holds_one_call_at_a_time(kind):
    """What a call computes anew in backward is released before the next one, without the garbage collector."""
    layer = kind.trained()
    x = kind.x(20 if len(kind.sample) == 1 else 3, requires_grad=True)

    assert_holds_one_checkpointed_call(layer, x, list(layer.parameters()))
