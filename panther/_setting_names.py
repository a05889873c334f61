"""Panther's names for the settings of other libraries, and hints in messages about unknown settings.

A guess by spelling needs a close match, because a wrong guess is worse than the list of all settings.
"""

__all__ = ["name_hint", "near_name", "value_hint"]

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import Any

# difflib's ratio: 'gradient_clip' has 0.87 to 'gradient_clipping', 'dpp' has 0.8 to 'pp', 'eps' has 0.67 to 'epochs'.
_CLOSE = 0.82

# Panther's name of a setting, and its names in other libraries. If a name has two entries, the hint is the first entry
# that the owner has.
_SYNONYMS = {
    "activation_checkpointing": "gradient_checkpointing",
    "backend": "communication_backend",
    "batch": "batch_size",
    "bits": "n_bits nbits num_bits w_bit w_bits wbits weight_bits",
    "bucket_cap_mb": "bucket_size_mb",
    "budget": "keep_ratio param_ratio",
    "calibration": "calib_data calib_dataset calibration_data calibration_dataset data dataloader dataset",
    "checkpoint_dir": "logdir log_dir output_dir save_dir tensorboard_dir",
    "checkpoint_every_n_epochs": "checkpoint_frequency",
    "checkpoint_every_n_steps": "checkpoint_interval",
    "comm_hook": "compression gradient_compression",
    "d": "n_components sketch_size",
    "data": "dataloader dataset train_dataset train_loader training_data",
    "data_parallel_size": "dp dp_size",
    "embed_dim": "d_model dim embedding_dim hidden_size model_dim",
    "epochs": "max_epochs num_epochs total_epochs",
    "gradient_accumulation_steps": "accumulation_steps",
    "gradient_clipping": "clip_grad_norm grad_clip max_grad_norm max_norm",
    "evaluate": "evaluation_fn metric metric_fn objective_fn score_fn",
    "exclude": "exclude_modules ignore ignored_layers modules_to_not_convert skip_modules",
    "gpus": "nproc_per_node num_gpus world_size",
    "heal": "distill finetune recover",
    "in_channels": "c_in",
    "in_features": "d_in dim_in in_dim input_dim input_size",
    "include": "include_modules layers_to_transform modules target_modules targets",
    "is_causal": "causal iscausal",
    "iscausal": "causal is_causal",
    "k": "n_components num_components q rank",
    "learning_rate": "lr",
    "log_dir": "logdir logs_dir output_dir",
    "loss_fn": "criterion loss",
    "low_rank": "k r rank",
    "lr": "learning_rate",
    "max_steps": "num_steps steps total_steps",
    "memory_bytes": "max_memory",
    "mixed_precision": "amp bf16 fp16 precision use_amp",
    "n_iter": "n_iterations n_power_iter niter num_iterations power_iterations",
    "nnodes": "nodes num_nodes",
    "nproc_per_node": "gpus_per_node nproc nprocs ntasks_per_node",
    "num_features": "features m n_features nb_features num_random_features",
    "num_heads": "heads n_head n_heads nhead num_attention_heads",
    "num_microbatches": "chunks micro_batches microbatches",
    "num_random_features": "features m n_features nb_features num_features",
    "num_terms": "L n_terms num_blocks terms",
    "out_channels": "c_out",
    "out_features": "d_out dim_out out_dim output_dim output_size",
    "oversample": "n_oversamples num_oversamples over_sampling oversampling",
    "pipeline_parallel_size": "num_stages pipeline_parallel pp pp_size",
    "powersgd_rank": "matrix_approximation_rank",
    "powersgd_start_step": "start_powerSGD_iter",
    "progress": "verbose",
    "rank": "k low_rank n_components r",
    "rdzv_timeout_s": "timeout timeout_s",
    "resume": "resume_from_checkpoint",
    "run_name": "job_name mlflow_experiment name",
    "rdzv_id": "job_id job_name name run_name",
    "seed": "generator manual_seed random_seed random_state rng",
    "schedule": "pipeline_schedule",
    "strategy": "data_parallel sharding_strategy",
    "data_parallel": "sharding_strategy strategy",
    "tensor_parallel_size": "tensor_parallel tp tp_size",
    "timeout_s": "timeout",
    "topk_fraction": "compression_ratio",
    "trackers": "mlflow_tracking tensorboard",
    "trials": "max_evals max_trials n_trials num_trials",
    "utilization": "device_utilization gpu_utilization",
    "vec_nnz": "nnz s sparsity",
    "warmup_steps": "warmup",
    "world": "nproc nproc_per_node num_gpus num_processes processes world_size",
}

