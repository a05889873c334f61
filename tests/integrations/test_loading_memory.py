"""Memory of a process that loads a compressed folder, in each way, and a dense one with conversions."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import waits
from torch import nn

import panther as pr
from panther.nn import LowRankLinear, QuantizedLinear

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")  # for device_map

MODULES = 20  # megabytes of a model's modules, and of what transformers imports for them

# The peaks above what the process took before, in megabytes, of its own memory: without mapped pages of files.
PROGRAM = """
import gc, json, sys, tempfile, threading, warnings
from pathlib import Path
import torch, transformers
import panther as pr, panther.integrations.transformers
from measuring import return_large_tensors
from panther.distributed import materialize_
from panther.integrations.folders.compress import mapped_from_pretrained

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1e3 for line in status if line.startswith("RssAnon"))

def rise_of(load):
    return_large_tensors()
    gc.collect()
    before = peak = anonymous()
    ended = threading.Event()

    def watch():
        nonlocal peak
        while not ended.wait(0.002):
            peak = max(peak, anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    model = load()
    peak = max(peak, anonymous())
    ended.set()
    thread.join()
    return peak - before

def materialized():
    config = transformers.LlamaConfig.from_pretrained(compressed)
    del config.quantization_config
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16()
    return materialize_(model, compressed)

warnings.simplefilter("ignore")
torch.set_num_threads(1)
compressed, mixture, scratch = map(Path, sys.argv[1:])
of_transformers = transformers.AutoModelForCausalLM.from_pretrained
on_disk = dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb", "model.layers"], "cpu")
on_disk["lm_head"] = "disk"
ways = {
    "warm": lambda: pr.from_pretrained(compressed),  # imports the model's modules
    "panther": lambda: pr.from_pretrained(compressed),
    "panther, cpu": lambda: pr.from_pretrained(compressed, device_map="cpu"),
    "panther, auto": lambda: pr.from_pretrained(compressed, device_map="auto"),
    "panther, disk": lambda: pr.from_pretrained(compressed, device_map=on_disk, offload_folder=scratch / "offload"),
    "transformers": lambda: of_transformers(compressed),
    "transformers, auto": lambda: of_transformers(compressed, device_map="auto"),
    "panther, float32": lambda: pr.from_pretrained(compressed, dtype=torch.float32),
    "materialize_": materialized,
    "mixture": lambda: mapped_from_pretrained(mixture, scratch),
    "mixture, bfloat16": lambda: mapped_from_pretrained(mixture, scratch, dtype=torch.bfloat16),
}
print(json.dumps({way: rise_of(load) for way, load in ways.items()}))
"""


def save_compressed_llama(folder):
    """Save a Llama of two dense tables and layers of codes and factors.

    Returns:
        Megabytes of the model, of its largest tensor, and of its parameters in float32.
    """
    config = transformers.LlamaConfig(
        vocab_size=40_000, hidden_size=512, num_hidden_layers=3, num_attention_heads=8, intermediate_size=1024
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    for block in model.model.layers:
        for holder in (block.self_attn, block.mlp):
            for name, layer in [*holder.named_children()]:
                if isinstance(layer, nn.Linear):
                    is_factored = name == "up_proj"
                    new_layer = (LowRankLinear if is_factored else QuantizedLinear).from_linear(
                        layer, 64 if is_factored else 8
                    )
                    setattr(holder, name, new_layer)
    pr.save_compressed(model.bfloat16(), folder)
    sizes = [tensor.nbytes / 1e6 for tensor in model.state_dict().values()]
    return sum(sizes), max(sizes), sum(parameter.numel() * 4 / 1e6 for parameter in model.parameters())


def save_mixture(folder):
    """Save a Mixtral, whose file holds the experts one by one; return megabytes of the model and its largest weight."""
    config = transformers.MixtralConfig(
        vocab_size=2000, hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=1024,
        num_local_experts=8, num_key_value_heads=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="100MB")
    sizes = [parameter.nbytes / 1e6 for parameter in model.parameters()]
    return sum(sizes), max(sizes)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
def test_no_way_of_loading_holds_more_than_it_must(tmp_path):
    compressed, mixture, scratch = (tmp_path / name for name in ("compressed", "mixture", "scratch"))
    scratch.mkdir()
    total, table, in_float32 = save_compressed_llama(compressed)
    total_of_mixture, stacked = save_mixture(mixture)
    assert total > 4 * MODULES
    assert total_of_mixture > 4 * (stacked + MODULES)
    paths = os.pathsep.join([str(Path(pr.__file__).parents[1]), str(Path(__file__).parents[1] / "support")])
    command = [sys.executable, "-c", PROGRAM, str(compressed), str(mixture), str(scratch)]
    result = waits.run(command, env=os.environ | {"PYTHONPATH": paths})
    assert not result.returncode, result.stderr
    rises = json.loads(result.stdout.splitlines()[-1])
    mapped_ways = [way for way in rises if way.startswith(("panther", "transformers")) and "float32" not in way]
    assert {way: rise for way, rise in rises.items() if way in mapped_ways and rise > MODULES} == {}
    assert rises["panther, float32"] < in_float32 + MODULES
    assert rises["materialize_"] < total + table + MODULES
    assert rises["mixture"] < stacked + MODULES
    assert rises["mixture, bfloat16"] < stacked + MODULES
