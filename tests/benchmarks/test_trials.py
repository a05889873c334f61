"""Trials at a reduced size: every trial runs, and its rows say what its page claims."""

import importlib
import sys

import pytest
import torch

pytestmark = [pytest.mark.tool, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("name", ["trial_encoder", "trial_digits"])
def test_the_better_metric_keeps_more(name):
    if name == "trial_digits":
        pytest.importorskip("sklearn")
    trial = importlib.import_module(f"benchmarks.compress.{name}")
    rows = {row["method"]: row for row in trial.run(True, None)}
    compressed = [row for method, row in rows.items() if method != "original"]
    assert {row["budget"] for row in compressed} == {0.5}
    assert all(row["kept"] <= row["budget"] for row in compressed)
    assert all(row["model_bytes"] < rows["original"]["model_bytes"] for row in compressed)
    gaps = {method: row["gap"] for method, row in rows.items()}
    assert gaps["two_sided"] < gaps["svd"] < gaps["random"]


@pytest.mark.parametrize("task", ["encoder", "smollm2", "heal"])
def test_linear_attention_keeps_a_model(task):
    pytest.importorskip("transformers")
    from benchmarks.compress import trial_linearize

    (row,) = trial_linearize.run(task, True)
    assert 0 < row["rel_error"] < 0.1
    assert row["correlation"] > 0.99


def test_a_sliding_window_is_measured_without_training():
    pytest.importorskip("transformers")
    from benchmarks.compress import trial_linearize

    (row,) = trial_linearize.run("sliding", True)
    assert (row["window"], row["first"]) == (8, 4)
    assert 3.5 < row["loss"] < 4.7  # a model of random weights over 60 tokens


def test_training_from_scratch_compares_forms_of_equal_bytes():
    pytest.importorskip("sklearn")
    from benchmarks.train import scratch_tasks, trial_scratch

    task, _ = scratch_tasks.image_tasks(True)
    parts = [part for name in ("AdamW", "Muon") for part in trial_scratch.run(task, name, "quick")]
    cases = {(row["optimizer"], row["form"]): row for rows, _ in parts for row in rows if row["equal"] == "steps"}
    for optimizer in ("AdamW", "Muon"):
        sketched, *equal_bytes, twice = (
            row for (name, form), row in cases.items() if name == optimizer and form != "dense"
        )
        assert [row["form"] for row in equal_bytes] == [
            "sketched in part",
            "low rank",
            "low rank in part",
            "dense, narrower",
        ]
        for row in equal_bytes:
            assert row["stored_bytes"] == pytest.approx(sketched["stored_bytes"], rel=0.05)
            assert row["gradient_bytes"] == pytest.approx(sketched["gradient_bytes"], rel=0.05)
        assert twice["linear_flops"] == pytest.approx(sketched["linear_flops"], rel=0.05)
        assert cases["AdamW", "dense"]["stored_bytes"] > twice["stored_bytes"] > sketched["stored_bytes"]
    assert ("Muon", "dense") not in cases
    assert cases["Muon", "sketched"]["loss"] != cases["AdamW", "sketched"]["loss"]
    assert cases["Muon", "sketched"]["optimizer_bytes"] < 0.7 * cases["AdamW", "sketched"]["optimizer_bytes"]


@pytest.mark.parametrize("task", ["encoder", "encoder-3", "smollm2", "images"])
def test_the_chosen_forms_keep_more_than_others_of_their_size(task):
    pytest.importorskip("transformers")
    from benchmarks.compress import trial_frontier, trial_frontier_speed

    rows = {row["method"]: row for row in trial_frontier.run(task, True, None)}
    assert rows["original"]["bits"] == 32
    if task == "encoder":
        assert rows["nearest"]["correlation"] < rows["GPTQ"]["correlation"] <= rows["panther"]["correlation"]
        assert rows["panther"]["bits"] <= 4.25
    elif "low rank + healing" in rows:
        assert rows["low rank + healing"]["kept"] <= 0.5
    else:
        assert rows["low rank"]["rel_error"] < rows["SVD"]["rel_error"]
    speeds = trial_frontier_speed.run(task, True, None)
    assert {row["x float32"] for row in speeds if row["form"] == "float32"} == {1.0}
    assert {row["form"] for row in speeds} >= {"float32", "bfloat16"}


@pytest.mark.parametrize("task", ["encoder", "images"])
def test_whole_files_shrink_with_the_bits(task):
    pytest.importorskip("transformers")
    from benchmarks.compress import trial_files

    rows = list(trial_files.run(task, quick=True, bits=(4.5,)))
    assert [row["method"] for row in rows] == ["float32", "bfloat16", "panther, 4.5 bits"]
    sizes = [row["file_mb"] for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] < 0.3 * sizes[0]
    assert rows[0]["correlation"] == pytest.approx(1.0)
    assert rows[2]["correlation"] > 0.9
    if task == "encoder":
        assert rows[2]["tables"].startswith("word_embeddings:int")
        assert rows[2]["unseen"] > 0.9


@pytest.mark.slow
def test_folders_are_measured_and_larger_ones_predicted():
    pytest.importorskip("transformers")
    from benchmarks.compress import trial_folder

    rows = list(trial_folder.run(trial_folder.QUICK))
    folder, memory, *predictions = rows
    assert (folder["method"], memory["method"]) == ("folder", "memory")
    assert folder["file_gb"] == memory["file_gb"] > 0
    assert folder["peak_mb"] > 0
    assert folder["disk_gb"] > 0
    assert min(folder[phase] for phase in ("forward", "moments", "fits", "choice")) > 0
    assert [row["model"] for row in predictions] == ["7 billion"] * 2 + ["70 billion"] * 2
    assert predictions[0]["cpu_s"] == pytest.approx(8 * predictions[1]["cpu_s"], rel=0.01)
    seven = trial_folder.LARGE["7 billion"]
    assert seven.numbers == pytest.approx(6.7e9, rel=0.02)


def test_files_of_other_tools_are_measured_where_the_tools_are_installed(capsys):
    pytest.importorskip("transformers")
    from benchmarks.compress import trial_peers

    rows = {row["method"]: row for row in trial_peers.run(quick=True)}
    names = ["GPTQ, 8 bits", "GPTQ, 4 bits", "GPTQ+embeddings, 5 bits", "GPTQ+embeddings, 4 bits"]
    assert [name for name in rows if name.startswith("GPTQ")] == names
    assert "panther, 4.5 bits" in rows
    sizes = [rows[name]["file_mb"] for name in names]
    assert sizes == sorted(sizes, reverse=True)
    assert min(row["correlation"] for row in rows.values()) > 0.9
    printed = capsys.readouterr().out
    assert ("hqq, 4 bits" in rows) is ("hqq" not in printed)


@pytest.mark.extra
@pytest.mark.slow
def test_onnx_files_are_smaller_than_those_of_onnxruntime(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("onnxruntime")
    from benchmarks.compress import trial_onnx

    rows = {row["method"]: row for row in trial_onnx.run(True, tmp_path)}
    assert len(rows) == 9
    assert rows["Panther, int4"]["file_mb"] < rows["Panther, int8"]["file_mb"] < 0.4 * rows["float32"]["file_mb"]
    assert float(rows["Panther, int4"]["error"]) < 1e-5 < float(rows["Panther, int4, rounded"]["error"]) < 0.05


@pytest.mark.parametrize("task", ["digits", "retrieval"])
def test_a_search_finds_what_is_good_enough(task):
    for module in ("sklearn", "optuna", *(["transformers"] if task == "retrieval" else [])):
        pytest.importorskip(module)
    from benchmarks.compress import trial_tune

    rows, points = trial_tune.run(task, True)
    sizes = {row["method"]: row["size_mb"] for row in rows}
    assert sizes["tuned"] < sizes["unchanged"] / 2
    assert {point["method"] for point in points} >= {"tuned", "random"}


@pytest.mark.torture
@pytest.mark.distributed
def test_a_text_model_trains_the_same_when_killed_or_in_another_layout(monkeypatch):
    """The trial itself compares the killed run to the undisturbed one, to the bit."""
    from benchmarks.train import trial_text

    monkeypatch.setenv("PANTHER_TRIAL_TEXT", "")  # the trial sets it
    rows, curves = trial_text.run(True)
    sent = {row["run"]: row["bytes_rank_0"] for row in rows}
    assert sent["sketched, killed twice"] < sent["dense"] / 2
    losses = {(line["run"], line["step"]): line["loss"] for line in curves if line["loss"] is not None}
    for layout in ("sketched, fsdp", "sketched, pp = 2"):
        layout_losses = {step: loss for (run, step), loss in losses.items() if run == layout}
        assert len(layout_losses) >= 2
        expected = [losses["sketched, killed twice", step] for step in layout_losses]
        torch.testing.assert_close(list(layout_losses.values()), expected, rtol=1e-5, atol=0)


@pytest.mark.distributed
def test_two_nodes_send_what_their_layout_needs_and_no_faster_than_the_link(monkeypatch):
    """The trial itself compares the losses of the layouts; bytes are those that the interface counted."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PANTHER_TRIAL_TEXT", "")  # the trial sets it
    from benchmarks.distributed import trial_link

    rate = 1e8
    try:
        rows, curves = trial_link.run({"slow": rate}, seconds=1.0, rounds=2, quick=True)
    except trial_link.two_nodes.UnavailableError as error:
        pytest.skip(str(error))
    runs = {row["run"]: row for row in rows}
    dense, sketched = runs["dense, ddp"], runs["sketched, ddp"]
    for row in (dense, sketched):  # of two ranks, each sends every gradient once; headers come on top
        assert 1 < row["sent_bytes"] / (4 * row["numbers"]) < 1.2
    assert runs["sketched, ddp, bf16 hook"]["sent_bytes"] < 0.6 * sketched["sent_bytes"]
    assert runs["dense, ddp, PowerSGD"]["sent_bytes"] < 0.3 * dense["sent_bytes"]
    assert runs["dense, fsdp"]["sent_bytes"] > 1.4 * dense["sent_bytes"]
    assert runs["sketched, tp"]["sent_bytes"] < 0.6 * runs["dense, tp"]["sent_bytes"]
    for row in rows:
        assert row["step_ms"] / 1e3 > 0.8 * 8 * row["sent_bytes"] / rate  # less the bucket, which is full at first
        times = [point["s"] for point in curves if point["run"] == row["run"]]
        assert len(times) > 1
        assert times == sorted(set(times))


@pytest.mark.slow
def test_an_encoder_is_compressed_exported_and_served():
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("onnxruntime")
    from benchmarks.compress import trial_serve

    rows = {(row["model"], row["engine"]): row for row in trial_serve.run(quick=True)}
    assert len(rows) == 4
    original, compressed = rows["original", "torch"], rows["compressed", "torch"]
    assert compressed["file_mb"] < 0.25 * original["file_mb"]
    assert compressed["ten"] > 0.9 * original["ten"] > 0.5
    assert all(row["cosine"] > 0.9 for row in rows.values())
    assert rows["original", "ONNX"]["cosine"] > 0.9999
    assert all(0 < row["p50_s"] <= row["p95_s"] <= row["p99_s"] for row in rows.values())
