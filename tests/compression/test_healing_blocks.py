"""Which positions and which hidden states healing compares."""

from collections import OrderedDict

import pytest
import torch
from healing_models import WIDTH, Block, compressed, data, healed, runner_of, same, state
from torch import nn
from torch.utils.checkpoint import checkpoint

from panther.compression import HealConfig
from panther.compression.calibration.survey import blocks_of
from panther.compression.healing import heal, lost_variance
from panther.nn import LowRankLinear


def test_masked_positions_do_not_matter():
    generator = torch.Generator().manual_seed(3)
    masks = [torch.rand(8, 6, generator=generator) < 0.6 for _ in range(12)]
    plain = [{"x": x, "mask": mask} for x, mask in zip(data(), masks, strict=True)]
    changed = [b | {"x": torch.where(b["mask"][..., None], b["x"], 5 * torch.randn_like(b["x"]))} for b in plain]
    states, results = [], []
    for batches in (plain, changed):
        for mask in (lambda batch: batch["mask"], None):
            model, new = compressed()
            results.append(
                healed(
                    model, new, batches=batches[:9], held_out=batches[9:], max_steps=4,
                    call=lambda model, batch: model(batch["x"]), mask=mask,
                )
            )  # fmt: skip
            states.append(state(model))
    assert same(states[0], states[2])
    assert results[0] == results[2]
    assert results[1] != results[3]


class Stack(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x["state"] if isinstance(x, dict) else x
        return x


class Wrapped(nn.Module):
    """A block that gives more than a tensor."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.mlp(x)
        return (x, None) if self.kind == "tuple" else OrderedDict(none=None, state=x)


def new_layers(model):
    return {m: LowRankLinear.from_linear(m, 6, seed=1) for m in model.modules() if isinstance(m, nn.Linear)}


def names_of_blocks(model):
    names = {module: name for name, module in model.named_modules()}
    return [names[parent.get_submodule(name)] for parent, name in blocks_of(model, set(new_layers(model)))]


def test_which_modules_are_blocks():
    assert names_of_blocks(Stack(Block(), Block())) == ["layers.0", "layers.1"]
    assert names_of_blocks(nn.Sequential(Block(), nn.ReLU(), nn.Linear(WIDTH, WIDTH))) == ["0", "2"]
    wrapped = nn.Sequential(Stack(Block(), Block()), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    assert names_of_blocks(wrapped) == ["0.layers.0", "0.layers.1", "1"]
    assert names_of_blocks(Stack(Wrapped("tuple"), Wrapped("dict"))) == ["layers.0", "layers.1"]
    assert names_of_blocks(Stack(Wrapped("tuple"))) == ["layers.0"]
    nested = Stack()
    nested.layers.append(nn.ModuleList([Block(), Block()]))
    assert names_of_blocks(nested) == ["layers.0.0", "layers.0.1"]
    assert names_of_blocks(Block()) == []


@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_the_first_tensor_of_what_a_block_gives_is_matched(kind):
    torch.manual_seed(0)
    model = Stack(Wrapped(kind), Wrapped(kind))
    new, x = new_layers(model), data()[9]
    losses = {}
    for match in ("output", "hidden"):
        config = HealConfig(max_steps=1, learning_rate=1e-30, match=match)
        losses[match] = heal(runner_of(model, held_out=[x]), new, config, seed=0)[0].loss_before
    # The last block's output is the model's: the hidden part is the mean of it and the first block's.
    up, down = list(new.values())[:2]
    wanted = model.layers[0](x)
    wanted = wanted[0] if kind == "tuple" else wanted["state"]
    first = lost_variance(x + down(nn.functional.gelu(up(x))), wanted, None).item()
    assert losses["hidden"] == pytest.approx(losses["output"] + (first + losses["output"]) / 2, rel=1e-5)


def test_transformer_encoder_of_torch():
    """Its fast path would give nested tensors, and skip the hooks."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True), 2)
    layers = [getattr(block, name) for block in model.layers for name in ("linear1", "linear2")]
    mask = torch.arange(6) < (torch.arange(8) % 5 + 2)[:, None]
    result = healed(
        model, {dense: LowRankLinear.from_linear(dense, 6) for dense in layers}, max_steps=20,
        call=lambda model, x: model(x, src_key_padding_mask=~mask), mask=lambda x: mask,
    )  # fmt: skip
    assert result.loss_after < 0.8 * result.loss_before
    assert torch.backends.mha.get_fastpath_enabled()


def test_layers_under_activation_checkpointing_run_again_as_the_compressed_ones():
    class Checkpointed(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    results = []
    for kind in (Block, Checkpointed):
        model, new = compressed()
        model[1].__class__ = kind
        results.append(healed(model, new, max_steps=4))
    assert results[0] == results[1]
