"""Records in files: read back, one run even after a restart, on the first rank only."""

import json
import math

import pytest
import torch
from breaking import Breaks, BrokenError
from ranks import on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from panther.errors import MissingExtraError, TrainingError, install_command
from panther.train import History, TrainConfig, Trainer
from panther.train.trackers import _JsonLines


def data(n=24):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(n, 8, generator=generator)
    return TensorDataset(x, x[:, :2])


def train(folder, callbacks=(), metrics=None, **settings):
    torch.manual_seed(0)
    settings = {"max_steps": 12, "log_every_n_steps": 2, "checkpoint_every_n_steps": 4, **settings}
    config = TrainConfig(checkpoint_dir=folder, run_name="mine", **settings)
    trainer = Trainer(nn.Linear(8, 2), None, nn.MSELoss(), config, callbacks, metrics=metrics)
    trainer.fit(DataLoader(data(), 4, shuffle=True), DataLoader(data(10), 5))
    return trainer


def interrupted(folder, **settings):
    """A run that breaks after step 11, with a checkpoint of step 8 and records of steps 8 and 10, and goes on."""
    with pytest.raises(BrokenError):
        train(folder, [Breaks(11)], **settings)
    return train(folder, **settings)


def lines(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_json_lines_are_the_history_after_a_restart(tmp_path):
    trainer = interrupted(tmp_path)
    assert lines(tmp_path) == list(trainer.history)
    assert [row["step"] for row in lines(tmp_path) if "loss" in row] == [2, 4, 6, 8, 10, 12]


def test_half_a_line_is_taken_out(tmp_path):
    train(tmp_path, max_steps=4)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    trainer = train(tmp_path, max_steps=6)
    assert lines(tmp_path) == list(trainer.history)


def test_json_has_no_nan(tmp_path):
    train(tmp_path, metrics={"odd": lambda output, target: torch.tensor(math.nan)}, max_steps=6)
    found = [
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        for line in (tmp_path / "log.jsonl").read_text().splitlines()
    ]
    assert [row["validation_odd"] for row in found if "validation_odd" in row] == [None]


def test_a_full_disk_is_named(tmp_path):
    tracker = _JsonLines(tmp_path / "log.jsonl", History())
    tracker.close("FINISHED")
    tracker._file = open("/dev/full", "w")  # noqa: SIM115 (closing it fails, too)
    with pytest.raises(TrainingError, match=r"^/dev/full cannot be written \(No space left on device\): make room$"):
        tracker.on_record(None, {"step": 1})
    with pytest.raises(OSError, match="No space left"):
        tracker.close("FAILED")


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


@pytest.mark.extra
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_one_run_after_a_restart(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    trainer = interrupted(tmp_path, trackers=("tensorboard",))
    found = events(tmp_path)
    for name in ("loss", "learning_rate", "gradient_norm", "validation_loss"):
        steps, values = trainer.history[name]
        assert [step for step, _ in found[name]] == steps
        assert [value for _, value in found[name]] == pytest.approx(values, rel=1e-6)
    assert not (tmp_path / "log.jsonl").exists()


def stored(folder):
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("mine")
    runs = client.search_runs([experiment.experiment_id])
    return client, runs


@pytest.mark.extra
@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_one_run_after_a_restart(tmp_path):
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="the extra mlflow is not installed")
    with pytest.raises(BrokenError):
        train(tmp_path, [Breaks(11)], trackers=("jsonl", "mlflow"))
    client, [run] = stored(tmp_path)
    assert run.info.status == "FAILED"
    trainer = train(tmp_path, trackers=("jsonl", "mlflow"))
    client, [run] = stored(tmp_path)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "mine")
    assert (run.data.params["max_steps"], run.data.params["run_name"]) == ("12", "mine")
    assert run.data.metrics["loss"] == pytest.approx(trainer.history.last["loss"])
    steps = {metric.step for metric in client.get_metric_history(run.info.run_id, "loss")}
    assert steps == {2, 4, 6, 8, 10, 12}
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["log.jsonl"]


