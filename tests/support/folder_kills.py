"""Kill ``panther.compress_folder`` at random moments, start it again until it ends, and compare the files.

``python folder_kills.py FOLDER COUNT SEED`` makes a model in the folder and kills ``COUNT`` runs, each with SIGKILL. A
run that ends before it is killed begins anew in another folder. Print the numbers of kills and of folders, as JSON.
"""

import json
import logging
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import transformers

import panther as pr

SIZES = {
    "vocab_size": 120, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96,
}  # fmt: skip


def batches():
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(3, 120, (4, 15), generator=generator)} for _ in range(6)]


def compress(source, target, **options):
    return pr.compress_folder(source, target, bits=5, calibration=batches(), seed=0, progress=False, **options)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def is_killed(source, target, after_s):
    """Compress in a new process, and return whether it was killed before it ended."""
    if not (process := os.fork()):
        try:
            compress(source, target)
        except BaseException:
            logging.exception("the run failed")
            os._exit(1)
        os._exit(0)
    time.sleep(after_s)  # the moment of the kill, which waits for nothing
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the run failed"
    has_ended = (target / "config.json").exists() and not list(target.glob(".panther-*"))
    return os.WIFSIGNALED(status) and not has_ended


def main(folder, count, seed):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "source")
    start = time.monotonic()
    compress(folder / "source", folder / "expected")
    duration_s = time.monotonic() - start
    expected, random_numbers = contents(folder / "expected"), random.Random(seed)
    num_folders = num_kills = 0
    while num_kills < count:
        target = folder / f"target-{num_folders}"
        while is_killed(folder / "source", target, random_numbers.uniform(0, duration_s)):
            num_kills += 1
        assert contents(target) == expected, f"{target} differs"
        num_folders += 1
    print(json.dumps({"kills": num_kills, "folders": num_folders, "duration_s": round(duration_s, 2)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
