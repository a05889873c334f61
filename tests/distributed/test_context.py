"""Context parallelism: sequences sharded over ranks against one process, forward and backward, and what is sent."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from ranks import gradients_of, on_ranks
from torch import nn

import panther as pr
from panther.distributed import CommunicationCounter, context_parallel, init, make_mesh, shutdown

WIDTH, HEADS, KERNELS = 16, 2, ["hermite", "softmax", "oprf", "relu", "taylor"]


class Model(nn.Module):
    """Blocks of attention and a feed-forward part, with positions that the caller passes."""

    def __init__(self, kind, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.positions, self.blocks = nn.Embedding(128, WIDTH), nn.ModuleList()
        for seed in range(2):
            if kind == "window":
                attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            else:
                attention = pr.nn.RandMultiHeadAttention(WIDTH, HEADS, 12, kernel_fn=kind, seed=seed, **settings)
            feed = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
            self.blocks.append(nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "attention": attention, "feed": feed}))
        if kind == "window":
            pr.linearize_(self, num_features=5, **settings)
            for name, parameter in self.named_parameters():
                if "linear_attention" in name:
                    nn.init.normal_(parameter, std=0.5)
        self.double()

    def forward(self, x, positions, padding=None):
        x = x + self.positions(positions)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) == -torch.inf
        for block in self.blocks:
            y = block["norm"](x)
            options = {"need_weights": False, "attn_mask": mask, "is_causal": True}
            x = x + block["attention"](y, y, y, padding, **options)[0]
            x = x + block["feed"](x)
        return x


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(output, target):
    return (output.sin() * target).sum()


def single(model, x, target, padding=None):
    x = x.clone().requires_grad_()
    output = model(x, torch.arange(x.shape[1]), padding)
    loss_of(output, target).backward()
    return output.detach(), x.grad, gradients_of(model)


def sharded(model, x, target, padding=None):
    """Output and gradient of this rank's shard, the summed gradients of the weights, and the traffic."""
    report = context_parallel(model)
    n, rank = dist.get_world_size(), dist.get_rank()
    shard = x.chunk(n, 1)[rank].clone().requires_grad_()
    positions = torch.arange(x.shape[1]).chunk(n)[rank]
    mask = None if padding is None else padding.chunk(n, 1)[rank]
    with CommunicationCounter() as forward:
        output = model(shard, positions, mask)
    with CommunicationCounter() as backward:
        loss_of(output, target.chunk(n, 1)[rank]).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    traffic = [(dict(count.bytes_by_operation), count.calls) for count in (forward, backward)]
    return output.detach(), shard.grad, gradients_of(model), traffic, len(report.layers)


def close(ours, theirs, name=""):
    assert (ours - theirs).norm() <= 1e-12 * (theirs.norm() + 1e-2 * theirs.numel() ** 0.5), name


def compare(results, expected):
    outputs, gradients = (torch.cat([result[i] for result in results], 1) for i in (0, 1))
    close(outputs, expected[0])
    close(gradients, expected[1])
    for _, _, weights, *_ in results:
        for name, gradient in weights.items():
            close(gradient, expected[2][name], name)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("kind", KERNELS)
def test_features_equal_one_process(kind, n):
    x, target = draw(2, 24, WIDTH), draw(2, 24, WIDTH, seed=1)

    def rank():
        return sharded(Model(kind), x, target)

    compare(on_ranks(rank, n), single(Model(kind), x, target))


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("window", "length"), [(3, 24), (5, 40), (4, 28), (3, 20), (16, 32)])
def test_windows_equal_one_process(window, length, n):
    """Shards end at a block or within one."""
    x, target = draw(2, length, WIDTH), draw(2, length, WIDTH, seed=1)
    if length // n < window:
        pytest.skip("a shard is shorter than the window")

    def rank():
        return sharded(Model("window", window=window), x, target)

    compare(on_ranks(rank, n), single(Model("window", window=window), x, target))


