"""What torch's loops expect of an optimizer, and input that is refused: one process, and seeds under DDP."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn

import panther as pr
from panther.errors import CheckpointError, ShapeError
from panther.optim import MuonAdamW, SketchedAdamW, sketched_param_groups
from panther.optim.sketched_update import UPDATES

SETTINGS = {"lr": 0.02, "rank": 2, "period": 2, "betas": (0.8, 0.9), "weight_decay": 0.1, "seed": 5}


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).to(dtype)


def make(model, **settings):
    return SketchedAdamW(model.named_parameters(), **SETTINGS | settings)


def loss_of(model, step):
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
    return model(x.to(next(model.parameters()))).square().mean()


def train(model, optimizer, steps, before_step=lambda: None):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        before_step()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def same(first, second):
    return all(map(torch.equal, first, second))


def test_a_gradient_scaler_skips_overflows_and_changes_nothing_else():
    model, twin = network(), network()
    optimizer = make(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if step == 1:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    # Factors are powers of two, so nothing is rounded.
    assert same(model.parameters(), train(twin, make(twin), (0, 2, 3)))
    assert scaler.get_scale() == 2.0**9


def test_clipped_gradients_are_those_of_the_step():
    model, twin = network(), network()
    total = [0.0]

    def clip():
        total[0] = nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()

    def scale():
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in twin.parameters()]))
        for p in twin.parameters():
            p.grad.mul_((0.1 / (norm + 1e-6)).clamp(max=1.0))

    assert same(train(model, make(model), range(3), clip), train(twin, make(twin), range(3), scale))
    assert total[0] > 0.1


def test_parameters_without_gradients_are_skipped_with_their_period():
    model = network()
    optimizer = make(model)
    train(model, optimizer, range(2))
    first_state = copy.deepcopy((model[0].weight, optimizer.state[model[0].weight]))

    def skip():
        model[0].weight.grad = None

    train(model, optimizer, range(2, 5), skip)
    assert torch.equal(model[0].weight, first_state[0])
    assert all(torch.equal(value, optimizer.state[model[0].weight][key]) for key, value in first_state[1].items())
    assert optimizer.state[model[2].weight]["step"] == 5
    optimizer.zero_grad()
    optimizer.step()  # without any gradient
    assert optimizer.state[model[2].weight]["step"] == 5


def test_a_closure_is_called_with_gradients_enabled():
    model, twin = network(), network()
    optimizer = make(model)
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    expected = train(twin, make(twin), (0, 0, 0))
    assert same(model.parameters(), expected)
    assert losses[2] < losses[0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_continue(copied):
    model = network()
    optimizer = make(model)
    train(model, optimizer, range(3))
    pair = copied((model, optimizer))
    assert same(train(model, optimizer, range(3, 6)), train(*pair, range(3, 6)))


def test_groups_have_settings_of_their_own_which_a_state_restores():
    def grouped(model, **settings):
        optimizer = SketchedAdamW(
            [
                {
                    "params": list(model[0].named_parameters("0")),
                    "update": "tensor",
                    "rank": 1,
                    "period": 3,
                    **settings,
                },
            ],
            **SETTINGS,
        )
        optimizer.add_param_group({"params": list(model[2].named_parameters("2")), "lr": 0.1, "betas": (0.5, 0.6)})
        return optimizer

    model, twin = network(), network()
    optimizer = grouped(model)
    train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    twin.load_state_dict(model.state_dict())
    resumed = grouped(twin, update="projected", rank=2, period=7, seed=1)
    resumed.load_state_dict(saved)
    assert [group["rank"] for group in resumed.param_groups] == [1, 2]
    assert same(train(model, optimizer, range(3, 6)), train(twin, resumed, range(3, 6)))


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_in_half_precision_are_those_of_float32_to_rounding(dtype, update):
    p = nn.Parameter(torch.randn(9, 6, generator=torch.Generator().manual_seed(0)).to(dtype))
    twin = nn.Parameter(p.detach().float())
    optimizers = [SketchedAdamW([("weight", each)], **SETTINGS | {"update": update}) for each in (p, twin)]
    for step in range(3):
        p.grad = torch.randn(9, 6, generator=torch.Generator().manual_seed(1 + step)).to(dtype)
        twin.grad = p.grad.float()
        for optimizer in optimizers:
            optimizer.step()
    # A step rounds the parameter twice, by decay and by the update.
    bound = 6 * torch.finfo(dtype).eps * twin.detach().abs().max()
    assert (p.detach().float() - twin).abs().max() < bound


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (1, 1)])
def test_matrices_of_one_row_have_rank_one(shape, update):
    p = nn.Parameter(torch.ones(shape))
    settings = SETTINGS | {"rank": 1, "update": update, "weight_decay": 0.0, "period": 9}
    optimizer = SketchedAdamW([{"params": [("weight", p)], "rank": 1}], **settings)
    for _ in range(3):
        p.grad = torch.ones(shape)
        optimizer.step()
    # P is a sign, so that the step is that of Adam, whose quotient is 1 for equal gradients.
    torch.testing.assert_close(p.detach(), torch.full(shape, 1 - 3 * 0.02))
    with pytest.raises(ShapeError, match=r"rank=2 is above the shorter side of weight"):
        SketchedAdamW([{"params": [("weight", p)], "rank": 2}], **SETTINGS)


@pytest.mark.parametrize("update", UPDATES)
def test_strides_of_parameters_and_gradients_do_not_matter(update):
    """Models in channels_last have weights of other strides: clovaai/AdamP#17."""
    weight = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    results = []
    for is_transposed in (False, True):
        p = nn.Parameter(weight.clone().T.contiguous().T if is_transposed else weight.clone())
        optimizer = SketchedAdamW([("weight", p)], **SETTINGS | {"update": update})
        for step in range(3):
            gradient = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
            p.grad = gradient if is_transposed else gradient.T.contiguous().T
            optimizer.step()
        results.append(p.detach())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("update", UPDATES)
