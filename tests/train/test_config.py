"""The settings of a run: kinds, ranges, pairs that exclude each other, files they are read from."""

import dataclasses
import inspect
import json
import typing
from contextlib import suppress
from pathlib import Path

import pytest
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st

import panther
from panther import _hints
from panther.distributed import LaunchConfig
from panther.distributed.pipeline.schedules import SCHEDULES
from panther.errors import ConfigError
from panther.train import TrainConfig

FIELDS = {field.name for field in dataclasses.fields(TrainConfig)}
# Of every setting, a value that is not its default, and values that are refused.
VALUES = {
    "data_parallel_replicate_size": (2, [0, "two"]),
    "cpu_offload": (True, [1]),
    "initial_weights": ("folder", [3]),
    "reshard_after_forward": (False, [0]),
    "epochs": (3, [0, 1.5, "3", True]),
    "max_steps": (3, [0, -1, 2.0]),
    "batch_size": (8, [0, "8"]),
    "gradient_accumulation_steps": (4, [0, None]),
    "gradient_clipping": (0.5, [0.0, -1.0, float("nan"), float("inf"), "1"]),
    "strategy": ("fsdp", ["dp", None, 1]),
    "cluster_file": ("cluster.json", [1]),
    "data_parallel_size": (2, [0, 1.0]),
    "tensor_parallel_size": (2, [0, "2"]),
    "pipeline_parallel_size": (2, [0, False]),
    "pipeline_layers": ("blocks", [1]),
    "num_microbatches": (4, [0, 0.5]),
    "pipeline_schedule": ("gpipe", [None, 1, "2f2b"]),
    "mixed_precision": ("bf16", ["fp8", "fp32"]),
    "learning_rate": (0.1, [0.0, -0.1, float("inf"), "0.1", True]),
    "learning_rate_scaling": ("sqrt", ["square"]),
    "warmup_steps": (5, [-1, 0.1]),
    "schedule": ("cosine", ["exponential"]),
    "scheduler_interval": ("epoch", ["batch", 1]),
    "scheduler_metric": ("validation_accuracy", [1, ""]),
    "activation_checkpointing": ("full", [True, "all"]),
    "compile": (True, [1, "yes"]),
    "seed": (7, [-1, 1 << 63, 0.5]),
    "deterministic": (True, [0]),
    "on_nonfinite": ("skip", ["ignore"]),
    "checkpoint_dir": ("somewhere", [3]),
    "checkpoint_every_n_steps": (10, [0, 1.0]),
    "checkpoint_every_n_epochs": (1, [0]),
    "checkpoint_asynchronously": (False, [None]),
    "keep_checkpoints": (1, [0]),
    "resume": ("never", ["", None, "Never"]),
    "log_every_n_steps": (1, [0]),
    "validate_every_n_steps": (5, [0]),
    "trackers": (("jsonl", "mlflow"), ["wandb", ("wandb",), ("jsonl", "jsonl"), 1]),
    "run_name": ("mine", ["", 1]),
    "progress": (False, ["no"]),
    "profile": (True, [1]),
    "find_unused_parameters": (True, [1]),
    "scaler_init_scale": (1024.0, [0, "1024"]),
    "scaler_growth_interval": (100, [0, 1.5]),
    "powersgd_rank": (2, [0, "2"]),
    "powersgd_start_step": (5, [0, 1]),
    "sketch_fraction": (0.1, [0, 1.5, "1"]),
    "bucket_cap_mb": (5.0, [0, "5"]),
    "comm_hook": ("fp16", ["int8"]),
    "timeout_s": (60.0, [0]),
    "grace_period_s": (5.0, [0]),
}


def test_the_schedules_of_pipelines_are_those_of_make_schedule():
    hint = typing.get_type_hints(TrainConfig)["pipeline_schedule"]
    assert typing.get_args(hint) == tuple(SCHEDULES)


