"""Files that are damaged, written by processes that are killed, and written by several processes at once.

The trials behind tests/faults/test_files.py and `make torture`. Each returns how often each outcome was seen.
"""

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
import warnings
from collections import Counter

import torch
from safetensors.torch import load_model, save_model
from torch import nn

import panther as pr
from panther.distributed import ClusterSpec, checkpoint
from panther.errors import ConfigError, FormatError, PerformanceWarning
from panther.train import TrainConfig

_LONGEST_S = 0.2  # of processor time; a save takes some 10 ms, and the first one after a fork ten times that


def filled_model(value):
    """Return a small model whose parameters all have one value, by which a whole model is known from a mixed one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        model = nn.Sequential(pr.nn.SKLinear(16, 12, 1, 2, seed=3), nn.Linear(12, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def loaded_values(folder):
    """Load a folder, and return the values of all parameters."""
    model = pr.load_compressed(folder, nn.Sequential(nn.Linear(16, 12), nn.Linear(12, 4)))
    return {value for parameter in model.parameters() for value in parameter.unique().tolist()}


def survive_kills(folder, number, seed, save=pr.save_compressed, load=loaded_values, files=2):
    """Kill a process that saves again and again, at random moments; return the outcomes of loading afterwards.

    ``save`` takes a model and a folder, ``load`` returns the values of all parameters, and ``files`` is the number of
    files that a save leaves.
    """
    generator, outcomes = random.Random(seed), Counter()
    save(filled_model(0.0), folder)
    last = 0.0
    for _ in range(number):
        names_before = set(os.listdir(folder))
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            _save_forever(folder, last, writer, save)
        os.close(writer)
        os.read(reader, 1)  # the child is ready to save now
        os.close(reader)
        _wait_for_processor_time(child, generator.uniform(0, _LONGEST_S))  # so that the kill comes at any moment
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        outcomes["savers that failed"] += not os.WIFSIGNALED(status)
        outcomes["kills in the middle of a save"] += not names_before.issuperset(os.listdir(folder))
        values = _outcome(lambda: load(folder))
        if not isinstance(values, set) or len(values) != 1 or min(values) < last:
            outcomes["lost" if isinstance(values, str) else "wrong"] += 1
            continue
        outcomes["the old model" if values == {last} else "a new model"] += 1
        (last,) = values
    save(filled_model(last), folder)
    outcomes["files left over"] += len(list(folder.iterdir())) - files
    return outcomes


def save_in_place(model, folder):
    """Save a model by torch.save to a file that may exist, as most scripts do."""
    torch.save(model.state_dict(), folder / "model.pt")


def save_and_rename(model, folder):
    """Save a model by torch.save to a second file, which then takes the name of the first one."""
    torch.save(model.state_dict(), folder / "new.pt")
    os.replace(folder / "new.pt", folder / "model.pt")


def torch_values(folder):
    """Load the file of the two functions above, and return the values of all parameters."""
    model = filled_model(-1.0)
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    return {value for parameter in model.parameters() for value in parameter.unique().tolist()}


def _wait_for_processor_time(process, seconds):
    """Wait until a process has run for so long, on a busy machine too; elsewhere than on Linux by the wall clock."""
    try:
        clock = (~process << 3) | 2  # the number of the clock of another process, see clock_getcpuclockid(3)
        end = time.clock_gettime(clock) + seconds
        while time.clock_gettime(clock) < end:
            time.sleep(0.0005)
    except OSError:
        time.sleep(seconds)


def _save_forever(folder, value, ready, save):
    """Save models of rising values in a forked process, which ends by a kill or by an error and never returns."""
    try:
        os.write(ready, b"!")
        while True:
            value += 1.0
            save(filled_model(value), folder)
    finally:
        os._exit(1)


def save_at_once(folder, number, processes):
    """Save from several processes to one folder while this one loads; return the outcomes of saves and loads."""
    context, outcomes = multiprocessing.get_context("fork"), Counter()
    pr.save_compressed(filled_model(0.0), folder)
    savers = [context.Process(target=_save_many, args=(folder, number // processes, i)) for i in range(processes)]
    for saver in savers:
        saver.start()
    while any(saver.is_alive() for saver in savers):
        values = _outcome(lambda: loaded_values(folder))
        outcomes["whole models loaded" if isinstance(values, set) and len(values) == 1 else "torn or failed loads"] += 1
    for saver in savers:
        saver.join()
        outcomes["processes that failed"] += saver.exitcode != 0
    outcomes["torn or failed loads"] += len(loaded_values(folder)) != 1
    outcomes["files left over"] += len(list(folder.iterdir())) - 2
    return outcomes


def _save_many(folder, number, process):
    for index in range(number):
        pr.save_compressed(filled_model(float(1000 * process + index)), folder)


def _inference_folder(folder):
    pr.save_compressed(filled_model(1.0), folder)
    return lambda: loaded_values(folder) == {1.0}


def _checkpoint(folder):
    model = filled_model(1.0)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    saved = checkpoint.save(folder, model, optimizer, step=1, extra={"epoch": 3})
    expected = {name: value.clone() for name, value in model.state_dict().items()}

    def load():
        other = filled_model(2.0)
        loaded = checkpoint.load(saved, other, torch.optim.AdamW(other.parameters()))
        same = all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())
        return same and loaded.extra == {"epoch": 3}

    return load


def _cluster_file(folder):
    folder.mkdir()
    ClusterSpec(gpus=4, memory_bytes=1e9).save(folder / "cluster.json")
    return lambda: isinstance(ClusterSpec.load(folder / "cluster.json"), ClusterSpec)


def _settings(folder):
    folder.mkdir()
    TrainConfig().save(folder / "train.json")
    return lambda: isinstance(TrainConfig.load(folder / "train.json"), TrainConfig)


# Each writes a folder and returns a function that loads it, and returns whether it has what was saved. People edit the
# last two, so these have no checksums, and a changed number is a different setting.
FORMATS = {
    "inference folder": _inference_folder,
    "checkpoint": _checkpoint,
    "cluster file": _cluster_file,
    "settings": _settings,
}
REFUSALS = {
    "inference folder": FormatError,
    "checkpoint": FormatError,
    "cluster file": (ValueError, OSError),
    "settings": ConfigError,
}


def _torch_file(folder):
    folder.mkdir()
    save_in_place(filled_model(1.0), folder)
    return lambda: torch_values(folder) == {1.0}


def _safetensors_file(folder):
    folder.mkdir()
    save_model(filled_model(1.0), folder / "model.safetensors")

    def load():
        model = filled_model(2.0)
        load_model(model, folder / "model.safetensors")
        return {value for parameter in model.parameters() for value in parameter.unique().tolist()} == {1.0}

    return load


# What scripts write without Panther. Any error counts as a refusal.
PLAIN_FORMATS = {"file of torch.save": _torch_file, "file of safetensors": _safetensors_file}


def damage_files(folder, name, number, seed):
    """Damage one file of a format at random, load it, and repeat; return the outcomes."""
    generator, outcomes = random.Random(seed), Counter()
    load = (FORMATS | PLAIN_FORMATS)[name](folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    contents = {path: path.read_bytes() for path in files}
    for _ in range(number):
        path = generator.choice(files)
        _damage(path, generator, contents[generator.choice(files)])
        outcomes[_refusal_or_value(load, REFUSALS.get(name, Exception))] += 1
        _restore(path, contents[path])
    return outcomes


def _refusal_or_value(load, refusals):
    try:
        return "loaded right" if load() else "loaded wrong"
    except refusals as error:
        return "refused" if "\n" not in str(error) or refusals is Exception else "refused in several lines"
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"


def _damage(path, generator, other):
    """Change a file in one of the ways in which disks, copies and people do."""
    content = bytearray(path.read_bytes())
    begin = generator.randrange(len(content))
    end = min(len(content), begin + generator.choice((1, 8, 64, 512)))
    kind = generator.choice(
        ("flip", "cut", "zeros", "noise", "insert", "remove", "other", "missing", "empty", "folder")
    )
    if kind == "flip":
        content[begin] ^= 1 << generator.randrange(8)
    elif kind == "zeros":
        content[begin:end] = bytes(end - begin)
    elif kind == "noise":
        content[begin:end] = generator.randbytes(end - begin)
    elif kind == "insert":
        content[begin:begin] = generator.randbytes(end - begin)
    elif kind == "remove":
        del content[begin:end]
    elif kind == "other":
        content = bytearray(other)
    elif kind in ("cut", "empty"):
        content = content[: begin if kind == "cut" else 0]
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(content)


def _restore(path, content):
    if path.is_dir():
        shutil.rmtree(path)
    path.write_bytes(content)


def _outcome(work):
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def shown(outcomes):
    """Return the outcomes as text, for an assertion."""
    return json.dumps(outcomes, indent=1)
