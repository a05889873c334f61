"""
A small decoder that answers faster after compression
=====================================================

A decoder that writes one token at a time reads all its weights for each of them, so smaller weights are read sooner.
This tutorial trains a small Llama of transformers to answer questions, compresses it to a seventh of its bytes, and
counts right answers and tokens a second before and after, on one thread of a CPU.

The script needs Panther's extra ``transformers``, and a C++ compiler for the kernel that reads codes.
"""

import copy
import os
import statistics
import time
import warnings
from http import HTTPStatus

import torch
import transformers

import panther as pr

# A smaller decoder, with which the documentation is checked.
QUICK = "PANTHER_DOCS_QUICK" in os.environ
torch.set_num_threads(1)
torch.manual_seed(0)

# %%
# A decoder that knows 16 answers
# -------------------------------
#
# A question is the number of an answer of HTTP, such as 404, and the answer its text. Tokens are characters, and a line
# break ends the text.

questions = [
    status for status in HTTPStatus if len(status.phrase) <= 18
][:16]
length = 22
lines = [
    f"{status.value} {status.phrase}\n".ljust(length)
    for status in questions
]
tokens = torch.tensor([list(line.encode()) for line in lines])
ends = torch.tensor([len(line.rstrip(" ")) for line in lines])
labels = tokens.masked_fill(torch.arange(length) >= ends[:, None], -100)
labels[:, :4] = -100  # The question is given.

width, layers = (128, 1) if QUICK else (768, 2)
config = transformers.LlamaConfig(
    vocab_size=128,
    hidden_size=width,
    intermediate_size=8 * width // 3 // 32 * 32,
    num_hidden_layers=layers,
    num_attention_heads=width // 64,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=10,
    pad_token_id=0,
)
model = transformers.LlamaForCausalLM(config)
steps = 60 if QUICK else 48
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
schedule = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, 4e-3 if QUICK else 1e-3, steps
)
for _ in range(steps):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=tokens, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
model.eval()


def answer(model, question, **settings):
    """Return the characters that follow a question."""
    prompt = torch.tensor([list(f"{question} ".encode())])
    with torch.no_grad():
        line = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            **{"max_new_tokens": 20} | settings,
        )
    return bytes(line[0, 4:].tolist()).decode().strip()


def right_answers(model):
    """Return how many answers are right."""
    return sum(
        answer(model, status.value) == status.phrase
        for status in questions
    )


# %%
# Compress, and ask what it runs on
# ---------------------------------
#
# ``target="gguf"`` makes groups of 32 weights, so that the same codes can be written for llama.cpp as well.
# :func:`panther.pack_` prepares the codes for the processor and says what each layer runs on.

# The lines have fewer characters than the widest layer has columns.
# That is little for calibration, so the answers are counted below.
warnings.simplefilter("ignore", pr.errors.NumericalWarning)
small = copy.deepcopy(model)
report = pr.compress(
    small,
    bits=5,
    forms="int4",
    target="gguf",
    calibration=[{"input_ids": part} for part in tokens.split(2)],
    seed=0,
    measure_speed=False,
)
packed = pr.pack_(small)
print(packed)
megabytes = {
    "original": report.bytes_before / 1e6,
    "compressed": report.bytes_after / 1e6,
}

# %%
# Tokens a second, in turns
# -------------------------
#
# Every round times both models once, so that other work on the machine slows both. The ratio is the median over rounds.


def seconds_per_token(model):
    """Return the processor time of a token."""
    begun = time.process_time()
    answer(model, 404, min_new_tokens=20)
    return (time.process_time() - begun) / 20


models = {"original": model, "compressed": small}
rounds = []
for number in range(2 if QUICK else 8):
    times = {
        name: seconds_per_token(each) for name, each in models.items()
    }
    if number:  # The first round warms up.
        rounds.append(times)
right = {name: right_answers(each) for name, each in models.items()}
for name in models:
    speed = 1 / statistics.median(times[name] for times in rounds)
    print(
        f"{name:10} {megabytes[name]:5.1f} MB, "
        f"{right[name]} of {len(questions)} answers right, "
        f"{speed:4.0f} tokens/s of CPU time"
    )
ratio = statistics.median(
    times["original"] / times["compressed"] for times in rounds
)
print(f"compressed: {ratio:.2f} times as fast")

# %%
# In full
# -------
#
# One run at full size, on one core of an AMD EPYC and with other work beside it. llama.cpp ran the same models, which
# :func:`panther.integrations.gguf.write_gguf` wrote: the original, and the compressed one with the same codes. All
# seven were timed in turns in one process, in processor time, for 20 tokens after a question of four characters.
#
# ===================  ============  =====  ===========  ==========  ==========
# Model                Program       MB     Right of 16  ms a token  x bfloat16
# ===================  ============  =====  ===========  ==========  ==========
# original, float32    transformers  57.4   16           5.86        0.82
# original, bfloat16   transformers  28.7   16           4.81        1
# 4 bits, float32      Panther       8.54   16           2.92        1.63
# 4 bits, bfloat16     Panther       8.54   16           3.00        1.55
# original, float32    llama.cpp     57.4   16           2.51        1.92
# original, bfloat16   llama.cpp     28.7   16           1.69        2.84
# 4 bits (Q4_1)        llama.cpp     8.99   16           1.13        4.12
# ===================  ============  =====  ===========  ==========  ==========
#
# The compressed decoder answers twice as fast as the original in float32, and all its answers are right. llama.cpp runs
# the same codes 2.6 times as fast again: it has no Python between the layers. It was compiled for AVX2 (package
# xllamacpp), and a build for AVX-512 may be faster. ``make trials`` measures the table again.
#
# :doc:`decoder` has the loss by bits, :doc:`/howto/gguf` the files for llama.cpp, and :doc:`/howto/deploy` how a model
# is prepared for a server.
#
# .. measured-at:: decoder