def with_directory(name, value):
    """A setting, and a directory or the setting that it needs."""
    if name.startswith("scaler"):
        return {name: value, "mixed_precision": "fp16"}
    if name.startswith("powersgd"):
        return {name: value, "comm_hook": "powersgd"}
    if name.startswith("sketch"):
        return {name: value, "comm_hook": name.partition("_")[0]}
    if name == "cluster_file":
        return {name: value, "strategy": "auto"}
    if name in ("pipeline_layers", "num_microbatches", "pipeline_schedule"):
        return {name: value, "strategy": "pp"}
    needs = name.startswith("checkpoint_every") or name in ("profile", "trackers")
    return {name: value} | ({"checkpoint_dir": "runs"} if needs else {})


def test_every_setting_is_here():
    assert set(VALUES) == FIELDS


@pytest.mark.parametrize("name", VALUES)
def test_a_setting_keeps_its_value_through_files(name, tmp_path):
    config = TrainConfig(**with_directory(name, VALUES[name][0]))
    assert getattr(config, name) == VALUES[name][0]
    assert getattr(config, name) != getattr(TrainConfig(), name)
    config.save(tmp_path / "run.json")
    assert TrainConfig.load(tmp_path / "run.json") == config
    assert TrainConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
    # These values are written in TOML as in JSON.
    lines = [f"{key} = {json.dumps(value)}" for key, value in with_directory(name, VALUES[name][0]).items()]
    (tmp_path / "run.toml").write_text("\n".join(lines))
    assert TrainConfig.load(tmp_path / "run.toml") == config


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (_, bad) in VALUES.items() for value in bad])
def test_a_wrong_value_is_named(name, value):
    with pytest.raises(ConfigError, match=name.split("_")[0]):
        TrainConfig(**with_directory(name, value))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": 1, "max_steps": 2}, "epochs=1 and max_steps=2 exclude each other: give one"),
        (
            {"checkpoint_every_n_steps": 2},
            "checkpoint_every_n_steps=2 needs checkpoint_dir, which is None: set it",
        ),
        (
            {"checkpoint_every_n_epochs": 2},
            "checkpoint_every_n_epochs=2 needs checkpoint_dir, which is None: set it",
        ),
        ({"profile": True}, "profile=True needs checkpoint_dir, which is None: set it"),
        ({"trackers": ("mlflow",)}, "trackers=('mlflow',) needs checkpoint_dir, which is None: set it"),
        ({"schedule": "callback", "warmup_steps": 1}, "schedule='callback' and warmup_steps=1 exclude each other"),
        (
            {"scaler_init_scale": 2.0, "mixed_precision": "bf16"},
            "scaler_init_scale=2.0 needs mixed_precision='fp16', not 'bf16': set both",
        ),
        ({"powersgd_rank": 2}, "powersgd_rank=2 needs comm_hook='powersgd', not None: set both"),
        ({"learning_rate": "fast"}, "learning_rate='fast' must be a number, not str"),
        ({"compile": 1}, "compile=1 must be true or false, not int"),
        ({"epochs": True}, "epochs=True must be a whole number, not bool"),
        ({"strategy": "dpp"}, "strategy='dpp' is unknown: use one of 'auto', 'ddp', 'fsdp'"),
        ({"trackers": ("jsonl", "jsonl")}, "repeats a tracker: name each once"),
    ],
)
def test_messages(given, message):
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**given)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("learning_rat", "learning_rate"),
        ("lerning_rate", "learning_rate"),
        ("gradient_clip", "gradient_clipping"),
        ("checkpoint_every_n_step", "checkpoint_every_n_steps"),
        ("tracker", "trackers"),
        ("bucket_cap", "bucket_cap_mb"),
        ("lr", "learning_rate"),
        ("precision", "mixed_precision"),
    ],
)
def test_an_unknown_key_names_the_nearest(key, near):
    with pytest.raises(ConfigError, match=f"'{key}' is not a setting of TrainConfig: did you mean '{near}'"):
        TrainConfig(**{key: 1})


