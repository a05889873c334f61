"""Models that somebody else wrote: state in objects, outputs in static memory, and layers that cannot be read.

Expected is the error that the user measures, or a refusal that names the cause. Widths are small, so that a test takes
a fraction of a second.
"""

import copy

import pytest
import torch
from compressing import low_rank
from foreign_models import WIDTH, Model, inputs, network
from torch import nn
from torch.func import functional_call, grad, vmap

import panther as pr
from panther.errors import CompressionError, NumericalWarning


def errors_of(model, **options):
    """Compress a model; return the report and the error that a user measures on the held-out batch, the last one."""
    batches = inputs()
    exact = copy.deepcopy(model)
    report = pr.compress(model, 0.3, batches, **{**low_rank, **options})
    with torch.no_grad():
        ours, expected = (each.eval()(batches[-1]).clone() for each in (model, exact))
    return report, ((ours - expected).norm() / expected.norm()).item()


class Static(Model):
    """Writes each output into the same memory, as a captured graph of a GPU does."""

    def __init__(self, place):
        super().__init__()
        memory = torch.zeros(64, WIDTH)
        if place == "buffer":
            self.register_buffer("memory", memory, persistent=False)
        elif place == "attribute":
            self.memory = memory
        self.of = (lambda: self.memory) if place != "closure" else (lambda: memory)

    def forward(self, x):
        with torch.no_grad():
            return self.of().copy_(self.network(x))


@pytest.mark.parametrize("place", ["attribute", "buffer", "closure"])
@pytest.mark.filterwarnings("ignore:method='two_sided'")
def test_an_output_in_static_memory(place):
    model, exact, batches = Static(place), Static("buffer"), inputs()
    report = pr.compress(model, 0.3, batches, **low_rank)
    ours, expected = model(batches[-1]).clone(), exact(batches[-1])
    assert report.measured_error == pytest.approx(((ours - expected).norm() / expected.norm()).item(), rel=1e-3)
    assert report.measured_error > 0.01


@pytest.mark.parametrize("place", [2, 6])
def test_batches_without_entries_are_left_out(place):
    batches = inputs()
    batches.insert(place, torch.zeros(0, WIDTH))
    report = pr.compress(Model(), 0.3, batches, **low_rank)
    assert report.measured_error == pytest.approx(pr.compress(Model(), 0.3, inputs(), **low_rank).measured_error)


def test_batches_with_nothing_to_compare_are_refused():
    with pytest.raises(CompressionError, match=r"^calibration has 1 batch \(4 more without entries\) and needs"):
        pr.compress(Model(), 0.3, [*inputs(1), *[torch.zeros(0, WIDTH)] * 4], **low_rank)
    with pytest.raises(CompressionError, match=r"^the model's output has no entries on the held-out batches"):
        pr.compress(Model(), 0.3, inputs(), forward_fn=lambda model, x: model(x)[:0], method="activation", **low_rank)


def test_outputs_whose_shape_depends_on_values_are_refused():
    counts = iter(range(1, 1000))

    def shorter(model, x):
        return model(x)[next(counts) % 2 :]

    with pytest.raises(CompressionError, match=r"^a second output of the original model has 6[34] samples"):
        pr.compress(Model(), 0.3, inputs(), forward_fn=shorter, **low_rank)


class Transformed(Model):
    """Calls layers where their inputs say nothing about their weights, and a last layer that can be compressed."""

    def __init__(self, call):
        super().__init__()
        self.call, self.head = call, nn.Linear(WIDTH, 32)

    def forward(self, x):
        return self.head(self.call(self.network, x))


def scaled_call(module, x):
    return functional_call(module, {name: 1.5 * tensor for name, tensor in module.named_parameters()}, x)


def nested_call(module, x):
    return module(torch.nested.as_nested_tensor([x[:20], x[20:]], layout=torch.jagged)).values()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda module, x: vmap(module)(x), "is called within vmap or grad of torch.func"),
        (lambda module, x: grad(lambda rows: module(rows).square().sum())(x), "is called within vmap or grad"),
        (scaled_call, "is called with a weight that is not its own"),
        (nested_call, "reads nested tensors"),
    ],
    ids=["vmap", "grad", "functional_call", "nested"],
)
@pytest.mark.parametrize("method", ["two_sided", "activation"])
def test_layers_whose_calls_cannot_be_read_stay_dense(call, reason, method):
    report, error = errors_of(Transformed(call), method=method)
    assert [layer.names for layer in report.layers] == [("head",)]
    assert {layer.name: reason in layer.reason for layer in report.skipped} == {"network.0": True, "network.2": True}
    assert report.measured_error == pytest.approx(error, rel=1e-3)
    if method == "two_sided":
        assert not any("no gradient" in note for note in report.notes)


