"""Damaged and forged checkpoints: refused by name before anything changes, and never removed."""

import copy
import json
import os
import random
import re
import shutil
import threading
import zlib

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from safetensors.torch import load_file, save_file
from torch import nn

from panther.distributed import checkpoint, data_parallel
from panther.distributed.checkpoint import folders
from panther.errors import CheckpointError, FormatError, SketchMismatchError
from panther.files.records import record_checksum
from panther.nn import SKLinear

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")]


def build(seed):
    torch.manual_seed(seed)
    return nn.Sequential(SKLinear(6, 8, 1, 2, seed=seed), nn.ReLU(), nn.Linear(8, 3))


def trained(seed, optimizer_class=torch.optim.AdamW):
    model = build(seed)
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    model(torch.ones(4, 6)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def everything(model, optimizer):
    """Copy all that a load can change."""
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    return *state, model[0].U1.clone(), torch.get_rng_state(), random.getstate(), np.random.get_state()[1:3]


def assert_same(first_state, state):
    for one, other in zip(first_state, state, strict=True):
        assert_same_value(one, other)


def assert_same_value(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        assert_same(one.values(), other.values())
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        assert_same(one, other)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert np.array_equal(one, other)


def forge(folder, change):
    """Change the manifest as somebody else could, with the right checksum."""
    path = folder / "checkpoint.json"
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    change(manifest)
    path.write_text(json.dumps(manifest | {"checksum": record_checksum(manifest)}))


def first_chunk(manifest, name="model.2.weight"):
    return manifest["tensors"][name]["chunks"][0]


def set_entry(*keys, value):
    """Return a change of one entry of a manifest."""

    def change(manifest):
        for key in keys[:-1]:
            manifest = manifest[key]
        manifest[keys[-1]] = value

    return change


HALF = [3, 4]  # of the columns of model.2.weight
FORGERIES = {
    "step is text": (set_entry("step", value="3"), "is of step '3'"),
    "step is negative": (set_entry("step", value=-1), "is of step -1"),
    "no ranks": (set_entry("world_size", value=0), "of 0 ranks"),
    "more ranks": (set_entry("world_size", value=2), "'random' must have a value for each of 2 ranks"),
    "modules are a list": (set_entry("modules", value=[]), "'modules' must map names to objects"),
    "a module is text": (set_entry("modules", "0", value="x"), "'modules' must map names to objects"),
    "a size of a file": (set_entry("files", "rank-00000.safetensors", value=None), "names the file 'rank-00000"),
    "a dtype": (set_entry("tensors", "model.2.weight", "dtype", value="nn"), "has the dtype 'nn'"),
    "a shape": (set_entry("tensors", "model.2.weight", "shape", value=[3, -8]), "'model.2.weight' has no shape"),
    "a larger shape": (set_entry("tensors", "model.2.weight", "shape", value=[4, 8]), "have 24 of its 32 numbers"),
    "another dtype": (
        set_entry("tensors", "model.2.weight", "dtype", value="float64"),
        "'model.2.weight at 0,0' is torch.float32, .* and should be torch.float64",
    ),
    "an offset": (lambda m: first_chunk(m).update(offsets=[1, 0]), "reach beyond its shape"),
    "chunks that overlap": (
        lambda m: m["tensors"]["model.2.weight"].update(chunks=2 * [first_chunk(m) | {"shape": HALF}]),
        "chunks of the tensor 'model.2.weight' overlap",
    ),
    "no chunks": (set_entry("tensors", "model.2.weight", "chunks", value=[]), "have 0 of its 24 numbers"),
    "a chunk is text": (set_entry("tensors", "model.2.weight", "chunks", value=["x"]), "names the file 'x'"),
    "a checksum is text": (lambda m: first_chunk(m).update(checksum="1"), "has no key or no checksum"),
    "terabytes": (
        lambda m: m["tensors"]["optimizer.2.bias.exp_avg"].update(LARGE),
        r"its tensors in rank-00000.safetensors have 1,099,511,[0-9,]* bytes, and the file has",
    ),
    "a tensor that is not listed": (
        set_entry("model", "2.weight", value={"$tensor": "model.2.other"}),
        "'model' has the tensor 'model.2.other', which is not one of its tensors",
    ),
    "deep nesting": (set_entry("extra", value=json.loads("[" * 900 + "]" * 900)), "nested too deeply"),
    "an optimizer of text": (set_entry("optimizer", value="AdamW"), "'optimizer' must have states and settings"),
    "states are a list": (set_entry("optimizer", "states", value=[]), "'optimizer' must have states and settings"),
    "another tensor for a seed": (
        lambda m: m["tensors"]["model.0.sketch_seed"]["chunks"][0].update(checksum=1),
        "rank-00000.safetensors is damaged: 'model.0.sketch_seed at 0' does not match its checksum",
    ),
}


LARGE = {
    "shape": [2**38],
    "chunks": [{"file": "rank-00000.safetensors", "key": "x", "checksum": 0, "offsets": [0], "shape": [2**38]}],
}


def test_a_checkpoint_larger_than_the_memory_is_refused(tmp_path):
    """A sparse file has every size, so that the sizes in the manifest can be those of the file."""
    folder = checkpoint.save(tmp_path, *trained(1), step=3)
    os.truncate(folder / "rank-00000.safetensors", 2**41)

    def change(manifest):
        manifest["files"]["rank-00000.safetensors"] = 2**41
        manifest["tensors"]["optimizer.2.bias.exp_avg"].update(LARGE)

    forge(folder, change)
    model, optimizer = trained(2)
    first_state = everything(model, optimizer)
    with pytest.raises(FormatError, match="1,099,511,627,776 bytes, which the memory does not hold"):
        checkpoint.load(folder, model, optimizer)
    assert_same(first_state, everything(model, optimizer))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return checkpoint.save(tmp_path_factory.mktemp("saved"), *trained(1), step=3)


@pytest.mark.parametrize("kind", FORGERIES)
def test_a_forged_manifest_is_refused_by_name_and_changes_nothing(tmp_path, saved, kind):
    change, message = FORGERIES[kind]
    folder = tmp_path / saved.name
    folder.mkdir()
    for path in saved.iterdir():
        os.link(path, folder / path.name)
    (folder / "checkpoint.json").unlink()
    (folder / "checkpoint.json").write_bytes((saved / "checkpoint.json").read_bytes())
    forge(folder, change)
    model, optimizer = trained(2)
    first_state = everything(model, optimizer)
    with pytest.raises(FormatError, match=f"(?s){folder}/.*{message}"):
        checkpoint.load(folder, model, optimizer)
    assert_same(first_state, everything(model, optimizer))
    assert re.search(message, (folder / "damaged.txt").read_text(), re.S)


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def read_elsewhere(manifest):
    next(iter(manifest["tensors"].values()))["chunks"][0]["file"] = "../step-00000001/rank-00000.safetensors"


DAMAGE = {
    "file elsewhere": (lambda f: forge(f, read_elsewhere), r"names the file '\.\./step-00000001/rank-00000"),
    "no files": (lambda f: forge(f, lambda manifest: manifest.pop("files")), "does not list its files and tensors"),
    "flipped tensor": (lambda f: flip(f / "rank-00000.safetensors", -3), "does not match its checksum"),
    "flipped manifest": (lambda f: flip(f / "checkpoint.json", 140), "checkpoint.json"),
    "truncated tensor": (
        lambda f: (f / "rank-00000.safetensors").write_bytes((f / "rank-00000.safetensors").read_bytes()[:-8]),
        "is not a valid safetensors file",
    ),
    "empty tensor": (lambda f: (f / "rank-00000.safetensors").write_bytes(b""), "is not a valid safetensors file"),
    "truncated manifest": (
        lambda f: (f / "checkpoint.json").write_text((f / "checkpoint.json").read_text()[:300]),
        "cannot be read as JSON",
    ),
    "pickle": (lambda f: torch.save({"a": 1}, f / "rank-00000.safetensors"), "is not a valid safetensors file"),
    "foreign": (lambda f: (f / "checkpoint.json").write_text('{"format": "x"}'), "was not written by"),
    "missing tensor": (lambda f: (f / "rank-00000.safetensors").unlink(), "is missing"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_checkpoints_are_refused_and_change_nothing(tmp_path, kind):
    good, bad = (checkpoint.save(tmp_path, *trained(1), step=step) for step in (1, 2))
    spoil, message = DAMAGE[kind]
    spoil(bad)
    model, optimizer = trained(2)
    first_state = everything(model, optimizer)
    with pytest.raises(FormatError, match=message):
        checkpoint.load(bad, model, optimizer)
    assert_same(first_state, everything(model, optimizer))
    if kind != "flipped tensor":  # contents are not read
        with pytest.warns(UserWarning, match=r"step-00000002 is skipped: "):
            assert checkpoint.latest(tmp_path) == good


@pytest.mark.parametrize("value", ["x", [1, 2]])
def test_generators_that_refuse_their_state_change_nothing(tmp_path, value):
    folder = checkpoint.save(tmp_path, *trained(1), step=3)
    forge(folder, set_entry("random", 0, "python", value=value))
    model, optimizer = trained(2)
    first_state = everything(model, optimizer)
    with pytest.raises(CheckpointError):
        checkpoint.load(folder, model, optimizer)
    assert_same(first_state, everything(model, optimizer))


def test_a_seed_that_was_changed_with_its_checksum_is_refused(tmp_path):
    folder = checkpoint.save(tmp_path, *trained(1), step=3)
    file = folder / "rank-00000.safetensors"
    tensors = load_file(file)
    tensors["model.0.sketch_seed at 0"][0] += 1
    save_file(tensors, file)
    contents = tensors["model.0.sketch_seed at 0"].numpy().tobytes()

    def change(manifest):
        manifest["files"][file.name] = file.stat().st_size
        manifest["tensors"]["model.0.sketch_seed"]["chunks"][0]["checksum"] = zlib.crc32(contents)

    forge(folder, change)
    model, optimizer = trained(2)
    first_state = everything(model, optimizer)
    with pytest.raises(SketchMismatchError, match=r"sketch_seed"):
        checkpoint.load(folder, model, optimizer)
    assert_same(first_state, everything(model, optimizer))


def test_groups_that_do_not_fit_are_refused_before_the_model_changes(tmp_path):
    model, _ = trained(1)
    groups = [{"params": list(model[0].parameters()), "lr": 0.1}, {"params": list(model[2].parameters()), "lr": 0.01}]
    checkpoint.save(tmp_path, model, torch.optim.AdamW(groups), step=1)
    model, optimizer = trained(2)
    first_state = everything(model, optimizer)
    with pytest.raises(CheckpointError, match="group 0 had different settings"):
        checkpoint.load(tmp_path, model, optimizer)
    assert_same(first_state, everything(model, optimizer))


class Refusing(nn.Linear):
    """A module whose own method of loading raises an error, after it has taken its tensors."""

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)
        raise ArithmeticError("the weights are odd")


def refuse_in_a_hook(model):
    def hook(module, keys):
        raise ArithmeticError("the weights are odd")

    model[2].register_load_state_dict_post_hook(hook)


def refuse_in_a_method(model):
    model[2].__class__ = Refusing


def refuse_in_the_optimizer(model):
    pass


@pytest.mark.parametrize("refuse", [refuse_in_a_hook, refuse_in_a_method, refuse_in_the_optimizer])
def test_what_refuses_to_load_is_put_back(tmp_path, refuse):
    checkpoint.save(tmp_path, *trained(1), step=1)
    model, optimizer = trained(2)
    refuse(model)
    if refuse is refuse_in_the_optimizer:

        def hook(optimizer):
            raise ArithmeticError("the weights are odd")

        optimizer.register_load_state_dict_post_hook(hook)
    first_state, states = everything(model, optimizer), optimizer.state
    with pytest.raises(CheckpointError, match="the weights are odd"):
        checkpoint.load(tmp_path, model, optimizer)
    assert_same(first_state, everything(model, optimizer))
    assert optimizer.state is states


def test_a_refusal_on_one_rank_puts_all_ranks_back(tmp_path):
    def run():
        model, optimizer = trained(1)
        checkpoint.save(tmp_path, data_parallel(model), optimizer, step=1)
        model, optimizer = trained(2)
        if dist.get_rank() == 1:
            refuse_in_a_hook(model)
        else:
            model.register_load_state_dict_post_hook(lambda module, keys: None)
        first_state = everything(model, optimizer)
        with pytest.raises(CheckpointError, match="the weights are odd"):
            checkpoint.load(tmp_path, model, optimizer)
        assert_same(first_state, everything(model, optimizer))

    on_ranks(run)


def test_values_that_are_nested_too_deeply_are_not_saved(tmp_path):
    value = 1
    for _ in range(60):
        value = (value,)
    with pytest.raises(CheckpointError, match="is nested more than 50 levels deep: store less"):
        checkpoint.save(tmp_path, build(1), step=1, extra=value)
    value = 1
    for level in range(50):
        value = {level: value} if level % 2 else (value,)
    checkpoint.save(tmp_path, build(1), step=1, extra=value)
    assert checkpoint.load(tmp_path, build(1)).extra == value


# The filters of warnings, by which Panther hides this one, are those of all threads.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_runs_that_save_to_one_directory_leave_each_others_folders_alone(tmp_path):
    """Threads, each as a process of one rank, save the same steps."""
    models, errors, paths = [build(seed) for seed in range(3)], [], []

    def save(model):
        try:
            paths.extend(checkpoint.save(tmp_path, model, step=step) for step in range(4))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(paths) == 12
    left = checkpoint.checkpoints(tmp_path)
    assert {path.name.partition(".")[0] for path in left} == {f"step-{step:08d}" for step in range(4)}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in left)
    for path in left:
        checkpoint.load(path, build(5))


def test_a_checkpoint_that_another_run_removes_meanwhile_is_passed_over(tmp_path, monkeypatch):
    model = build(1)
    first, other = (checkpoint.save(tmp_path, model, step=step) for step in (1, 2))
    original = folders.damage

    def damage(folder, manifest):
        if folder == first and folder.exists():  # while its files are looked at
            shutil.rmtree(folder)
            (folder / "rank-00000.safetensors").stat()
        return original(folder, manifest)

    monkeypatch.setattr(folders, "damage", damage)
    again = checkpoint.save(tmp_path, model, step=1)
    assert checkpoint.checkpoints(tmp_path) == [again, other]


def test_an_export_removes_what_a_killed_one_left(tmp_path):
    killed = tmp_path / ".export.0123456789abcdef.tmp"
    (killed / "step-00000000").mkdir(parents=True)
    killed.with_suffix(".lock").touch()
    checkpoint.export(build(1), tmp_path / "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_a_damaged_checkpoint_is_neither_removed_nor_counted(tmp_path):
    model = build(1)
    folders = [checkpoint.save(tmp_path, model, step=step) for step in (1, 2, 3)]
    (folders[0] / "rank-00000.safetensors").unlink()
    flipped = folders[2] / "rank-00000.safetensors"
    flip(flipped, -3)
    with pytest.raises(FormatError, match="does not match its checksum"):
        checkpoint.load(folders[2], model)
    again = checkpoint.save(tmp_path, model, step=3, keep=1)  # also of the same step
    assert checkpoint.checkpoints(tmp_path) == [folders[0], folders[2], again]
    flip(flipped, -3)
    checkpoint.load(folders[2], model)  # it was copied from somewhere: the note goes
    last = checkpoint.save(tmp_path, model, step=4, keep=1)
    assert checkpoint.checkpoints(tmp_path) == [folders[0], last]