LISTED = "use some of epochs, max_steps"
# Every keyword of the trainers and configurations in the guides to distributed training that we follow.
NAMES_OF_GUIDES = {
    "batch_size": None, "epochs": None, "learning_rate": None, "checkpoint_dir": None, "max_steps": None,
    "gradient_accumulation_steps": None, "gradient_clipping": None, "find_unused_parameters": None,
    "log_every_n_steps": None, "scaler_init_scale": None, "scaler_growth_interval": None, "run_name": None,
    "data_parallel_size": None, "tensor_parallel_size": None, "pipeline_parallel_size": None, "num_microbatches": None,
    "mixed_precision": None,
    "accumulation_steps": "'gradient_accumulation_steps'",
    "checkpoint_frequency": "'checkpoint_every_n_epochs'",
    "resume_from_checkpoint": "'resume'",
    "mlflow_tracking": "'trackers'", "tensorboard": "'trackers'",
    "tensorboard_dir": "'checkpoint_dir'", "mlflow_experiment": "'run_name'",
    "bucket_size_mb": "'bucket_cap_mb'", "compression": "'comm_hook'",
    "compression_ratio": "'sketch_fraction'", "topk_fraction": "'sketch_fraction'",
    "chunks": "'num_microbatches'", "lr": "'learning_rate'",
    "num_gpus": "panther launch --nproc-per-node and --nnodes", "world_size": "panther launch --nproc-per-node",
    "gpus_per_node": "panther launch --nproc-per-node", "nproc_per_node": "panther launch --nproc-per-node",
    "num_nodes": "panther launch --nnodes", "nnodes": "panther launch --nnodes",
    "max_restarts": "panther launch --max-restarts", "communication_backend": "panther launch --backend",
    "backend": "panther launch --backend", "zero_stage": "strategy='zero1' for stage 1, 'fsdp' for 3",
    "offload_optimizer": "cpu_offload=True", "offload_param": "cpu_offload=True",
    "tp_size": "'tensor_parallel_size'", "pp_size": "'pipeline_parallel_size'", "dp_size": "'data_parallel_size'",
    "num_processes": "panther launch --nproc-per-node", "node_rank": "panther launch --node-rank",
    "master_addr": "--rdzv-endpoint", "master_port": "--rdzv-endpoint", "init_method": "distributed.init(init_method=",
    "monitor_interval": "--monitor-interval", "start_timeout": "--rdzv-conf timeout",
    "local_rank": "the launcher tells",
    "rank": "the launcher tells", "device": "the GPU of its rank", "device_ids": "the GPU of its rank",
    "accelerator": "the GPU of its rank",
    "zero_optimization": "strategy='zero1' for stage 1", "warmup_epochs": "warmup_steps",
    "deepspeed_config": "write its settings here", "train_batch_size": "the size for one process",
    "per_gpu_batch_size": "the size for one process",
    "auto_wrap_policy": "leave it out",
    "process_group": "tensor_parallel_size",
    "gradient_as_bucket_view": "data_parallel(model", "pin_memory": "pass a DataLoader", "train_loader": "to fit",
    "validation_data": "to fit as the second", "val_loader": "to fit as the second",
    "scheduler": "pass it to Trainer", "lr_scheduler": "to Trainer as scheduler",
    "micro_batches": "'num_microbatches'",
    "num_workers": "pass a DataLoader", "sampler": "pass a DataLoader", "shuffle": "pass a DataLoader",
    "num_replicas": "a Trainer divides the samples", "model": "pass it to Trainer", "optimizer": "pass it to Trainer",
    "nprocs": "panther launch --nproc-per-node", "num_stages": "'pipeline_parallel_size'",
    "min_num_params": "leave it out",
    "stage": "strategy='zero1' for stage 1", "sharding_strategy": "'strategy'", "clip_grad_norm": "'gradient_clipping'",
    "use_amp": "'mixed_precision'", "save_dir": "'checkpoint_dir'", "training_data": "pass it to fit",
    "checkpoint_interval": "'checkpoint_every_n_steps'",
    "weight_decay": "to the optimizer", "betas": "to the optimizer", "eps": "to the optimizer", "verbose": "'progress'",
    "input_size": "build the model with it", "hidden_sizes": "build the model", "output_size": "build the model",
    "hidden_size": "build the model", "sketch_ratios": "build the model", "sketch_size": "build the model",
    "deepspeed": "panther.integrations.deepspeed", "horovod": "strategy='ddp'",
    "model_parameters": "leave it out", "named_parameters": "leave it out", "params": "leave it out",
    "train_dataset": "to fit", "dataset": "to fit", "dataloader": "to fit", "num_epochs": "'epochs'",
    "total_epochs": "'epochs'", "fp16": "'mixed_precision'", "max_norm": "'gradient_clipping'",
    "device_id": "the GPU of its rank", "multi_gpu": "panther launch --nproc", "nodes": "panther launch --nnodes",
    "ntasks_per_node": "panther launch --nproc-per-node", "address": "--rdzv-endpoint", "script": "to panther launch",
    "job_name": "'run_name'", "logdir": "'checkpoint_dir'", "name": "'run_name'", "config": "write its settings here",
    "T_max": "schedule='cosine'", "start_factor": "warmup_steps", "total_iters": "warmup_steps",
    "gpu_utilization": "panther.distributed.DeviceUtilization",
    "warmup": "warmup_steps",
    "milestones": "scheduler=lambda optimizer", "schedulers": "scheduler=lambda optimizer",
    "loss": "to Trainer as loss_fn",
    "microbatch_size": "num_microbatches", "num_samples": "panther.tune", "search_space": "panther.tune",
    "train_fn": "panther.tune", "trials_per_gpu": "panther.tune", "resources_per_trial": "panther.tune",
    "record_shapes": "torch.profiler", "with_stack": "torch.profiler", "activities": "torch.profiler",
    "on_trace_ready": "torch.profiler", "group": "tensor_parallel_size", "dp_group": "tensor_parallel_size",
    "schedule": None,
    # Of these nothing is like a setting, and a guess would be wrong.
    "wait": LISTED, "active": LISTED, "enabled": LISTED, "type": LISTED, "op": LISTED, "src": LISTED, "gpu": LISTED,
    "root_rank": LISTED, "async_op": LISTED, "size": LISTED, "join": LISTED, "args": LISTED, "target": LISTED,
    "sort_by": LISTED, "accuracy": LISTED, "activation": LISTED, "batch": LISTED,
    "loss_fn": "pass it to Trainer", "criterion": "pass it to Trainer as loss_fn", "metrics": "pass them to Trainer",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES_OF_GUIDES)
