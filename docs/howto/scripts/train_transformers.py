"""Train a sketched BERT with transformers' Trainer.

Run it with python, or with torchrun --nproc-per-node 2.
"""

import os
import tempfile
from pydoc_data.topics import topics

import torch
import transformers

import panther as pr
from panther.integrations.transformers import CompressCallback

torch.manual_seed(0)
folder = os.environ.get("OUT") or tempfile.mkdtemp()
config = transformers.BertConfig(
    vocab_size=128,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
)
# 16 characters each of two chapters of Python's language reference.
chapters = [
    torch.tensor(
        list(topics[name].encode("ascii", "replace")[:1280])
    ).view(-1, 16)
    for name in ("class", "numeric-types")
]
data = [
    {"input_ids": chapters[i % 2][i // 2], "labels": i % 2}
    for i in range(64)
]
batches = [{"input_ids": x} for x in torch.cat(chapters).split(16)]


def train(out, resume_from=None):
    """Train for six steps, with a checkpoint after three, and compress.

    What is still dense is compressed, and the whole is healed.
    """
    torch.manual_seed(1)
    model = transformers.BertForSequenceClassification(config)
    # Sketched layers from the start, with one seed in every process.
    pr.sketch_layers_(
        model,
        pr.SketchConfig(low_rank=4, init="random"),
        include="*attention*",
        seed=0,
    )
    arguments = transformers.TrainingArguments(
        out,
        per_device_train_batch_size=4,
        max_steps=6,
        save_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        ddp_backend="gloo" if "RANK" in os.environ else None,
    )
    compress = CompressCallback(
        bits=10,
        calibration=batches,
        include=("*intermediate*", "*output*"),
        forms=("int8",),
        measure_speed=False,
        heal=pr.HealConfig(max_steps=5, learning_rate=1e-4),
        seed=0,
    )
    trainer = transformers.Trainer(
        model, arguments, train_dataset=data, callbacks=[compress]
    )
    trainer.train(resume_from_checkpoint=resume_from)
    trainer.save_model(out)
    return trainer


trainer = train(folder)
resumed = train(f"{folder}-resumed", f"{folder}/checkpoint-3")

if trainer.is_world_process_zero():
    for entry in trainer.state.log_history:
        print(entry)
    model = trainer.model.eval()
    loaded = type(model).from_pretrained(folder)
    with torch.no_grad():
        assert torch.equal(
            loaded(**batches[0]).logits, model(**batches[0]).logits
        )
    state, other = model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(state[name], other[name]) for name in state)
    checkpoint = type(model).from_pretrained(f"{folder}/checkpoint-3")
    kinds = (
        type(m.bert.encoder.layer[0].output.dense).__name__
        for m in (checkpoint, loaded)
    )
    print(
        "output: {} at step 3, {} at the end; ".format(*kinds)
        + "resumed from there, the same weights"
    )