@pytest.mark.extra
@pytest.mark.filterwarnings("ignore")
def test_mlflow_of_the_user_is_used(tmp_path, monkeypatch):
    """A run that is active, with parameters of the user, stays the user's; else the store and the experiment do."""
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="the extra mlflow is not installed")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.setenv(name, "")
    uri = f"sqlite:///{tmp_path}/users.db"
    monkeypatch.chdir(tmp_path)  # MLflow writes artifacts into the working directory
    mlflow.set_tracking_uri(uri)
    try:
        mlflow.set_experiment("theirs")
        with mlflow.start_run(run_name="begun") as begun:
            mlflow.log_param("max_steps", "mine")  # which MLflow does not let others change
            for steps in (4, 8):  # in one run, twice
                history = train(tmp_path / "active", max_steps=steps, trackers=("jsonl", "mlflow")).history
            assert mlflow.active_run().info.run_id == begun.info.run_id
            mlflow.log_metric("after", 1.0)
        train(tmp_path / "own", max_steps=4, trackers=("mlflow",))
        client = mlflow.MlflowClient(tracking_uri=uri)
        runs = client.search_runs([client.get_experiment_by_name("theirs").experiment_id], order_by=["start_time"])
        assert [run.info.run_name for run in runs] == ["begun", "mine"]
        assert [run.info.status for run in runs] == ["FINISHED"] * 2
        assert (runs[0].data.params["max_steps"], runs[0].data.params["seed"]) == ("mine", "0")
        assert runs[0].data.metrics["loss"] == pytest.approx(history.last["loss"])
        assert runs[0].data.metrics["device_hours"] == pytest.approx(history.device_hours)
        assert runs[0].data.metrics["after"] == 1.0
        assert not any((tmp_path / name / "mlflow.db").exists() for name in ("active", "own"))
        assert not (tmp_path / "active" / "mlflow-run").exists()
    finally:
        mlflow.set_tracking_uri(None)


@pytest.mark.extra
@pytest.mark.filterwarnings("ignore")
def test_a_lost_mlflow_store_is_said_with_the_fix(tmp_path):
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="the extra mlflow is not installed")
    train(tmp_path, max_steps=2, trackers=("mlflow",))
    (tmp_path / "mlflow.db").unlink()
    with pytest.raises(TrainingError, match=r"refuses the run .*: remove .*mlflow-run to start another run"):
        train(tmp_path, max_steps=4, trackers=("mlflow",))


def test_what_a_tracker_says_at_the_end_does_not_hide_how_the_run_ended(tmp_path, monkeypatch, caplog):
    def close(self, status):
        self._file.close()
        raise ZeroDivisionError

    monkeypatch.setattr(_JsonLines, "close", close)
    with pytest.raises(BrokenError):
        train(tmp_path, [Breaks(3)])
    assert "_JsonLines could not be closed: ZeroDivisionError" in caplog.text


def test_a_log_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(TrainingError, match=r"log\.jsonl cannot be written .*: remove it, or name another directory"):
        train(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


def test_a_log_that_cannot_be_written_anew_stays(tmp_path, monkeypatch):
    train(tmp_path, max_steps=4)
    first_lines = lines(tmp_path)

    def write_to_a_full_disk(draft):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("panther.files.writer.Draft.finish", write_to_a_full_disk)
    with pytest.raises(TrainingError, match="No space left on device"):
        train(tmp_path, max_steps=6)
    assert lines(tmp_path) == first_lines


@pytest.mark.extra
@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_only_the_first_rank_writes(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    on_ranks(lambda: train(tmp_path, trackers=("jsonl", "tensorboard"), strategy="ddp").step)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    assert [row["step"] for row in lines(tmp_path) if "loss" in row] == [2, 4, 6, 8, 10, 12]


@pytest.mark.distributed
def test_what_is_not_installed_is_said_on_every_rank(tmp_path, monkeypatch):
    def missing(module, extra):
        raise MissingExtraError(f"{module} is needed: {install_command(extra)}")

    monkeypatch.setattr("panther.train.trackers.require_extra", missing)

    def run():
        with pytest.raises(MissingExtraError, match="pip install") as caught:
            train(tmp_path, trackers=("mlflow",), progress=False)
        return str(caught.value)

    first, second = on_ranks(run, fresh=True)
    assert "mlflow" in first
    assert "mlflow" in second