def test_a_name_of_a_guide_is_a_setting_or_leads_to_the_right_one(name):
    if NAMES_OF_GUIDES[name] is None:
        assert name in FIELDS
        return
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**{name: 1})
    assert NAMES_OF_GUIDES[name] in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "value", "hint"),
    [
        ("strategy", "FSDP", "did you mean 'fsdp'?"),
        ("strategy", "DDP", "did you mean 'ddp'?"),
        ("strategy", "zero-1", "did you mean 'zero1'?"),
        ("strategy", "zero2", "use strategy='fsdp' with reshard_after_forward=False"),
        ("strategy", "ZeRO-3", "use strategy='fsdp'"),
        ("strategy", "hsdp", "use strategy='fsdp' with data_parallel_replicate_size, the number of nodes"),
        ("strategy", "pytorch-ddp", "use strategy='ddp'"),
        ("strategy", "data_parallel", "use strategy='ddp'"),
        ("strategy", "model_parallel", "use strategy='tp' or 'pp'"),
        ("strategy", "tensor_parallel", "use strategy='tp'"),
        ("strategy", "hybrid_parallel", "use strategy='hybrid' with tensor_parallel_size"),
        ("strategy", "horovod", "use strategy='ddp', or panther.integrations.horovod"),
        ("strategy", "ray", "use panther.integrations.ray"),
        ("mixed_precision", True, "use mixed_precision='bf16' or 'fp16'"),
        ("mixed_precision", "float16", "use mixed_precision='fp16'"),
        ("mixed_precision", "BF16", "did you mean 'bf16'?"),
        ("mixed_precision", "int8", "use one of 'bf16', 'fp16'"),
        ("pipeline_schedule", "GPipe", "did you mean 'gpipe'?"),
        ("comm_hook", "powerSGD", "did you mean 'powersgd'?"),
        ("schedule", "cosin", "did you mean 'cosine'?"),
        ("schedule", "step", "use one of 'constant', 'linear', 'cosine', 'callback'"),
    ],
)
def test_a_value_of_other_libraries_leads_to_the_right_one(setting, value, hint):
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**with_directory(setting, value))
    assert str(caught.value).startswith(f"{setting}={value!r} is unknown: {hint}")


