"""What to use in place of classes and functions that other libraries and guides have, and Panther has not.

The table is for the modules in which people look for these names. The names of ``panther``, ``panther.distributed``
and ``panther.train`` are on the page ``docs/howto/migrate-ddp.rst``, with more words.
"""

__all__ = ["missing_name"]

import dis
import inspect
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from types import FrameType

_CLOSE = 0.82  # as for settings: 'DistributedConfig' has 0.79 to 'distributed'
_TRAINER = "panther.train.Trainer"

# What to use, and the names that it replaces.
_ADVICE: tuple[tuple[str, str], ...] = (
    (
        f"use {_TRAINER} with TrainConfig(strategy='ddp'), or panther.distributed.data_parallel in a loop of your own",
        "DDP DataParallel DistributedDataParallel DistributedTrainer PyTorchDDPTrainer TorchTrainer train_ddp "
        "train_distributed",
    ),
    ("use panther.train.TrainConfig for the training, and panther launch for the processes", "DistributedConfig"),
    ("use panther.train.TrainConfig", "Config TrainingArguments TrainingConfig"),
    (f"use {_TRAINER}", "Trainer"),
    ("use panther.train.TrainConfig", "TrainConfig"),
    ("use panther.train.Callback", "Callback TrainerCallback"),
    ("use panther.train.History", "History"),
    ("use panther.tune(..., parallel='ray')", "DistributedTuner Tuner"),
    (
        f"leave it out, because {_TRAINER} divides the samples among the ranks; in a loop of your own use "
        "torch.utils.data.DistributedSampler",
        "DistributedSampler",
    ),
    ("use TrainConfig(gradient_accumulation_steps=...)", "GradientAccumulationTrainer GradientAccumulator accumulate"),
    (
        "use TrainConfig(mixed_precision='bf16') or 'fp16', which scales the loss",
        "GradScaler MixedPrecisionTrainer autocast",
    ),
    (
        "use TrainConfig(activation_checkpointing='full') or 'selective'",
        "CheckpointedModel GradientCheckpointing checkpoint_scope gradient_checkpointing",
    ),
    ("leave it out, because torch keeps a pool of memory by itself", "memory_pool_scope"),
    ("use TrainConfig(comm_hook='bf16'), 'powersgd', 'topk' or 'sketch'", "CommunicationOptimizer Compression"),
    (
        "use TrainConfig(strategy='fsdp'), or panther.distributed.data_parallel(model, strategy='fsdp')",
        "FSDP FullyShardedDataParallel fully_shard train_fsdp",
    ),
    ("use TrainConfig(strategy='zero1')", "ZeRO ZeroRedundancyOptimizer"),
    (
        "use TrainConfig(strategy='tp'), or panther.distributed.tensor_parallel on any model",
        "ColumnParallelLinear RowParallelLinear TensorParallelTransformer",
    ),
    ("use TrainConfig(strategy='pp', num_microbatches=...)", "GPipe PipelineParallel train_gpipe"),
    ("use TrainConfig(strategy='hybrid') with the sizes of the axes", "HybridParallel Parallel3D"),
    ("use panther.integrations.deepspeed", "DeepSpeed DeepSpeedConfig DeepSpeedTrainer"),
    ("use panther.integrations.horovod", "DistributedOptimizer HorovodTrainer broadcast_parameters"),
    ("use panther.integrations.ray", "RayTrainer"),
    ("use panther.integrations.keras, and model.fit of Keras", "TensorFlowDistributedTrainer"),
    (f"use Accelerate's own class with sketched layers, or {_TRAINER}", "Accelerator"),
    ("use panther.distributed.init, or let Trainer join the launcher's processes", "init_process_group setup"),
    ("use panther.distributed.shutdown", "cleanup destroy_process_group"),
    ("use panther.distributed.launch", "spawn"),
    ("use panther simulate on the command line", "run_ddp_simulation"),
    ("use panther explain ranks, or ddp, on the command line", "explain_ddp_concepts"),
    ("use panther explain compare on the command line", "compare_ddp_vs_single"),
    ("use panther.load_compressed, or panther.from_pretrained for a folder of transformers", "load load_model"),
    (
        "use panther.save_compressed for inference, panther.distributed.checkpoint.save to continue training",
        "save save_model save_pretrained",
    ),
    ("use panther.compress(model, bits=4.25, calibration=batches)", "quantize quantize_ prune"),
)
_BY_NAME: Mapping[str, str] = {name: text for text, names in _ADVICE for name in names.split()}

