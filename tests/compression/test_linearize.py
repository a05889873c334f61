"""pr.linearize_ on small models: outputs, refusals, reports, and that errors leave the model alone."""

import copy

import pytest
import torch
from torch import nn

import panther as pr
from panther.errors import CompressionError
from panther.nn.attention.linearized import LinearizedMultiheadAttention

WIDTH, LENGTH = 16, 48
KINDS = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(3))
OPTIONS = {"num_features": 8, "window": 6, "steps": 15, "seed": 0, "measure_speed": False, "progress": False}


class Encoder(nn.Module):
    """Two layers, causal or not, with an optional mask of keys."""

    def __init__(self, causal=False, **more):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True, **more)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.causal = causal
        for name, parameter in self.named_parameters():
            if "in_proj_weight" in name:  # attention that is not nearly uniform
                with torch.no_grad():
                    parameter.mul_(1.5)

    def forward(self, x, attention_mask=None):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.causal else None
        padding = None if attention_mask is None else ~attention_mask
        if mask is not None and padding is not None:
            mask = mask == -torch.inf
        return self.encoder(x, mask, padding, is_causal=self.causal)


def batches(padded=False, length=LENGTH):
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(5):
        # Some kinds of positions, as words are, with noise: keys without any structure have no centres.
        kinds = torch.randint(len(KINDS), (2, length), generator=generator)
        batch = {"x": KINDS[kinds] + 0.2 * torch.randn(2, length, WIDTH, generator=generator)}
        if padded:
            batch["attention_mask"] = torch.arange(length) < torch.tensor([[length], [length - 7]])
        found.append(batch)
    return found


def output(model, batch):
    with torch.no_grad():
        return model(**batch)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_an_encoder_keeps_its_output(causal, padded):
    model = Encoder(causal).eval()
    data = batches(padded)
    exact, original = output(model, data[-1]), copy.deepcopy(model)
    report = pr.linearize_(model, data, **OPTIONS)
    assert [layer.is_causal for layer in report.layers] == [causal, causal]
    assert all(0 < layer.far_mass < 1 and layer.divergence < 0.5 for layer in report.layers)
    after = output(model, data[-1])
    counts = data[-1].get("attention_mask", torch.ones(2, LENGTH, dtype=torch.bool))
    error = ((after - exact)[counts].norm() / exact[counts].norm()).item()
    assert error == pytest.approx(report.measured_error, rel=1e-3)
    assert 0 < error < 0.4
    for name, parameter in original.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))
    assert report.healed_error is None
    for phrase in ("2 attention layers converted", "far mass", "relative error of the output"):
        assert phrase in str(report)


def test_learning_pays():
    errors = []
    for steps in (1, 100):
        report = pr.linearize_(Encoder(True).eval(), batches(), **(OPTIONS | {"steps": steps, "measure_speed": True}))
        assert report.measured_speedup > 0
        errors.append(sum(layer.divergence for layer in report.layers))
    assert errors[1] < 0.8 * errors[0]


def test_a_window_over_everything_is_refused():
    with pytest.raises(CompressionError, match="no keys beyond the window"):
        pr.linearize_(Encoder().eval(), batches(length=10), **OPTIONS)


def test_a_failure_changes_nothing():
    model = Encoder().train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modules = list(model.modules())
    bad = batches()
    bad[2]["x"] = bad[2]["x"].clone().fill_(torch.nan)
    with pytest.raises(CompressionError):
        pr.linearize_(model, bad, **OPTIONS)
    with pytest.raises(CompressionError, match="unexpected keyword argument 'y': the model raised this"):
        pr.linearize_(model, [{"y": 1}] * 3, **OPTIONS)
    assert list(model.modules()) == modules
    assert all(module.training for module in modules)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_layers_are_chosen_by_name_and_by_error():
    model = Encoder().eval()
    report = pr.linearize_(model, batches(), include="*layers.1*", **OPTIONS)
    assert [layer.name for layer in report.layers] == ["encoder.layers.1.self_attn"]
    assert [(one.name, one.reason) for one in report.skipped] == [("encoder.layers.0.self_attn", "is not included")]
    report = pr.linearize_(model, batches(), **OPTIONS)  # the other one
    assert [one.reason for one in report.skipped] == ["is linear already"]
    with pytest.raises(CompressionError, match="above max_error"):
        pr.linearize_(Encoder().eval(), batches(), max_error=1e-9, **OPTIONS)


def test_attention_between_sequences_and_odd_masks_is_kept():
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            attention = [nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(4)]
            self.self_attn, self.cross, self.masked, self.unused = attention
            self.biased = nn.MultiheadAttention(WIDTH, 2, batch_first=True, add_bias_kv=True)

        def forward(self, x):
            banded = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(3)
            x = x + self.self_attn(x, x, x)[0] + self.masked(x, x, x, attn_mask=banded)[0]
            return x + self.cross(x, 2 * x, 2 * x)[0] + self.biased(x, x, x)[0]

    model = Model().eval()
    report = pr.linearize_(model, batches(), **OPTIONS)
    reasons = {one.name: one.reason for one in report.skipped}
    assert [layer.name for layer in report.layers] == ["self_attn"]
    for name, phrase in {"cross": "another", "masked": "neither", "unused": "not called", "biased": "a key"}.items():
        assert phrase in reasons[name]
    assert type(model.self_attn) is LinearizedMultiheadAttention
    assert type(model.cross) is nn.MultiheadAttention


