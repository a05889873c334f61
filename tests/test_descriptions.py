"""Descriptions of functions, which guard searches and compressions that continue, differ where functions differ."""

import enum
import functools
import operator
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import waits
from torch import nn

from panther._descriptions import describe_function


class Reduction(enum.Enum):
    """How losses are combined."""

    MEAN = 1
    SUM = 2


class Loss:
    """A callable with public, private and slotted settings."""

    def __init__(self, **settings):
        vars(self).update(settings)

    def __call__(self, output, batch):
        return output.mean()

    def method(self, output, batch):
        return output.mean()


class Slotted:
    """A callable that has its setting in a slot."""

    __slots__ = ("setting",)

    def __init__(self, setting):
        self.setting = setting

    def __call__(self, output):
        return output


def of_code(number):
    return (lambda x: x + 1, lambda x: x * 1, lambda x: x + 1)[number]  # all of one line


def of_a_nested_constant(number):
    return (lambda x: [y + 1 for y in x], lambda x: [y + 2 for y in x])[number]


def of_a_tuple_constant(number):
    return (lambda x: x.sum((0, 1)), lambda x: x.sum((0, 2)))[number]


def of_a_set_constant(number):
    return (lambda x: x in {"a", "b", "c"}, lambda x: x in {"a", "b", "d"})[number]


def of_a_closure(number):
    return lambda x: x * number


def of_a_nested_closure(number):
    inner = of_a_closure(number)
    return lambda x: inner(x)


def of_a_closure_with_a_tensor(number):
    weights = torch.zeros(200_000)
    weights[100_000] = number  # between the ends
    return lambda x: x * weights


def of_a_closure_with_an_array(number):
    weights = np.full(3, number)
    return lambda x: x * weights


def of_a_default(number):
    def loss(x, factor=number):
        return x * factor

    return loss


def of_a_keyword_default(number):
    def loss(x, *, factor=number):
        return x * factor

    return loss


def of_an_attribute(number):
    def loss(x):
        return x * loss.factor

    loss.factor = number
    return loss


def of_a_wrapped_function(number):
    return functools.lru_cache(of_a_closure(number))


def of_a_global_variable(number):
    code = compile(
        f"FACTOR = {number}\ndef helper(x): return x * FACTOR\ndef loss(x): return helper(x)", "loss.py", "exec"
    )
    names = {"__name__": "losses"}
    exec(code, names)
    return names["loss"]


def of_a_helper(number):
    names = {"__name__": "losses"}
    exec(f"def helper(x): return x * 2 ** {number}\ndef loss(x): return helper(x)", names)
    return names["loss"]


def of_a_class(number):
    names = {"__name__": "losses"}
    exec(f"class Loss:\n    def __call__(self, x): return x * {number}", names)
    return names["Loss"]()


def of_a_module_of_modules(number):
    return nn.Sequential(nn.Linear(2, 2), nn.LeakyReLU(number)).requires_grad_(False).apply(zero)


def of_a_captured_module(number):
    loss = nn.CrossEntropyLoss(label_smoothing=number / 10)
    return lambda output, batch: loss(output, batch)


@torch.no_grad()
def zero(module):
    for parameter in module.parameters(False):
        parameter.zero_()


def of_parameters(number):
    linear = zero_linear()
    with torch.no_grad():
        linear.weight[0, 0] = number
    return lambda output, batch: linear(output).mean()


def zero_linear():
    linear = nn.Linear(2, 2)
    zero(linear)
    return linear


MAKERS = [
    of_code, of_a_nested_constant, of_a_tuple_constant, of_a_set_constant, of_a_closure, of_a_nested_closure,
    of_a_closure_with_a_tensor, of_a_closure_with_an_array, of_a_default, of_a_keyword_default, of_an_attribute,
    of_a_wrapped_function, of_a_global_variable, of_a_helper, of_a_class, of_a_module_of_modules, of_a_captured_module,
    of_parameters,
]  # fmt: skip
VALUES = {
    "positional of a partial": lambda number: functools.partial(operator.add, number),
    "keyword of a partial": lambda number: functools.partial(torch.sum, dim=number),
    "partial of a partial": lambda number: functools.partial(functools.partial(max, number), 3),
    "public setting": lambda number: Loss(scale=number),
    "private setting": lambda number: Loss(_scale=number),
    "list in a setting": lambda number: Loss(scales=[1, [number]]),
    "enumeration": lambda number: Loss(reduction=[*Reduction][number]),
    "path": lambda number: Loss(path=Path(f"weights-{number}")),
    "range": lambda number: Loss(rows=range(number)),
    "device": lambda number: Loss(places=torch.device(("cpu", "meta")[number])),
    "slot": Slotted,
    "method of an instance": lambda number: Loss(scale=number).method,
    "method of a list": lambda number: [number].count,
    "built-in function": lambda number: (torch.exp, np.exp)[number],
    "item": lambda number: operator.itemgetter(number),
    "attribute": lambda number: operator.attrgetter(("logits", "loss")[number]),
    "loss of torch": lambda number: nn.CrossEntropyLoss(label_smoothing=number / 10),
    "reduction of torch": lambda number: nn.MSELoss(reduction=("mean", "sum")[number]),
    "weights of a loss": lambda number: nn.CrossEntropyLoss(weight=torch.full((3,), float(number))),
    "dictionary": lambda number: Loss(weights={"a": number}),
    "set": lambda number: Loss(names={"a", "b", f"c{number}"}),
} | {make.__name__: make for make in MAKERS}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_functions_that_differ_are_described_differently(name):
    first, again, second = (describe_function(VALUES[name](number)) for number in (0, 0, 1))
    assert first == again
    assert first != second
    assert "0x" not in first


def test_equal_functions_have_equal_descriptions():
    assert describe_function(of_code(0)) == describe_function(of_code(2))
    assert describe_function(None) == "none"
    first, second = Loss(weights={"a": 1, "b": 2}), Loss(weights={"b": 2, "a": 1})
    assert describe_function(first) == describe_function(second)
    first.itself, first.lock, first.code = first, __import__("threading").Lock(), sys
    assert "0x" not in describe_function(first)

    def recursive(x):
        return recursive(x)

    assert describe_function(recursive) == describe_function(recursive)


def test_descriptions_are_equal_in_every_process():
    def described(seed):
        code = "import test_descriptions as t; print([t.describe_function(make(1)) for make in t.VALUES.values()])"
        environment = os.environ | {
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        }
        return waits.run([sys.executable, "-c", code], env=environment, check=True).stdout

    assert described("1") == described("2")