def test_a_gradient_with_nan_changes_no_other_parameter(update):
    """As in torch's optimizers: nothing is hidden, and the loss shows it."""
    model, twin = network(), network()

    def spoil():
        model[0].weight.grad[0, 0] = float("nan")

    first = train(model, make(model, update=update), range(1), spoil)
    second = train(twin, make(twin, update=update), range(1))
    spoiled = first[0] if update != "projected" else first[0][0]  # one place of the longer side
    assert spoiled.isnan().all()
    assert same(first[1:], second[1:])


OTHER_STATES = {
    "AdamW": (lambda model: torch.optim.AdamW(model.parameters()), r"groups of \[4\] parameters, .* has \[1, 3\]"),
    "Muon": (lambda model: MuonAdamW(model.parameters()), r"the state of 0\.weight has no 'rank'"),
    "moments of AdamW": (lambda model: make(model, rank=None), r"the state of 0\.weight has no 'sketch_avg'"),
    "moments of another rank": (
        lambda model: make(model, rank=3),
        r"sketch_avg of 0\.weight .* \(9, 3\), and with .* rank=2 ",
    ),
}


@pytest.mark.parametrize("name", OTHER_STATES)
def test_states_of_other_optimizers_are_refused_before_anything_changes(name):
    make_other, message = OTHER_STATES[name]
    model = network()
    other = make_other(model)
    train(model, other, range(1))
    state = copy.deepcopy(other.state_dict())
    if name.startswith("moments"):
        state["param_groups"] = make(network()).state_dict()["param_groups"]
    model = network()
    optimizer = make(model)
    train(model, optimizer, range(1))
    first_state = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointError, match=message):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert first_state["param_groups"] == after["param_groups"]
    for index, values in first_state["state"].items():
        assert all(torch.equal(value, after["state"][index][key]) for key, value in values.items())


