"""A kind of weight that the library does not know: one file has a layer, a kind and two registrations."""

import os
import sys
import textwrap
from pathlib import Path

import waits

SUPPORT = Path(__file__).parents[1] / "support"


def test_a_kind_of_weight_is_one_file_and_a_registration(tmp_path):
    """In a process of its own, because kinds are registered for good."""
    code = """
        import copy, torch, panther as pr
        from pathlib import Path
        from torch import nn
        from panther.compression.config import CompressConfig
        from panther.compression.streaming.runner import compress_streamed
        torch.manual_seed(0)
        dense = nn.Sequential(
            nn.Conv1d(6, 24, 5, padding=2), nn.GELU(), nn.Conv1d(24, 32, 3, stride=2, groups=2), nn.Tanh(),
            nn.Flatten(), nn.Linear(32 * 11, 20),
        ).eval()
        x = torch.randn(192, 6, 24)
        options = {"calibration": x.split(16), "seed": 0, "measure_speed": False, "group_size": 16}
        report = pr.compress(copy.deepcopy(dense), bits=6.0, **options)
        reasons = {layer.name: layer.reason for layer in report.skipped}
        expected = "holds a matrix, and is not a Linear, Conv2d or Conv1D layer: kept as it is"
        assert reasons == dict.fromkeys("02", expected), reasons

        from conv1d_kind import QuantizedConv1d
        model = copy.deepcopy(dense)
        report = pr.compress(model, bits=6.0, **options)
        layers = {layer.names[0]: layer for layer in report.layers}
        assert list(layers) == ["0", "2", "5"] and layers["2"].kind == "Conv1d" and not report.skipped
        for name in "02":
            assert type(model[int(name)]) is QuantizedConv1d
            stored = sum(tensor.nbytes for tensor in model[int(name)].buffers())
            assert layers[name].bytes_after == stored and layers[name].form.startswith("int")
            assert 0.5 < layers[name].measured_error / layers[name].predicted_error < 2, layers[name]
        error = ((model(x) - dense(x)).norm() / dense(x).norm()).item()
        assert 0.3 * error < report.predicted_error < 3 * error and error < 0.2, (error, report.predicted_error)

        # The moments are those of the right rows: rounding in them is better than rounding to nearest.
        nearest = pr.compress(copy.deepcopy(dense), budget=0.5, forms=["int3"], method="svd", **options)
        assert report.measured_error < nearest.measured_error

        pr.save_compressed(model, "saved")
        loaded = pr.load_compressed("saved", copy.deepcopy(dense))
        assert torch.equal(loaded(x), model(x)) and type(loaded[0]) is QuantizedConv1d
        tree = str(pr.inspect.tree(model))
        assert "QuantizedConv1d" in tree and layers["0"].form in tree, tree

        Path("scratch").mkdir()
        streamed = copy.deepcopy(dense)
        compress_streamed(streamed, CompressConfig(bits=6.0, allow_slower=True, **options), Path("scratch"))
        state, streamed_state = model.state_dict(), streamed.state_dict()
        assert state.keys() == streamed_state.keys()
        assert all(torch.equal(state[name], streamed_state[name]) for name in state if "codes" in name)

        for more in ({"forms": ["int4", "low_rank"]}, {"measure_speed": True}):
            mixed = pr.compress(copy.deepcopy(dense), bits=6.0, **options | more)
            assert mixed.eligible_bytes_after <= 6.0 / 32 * mixed.eligible_bytes_before

        try:
            model[0].weight = dense[0].weight
        except AttributeError as error:
            assert "weight of QuantizedConv1d is computed from" in str(error), error

        output = model(x)
        replaced = pr.to_linears_(model)
        assert not replaced.skipped and [type(model[place]) for place in (0, 2)] == [nn.Conv1d] * 2, replaced
        assert torch.allclose(model(x), output, atol=1e-5)
        """
    paths = os.pathsep.join([str(SUPPORT), *sys.path])
    run = waits.run([sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths})
    assert run.returncode == 0, run.stderr
