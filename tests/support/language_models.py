"""A small language model whose head can share the weight of its embedding, its tokens, and how it is compared."""

import copy

import torch
from torch import nn

import panther as pr
from panther._torch import buffers_of

# Rows of the embedding, the rows before which all tokens of the calibration lie, and entries of a row.
ROWS, SEEN, WIDTH = 150, 60, 32
QUIET = {"seed": 0, "measure_speed": False}


class Language(nn.Module):
    """Tokens and positions in, scores of tokens out; the head can share the embedding's weight."""

    def __init__(self, tied=True, rows=ROWS):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(rows, WIDTH, padding_idx=0), nn.Embedding(10, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.head = nn.Linear(WIDTH, rows)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        x = x + self.down(torch.tanh(self.up(x)))
        return self.head(nn.functional.layer_norm(x, x.shape[-1:]))


def tokens(low=1, high=SEEN, batches=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(low, high, (8, 10), generator=generator) for _ in range(batches)]
    return [batch.index_fill(1, torch.tensor([9]), 0) for batch in drawn]  # the last position is padding


@torch.no_grad()
def relative_error(model, original, batches):
    pairs = [(model(batch), original(batch)) for batch in batches]
    return (sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)).sqrt().item()


def compressed(model, batches=None, **options):
    original = copy.deepcopy(model)
    report = pr.compress(model, calibration=tokens() if batches is None else batches, **QUIET | options)
    return model, original, report


def assert_shared(*modules):
    first = buffers_of(modules[0])
    assert all(buffers_of(module).get(name) is tensor for module in modules for name, tensor in first.items())
