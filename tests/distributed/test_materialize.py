"""Models without values: sharded first, then filled, each rank with what it holds."""

import os
import random
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import on_ranks, weights_of
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

import panther as pr
from panther.distributed import checkpoint, data_parallel, make_mesh, materialize_
from panther.errors import CheckpointError, FormatError
from panther.files.tensors import stored_tensors
from panther.nn import RandMultiHeadAttention, SKConv1d, SKLinear, sinSRPE
from panther.nn.io import inference_manifest

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),  # of dcp.save on one process
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(23, 18)
        self.blocks = nn.ModuleList(
            nn.Sequential(SKLinear(18, 30, 2), nn.ReLU(), nn.Linear(30, 18), nn.LayerNorm(18)) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(18)
        self.head = nn.Linear(18, 23, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def empty():
    with torch.device("meta"):
        model = Net()
    model.head.weight = model.embedding.weight
    return model


TOKENS = torch.arange(12) % 23


def sharded(weights=None, mesh=None, seed=5):
    model = data_parallel(empty, mesh, strategy="fsdp")
    assert all(parameter.is_meta for parameter in model.parameters())
    materialize_(model, weights, seed=seed)
    local_count = sum(parameter.to_local().numel() for parameter in model.parameters())
    with torch.no_grad():
        output = model.eval()(TOKENS)
    return output, weights_of(model), local_count, sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("world", "replicas"), [(2, 1), (3, 1), (4, 2)])
def test_seeded_values_are_those_of_one_process(world, replicas):
    one = materialize_(empty(), seed=5).eval()
    with torch.no_grad():
        expected = one(TOKENS)

    def run():
        return sharded(mesh=make_mesh(replicate=replicas, dp=world // replicas) if replicas > 1 else None)

    for output, weights, local_count, whole in on_ranks(run, world):
        torch.testing.assert_close(output, expected)
        for name, parameter in one.named_parameters():
            assert torch.equal(weights[name], parameter), name
        assert local_count < 1.25 * whole * replicas / world


class Drawing(nn.Sequential):
    """Everything with a seed; the last layer's is chosen."""

    def __init__(self):
        attention = RandMultiHeadAttention(8, 2, num_random_features=40, SRPE=sinSRPE(2, 4, 2, 8))
        super().__init__(SKLinear(8, 8, 2), SKConv1d(8, 8, 3, sketch_size=2), attention, SKLinear(8, 8, 2, seed=11))


def test_a_seed_decides_everything_that_nobody_chose():
    def drawn(seed, caller):
        torch.manual_seed(caller)
        random.seed(caller)
        random_states = torch.get_rng_state(), random.getstate()
        with torch.device("meta"):
            model = Drawing()
        between = torch.get_rng_state()
        materialize_(model, seed=seed)
        assert torch.equal(torch.get_rng_state(), between)
        assert random.getstate() == random_states[1]
        seeds = [module.seed for module in model.modules() if hasattr(module, "seed")]
        return seeds, {**dict(model.named_parameters()), **dict(model.named_buffers())}

    seeds, tensors = drawn(1, caller=2)
    again, same = drawn(1, caller=3)
    assert seeds == again
    assert all(torch.equal(tensor, same[name]) for name, tensor in tensors.items())
    others, different = drawn(2, caller=2)
    assert len({*seeds, *others}) == 2 * len(seeds) - 1
    assert seeds[-1] == others[-1] == 11
    drawn_anew = {name for name, tensor in tensors.items() if not torch.equal(tensor, different[name])}
    assert {"0.S1", "0.U1_signs", "1.S", "1.U", "2.Wq", "2.directions", "2.SRPE.noise", "3.S1"} <= drawn_anew
    assert torch.equal(tensors["3.U1_signs"], different["3.U1_signs"])


def test_activation_checkpointing_changes_no_value():
    def model():
        with torch.device("meta"):
            return nn.Sequential(SKLinear(8, 6, 2), nn.Linear(6, 3))

    plain, wrapped = model(), model()
    apply_activation_checkpointing(wrapped, check_fn=lambda module: isinstance(module, SKLinear | nn.Linear))
    expected = materialize_(plain, seed=4).state_dict()
    found = materialize_(wrapped, seed=4).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def saved(folder, kind):
    model = materialize_(empty(), seed=8)
    with torch.no_grad():
        model.norm.running_mean.uniform_()
    if kind == "panther":
        pr.save_compressed(model, folder)
    elif kind == "dcp":
        dcp.save(model.state_dict(), checkpoint_id=folder, no_dist=True)
    else:
        folder.mkdir()
        state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "head.weight"}
        names = sorted(state)
        parts = [names] if kind == "file" else [names[::2], names[1::2]]
        for index, part in enumerate(parts):
            save_file({name: state[name] for name in part}, folder / f"model-{index}.safetensors")
    return model.eval()


@pytest.mark.parametrize("kind", ["file", "files", "panther", "dcp"])
def test_weights_are_read_by_slices(kind, tmp_path):
    model = saved(tmp_path / "saved", kind)
    with torch.no_grad():
        expected = model(TOKENS)
    with torch.no_grad():
        assert torch.equal(materialize_(empty(), tmp_path / "saved").eval()(TOKENS), expected)
    for output, weights, *_ in on_ranks(lambda: sharded(tmp_path / "saved"), 2):
        torch.testing.assert_close(output, expected)
        assert torch.equal(weights["blocks.1.2.weight"], model.blocks[1][2].weight)


def test_zero_points_that_a_folder_does_not_hold_are_filled_in(tmp_path):
    torch.manual_seed(0)
    layers = [pr.nn.QuantizedLinear(24, 16, 4, group_size=8), pr.nn.QuantizedLinear(16, 8, 3, group_size=8)]
    layers[1].zeros = layers[1].zeros.index_fill(0, torch.tensor(0), 1)  # a write in place would be refused
    model = nn.Sequential(*layers)
    pr.save_compressed(model, tmp_path)
    empty_model = checkpoint.restore_architecture(tmp_path, lambda: nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 8)))
    state = materialize_(empty_model, tmp_path).state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_a_checkpoint_of_another_layout_is_read(tmp_path):
    def train():
        model = data_parallel(materialize_(empty(), seed=1), strategy="fsdp")
        optimizer = torch.optim.AdamW(model.parameters())
        model(TOKENS).square().sum().backward()
        optimizer.step()
        checkpoint.save(tmp_path, model, optimizer, step=1)
        with torch.no_grad():
            return model.eval()(TOKENS)

    expected = on_ranks(train, 2)[0]
    for output, *_ in on_ranks(lambda: sharded(tmp_path), 3):
        torch.testing.assert_close(output, expected)


