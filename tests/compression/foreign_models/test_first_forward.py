"""What the first forward of somebody else's model puts into it: a model that never ran compresses like one that ran."""

import copy
from typing import ClassVar

import pytest
import torch
from foreign_models import WIDTH, Model, inputs
from torch import nn

import panther as pr
from panther.errors import CompressionError

_OPTIONS = {"bits": 5, "forms": ("int4", "int8"), "seed": 0, "measure_speed": False, "allow_slower": True}


class Scaled(Model):
    """Each call of ``install`` would scale the first layer once more."""

    def forward(self, x):
        self.install()
        return self.network(x)

    def install(self):
        raise NotImplementedError

    def scale(self):
        self.network[1].register_forward_hook(lambda module, args, output: 1.5 * output)


class WithAttribute(Scaled):
    is_ready = False

    def install(self):
        if not self.is_ready:
            self.scale()
            self.is_ready = True


class WithClass(Scaled):
    is_ready = False

    def install(self):
        if not self.is_ready:
            self.scale()
            type(self).is_ready = True


class WithSetOfClass(Scaled):
    ready: ClassVar[set[int]] = set()

    def install(self):
        if id(self) not in self.ready:
            self.scale()
            self.ready.add(id(self))


class WithConfig(Scaled):
    def __init__(self):
        super().__init__()
        self.config = type("Config", (), {})()

    def install(self):
        if not hasattr(self.config, "is_ready"):
            self.scale()
            self.config.is_ready = True


class WithHooksThemselves(Scaled):
    def install(self):
        if not self.network[1]._forward_hooks:
            self.scale()


class WithForward(WithAttribute):
    def scale(self):
        forward = self.network[1].forward
        self.network[1].forward = lambda x: 1.5 * forward(x)


class WithModule(Scaled):
    def __init__(self):
        super().__init__()
        self.extra = None

    def install(self):
        if self.extra is None:
            self.extra = nn.Dropout(0.1)
            self.scale()


class WithTrainingMode(WithAttribute):
    def forward(self, x):
        assert not self.training
        y = super().forward(x)
        self.train()
        return y


class ThatReplacesAHook(Scaled):
    """The hook of the first forward takes its own place, as a hook that reads a shape once does."""

    def __init__(self):
        super().__init__()
        self.handle = self.network[1].register_forward_pre_hook(self.first)

    def first(self, module, args):
        self.handle.remove()
        self.handle = module.register_forward_pre_hook(lambda module, args: (1.5 * args[0],))
        return (1.5 * args[0],)

    def install(self):
        pass


def _content(model):
    modules = {name: {**vars(module)} for name, module in model.named_modules()}
    hooks = {
        (name, key): [*value]
        for name, attributes in modules.items()
        for key, value in attributes.items()
        if isinstance(value, dict) and not name.startswith("network.0") and not name.startswith("network.2")
    }
    return hooks, {key: value for key, value in vars(type(model)).items() if not key.startswith("__")}


@pytest.mark.parametrize("kind", [*Scaled.__subclasses__(), *WithAttribute.__subclasses__()])
def test_a_model_that_never_ran_compresses_like_one_that_ran_and_is_left_as_it_was(kind):
    state = {name: copy.copy(value) for name, value in vars(kind).items() if name in ("ready", "is_ready")}
    outputs = []
    for ran in (False, True):
        for name, value in state.items():
            setattr(kind, name, copy.copy(value))
        model = kind().eval()
        if ran:
            model.eval()(inputs()[0])
        original = _content(model.eval())
        pr.compress(model, calibration=inputs(), **_OPTIONS)
        assert _content(model) == original
        outputs.append((model.state_dict(), model(inputs()[1])))
    (codes, output), (other_codes, other_output) = outputs
    assert codes.keys() == other_codes.keys()
    assert all(torch.equal(codes[name], other_codes[name]) for name in codes)
    assert torch.equal(output, other_output)


def test_a_failing_call_leaves_no_hook():
    calls = []

    def forward(model, batch):
        calls.append(batch)
        if len(calls) == 4:
            model(batch)
            raise RuntimeError("the fourth one fails")
        return model(batch)

    model = WithAttribute().eval()
    original = _content(model)
    with pytest.raises(CompressionError, match="the fourth one fails"):
        pr.compress(model, calibration=inputs(), forward_fn=forward, **_OPTIONS)
    assert _content(model) == original
    assert not model.is_ready


class MakesLayer(Scaled):
    def __init__(self):
        super().__init__()
        self.layer = None

    def install(self):
        if self.layer is None:
            self.layer = nn.Linear(WIDTH, WIDTH)


class MakesLayerInPlaceOfIdentity(Scaled):
    def __init__(self):
        super().__init__()
        self.layer = nn.Identity()

    def install(self):
        if isinstance(self.layer, nn.Identity):
            self.layer = nn.Linear(WIDTH, WIDTH)


class MakesParameter(Scaled):
    def install(self):
        if not hasattr(self, "layer"):
            self.layer = nn.Parameter(torch.randn(()))


class NamesLayer(Scaled):
    """The forward gives a layer that exists a second name."""

    def install(self):
        self.current = self.network[0]


@pytest.mark.parametrize("kind", [MakesLayer, MakesLayerInPlaceOfIdentity, MakesParameter])
def test_a_forward_that_makes_layers_is_refused_until_the_model_ran(kind):
    model = kind().eval()
    original = _content(model)
    with pytest.raises(CompressionError, match=r"a forward of the model makes 'layer', .*: run the model on a batch"):
        pr.compress(model, calibration=inputs(), **_OPTIONS)
    assert _content(model) == original
    model(inputs()[0])
    pr.compress(model, calibration=inputs(), **_OPTIONS)


def test_a_forward_that_names_a_layer_is_not_refused():
    model = NamesLayer().eval()
    pr.compress(model, calibration=inputs(), **_OPTIONS)
    assert not hasattr(model, "current")