# The same for modules in which people look for other names.
_ADVICE_BY_MODULE: Mapping[str, tuple[tuple[str, str], ...]] = {
    "panther.linalg": (
        ("use panther.linalg.randomized_svd", "rsvd svd svd_lowrank svds truncated_svd TruncatedSVD"),
        ("use panther.linalg.randomized_svd of A - A.mean(0), whose V holds the components", "PCA pca pca_lowrank"),
        ("use panther.linalg.randomized_eigh", "eigh eigsh lobpcg"),
        ("use panther.linalg.cqrrpt, or cholesky_qr for a well conditioned matrix", "cqrrp qr"),
        ("use panther.linalg.sketch_lstsq", "blendenpik least_squares lstsq lsqr ridge solve"),
        ("use panther.linalg.rangefinder", "range_finder randomized_range_finder"),
    ),
    "panther.nn": (
        ("use torch.nn for dense layers, and panther.nn.SKLinear or LowRankLinear for smaller ones", "Linear"),
        ("use torch.nn for dense layers, and panther.nn.SKConv2d or LowRankConv2d for smaller ones", "Conv2d"),
        ("use torch.nn", "Conv1d Conv3d Embedding LayerNorm Module ModuleList Parameter ReLU Sequential Transformer"),
        (
            "use panther.nn.RandMultiHeadAttention",
            "LinearAttention MultiheadAttention Performer PerformerAttention RFAttention",
        ),
        ("use panther.nn.SKLinear, which runs Triton kernels where they can run", "SKLinear_triton"),
        ("use panther.nn.QuantizedLinear.from_linear, or panther.compress for a model", "Linear4bit Linear8bitLt"),
        ("use panther.nn.LowRankLinear.from_linear, or panther.integrations.peft for LoRA", "LoRALinear LoraLinear"),
    ),
    "panther.sketch": (
        ("use panther.sketch.GaussianSketch", "GaussianRandomProjection Gaussian JLT"),
        ("use panther.sketch.SparseSketch", "CountSketch SASO SJLT SparseRandomProjection SparseSign"),
        ("use panther.sketch.SRHT", "FJLT SRFT SubsampledHadamard"),
        ("use panther.sketch.SignSketch", "Rademacher RademacherSketch"),
    ),
}


def missing_name(module: str, name: str, names: Collection[str], hint: str | None = None) -> Exception:
    """Return the error of a module's ``__getattr__`` for a name that it has not, with what to use in its place.

    Args:
        module: The name of the module.
        name: The name that was asked for.
        names: The names that the module has.
        hint: The advice, if the module knows it; None looks for the name in the table, and then for one that is spelled
            much alike.

    Returns:
        An AttributeError; an ImportError in ``from module import name``, in which Python would replace the text of an
        AttributeError by its own.
    """
    if hint is None:
        near = get_close_matches(name, names, 1, cutoff=_CLOSE)
        hint = _advice(module).get(name) or (f"did you mean {near[0]!r}?" if near else None)
    end = "" if hint is None else f": {hint}"
    if hint is not None and _is_in_from_import():
        return ImportError(f"cannot import name {name!r} from {module!r}{end}", name=module)
    return AttributeError(f"{module} has no attribute {name!r}{end}", name=name)


def _advice(module: str) -> Mapping[str, str]:
    if module in _ADVICE_BY_MODULE:
        return {name: text for text, names in _ADVICE_BY_MODULE[module] for name in names.split()}
    return _BY_NAME


def _is_in_from_import() -> bool:
    """Return whether the code that asked ``__getattr__`` is ``from module import name``."""
    frame: FrameType | None = inspect.currentframe()
    for _ in range(3):  # this function, missing_name and __getattr__
        frame = None if frame is None else frame.f_back
    if frame is None:
        return False
    code = frame.f_code.co_code
    return 0 <= frame.f_lasti < len(code) and dis.opname[code[frame.f_lasti]] == "IMPORT_FROM"
