"""
Compress a decoder: loss, bytes and tokens per second
=====================================================

A language model that generates text reads all its weights for each token, so its bytes count on disk and in time. This
example trains a small Llama of transformers on Python's sources, compresses it to several sizes, and measures the loss
and the tokens per second, also where they get fewer.
"""

import copy
import math
import os
import sysconfig
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import panther as pr

# Smaller sizes, with which the documentation is checked.
QUICK = "PANTHER_DOCS_QUICK" in os.environ
torch.set_num_threads(1)

# %%
# A small decoder
# ---------------
#
# Tokens are single characters. Every tenth file of Python's library is held out.

length = 64
paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[
    : 40 if QUICK else 160
]
texts = [
    torch.tensor(
        [min(byte, 127) for byte in path.read_bytes()],
        dtype=torch.uint8,
    )
    for path in paths
]
training = torch.cat(
    [
        characters
        for number, characters in enumerate(texts)
        if number % 10
    ]
)
held_out = torch.cat(texts[::10])


def passages(characters, number):
    starts = torch.randint(len(characters) - length, (number, 1))
    return characters[starts + torch.arange(length)].long()


def llama(width, layers):
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


model = llama(128, 2)
optimizer = torch.optim.AdamW(
    model.parameters(), weight_decay=0.1, fused=True
)
steps = 40 if QUICK else 400
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps)
for _ in range(steps):
    x = passages(training, 12)
    loss = model(input_ids=x, labels=x).loss
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
model.eval()
judged = passages(held_out, 32 if QUICK else 128)


def loss_of(model):
    with torch.no_grad():
        return sum(
            model(input_ids=x, labels=x).loss.item()
            for x in judged.split(32)
        ) / len(judged.split(32))


numbers = sum(p.numel() for p in model.parameters())
print(
    f"{numbers:,} numbers, held-out loss {loss_of(model):.3f} nats a "
    f"character; a guess has {math.log(128):.3f}"
)

# %%
# Bytes and loss
# --------------
#
# The calibration batches are dicts, as the model is called. ``bits`` is the average for a weight of the linear layers;
# the embedding stays as it is. "One width" is the same number of bits for all layers, "chosen" the form that gains most
# for each of them.


def tokens_per_second(model, tokens):
    """Generate after a prompt of 16 characters, one token at a time."""
    prompt = judged[:1, :16].clone()
    settings = {
        "max_new_tokens": tokens,
        "do_sample": False,
        "pad_token_id": 0,
    }
    with torch.no_grad():
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            **settings | {"max_new_tokens": 2},
        )
        begun = time.process_time()
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), **settings
        )
    return tokens / (time.process_time() - begun)


calibration = [
    {"input_ids": x}
    for x in passages(training, 64 if QUICK else 256).split(16)
]
cases = {"low rank": (16,), "one width": (8,), "chosen": (4.25,)}
if not QUICK:
    cases = {
        "low rank": (16, 8, 4),
        "one width": (8, 4, 3, 2),
        "chosen": (4.25, 3.25, 2.75, 2.25),
    }
tokens = 32 if QUICK else 100
found = [
    ("dense", 32.0, loss_of(model), tokens_per_second(model, tokens))
]
for name, budgets in cases.items():
    for bits in budgets:
        small = copy.deepcopy(model)
        size = (
            {"budget": 1, "forms": f"int{bits}"}
            if name == "one width"
            else {"bits": bits}
        )
        if name == "low rank":
            size["forms"] = "low_rank"
        report = pr.compress(
            small,
            calibration=calibration,
            seed=0,
            measure_speed=False,
            **size,
        )
        found.append(
            (
                name,
                32 * report.eligible_ratio,
                loss_of(small),
                tokens_per_second(small, tokens),
            )
        )
for name, bits, loss, speed in found:
    print(
        f"{name:9} {bits:5.2f} bits a weight, loss {loss:.3f}, "
        f"{speed:4.0f} tokens/s of CPU time"
    )

