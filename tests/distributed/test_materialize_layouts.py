"""Models without values under tensor and pipeline parallelism: sharded first, then filled, equal to one process."""

import pytest
import torch
from ranks import on_ranks, weights_of
from safetensors.torch import save_file
from torch import nn

from panther.distributed import (
    HybridParallelTrainer,
    checkpoint,
    make_mesh,
    make_schedule,
    materialize_,
    split_stages,
    tensor_parallel,
)
from panther.errors import CheckpointError, ConfigError
from panther.nn import RandMultiHeadAttention, SKLinear

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),  # of dcp.save on one process
]


class Attention(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.inner = make()

    def forward(self, x):
        return x + self.inner(x, x, x)[0]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention(lambda: RandMultiHeadAttention(12, 4, num_random_features=6))
        self.exact = Attention(lambda: nn.MultiheadAttention(12, 4, batch_first=True))
        self.pair = nn.Sequential(SKLinear(12, 22, 2), nn.ReLU(), nn.Linear(22, 12))
        self.dense = nn.Sequential(
            nn.Linear(12, 22), nn.ReLU(), SKLinear(22, 12, 2)
        )  # 11 of 22 a rank, 6 and 5 of FSDP
        self.norm = nn.LayerNorm(12)

    def forward(self, x):
        x = self.exact(self.attention(x))
        return self.norm(x + self.pair(x) + self.dense(x))


class Net(nn.Module):
    """Has a parameter and a buffer of its own, which a trace of its forward uses, and a large embedding."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.empty(5, 12))
        self.register_buffer("shift", torch.empty(12), persistent=False)
        self.embedding = nn.Embedding(4099, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(12, 7)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.position)
        self.shift.fill_(0.5)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.position[places] + self.shift * torch.tensor([1.0, 2.0] * 6)
        for block in self.blocks:
            x = block(x)
        return self.head(x).clone()  # FSDP warns of views


def build():
    return Net()  # its seeds are drawn from the generator of each process, which nobody seeds


def empty():
    with torch.device("meta"):
        return build()


TOKENS = torch.arange(20).view(4, 5) * 200
TARGETS = torch.arange(20).view(4, 5) % 7


def loss_fn(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def one_process(weights=None):
    model = materialize_(empty(), weights, seed=5)
    loss_fn(model(TOKENS), TARGETS).backward()
    return model


def assert_same(found, model):
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("model", [empty, build], ids=["meta", "function"])
def test_tensor_parallel_shards_first(model):
    def run():
        given = model() if model is empty else model
        report = tensor_parallel(given, make_mesh(tp=2)["tp"])
        sharded = report.model
        assert sharded is given or model is build
        assert all(parameter.is_meta for parameter in sharded.parameters())
        materialize_(sharded, seed=5)
        assert {"heads sharded", "rows sharded"} <= {entry.action for entry in report.placements}
        loss_fn(sharded(TOKENS), TARGETS).backward()
        gradients = {name: p.grad.full_tensor() for name, p in sharded.named_parameters() if hasattr(p, "full_tensor")}
        return sharded(TOKENS).detach(), weights_of(sharded), gradients

    one = one_process()
    for output, weights, gradients in on_ranks(run, 2):
        assert_same(weights, one)
        torch.testing.assert_close(output, one(TOKENS).detach())
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, one.get_parameter(name).grad, msg=name)


def steps(trainer, optimizer, n=2):
    rank, size = trainer.dp_rank, torch.distributed.get_world_size(trainer.dp_group)
    mine = slice(rank * len(TOKENS) // size, (rank + 1) * len(TOKENS) // size)
    return [trainer.train_step((TOKENS[mine], TARGETS[mine]), optimizer, loss_fn) for _ in range(n)]


LAYOUTS = {
    "tp": {"tensor_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2},
    "fsdp x tp": {"tensor_parallel_size": 2, "data_parallel_size": 2},
    "replicate x pp": {"pipeline_parallel_size": 2, "data_parallel_size": 2, "data_parallel": "replicate"},
    "tp x pp": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}


def trainer_of(settings):
    if "pipeline_parallel_size" in settings:
        microbatch = TOKENS[: 2 // settings.get("data_parallel_size", 1)]
        settings = {**settings, "pipeline_layers": "blocks", "sample_input": microbatch, "num_microbatches": 2}
    trainer = HybridParallelTrainer(build, settings)
    assert all(parameter.is_meta for parameter in trainer.model.parameters())
    return trainer


@pytest.mark.parametrize(
    ("layout", "resumed"),
    [
        ("tp", True),
        pytest.param("pp", False, marks=pytest.mark.slow),
        *(
            pytest.param(name, True, marks=pytest.mark.slow)
            for name in ("pp", "fsdp x tp", "replicate x pp", "tp x pp")
        ),
    ],
)
def test_hybrid_layouts_have_the_values_of_one_process(layout, resumed, tmp_path):
    def run():
        trainer = trainer_of(LAYOUTS[layout])
        materialize_(trainer.model, seed=5)
        parts = list(trainer.model) if trainer.stages else [trainer.model]
        weights = weights_of(*parts)
        losses = steps(trainer, torch.optim.SGD(trainer.model.parameters(), 0.1))
        checkpoint.save(tmp_path, trainer.model, step=2)
        return weights, losses

    one = one_process()
    expected, optimizer = [], torch.optim.SGD(one.parameters(), 0.1)
    found = {}
    world = 4 if " x " in layout else 2
    results = on_ranks(run, world)
    for weights, _ in results:
        found |= weights
    assert_same(found, one)
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_fn(one(TOKENS), TARGETS)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for _, losses in results:
        assert losses == pytest.approx(expected, rel=1e-3)

    if not resumed:
        return
    # The checkpoint of this layout starts one process, and the layout itself.
    again = materialize_(empty(), tmp_path)
    torch.testing.assert_close(again(TOKENS), one(TOKENS), rtol=1e-2, atol=1e-3)

    def resume():
        trainer = trainer_of(LAYOUTS[layout])
        materialize_(trainer.model, tmp_path)
        return weights_of(*(list(trainer.model) if trainer.stages else [trainer.model]))

    found = {}
    for weights in on_ranks(resume, world):
        found |= weights
    assert_same(found, again)


class Pipe(nn.Sequential):
    def __init__(self):
        super().__init__(SKLinear(24, 18, 2), nn.ReLU(), SKLinear(18, 24, 2), nn.ReLU(), nn.Linear(24, 6))


def empty_pipe():
    with torch.device("meta"):
        return Pipe()


@pytest.mark.parametrize("saved", [False, True])
def test_stages_of_a_sequential(saved, tmp_path):
    one = materialize_(empty_pipe(), seed=5)
    if saved:
        save_file({name: tensor + 1.0 for name, tensor in one.named_parameters()}, tmp_path / "a.safetensors")
        seeds = {name: tensor for name, tensor in one.state_dict().items() if name.endswith("sketch_seed")}
        save_file(seeds, tmp_path / "b.safetensors")
        materialize_(one := empty_pipe(), tmp_path)
    x = torch.randn(4, 24)

    def run():
        stages = split_stages(empty_pipe, 4)
        assert all(parameter.is_meta for stage in stages for parameter in stage.submod.parameters())
        materialize_([stage.submod for stage in stages], tmp_path if saved else None, seed=5)
        schedule = make_schedule("interleaved", stages, 4, nn.functional.mse_loss)
        output, _ = schedule.step(x, torch.zeros(4, 6))
        return output, weights_of(*(stage.submod for stage in stages))

    found = {}
    for output, weights in on_ranks(run, 2):
        found |= weights
        if output is not None:
            torch.testing.assert_close(output, one(x))
    assert_same(found, one)


def test_a_rank_that_cannot_fill_its_stage_is_an_error_on_all(tmp_path):
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(6, 6))

        def forward(self, x):
            return x @ self.weight

    def build():
        return nn.Sequential(nn.Linear(4, 6), Bare())

    save_file(
        {"0.weight": torch.ones(6, 4), "0.bias": torch.ones(6), "1.weight": torch.ones(6, 5)},
        tmp_path / "a.safetensors",
    )

    def run():
        [stage] = split_stages(build, 2)
        with pytest.raises(ConfigError, match="rank 1: '1', a Bare, has tensors and no reset_parameters"):
            materialize_([stage.submod])
        with pytest.raises(CheckpointError, match=r"rank 1: '1.weight' has the shape \(6, 6\), and \(6, 5\) in"):
            materialize_([stage.submod], tmp_path)
        return all(parameter.is_meta for parameter in stage.submod.parameters())

    assert on_ranks(run, 2) == [True, True]


@pytest.mark.parametrize("saved", [False, True])
def test_a_model_of_transformers(saved, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    folder, tokens = tmp_path if saved else None, torch.arange(12).view(2, 6)

    def build():
        return transformers.LlamaForCausalLM(config)

    def output(model):
        with torch.no_grad():
            return materialize_(model, folder, seed=2).eval()(tokens).logits

    if saved:
        build().save_pretrained(tmp_path)
    with torch.device("meta"):
        model = build()
    expected = output(model)
    for found in on_ranks(lambda: output(tensor_parallel(build, make_mesh(tp=2)["tp"]).model), 2):
        torch.testing.assert_close(found, expected)
