"""Sketched models on DeepSpeed: ZeRO 1, 2 and 3 and CPU offload, checkpoints for any number of processes, export.

DeepSpeed trains. This module gives all ranks the same sketches by sending seeds, saves and restores sketches and
buffers, which universal checkpoints leave out, and checks models before ranks start to wait for each other.
"""

__all__ = ["export", "initialize", "load_checkpoint", "save_checkpoint"]

import contextlib
import copy
import io
import json
import math
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import panther as pr
from panther._torch import buffers_of
from panther.distributed.comm.agreement import LAYER, agree, run_on_first_rank
from panther.distributed.comm.diagnostics import watched
from panther.distributed.comm.ranks import in_process_group
from panther.distributed.sync.replicas import broadcast_model
from panther.distributed.sync.sketches import sketched_layers
from panther.errors import CheckpointError, ConfigError, PantherError, check_version, require_extra
from panther.files import read_json, read_text, write_json
from panther.files.reader import check_plain_name
from panther.nn.sketch_record import plain_state
from panther.train import TrainConfig

deepspeed: Any = require_extra("deepspeed", "deepspeed")
check_version("deepspeed", deepspeed.__version__, 0, least=(0, 19))
tensor_fragment: Any = require_extra("deepspeed.utils", "deepspeed")
to_universal: Any = require_extra("deepspeed.checkpoint.ds_to_universal", "deepspeed")

_ENTRY, _SUFFIX, _RECORD = "panther", "_universal", ".panther.json"
# Settings that only panther.train.Trainer implements. Settings of the loop, such as epochs, are not refused.
_REFUSED = {
    "compile": "call engine.compile() instead",
    "comm_hook": "set communication_data_type in a configuration of DeepSpeed's own",
    "tensor_parallel_size": "use panther.train.Trainer",
    "pipeline_parallel_size": "use panther.train.Trainer",
    "activation_checkpointing": "call torch.utils.checkpoint in the model",
}


