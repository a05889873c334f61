"""What stands between two layers of a block, read off its forward, and blocks that are copied for it."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import on_ranks, take_steps, weights_of
from torch import nn

from panther.distributed import make_mesh, tensor_parallel
from panther.distributed.tensor._elementwise import why_not_a_pair

pytestmark = pytest.mark.distributed


class Block(nn.Module):
    """Two layers with the names of a pair, and a forward that is given."""

    def __init__(self, function):
        super().__init__()
        self.fc1, self.fc2, self.function = nn.Linear(12, 12), nn.Linear(12, 12), function
        self.scale, self.norm = nn.Parameter(torch.ones(12)), nn.BatchNorm1d(12, affine=False)
        self.act, self.soft, self.conv = nn.GELU(), nn.Softmax(-1), nn.Conv2d(1, 3, 3)
        self.kept, self.calls = [], 0

    def forward(self, x, normalise=False):
        self.calls += 1
        return self.function(self, x, normalise)


def keeps(block, x, normalise):
    block.kept.append(block.fc1(x))
    return block.fc2(block.kept[-1])


def normalises(block, x, normalise):
    h = block.fc1(x)
    return block.fc2(h / h.sum(-1, keepdim=True) if normalise else h)


def normalises_in_evaluation(block, x, normalise):
    h = block.fc1(x)
    return block.fc2(h if block.training else F.normalize(h))


def uses_twice(block, x, normalise):
    h = F.relu(block.fc1(x))
    return block.fc2(h) * (1 + h.mean(-1, keepdim=True))


def branches(block, x, normalise):
    h = block.fc1(x)
    return block.fc2(h) if (h > 0).all() else x


def branches_on_what_is_whole(block, x, normalise):
    if x.dim() == 1:
        x = x[None]
    if x.dtype is torch.float16:
        raise ValueError("half precision is not for this block")
    return block.fc2(F.dropout(block.act(block.fc1(x)), 0.0, block.training))


def images(block, x, normalise):
    x = F.max_pool2d(F.relu(block.conv(x)), 2).flatten(1)
    return F.log_softmax(block.fc2(F.relu(block.fc1(x)).mul_(2)), -1)


NO_FUNCTION = "its block has {!r} between, which is no function of single entries"
REFUSED = {
    "softmax": (lambda b, x, _: b.fc2(torch.softmax(b.fc1(x), -1)), NO_FUNCTION.format("softmax")),
    "module": (lambda b, x, _: b.fc2(b.soft(b.fc1(x))), NO_FUNCTION.format("Softmax")),
    "layer_norm": (lambda b, x, _: b.fc2(F.layer_norm(b.fc1(x), (12,))), NO_FUNCTION.format("layer_norm")),
    "batch norm": (lambda b, x, _: b.fc2(b.norm(b.fc1(x))), NO_FUNCTION.format("BatchNorm1d")),
    "used twice": (uses_twice, NO_FUNCTION.format("mean")),
    "option": (normalises, NO_FUNCTION.format("sum")),
    "evaluation": (normalises_in_evaluation, NO_FUNCTION.format("normalize")),
    "scale": (
        lambda b, x, _: b.fc2(b.scale * b.fc1(x)),
        "its block puts together, in 'mul', what is whole and what would be cut",
    ),
    "gates": (
        lambda b, x, _: torch.tanh(b.fc1(x)) * torch.sigmoid(b.fc2(x)),
        "its block gives its partner other things than functions of its single entries",
    ),
    "weight": (lambda b, x, _: b.fc2(F.linear(x, b.fc1.weight)), "its block reads 'fc1.weight'"),
    "kept": (keeps, "its block keeps what is between"),
    "branch": (branches, NO_FUNCTION.format("all")),
    "given": (lambda b, x, _: (b.fc2(b.fc1(x)), b.fc1(x)), "its block gives what is between to others"),
    "unused": (lambda b, x, _: x, "is not called by its block's forward, or its partner is not"),
    "sizes": (
        lambda b, x, _: sum(b.fc2(b.fc1(row)) for row in range(len(x))),
        "its block's forward cannot be traced (RuntimeError)",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_blocks_that_are_no_pair(case):
    function, reason = REFUSED[case]
    block = Block(function)
    assert why_not_a_pair(block, [block.fc1], block.fc2) == reason
    assert (block.calls, block.kept, block.training) == (0, [], True)


@pytest.mark.parametrize("function", [branches_on_what_is_whole, images])
def test_blocks_that_are_a_pair(function):
    block, state = Block(function), torch.random.get_rng_state()
    assert why_not_a_pair(block, [block.fc1], block.fc2) is None
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("activation", ["relu", nn.GELU(), nn.Softmax(-1), lambda x: x / x.norm()])
@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_the_activation_of_torchs_layers_counts(kind, activation):
    layer = kind(12, 2, 20, activation=activation)
    paired = activation == "relu" or type(activation) is nn.GELU
    assert (why_not_a_pair(layer, [layer.linear1], layer.linear2) is None) == paired


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
    assert why_not_a_pair(block, *layers) is None


def test_ten_steps_are_those_of_one_process():
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(0)).double()
    functions = [REFUSED[case][0] for case in ("softmax", "module", "used twice", "gates", "weight", "batch norm")]

    def build(seed):
        torch.manual_seed(seed)
        return nn.Sequential(*map(Block, [*functions, branches_on_what_is_whole])).double()

    def train(model):
        take_steps(torch.optim.SGD(model.parameters(), 0.5), lambda: model(x).square().mean())
        return weights_of(model)

    def rank():
        model = build(dist.get_rank())
        placed = tensor_parallel(model, make_mesh(tp=2)["tp"]).placed
        return (
            train(model),
            {entry.name: entry.action for entry in placed},
            {entry.name: entry.reason for entry in placed},
        )

    weights = train(build(0))
    for theirs, report, reasons in on_ranks(rank):
        for name, weight in weights.items():
            torch.testing.assert_close(theirs[name], weight, rtol=1e-8, atol=1e-10)
        cut = {name for name, action in report.items() if action.endswith("cut")}
        assert cut == {"6.fc1", "6.fc2"}
        assert reasons["4.fc1"] == "its block reads 'fc1.weight'; its parameters stay plain tensors"
