"""What becomes of a model that is cut over ranks when it is converted, pickled, copied, loaded or saved."""

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from compressed_layers import with_stored_sketches
from ranks import on_ranks, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

import panther
from panther.distributed import (
    TensorParallelModel,
    TensorParallelSKLinear,
    checkpoint,
    data_parallel,
    make_mesh,
    tensor_parallel,
    unshard_module,
)
from panther.distributed.sync import replicas
from panther.errors import DistributedError, FormatError
from panther.nn import SKConv2d, SKLinear

pytestmark = pytest.mark.distributed


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


def build(seed):
    torch.manual_seed(seed)
    sketched = SKLinear(12, 20, 2), nn.ReLU(), SKLinear(20, 12, 2)
    model = nn.Sequential(
        *sketched, nn.LayerNorm(12), Attending(), nn.Linear(12, 8), nn.BatchNorm1d(6), nn.Linear(8, 7)
    )
    return model.double()


def data():
    return torch.randn(3, 6, 12, generator=torch.Generator().manual_seed(0)).double()


def test_a_sharded_layer_becomes_dense():
    def rank():
        model = build(dist.get_rank())
        tensor_parallel(model, make_mesh(tp=2)["tp"])
        convolution = SKConv2d(3, 4, 3)
        tensor_parallel(nn.Sequential(convolution), make_mesh(tp=2)["tp"])
        same = torch.equal(convolution.to_conv().weight, unshard_module(convolution).to_conv().weight)
        return (model[0].to_linear(), model[2].to_linear()), same

    single = build(0)
    for dense, same in on_ranks(rank):
        assert same
        for ours, layer in zip(dense, (single[0], single[2]), strict=True):
            assert type(ours) is nn.Linear
            assert torch.equal(ours.weight, layer.to_linear().weight)


def test_pickled_and_copied(tmp_path):
    x = data()

    def rank():
        model = build(dist.get_rank())
        tensor_parallel(model, make_mesh(tp=2)["tp"])
        file = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a tensor of a distributed model was pickled")  # each rank loads its own
            torch.save(model, file)
        file.seek(0)
        loaded, copied, out = torch.load(file, weights_only=False), copy.deepcopy(model), model(x)
        with pytest.raises(FormatError) as caught:
            panther.save_compressed(model, tmp_path / f"{dist.get_rank()}")
        kinds = [[type(module) for module in m.modules()] for m in (model, loaded, copied)]
        assert not (tmp_path / f"{dist.get_rank()}").exists()
        return (
            torch.equal(loaded(x), out),
            torch.equal(copied(x), out),
            kinds[0] == kinds[1] == kinds[2],
            str(caught.value),
        )

    for *same, message in on_ranks(rank):
        assert all(same)
        assert message.startswith("'0.S1' is a DTensor, on a device mesh: call panther.distributed.checkpoint.export")


def warnings_of(save):
    """The warnings of pickled shards that one way to save gives, as if it were the first of its process."""
    replicas._warned.clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        save(io.BytesIO())
    return [str(one.message) for one in warned if "was pickled" in str(one.message)]


def test_pickled_shards_are_warned_of_and_right_ways_to_save_are_not(tmp_path):
    """torch.save(model.state_dict()) on rank 0 is every torch user's reflex, and writes one rank's shards."""

    full = StateDictOptions(full_state_dict=True)

    def rank():
        found = []
        for strategy in ("fsdp", "tp", "ddp"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 12))
            if strategy == "tp":
                tensor_parallel(model, make_mesh(tp=2)["tp"])
            else:
                model = data_parallel(model, strategy=strategy)
            optimizer = torch.optim.Adam(model.parameters())
            model(torch.ones(2, 12)).sum().backward()
            optimizer.step()
            state, folder = model.state_dict(), tmp_path / strategy
            reflexes = [
                lambda file, state=state: torch.save(state, file),
                lambda file, state=state: torch.save({"model": {k: v.cpu() for k, v in state.items()}}, file),
                lambda file, state=state: pickle.dump(state, file),
                lambda file, optimizer=optimizer: torch.save(optimizer.state_dict(), file),
            ]
            right = [
                lambda file, state=state, folder=folder: dcp.save(state, checkpoint_id=folder / "dcp"),
                lambda file, model=model: torch.save(get_model_state_dict(model, options=full), file),
                lambda file, state=state: torch.save({k: whole(v) for k, v in state.items()}, file),
                lambda file, state=state: copy.deepcopy(state),
                lambda file, m=model, o=optimizer, folder=folder: checkpoint.save(folder / "own", m, o, step=1),
                lambda file, model=model, folder=folder: checkpoint.export(model, folder / "whole"),
            ]
            found.append(([warnings_of(save) for save in reflexes], [warnings_of(save) for save in right]))
        return found

    for fsdp, tp, ddp in on_ranks(rank, fresh=True):
        for reflexes, right in (fsdp, tp):
            assert [len(warned) for warned in reflexes] == [1] * 4
            assert all("Call Trainer.export(folder), or" in message for [message] in reflexes)
            assert not any(right)
        assert "this rank holds (10, 12) of its (20, 12)" in fsdp[0][0][0]
        assert not any(map(any, ddp))


