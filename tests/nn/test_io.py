import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from compressed_layers import with_stored_sketches
from safetensors.torch import load_file, save_file
from tolerances import assert_close
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import prune

import panther as pr
from panther.errors import FormatError, SketchMismatchError
from panther.nn import io
from panther.nn.io import record_checksum
from panther.nn.protocol import CompressedModule

X = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))


def dense():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.Linear(48, 64), nn.Sequential(nn.Linear(64, 3)))


def sketched():
    model = dense()
    model[0] = pr.nn.SKLinear(64, 48, 2, 2)
    model[3][0] = with_stored_sketches(pr.nn.SKLinear(64, 40, 4))
    model(X)
    return model.eval()


def unsketched():
    model = dense()
    model[3][0] = nn.Linear(64, 40)
    return model.eval()


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def folder(tmp_path):
    return pr.save_compressed(sketched(), tmp_path / "new" / "folder")


def edit(folder, change):
    path = folder / "panther.json"
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    change(manifest)
    # As somebody else could, with the right checksum.
    path.write_text(json.dumps(manifest | {"checksum": record_checksum(manifest)}))


def make_version_1(manifest):
    manifest["format_version"] = 1
    del manifest["checksums"]


@pytest.mark.parametrize("make", [unsketched, sketched])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_round_trip_is_exact(tmp_path, make, device):
    model = sketched()
    pr.save_compressed(model, tmp_path)
    with torch.device(device):
        target = make() if device == "cpu" else unsketched().to("meta")
    restored = pr.load_compressed(str(tmp_path), target)
    assert restored is target
    assert same(state(restored), state(model))
    assert torch.equal(restored(X), model(X))
    assert restored[0].seed == model[0].seed
    assert restored[3][0].is_fitted
    assert all(p.requires_grad for p in restored.parameters())


class Saved(nn.Module):
    """What tests/nn/format_version_1 holds: every class and mode, written by another process and an older Panther."""

    def __init__(self):
        super().__init__()
        self.seeded, self.packed = nn.Linear(12, 8), nn.Linear(12, 8)
        self.fitted, self.shared = nn.Linear(12, 8, bias=False), self.seeded
        self.line = nn.Conv1d(4, 6, 3, padding="same", dilation=2, bias=False)
        self.plane = nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 2), groups=2, padding_mode="circular")
        self.space = nn.Conv3d(2, 4, 2)


def test_files_of_version_1_load_as_they_were():
    folder = Path(__file__).parent / "format_version_1"
    model, expected = pr.load_compressed(folder, Saved()), load_file(folder / "expected.safetensors")
    assert model.shared is model.seeded
    assert model.packed.packed
    low_rank = {name: module for name, module in model.named_children() if hasattr(module, "rank")}
    assert {name: type(module) for name, module in low_rank.items()} == {
        "fitted": pr.nn.LowRankLinear,
        "plane": pr.nn.LowRankConv2d,
    }
    for name in ("seeded", "packed", "fitted", "line", "plane", "space"):
        assert_close(getattr(model, name)(expected[f"{name}.input"]), expected[f"{name}.output"])


class SavedLater(nn.Module):
    """What tests/nn/format_version_2 holds, written by the first version with checksums: layers of every class."""

    def __init__(self):
        super().__init__()
        self.seeded, self.packed, self.fitted = nn.Linear(12, 8), nn.Linear(12, 8), nn.Linear(12, 8, bias=False)
        self.pivots, self.codes, self.corrected = nn.Linear(12, 8), nn.Linear(12, 8), nn.Linear(12, 8)
        self.line, self.table, self.head = (
            nn.Conv1d(4, 6, 3, padding=1),
            nn.Embedding(8, 6),
            nn.Linear(6, 8, bias=False),
        )
        self.head.weight, self.shared = self.table.weight, self.seeded
        self.norm, self.plane = nn.BatchNorm1d(8), nn.Conv2d(4, 8, 3)


def test_files_of_version_2_load_as_they_were(tmp_path):
    folder = Path(__file__).parent / "format_version_2"
    expected = load_file(folder / "expected.safetensors")
    model = pr.load_compressed(folder, SavedLater().eval())
    # They can also be saved and loaded again.
    for loaded in (model, pr.load_compressed(pr.save_compressed(model, tmp_path), SavedLater().eval())):
        assert loaded.shared is loaded.seeded
        assert loaded.head.weight is loaded.table.weight
        for key in (name for name in expected if name.endswith(".input")):
            name = key.removesuffix(".input")
            assert_close(getattr(loaded, name)(expected[key]), expected[f"{name}.output"])


