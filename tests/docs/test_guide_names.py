"""Names of other libraries and guides: every row of the two tables has a test, a name in and a result out."""

import importlib
import inspect
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import panther as pr
from panther import distributed
from panther.cli import main
from panther.errors import ConfigError
from panther.train import History, TrainConfig

ROOT = Path(__file__).parents[2]
HOWTO = ROOT / "docs/howto"


def says(wanted, **setting):
    """A TrainConfig refuses the setting and names what to use."""
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        TrainConfig(**setting)
    return True


def takes(**settings):
    """A TrainConfig has these settings."""
    config = TrainConfig(**settings)
    return all(getattr(config, name) == value for name, value in settings.items())


def adapter(name, *functions):
    """The module is there with these names; it is imported where its engine is installed."""
    if not (ROOT / f"docs/howto/{name}.rst").exists():
        return False
    file = ROOT / f"panther/integrations/{name}"
    source = (file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text()
    if find_spec(name) is not None and name != "horovod":
        module = importlib.import_module(f"panther.integrations.{name}")
        return all(hasattr(module, function) for function in functions)
    return all(f'"{function}"' in source for function in functions)


def runs(*arguments):
    try:
        return main(list(arguments)) == 0
    except SystemExit as end:  # of --help
        return end.code == 0


def has(*names):
    return all(callable(getattr(distributed, name)) for name in names)


def history():
    found = History([{"step": 1, "loss": 1.0, "validation_loss": 1.0, "validation_accuracy": 0.5}])
    return found.best_accuracy == 0.5 and hasattr(found, "total_time")


LAUNCH = "panther launch"
SETTINGS = {
    "PyTorchDDPTrainer": lambda: takes(strategy="ddp") and says("strategy='ddp'", backend="pytorch-ddp"),
    "num_gpus": lambda: all(says(LAUNCH, **{name: 2}) for name in ("num_gpus", "num_nodes", "gpus_per_node")),
    "DistributedConfig": lambda: takes(epochs=100, batch_size=32, gradient_clipping=1.0, log_every_n_steps=100),
    "DistributedSampler": lambda: says("pass a DataLoader", sampler=None),
    "GradientAccumulationTrainer": lambda: takes(gradient_accumulation_steps=4) and has("no_sync"),
    "MixedPrecisionTrainer": lambda: takes(strategy="ddp", mixed_precision="fp16") and takes(mixed_precision="bf16"),
    "GradientCheckpointing": lambda: takes(activation_checkpointing="full"),
    "CommunicationOptimizer": lambda: all(
        takes(strategy="ddp", comm_hook=hook) for hook in ("fp16", "bf16", "powersgd", "sketch")
    ),
    "bucket_size_mb": lambda: (
        takes(strategy="ddp", bucket_cap_mb=5.0, find_unused_parameters=True)
        and says("bucket_cap_mb", bucket_size_mb=5)
    ),
    "communication_backend": lambda: says(f"{LAUNCH} --backend", communication_backend="nccl"),
    "init_process_group(init_method=...)": lambda: "init_method" in inspect.signature(distributed.init).parameters,
    "ReduceOp.SUM": lambda: {"SUM", "AVERAGE"} <= set(dir(distributed.ReduceOp)),
    "LaunchConfig(start_timeout=)": lambda: (
        has("DistributedLauncher", "launch_distributed_training")
        and distributed.LaunchConfig(start_timeout=60) is not None
    ),
    "ZeRO stage 1": lambda: takes(strategy="zero1") and says("strategy='zero1'", zero_stage=1),
    "ZeRO stage 2": lambda: takes(strategy="fsdp", reshard_after_forward=False),
    "ZeRO stage 3": lambda: takes(strategy="fsdp") and says("'fsdp' for 3", zero_stage=3),
    "offload_optimizer": lambda: takes(strategy="fsdp", cpu_offload=True) and says("cpu_offload", offload_param=True),
    "ColumnParallelLinear": lambda: takes(strategy="tp"),
    "PipelineParallel": lambda: takes(strategy="pp", num_microbatches=4),
    "Parallel3D": lambda: takes(
        strategy="hybrid", data_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=2
    ),
    "checkpoint_frequency": lambda: takes(checkpoint_dir="runs", checkpoint_every_n_epochs=10, resume="auto"),
    "mlflow_tracking": lambda: takes(checkpoint_dir="runs", trackers=("mlflow",), run_name="x"),
    "tensorboard": lambda: takes(checkpoint_dir="runs", trackers=("tensorboard",)),
    "best_accuracy": history,
    "total_time": history,
    "LinearLR": lambda: takes(warmup_steps=5, schedule="cosine") and says("warmup_steps", warmup_epochs=5),
    "lr * world_size": lambda: takes(learning_rate_scaling="linear") and takes(learning_rate_scaling="sqrt"),
    "profile": lambda: takes(checkpoint_dir="runs", profile=True),
    "checkpoint_scope": lambda: takes(activation_checkpointing="selective"),
    "PyTorchDDPTrainer(deepspeed_config=)": lambda: (
        adapter("deepspeed", "initialize", "export") and says("cpu_offload", deepspeed_config={})
    ),
    "RayTrainer": lambda: adapter("ray", "RayTrainer"),
    "DistributedTuner": lambda: "parallel" in inspect.signature(pr.tune).parameters,
    "HorovodTrainer": lambda: adapter("horovod", "DistributedOptimizer", "metric_average"),
    "TensorFlowDistributedTrainer": lambda: adapter("keras", "SKDense"),
    "Accelerator": lambda: (HOWTO / "scripts/train_accelerate.py").exists(),
    "run_ddp_simulation": lambda: runs("simulate", "--help"),
    "explain_ddp_concepts": lambda: runs("explain", "ranks") and runs("explain", "ddp"),
    "MXNet": lambda: "**MXNet** is not offered" in (HOWTO / "migrate-ddp.rst").read_text(),
}
# What people type who know the guides, torch or another trainer, and what the error names.
MISSING = {
    "PyTorchDDPTrainer": "panther.train.Trainer with TrainConfig(strategy='ddp')",
    "DistributedDataParallel": "panther.distributed.data_parallel",
    "DistributedConfig": "panther.train.TrainConfig for the training, and panther launch",
    "DistributedTuner": "panther.tune(..., parallel='ray')",
    "DistributedSampler": "divides the samples among the ranks",
    "HorovodTrainer": "panther.integrations.horovod",
    "RayTrainer": "panther.integrations.ray",
    "TensorFlowDistributedTrainer": "panther.integrations.keras",
    "DeepSpeedConfig": "panther.integrations.deepspeed",
    "GradientAccumulationTrainer": "gradient_accumulation_steps",
    "MixedPrecisionTrainer": "mixed_precision='bf16'",
    "ColumnParallelLinear": "strategy='tp'",
    "RowParallelLinear": "strategy='tp'",
    "TensorParallelTransformer": "strategy='tp'",
    "PipelineParallel": "strategy='pp'",
    "GPipe": "num_microbatches",
    "Parallel3D": "strategy='hybrid'",
    "FSDP": "strategy='fsdp'",
    "FullyShardedDataParallel": "strategy='fsdp'",
    "CheckpointedModel": "activation_checkpointing",
    "CommunicationOptimizer": "comm_hook",
    "Accelerator": "Accelerate's own class",
    "init_process_group": "panther.distributed.init",
    "destroy_process_group": "panther.distributed.shutdown",
    "run_ddp_simulation": "panther simulate",
    "explain_ddp_concepts": "panther explain ranks",
    "compare_ddp_vs_single": "panther explain ddp",
    "checkpoint_scope": "activation_checkpointing",
    "memory_pool_scope": "by itself",
    "train_ddp": "panther.train.Trainer",
    "load": "panther.load_compressed",
    "save": "panther.save_compressed",
    "quantize": "panther.compress(model, bits=",
}


@pytest.mark.parametrize("module", [pr, distributed, pr.train], ids=lambda module: module.__name__)
def test_a_name_that_is_missing_is_answered_with_what_to_use(module):
    for name, wanted in MISSING.items():
        with pytest.raises(AttributeError, match=re.escape(wanted)) as caught:
            getattr(module, name)
        assert str(caught.value).startswith(f"{module.__name__} has no attribute {name!r}: ")
        assert not hasattr(module, name)
        # Python replaces the text of an AttributeError in this statement, which is the one that guides have.
        with pytest.raises(ImportError, match=re.escape(wanted)):
            exec(f"from {module.__name__} import {name}")
    with pytest.raises(ImportError, match=r"cannot import name 'zzz' from '[\w.]+' \(.*__init__.py\)$"):
        exec(f"from {module.__name__} import zzz")


# What the guides define or import, by the guide's number.
GUIDES = {
    "000": "PyTorchDDPTrainer HorovodTrainer RayTrainer TensorFlowDistributedTrainer DistributedConfig "
    "DistributedTuner DeepSpeedConfig num_gpus metric_average hvd.Compression.fp16 zero_stage checkpoint_frequency "
    "resume_from_checkpoint mlflow_tracking mlflow_experiment tensorboard_dir best_accuracy total_time tune.run "
    "communication_backend find_unused_parameters deepspeed_config",
    "001": "DistributedDataParallel init_process_group ReduceOp no_sync DistributedSampler LaunchConfig "
    "DistributedLauncher checkpoint_scope memory_pool_scope",
    "002": "DDP set_epoch GradientAccumulationTrainer MixedPrecisionTrainer ColumnParallelLinear "
    "TensorParallelTransformer PipelineParallel GPipe FSDP Parallel3D Accelerator hvd.DistributedOptimizer "
    "CheckpointedModel CommunicationOptimizer",
    "003": "run_ddp_simulation explain_ddp_concepts compare_ddp_vs_single",
    "004": "setup_distributed cleanup_distributed DistributedSketchedModel AdvancedDistributedTrainer "
    "PipelineParallelSketchedModel MicrobatchPipelineTrainer TensorParallelSKLinear TensorParallelModel "
    "HybridParallelTrainer DistributedMetricsCollector profile_communication_overhead choose_parallelism_strategy",
}


def first(cell):
    """The first name of a table's cell."""
    plain = re.sub(r":(?:class|func):`~[\w.]*\.(\w+)`", r"``\1``", cell)
    found = re.match(r"``(.+?)``", plain)
    return found[1] if found else plain.partition(",")[0].strip()


def rows():
    settings = (HOWTO / "migrate-ddp.rst").read_text().split("\n   =====", 3)[2].splitlines()[1:]
    classes = re.findall(r"^   \* - (.+)$", (HOWTO / "migrate-guide-classes.rst").read_text(), re.MULTILINE)
    return [first(line[3:64]) for line in settings if line.strip()], [first(cell) for cell in classes[1:]]


def test_every_setting_has_a_row_and_every_class_is_there():
    settings, classes = rows()
    assert sorted(settings) == sorted(SETTINGS)
    assert len(classes) == 10
    assert has(*(name.partition("(")[0] for name in classes))  # tests/distributed has what they do


@pytest.mark.parametrize("name", SETTINGS)
def test_a_name_leads_to_what_is_there(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert SETTINGS[name]()


@pytest.mark.parametrize("guide", GUIDES)
def test_the_names_of_a_guide_are_listed(guide):
    pages = "".join((HOWTO / f"migrate-{name}.rst").read_text() for name in ("ddp", "guide-classes"))
    unlisted = [name for name in GUIDES[guide].split() if not re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", pages)]
    # Sphinx shows the last part of a role's name.
    assert [name for name in unlisted if f".{name}`" not in pages] == []
