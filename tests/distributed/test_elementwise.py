"""Which modules and blocks are known to be elementwise, so that a pair of layers around them can be sharded."""

import pytest
import torch
from fake import fake_group
from torch import nn

from panther.distributed import make_mesh, tensor_parallel
from panther.distributed.tensor._transformers import is_elementwise, reason_against_pair

pytestmark = pytest.mark.distributed
UNKNOWN = "{} is not known to be elementwise between its layers: use an nn.Sequential or a _tp_plan"


class Scaled(nn.ReLU):
    def forward(self, input):
        return super().forward(input) / input.norm()


@pytest.mark.parametrize("module", [nn.ReLU(), nn.GELU(), nn.Sequential(nn.Dropout(), nn.SiLU())], ids=repr)
def test_elementwise_modules(module):
    assert is_elementwise(module)


@pytest.mark.parametrize(
    "module",
    [nn.Softmax(-1), nn.LayerNorm(4), nn.PReLU(), Scaled(), nn.Sequential(nn.ReLU(), nn.Softmax(-1))],
    ids=repr,
)
def test_different_modules(module):
    """Those with parameters would get a part of their gradient; a subclass may do anything."""
    assert not is_elementwise(module)


@pytest.mark.parametrize(
    "activation", ["relu", nn.GELU(), nn.Softmax(-1), nn.PReLU(), lambda x: x / x.norm()], ids=repr
)
@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_the_activation_of_torchs_layers_counts(kind, activation):
    paired = activation == "relu" or type(activation) is nn.GELU
    assert (reason_against_pair(kind(12, 2, 20, activation=activation)) is None) == paired


class Normalised(nn.TransformerEncoderLayer):
    def _ff_block(self, x):
        return super()._ff_block(x / x.norm())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x):
        return self.fc2(torch.softmax(self.fc1(x), -1))


def test_blocks_of_unknown_classes_are_replicated():
    replaced = nn.TransformerEncoderLayer(12, 2, 20)
    replaced.forward = lambda x: x
    model = nn.ModuleDict({"sub": Normalised(12, 2, 20), "replaced": replaced, "own": Block()})
    with fake_group(2):
        report = tensor_parallel(model, make_mesh(tp=2)["tp"])
    found = {entry.name: (entry.action, entry.reason) for entry in report.placements}
    assert found["sub.linear1"] == ("replicated", UNKNOWN.format("Normalised"))
    assert found["replaced.linear2"] == ("replicated", UNKNOWN.format("TransformerEncoderLayer"))
    assert found["own.fc1"] == found["own.fc2"] == ("replicated", UNKNOWN.format("Block"))


@pytest.mark.extra
@pytest.mark.parametrize("activation", ["prelu", lambda x: x / x.norm()], ids=["parameters", "function"])
def test_the_activation_of_transformers_blocks_counts(activation):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=9, **sizes)
    block = transformers.BertModel(config).encoder.layer[0]
    assert reason_against_pair(block) is None
    if activation == "prelu":
        block.intermediate.intermediate_act_fn = nn.PReLU()
    else:
        del block.intermediate.intermediate_act_fn
        block.intermediate.intermediate_act_fn = activation
    assert "intermediate_act_fn" in reason_against_pair(block)