# Advice about settings of other libraries that Panther does not have, with the names of these settings.
_Advice = tuple[tuple[str, str], ...]
_LAUNCHER = "the launcher decides it, in panther launch"
_LAUNCHED: _Advice = (
    (f"{_LAUNCHER} --nproc-per-node and --nnodes", "multi_gpu num_gpus num_processes world_size"),
    (f"{_LAUNCHER} --nproc-per-node", "gpus_per_node nproc nproc_per_node nprocs ntasks_per_node"),
    (f"{_LAUNCHER} --nnodes", "nnodes nodes num_nodes"),
    (f"{_LAUNCHER} --node-rank", "node_rank"),
    (f"{_LAUNCHER} --rdzv-endpoint HOST:PORT", "address master_addr master_port"),
    (
        f"{_LAUNCHER} --rdzv-endpoint HOST:PORT; or call panther.distributed.init(init_method=...) first",
        "init_method",
    ),
    (f"{_LAUNCHER} --max-restarts", "max_restarts"),
    (f"{_LAUNCHER} --monitor-interval", "monitor_interval monitor_interval_s"),
    (f"{_LAUNCHER} --rdzv-conf timeout=SECONDS", "rdzv_timeout_s start_timeout"),
    (f"{_LAUNCHER} --backend", "communication_backend"),
    ("give it to panther launch", "script"),
    ("leave it out, the launcher tells each process its rank", "local_rank rank"),
    (
        "leave it out, each process takes the GPU of its rank, or the CPU",
        "accelerator device device_id device_ids devices",
    ),
)
_LAUNCH: _Advice = (
    ("set nproc_per_node, and nnodes for several nodes", "multi_gpu num_gpus num_processes world_size"),
    ("set rdzv_endpoint to 'HOST:PORT'", "address init_method master_addr master_port"),
    ("pass it to launch_distributed_training or DistributedLauncher.launch", "script"),
)
_MICROBATCH_SIZE = ("set num_microbatches, by which each batch is divided", "microbatch_size")
_TRAINER: _Advice = (
    *_LAUNCHED,
    _MICROBATCH_SIZE,
    (f"use strategy='ddp' for pytorch-ddp; for nccl or gloo {_LAUNCHER} --backend", "backend"),
    (
        "use strategy='zero1' for stage 1, 'fsdp' for 3, and that with reshard_after_forward=False for 2",
        "stage zero_stage",
    ),
    ("use strategy='zero1' for stage 1, 'fsdp' for 2 and 3; cpu_offload=True to offload", "zero_optimization"),
    ("use strategy='fsdp' and cpu_offload=True", "offload_optimizer offload_param"),
    (
        "write its settings here: strategy, mixed_precision, batch_size, cpu_offload; or use "
        "panther.integrations.deepspeed",
        "deepspeed deepspeed_config",
    ),
    ("use strategy='ddp', or panther.integrations.horovod", "horovod"),
    ("use panther.integrations.ray", "ray"),
    ("use mixed_precision='fp16'", "fp16_opt_level"),
    ("set batch_size, the size for one process in one of the gradient_accumulation_steps", "train_batch_size"),
    ("set batch_size, the size for one process", "per_gpu_batch_size"),
    ("leave it out, the modules of ModuleLists are sharded one by one", "auto_wrap_policy min_num_params"),
    ("use panther.distributed.data_parallel(model, gradient_as_bucket_view=True)", "gradient_as_bucket_view"),
    (
        "set the sizes of the axes: data_parallel_size, tensor_parallel_size, pipeline_parallel_size",
        "dp_group group process_group tensor_parallel_group tp_group",
    ),
    ("set warmup_steps: the epochs times the steps of an epoch", "warmup_epochs"),
    ("leave it out, schedule='cosine' falls until the last step", "T_max"),
    ("leave it out, the learning rate rises from 0 in warmup_steps", "start_factor"),
    (
        "use warmup_steps and schedule='linear' or 'cosine', or scheduler=lambda optimizer: ... as argument of Trainer",
        "milestones schedulers total_iters",
    ),
    (
        "pass it to the optimizer, as functools.partial(torch.optim.AdamW, weight_decay=0.01), and that to Trainer",
        "betas eps momentum weight_decay",
    ),
    (
        "leave it out, the Trainer makes the optimizer of the model's parameters",
        "model_parameters named_parameters params",
    ),
    (
        "build the model with it, and pass the model to Trainer",
        "hidden_size hidden_sizes input_size layer_configs layers output_size sketch_ratios sketch_size",
    ),
    ("pass a DataLoader that has it to fit", "num_workers pin_memory sampler shuffle"),
    ("pass it to fit", "data dataloader dataset train_dataset train_loader training_data"),
    ("pass it to fit as the second argument", "val_loader validation_data"),
    ("leave it out, a Trainer divides the samples among the ranks", "num_replicas"),
    ("pass it to Trainer", "loss_fn model optimizer scheduler"),
    ("pass a function of the optimizer to Trainer as scheduler", "lr_scheduler"),
    ("pass it to Trainer as loss_fn", "criterion loss"),
    ("pass them to Trainer", "callbacks metrics"),
    ("write its settings here", "config"),
    (
        "it is for a search: use panther.tune",
        "num_samples resources_per_trial search_space train_fn trials_per_gpu",
    ),
    ("use profile=True, or panther profile", "activities on_trace_ready record_shapes with_stack"),
)
_HYBRID: _Advice = (
    *_LAUNCHED,
    _MICROBATCH_SIZE,
    ("pass it to train_step", "batch criterion optimizer"),
    ("pass it to train_step as criterion", "loss_fn"),
    (
        "pass it to the optimizer, which is made of trainer.model.parameters()",
        "betas eps learning_rate lr momentum weight_decay",
    ),
    (
        "set the sizes of the axes: data_parallel_size, tensor_parallel_size, pipeline_parallel_size",
        "dp_group group process_group tensor_parallel_group tp_group",
    ),
    ("use data_parallel='fsdp', which is ZeRO-3", "stage zero_optimization zero_stage"),
    ("it is the first argument", "model model_config"),
    ("it is a key of the first argument, model_config", "layers"),
    (
        "it is a key of each layer of the first argument, model_config",
        "in_features out_features sketch_size",
    ),
    ("make it of the optimizer, and call its step after train_step", "lr_scheduler scheduler schedulers"),
    (f"for nccl or gloo {_LAUNCHER} --backend", "backend"),
)
_COMPRESS: _Advice = (
    ("use bits=4.25", "load_in_4bit"),
    ("use bits=8.25", "load_in_8bit"),
    ("use bits= and forms=", "config qconfig quant_config quantization_config recipe scheme"),
    ("use forms=, such as forms='int4'", "bnb_4bit_quant_type quant_type"),
    (
        "compress chooses the rank of each layer: use budget=, the share of the eligible layers' bytes to keep, or "
        "panther.sketch_layers_ for one rank everywhere",
        "low_rank r rank ranks",
    ),
    (
        "use budget=, the share of the eligible layers' bytes to keep",
        "amount compression_ratio pruning_ratio ratio sparsity",
    ),
    ("pass the batches that they are in as calibration=", "max_seq_length num_calibration_samples"),
)
_CALLS = {
    "compress": _COMPRESS,
    "sketch_layers_": (
        (
            "pass it in a SketchConfig, as panther.sketch_layers_(model, panther.SketchConfig(low_rank=64))",
            "init k low_rank num_terms r rank",
        ),
    ),
    "tune": (("search settings of a training by Optuna, as the page 'Tune by a metric of your own' shows", "train"),),
    "SKLinear": (
        ("pass the weight to SKLinear.from_linear", "W_init weight"),
        ("use panther.nn.QuantizedLinear", "bits nbits"),
    ),
    "randomized_svd": (
        ("leave it out, the iteration is stabilised always", "power_iteration_normalizer svd_lapack_driver"),
        ("leave it out, signs are fixed always", "flip_sign"),
        ("subtract it from A first: A - A.mean(0) for a PCA", "M center"),
    ),
    "load_compressed": (
        ("load the model, and move it with .to(device)", "device device_map map_location"),
        ("leave it out, files hold no code", "trust_remote_code weights_only"),
        ("leave it out, all names must match", "strict"),
    ),
    "save_compressed": (
        ("leave it out, weights are safetensors always", "safe_serialization"),
        ("pass the model, not its state_dict", "state_dict"),
    ),
}  # fmt: skip
_ADVICE = {
    owner: {name: text for text, names in advice for name in names.split()}
    for owner, advice in (
        ("TrainConfig", _TRAINER),
        ("parallelism_config", _HYBRID),
        ("LaunchConfig", _LAUNCH),
        *_CALLS.items(),
    )
}

