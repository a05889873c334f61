"""The Trainer on Ray's workers: equal to plain processes, also when one is killed; faults are said in a sentence."""

import contextlib
import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import waits
from torch import nn
from torch.utils.data import TensorDataset

import panther as pr
from panther.distributed import checkpoint, launch
from panther.errors import ConfigError, DistributedError, TrainingError
from panther.train import Callback, TrainConfig, Trainer

pytestmark = [
    pytest.mark.engine,
    pytest.mark.distributed,
    # Ray 2.60: these settings, which Ray Train makes, warn of defaults of their own.
    pytest.mark.filterwarnings("ignore:::ray.data.context"),
]
STEPS = 12
_FOLDERS_OF_TESTS = (Path(__file__).parent, Path(waits.__file__).parent)


def network():
    return nn.Sequential(
        pr.nn.SKLinear(32, 64, 2, seed=3), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4)
    )


def samples():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(90, 32, generator=generator), torch.randint(4, (90,), generator=generator))


def settings(directory, **more):
    given = {
        "max_steps": STEPS, "batch_size": 8, "learning_rate": 0.01, "schedule": "cosine", "log_every_n_steps": 2,
        "checkpoint_every_n_steps": 3, "checkpoint_dir": str(directory), "timeout_s": 600, "strategy": "ddp",
    }  # fmt: skip
    return TrainConfig(**given | more)


def digest(path):
    """Of the model in a checkpoint."""
    model = network()
    assert checkpoint.load(path, model).step == STEPS
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()


def train_plainly(directory):
    """The same run without Ray, on each of the processes of panther.distributed.launch."""
    from panther._process_settings import seed_generators

    config = settings(directory)
    seed_generators(config.seed)
    Trainer(network(), None, nn.CrossEntropyLoss(), config).fit(samples(), samples())


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The digest after the run without Ray."""
    directory = tmp_path_factory.mktemp("plain")
    launch(train_plainly, str(directory), nproc=2, start_method="fork")
    return digest(checkpoint.checkpoints(directory)[-1])


@pytest.fixture(scope="module")
def cluster(expected):  # which forks, so it must come before Ray's threads
    """Two cores of Ray; what it starts ends with the module."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.train")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else it writes a token into the home directory
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")
        patch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(round(waits.scaled(20))))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(pr.__file__).parents[1]), *sys.path]))
        ray.init("local", num_cpus=2, include_dashboard=False)
        yield ray
        ray.shutdown()


@pytest.fixture
def scaling(cluster):
    return cluster.train.ScalingConfig(num_workers=2)


class KillOnce(Callback):
    """Kills a worker after a step, in one attempt of the run; the reason why it cannot go on is in the kernel only."""

    def __init__(self, mark, step):
        self.mark, self.at = Path(mark), step

    def on_step(self, trainer, loss):
        if trainer.step == self.at and torch.distributed.get_rank() == 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def restarts(ray, times):
    return ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=times))


def test_a_killed_worker_changes_no_bit(cluster, scaling, expected, tmp_path):
    from panther.integrations.ray import RayTrainer

    callbacks = [KillOnce(tmp_path / "killed", 7)]
    trainer = RayTrainer(
        network, None, nn.CrossEntropyLoss(), settings(tmp_path / "run"), callbacks, scaling_config=scaling,
        run_config=restarts(cluster, 1),
    )  # fmt: skip
    result = trainer.fit(samples(), samples)
    assert (tmp_path / "killed").exists()
    # Written once, in the folder of the run, which is Ray's.
    assert Path(result.checkpoint.path) == checkpoint.checkpoints(tmp_path / "run")[-1]
    assert digest(result.checkpoint.path) == expected
    history = result.return_value
    assert [record["step"] for record in history if "loss" in record] == [2, 4, 6, 8, 10, 12]
    assert [result.metrics[name] for name in ("step", "epoch")] == [STEPS, 2]
    assert all(result.metrics[name] == history[name][1][-1] for name in ("loss", "validation_loss"))


def test_more_steps_on_another_number_of_workers(cluster, scaling, tmp_path):
    from panther.integrations.ray import RayTrainer

    def run(workers, steps):
        config = settings(tmp_path / "run", max_steps=steps, checkpoint_every_n_steps=None)
        one = cluster.train.ScalingConfig(num_workers=workers)
        return RayTrainer(network, None, nn.CrossEntropyLoss(), config, scaling_config=one).fit(samples())

    first, second = run(2, 4), run(1, 8)
    steps = [[record["step"] for record in result.return_value] for result in (first, second)]
    assert steps == [[2, 4], [2, 4, 6, 8]]
    assert list(second.return_value)[:2] == list(first.return_value)
    assert Path(second.checkpoint.path) == checkpoint.checkpoints(tmp_path / "run")[-1]
    assert all(one.exists() for one in (Path(result.checkpoint.path) for result in (first, second)))


