"""Random numbers, buffers, attributes and parameters that the forward of somebody else's model changes."""

import random
import signal

import numpy as np
import pytest
import torch
from compressing import low_rank
from foreign_models import WIDTH, Model, compressed, inputs, network, true_error
from torch import nn

import panther as pr


class Sampling(Model):
    """A variational encoder: mean and variance, then noise of a kind of generator."""

    def __init__(self, noise):
        super().__init__()
        self.spread = nn.Linear(WIDTH, WIDTH)
        self.noise = noise
        self.own = torch.Generator().manual_seed(4)

    def forward(self, x):
        hidden = self.network(x)
        return hidden + self.noise(self, hidden) * self.spread(hidden).exp()


@pytest.mark.parametrize(
    "noise",
    [
        lambda model, x: torch.randn_like(x),
        lambda model, x: torch.from_numpy(np.random.randn(*x.shape)).float(),
        lambda model, x: torch.tensor([random.gauss(0, 1) for _ in range(x.shape[1])]),
        lambda model, x: torch.randn(x.shape, generator=model.own),
    ],
    ids=["torch", "numpy", "python", "generator of its own"],
)
def test_random_numbers_are_those_of_the_original(noise):
    model = Sampling(noise)
    random_states = torch.get_rng_state(), random.getstate(), model.own.get_state()
    report, exact, last = compressed(model, inputs(), 0.6)
    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert random.getstate() == random_states[1]
    assert torch.equal(model.own.get_state(), random_states[2])
    model.own.manual_seed(4)
    exact.own.manual_seed(4)
    # With other random numbers than those of the report.
    assert report.measured_error == pytest.approx(true_error(model, exact, last), rel=0.3)
    assert report.measured_error < 0.5
    assert not any("differ" in note for note in report.notes)


def test_a_model_that_differs_from_itself_is_named():
    class Drifting(Model):
        def forward(self, x):
            return self.network(x) * (1 + 0.1 * next(steps))

    steps = iter(range(10**6))
    report, _, _ = compressed(Drifting(), inputs())
    assert any(note.startswith("two outputs of the original model for one batch differ by") for note in report.notes)


def test_a_forward_that_writes_its_parameters_is_named():
    class Renormalized(Model):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            with torch.no_grad():
                self.scale.mul_(1.0)
            return self.network(x) * self.scale

    report, _, _ = compressed(Renormalized(), inputs())
    assert any("write its parameters in place (scale)" in note for note in report.notes)
    assert not any("write its parameters" in note for note in compressed(Model(), inputs())[0].notes)


def test_random_numbers_outside_of_a_calibration_are_the_callers():
    from panther.compression.calibration.runner import Runner

    runner = Runner(Model(), inputs(), None, None, None, False)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    runner.output(runner.batches[0])
    assert torch.equal(torch.get_rng_state(), state)