def test_the_settings_that_other_owners_are_sent_here_for_exist():
    others = {field.name for field in dataclasses.fields(LaunchConfig)} | {"data_parallel", "data", "loss_fn"}
    others |= {"batch", "gpus"}  # options of commands
    others |= {"low_rank"}  # of SketchConfig
    packages = (
        panther,
        panther.nn,
        panther.nn.functional,
        panther.linalg,
        panther.sketch,
        panther.optim,
        panther.distributed,
    )
    for function in (getattr(package, name) for package in packages for name in package.__all__):
        with suppress(TypeError, ValueError):  # not a function, or without a signature
            others |= set(inspect.signature(function).parameters)
    assert set(_hints.hints()["synonyms"]) <= FIELDS | others


def test_a_key_near_to_nothing_lists_all():
    with pytest.raises(ConfigError, match=r"'zzz' is not a setting .*: use some of epochs, max_steps, .*, timeout_s"):
        TrainConfig(zzz=1)


def test_it_is_never_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().epochs = 3
    with pytest.raises(ConfigError, match=r"by name: write TrainConfig\(epochs=3\)"):
        TrainConfig(3)


def test_paths_and_whole_numbers_are_taken():
    config = TrainConfig(checkpoint_dir=Path("runs"), resume=Path("runs") / "step-00000003", learning_rate=1)
    assert (config.checkpoint_dir, config.resume, config.learning_rate) == ("runs", "runs/step-00000003", 1.0)
    assert hash(config) == hash(TrainConfig(**dataclasses.asdict(config)))
    assert TrainConfig(trackers="jsonl,mlflow", checkpoint_dir="x").trackers == ("jsonl", "mlflow")
    assert isinstance(config.learning_rate, float)


def test_a_file_may_have_a_table(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("title = 'mine'\n[train]\nepochs = 2\nlearning_rate = 1\ntrackers = ['jsonl']\n")
    assert TrainConfig.load(file) == TrainConfig(epochs=2, learning_rate=1.0)
    file = tmp_path / "run.json"
    file.write_text('{"train": {"epochs": 2}}')
    assert TrainConfig.load(str(file)).epochs == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.toml", "epochs = ", r"run\.toml is not valid TOML"),
        ("run.json", "{", r"run\.json is not valid JSON"),
        ("run.json", "[1]", r"run\.json must hold a table of settings"),
        ("run.toml", "\xff", r"run\.toml is not valid TOML"),
        ("run.toml", "epochs = 1\nepochs = 2", r"run\.toml is not valid TOML"),
        ("run.toml", "epoch = 1", "'epoch' is not a setting of TrainConfig: did you mean 'epochs'"),
    ],
)
def test_a_file_that_is_wrong(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=message):
        TrainConfig.load(tmp_path / name)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read \(No such file or directory\)"):
        TrainConfig.load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"run\.yaml must end in \.toml or \.json"):
        TrainConfig.load(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=r"run\.toml must end in \.json"):
        TrainConfig().save(tmp_path / "run.toml")


@fuzz
@given(
    learning_rate=st.none() | st.floats(1e-300, 1e300),
    seed=st.integers(0, 2**63 - 1),
    run_name=st.text(min_size=1),
    trackers=st.sampled_from([(), ("jsonl",), ("mlflow", "jsonl")]),
)
def test_fuzz_files(tmp_path_factory, learning_rate, seed, run_name, trackers):
    config = TrainConfig(
        learning_rate=learning_rate, seed=seed, run_name=run_name, trackers=trackers, checkpoint_dir="x"
    )
    file = tmp_path_factory.getbasetemp() / "run.json"
    config.save(file)
    assert TrainConfig.load(file) == config