# Settings that only TrainConfig has.
_TRAIN_CONFIG_SETTINGS = (
    "activation_checkpointing batch_size bucket_cap_mb checkpoint_dir checkpoint_every_n_epochs "
    "checkpoint_every_n_steps comm_hook compile cpu_offload data_parallel_size epochs find_unused_parameters "
    "gradient_accumulation_steps gradient_clipping learning_rate log_every_n_steps max_steps mixed_precision "
    "num_microbatches pipeline_parallel_size profile progress reshard_after_forward resume run_name "
    "scaler_growth_interval scaler_init_scale schedule seed sketch_fraction strategy tensor_parallel_size "
    "topk_fraction trackers utilization warmup_steps"
)

_SEVERAL = "use strategy='hybrid' with tensor_parallel_size or pipeline_parallel_size"
_REPLICAS = "'fsdp' with data_parallel_replicate_size, the number of nodes"
_HOOKS: _Advice = (
    ("use comm_hook='fp16'", "fp16compress hvdcompressionfp16"),
    ("use comm_hook=None", "no none"),
    (
        "use one of 'fp16', 'bf16', 'powersgd', 'topk', 'sketch', None; 'projected' was removed, because 'sketch' "
        "reaches a lower loss with fewer bytes",
        "projected",
    ),
)
# The same for values, written in plain small letters.
_VALUES: dict[tuple[str, str], _Advice] = {
    ("TrainConfig", "strategy"): (
        ("use strategy='ddp'", "dataparallel distributeddataparallel dp pytorchddp"),
        ("use strategy='zero1', or 'fsdp' for stages 2 and 3", "zero"),
        ("use strategy='fsdp' with reshard_after_forward=False", "shardgradop zero2"),
        ("use strategy='fsdp'", "fsdp2 fullshard fullyshardeddataparallel zero3"),
        (f"use strategy={_REPLICAS}", "hsdp hybridshard"),
        ("use strategy='tp'", "tensorparallel"),
        ("use strategy='pp'", "pipeline pipelineparallel"),
        ("use strategy='tp' or 'pp'", "modelparallel"),
        (_SEVERAL, "3d hybridparallel"),
        ("use strategy='zero1' or 'fsdp', or panther.integrations.deepspeed", "deepspeed"),
        ("use strategy='ddp', or panther.integrations.horovod", "horovod"),
        ("use panther.integrations.ray", "ray"),
    ),
    ("TrainConfig", "mixed_precision"): (
        ("use mixed_precision='bf16' or 'fp16'", "true"),
        ("use mixed_precision='bf16'", "bfloat16 torchbfloat16"),
        ("use mixed_precision='fp16'", "float16 half torchfloat16"),
        ("use mixed_precision=None", "false float32 fp32 no"),
    ),
    ("TrainConfig", "trackers"): (
        (
            "Panther has no tracker for it: leave it out, and pass Trainer a Callback whose on_record(self, trainer, "
            "record) logs on rank 0, as wandb.log(record, step=record['step'])",
            "aim clearml comet cometml neptune wandb weightsandbiases",
        ),
        ("use 'jsonl', which is in log.jsonl, or history.to_csv", "csv json log"),
        ("use 'tensorboard'", "tb tensorboardx"),
        ("leave it out, trackers=() writes nothing beside the history", "false no none"),
    ),
    **dict.fromkeys((("TrainConfig", "comm_hook"), ("ParallelismConfig", "comm_hook"), ("", "comm_hook")), _HOOKS),
    ("TrainConfig", "schedule"): (
        (
            "schedule is of the learning rate, use pipeline_schedule for the pipeline's",
            "1f1b dualpipev gpipe interleaved loopedbfs zbv zerobubble",
        ),
    ),
    ("data_parallel", "strategy"): (
        ("use strategy='ddp'", "dataparallel distributeddataparallel dp pytorchddp"),
        ("use strategy='ddp', and ZeroRedundancyOptimizer of torch.distributed.optim", "zero1"),
        ("use strategy='fsdp' with reshard_after_forward=False", "shardgradop zero2"),
        ("use strategy='fsdp'", "fsdp2 fullshard fullyshardeddataparallel zero3"),
        ("use strategy='fsdp' and a mesh of make_mesh(replicate=..., dp=...)", "hsdp hybridshard"),
        ("use panther.distributed.tensor_parallel", "tensorparallel tp"),
        ("use panther.distributed.HybridParallelTrainer", "3d hybrid hybridparallel pp"),
    ),
    ("parallelism_config", "data_parallel"): (
        ("use data_parallel='fsdp', which is ZeRO-3", "zero zero1 zero2 zero3"),
        (f"use data_parallel={_REPLICAS}", "hsdp hybridshard"),
    ),
}


