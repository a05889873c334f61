"""Linear layers that keep sketches of their inputs, and checkpointed blocks: the prototype of a trial."""

import pytest
import torch
from torch import nn

pytestmark = [pytest.mark.tool, pytest.mark.usefixtures("one_thread")]
# An entry of a mean is outside of 5 standard errors with probability 6e-7, and a test looks at 15 entries.
STANDARD_ERRORS = 5


@pytest.fixture
def characters():
    from benchmarks.train.optimizer_tasks import TASKS

    return TASKS["characters"][0](48, True)


@pytest.fixture
def activations():
    from benchmarks.train import sketched_activations

    return sketched_activations


@pytest.mark.parametrize("size", [1, 6])
@pytest.mark.parametrize("kind", ["count sketch", "SJLT", "rows by norm"])
def test_the_mean_of_sketched_gradients_is_the_gradient(activations, kind, size):
    torch.manual_seed(0)
    X, G = torch.randn(23, 5, dtype=torch.float64), torch.randn(23, 3, dtype=torch.float64)
    X[3] = 0
    gradients = []
    for _ in range(2000):
        sketch = activations.KINDS[kind](X, size)
        assert sketch(X).shape == (size, 5)
        gradients.append(sketch(G).mT @ sketch(X))
    samples = torch.stack(gradients)
    errors = (samples.mean(0) - G.mT @ X).abs()
    assert (errors <= STANDARD_ERRORS * samples.std(0) / len(samples) ** 0.5).all()


@pytest.mark.parametrize("kind", ["count sketch", "SJLT", "rows by norm"])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_of_inputs_and_biases_are_exact(activations, kind, bias):
    torch.manual_seed(0)
    layer = nn.Linear(7, 5, bias=bias, dtype=torch.float64)
    x = torch.randn(3, 4, 7, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(3, 4, 5, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters() if name != "weight"]
    expected = layer(x)
    exact = torch.autograd.grad(expected, [x, *(getattr(layer, name) for name in names)], upstream)
    model = activations.sketch_activations_(nn.Sequential(layer), 0.5, kind)
    output = model(x)
    torch.testing.assert_close(output, expected, rtol=1e-14, atol=0)
    gradients = torch.autograd.grad(output, [x, *(getattr(model[0], name) for name in names)], upstream)
    torch.testing.assert_close(gradients, exact, rtol=1e-12, atol=1e-14)


def test_checkpointed_blocks_have_the_gradients_of_all_rows(activations, characters):
    gradients = []
    for name in ("AdamW", "checkpointing, 1 of 2 blocks", "checkpointing, 2 of 2 blocks"):
        torch.manual_seed(0)
        model = activations.ACTIVATIONS[name].build(characters)
        characters.loss(model, characters.batch(0, 0)).backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(gradients[1:], gradients[:1] * 2, rtol=0, atol=0)


def test_a_model_learns_with_sketched_activations(activations, characters):
    from benchmarks.train import trial_optimizers as trial

    settings = trial.Run("steps", 3e-3, 0, 30)
    losses = {
        name: trial.train(characters, activations.ACTIVATIONS[name], settings)["loss"]
        for name in ("AdamW", "rows by norm, a half")
    }
    assert max(losses.values()) < 4.2  # nats; log 98 is 4.6
