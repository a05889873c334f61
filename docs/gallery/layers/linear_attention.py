"""
Linear attention: error, time, and where softmax wins
=====================================================

The cost of softmax attention grows with the square of the length, that of
:class:`~panther.nn.RandMultiHeadAttention` with the length. This example trains a small language model with a torch
layer, converts the layer by :func:`~panther.nn.make_performer`, measures when the result is close to the softmax, and
compares times. The softmax wins for short sequences and for sharp attention.
"""

import copy
import math
import os
import time
from functools import partial
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
from torch import nn

import panther as pr

# Smaller sizes, with which the documentation is checked.
QUICK = "PANTHER_DOCS_QUICK" in os.environ

# %%
# A trained layer
# ---------------
#
# The model reads characters of Python's language reference, which Python brings, and predicts the next one from 128
# characters before it. The last 40,000 characters are held out.

torch.set_num_threads(1)
length, width, steps = 128, 64, 60 if QUICK else 400
reference = "".join(topics.values()).encode()
characters = torch.tensor([min(byte, 127) for byte in reference])
training, held_out = characters[:-40_000], characters[-40_000:]
causal_mask = nn.Transformer.generate_square_subsequent_mask(length)


def passages(characters, number):
    starts = torch.randint(len(characters) - length, (number, 1))
    return characters[starts + torch.arange(length + 1)]


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(
            width, 4, batch_first=True
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )
        self.head = nn.Linear(width, 128)

    def forward(self, tokens):  # (batch, length)
        h = self.embedding(tokens) + self.position
        x = self.norm(h)
        options = {"attn_mask": causal_mask, "need_weights": False}
        h = h + self.attention(x, x, x, is_causal=True, **options)[0]
        return self.head(h + self.mlp(h))


def loss_on(model, passages):
    logits = model(passages[:, :-1])
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), passages[:, 1:].flatten()
    )


model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, steps)
for _ in range(steps):
    loss = loss_on(model, passages(training, 16))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
judged = passages(held_out, 32)
model.eval().requires_grad_(False)
print(
    f"held-out loss {loss_on(model, judged):.3f} nats a character; "
    f"a guess has {math.log(128):.3f}"
)

# %%
# The same model with linear attention, which has the weights of the trained layer and is not trained further, by the
# map of its features:

for kernel in ("softmax", "taylor", "hermite"):
    converted = copy.deepcopy(model)
    converted.attention = pr.nn.make_performer(
        model.attention, 256, kernel_fn=kernel, seed=0
    )
    print(f"{kernel:8} loss {loss_on(converted, judged):.3f}")

# %%
# The error depends on the logits
# -------------------------------
#
# Logits are the numbers that the softmax is taken of. Multiplying the projections of queries and keys by a factor
# multiplies the logits by its square. ``approximation_error`` compares a layer to the exact softmax, and also measures
# the coarsest approximation, which replaces attention by the mean of the values. A feature map that is worse than that
# mean is useless.

attention = model.attention
x = model.norm(model.embedding(judged[:, :-1]) + model.position)


def scaled(factor):
    layer = copy.deepcopy(attention)
    # The first 128 rows project to queries and keys.
    layer.in_proj_weight[:128] *= factor
    layer.in_proj_bias[:128] *= factor
    return layer


def largest_logit(layer):
    projected = nn.functional.linear(
        x, layer.in_proj_weight, layer.in_proj_bias
    )
    q, k, _ = projected.unflatten(-1, (3, 4, 16)).unbind(2)
    return (
        (torch.einsum("nqhd,nkhd->nhqk", q, k) / 16**0.5)
        .abs()
        .max()
        .item()
    )


factors = (0.5, 1, 2) if QUICK else (0.35, 0.5, 0.7, 1, 1.4, 2)
logits = [largest_logit(scaled(factor)) for factor in factors]
errors = {}
for kernel in ("softmax", "taylor", "hermite"):
    errors[kernel] = []
    for factor in factors:
        layer = pr.nn.make_performer(
            scaled(factor), 256, kernel_fn=kernel, seed=0
        )
        error = layer.approximation_error(x, is_causal=True)
        errors[kernel].append(error.layer)
        errors.setdefault("mean of the values", {})[factor] = (
            error.mean_of_values
        )
errors["mean of the values"] = list(
    errors["mean of the values"].values()
)
print(
    "largest logit     ", " ".join(f"{value:6.1f}" for value in logits)
)
for name, values in errors.items():
    print(f"{name:18}", " ".join(f"{value:6.1%}" for value in values))