def name_hint(name: str, names: Collection[str], owner: str = "") -> str:
    """Return the end of a message about an unknown setting: what to use instead, or all settings.

    Args:
        name: The unknown setting.
        names: The names of the owner's settings.
        owner: The class or argument that takes them. There is special advice for ``"TrainConfig"``,
            ``"parallelism_config"``, ``"LaunchConfig"`` and the functions of ``_CALLS``.

    Example:
        >>> name_hint("lr", ["learning_rate", "epochs"])
        "did you mean 'learning_rate'?"
        >>> name_hint("eps", ["learning_rate", "epochs"])
        'use some of learning_rate, epochs'
    """
    advice = _ADVICE.get(owner, {})
    if name in advice:
        return advice[name]
    if (near := near_name(name, names)) is not None:
        return f"did you mean {near!r}?"
    train_settings = [synonym for synonym in (name, *_names_here(name)) if synonym in _TRAIN_CONFIG_SETTINGS.split()]
    if train_settings and owner in ("TrainConfig", "parallelism_config", "LaunchConfig"):
        return f"{train_settings[0]} is a setting of panther.train.TrainConfig, for a Trainer"
    return f"use some of {', '.join(names)}"


def near_name(name: str, names: Collection[str]) -> str | None:
    """Return the entry of ``names`` that is a synonym of ``name`` or is spelled similarly, or None.

    A name of several words with which one entry alone begins is spelled similarly too.

    Example:
        >>> near_name("num_gpus", ["gpus", "memory"])
        'gpus'
        >>> near_name("log_every", ["log_every_n_steps", "seed"])
        'log_every_n_steps'
    """
    synonyms = [synonym for synonym in _names_here(name) if synonym in names]
    if similar := synonyms or get_close_matches(name, names, 1, cutoff=_CLOSE):
        return similar[0]
    longer = [longer_name for longer_name in names if "_" in name and longer_name.startswith(f"{name}_")]
    return longer[0] if len(longer) == 1 else None


def _names_here(name: str) -> list[str]:
    return [name_here for name_here, other_names in _SYNONYMS.items() if name in other_names.split()]


def value_hint(setting: str, value: Any, values: Sequence[Any], owner: str = "") -> str:
    """Return the end of a message about an unknown value of a setting, as :func:`name_hint` does for names.

    Example:
        >>> value_hint("strategy", "FSDP", ["ddp", "fsdp"])
        "did you mean 'fsdp'?"
        >>> value_hint("strategy", "zero2", ["ddp", "fsdp"], "TrainConfig")
        "use strategy='fsdp' with reshard_after_forward=False"
    """
    plain = _letters_and_digits(value)
    for text, names in _VALUES.get((owner, setting), ()):
        if plain in names.split():
            return text
    by_plain = {_letters_and_digits(accepted): accepted for accepted in values}
    if near := get_close_matches(plain, by_plain, 1, cutoff=_CLOSE):
        return f"did you mean {by_plain[near[0]]!r}?"
    return f"use one of {', '.join(map(repr, values))}"


def _letters_and_digits(value: Any) -> str:
    return "".join(character for character in str(value).lower() if character.isalnum())