@pytest.mark.parametrize("kind", ["hermite", "softmax"])
@pytest.mark.parametrize("layout", ["padded", "relative"])
def test_masks_and_relative_positions_cross_shards(kind, layout):
    """Masked keys do not count on any rank, and positions continue from shard to shard."""
    x, target, padding = draw(2, 24, WIDTH), draw(2, 24, WIDTH, seed=1), None
    if layout == "padded":
        padding = torch.arange(24) < torch.tensor([[0], [9]])
        target[1, :9] = 0

    def build():
        if layout == "padded":
            return Model(kind)
        encode = pr.nn.sinSRPE(HEADS, WIDTH // HEADS, sines=2, num_realizations=8, seed=0)
        return Model(kind, SRPE=encode)

    def rank():
        return sharded(build(), x, target, padding)

    results, expected = on_ranks(rank, 2), single(build(), x, target, padding)
    if padding is not None:
        for result, start in zip(results, (0, 12), strict=True):
            result[0].masked_fill_(padding[:, start : start + 12, None], 0)
        expected[0].masked_fill_(padding[..., None], 0)
    compare(results, expected)


@pytest.mark.parametrize("kind", ["hermite", "softmax", "window"])
def test_only_states_and_windows_are_sent(kind):
    """Twice the length sends not one byte more."""
    settings = {"window": 4} if kind == "window" else {}
    N, E, layers, n = 2, WIDTH // HEADS, 2, 4

    def rank(length):
        x = draw(N, length, WIDTH)
        return sharded(Model(kind, **settings), x, x)[3]

    results = on_ranks(rank, n, 32)
    assert results == on_ranks(rank, n, 64)
    features = {"hermite": 1 + E + 2 * 3 // 2, "softmax": 12, "window": 5}[kind]
    state = N * HEADS * (features * (E + 1) + (kind == "hermite"))
    units = N * (HEADS + (kind == "hermite"))
    for rank, ((forward, calls), (backward, backward_calls)) in enumerate(results):
        window = N * HEADS * 4 * 2 * E if kind == "window" else 0
        sent, returned = (window if rank < n - 1 else 0), (window if rank else 0)
        assert forward.pop("all_gather_into_tensor") == 8 * layers * (state + units + 4)  # and the shape
        assert backward.pop("all_gather_into_tensor") == 8 * layers * state
        assert sum(forward.values()) == 8 * layers * sent
        assert sum(backward.values()) == 8 * layers * returned
        assert (calls, backward_calls) == ((4 * layers, 2 * layers) if kind == "window" else (3 * layers, layers))


def test_mean_losses_are_averaged_by_data_parallelism():
    x, target = draw(2, 24, WIDTH), draw(2, 24, WIDTH, seed=1)

    def rank():
        model, part = Model("window", window=3), dist.get_rank()
        context_parallel(model)
        wrapped = pr.distributed.data_parallel(model)
        output = wrapped(x.chunk(2, 1)[part], torch.arange(24).chunk(2)[part])
        (output * target.chunk(2, 1)[part]).mean().backward()
        return gradients_of(model)

    model = Model("window", window=3)
    (model(x, torch.arange(24)) * target).mean().backward()
    for gradients in on_ranks(rank, 2):
        for name, gradient in gradients_of(model).items():
            close(gradients[name], gradient, name)


@pytest.mark.extra
def test_a_language_model():
    transformers = pytest.importorskip("transformers")

    def build():
        torch.manual_seed(0)
        sizes = {"vocab_size": 31, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
        pr.linearize_(model, num_features=5, window=4)
        return model.double()

    tokens = torch.randint(1, 31, (2, 48), generator=torch.Generator().manual_seed(0))

    def rank():
        model, part = build(), dist.get_rank()
        context_parallel(model, make_mesh(dp=1, tp=1, replicate=4)["replicate"])
        places = torch.arange(48).chunk(4)[part][None]
        output = model(tokens.chunk(4, 1)[part], position_ids=places).logits.detach()
        cache = model(tokens.chunk(4, 1)[part], position_ids=places).past_key_values
        with pytest.raises(ValueError, match="is sharded along the sequence and attends from 1 to 13 positions"):
            model(tokens[:, :1], past_key_values=cache)
        return output

    with torch.no_grad():
        expected = build()(tokens).logits
    close(torch.cat(on_ranks(rank, 4), 1), expected)


def test_what_cannot_be_sharded_is_refused():
    x = draw(1, 12, WIDTH)

    def rank():
        messages = []

        def refused(call, error=ValueError):
            with pytest.raises(error) as caught:
                call()
            messages.append(str(caught.value))

        refused(lambda: context_parallel(nn.TransformerEncoderLayer(WIDTH, 2, 8)))
        refused(lambda: context_parallel(nn.Linear(2, 2)))
        refused(lambda: context_parallel(3), TypeError)
        model = Model("window", window=7)
        context_parallel(model)
        attention = model.blocks[0]["attention"]
        refused(lambda: attention(x, x, x))
        causal = nn.Transformer.generate_square_subsequent_mask(12) == -torch.inf
        refused(lambda: attention(x, x, x, torch.arange(12)[None] < 3, attn_mask=causal))
        short = causal[:5, :5]
        refused(lambda: attention(x[:, :5], x[:, :5], x[:, :5], attn_mask=short))
        model = Model("hermite")
        context_parallel(model)
        attention = model.blocks[0]["attention"]
        refused(lambda: attention(x, x, x, is_causal=False))
        for length in (6, 7):
            whole = x[:, :length]
            attention(whole, whole, whole, is_causal=True)
        part = x[:, : 6 + dist.get_rank() % 2]  # Every rank has had both lengths before.
        refused(lambda: attention(part, part, part, is_causal=True))
        assert copy.deepcopy(model).blocks[0]["attention"].shards is attention.shards
        refused(lambda: pickle.dumps(model), TypeError)
        return messages

    for messages in on_ranks(rank, 4):
        for message, reason in zip(
            messages,
            (
                "'self_attn' is softmax attention",
                "has no linear attention",
                "takes a model",
                "is_causal=False: only causal attention among the positions of the shards",
                "masks keys, which would shift the blocks",
                "shards of 5 positions are too short: with window=7",
                "is causal and has as many keys as queries",
                "(batch, heads, positions, width) on all ranks, and have (1, 2, 6, 8), (1, 2, 7, 8)",
                "cannot be pickled: save its state_dict",
            ),
            strict=True,
        ):
            assert reason in message


def test_one_rank_is_an_ordinary_model():
    x, target = draw(2, 24, WIDTH), draw(2, 24, WIDTH, seed=1)
    init()
    try:
        results = [sharded(Model("window", window=5), x, target)]
    finally:
        shutdown()
    compare(results, single(Model("window", window=5), x, target))