def test_a_state_of_another_model_is_refused():
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 4))
    other = network()
    optimizer = make(other)
    train(other, optimizer, range(1))
    with pytest.raises(CheckpointError, match=r"exp_avg|sketch_avg"):
        make(nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))).load_state_dict(optimizer.state_dict())
    # The moments of a tall matrix do not depend on its shorter side.
    make(model).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_a_state_of_a_model_of_another_dtype_continues(dtypes):
    """The moments had the dtype of the state, and the next step raised an error after it had been counted."""
    model = network(dtypes[0])
    optimizer = make(model)
    train(model, optimizer, range(2))
    other = network(dtypes[1])
    other.load_state_dict(model.state_dict())
    resumed = make(other)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.state[other[0].weight]["sketch_avg"].dtype is dtypes[1]
    for result, expected in zip(train(other, resumed, range(2, 5)), train(model, optimizer, range(2, 5)), strict=True):
        torch.testing.assert_close(result.double(), expected.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("make_optimizer", [make, lambda model, **s: MuonAdamW([model[0].weight], 0.02, **s)])
def test_a_rate_may_be_a_tensor(make_optimizer, shape):
    settings = {} if make_optimizer is make else {"orthogonalize": True}
    model, twin = network(torch.float64), network(torch.float64)
    rate = torch.full(shape, 0.02, dtype=torch.float64)
    optimizer = make_optimizer(model, **settings)
    for group in optimizer.param_groups:
        group["lr"] = rate
    expected = train(twin, make_optimizer(twin, **settings), range(2))
    for pair in zip(train(model, optimizer, range(2)), expected, strict=True):
        torch.testing.assert_close(*pair)


def test_settings_of_groups_are_checked():
    layer = nn.Linear(6, 5)
    for settings, error, message in [
        ({"seed": -1}, ValueError, "seed=-1 must be in"),
        ({"seed": 0.5}, TypeError, "seed must be an integer or None"),
        ({"maximize": True}, ValueError, "maximize=True, and this optimizer has no such setting"),
        ({"amsgrad": True}, ValueError, "amsgrad=True"),
        ({"update_proj_gap": 50}, ValueError, "update_proj_gap=50, which SketchedAdamW does not read: period="),
        ({"scale": 0.25}, ValueError, r"scale=0\.25, .* updates have the size"),
        ({"scale_type": "tensor"}, ValueError, "scale_type='tensor', .* update="),
        ({"proj": "random"}, ValueError, "proj='random', .* random signs"),
        ({"proj_type": "std"}, ValueError, "proj_type='std', .* shorter side"),
        ({"cautious": True}, ValueError, "a group has cautious=True, which SketchedAdamW does not read"),
        ({"lr": torch.ones(2)}, ValueError, r"a tensor of one element, not of shape \(2,\)"),
    ]:
        with pytest.raises(error, match=message):
            SketchedAdamW([{"params": list(layer.named_parameters()), **settings}], **SETTINGS)
    with pytest.raises(ValueError, match="cautious=True, which MuonAdamW does not read"):
        MuonAdamW([{"params": [layer.weight], "cautious": True}])
    labels = {"initial_lr": 0.1, "name": "decoder", "lr_scale": 0.5, "foreach": None, "amsgrad": False}
    SketchedAdamW([{"params": [layer.weight], **labels}], **SETTINGS)


def test_complex_matrices_get_adamw():
    p, twin = (nn.Parameter(torch.ones(6, 5, dtype=torch.complex64)) for _ in range(2))
    optimizers = [SketchedAdamW([("weight", p)], lr=0.1, rank=2), torch.optim.AdamW([twin], lr=0.1)]
    for optimizer in optimizers:
        for q in (p, twin):
            q.grad = torch.full((6, 5), 1 + 2j)
        optimizer.step()
    assert torch.equal(p, twin)


@pytest.mark.parametrize("make_optimizer", [make, lambda model: MuonAdamW(model.parameters())])
def test_a_cuda_graph_is_refused(monkeypatch, make_optimizer):
    """Each replay would take the step of the capture: its bias correction, and its period."""
    model = network()
    optimizer = make_optimizer(model)
    loss_of(model, 0).backward()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"CUDA graph cannot capture \w+AdamW\.step\(\)"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.distributed
def test_seeds_that_differ_between_replicas_are_refused_by_a_trainer():
    """Replicas of DDP would become different models in silence."""

    def rank():
        model = network()
        groups = sketched_param_groups(model, rank=2)
        optimizer = SketchedAdamW(groups, rank=2, seed=dist.get_rank())
        config = pr.train.TrainConfig(epochs=1, batch_size=4, strategy="ddp")
        trainer = pr.train.Trainer(model, optimizer, nn.functional.mse_loss, config)
        with pytest.raises(pr.errors.DistributedError) as caught:
            trainer.fit(torch.utils.data.TensorDataset(torch.ones(8, 6), torch.ones(8, 4)))
        return str(caught.value)

    first, second = on_ranks(rank, 2)
    assert first == second
    assert "seed of the optimizer's group 0" in first