figure, axes = plt.subplots(figsize=(5, 3.6))
for name, values in errors.items():
    axes.plot(
        logits,
        values,
        marker="o",
        label=name,
        linestyle=":" if name.startswith("mean") else "-",
    )
axes.set(
    xscale="log",
    yscale="log",
    xlabel="largest logit",
    ylabel="relative error of the output",
)
axes.set_xticks(
    [1, 2, 5, 10, 20, 40], ["1", "2", "5", "10", "20", "40"]
)
axes.minorticks_off()
axes.legend()
plt.show()

# %%
# Up to a largest logit of 2, ``"hermite"``, the default, is within 1 % of the softmax. The trained layer has logits up
# to 10. Its error is then a fifth, and the loss of the model rises by 0.03. Above 20, where a head attends to few keys,
# no map is a good approximation: keep the softmax, or train the layer in this form from the start. Random features
# (``"softmax"``) are less accurate than polynomials on these inputs.

# %%
# Time
# ----
#
# Forward passes of one layer, 8 heads of 32, causal and not, against torch's ``scaled_dot_product_attention`` on the
# same projections. The linear layer has a fixed cost for its features, so it loses for short sequences. Times do not
# depend on the values, so weights and inputs are random here.

exact = nn.MultiheadAttention(256, 8, batch_first=True).eval()
linear = pr.nn.make_performer(exact, 64).eval()


def softmax_attention(x, causal):
    q, k, v = (
        nn.functional.linear(
            x, exact.in_proj_weight, exact.in_proj_bias
        )
        .unflatten(-1, (3, 8, 32))
        .unbind(2)
    )
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal
    )
    return exact.out_proj(out.transpose(1, 2).flatten(2))


def cpu_ms(function, repeats):
    function()
    begun = time.process_time()
    for _ in range(repeats):
        function()
    return 1e3 * (time.process_time() - begun) / repeats


lengths = (
    (128, 512, 2048)
    if QUICK
    else (128, 256, 512, 1024, 2048, 4096, 8192)
)
times = {
    "softmax": [],
    "linear": [],
    "softmax, causal": [],
    "linear, causal": [],
}
with torch.no_grad():
    for length in lengths:
        y = torch.randn(1, length, 256)
        repeats = max(2, 8192 // length // (4 if QUICK else 1))
        for causal, suffix in ((False, ""), (True, ", causal")):
            calls = {
                "softmax": partial(softmax_attention, y, causal),
                "linear": partial(linear, y, y, y, is_causal=causal),
            }
            for name, call in calls.items():
                times[name + suffix].append(cpu_ms(call, repeats))
for name, values in times.items():
    print(
        f"{name:16}",
        " ".join(f"{value:8.1f}" for value in values),
        "ms",
    )

figure, axes = plt.subplots(figsize=(5, 3.6))
for name, values in times.items():
    axes.plot(
        lengths,
        values,
        marker="o",
        label=name,
        linestyle="--" if "causal" in name else "-",
    )
axes.set(
    xscale="log",
    yscale="log",
    xlabel="positions",
    ylabel="CPU time of a forward, ms",
)
axes.set_xticks(lengths, [str(length) for length in lengths])
axes.minorticks_off()
axes.legend()
plt.show()

# %%
# Masks
# -----
#
# A causal layer does not see later positions, exactly: when these change, the outputs before them stay equal to the
# bit. A key that ``key_padding_mask`` marks as padding has no influence, whatever its values are. Both hold for any
# input, so these inputs are random.

with torch.no_grad():
    y = torch.randn(2, 40, 256)
    changed = y.clone()
    changed[:, 25:] = 1000 * torch.randn(2, 15, 256)
    first, _ = linear(y, y, y, is_causal=True)
    after, _ = linear(changed, changed, changed, is_causal=True)
    print(
        "earlier outputs are equal:",
        torch.equal(first[:, :25], after[:, :25]),
    )

    padding = torch.zeros(2, 40, dtype=torch.bool)
    padding[0, 30:] = True
    broken = y.clone()
    broken[0, 30:] = torch.nan
    first, _ = linear(y, y, y, key_padding_mask=padding)
    after, _ = linear(broken, broken, broken, key_padding_mask=padding)
    print(
        "padding has no influence:",
        torch.equal(first[0, :30], after[0, :30]),
    )

# %%
# Other masks treat pairs of a query and a key, which sums over all keys cannot do; they raise an error.
# :doc:`/howto/linearize` converts whole trained transformers, with exact attention to near positions, and
# :doc:`/benchmarks/attention` has times and errors for more shapes.