def symmetric_layers():
    """A layer of symmetric grids under two names, a table and a head that share codes, and one with zero points."""
    torch.manual_seed(0)
    names = ("first", "table", "head", "other", "corrected")
    first, table, head, other, corrected = (
        pr.nn.QuantizedLinear(24, 16, 4, group_size=8),
        pr.nn.QuantizedEmbedding(10, 24, bits=4, group_size=8),
        pr.nn.QuantizedLinear(24, 10, 4, group_size=8, bias=False),
        pr.nn.QuantizedLinear(24, 16, 3, group_size=8),
        pr.nn.QuantizedLinear(24, 16, None, low_rank=2),
    )
    for key in ("codes", "zeros", "scales"):
        setattr(head, key, getattr(table, key))
    other.zeros = other.zeros.index_fill(0, torch.tensor(0), 0)  # a write in place would be refused
    layers = dict(zip(names, (first, table, head, other, corrected), strict=True))
    return nn.ModuleDict(layers | {"again": first}).eval()


def unquantized():
    layers = {"first": nn.Linear(24, 16), "table": nn.Embedding(10, 24), "head": nn.Linear(24, 10, bias=False)}
    layers |= {"other": nn.Linear(24, 16), "corrected": nn.Linear(24, 16)}
    return nn.ModuleDict(layers | {"again": layers["first"]}).eval()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_zero_points_of_symmetric_grids_are_not_stored(tmp_path, device):
    model = symmetric_layers()
    pr.save_compressed(model, tmp_path)
    names = {name for name in load_file(tmp_path / "model.safetensors") if name.endswith("zeros")}
    assert names == {"other.zeros"}
    manifest = json.loads((tmp_path / "panther.json").read_text())
    assert manifest["format_version"] == 4
    marked = {name for name, spec in manifest["modules"].items() if spec.get("symmetric")}
    assert marked == {"first", "table", "head", "again"}
    loaded = pr.load_compressed(tmp_path, unquantized().to(device))
    assert same(state(loaded), state(model))
    assert loaded["again"] is loaded["first"]
    assert loaded["head"].zeros is loaded["table"].zeros
    again = pr.load_compressed(pr.save_compressed(loaded, tmp_path / "again"), unquantized())
    assert same(state(again), state(model))
    loaded["first"].zeros[0, 0] = 1  # writable, and of this layer alone
    assert loaded["first"].zeros.unique().numel() == 2


def test_files_of_version_3_with_zero_points_load_as_they_were(tmp_path, monkeypatch):
    model = symmetric_layers()
    monkeypatch.setattr(io, "_leave_out_zeros", lambda *args: None)
    pr.save_compressed(model, tmp_path)
    assert json.loads((tmp_path / "panther.json").read_text())["format_version"] == 3
    assert "first.zeros" in load_file(tmp_path / "model.safetensors")
    assert same(state(pr.load_compressed(tmp_path, unquantized())), state(model))


def test_a_model_without_symmetric_grids_is_read_by_older_versions(tmp_path):
    pr.save_compressed(sketched(), tmp_path)
    assert json.loads((tmp_path / "panther.json").read_text())["format_version"] == 3


@pytest.mark.parametrize("fits", [True, False])
def test_fitted_layers_of_version_2_become_low_rank_layers(tmp_path, fits):
    """They keep what they share: a layer under two names, and factors of two layers."""

    def make(kind):
        layers = {name: kind(nn.Linear(24, 16)) for name in ("first", "second")}
        return nn.ModuleDict(layers | {"again": layers["first"]})

    model = make(lambda linear: with_stored_sketches(pr.nn.SKLinear(24, 16, 2, 2)))
    for name in ("S1", "S2", "U1", "U2"):
        setattr(model["second"], name, getattr(model["first"], name))
    pr.save_compressed(model, tmp_path)

    def spoil(manifest):
        manifest["format_version"] = 2
        if not fits:
            manifest["modules"]["first"]["args"]["low_rank"] = 3

    edit(tmp_path, spoil)
    for target in (make(lambda linear: linear), make(lambda linear: pr.nn.SKLinear(24, 16, 2, 2))):
        if not fits:
            with pytest.raises(FormatError, match="'first' cannot be built"):
                pr.load_compressed(tmp_path, target)
            continue
        restored = pr.load_compressed(tmp_path, target)
        first, second = restored["first"], restored["second"]
        assert isinstance(first, pr.nn.LowRankLinear)
        assert first.rank == 8
        assert restored["again"] is first
        assert first.down is second.down
        assert first.up is second.up
        x = torch.randn(3, 24)
        assert_close(first(x), model["first"](x))
        assert_close(second(x), model["second"](x))