def test_a_lost_worker_and_storage_that_is_not_mounted(cluster, scaling, expected, tmp_path):
    from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

    from panther.integrations.ray import RayTrainer

    (tmp_path / "bucket").mkdir()
    storage = cluster.train.RunConfig(
        name="run",
        storage_path="runs",
        storage_filesystem=SubTreeFileSystem(str(tmp_path / "bucket"), LocalFileSystem()),
    )
    config, callbacks = settings(tmp_path / "scratch", keep_checkpoints=1), [KillOnce(tmp_path / "killed", 7)]
    trainer = RayTrainer(
        network, None, nn.CrossEntropyLoss(), config, callbacks, scaling_config=scaling, run_config=storage
    )
    said = r"lost worker 1 \(killed.* and max_failures=0 leaves no restart: raise it .*, or call fit again"
    with pytest.raises(DistributedError, match=said):
        trainer.fit(samples(), samples)
    # Ray may not have read the last report, and then continues from the checkpoint before.
    assert checkpoint.checkpoints(tmp_path / "bucket/runs/run")[-1].name == "step-00000006"
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "scratch")] == ["step-00000006"]
    shutil.rmtree(tmp_path / "scratch")  # as on a node that is new
    result = trainer.fit(samples(), samples)
    assert result.return_value["loss"][0] == [2, 4, 6, 8, 10, 12]
    with result.checkpoint.as_directory() as folder:
        assert digest(folder) == expected


def broken_on_one():
    if torch.distributed.get_rank() == 1:
        raise KeyError("no such width")
    return network()


@pytest.mark.parametrize(
    ("model_fn", "data", "options", "kind", "message"),
    [
        (broken_on_one, samples, {}, TrainingError, r"worker 1 raised KeyError: 'no such width'"),
        (network, [], {}, ConfigError, "the training data is empty"),
        (network, samples, {"loss_weight": lambda batch: -1}, ConfigError, r"the loss_weight of a batch is -1"),
    ],
)
def test_faults_on_workers_are_raised_here(cluster, scaling, tmp_path, model_fn, data, options, kind, message):
    from panther.integrations.ray import RayTrainer

    config = settings(tmp_path / "run", timeout_s=20)
    trainer = RayTrainer(model_fn, None, nn.CrossEntropyLoss(), config, scaling_config=scaling, **options)
    with pytest.raises(kind, match=message):
        trainer.fit(data)


def test_workers_that_do_not_fit_a_cluster_are_not_waited_for_forever(cluster, tmp_path):
    from panther.integrations.ray import RayTrainer

    three = cluster.train.ScalingConfig(num_workers=3)
    trainer = RayTrainer(network, config=settings(tmp_path / "run", timeout_s=20), scaling_config=three)
    with pytest.raises(DistributedError, match=r"could not run 3 workers of {'CPU': 1} on {.*'CPU': 2\.0.*timed out"):
        trainer.fit(samples())


def test_workers_that_do_not_fit_this_machine(tmp_path):
    """In a process without Ray's cluster: RayTrainer starts one, and ends it."""
    pytest.importorskip("ray")
    script = """
import torch, ray
from panther.integrations.ray import RayTrainer
from panther.errors import ConfigError
scaling = ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 500})
try:
    RayTrainer(torch.nn.ReLU, scaling_config=scaling).fit([])
except ConfigError as error:
    print(error)
print(ray.is_initialized())
"""
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    done = waits.run([sys.executable, "-c", script], env=environment, cwd=tmp_path)
    said, initialized = done.stdout.splitlines()[-2:]
    expected = "num_workers=2 with 500 CPU each need 1000 CPU, and this machine has "
    assert said.startswith(expected), done.stderr
    assert said.endswith(": lower them in the ScalingConfig, or give the address of a cluster")
    assert initialized == "False"


