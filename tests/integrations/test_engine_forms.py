"""The tables of forms and engines: a fresh process reads every form as the pages say, and the pages show the rows."""

from pathlib import Path

import pytest

import panther as pr
from panther.cli import main

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/engine-forms-cpu-amd-epyc-threads-1.csv"
NEEDED = {  # packages of the engines
    "panther": ["transformers"],
    "linears": ["transformers"],
    "torch.export": ["transformers"],
    "aotinductor": ["transformers"],
    "onnxruntime": ["transformers", "onnxscript", "onnxruntime"],
    "transformers": ["compressed_tensors", "peft"],
    "vllm": ["transformers"],
}


@pytest.fixture
def deployment(monkeypatch):
    """The benchmark that made the rows."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.engines import deployment

    return deployment


def check(deployment, engine, folder):
    """Compare what an engine makes of each form with the committed rows."""
    rows = deployment.read_csv(RESULTS)
    committed = {cell.form: cell for cell in deployment.cells(rows) if cell.engine == engine}
    for cell in deployment.engine_cells(engine, folder, is_timed=False):
        expected = committed.pop(cell.form)
        assert bool(cell.refusal) == bool(expected.refusal), (cell, expected)
        if cell.refusal:
            assert deployment.why(cell.refusal) == deployment.why(expected.refusal)
        assert cell.file_bytes == pytest.approx(expected.file_bytes, rel=0.02), cell.form
    assert not committed


@pytest.mark.extra
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", NEEDED)
def test_a_fresh_process_reads_the_forms_as_the_page_says(engine, deployment, tmp_path):
    for package in NEEDED[engine]:
        pytest.importorskip(package)
    check(deployment, engine, tmp_path)


@pytest.mark.engine
@pytest.mark.slow
def test_torchao_reads_the_forms_as_the_page_says(deployment, tmp_path):
    pytest.importorskip("torchao.quantization")
    pytest.importorskip("transformers")
    check(deployment, "torchao", tmp_path)


def test_the_pages_show_the_committed_rows(deployment):
    for name, table in deployment.tables(deployment.read_csv(RESULTS)).items():
        assert deployment.PAGES[name].read_text() == table, name


def test_every_form_and_engine_has_a_row(deployment):
    from benchmarks.engines import cases

    places = {(cell.form, cell.engine) for cell in deployment.cells(deployment.read_csv(RESULTS))}
    assert places == {(form, engine) for engine in cases.ENGINES for form in cases.forms_of(engine)}


@pytest.mark.parametrize("target", ["ggml", "tensorrt", "onnx "])
def test_an_unknown_target_is_one_sentence(target, tmp_path, capsys):
    pr.save_compressed(pr.nn.LowRankLinear(8, 8, 2), tmp_path / "small")
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "small"), "--to", target, "--out", str(tmp_path / "out")])
    assert f"invalid choice: {target!r} (choose from" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_times_on_a_gpu_are_predictions_from_bytes_and_flops(deployment):
    weight, ends = 2 * 1024 * 4096, 2 * (1024 + 4096)
    expected = (weight + ends) / 4.3e6 + 2.5  # bytes over bytes per microsecond, and one launch
    assert deployment.gpu_microseconds("dense, bfloat16", 1) == pytest.approx(expected)
    by_flops = 2 * 8192 * 1024 * 4096 / 790e6 + 2.5
    assert deployment.gpu_microseconds("dense, bfloat16", 8192) == pytest.approx(by_flops)
    assert deployment.gpu_microseconds("int8, rounded inputs", 1) is None
    assert "H200, predicted" in deployment.PAGES["deploy"].read_text()
    assert "no GPU has confirmed it" in (ROOT / "docs/howto/deploy.rst").read_text()