def test_seeded_sketches_cost_their_seed(tmp_path):
    layer = pr.nn.SKLinear(8192, 8192, num_terms=1, low_rank=16)
    pr.save_compressed(nn.Sequential(layer), tmp_path)
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert 1_081_344 + 32 < size < 1_081_344 + 2048


def test_the_model_may_be_the_layer(tmp_path):
    layer = pr.nn.SKLinear(64, 48, 4)
    pr.save_compressed(layer, tmp_path)
    restored = pr.load_compressed(tmp_path, nn.Linear(64, 48))
    assert torch.equal(restored(X), layer(X))


def test_a_model_without_sketches(tmp_path):
    model = dense().eval()
    pr.save_compressed(model, tmp_path)
    other = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.Linear(48, 64), nn.Sequential(nn.Linear(64, 3)))
    assert torch.equal(pr.load_compressed(tmp_path, other.eval())(X), model(X))


def test_shared_tensors_and_layers_are_stored_once_and_shared_again(tmp_path):
    class Tied(nn.Module):
        def __init__(self, sketched):
            super().__init__()
            make = (lambda: pr.nn.SKLinear(64, 64, 2)) if sketched else (lambda: nn.Linear(64, 64))
            self.embedding, self.head = nn.Embedding(10, 64), nn.Linear(64, 10, bias=False)
            self.head.weight = self.embedding.weight
            self.a, self.c = make(), make()
            self.b = self.a
            if sketched:
                self.c.S1 = self.a.S1

        def forward(self, x):
            return self.head(self.c(self.b(self.a(self.embedding(x)))))

    model, x = Tied(True), torch.arange(10)
    pr.save_compressed(model, tmp_path)
    manifest = json.loads((tmp_path / "panther.json").read_text())
    assert manifest["aliases"]["head.weight"] == "embedding.weight"
    assert manifest["aliases"]["c.S1"] == "a.S1"
    assert manifest["modules"]["b"] == {"alias_of": "a"}
    restored = pr.load_compressed(tmp_path, Tied(False))
    assert torch.equal(restored(x), model(x))
    assert restored.a is restored.b
    assert restored.c.S1 is restored.a.S1
    assert restored.head.weight is restored.embedding.weight
    assert len(list(restored.parameters())) == len(list(model.parameters()))


def test_views_of_one_storage_are_kept_apart(tmp_path):
    model = nn.Module()
    whole = torch.arange(6.0)
    model.register_buffer("a", whole[:4])
    model.register_buffer("b", whole[2:])
    model.register_buffer("c", whole.view(2, 3).T)
    pr.save_compressed(model, tmp_path)
    other = nn.Module()
    for name, shape in {"a": 4, "b": 4, "c": (3, 2)}.items():
        other.register_buffer(name, torch.zeros(shape))
    assert same(state(pr.load_compressed(tmp_path, other)), state(model))


def test_saving_again_replaces_and_leaves_nothing_beside(folder):
    model = sketched()
    pr.save_compressed(model, folder)
    assert same(state(pr.load_compressed(folder, unsketched())), state(model))
    assert sorted(file.name for file in folder.iterdir()) == ["model.safetensors", "panther.json"]


@pytest.mark.skipif(os.name == "nt", reason="links and FIFOs of POSIX")
@pytest.mark.parametrize("name", ["model.safetensors", "panther.json"])
def test_only_regular_files_are_replaced_and_loaded(folder, tmp_path, name):
    victim = tmp_path / "victim"
    (folder / name).rename(victim)
    (folder / name).symlink_to(victim)
    pr.load_compressed(folder, unsketched())  # as from the cache of the Hugging Face hub, which consists of links
    before = victim.read_bytes()
    with pytest.raises(OSError, match=f"{name} is a link, and only regular files are replaced"):
        pr.save_compressed(sketched(), folder)
    assert victim.read_bytes() == before
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(FormatError, match=f"{name} .*is a FIFO, and only regular files are read"):
        pr.load_compressed(folder, unsketched())
    with pytest.raises(OSError, match=f"{name} is a FIFO, and only regular files are replaced"):
        pr.save_compressed(sketched(), folder)
    assert len(list(folder.iterdir())) == 2


