"""
Linear attention: error, time, and where softmax wins
=====================================================

The cost of softmax attention grows with the square of the length, that of
:class:`~panther.nn.RandMultiHeadAttention` with the length. This example converts a torch layer by
:func:`~panther.nn.make_performer`, measures when the result is close to the softmax, and compares times. The softmax
wins for short sequences and for sharp attention.
"""

import copy
import os
import time
from functools import partial

import matplotlib.pyplot as plt
import torch
from torch import nn

import panther as pr

# Smaller sizes, with which the documentation is checked.
QUICK = "PANTHER_DOCS_QUICK" in os.environ

# %%
# The error depends on the logits
# -------------------------------
#
# Logits are the numbers that the softmax is taken of. Multiplying the projections of queries and keys by a factor
# multiplies the logits by its square. ``approximation_error`` compares a layer to the exact softmax, and also measures
# the coarsest approximation, which replaces attention by the mean of the values. A feature map that is worse than that
# mean is useless.

attention = nn.MultiheadAttention(64, 4, batch_first=True)
x = torch.randn(4, 128, 64)


def scaled(factor):
    layer = copy.deepcopy(attention)
    with torch.no_grad():
        # The first 128 rows project to queries and keys.
        layer.in_proj_weight[:128] *= factor
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
        error = layer.approximation_error(x)
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

figure, axes = plt.subplots()
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
axes.legend()
plt.show()

# %%
# While logits stay below 1, the polynomial maps (``"taylor"``, and ``"hermite"``, the default) are almost exact. Above
# 10, where a head attends to few keys, no map is a good approximation: keep the softmax, or train the layer in this
# form from the start. Random features (``"softmax"``) are less accurate than polynomials on these inputs.

# %%
# Time
# ----
#
# Forward passes of one layer, 8 heads of 32, causal and not, against torch's ``scaled_dot_product_attention`` on the
# same projections. The linear layer has a fixed cost for its features, so it loses for short sequences.

torch.set_num_threads(1)
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

figure, axes = plt.subplots()
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
# bit. A key that ``key_padding_mask`` marks as padding has no influence, whatever its values are.

with torch.no_grad():
    y = torch.randn(2, 40, 256)
    changed = y.clone()
    changed[:, 25:] = 1000 * torch.randn(2, 15, 256)
    before, _ = linear(y, y, y, is_causal=True)
    after, _ = linear(changed, changed, changed, is_causal=True)
    print(
        "earlier outputs are equal:",
        torch.equal(before[:, :25], after[:, :25]),
    )

    padding = torch.zeros(2, 40, dtype=torch.bool)
    padding[0, 30:] = True
    broken = y.clone()
    broken[0, 30:] = torch.nan
    before, _ = linear(y, y, y, key_padding_mask=padding)
    after, _ = linear(broken, broken, broken, key_padding_mask=padding)
    print(
        "padding has no influence:",
        torch.equal(before[0, :30], after[0, :30]),
    )

# %%
# Other masks treat pairs of a query and a key, which sums over all keys cannot do; they raise an error.
# :doc:`/howto/linearize` converts whole trained transformers, with exact attention to near positions, and
# :doc:`/benchmarks/attention` has times and errors for more shapes.