@pytest.mark.parametrize("sharded", [False, True])
def test_whole_tensors_are_loaded(sharded):
    x = data()

    def rank():
        mesh = make_mesh(dp=2, tp=2) if sharded else make_mesh(tp=2)
        model = build(dist.get_rank())
        tensor_parallel(model, mesh["tp"])
        if sharded:
            model = data_parallel(model, mesh["dp"], "fsdp")
        given = build(7).state_dict()
        result = model.load_state_dict(given)
        with pytest.raises(RuntimeError, match=r"size mismatch for 0\.bias"):
            model.load_state_dict(given | {"0.bias": torch.zeros(3)})
        cut = all(isinstance(p, DTensor) for p in model.parameters())
        return model.eval()(x).detach(), unshard_module(model).state_dict(), cut, tuple(result)

    single = build(7).eval()
    for out, state, cut, result in on_ranks(rank, 4 if sharded else 2):
        assert cut
        assert result == ([], [])
        torch.testing.assert_close(out, single(x).detach())
        assert all(torch.equal(state[name], value) for name, value in single.state_dict().items())


@pytest.mark.parametrize("first_layer", ["seeded", "fitted"])
def test_fitted_layers_are_loaded(first_layer):
    x = data()

    def build(seed, fitted):
        torch.manual_seed(seed)
        layers = [SKLinear(12, 20, 2), SKLinear(20, 12, 2), SKLinear(12, 12, 2)]
        if fitted:
            layers = [with_stored_sketches(layer) for layer in layers]
        return nn.Sequential(layers[0], nn.ReLU(), layers[1], layers[2]).double()

    def rank():
        model = build(dist.get_rank(), first_layer == "fitted")
        tensor_parallel(model, make_mesh(tp=2)["tp"])
        model.load_state_dict(build(7, fitted=True).state_dict())
        return model(x).detach(), unshard_module(model).state_dict(), model[0].is_fitted

    single = build(7, fitted=True)
    for out, state, fitted in on_ranks(rank):
        assert fitted
        torch.testing.assert_close(out, single(x).detach())
        assert all(torch.equal(state[name], value) for name, value in single.state_dict().items())


def test_the_plain_model_comes_back_without_torchs_warnings(capfd):
    """Of bias and S1, which two axes cut along one dimension, torch would warn of two collectives."""

    def rank():
        mesh = make_mesh(dp=2, tp=2)
        model = build(dist.get_rank())
        tensor_parallel(model, mesh["tp"])
        model = data_parallel(model, mesh["dp"], "fsdp")
        return unshard_module(model).state_dict()

    expected = build(0).state_dict()
    for state in on_ranks(rank, 4):
        assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert "redistributing" not in capfd.readouterr().err


def test_there_must_be_a_process_group():
    configs = [{"in_features": 8, "out_features": 8, "sketch_size": 2}]
    for make in (
        lambda: TensorParallelSKLinear(8, 8, 2, dist.group.WORLD),
        lambda: TensorParallelModel(configs, dist.group.WORLD),
    ):
        with pytest.raises(DistributedError, match="there is no process group"):
            make()
