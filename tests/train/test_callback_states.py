"""States of callbacks: every rank continues with what it saved, in other layouts too, or the run is refused by name."""

import json
import math

import pytest
import torch
from ranks import on_ranks, whole
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.utils.data import TensorDataset

from panther.distributed import checkpoint, get_rank, get_world_size
from panther.errors import CheckpointError
from panther.files.records import record_checksum
from panther.train import Callback, TrainConfig, Trainer

pytestmark = pytest.mark.distributed
FORMS = {
    "as the parameters": lambda p: p.clone(),
    "local": lambda p: (p.to_local() if isinstance(p, DTensor) else p).clone(),
    "full": lambda p: whole(p).clone(),
    "replicated": lambda p: (
        p.redistribute(placements=[Replicate()] * p.device_mesh.ndim) if isinstance(p, DTensor) else p
    ).clone(),
}


class Average(Callback):
    """An exponential average of the values of the parameters, in a form, by name or in a list."""

    def __init__(self, form="as the parameters", in_list=False):
        self.form, self.in_list, self.loaded = FORMS[form], in_list, None

    def values_of(self, trainer):
        parts = trainer.model if isinstance(trainer.model, list) else [trainer.model]
        return {name: self.form(p.detach()) for part in parts for name, p in part.named_parameters()}

    def on_start(self, trainer):
        self.values = self.values_of(trainer)
        if self.loaded is not None:
            self.values = dict(zip(self.values, self.loaded, strict=True))

    def on_step(self, trainer, loss):
        for name, value in self.values_of(trainer).items():
            self.values[name].mul_(0.5).add_(value, alpha=0.5)

    def state_dict(self):
        return list(self.values.values()) if self.in_list else self.values

    def load_state_dict(self, state):
        self.loaded = [value.clone() for value in (state if self.in_list else state.values())]


class Stores(Callback):
    """A callback whose state is what a function returns; the loaded state is kept."""

    def __init__(self, state_of=lambda trainer: None):
        self.state_of, self.loaded = state_of, "nothing"

    def on_start(self, trainer):
        self.trainer = trainer

    def state_dict(self):
        return self.state_of(self.trainer)

    def load_state_dict(self, state):
        self.loaded = state