def initialize(
    model: nn.Module,
    config: TrainConfig | dict[str, Any] | str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    **options: Any,
) -> tuple[Any, Any, Any, Any]:
    """Wrap a model in DeepSpeed's engine, with the same sketches on every rank. Every rank must call it.

    The model and the configuration are compared between the ranks. Sketches are sent as seeds, parameters and buffers
    in full, from rank 0. If there is no process group, :func:`panther.distributed.init` makes it.

    Args:
        model: The model, with sketched layers or without. It becomes part of the engine, in place.
        config: DeepSpeed's configuration, as a dictionary or the path of a JSON file; or a
            :class:`~panther.train.TrainConfig`. These of its fields are used: ``strategy`` (``"ddp"`` is ZeRO stage 0,
            ``"zero1"`` and ``"auto"`` stage 1, ``"fsdp"`` stage 3, and with ``reshard_after_forward=False`` stage 2),
            ``mixed_precision``, ``cpu_offload``, ``batch_size``, ``gradient_accumulation_steps``,
            ``gradient_clipping``, ``learning_rate`` and the settings of the scaler. Settings of the loop, such as
            ``epochs``, have no effect.
        optimizer: An optimizer, or a function of parameters that makes one. None is the optimizer that ``config``
            names; for a TrainConfig it is AdamW.
        **options: Further arguments of ``deepspeed.initialize``, such as ``training_data`` and ``lr_scheduler``.

    Returns:
        What ``deepspeed.initialize`` returns: the engine, the optimizer, the data loader and the scheduler.

    Raises:
        MissingExtraError: If DeepSpeed is not installed (on import).
        ConfigError: If the version is not supported (on import), or the configuration is not valid.
        SketchMismatchError: On every rank, if the sketched layers differ.
        DistributedError: On every rank, if models or configurations differ; if a rank is missing.

    Example:
        >>> import panther as pr
        >>> from panther.integrations.deepspeed import initialize
        >>> model = pr.nn.SKLinear(64, 64, 2)
        >>> engine, *_ = initialize(
        ...     model, pr.train.TrainConfig(batch_size=8)
        ... )  # doctest: +SKIP
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be an nn.Module, not a {type(model).__name__}: build it first")
    if isinstance(model, deepspeed.PipelineModule):
        raise ConfigError(
            "a PipelineModule has different layers on each rank, which have no common sketches: use "
            "panther.train.Trainer with strategy='pp'"
        )
    for name in ("model", "config", "config_params", "args", "model_parameters"):
        if name in options:
            raise ConfigError(f"{name} is not an option of initialize(model, config, optimizer, ...): leave it out")
    if not in_process_group():
        pr.distributed.init()
    # DeepSpeed reads LOCAL_RANK even for a single process that needs no launcher.
    os.environ.setdefault("LOCAL_RANK", str(pr.distributed.get_distributed_info().local_rank))
    settings: dict[str, Any] = {}

    def described() -> dict[str, Any]:
        settings.update(checked_settings(config, optimizer is not None))
        # One item per entry, so that an error names the entries that differ.
        return {f"config[{key!r}]": json.dumps(settings[key], sort_keys=True, default=str) for key in sorted(settings)}

    world = dist.group.WORLD
    assert world is not None
    # A model that was built under deepspeed.zero.Init is sharded already, and drawing a sketch needs the shapes of the
    # factors, which are small.
    factors = [p for layer in sketched_layers(model).values() for p in layer.parameters(recurse=False)]
    with _gathered(factors):
        broadcast_model(model, world, "initialize", described)
    # This operator of DeepSpeed's inference on CPUs would be compiled before the first step, for minutes, and would
    # wait for the other processes without a limit. Training does not use it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with _translated_errors(), watched("initialize"):
        result = deepspeed.initialize(
            model=model,
            # Frozen parameters have no state that ZeRO could shard.
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            optimizer=optimizer,
            config=settings,
            **options,
        )
    _cast_sketches(model)
    return result


def save_checkpoint(
    engine: Any, directory: str | os.PathLike[str], tag: str | None = None, client_state: dict[str, Any] | None = None
) -> str:
    """Write a checkpoint that any number of processes can load. Every rank must call it.

    DeepSpeed writes its own checkpoint, and rank 0 converts it to a second one in DeepSpeed's universal format. Both
    contain the seeds of sketches and all buffers.

    Args:
        engine: The engine that :func:`initialize` returned.
        directory: A folder that all ranks share.
        tag: Name of the checkpoint in the folder; None is ``step-`` and the number of steps.
        client_state: Further entries, such as the epoch, which :func:`load_checkpoint` returns.

    Returns:
        The tag.

    Raises:
        CheckpointError: On every rank, if it cannot be written or converted.

    Cost: twice the parameters and the optimizer's state on disk; the conversion is a pass over them on rank 0.
    """
    tag = tag or f"step-{engine.global_steps:08d}"
    stage = engine.zero_optimization_stage()
    # Universal checkpoints hold only parameters, so that buffers are saved as client state.
    buffers = {
        name: value for name, value in plain_state(engine.module).items() if name not in _parameters(engine.module)
    }
    state = {**(client_state or {}), _ENTRY: {"buffers": buffers, "stage": stage}}
    with _translated_errors(CheckpointError), watched("save_checkpoint"):
        engine.save_checkpoint(str(directory), tag, client_state=state)
    run_on_first_rank(lambda: write_json(Path(directory) / f"{tag}{_RECORD}", {"stage": stage}), None)
    if stage > 0:
        run_on_first_rank(lambda: _convert(Path(directory), tag), None)
    return tag


def load_checkpoint(engine: Any, directory: str | os.PathLike[str], tag: str | None = None) -> dict[str, Any]:
    """Load a checkpoint of :func:`save_checkpoint`, also on another number of processes. Every rank must call it.

    DeepSpeed opens its own files by unpickling, which can run code that they contain: load only checkpoints whose
    writers you trust.

    Args:
        engine: An engine of the same model, optimizer and stage of ZeRO.
        directory: The folder that was saved to.
        tag: Name of the checkpoint; None is the latest one.

    Returns:
        ``client_state`` as it was saved.

    Raises:
        CheckpointError: If there is none, it is of another stage or of DeepSpeed alone, or it does not fit the model.
        SketchMismatchError: If sketches differ between ranks afterwards.
    """
    stage, root = engine.zero_optimization_stage(), Path(directory)
    tag = run_on_first_rank(lambda: _existing_tag(root, tag, stage), None)
    # A private attribute, because DeepSpeed reads this setting only from the configuration, for the entire run.
    engine._config.load_universal_checkpoint = stage > 0
    try:
        with _translated_errors(CheckpointError), watched("load_checkpoint"):
            path, state = engine.load_checkpoint(str(root), tag + (_SUFFIX if stage else ""))
    finally:
        engine._config.load_universal_checkpoint = False
    if path is None or _ENTRY not in state:
        raise CheckpointError(f"{root / tag} was not written by save_checkpoint of this module: load it by DeepSpeed")
    entry = state.pop(_ENTRY)
    _restore_buffers(engine.module, entry["buffers"])
    layers = sketched_layers(engine.module)
    fix = "load from a folder that all ranks share"
    agree(
        "load_checkpoint",
        lambda: {f"{LAYER}{name!r}": f"seed {layer.seed}" for name, layer in layers.items()},
        None,
        fix,
    )
    return state


def export(engine: Any, directory: str | os.PathLike[str]) -> Path:
    """Write the trained model in Panther's inference format, in float32. Every rank must call it.

    The weights are the optimizer's float32 copies, gathered from all ranks, even if the model computes in 16 bits.
    :func:`panther.load_compressed` reads the folder, without DeepSpeed.

    Args:
        engine: The engine that :func:`initialize` returned.
        directory: The folder that rank 0 writes.

    Returns:
        The folder.

    Raises:
        FormatError, OSError: On every rank, what :func:`panther.save_compressed` raises on rank 0.

    Cost: one gather of each parameter, and the model in float32 on every rank.
    """
    module, folder = engine.module, Path(directory)
    parameters = list(module.parameters())
    with watched("export"):
        full = {p: tensor_fragment.safe_get_full_fp32_param(p) for p in parameters if p.requires_grad}
        with _gathered(parameters):
            sharded_data = [(p, p.data) for p in parameters]
            try:
                for parameter, data in sharded_data:
                    master = full.get(parameter)
                    parameter.data = (data if master is None else master.view(data.shape)).detach().float().clone()
                run_on_first_rank(lambda: pr.save_compressed(module, folder), None)
            finally:
                for parameter, data in sharded_data:
                    parameter.data = data
    return folder


def _cast_sketches(model: nn.Module) -> None:
    """Convert sketches to the dtype of their factors; their entries +-1 are exact in every dtype.

    ZeRO 3 casts only parameters, and a layer would otherwise cast its sketches at each call.
    """
    for layer in sketched_layers(model).values():
        for name in layer.sketch_names:
            if name in buffers_of(layer):
                layer.register_buffer(name, getattr(layer, name).to(layer.sketch_like().dtype), persistent=False)


def _gathered(parameters: list[nn.Parameter]) -> Any:
    """Return the context in which parameters that ZeRO 3 shards are replicated."""
    sharded = [p for p in parameters if hasattr(p, "ds_id")]
    return deepspeed.zero.GatheredParameters(sharded, enabled=bool(sharded))


def _parameters(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters(remove_duplicate=False)}


def _convert(directory: Path, tag: str) -> None:
    arguments = Namespace(
        input_folder=str(directory / tag),
        output_folder=str(directory / (tag + _SUFFIX)),
        num_extract_workers=1,  # in this process, because forking a process that has a process group can hang
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    # The conversion prints every step.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        to_universal.main(arguments)


def _existing_tag(directory: Path, tag: str | None, stage: int) -> str:
    """Return the tag of the checkpoint to load, or raise CheckpointError if there is none."""
    if tag is None:
        try:
            tag = read_text(directory / "latest").strip()
        except FileNotFoundError:
            raise CheckpointError(f"{directory} has no checkpoint: give the folder that was saved to") from None
        check_plain_name(tag, directory / "latest")  # DeepSpeed unpickles the files of the folder that it names
    folder = directory / (tag + (_SUFFIX if stage else ""))
    if not folder.is_dir():
        tags = sorted(path.name for path in directory.glob("*") if path.is_dir() and not path.name.endswith(_SUFFIX))
        raise CheckpointError(
            f"{folder} does not exist: {directory} has {', '.join(tags) or 'none'}; only stage 0 loads a checkpoint of "
            "stage 0, and checkpoints of other stages must be written by save_checkpoint of this module"
        )
    if (saved_stage := _saved_stage(directory, tag)) not in (None, stage) and 3 in (saved_stage, stage):
        raise CheckpointError(
            f"{folder} is of ZeRO stage {saved_stage}, and this engine has stage {stage}, whose optimizer state has a "
            f"different layout: start with stage {saved_stage}, or export the model and load only the weights"
        )
    return tag


def _saved_stage(directory: Path, tag: str) -> int | None:
    """Return the stage of ZeRO of a checkpoint; None for checkpoints of earlier versions, which have it in a pickle."""
    record = directory / f"{tag}{_RECORD}"
    try:
        stage = read_json(record)["stage"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{record} cannot be read ({error}): copy the checkpoint again") from None
    return stage if isinstance(stage, int) else None


def _restore_buffers(module: nn.Module, saved: dict[str, Any]) -> None:
    """Restore the saved values of buffers and sketches; DeepSpeed loads the parameters."""
    buffers = {name: value for name, value in plain_state(module).items() if name not in _parameters(module)}
    if buffers.keys() != saved.keys():
        name = sorted(buffers.keys() ^ saved.keys())[0]
        where = "model" if name in buffers else "checkpoint"
        raise CheckpointError(f"only the {where} has the buffer {name!r}: build the model that was saved")
    layers = sketched_layers(module)
    for name, value in saved.items():
        owner, _, leaf = name.rpartition(".")
        if leaf == "_extra_state":
            module.get_submodule(owner).set_extra_state(value)
            continue
        with torch.no_grad():
            buffers[name].copy_(value)
        if leaf == "sketch_seed" and owner in layers:
            layer = layers[owner]
            # Drawing the sketches of the seed needs the shapes of the factors, which ZeRO 3 holds sharded.
            with _gathered(list(layer.parameters(recurse=False))):
                layer.check_record()


@contextlib.contextmanager
def _translated_errors(kind: type[PantherError] = ConfigError) -> Iterator[None]:
    """Raise errors of DeepSpeed again as ``kind`` in one sentence; DeepSpeed's own errors have many lines."""
    try:
        yield
    except PantherError:
        raise
    except (AssertionError, ValueError, FileNotFoundError, KeyError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines[:3]) or type(error).__name__
        fix = "correct the configuration" if kind is ConfigError else "load it into the model and stage it was saved of"
        raise kind(f"DeepSpeed {deepspeed.__version__} refuses this: {reason}: {fix}") from error