def test_functional_call_with_the_parameters_themselves():
    call = Transformed(lambda module, x: functional_call(module, dict(module.named_parameters()), x))
    report, error = errors_of(call)
    assert len(report.layers) == 3
    assert report.measured_error == pytest.approx(error, rel=1e-3)


class Physical(Model):
    """Returns energies, their gradients by position, or both, as models of molecules do."""

    def __init__(self, result, create_graph):
        super().__init__()
        self.result, self.create_graph = result, create_graph

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energies = self.network(x).square().sum(-1, keepdim=True)
            (forces,) = torch.autograd.grad(energies.sum(), x, create_graph=self.create_graph, retain_graph=True)
        return torch.cat([energies, forces], 1) if self.result == "both" else locals()[self.result]


@pytest.mark.parametrize("result", ["energies", "forces", "both"])
@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.filterwarnings("ignore:method='two_sided'")
def test_gradients_that_the_forward_computes_itself(result, create_graph):
    report, error = errors_of(Physical(result, create_graph))
    assert len(report.layers) == 2
    assert report.measured_error == pytest.approx(error, rel=1e-3)


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise AssertionError("call train() first")


def test_errors_of_the_backward_pass_and_of_gradients_in_a_forward_say_what_to_do():
    def refusing(model, x):
        return Refusing.apply(model(x))

    with pytest.raises(CompressionError, match=r"^AssertionError: call train\(\) first: .* method='activation'"):
        pr.compress(Model(), 0.3, inputs(), forward_fn=refusing, **low_rank)
    assert pr.compress(Model(), 0.3, inputs(), forward_fn=refusing, method="activation", **low_rank).measured_error

    def adapted(model, x):
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(model(x).square().mean(), model.network[2].bias)
        return model(x) - slope

    def freed(model, x):
        model.network[2].bias.requires_grad_()
        return adapted(model, x)

    with pytest.raises(CompressionError, match=r"^RuntimeError: One of the .* requires_grad_\(True\) of those"):
        pr.compress(Model(), 0.3, inputs(), forward_fn=adapted, exclude="network.2", **low_rank)
    assert pr.compress(Model(), 0.3, inputs(), forward_fn=freed, exclude="network.2", **low_rank).measured_error


def test_an_error_without_a_text():
    def failing(model, x):
        raise NotImplementedError

    with pytest.raises(CompressionError, match=r"^NotImplementedError: the model raised this"):
        pr.compress(Model(), 0.3, inputs(), forward_fn=failing, **low_rank)


def test_a_model_that_differs_from_itself_needs_no_more_batches():
    hidden = torch.Generator().manual_seed(0)

    def noisy(model, x):
        return model(x + torch.randn(x.shape, generator=hidden))

    with pytest.warns(NumericalWarning, match="most of it is the difference of"):
        pr.compress(Model(), 0.5, inputs(), forward_fn=noisy, **{**low_rank, "forms": "int8"})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_part_and_a_model_that_refuses_attributes(tmp_path):
    class Locked(nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.network, self.norm = torch.jit.script(network()), network(), nn.BatchNorm1d(WIDTH)
            self.__dict__["locked"] = True

        def __setattr__(self, name, value):
            if "locked" in vars(self) and name != "training":
                raise AttributeError(f"{name} is fixed")
            super().__setattr__(name, value)

        def forward(self, x):
            return self.norm(self.network(self.part(x)))

    model, x = Locked(), inputs()[0]
    order = [*dict(model.named_children())]
    report = pr.compress(model, 0.3, inputs(), **low_rank)
    assert [layer.names for layer in report.layers] == [("network.0",), ("network.2",)]
    restored = pr.load_compressed(pr.save_compressed(model.eval(), tmp_path), Locked()).eval()
    assert torch.equal(restored(x), model(x))
    pr.to_linears_(restored)
    assert torch.allclose(restored(x), model(x), atol=1e-5)
    assert [*dict(restored.named_children())] == order