def test_a_failing_save_leaves_the_old_one(folder):
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with torch.device("meta"):
        broken = pr.nn.SKLinear(64, 48, 4)
    with pytest.raises(FormatError, match="'S1' is on the meta device"):
        pr.save_compressed(broken, folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_only_tensors_and_known_layers_are_saved(tmp_path):
    class Extra(nn.Module):
        def get_extra_state(self):
            return "text"

    class Custom(pr.nn.SKLinear):
        pass

    with pytest.raises(FormatError, match="'_extra_state' is a str: only tensors"):
        pr.save_compressed(Extra(), tmp_path)
    with pytest.raises(
        FormatError, match=r"module '0' is a Custom, which the format does not know: it knows .*SKLinear"
    ):
        pr.save_compressed(nn.Sequential(Custom(64, 48, 2)), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kind", [{}, [], None, 3])
def test_classes_that_are_not_names_in_early_versions(tmp_path, version, kind):
    pr.save_compressed(nn.Sequential(pr.nn.SKLinear(24, 16, 2, 2)), tmp_path)

    def spoil(manifest):
        manifest["format_version"] = version
        manifest["modules"]["0"]["class"] = kind

    edit(tmp_path, spoil)
    with pytest.raises(FormatError, match="which is not allowed"):
        pr.load_compressed(tmp_path, nn.Sequential(nn.Linear(24, 16)))


REFUSALS = {
    "another format": (lambda m: m.update(format="other"), "was not written by pr.save_compressed"),
    "a later version": (lambda m: m.update(format_version=5), "format_version 5 and this Panther reads 1 to 4"),
    "a version that is no number": (lambda m: m.update(format_version="2"), "format_version '2' and this Panther"),
    "no version": (lambda m: m.pop("format_version"), "format_version None and this Panther"),
    "no checksums": (lambda m: m.pop("checksums"), "'checksums' must map names to numbers"),
    "a tensor without a checksum": (
        lambda m: m["checksums"].pop("0.S1"),
        r"model.safetensors and panther.json in its folder name different tensors \(0.S1\)",
    ),
    "another checksum": (lambda m: m["checksums"].update({"0.S1": 1}), r"tensor '0.S1' in .* \(\d+ instead of 1\)"),
    "a path outside": (lambda m: m.update(weights="../model.safetensors"), "write a plain name"),
    "an absolute path": (lambda m: m.update(weights="/etc/passwd"), "write a plain name"),
    "a windows path": (lambda m: m.update(weights="..\\model.safetensors"), "write a plain name"),
    "the folder": (lambda m: m.update(weights=".."), "write a plain name"),
    "no name": (lambda m: m.update(weights=None), "write a plain name"),
    "weights elsewhere": (lambda m: m.update(weights="missing.safetensors"), "missing.safetensors is missing"),
    "weights that are not": (lambda m: m.update(weights="panther.json"), "not a valid safetensors file"),
    "a foreign class": (lambda m: m["modules"]["0"].update({"class": "os.system"}), "class 'os.system', which is not"),
    "foreign arguments": (
        lambda m: m["modules"]["0"]["args"].update(weight_init=1),
        "SKLinear is built from in_features",
    ),
    "text for a number": (lambda m: m["modules"]["0"]["args"].update(low_rank="2"), "SKLinear is built from"),
    "a huge rank": (lambda m: m["modules"]["0"]["args"].update(low_rank=10**13), "SKLinear is built from"),
    "large sizes": (
        lambda m: m["modules"]["0"]["args"].update(in_features=10**9),
        "saved for a Linear with .*1000000000",
    ),
    "another rank": (lambda m: m["modules"]["0"]["args"].update(low_rank=3), "cannot be built.*size mismatch"),
    "no bias": (
        lambda m: m["modules"]["0"]["args"].update(bias=False),
        "with .'bias': False., and the model has a Linear there, with .'bias': True.",
    ),
    "a list for a class": (lambda m: m["modules"]["0"].update({"class": ["a"]}), "class .'a'., which is not allowed"),
    "a list for an alias": (lambda m: m["modules"].update({"1": {"alias_of": ["0"]}}), "alias of .'0'., which is not"),
    "an alias with its own weights": (lambda m: m["modules"].update({"2": {"alias_of": "0"}}), "their weights differ"),
    "a negative size": (lambda m: m["modules"]["0"]["args"].update(low_rank=-2), "low_rank=-2 must be at least 1"),
    "another dtype": (lambda m: m["modules"]["0"].update(dtype="float64"), "should be sparse, torch.float64"),
    "no dtype": (lambda m: m["modules"]["0"].update(dtype="nn"), "dtype 'nn': it must name a torch dtype"),
    "another mode": (lambda m: m["modules"]["0"].update(mode="fitted"), "should be fitted"),
    "a module that is not": (
        lambda m: m["modules"].update(x=m["modules"].pop("0")),
        "the model has no module of this name",
    ),
    "modules of another kind": (lambda m: m.update(modules=[1]), "'modules' must map"),
    "aliases of another kind": (lambda m: m.update(aliases={"a": 1}), "'aliases' must map"),
    "an alias to nothing": (lambda m: m.update(aliases={"a": "zz"}), "makes 'a' an alias of 'zz'"),
    "a module alias to nothing": (lambda m: m["modules"].update({"1": {"alias_of": "zz"}}), "alias of 'zz'"),
    "a module left out": (lambda m: m["modules"].pop("0"), "does not fit the model: missing 0.weight; unexpected 0.S1"),
    "a module too many": (
        lambda m: m["modules"].update({"2": m["modules"]["0"]}),
        "saved for a Linear with .'in_features': 64, 'out_features': 48., and the model has a Linear there, with .*48",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_spoilt_manifest_is_refused_and_the_model_left_alone(folder, name):
    change, message = REFUSALS[name]
    edit(folder, change)
    model = unsketched()
    before, modules = state(model), list(model.modules())
    with pytest.raises(FormatError, match=message) as caught:
        pr.load_compressed(folder, model)
    assert "\n" not in str(caught.value)
    assert same(state(model), before)
    assert list(model.modules()) == modules


@pytest.mark.parametrize("file", ["model.safetensors", "panther.json"])
@pytest.mark.parametrize("content", [None, b"", b"[" * 100_000, b"PK\x03\x04 zip", b"\xff" * 100, "half"])
def test_missing_foreign_and_truncated_files(folder, file, content):
    path = folder / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content == "half" else content)
    model = unsketched()
    before = state(model)
    with pytest.raises(FormatError, match=f"{file} (is missing|cannot be read|is not a valid)"):
        pr.load_compressed(folder, model)
    assert same(state(model), before)


def spoil(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["0.bias", "1.num_batches_tracked", "3.0.U1"])
def test_a_flipped_bit_is_refused_by_the_name_of_its_tensor(folder, name):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    begin, end = json.loads(content[8 : 8 + length])[name]["data_offsets"]
    spoil(path, 8 + length + (begin + end) // 2)
    model = unsketched()
    before = state(model)
    with pytest.raises(FormatError, match=f"tensor '{name}' in .*model.safetensors does not match its checksum"):
        pr.load_compressed(folder, model)
    assert same(state(model), before)
    edit(folder, make_version_1)  # which has no checksums, and is loaded as it is
    assert not same(state(pr.load_compressed(folder, model)), state(sketched()))


def test_a_tensor_of_another_dtype_or_shape_is_refused(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for other in (tensors["2.bias"].view(torch.int32), tensors["2.bias"].view(32, 2)):
        save_file(tensors | {"2.bias": other}, path)
        with pytest.raises(FormatError, match=r"tensor '2.bias' in .* does not match its checksum"):
            pr.load_compressed(folder, unsketched())


def test_an_edited_manifest_is_refused(folder):
    path = folder / "panther.json"
    text = path.read_text()
    path.write_text(json.dumps(json.loads(text)))  # the layout is free
    pr.load_compressed(folder, unsketched())
    path.write_text(text.replace('"low_rank": 2', '"low_rank": 3'))
    with pytest.raises(FormatError, match=r"panther.json does not match its checksum: the save is damaged"):
        pr.load_compressed(folder, unsketched())


def test_files_of_two_saves_are_refused(folder, tmp_path):
    model = sketched()
    nn.init.zeros_(model[2].bias)
    other = pr.save_compressed(model, tmp_path / "other")
    (other / "model.safetensors").replace(folder / "model.safetensors")
    with pytest.raises(FormatError, match=r"tensor '2.bias' in .* does not match its checksum"):
        pr.load_compressed(folder, unsketched())


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.float8_e4m3fn, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 3)])
def test_tensors_of_every_dtype_and_shape_have_checksums(tmp_path, dtype, shape):
    model = dense()
    model.register_buffer("more", torch.ones(shape).to(dtype))
    pr.save_compressed(model, tmp_path)
    other = dense()
    other.register_buffer("more", torch.zeros(shape).to(dtype))
    assert pr.load_compressed(tmp_path, other).more.tolist() == model.more.tolist()


def test_a_damaged_seed_is_refused(tmp_path):
    model = sketched()
    record = model[0].sketch_seed
    damaged = record.clone()
    damaged[0] ^= 1
    pr.save_compressed(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "0.sketch_seed": damaged}, tmp_path / "model.safetensors")
    edit(tmp_path, make_version_1)
    target = unsketched()
    before = state(target)
    with pytest.raises(SketchMismatchError, match="does not match its checksum"):
        pr.load_compressed(tmp_path, target)
    assert same(state(target), before)


def test_another_architecture_is_refused_and_left_alone(folder):
    model = unsketched()
    model[2] = nn.Linear(48, 63)
    before = state(model)
    with pytest.raises(
        FormatError, match=r"different shape or dtype 2.bias \(64,\), torch.float32 for \(63,\), .*, 2.weight"
    ):
        pr.load_compressed(folder, model)
    assert same(state(model), before)


@pytest.mark.parametrize("old", [nn.Linear(7, 9), nn.ReLU(), nn.Linear(64, 48, bias=False), nn.Conv1d(64, 48, 1)])
def test_only_what_was_saved_is_replaced(folder, old):
    model = unsketched()
    model[0] = old
    with pytest.raises(FormatError, match=f"module '0' was saved for a Linear with .* a {type(old).__name__} there"):
        pr.load_compressed(folder, model)
    assert model[0] is old


def test_a_transposed_weight_as_of_conv1d_in_transformers_fits(folder):
    class Conv1D(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.zeros(64, 48)), nn.Parameter(torch.zeros(48))

    model = unsketched()
    model[0] = Conv1D()
    assert isinstance(pr.load_compressed(folder, model)[0], pr.nn.SKLinear)


def test_integers_for_weights_are_refused_before_anything_is_replaced(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["2.weight"] = tensors["2.weight"].int()
    save_file(tensors, folder / "model.safetensors")
    edit(folder, make_version_1)
    model = unsketched()
    modules = list(model.modules())
    with pytest.raises(FormatError, match=r"2.weight \(64, 48\), torch.int32 for \(64, 48\), torch.float32"):
        pr.load_compressed(folder, model)
    assert list(model.modules()) == modules


def test_what_was_frozen_stays_frozen(folder):
    model = unsketched().requires_grad_(False)
    assert not any(p.requires_grad for p in pr.load_compressed(folder, model).parameters())
    model = sketched()
    model[0].S2.requires_grad_(False)
    model[3][0].U1.requires_grad_(False)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    restored = pr.load_compressed(folder, model)
    assert {name: p.requires_grad for name, p in restored.named_parameters()} == flags


def test_conjugates_are_no_aliases(tmp_path):
    model, other = nn.Module(), nn.Module()
    z = torch.tensor([1 + 2j, 3 + 4j])
    for name, value in {"z": z, "w": z.conj()}.items():
        model.register_buffer(name, value)
        other.register_buffer(name, torch.zeros(2, dtype=torch.complex64))
    pr.save_compressed(model, tmp_path)
    assert torch.equal(pr.load_compressed(tmp_path, other).w, z.conj().resolve_conj())


def test_wrappers_are_left_out(tmp_path):
    model = sketched()
    pr.save_compressed(torch.compile(model, backend="eager"), tmp_path)
    wrapped = torch.compile(unsketched(), backend="eager")
    restored = pr.load_compressed(tmp_path, wrapped)
    assert torch.equal(restored(X), model(X))
    torch.testing.assert_close(wrapped(X), model(X))  # torch.compile of torch 2.11 decomposes a product and its sum


def compiled_and_checkpointed(layers):
    """Return the layers with each kind of wrapper inside of the model, around a block and around a single layer."""
    compiled = partial(torch.compile, backend="eager")
    return nn.Sequential(
        compiled(layers[0]), checkpoint_wrapper(compiled(nn.Sequential(layers[1]))), checkpoint_wrapper(layers[2])
    )


def test_wrappers_inside_of_a_model_are_left_out(tmp_path):
    def layers(dense):
        torch.manual_seed(0)
        last = nn.Linear(32, 16) if dense else pr.nn.QuantizedLinear(32, 16, 8)
        return [nn.Linear(64, 48) if dense else pr.nn.SKLinear(64, 48, 2, seed=1), nn.Linear(48, 32), last]

    first, second, third = layers(False)
    model, fresh = nn.Sequential(first, nn.Sequential(second), third), compiled_and_checkpointed(layers(True))
    wrappers = [*fresh]
    pr.save_compressed(compiled_and_checkpointed([first, second, third]), tmp_path / "wrapped")
    pr.save_compressed(model, tmp_path / "plain")
    records = [(tmp_path / name / "panther.json").read_text() for name in ("wrapped", "plain")]
    assert records[0] == records[1]
    pr.load_compressed(tmp_path / "wrapped", fresh)
    assert [*fresh] == wrappers
    x = torch.randn(3, 64)
    with torch.no_grad():
        torch.testing.assert_close(fresh(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_refused_folder_leaves_the_wrappers(tmp_path):
    pr.save_compressed(sketched(), tmp_path)
    fresh = nn.Sequential(torch.compile(nn.Linear(3, 3), backend="eager"))
    wrapper, layer = fresh[0], fresh[0]._orig_mod
    with pytest.raises(FormatError):
        pr.load_compressed(tmp_path, fresh)
    assert fresh[0] is wrapper
    assert wrapper._orig_mod is layer


def test_both_files_can_be_read_by_whom_the_umask_allows(folder):
    modes = {file.stat().st_mode & 0o777 for file in folder.iterdir()}
    assert len(modes) == 1


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    mixed = pr.nn.SKLinear(64, 48, 2)
    mixed.bias.data = mixed.bias.data.double()
    with pytest.raises(FormatError, match=r"mixes torch.float32, torch.float64: cast it to one dtype"):
        pr.save_compressed(mixed, tmp_path)
    sparse = nn.Module()
    sparse.register_buffer("s", torch.eye(3).to_sparse())
    with pytest.raises(FormatError, match=r"'s' has layout torch.sparse_coo: only dense tensors"):
        pr.save_compressed(sparse, tmp_path)
    with pytest.raises(FormatError, match=r"differs by .*S1_mask: remove the parametrization or pruning"):
        pr.save_compressed(nn.Sequential(prune.l1_unstructured(pr.nn.SKLinear(64, 48, 2), "S1", 0.5)), tmp_path)
    broken = pr.nn.SKLinear(64, 48, 2)
    broken.U1.zero_()
    broken.sketch_seed.zero_()
    with pytest.raises(SketchMismatchError, match="does not match its checksum"):
        pr.save_compressed(broken, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_arguments_in_the_wrong_order(folder):
    model = unsketched()
    with pytest.raises(TypeError, match="save_compressed takes a model and a folder, in this order, not a PosixPath"):
        pr.save_compressed(folder, model)
    with pytest.raises(TypeError, match="load_compressed takes a folder and a model, in this order, not a PosixPath"):
        pr.load_compressed(model, folder)
    with pytest.raises(FormatError, match=r"panther\.json is a file: give the folder"):
        pr.load_compressed(folder / "panther.json", model)


def test_a_meta_model_with_unsaved_buffers_is_refused_and_left_as_it_is(tmp_path):
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.arange(4.0), persistent=False)
            self.linear = nn.Linear(64, 64)

    model = Positions()
    model.linear = pr.nn.SKLinear(64, 64, 1)
    pr.save_compressed(model, tmp_path)
    with torch.device("meta"):
        empty = Positions()
    with pytest.raises(FormatError, match=r"non-persistent buffers table: build it on the CPU"):
        pr.load_compressed(tmp_path, empty)
    assert type(empty.linear) is nn.Linear
    loaded = pr.load_compressed(tmp_path, Positions())
    assert torch.equal(loaded.table, torch.arange(4.0))


def test_weights_that_get_their_name_while_they_are_read_are_found(tmp_path, monkeypatch):
    """The writer renames them after its commit, here between the choice of the path and the opening of the file."""
    model = nn.Sequential(pr.nn.SKLinear(32, 16, 2))
    pr.save_compressed(model, tmp_path)
    paths = [tmp_path / ".model.safetensors.00000000.new"]
    find = io.weights_path
    monkeypatch.setattr(io, "weights_path", lambda *args: paths.pop() if paths else find(*args))
    restored = pr.load_compressed(tmp_path, nn.Sequential(nn.Linear(32, 16)))
    assert torch.equal(restored[0].S1, model[0].S1)
    assert not paths


def quantized_conv_and_linears(make_quantized):
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 20), nn.ReLU(), nn.Linear(20, 20), nn.Linear(20, 7)
    )
    if make_quantized:
        model[0] = pr.nn.QuantizedConv2d.from_conv(model[0], bits=6)
        model[2] = pr.nn.QuantizedLinear.from_linear(model[2], bits=5, group_size=7, low_rank=2)
        model[4] = pr.nn.InterpolativeLinear(20, 20, 3)
        model[5] = pr.nn.QuantizedLinear.from_linear(model[5], bits=None, low_rank=2)
    return model.eval()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_are_expanded_once_on_demand(tmp_path, device):
    saved, x = quantized_conv_and_linears(True), torch.randn(3, 3, 5, 5)
    pr.save_compressed(saved, tmp_path)
    with torch.device(device):
        model = quantized_conv_and_linears(False)
    restored = pr.load_compressed(tmp_path, model, expand=True)
    assert restored is model
    assert [type(restored[k]).__name__ for k in (0, 2, 4, 5)] == ["Conv2d", "Linear", "LinearPair", "LinearPair"]
    assert_close(restored(x), saved(x))
    assert not any(isinstance(module, CompressedModule) for module in restored.modules())
    assert [name for name, _ in restored.named_parameters() if name.startswith("2.")] == ["2.weight", "2.bias"]
    layer = pr.nn.QuantizedLinear(8, 6, dtype=torch.float16)
    folder = pr.save_compressed(layer, tmp_path / "layer")
    expanded = pr.load_compressed(folder, nn.Linear(8, 6), expand=True)
    assert type(expanded) is nn.Linear
    assert torch.equal(expanded.weight, layer.weight)
    with pytest.raises(TypeError, match=r"expand must be True or False"):
        pr.load_compressed(folder, nn.Linear(8, 6), expand=1)


class Refusing(nn.Linear):
    """A layer with a load method and a state of its own, which raises an error at one of several places."""

    error: BaseException | None = None
    place = ""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.table, self.history = {"loads": 0}, []

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.reach("load method")
        with torch.no_grad():
            self.weight.zero_()
        self.bias.data = torch.ones(3)
        self.table["loads"] += 1
        self.history.append(prefix)
        self.register_buffer("more", torch.zeros(2), persistent=False)
        self.reach("written in place")
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.reach("loaded")

    def get_extra_state(self):
        return torch.tensor(len(self.history))

    def set_extra_state(self, value):
        self.history = [""] * int(value)
        self.reach("extra state")

    def reach(self, place):
        if Refusing.error is not None and place == Refusing.place:
            raise Refusing.error


def objects_of(model):
    """Return all objects that a load may replace, the contents of attributes, and the values of tensors."""
    tensors = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    modules = dict(model.named_modules(remove_duplicate=False))
    contents = {name: (dict(m.table), [*m.history]) for name, m in modules.items() if isinstance(m, Refusing)}
    keys = {name: [*vars(module)] for name, module in modules.items()}
    return (
        {n: id(x) for n, x in {**tensors, **modules}.items()},
        contents,
        keys,
        {n: x.clone() for n, x in tensors.items()},
    )


PLACES = ["load method", "written in place", "loaded", "extra state", "hook of a module", "hook of the model", "expand"]


@pytest.mark.parametrize("error", [RuntimeError("refused"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("place", PLACES)
def test_a_load_that_fails_leaves_the_model_as_it_was(tmp_path, monkeypatch, place, error):
    """People expect this although a module, a hook or Ctrl-C ends a load after some layers were replaced."""

    def architecture(kind):
        torch.manual_seed(0)
        table, block = nn.Embedding(10, 8), checkpoint_wrapper(nn.Sequential(kind(8, 8), nn.BatchNorm1d(8)))
        model = nn.Sequential(kind(8, 8), block, Refusing(8, 3), table, nn.Linear(8, 10, bias=False), nn.Identity())
        model[4].weight, model[5] = table.weight, model[0]
        return model.eval()

    folder = pr.save_compressed(architecture(lambda *sizes: pr.nn.SKLinear(*sizes, 1)), tmp_path)
    model = architecture(nn.Linear)
    ids, contents, keys, values = objects_of(model)

    def refuse(*args):
        raise error

    if place == "expand":
        monkeypatch.setattr(io, "expanded", refuse)
    elif place == "hook of a module":
        model[3].register_load_state_dict_post_hook(refuse)
    elif place == "hook of the model":
        model.register_load_state_dict_post_hook(refuse)
    monkeypatch.setattr(Refusing, "error", error)
    monkeypatch.setattr(Refusing, "place", place)
    with pytest.raises(type(error)):
        pr.load_compressed(folder, model, expand=place == "expand")
    after = objects_of(model)
    assert after[:3] == (ids, contents, keys)
    assert same(after[3], values)
    monkeypatch.undo()
    if place not in ("hook of a module", "hook of the model"):
        loaded = pr.load_compressed(folder, model)
        assert type(loaded[0]) is pr.nn.SKLinear
        assert loaded[4].weight is loaded[3].weight