class OwnBuffer(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("frequencies", torch.ones(2), persistent=False)

    def reset_parameters(self):
        super().reset_parameters()
        if hasattr(self, "frequencies"):
            self.frequencies.copy_(torch.tensor([2.0, 4.0]))


class Nothing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))

    def forward(self, x):
        return x @ self.weight


def test_buffers_that_no_file_holds_are_drawn(tmp_path):
    with torch.device("meta"):
        model = OwnBuffer()
    save_file({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, tmp_path / "model.safetensors")
    materialize_(model, tmp_path)
    assert model.frequencies.tolist() == [2.0, 4.0]
    assert model.weight.eq(1).all()


class Known(nn.Module):
    """As models of transformers: one function for all their modules, which leaves some as they are."""

    def __init__(self, last=nn.Identity):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 4), SKLinear(4, 6, 2), last()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 3.0)


def test_the_model_s_own_initialisation_comes_last():
    with torch.device("meta"):
        model, other = Known(), Known(Nothing)
    materialize_(model)
    assert model.first.weight.eq(3).all()
    assert model.first.bias.abs().max() < 1
    assert model.second.S1s.isfinite().all()
    with pytest.raises(ValueError, match="'weight' of a Nothing was not drawn by the initialisation of its model"):
        materialize_(other)