def test_bad_arguments_are_refused_before_anything_starts(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.train")
    from panther.integrations.ray import RayTrainer

    model = network()
    for arguments, message in (
        ({"model_fn": model}, "model_fn must be a function .* not a Sequential: pass lambda"),
        ({"optimizer": torch.optim.SGD(model.parameters(), 1.0)}, "the workers build the model: pass a function"),
        ({"config": {"epochs": 1}}, "config must be a TrainConfig"),
        ({"config": TrainConfig(resume="never")}, "resume='never' would refuse a restarted worker"),
        ({"loss_weight": 0.5}, "loss_weight must be a function of a batch, .*, not a float"),
        ({"scaling_config": {"num_workers": 2}}, "scaling_config must be a ray.train.ScalingConfig, not a dict"),
        ({"run_config": ray.train.ScalingConfig()}, "run_config must be a ray.train.RunConfig, not a ScalingConfig"),
    ):
        with pytest.raises(ConfigError, match=message):
            RayTrainer(**{"model_fn": network} | arguments)


def test_an_address_where_nothing_answers():
    pytest.importorskip("ray")
    script = (
        "import torch\nfrom panther.integrations.ray import RayTrainer\n"
        "try: RayTrainer(torch.nn.ReLU, address='127.0.0.1:9').fit([])\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    done = waits.run([sys.executable, "-c", script], env=environment)
    said = done.stdout.splitlines()[-1]
    assert said.startswith("DistributedError no Ray cluster could be joined at '127.0.0.1:9' ("), done.stderr
    assert said.endswith(": check that it runs and is reachable, or leave address out to use only this machine")


def test_the_script_of_the_page(tmp_path):
    pytest.importorskip("ray")
    script = Path(__file__).parents[2] / "docs/howto/scripts/train_ray.py"
    environment = os.environ | {
        "OUT": str(tmp_path / "run"), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1", "PYTHONPATH": str(Path(pr.__file__).parents[1]),
    }  # fmt: skip
    done = waits.run([sys.executable, script], 400, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"validation loss (\S+) at step 48$", done.stdout, re.MULTILINE)
    assert 0 < float(found[1]) < 1  # chance is log(10) = 2.3
    model = nn.Sequential(pr.nn.SKLinear(64, 256, 8), nn.ReLU(), nn.Linear(256, 10))
    pr.load_compressed(tmp_path / "run/model", model)


@pytest.fixture
def head(tmp_path):
    """A cluster in processes of their own, as on another machine; the address of its client's server."""
    pytest.importorskip("ray")
    pytest.importorskip("grpc")
    with contextlib.ExitStack() as open_sockets:
        ports = []
        for _ in range(2):
            taken = open_sockets.enter_context(socket.socket())
            taken.bind(("127.0.0.1", 0))
            ports.append(taken.getsockname()[1])
    command = [
        Path(sys.executable).parent / "ray", "start", "--head", "--block", "--num-cpus=2", f"--port={ports[0]}",
        f"--ray-client-server-port={ports[1]}", "--include-dashboard=false",
        # Ray's own are between 10,000 and 20,000, where a free port of the system may be.
        "--min-worker-port=0", "--max-worker-port=0",
    ]  # fmt: skip
    environment = os.environ | {
        "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
        "TIMEOUT_FOR_SPECIFIC_SERVER_S": "120",  # for the client's server to start
        # The client's proxy forks while its threads use gRPC, whose handlers then end the child before it begins.
        "GRPC_ENABLE_FORK_SUPPORT": "0",
        "PYTHONPATH": os.pathsep.join(map(str, [Path(pr.__file__).parents[1], *_FOLDERS_OF_TESTS])),
    }  # fmt: skip
    with open(tmp_path / "head.txt", "w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
    try:
        yield f"ray://127.0.0.1:{ports[1]}", environment
    finally:
        process.terminate()  # `ray stop` would end the clusters of others too
        waits.until(lambda: process.poll() is not None, "the cluster does not end")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_cluster_by_its_address(head, tmp_path):
    address, environment = head
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import sys; sys.path += {[str(folder) for folder in _FOLDERS_OF_TESTS]!r}
import ray, torch
from panther.integrations.ray import RayTrainer
from test_ray import network, samples, settings
config = settings({str(tmp_path / "run")!r}, max_steps=3)
scaling = ray.train.ScalingConfig(num_workers=2)
trainer = RayTrainer(network, None, torch.nn.CrossEntropyLoss(), config, scaling_config=scaling, address={address!r})
result = trainer.fit(samples())
print(result.checkpoint.path, result.return_value.last["step"], ray.is_initialized())
"""
    )
    written = (tmp_path / "head.txt").read_text
    waits.until(lambda: "Ray runtime started" in written(), written, limit_s=300)
    done = waits.run([sys.executable, script], env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"{checkpoint.checkpoints(tmp_path / 'run')[-1]} 3 False"