def build():
    torch.manual_seed(0)
    sizes = [(8, 7), (7, 7), (7, 4)]  # 7 is not divisible by the number of ranks
    layers = [layer for size in sizes for layer in (nn.Linear(*size), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(48, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(4, (48,), generator=generator))


def trainer_of(directory, callbacks, steps, strategy="ddp", **settings):
    size = get_world_size()
    if size > 1:
        settings["strategy"] = strategy
    if strategy == "hybrid":
        settings["tensor_parallel_size"] = 2
    replicas = {"tp": 1, "pp": 1, "hybrid": 2}.get(strategy, size)
    options = {"batch_size": 12 // replicas, "checkpoint_dir": str(directory), "progress": False}
    config = TrainConfig(max_steps=steps, **options, **settings)
    return Trainer(build(), lambda p: torch.optim.SGD(p, 0.1), nn.CrossEntropyLoss(), config, callbacks)


def fit(*arguments, **settings):
    trainer_of(*arguments, **settings).fit(data())


def average(directory, form, in_list, strategy, *steps):
    """The average after the last of several runs, whole, and the kinds of its tensors."""
    for last in steps:
        callback = Average(form, in_list)
        fit(directory, [callback], last, strategy)
    kinds = {(type(value), getattr(value, "placements", None)) for value in callback.values.values()}
    return {name.removeprefix("module."): whole(value) for name, value in callback.values.items()}, kinds


CASES = [(strategy, form, False) for strategy in ("ddp", "zero1", "fsdp", "tp", "pp") for form in FORMS]
CASES += [(strategy, "as the parameters", True) for strategy in ("fsdp", "tp", "pp", "replicate", "hybrid")]


@pytest.mark.parametrize(("strategy", "form", "in_list"), CASES)
def test_every_rank_continues_with_its_own_average(tmp_path, strategy, form, in_list):
    """The advice of the Trainer for averages of sharded models; NCAR/miles-credit#416 and Megatron-LM#6858."""
    n = 4 if strategy == "hybrid" else 2
    straight = on_ranks(average, n, tmp_path / "straight", form, in_list, strategy, 4)
    resumed = on_ranks(average, n, tmp_path / "resumed", form, in_list, strategy, 2, 4)
    for (expected, kinds), (values, kinds_after) in zip(straight, resumed, strict=True):
        assert values.keys() == expected.keys()
        assert kinds == kinds_after
        assert all(torch.equal(values[name], expected[name]) for name in expected)


@pytest.mark.parametrize("in_list", [False, True])
@pytest.mark.parametrize(
    ("saved", "then"), [("fsdp-2", "fsdp-3"), ("fsdp-2", "tp-2"), ("tp-2", "fsdp-4"), ("fsdp-3", "-1")]
)
def test_dtensors_continue_in_other_layouts_as_parameters_do(tmp_path, saved, then, in_list):
    """An elastic restart; PaddleFleet#2056 and transformers#26549 load averages in another layout."""
    expected, _ = average(tmp_path / "one", "full", in_list, "ddp", 4)
    for strategy, steps in ((saved, 2), (then, 4)):
        name, size = strategy.split("-")
        values = on_ranks(average, int(size), tmp_path / "many", "as the parameters", in_list, name, steps)
    for value, kinds in values:
        assert all((value[name] - expected[name]).abs().max() < 1e-12 for name in expected)
        assert {kind is DTensor for kind, _ in kinds} == {then != "-1"}


def store(directory, state_of, steps, strategy="ddp", **settings):
    """The state that a callback loaded, and the checkpoint's manifest."""
    callback = Stores(state_of)
    fit(directory, [callback], steps, strategy, **settings)
    return callback.loaded, json.loads((checkpoint.checkpoints(directory)[-1] / "checkpoint.json").read_text())


def equal(trainer):
    """A state that is equal on all ranks, with keys in another order on each."""
    state = {"best": math.nan, "losses": [0.5, 1.0], "average": torch.arange(5.0), "a.b": torch.ones(2)}
    state |= {
        "a": {"b": torch.zeros(2)},
        "view": torch.arange(9.0)[::2],
        "keys": {1: torch.ones(1), "1": torch.ones(2)},
    }
    return dict(reversed(state.items())) if get_rank() else state


def test_what_is_equal_is_stored_once_and_loads_on_any_number_of_ranks(tmp_path):
    for size in (2, 3, 1, 2):
        loaded, manifest = on_ranks(store, size, tmp_path, equal, 2 + size)[-1]
        assert len(manifest["rank_states"]) == 1
    assert {key: str(value) for key, value in loaded.items()} == {key: str(x) for key, x in equal(None).items()}
    places = [name for name in manifest["tensors"] if name.startswith("rank_states")]
    assert len(places) == 6
    assert all(len(manifest["tensors"][name]["chunks"]) == 1 for name in places)


def tracker(trainer):
    """The state of a tracker: Lightning#19932."""
    return {"run": "abc", "artifact": torch.ones(2), "steps": 3} if get_rank() == 0 else {"run": None, "steps": 3}


def test_what_only_the_first_rank_has_continues_there(tmp_path):
    for size in (2, 4, 3):
        loaded = [state for state, _ in on_ranks(store, size, tmp_path, tracker, 2 + size)]
    assert loaded[0].pop("artifact").tolist() == [1, 1]
    assert loaded == [{"run": "abc", "steps": 3}, *[{"run": None, "steps": 3}] * 2]


def of_rank(trainer):
    return {"common": 1, "nested": [{"count": get_rank(), "shard": torch.full((2,), get_rank())}]}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_differs_continues_on_its_rank_or_is_refused_before_anything_changes(tmp_path, asynchronous):
    """Per-rank tensors under one name: pytorch#120356 and #146566."""
    settings = {"checkpoint_asynchronously": asynchronous}

    def refused():
        callback = Stores()
        trainer = trainer_of(tmp_path, [callback], 4)
        expected = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        message = (
            r"^callback 0 \(Stores\)\.nested\.0\.count differs between the 2 ranks that saved it, and cannot be "
            rf"divided among {get_world_size()} ranks"
        )
        with pytest.raises(CheckpointError, match=message):
            trainer.fit(data())
        assert (callback.loaded, trainer.step) == ("nothing", 0)
        state = {name.removeprefix("module."): value for name, value in trainer.model.state_dict().items()}
        assert all(torch.equal(state[name], value) for name, value in expected.items())

    on_ranks(lambda: store(tmp_path, of_rank, 2, **settings), 2)
    on_ranks(refused, 3)
    refused()
    for rank, (state, _) in enumerate(on_ranks(lambda: store(tmp_path, of_rank, 4, **settings), 2)):
        assert state["nested"][0]["count"] == rank
        assert state["nested"][0]["shard"].tolist() == [rank, rank]


def first_parameter(trainer):
    return next(trainer.model.parameters()).detach()


def on_a_mesh_of_its_own(trainer):
    return DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])


REFUSED = {
    "raises on one rank": (
        lambda t: {} if get_rank() else 1 / 0,
        "the state_dict of callback 0 .* raised ZeroDivision",
    ),
    "not plain": (lambda t: {"f": [print]}, r"callback 0 \(Stores\)'\.f\.0 is a builtin_function_or_method"),
    "meta": (lambda t: {"x": torch.ones(2, device="meta")}, r"\(Stores\)'\.x is a tensor on the meta device"),
    "sparse": (lambda t: {"x": torch.eye(2).to_sparse()}, r"\(Stores\)'\.x is a tensor of the layout torch.sparse_coo"),
    "partial": (lambda t: {"x": first_parameter(t).sum()}, r"x is a DTensor with the placements \(Partial"),
    "own mesh": (lambda t: {"x": on_a_mesh_of_its_own(t)}, "which no parameter has: store its full_tensor"),
    "on one rank": (lambda t: None if get_rank() else {"x": first_parameter(t)}, "only rank 0 store it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_stored_is_refused_on_all_ranks(tmp_path, case):
    """Lightning#3545 and torchtitan#3065: no rank waits for another one."""
    state_of, message = REFUSED[case]

    def refused():
        with pytest.raises(CheckpointError, match=message):
            fit(tmp_path, [Stores(state_of), Average("full")], 2, "fsdp")

    on_ranks(refused)
    assert checkpoint.checkpoints(tmp_path) == []


def test_a_dtensor_beside_the_states_is_refused(tmp_path):
    def refused():
        value = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])
        for name in ("extra", "per_rank_extra"):
            with pytest.raises(CheckpointError, match=f"{name}.* is a DTensor: store it in rank_states"):
                checkpoint.save(tmp_path, nn.Linear(2, 2), step=1, **{name: {"x": value}})

    on_ranks(refused)


def test_a_checkpoint_of_an_earlier_version_continues(tmp_path):
    """It has the state of the first rank in ``extra``."""
    on_ranks(store, 2, tmp_path, of_rank, 2)
    path = checkpoint.checkpoints(tmp_path)[-1] / "checkpoint.json"
    manifest = json.loads(path.read_text())
    states = manifest.pop("rank_states")
    del manifest["checksum"], manifest["layouts"]
    manifest["extra"]["callbacks"] = [{"$tuple": ["Stores", states[0]["callback 0 (Stores)"]]}]
    path.write_text(json.dumps(manifest | {"checksum": record_checksum(manifest)}))
    assert [state["nested"][0]["count"] for state, _ in on_ranks(store, 3, tmp_path, of_rank, 4)] == [0] * 3


def test_other_callbacks_are_refused_and_stateless_ones_may_come_and_go(tmp_path):
    fit(tmp_path, [Callback(), Stores(lambda trainer: 1)], 2)
    with pytest.raises(
        CheckpointError, match=r"has states of the callbacks \['Stores'\], but the run has \['Average'\]"
    ):
        fit(tmp_path, [Average()], 4)
    callback = Stores()
    fit(tmp_path, [callback, Callback()], 4)
    assert callback.loaded == 1