# %%
# Codes keep the loss down to 4 bits, an eighth of the bytes. Low rank keeps it at half of the bytes and not below. All
# forms generate fewer tokens a second than the dense model.

# %%
# Tokens per second
# -----------------
#
# The decoder above has layers of 128 columns, where calls of operators take the time and every form is slower than the
# dense layer. How fast a layer is depends on its size and not on its weights, so the same forms are now timed in an
# untrained decoder with wider layers. In bfloat16, ``hold_packed_`` keeps a second copy of 4-bit codes for a kernel of
# torch that reads them without expanding the weight.

wide = llama(256 if QUICK else 1024, 2).eval()


def converted(convert, dtype=torch.float32):
    """Return the decoder with other layers in its blocks."""
    other = copy.deepcopy(wide).to(dtype)
    for name, layer in list(other.model.named_modules()):
        if isinstance(layer, nn.Linear):
            other.model.set_submodule(name, convert(layer))
    return other


def low_rank(layer):
    # Half of the bytes.
    R = (
        layer.in_features
        * layer.out_features
        // (4 * (layer.in_features + layer.out_features))
    )
    return pr.nn.SKLinear(
        layer.in_features,
        layer.out_features,
        R,
        bias=False,
        sketch="signs",
    )


def quantized(bits, packed=False):
    def convert(layer):
        small = pr.nn.QuantizedLinear.from_linear(
            layer, bits=bits, group_size=128
        )
        return small.hold_packed_() if packed else small

    return convert


forms = {
    "float32": wide,
    "low rank, half": converted(low_rank),
    "int8": converted(quantized(8)),
    "int4": converted(quantized(4)),
    "bf16": converted(lambda layer: layer, torch.bfloat16),
    "bf16, int4 packed": converted(
        quantized(4, packed=True), torch.bfloat16
    ),
}
speeds = {
    name: tokens_per_second(other, 16 if QUICK else 48)
    for name, other in forms.items()
}
for name, speed in speeds.items():
    print(
        f"{name:22} {speed:5.0f} tokens/s, "
        f"{speed / speeds['float32']:.2f} times float32"
    )

figure, (left, right) = plt.subplots(1, 2)
for name in dict.fromkeys(name for name, *_ in found[1:]):
    points = sorted(
        (bits, loss) for other, bits, loss, _ in found if other == name
    )
    left.plot(*zip(*points, strict=True), marker="o", label=name)
left.axhline(found[0][2], color="gray", linestyle=":", label="dense")
left.set(
    xscale="log",
    xlabel="bits for a weight",
    ylabel="loss, nats a character",
    title="Trained decoder",
)
left.set_xticks([2, 3, 4, 6, 8, 16], ["2", "3", "4", "6", "8", "16"])
left.minorticks_off()
left.legend(fontsize=8)
right.barh(
    list(speeds),
    list(speeds.values()),
    color=["gray"] + ["C0"] * (len(speeds) - 1),
)
right.axvline(speeds["float32"], color="gray", linestyle=":")
right.invert_yaxis()
right.set(xlabel="tokens a second", title="Wide decoder, one thread")
plt.show()

# %%
# One token at a time is the case in which the bytes of the weights are the bottleneck. Low rank reads half of them and
# gains nearly as much. Codes of 8 bits gain nothing in float32, and 4 bits lose: each call expands the weight. Only the
# packed codes in bfloat16 turn fewer bytes into time. Prompts and batches have many rows, for which products take the
# time and codes gain nothing.
#
# :doc:`/concepts/quantized` describes ``hold_packed_`` and inputs in 8 bits, :doc:`/benchmarks/quantized` has times by
# numbers of rows, :doc:`/howto/transformers` how pretrained models are compressed and saved, and
# :doc:`/benchmarks/compress` a language model of 135 million parameters.
