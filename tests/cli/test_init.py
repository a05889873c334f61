"""The files of panther init: valid, quoted, and really run where this machine can."""

import json
import os
import re
import shlex
import signal
import string
import subprocess
import sys
from pathlib import Path

import pytest
import waits
import yaml
from launchers import Launcher

from panther.cli import main
from panther.cli.init._files import _seconds, write_files
from panther.cli.init._job import JobConfig
from panther.errors import PantherError

ARGUMENTS = [
    "--lr",
    "1",
    "two words",
    "$HOME $(ls) `ls` ${local_rank}",
    "it's",
    '"quoted"',
    "a;b",
    "*",
    "#x",
    "é",
    "😀",
    "@@name",
]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")


def init(kind, *options, script="train.py", arguments=()):
    assert main(["init", kind, *options, script, *arguments]) == 0


# The schema of a RayJob, which KubeRay does not publish: a type, a list of one schema, or a dict of fields, where a !
# marks those that are required. tests/cli/test_init_schemas.py has the schemas that are published, of the other files.
RAY_POD = {"!spec": dict}
RAYJOB = {
    "!apiVersion": "ray.io/v1",
    "!kind": "RayJob",
    "!metadata": {"!name": str},
    "!spec": {
        "!entrypoint": str,
        "backoffLimit": int,
        "shutdownAfterJobFinishes": bool,
        "!rayClusterSpec": {
            "!headGroupSpec": {"rayStartParams": {"num-cpus": "0", "num-gpus": "0"}, "!template": RAY_POD},
            "workerGroupSpecs": [
                {
                    "!groupName": str, "replicas": int, "!minReplicas": int, "!maxReplicas": int, "rayStartParams": {},
                    "!template": RAY_POD,
                }
            ],
        },
    },
}  # fmt: skip


def faults(value, schema, path="."):
    """What of a document breaks a schema."""
    if isinstance(schema, str):
        return [] if value == schema else [f"{path}: {value!r} is not {schema!r}"]
    if isinstance(schema, list):
        if not isinstance(value, list) or not value:
            return [f"{path}: {value!r} is no list"]
        return [fault for number, entry in enumerate(value) for fault in faults(entry, schema[0], f"{path}[{number}]")]
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [f"{path}: {value!r} is no mapping"]
        fields = {name.removeprefix("!"): entry for name, entry in schema.items()}
        absent = [name[1:] for name in schema if name.startswith("!") and name[1:] not in value]
        unknown = [name for name in value if name not in fields]
        found = [f"{path}: {name} is missing" for name in absent] + [f"{path}: {name} is unknown" for name in unknown]
        return found + [
            fault for name in value if name in fields for fault in faults(value[name], fields[name], f"{path}{name}.")
        ]
    return [] if type(value) is schema else [f"{path}: {value!r} is no {schema.__name__}"]


SIZES = ["--nodes=2", "--gpus-per-node=4", "--cpus-per-node=16", "--memory=64G", "--image=me/x:1", "--max-restarts=2"]