def checked_settings(config: Any, has_optimizer: bool) -> dict[str, Any]:
    """Return a configuration for DeepSpeed as a new dictionary, or raise ConfigError for one that is not valid."""
    settings = _from_train_config(config, has_optimizer) if isinstance(config, TrainConfig) else _read_settings(config)
    zero = settings.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    if stage not in (0, 1, 2, 3):  # DeepSpeed would treat any other value as 0
        raise ConfigError(f"zero_optimization.stage={stage!r} must be 0, 1, 2 or 3")
    return settings


def _read_settings(config: Any) -> dict[str, Any]:
    if isinstance(config, str | os.PathLike):
        path = Path(config)
        try:
            config = read_json(path)
        except FileNotFoundError:
            raise ConfigError(f"the configuration {path} does not exist: give the path of DeepSpeed's JSON") from None
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise ConfigError(
            "config must be a TrainConfig, a dictionary of DeepSpeed's settings or the path of its JSON file, not a "
            f"{type(config).__name__}"
        )
    return copy.deepcopy(dict(config))


def _from_train_config(config: TrainConfig, has_optimizer: bool) -> dict[str, Any]:
    defaults = TrainConfig()
    for name, instead in _REFUSED.items():
        value = getattr(config, name)
        if value != getattr(defaults, name) and value is not None and (value is True or value != 1):
            raise ConfigError(f"{name}={value!r} has no counterpart in DeepSpeed: {instead}")
    stage = _stage(config)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 1 << 30,  # DeepSpeed's default prints a line every tenth step
    }
    if config.gradient_clipping is not None:
        settings["gradient_clipping"] = config.gradient_clipping
    if config.mixed_precision == "bf16":
        settings["bf16"] = {"enabled": True}
    elif config.mixed_precision == "fp16":
        settings["fp16"] = {"enabled": True, "loss_scale": 0}
        if config.scaler_init_scale is not None:
            settings["fp16"]["initial_scale_power"] = round(math.log2(config.scaler_init_scale))
        if config.scaler_growth_interval is not None:
            settings["fp16"]["loss_scale_window"] = config.scaler_growth_interval
    if config.cpu_offload:
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        if stage == 3:
            settings["zero_optimization"]["offload_param"] = {"device": "cpu"}
        # This allows every optimizer on the CPU, including torch's optimizers, which need no compiler.
        settings["zero_force_ds_cpu_optimizer"] = False
    if not has_optimizer:
        rate = {} if config.learning_rate is None else {"lr": config.learning_rate}
        # DeepSpeed's AdamW would compile C++ at the start; torch_adam selects torch's AdamW.
        settings["optimizer"] = {"type": "AdamW", "params": {**rate, "torch_adam": True}}
    return settings


def _stage(config: TrainConfig) -> int:
    """Return the stage of ZeRO for a strategy of the Trainer."""
    if config.strategy == "fsdp":
        return 3 if config.reshard_after_forward else 2
    stages = {"ddp": 0, "auto": 1, "zero1": 1}
    if config.strategy not in stages:
        raise ConfigError(
            f"strategy={config.strategy!r} has no counterpart in DeepSpeed: use 'ddp' for stage 0, 'zero1' for stage "
            "1, 'fsdp' for stage 3, and 'fsdp' with reshard_after_forward=False for stage 2"
        )
    return stages[config.strategy]
