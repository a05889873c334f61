"""No rank ever holds the whole model: measured peaks of all ways to start one, beside the predicted ones."""

import functools
import shutil
import sys
from dataclasses import replace
from typing import NamedTuple

import pytest
import starting
import torch
from measuring import rise_of
from ranks import on_ranks
from safetensors.torch import save_file

import panther as pr
from panther.distributed import ClusterSpec, ModelStats, checkpoint, launch
from panther.distributed.advisor.cost import Layout, estimate

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read and limited as Linux does"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),  # of dcp.save on one process
]

LAYOUTS = {
    "fsdp": Layout(dp=starting.WORLD, strategy="fsdp"),
    "tp": Layout(tp=starting.WORLD),
    "pp": Layout(pp=starting.WORLD, schedule="1f1b", num_microbatches=starting.WORLD),
    "hybrid": Layout(dp=2, tp=2, strategy="fsdp"),
    "trainer": Layout(dp=starting.WORLD, strategy="fsdp"),
}
# Each format is read by the same code under every layout: FSDP reads all, and each remaining layout reads two.
FORMATS = {
    "fsdp": ("one file", "four files", "checkpoint", "dcp", "inference"),
    "tp": ("checkpoint", "four files"),
    "pp": ("checkpoint", "dcp"),
    "hybrid": ("checkpoint", "inference"),
    "trainer": ("checkpoint", "one file"),
}
MEGABYTE = 10**6


def predicted(kind, layout):
    """Bytes at the start with values and on the meta device, and those of the whole model."""
    model = starting.on_meta(starting.MODELS[kind])
    stats = ModelStats.of(model, torch.ones(4, model[0].in_features))
    cluster = ClusterSpec.preset("cpu", starting.WORLD)
    full, on_meta = (
        estimate(replace(stats, has_values=has_values), cluster, LAYOUTS[layout], 16).start
        for has_values in (True, False)
    )
    return full, on_meta


class SavedModel(NamedTuple):
    """A model in folders of all kinds, and the mean of each of its parameters."""

    folders: dict[str, str]
    means: dict[str, float]


def save_model(kind, folder):
    """Save a model in folders of all kinds; each tensor of a dense one has the number of its layer."""
    model = starting.MODELS[kind]()
    for i, layer in enumerate(model):
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data.fill_(float(i))
    means = {
        name: float(name.partition(".")[0] if kind == "dense" else parameter.detach().mean())
        for name, parameter in model.named_parameters()
    }
    state = model.state_dict()
    for name in ("one file", "four files"):
        (folder / name).mkdir()
    save_file(state, folder / "one file" / "model.safetensors")
    for i in range(4):
        shard_names = sorted(state)[i::4]
        save_file({name: state[name] for name in shard_names}, folder / "four files" / f"{i}.safetensors")
    checkpoint.save(folder / "checkpoint", model, step=1)
    torch.distributed.checkpoint.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    pr.save_compressed(model, folder / "inference")
    names = ("one file", "four files", "checkpoint", "dcp", "inference")
    return SavedModel({name: str(folder / name) for name in names}, means)


@pytest.fixture(scope="module")
def saved_models(tmp_path_factory):
    """Save each kind of model once for all layouts, and remove the files of 1.5 GB at the end."""
    folder = tmp_path_factory.mktemp("saved-models")

    @functools.cache
    def saved_model(kind):
        (folder / kind).mkdir()
        return save_model(kind, folder / kind)

    yield saved_model
    shutil.rmtree(folder)


def check(kind, layout, saved_model, with_values=False):
    full, on_meta = predicted(kind, layout)
    table = {}
    folders = {name: saved_model.folders[name] for name in FORMATS[layout]}
    arguments = (layout, kind, folders, with_values)
    for rises, means in launch(starting.peaks, *arguments, nproc=starting.WORLD):
        for way, rise in rises.items():
            table.setdefault(way, []).append(rise)
        assert means.keys() == {f"read from {name}" for name in folders}
        for means_of_way in means.values():
            assert len(means_of_way) == len(saved_model.means) // (starting.WORLD if layout == "pp" else 1)
            for name, mean in means_of_way.items():
                assert mean == pytest.approx(saved_model.means[name], rel=1e-3, abs=1e-6)
    shown = {way: [round(rise / MEGABYTE) for rise in rises] for way, rises in table.items()}
    shown = f"{shown} of {full / MEGABYTE:.0f}, {on_meta / MEGABYTE:.0f} predicted"
    print(kind, layout, shown)
    # Signs are packed from numbers, which take some megabytes.
    margin = {"abs": 16 * MEGABYTE} if kind == "packed" else {"rel": 0.1}
    for way, rises in table.items():
        for rise in rises:
            assert rise == pytest.approx(full if way == "with values" else on_meta, **margin), shown
    return full, on_meta


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_of_a_dense_model_holds_its_shards_and_one_module(layout, saved_models):
    full, on_meta = check("dense", layout, saved_models("dense"), with_values=layout in ("fsdp", "tp", "pp"))
    assert full == pytest.approx(302 * MEGABYTE, abs=MEGABYTE)
    assert on_meta < 0.29 * full


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), [("sketched", name) for name in LAYOUTS] + [("packed", "fsdp")])
def test_a_rank_of_a_sketched_model_holds_whole_sketches_only_where_they_are_replicated(kind, layout, saved_models):
    full, on_meta = check(kind, layout, saved_models(kind))
    # Of 151 MB of factors and, unless they are packed, as many of sketches: FSDP replicates sketches, and tensor
    # parallelism S1 and U2 of one layer of a pair, S2 and U1 of the other.
    share = {"fsdp": 0.65, "trainer": 0.65, "tp": 0.65, "hybrid": 0.65, "pp": 0.3}[layout]
    assert on_meta < (0.31 if kind == "packed" else share) * full


@pytest.mark.slow
def test_an_export_holds_one_tensor_beside_the_shards(tmp_path):
    tensor = 4 * 1536**2
    for saved, exported, consolidated in launch(starting.export_peaks, tmp_path, nproc=starting.WORLD):
        assert saved < tensor
        assert exported < 2 * tensor
        assert consolidated is None or consolidated < 2 * tensor
    exported, consolidated = (
        pr.load_compressed(tmp_path / name, starting.dense()).state_dict() for name in ("exported", "consolidated")
    )
    assert all(torch.equal(tensor, exported[name]) for name, tensor in consolidated.items())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp", "hybrid", "trainer"])
def test_two_gigabytes_start_in_processes_of_one(layout):
    """The hybrid layout is FSDP of tensor parallelism, and the trainer's is FSDP."""
    for local_bytes, has_values, refused in launch(starting.start_within_limit, layout, nproc=starting.WORLD):
        assert local_bytes == starting.GIBIBYTE / 2
        assert has_values
        assert "can't allocate memory" in refused


def test_two_ranks_hold_half_each(tmp_path):
    """The case that runs everywhere; the grid above is of larger models."""
    sizes = 16, 512  # 16.8 MB
    model = starting.dense(*sizes)
    checkpoint.save(tmp_path, model, step=1)

    def run():
        starting.started("fsdp", lambda: starting.dense(2, 8), None)
        rises = []
        for folder in (None, tmp_path):
            rise, parts = rise_of(
                lambda folder=folder: starting.started("fsdp", lambda: starting.dense(*sizes), folder)
            )
            rises.append(rise)
            del parts
        return rises

    whole = 4 * sizes[0] * sizes[1] ** 2
    for drawn, read in on_ranks(run, 2):
        assert drawn < 0.75 * whole
        assert read < 0.8 * whole  # 4 MB are checked at a time