@pytest.mark.parametrize("options", [["--image=me/x:1"], SIZES], ids=["one node", "two nodes"])
def test_kubernetes(options):
    init("kubernetes", *options, arguments=ARGUMENTS)
    service, job = yaml.safe_load_all(Path("job.yaml").read_text())
    pytorchjob = yaml.safe_load(Path("pytorchjob.yaml").read_text())
    trainjob = yaml.safe_load(Path("trainjob.yaml").read_text())
    versions = [document["apiVersion"] for document in (service, job, pytorchjob, trainjob)]
    assert versions == ["v1", "batch/v1", "kubeflow.org/v1", "trainer.kubeflow.org/v1alpha1"]
    assert (service["spec"]["clusterIP"], job["spec"]["completionMode"]) == ("None", "Indexed")
    assert pytorchjob["spec"]["runPolicy"]["cleanPodPolicy"] == "None"
    assert trainjob["spec"]["runtimeRef"]["name"] == "torch-distributed"
    nodes = 2 if options is SIZES else 1
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == nodes
    replicas = pytorchjob["spec"]["pytorchReplicaSpecs"]
    assert sum(entry["replicas"] for entry in replicas.values()) == nodes
    assert {entry["restartPolicy"] for entry in replicas.values()} == {"OnFailure"}
    trainer = trainjob["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (nodes, 4 if nodes == 2 else 1)
    containers = {
        "PET_NODE_RANK": (trainer, "$(PET_MASTER_ADDR)"),
        "NODE_RANK": (job["spec"]["template"]["spec"]["containers"][0], "panther-0.panther"),
        "RANK": (replicas["Master"]["template"]["spec"]["containers"][0], "panther-master-0"),
    }
    for variable, (container, host) in containers.items():
        arguments = [re.sub(rf"(?<!\$)\$\({variable}\)", "1", word).replace("$$", "$") for word in container["args"]]
        assert arguments[-len(ARGUMENTS) - 1 :] == ["train.py", *ARGUMENTS]
        assert ("--node-rank=1" in arguments) == (f"--rdzv-endpoint={host}:29500" in arguments) == (nodes == 2)
    assert service["spec"]["selector"]["batch.kubernetes.io/job-name"] == job["metadata"]["name"]
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    if nodes == 2:
        assert container["resources"] == {"limits": {"nvidia.com/gpu": "4", "cpu": "16", "memory": "64Gi"}}


def test_a_volume_outlives_the_pods():
    init("kubernetes", "--image=x", "--volume=my-runs:/data/runs")
    _, job = yaml.safe_load_all(Path("job.yaml").read_text())
    pytorchjob = yaml.safe_load(Path("pytorchjob.yaml").read_text())
    trainjob = yaml.safe_load(Path("trainjob.yaml").read_text())
    (patch,) = trainjob["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pods = (
        job["spec"]["template"],
        pytorchjob["spec"]["pytorchReplicaSpecs"]["Master"]["template"],
        node["template"]["spec"]["template"],
    )
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        (mount,) = (mount for mount in container["volumeMounts"] if mount["mountPath"] == "/data/runs")
        (volume,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == mount["name"])
        assert volume["persistentVolumeClaim"] == {"claimName": "my-runs"}


@pytest.mark.parametrize("options", [["--image=me/x:1"], [*SIZES, "--volume=runs:/runs"]], ids=["small", "large"])
def test_ray(options, capsys):
    init("ray", *options, arguments=ARGUMENTS)
    large = len(options) > 1
    workers = "ScalingConfig(num_workers=8, use_gpu=True)" if large else "ScalingConfig(num_workers=1)"
    assert f"RayTrainer, on {workers}" in capsys.readouterr().err
    command, rayjob = yaml.safe_load_all(Path("rayjob.yaml").read_text())
    assert faults(rayjob, RAYJOB) == []
    cluster = rayjob["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    assert [group[name] for name in ("replicas", "minReplicas", "maxReplicas")] == [2 if large else 1] * 3
    (head,), (worker,) = (part["template"]["spec"]["containers"] for part in (cluster["headGroupSpec"], group))
    assert worker["resources"]["limits"] == ({"nvidia.com/gpu": "4", "cpu": "16", "memory": "64Gi"} if large else {})
    for part, container in ((cluster["headGroupSpec"], head), (group, worker)):
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted.keys() == {volume["name"] for volume in part["template"]["spec"]["volumes"]}
        assert mounted.get("kept") == ("/runs" if large else None)
    # The head runs the script as it was given: the file is in the ConfigMap that it mounts.
    volumes = cluster["headGroupSpec"]["template"]["spec"]["volumes"]
    (config,) = (volume["configMap"]["name"] for volume in volumes if "configMap" in volume)
    assert command["metadata"]["name"] == config
    (folder,) = (mount["mountPath"] for mount in head["volumeMounts"] if mount["name"] == "command")
    assert rayjob["spec"]["entrypoint"] == f"bash {folder}/run.sh"
    Path("run.sh").write_text(command["data"]["run.sh"])
    out, err = waits.communicate(shell("run.sh", **stubs(python='printf "%s\\0" "$@"')))
    assert (out.split("\0")[:-1], err) == (["train.py", *ARGUMENTS], "")


def shell(file, **environment):
    """Run a script with bash, first only reading it."""
    waits.run(["bash", "-n", file], check=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"} | environment
    return subprocess.Popen(["bash", file], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


SHOW = """import os, sys
words = os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ.get("PANTHER_BACKEND"), sys.argv[1:]
os.write(1, (" ".join(map(str, words)) + os.linesep).encode())  # a line at once, because ranks share the output
"""


@pytest.mark.distributed
def test_commands_of_two_containers_run(free_port):
    Path("train.py").write_text(SHOW)
    options = ["--nodes=2", "--image=x", "--backend=gloo", f"--port={free_port}"]
    init("kubernetes", *options, arguments=ARGUMENTS)
    _, job = yaml.safe_load_all(Path("job.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    commands = [[word.replace("$(NODE_RANK)", str(rank)) for word in container["args"]] for rank in range(2)]
    host = "panther-0.panther"
    launchers = [
        Launcher(f"node{rank}", *(word.replace("$$", "$").replace(f"={host}:", "=127.0.0.1:") for word in command))
        for rank, command in enumerate(commands)
    ]
    (code, output), (other_code, other_output) = (launcher.wait() for launcher in launchers)
    assert (code, other_code) == (0, 0), output + other_output
    assert output.splitlines()[-1] == f"0 2 gloo {ARGUMENTS}"
    (other,) = Path().glob("panther-logs/*/attempt-0/rank-1.out")
    assert other.read_text() == f"1 2 gloo {ARGUMENTS}\n"


def test_torchrun_gets_its_options_and_the_arguments_as_they_are():
    from torch.distributed.run import config_from_args, parse_args

    init("torchrun", "--nproc-per-node=2", "--backend=gloo", "--grace=60", arguments=ARGUMENTS)
    show = 'printf "%s\\0" "$PANTHER_BACKEND" "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" "$@"'
    out, err = waits.communicate(shell("torchrun.sh", **stubs(torchrun=show)))
    backend, grace, *arguments = out.split("\0")[:-1]
    assert (backend, grace, err) == ("gloo", "60", "")
    config, _, command = config_from_args(parse_args(arguments))
    assert (config.nproc_per_node, config.max_nodes, config.max_restarts) == (2, 1, 0)
    # As torchrun does when it starts a worker.
    assert [string.Template(word).safe_substitute(local_rank="0") for word in command] == ["-u", "train.py", *ARGUMENTS]


@pytest.mark.slow
@pytest.mark.distributed
def test_torchrun_runs():
    Path("train.py").write_text(SHOW)
    init("torchrun", "--nproc-per-node=2", "--backend=gloo", arguments=ARGUMENTS)
    out, err = waits.communicate(shell("torchrun.sh"))
    assert sorted(out.splitlines()) == [f"{rank} 2 gloo {ARGUMENTS}" for rank in range(2)], err


def test_torchrun_on_several_nodes_needs_an_address():
    init("torchrun", "--nodes=2")
    process = shell("torchrun.sh")
    _, err = waits.communicate(process)
    assert process.returncode != 0
    assert "MASTER_ADDR: set it to the name of one node, on all" in err


def stubs(**texts):
    """Environment with stand-ins: Slurm's commands, as far as the script needs them, and others by name."""
    folder = Path("bin").absolute()
    folder.mkdir()
    texts |= {
        "scontrol": 'if [ "$1" = show ]; then echo 127.0.0.1; echo other; else echo "$@" >> scontrol.log; fi',
        "scancel": 'if [ "$*" = "--signal=TERM 7.0" ]; then kill -TERM "$(cat step.pid)"; fi',
    }
    for name, script in texts.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {"PATH": path, "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1"}


@pytest.fixture
def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
@pytest.mark.distributed
def test_slurm_runs_on_two_nodes(free_port):
    Path("train.py").write_text(SHOW)
    init("slurm", "--nodes=2", "--cpus-per-node=1", "--backend=gloo", f"--port={free_port}", arguments=ARGUMENTS)
    srun = 'shift; SLURM_NODEID=0 "$@" & first=$!; SLURM_NODEID=1 "$@" || exit; wait $first'
    process = shell("slurm.sbatch", **stubs(srun=srun))
    out, err = waits.communicate(process)
    assert process.returncode == 0, err
    assert out.splitlines() == ["first node: 127.0.0.1", f"0 2 gloo {ARGUMENTS}"]
    assert [path.read_text() for path in Path().glob("panther-logs/*/attempt-0/rank-1.out")] == [
        f"1 2 gloo {ARGUMENTS}\n"
    ]
    assert not Path("scontrol.log").exists()


def test_slurm_job_saves_and_is_queued_again_before_its_time_is_up():
    """With a stand-in for the launcher too, whose answer to TERM, to pass it on and return 143, test_launch tests."""
    Path("train.py").write_text(
        "import signal, sys\n"
        "def save(*_):\n    open('saved', 'w').close()\n    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, save)\nopen('ready', 'w').close()\nwhile True:\n    signal.pause()\n"
    )
    init("slurm", "--time=1:00:00")
    # As srun does, the stand-in answers TERM by killing the processes: it must not be what is sent to it.
    srun = 'shift; SLURM_NODEID=0 "$@" & echo $! > step.pid; trap "kill -KILL $!" TERM; wait $!'
    process = shell("slurm.sbatch", **stubs(srun=srun, panther="exec python -S train.py"))
    waits.until(lambda: Path("ready").exists() or process.poll() is not None, "the script did not start")
    assert process.poll() is None
    process.send_signal(signal.SIGUSR1)
    _, err = waits.communicate(process)
    assert process.returncode == 143, err
    assert Path("saved").exists()
    assert Path("scontrol.log").read_text() == "requeue 7\n"


def test_slurm_directives():
    init("slurm", *SIZES, "--time=1-12:00:00", "--partition=gpu,long", "--grace=60", "--name=job", script="t.py")
    lines = Path("slurm.sbatch").read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    assert [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")] == [
        "job-name=job", "nodes=2", "ntasks-per-node=1", "cpus-per-task=16", "gpus-per-node=4", "mem=64G",
        "time=1-12:00:00", "partition=gpu,long", "output=%x-%j.out", "open-mode=append", "requeue", "signal=B:USR1@90",
    ]  # fmt: skip
    arguments = shlex.split(" ".join(lines[lines.index("arguments=(") + 1 : lines.index(")")]))
    assert arguments[:2] == ["--nproc-per-node=4", "--nnodes=2"]
    assert {"--rdzv-endpoint=$head_node:29500", "--max-restarts=2", "--shutdown-timeout=60"} < set(arguments)


def test_config_file_and_options(capsys):
    Path("job.toml").write_text(
        '[launch]\nscript = "package.train"\nmodule = true\nargs = ["--lr", "1 2"]\nnodes = 3\nname = "mine"\n'
    )
    assert main(["init", "slurm", "--config=job.toml", "--nodes=4", "--out=files"]) == 0
    assert capsys.readouterr().out == f"{Path('files/slurm.sbatch')}: Submit with: sbatch slurm.sbatch (in files)\n"
    script = Path("files/slurm.sbatch").read_text()
    assert "#SBATCH --nodes=4\n" in script
    assert "    --module\n    package.train\n    --lr\n    '1 2'\n" in script


def test_one_file_says_what_to_train_and_on_what(capsys):
    Path("mine.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n"
        "def net():\n    return torch.nn.Linear(3, 2)\n"
        "def data():\n    return TensorDataset(torch.randn(8, 3), torch.randn(8, 2))\n"
    )
    Path("run.toml").write_text(
        'model = "mine:net"\ndata = "mine:data"\nloss_fn = "mse_loss"\n[train]\nbatch_size = 2\n'
        'checkpoint_dir = "kept"\n[launch]\nnproc_per_node = 2\nbackend = "gloo"\n'
    )
    assert main(["init", "torchrun", "--config=run.toml"]) == 0
    script = Path("torchrun.sh").read_text()
    assert "--nproc-per-node=2 \\\n" in script
    assert script.endswith("    --module \\\n    panther \\\n    train \\\n    --config \\\n    run.toml\n")
    assert main(["train", "--config", "run.toml"]) == 0
    assert "step 4  epoch 1" in capsys.readouterr().out
    assert [path.name for path in Path("kept").glob("step-*")] == ["step-00000004"]


def test_a_script_on_the_command_line_wins():
    both = '[launch]\nscript = "package.first"\nmodule = true\nargs = ["--old"]\nnodes = 2\n'
    for content in ('model = "mine:net"\n[launch]\nargs = ["epochs=2"]\nnodes = 2\n', both):
        Path("job.toml").write_text(content)
        init("slurm", "--config=job.toml", "--force", script="other.py")
        content = Path("slurm.sbatch").read_text()
        assert content.partition("arguments=(")[2].partition("\n)")[0].endswith("\n    other.py")
        assert "--module" not in content
        assert "#SBATCH --nodes=2\n" in content
    Path("job.toml").write_text('[launch]\nargs = ["--lr", "1"]\n')
    init("slurm", "--config=job.toml", "--force", script="other.py")
    assert "    other.py\n    --lr\n    1\n)" in Path("slurm.sbatch").read_text()


def test_slurm_without_cores_is_noted(capsys):
    init("slurm", "--gpus-per-node=8")
    assert capsys.readouterr().err == (
        "panther: note: slurm.sbatch asks for no cores, and Slurm then gives the cluster's default, usually one core "
        "on each node for its 8 processes: add --cpus-per-node N\n"
    )
    init("slurm", "--gpus-per-node=8", "--cpus-per-node=64", "--force")
    init("torchrun")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("30", 1800), ("30:10", 1810), ("1:30:10", 5410), ("2-3", 183600), ("2-3:10", 184200), ("2-3:10:05", 184205)],
)
def test_times_are_read_as_slurm_does(time, seconds):
    assert _seconds(time) == seconds


def test_slurm_needs_time_to_save():
    def sbatch(**options):
        return write_files("slurm", JobConfig(script="t.py", **options))["slurm.sbatch"]

    for enough in ("2:31", "0"):
        assert "USR1@150\n" in sbatch(time=enough)
    with pytest.raises(PantherError, match="--time 2:30 is 150 s and must be more than --grace 120 and 30 s"):
        sbatch(time="2:30")
    assert "USR1@65535\n" in sbatch(time="2-0", grace=65505)


def test_nothing_is_overwritten_without_force(capsys):
    init("torchrun")
    first_script = Path("torchrun.sh").read_text()
    assert main(["init", "torchrun", "--nproc-per-node=2", "train.py"]) == 2
    message = "torchrun.sh in . would be overwritten: add --force, or another --out, before the script\n"
    assert capsys.readouterr().err.endswith(message)
    assert Path("torchrun.sh").read_text() == first_script
    init("torchrun", "--nproc-per-node=2", "--force")
    assert "--nproc-per-node=2" in Path("torchrun.sh").read_text()


def test_options_after_the_script_are_refused_unless_they_are_set_apart(capsys):
    assert main(["init", "slurm", "train.py", "--out", "X", "--lr=1", "--time=01:00:00"]) == 2
    assert capsys.readouterr().err == (
        "panther: error: --out, --time=01:00:00 after train.py would be an argument of the script: put options of "
        "panther init before the script, or -- after the script if they are for the script\n"
    )
    assert [path.name for path in Path().iterdir()] == ["train.py"]
    init("slurm", "--nodes=2", arguments=["--", "--out", "X"])
    assert "    train.py\n    --out\n    X\n)" in Path("slurm.sbatch").read_text()


def test_a_script_that_does_not_exist_is_noted(capsys):
    Path("below").mkdir()
    told = "does not exist here: check its path if the job runs on this file system"
    for kind, script, options, path in (
        ("torchrun", "nowhere.py", [], "nowhere.py"),
        ("kubernetes", "nowhere.py", ["--image=x"], None),
        ("torchrun", "package.nowhere", ["--module", "--force"], None),
    ):
        init(kind, *options, script=script)
        assert capsys.readouterr().err == (f"panther: note: {path} {told}\n" if path else "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "0"], "--nodes: 0 must be at least 1"),
        (["--time", "soon"], "--time: 'soon' must be Slurm's form"),
        (["--time", "1:00\n#SBATCH --wrap=x"], "--time: '1:00\\n#SBATCH --wrap=x' must be Slurm's form"),
        (["--grace", "65506"], "--grace: 65506 must be at most 65505"),
        (["--memory", "64 GB"], "--memory: '64 GB' must be a whole number and K, M, G or T"),
        (["--partition", "a b"], "--partition: 'a b' must be names"),
        (["--name", "My_Job"], "--name: 'My_Job' must be lower-case letters"),
        (["--port", "70000"], "--port: 70000 must be at most 65535"),
        (["--backend", "mpi"], "--backend: 'mpi' must be gloo or nccl"),
        (["--volume=runs"], "--volume: 'runs' must be a claim and a path"),
    ],
)
def test_bad_flags_exit_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["init", "slurm", *arguments, "train.py"])
    assert exit.value.code == 2
    assert f"panther init slurm: error: argument {message}" in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["slurm"], "nothing to run: name a script after the options"),
        (["kubernetes", "t.py"], "kubernetes needs --image"),
        (["ray", "t.py"], "ray needs --image"),
        (["ray", "--image=x", "--config", "train.toml"], "is for panther train, which does not use Ray"),
        (
            ["slurm", "--time", "2", "t.py"],
            "--time 2 is 120 s and must be more than --grace 120 and 30 s for the processes to end",
        ),
        (["slurm", "--config", "dash.toml"], "the script '-t.py' must be printable"),
        (["slurm", "--config", "no.toml"], "no.toml cannot be read (No such file or directory)"),
        (["slurm", "--config", "bad.toml"], "bad.toml is not valid TOML"),
        (["slurm", "--config", "binary.toml"], "binary.toml is not valid TOML ('utf-8' codec can't decode byte 0xff"),
        (["slurm", "--config", "no-data.toml"], "--config no-data.toml has a model and no data: add data ="),
        (["slurm", "--config", "empty.toml"], "--config empty.toml has no table [launch]"),
        (
            ["slurm", "--config", "unknown.toml"],
            "--config unknown.toml has unknown keys in [launch], node: use some of args,",
        ),
        (["slurm", "--config", "types.toml"], "types.toml: nodes: 'two' is not a whole number"),
        (["slurm", "--config", "flag.toml"], "flag.toml: nodes: 'True' is not a whole number"),
        (["slurm", "--config", "module.toml"], "module must be true or false, not 1"),
        (["slurm", "--config", "list.toml"], "'launch' in list.toml must be a table"),
        (["slurm", "--config", "args.toml"], "args must be a list of strings, not 'a b'"),
        (["slurm", "--config", "model.toml"], "args must be a list of strings, not 5"),
    ],
)
def test_bad_requests_are_said_in_a_sentence(arguments, message, capsys):
    Path("train.py").unlink()
    head = '[launch]\nscript = "t.py"\n'
    Path("bad.toml").write_text("[launch")
    Path("dash.toml").write_text('[launch]\nscript = "-t.py"\n')
    Path("binary.toml").write_bytes(b"\xff\xfe")
    Path("train.toml").write_text('model = "a:b"\ndata = "a:c"\n')
    Path("no-data.toml").write_text('model = "a:b"\n')
    Path("empty.toml").write_text("")
    Path("unknown.toml").write_text(f"{head}node = 2\n")
    Path("types.toml").write_text(f'{head}nodes = "two"\n')
    Path("flag.toml").write_text(f"{head}nodes = true\n")
    Path("module.toml").write_text(f"{head}module = 1\n")
    Path("list.toml").write_text("launch = [1]\n")
    Path("args.toml").write_text(f'{head}args = "a b"\n')
    Path("model.toml").write_text('model = "a:b"\n[launch]\nargs = 5\n')
    assert main(["init", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("panther: error: ")
    assert message in err
    assert not [path for path in Path().iterdir() if path.suffix != ".toml"]


@pytest.mark.parametrize("data", [["--data", "work:load"], ["--data=work:load"]])
def test_the_data_may_be_among_the_arguments(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(f'model = "work:build"\n[launch]\nargs = {json.dumps(data)}\n')
    assert main(["init", "torchrun", "--config", "run.toml"]) == 0
    assert all(argument in Path("torchrun.sh").read_text() for argument in data)