class Stateful(Model):
    """Buffers and attributes of many kinds that each forward changes, and that change the output."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.zeros(0))
        self.register_buffer("wide", torch.ones(1, WIDTH).expand(4, WIDTH))
        self.register_buffer("base", torch.zeros(3, WIDTH))
        self.register_buffer("view", self.base[1])
        self.register_buffer("written", torch.zeros(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
        self.history, self.count, self.memory, self.table_of = [], 0, torch.zeros(WIDTH), {"a": 1}

    def forward(self, x):
        self.steps += 1
        if self.table.numel() < len(x):
            self.table.resize_(len(x)).fill_(1.0)
        self.wide = self.wide * 2
        self.base += 1
        self.written.data.add_(1)
        self.mean = x.mean(0)
        self.history.append(x)
        self.count += 1
        self.memory.add_(1)
        self.table_of["b"] = x
        self.late = x
        # Anything but a first forward is seen in the output.
        expected = (1, 1, 2.0, 1, 1, 1, WIDTH)
        state = self.steps, len(self.history), self.wide[0, 0], self.view[0], self.count, self.memory[0]
        assert all(float(a) == b for a, b in zip(state, expected, strict=False)), state
        return self.network(x) + self.wide[0] + self.view


def test_each_forward_finds_the_state_of_the_first():
    model = Stateful()
    names = ("steps", "table", "wide", "base", "view", "written", "mean", "memory")
    objects = {name: getattr(model, name) for name in names}
    values = {name: value.clone() for name, value in objects.items()}
    history, table_of = model.history, model.table_of
    pr.compress(model, 0.3, inputs(), **low_rank)
    for name in names:
        assert getattr(model, name) is objects[name], name
        assert torch.equal(objects[name], values[name]), name
    assert objects["wide"].stride() == (0, 1)
    assert objects["view"].data_ptr() == objects["base"][1].data_ptr()
    assert model.history is history
    assert history == []
    assert model.table_of is table_of
    assert table_of == {"a": 1}
    assert model.count == 0
    assert not hasattr(model, "late")
    assert "written" in dict(model.named_buffers())


@pytest.mark.parametrize("trainable", [True, False])
def test_a_model_that_was_made_in_inference_mode(trainable):
    with torch.inference_mode():
        model = nn.Sequential(*network(), nn.BatchNorm1d(WIDTH))
        for parameter in model.parameters():
            parameter.requires_grad_(trainable)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    report = pr.compress(model, 0.3, inputs(), **low_rank)
    normal = nn.Sequential(*network(), nn.BatchNorm1d(WIDTH))
    assert report.measured_error == pr.compress(normal, 0.3, inputs(), **low_rank).measured_error
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad is trainable, name
    assert model[3].weight is parameters["3.weight"]
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers() if name.startswith("3."))


def test_the_observers_of_quantization_aware_training():
    pytest.importorskip("torch.ao.quantization")
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    class Observed(Model):
        def __init__(self):
            super().__init__()
            self.fake = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

        def forward(self, x):
            return self.network(self.fake(x))

    model = Observed()
    observed = {name: buffer.clone() for name, buffer in model.fake.named_buffers()}
    pr.compress(model, 0.4, inputs(), **low_rank)
    assert len(observed) > 4
    assert all(torch.equal(buffer, observed[name]) for name, buffer in model.fake.named_buffers())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("call", [1, 4, 9, 40, 90])
def test_an_interruption_at_any_line(number, call, monkeypatch):
    """A signal that arrives while the calibration puts the model back arrives once it is put back."""

    class Ended(BaseException):
        pass

    def end(number, frame):
        raise Ended

    from panther.compression.calibration import model_state

    model, previous_handler = Stateful(), signal.signal(number, end)
    objects = {module: dict(vars(module)) for module in model.modules()}
    refill, left = model_state.refill, call

    def interrupted(*arguments, **options):
        nonlocal left
        left -= 1
        if left == 0:
            signal.raise_signal(number)
        return refill(*arguments, **options)

    monkeypatch.setattr(model_state, "refill", interrupted)
    try:
        with pytest.raises(Ended):
            pr.compress(model, 0.3, inputs(), **low_rank)
    finally:
        signal.signal(number, previous_handler)
    for module, attributes in objects.items():
        assert vars(module).keys() == attributes.keys()
        assert all(vars(module)[name] is value for name, value in attributes.items())
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    assert model.steps == 0
    assert model.history == []


def test_the_default_device_is_that_of_the_forward():
    class Making(Model):
        def forward(self, x):
            made = torch.zeros(1)
            assert made.is_meta == (torch.get_default_device().type == "meta")
            devices.append(made.device.type)
            return self.network(x)

    devices, batches = [], inputs()
    ours, theirs = Making(), Making()
    report = pr.compress(ours, 0.3, batches, **low_rank)
    assert {*devices} == {"cpu"}
    devices.clear()
    with torch.device("meta"):
        again = pr.compress(theirs, 0.3, batches, **low_rank)
    assert {*devices} == {"meta"}
    assert again.measured_error == report.measured_error