def test_dropout_of_weights_is_refused_in_training():
    model = Encoder().eval()
    for layer in model.encoder.layers:
        layer.self_attn.dropout = 0.1
    pr.linearize_(model, batches(), **OPTIONS)
    output(model, batches()[0])
    with pytest.raises(ValueError, match="set it to 0"):
        model.train()(**batches()[0])


def test_without_batch_and_with_the_batch_second():
    torch.manual_seed(0)
    x = torch.randn(LENGTH, WIDTH)
    second = nn.Sequential(nn.MultiheadAttention(WIDTH, 2)).eval()
    pr.linearize_(second, [(x[:, None],) * 3] * 2, forward_fn=lambda m, b: m[0](*b)[0], **OPTIONS)
    whole = second[0](*(x[:, None],) * 3)[0]
    torch.testing.assert_close(second[0](x, x, x)[0], whole[:, 0])
    first = copy.deepcopy(second)
    first[0].batch_first = True
    torch.testing.assert_close(first[0](*(x[None],) * 3)[0][0], whole[:, 0])


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_of_torch_reads_token_by_token(batch_first):
    torch.manual_seed(0)
    model = nn.Sequential()
    model.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first, dtype=torch.float64)
    pr.linearize_(model, num_features=4, window=6)
    attention, x = model.attention.eval(), torch.randn(2, 30, WIDTH, dtype=torch.float64)
    padding = torch.arange(30) < torch.tensor([[0], [7]])
    mask = nn.Transformer.generate_square_subsequent_mask(30) == -torch.inf
    dim = 1 if batch_first else 0
    x = x if batch_first else x.transpose(0, 1)
    with torch.no_grad():
        whole, _ = attention(x, x, x, padding, attn_mask=mask)
        state, outputs, start = attention.init_state(2), [], 0
        for chunk in x.split([9, 1, 1, 19], dim):
            stop = start + chunk.shape[dim]
            output, state = attention.step(chunk, state, padding[:, start:stop])
            outputs.append(output)
            start = stop
        torch.testing.assert_close(torch.cat(outputs, dim), whole)
        for queries in (1, 4):
            last = x.narrow(dim, 30 - queries, queries)
            output, _ = attention(last, x, x, padding, attn_mask=mask[-queries:], is_causal=True)
            torch.testing.assert_close(output, whole.narrow(dim, 30 - queries, queries))
    with pytest.raises(ValueError, match="three dimensions"):
        attention.step(x[0], state)


def test_a_state_dict_goes_into_a_model_converted_without_data():
    model, other = Encoder(True).eval(), Encoder(True).eval()
    pr.linearize_(model, batches(), **OPTIONS)
    report = pr.linearize_(other, num_features=8, window=6)
    assert report.measured_error is None
    assert report.layers[0].error is None
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(output(other, batches()[0]), output(model, batches()[0]))
    copied = copy.deepcopy(model).double()
    torch.testing.assert_close(copied(batches()[0]["x"].double()).float(), output(model, batches()[0]))


def test_samples_are_bounded_in_memory():
    whole = pr.linearize_(Encoder().eval(), batches(), **OPTIONS)
    single = pr.linearize_(Encoder().eval(), batches(), samples_memory_bytes=1, **OPTIONS)
    assert (whole.passes, single.passes) == (1, 2)
    assert [layer.error for layer in single.layers] == pytest.approx([layer.error for layer in whole.layers], rel=1e-4)


def test_healing_lowers_the_error():
    model = Encoder(True).eval()
    heal = pr.HealConfig(max_steps=30, learning_rate=2e-3, validate_every_n_steps=10)
    report = pr.linearize_(model, batches(), heal=heal, **OPTIONS)
    assert report.healed.steps == 30
    assert report.healed.loss_after < report.healed.loss_before
    assert not any("linear_attention" in name and p.grad is not None for name, p in model.named_parameters())


def test_options_are_checked():
    with pytest.raises(ValueError, match="needs calibration"):
        pr.linearize_(Encoder(), heal=pr.HealConfig())
    with pytest.raises(ValueError, match="must be positive"):
        pr.linearize_(Encoder(), batches(), learning_rate=0)
    with pytest.raises(CompressionError, match="no attention known"):
        pr.linearize_(nn.Sequential(nn.Linear(2, 2)), batches())
    with pytest.raises(CompressionError, match="wrap it"):
        pr.linearize_(nn.MultiheadAttention(4, 2), batches())
