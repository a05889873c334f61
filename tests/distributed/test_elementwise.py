"""Which blocks do nothing but elementwise functions between two layers, and blocks that are replicated if they do."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import on_ranks, take_steps, weights_of
from torch import nn

from panther.distributed import make_mesh, tensor_parallel
from panther.distributed.tensor._elementwise import reason_against_pair

pytestmark = pytest.mark.distributed


class Block(nn.Module):
    """Two layers with the names of a pair, and a forward that is given."""

    def __init__(self, function):
        super().__init__()
        self.fc1, self.fc2, self.function = nn.Linear(12, 12), nn.Linear(12, 12), function
        self.scale, self.norm = nn.Parameter(torch.ones(12)), nn.BatchNorm1d(12, affine=False)
        self.act, self.soft, self.conv = nn.GELU(), nn.Softmax(-1), nn.Conv2d(1, 3, 3)
        self.kept, self.calls = [], 0

    def forward(self, x):
        self.calls += 1
        return self.function(self, x)


class Optional(Block):
    """Its option is used nowhere here, but it may change what is between the layers."""

    def forward(self, x, normalise=False):
        h = self.fc1(x)
        return self.fc2(h / h.sum(-1, keepdim=True) if normalise else h)


def keeps(block, x):
    block.kept.append(block.fc1(x))
    return block.fc2(block.kept[-1])


def normalises_in_evaluation(block, x):
    h = block.fc1(x)
    return block.fc2(h if block.training else F.normalize(h))


def uses_twice(block, x):
    h = F.relu(block.fc1(x))
    return block.fc2(h) * (1 + h.mean(-1, keepdim=True))


def branches(block, x):
    h = block.fc1(x)
    return block.fc2(h) if (h > 0).all() else x


def branches_on_its_input(block, x):
    return block.fc2(block.fc1(x[None] if x.dim() == 1 else x))


def drops(block, x):
    if x.dtype is torch.float16:
        raise ValueError("half precision is not for this block")
    return block.fc2(F.dropout(block.act(block.fc1(x)), 0.0, block.training))


def images(block, x):
    x = F.max_pool2d(F.relu(block.conv(x)), 2).flatten(1)
    return F.log_softmax(block.fc2(F.relu(block.fc1(x)).mul_(2)), -1)


NOT_ELEMENTWISE = "its block applies {!r} between the layers of the pair, which is not elementwise"
REFUSED = {
    "softmax": (lambda b, x: b.fc2(torch.softmax(b.fc1(x), -1)), NOT_ELEMENTWISE.format("softmax")),
    "module": (lambda b, x: b.fc2(b.soft(b.fc1(x))), NOT_ELEMENTWISE.format("Softmax")),
    "layer_norm": (lambda b, x: b.fc2(F.layer_norm(b.fc1(x), (12,))), NOT_ELEMENTWISE.format("layer_norm")),
    "batch norm": (lambda b, x: b.fc2(b.norm(b.fc1(x))), NOT_ELEMENTWISE.format("BatchNorm1d")),
    "used twice": (uses_twice, NOT_ELEMENTWISE.format("mean")),
    "evaluation": (normalises_in_evaluation, NOT_ELEMENTWISE.format("normalize")),
    "scale": (
        lambda b, x: b.fc2(b.scale * b.fc1(x)),
        "its block combines a replicated tensor with a sharded one in 'mul'",
    ),
    "gates": (
        lambda b, x: torch.tanh(b.fc1(x)) * torch.sigmoid(b.fc2(x)),
        "the second layer of the pair also gets tensors that do not come from the first",
    ),
    "weight": (lambda b, x: b.fc2(F.linear(x, b.fc1.weight)), "its block reads 'fc1.weight'"),
    "kept": (keeps, "its block keeps an intermediate activation of the pair in an attribute"),
    "branch": (branches, "its block's forward branches on a tensor"),
    "input": (branches_on_its_input, "its block's forward branches on a tensor"),
    "given": (
        lambda b, x: (b.fc2(b.fc1(x)), b.fc1(x)),
        "an intermediate activation of the pair is also returned by its block",
    ),
    "unused": (lambda b, x: x, "its block's forward does not call both layers of the pair"),
    "sizes": (
        lambda b, x: sum(b.fc2(b.fc1(row)) for row in range(len(x))),
        "its block's forward cannot be traced (RuntimeError)",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_blocks_that_are_no_pair(case):
    function, reason = REFUSED[case]
    block = Block(function)
    assert reason_against_pair(block, [block.fc1], block.fc2) == reason
    assert (block.calls, block.kept, block.training) == (0, [], True)


def test_a_block_with_options_is_no_pair():
    block = Optional(None)
    reason = "its block's forward has optional arguments, which may change what is between the layers"
    assert reason_against_pair(block, [block.fc1], block.fc2) == reason


@pytest.mark.parametrize("function", [drops, images])
def test_blocks_that_are_a_pair(function):
    block, state = Block(function), torch.random.get_rng_state()
    assert reason_against_pair(block, [block.fc1], block.fc2) is None
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("activation", ["relu", nn.GELU(), nn.Softmax(-1), lambda x: x / x.norm()])
@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_the_activation_of_torchs_layers_counts(kind, activation):
    layer = kind(12, 2, 20, activation=activation)
    paired = activation == "relu" or type(activation) is nn.GELU
    assert (reason_against_pair(layer, [layer.linear1], layer.linear2) is None) == paired


@pytest.mark.parametrize("kind", ["t5", "gated t5", "opt", "bart", "distilbert", "gpt-neox", "clip"])
@pytest.mark.extra
def test_feed_forward_blocks_of_transformers_are_pairs(kind):
    transformers = pytest.importorskip("transformers")
    t5 = {"d_model": 12, "d_ff": 20, "num_layers": 1, "num_heads": 2, "d_kv": 6, "vocab_size": 9}
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    if kind in ("t5", "gated t5"):
        form = "relu" if kind == "t5" else "gated-gelu"
        block = transformers.T5EncoderModel(transformers.T5Config(**t5, feed_forward_proj=form))
        block = block.encoder.block[0].layer[1].DenseReluDense
        layers = ([block.wi], block.wo) if kind == "t5" else ([block.wi_0, block.wi_1], block.wo)
    elif kind == "opt":
        config = transformers.OPTConfig(**sizes, ffn_dim=20, word_embed_proj_dim=12)
        block = transformers.OPTModel(config).decoder.layers[0]
        layers = [block.fc1], block.fc2
    elif kind == "bart":
        counts = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
        config = transformers.BartConfig(**counts, vocab_size=9, d_model=12, encoder_ffn_dim=20, decoder_ffn_dim=20)
        block = transformers.BartModel(config).decoder.layers[0]
        layers = [block.fc1], block.fc2
    elif kind == "distilbert":
        config = transformers.DistilBertConfig(vocab_size=9, dim=12, hidden_dim=20, n_layers=1, n_heads=2)
        block = transformers.DistilBertModel(config).transformer.layer[0].ffn
        layers = [block.lin1], block.lin2
    elif kind == "gpt-neox":
        block = transformers.GPTNeoXModel(transformers.GPTNeoXConfig(**sizes, intermediate_size=20)).layers[0].mlp
        layers = [block.dense_h_to_4h], block.dense_4h_to_h
    else:
        config = transformers.CLIPVisionConfig(**sizes, intermediate_size=20, image_size=8, patch_size=4)
        block = transformers.CLIPVisionModel(config).encoder.layers[0].mlp
        layers = [block.fc1], block.fc2
    assert reason_against_pair(block, *layers) is None


def test_ten_steps_are_those_of_one_process():
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(0)).double()
    functions = [REFUSED[case][0] for case in ("softmax", "module", "used twice", "gates", "weight", "batch norm")]

    def build(seed):
        torch.manual_seed(seed)
        return nn.Sequential(*map(Block, [*functions, drops])).double()

    def train(model):
        take_steps(torch.optim.SGD(model.parameters(), 0.5), lambda: model(x).square().mean())
        return weights_of(model)

    def rank():
        model = build(dist.get_rank())
        placed = tensor_parallel(model, make_mesh(tp=2)["tp"]).placements
        return (
            train(model),
            {entry.name: entry.action for entry in placed},
            {entry.name: entry.reason for entry in placed},
        )

    weights = train(build(0))
    for theirs, report, reasons in on_ranks(rank):
        for name, weight in weights.items():
            torch.testing.assert_close(theirs[name], weight, rtol=1e-8, atol=1e-10)
        assert {name for name, action in report.items() if action.endswith("sharded")} == {"6.fc1", "6.fc2"}
        assert reasons["4.fc1"] == "its block reads 'fc1.weight'; its parameters stay plain tensors"