def test_a_save_that_was_cut_off_is_read_where_its_weights_are(tmp_path):
    """A process was killed after the rename of panther.json, before the new weights had their name."""
    old, new = nn.Linear(3, 2), nn.Linear(3, 2)
    folder = pr.save_compressed(old, tmp_path / "old")
    pr.save_compressed(new, tmp_path / "new")
    commit = inference_manifest(tmp_path / "new")["commit"]
    (tmp_path / "new/panther.json").rename(folder / "panther.json")
    (tmp_path / "new/model.safetensors").rename(folder / f".model.safetensors.{commit}.new")
    model = materialize_(nn.Linear(3, 2, device="meta"), folder)
    assert torch.equal(model.weight, new.weight)
    assert torch.equal(model.bias, new.bias)


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'weight' has values already: build the model under torch.device\('meta'\)"):
        materialize_(nn.Linear(2, 2))
    with torch.device("meta"):
        bare, linear = Nothing(), nn.Linear(3, 2)
    with pytest.raises(ValueError, match="a Nothing, has tensors and no reset_parameters that draws their values"):
        materialize_(bare)
    assert bare.weight.is_meta
    with pytest.raises(CheckpointError, match="holds no weights: give a folder with safetensors"):
        materialize_(linear, tmp_path)
    save_file({"weight": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="lacks bias: build the model that was saved there"):
        materialize_(linear, tmp_path)
    save_file(
        {"weight": torch.ones(2, 3), "bias": torch.ones(2), "more": torch.ones(1)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match="holds, beside the model's tensors, more: build"):
        materialize_(linear, tmp_path)
    save_file({"weight": torch.ones(4, 3), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(f"'weight' has the shape (2, 3), and (4, 3) in {tmp_path}")):
        materialize_(linear, tmp_path)
    save_file({"weight": torch.ones(2, 3), "bias": torch.ones(2, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'bias' is torch.float32, and torch.int32 in .*: build the model that"):
        materialize_(linear, tmp_path)
    assert linear.weight.is_meta
    materialize_(bare, _with(tmp_path / "bare", weight=torch.full((3, 2), 7.0)))
    assert bare.weight.eq(7).all()


@pytest.mark.parametrize("kind", ["a FIFO", "a pointer", "truncated"])
def test_files_that_are_no_weights_are_named(kind, tmp_path):
    path = tmp_path / "extra.safetensors"
    save_file({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    if kind == "a FIFO":
        os.mkfifo(path)
    else:
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
        path.write_bytes(pointer if kind == "a pointer" else (tmp_path / "model.safetensors").read_bytes()[:-4])
    with torch.device("meta"):
        linear = nn.Linear(3, 2)
    with pytest.raises(FormatError, match=r"extra\.safetensors is"):
        materialize_(linear, tmp_path)


def test_a_folder_that_one_rank_does_not_see_is_an_error_on_all(tmp_path):
    saved(tmp_path / "rank-0", "file")

    def run():
        model = data_parallel(empty(), strategy="fsdp")
        with pytest.raises(CheckpointError, match=r"rank 1: .*rank-1 holds no weights"):
            materialize_(model, tmp_path / f"rank-{torch.distributed.get_rank()}")
        return all(parameter.is_meta for parameter in model.parameters())

    assert on_ranks(run, 2) == [True, True]


def test_ranks_that_find_different_checkpoints_are_told(tmp_path):
    for rank in range(2):
        checkpoint.save(tmp_path / f"rank-{rank}", nn.Linear(3, 2), step=1 + rank)

    def run():
        model = data_parallel(lambda: nn.Linear(3, 2), strategy="fsdp")
        with pytest.raises(CheckpointError, match=r"ranks find different checkpoints in .* \(step-00000001, step-000"):
            materialize_(model, tmp_path / f"rank-{torch.distributed.get_rank()}")
        return model.weight.is_meta

    assert on_ranks(run, 2) == [True, True]


def test_a_damaged_checkpoint_is_refused_on_all_ranks(tmp_path):
    file = checkpoint.save(tmp_path, nn.Linear(30, 20), step=1) / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[stored_tensors(file)["model.weight at 0,0"].start + 5] ^= 4
    file.write_bytes(data)

    def run():
        with pytest.raises(FormatError, match=r"is damaged: .* does not match its checksum"):
            materialize_(data_parallel(lambda: nn.Linear(30, 20), strategy="fsdp"), tmp_path)

    on_ranks(run, 2)


def _with(folder, **tensors):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_ddp_wants_values():
    def run():
        with pytest.raises(
            ValueError, match=r"strategy='ddp' broadcasts values: call panther.distributed.materialize_"
        ):
            data_parallel(empty, strategy="ddp")

    on_ranks(run, 2)
