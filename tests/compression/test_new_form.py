"""A form that the library does not know: one file with a layer, a form and a registration is all that it takes."""

import os
import sys
import textwrap
from pathlib import Path

import waits

SUPPORT = Path(__file__).parents[1] / "support"


def test_a_form_is_one_file_and_a_registration(tmp_path):
    """In a process of its own, because forms are registered for good."""
    code = """
        import copy, torch, panther as pr
        from torch import nn
        from panther.compression.forms import default_forms, known_forms
        before = known_forms()
        from table_form import TableLinear

        assert known_forms() == (*before, "nf4") and "nf4" not in default_forms()
        torch.manual_seed(0)
        dense = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 33, bias=False), nn.Tanh(), nn.Linear(33, 20))
        x = torch.randn(256, 48)
        options = {"calibration": x.split(32), "seed": 0, "measure_speed": False}

        model = copy.deepcopy(dense)
        report = pr.compress(model, bits=6.0, forms=["dense", "nf4"], group_size=32, **options)
        assert {layer.form for layer in report.layers} == {"nf4"}
        stored = sum(t.nbytes for m in model if isinstance(m, TableLinear) for t in (m.codes, m.scales))
        assert stored == sum(layer.bytes_after for layer in report.layers), (stored, report.layers)
        error = ((model(x) - dense(x)).norm() / dense(x).norm()).item()
        assert 0.3 * error < report.predicted_error < 3 * error and error < 0.2, (error, report.predicted_error)

        pr.save_compressed(model, "saved")
        loaded = pr.load_compressed("saved", copy.deepcopy(dense))
        assert torch.equal(loaded(x), model(x)) and type(loaded[0]) is TableLinear
        assert {row.form for row in pr.inspect.tree(loaded).rows if row.kind == "TableLinear"} == {"nf4"}
        from panther.inspect import tree_of_tensors
        records = {"0": loaded[0].to_record()}
        assert tree_of_tensors({"0.codes": ((64, 24), 1536, False)}, records).rows[-1].form == "nf4"
        assert not pr.to_linears_(loaded).skipped and type(loaded[0]) is nn.Linear
        torch.testing.assert_close(loaded(x), model(x))

        # Beside Panther's own forms, under one budget, fitted in sequence, timed, and in a search.
        for more in ({}, {"measure_speed": True, "allow_slower": True}, {"method": "svd"}):
            mixed = pr.compress(
                copy.deepcopy(dense), bits=5.0, forms=["nf4", "int3", "low_rank"], group_size=32, **options | more
            )
            assert mixed.eligible_bytes_after <= 5.0 / 32 * mixed.eligible_bytes_before
        """
    paths = os.pathsep.join([str(SUPPORT), *sys.path])
    run = waits.run([sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths})
    assert run.returncode == 0, run.stderr
