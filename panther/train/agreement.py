"""Compare the settings and data of all ranks before the first step.

A difference is an error that names the setting, its values and the ranks. Without the comparison, ranks with different
settings train different models, or wait for each other until ``timeout_s`` has passed.
"""

__all__ = ["agree_on_order", "agree_on_progress", "agree_on_run", "compare_samples"]

import dataclasses
import logging
import platform
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from panther._descriptions import describe_value, digest, digest_of_tensors
from panther._torch import tree_leaves
from panther._version import __version__
from panther.distributed import get_rank, get_world_size
from panther.distributed.comm.agreement import agree, gather_objects
from panther.distributed.comm.ranks import name_ranks
from panther.errors import DistributedError
from panther.train.config import TrainConfig
from panther.train.optimization.optimizer import Optimizer

_log = logging.getLogger(__name__)
_FIX = "start every rank with the same script, arguments, data and versions"
# Only the first rank reads these settings, or they do not change what ranks exchange.
_OF_A_RANK = ("cluster_file", "profile", "progress", "run_name", "timeout_s", "trackers")
# Nodes may have copies of weights in different places. A written file tests whether checkpoint_dir is one folder.
_PATHS = ("checkpoint_dir", "initial_weights")
_ROWS = 4  # number of rows that are compared at both ends of a dataset in memory


def agree_on_run(trainer: Any, call: str, data: Mapping[str, Any], is_built: bool) -> None:
    """Raise DistributedError on every rank unless all ranks start the same run. It costs one exchange.

    Settings of a single rank may differ: progress, trackers, profiles, paths, ``timeout_s``, callbacks without a state,
    devices, and how loaders fetch. A model that is built already has been compared.
    """

    def describe() -> dict[str, str]:
        model, optimizer = (None, None) if is_built else (trainer.model, trainer.optimizer)
        described = {
            "Panther's version": __version__,
            "torch's version": torch.__version__,
            "Python's version": ".".join(platform.python_version_tuple()[:2]),
        }
        described |= _describe_config(trainer.config)
        functions = ("loss_fn", "loss_weight", "metrics", "scheduler")
        described |= {f"{name}=": describe_value(getattr(trainer, name)) for name in functions}
        described |= _describe_optimizer(optimizer, model)
        stateful = [type(callback).__qualname__ for callback in trainer.callbacks if hasattr(callback, "state_dict")]
        described["the list of callbacks with a state"] = str(stateful)
        for name, value in data.items():
            described |= _describe_data(name, value)
        for name, module in model.named_modules() if model is not None else ():
            # Settings of torch's own modules, such as the probability of a dropout. Other modules may describe the
            # seed of a sketch, which is sent by the first rank, or the rank itself.
            settings = module.extra_repr() if type(module).__module__.startswith("torch.nn.") else ""
            mode = "training" if module.training else "evaluation"
            described[f"module {name!r}"] = f"{type(module).__qualname__}({settings}) in {mode} mode"
        return described

    _agree(f"Trainer.{call}", describe, _FIX, "settings or data")


def agree_on_progress(trainer: Any, stages: int, moment: str) -> None:
    """Raise DistributedError on every rank unless all have the same optimizer and are at the same step.

    The stages of a pipeline have optimizers of different parameters, and maybe of different groups.
    """

    def describe() -> dict[str, str]:
        optimizer = trainer.optimizer
        described = {
            "the optimizer": type(optimizer).__qualname__,
            "step": describe_value(trainer.step),
            "epoch": describe_value(trainer.epoch),
            "the number of records": describe_value(len(trainer.history)),
            # agree_on_run accepts different spellings of one folder, which later look like different folders.
            "checkpoint_dir": describe_value(trainer.config.checkpoint_dir),
        }
        if stages == 1:
            described |= _describe_groups(optimizer.param_groups)
        else:
            described |= {f"{name} of the optimizer": describe_value(x) for name, x in optimizer.defaults.items()}
        return described

    fix = "make and change the optimizer on every rank alike, and resume all from one checkpoint"
    _agree(f"Trainer, at {moment},", describe, fix, "optimizers or steps")


def compare_samples(name: str, data: Any, is_shared: bool) -> None:
    """Compare samples at both ends of data in memory: raise if ranks share layers or stages, or else warn.

    Only TensorDatasets and lists are compared, because other datasets may draw random numbers, read files or count.
    """
    if get_world_size() == 1:
        return
    dataset = data.dataset if isinstance(data, DataLoader) else data
    tensors: list[Any] = []
    if isinstance(dataset, TensorDataset):
        tensors = [_ends(tensor) for tensor in dataset.tensors]
    elif type(dataset) is list:
        tensors = tree_leaves(_ends(dataset))
    digests = gather_objects(digest_of_tensors(tensors), None)
    differing_ranks = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if not differing_ranks:
        return
    has = "has" if len(differing_ranks) == 1 else "have"
    fault = f"{name_ranks(differing_ranks)} {has} different samples in the {name} data than rank 0"
    fix = "give all the same dataset, seeded alike, or pass a stream of each rank's own samples"
    if is_shared:
        raise DistributedError(f"{fault}, and ranks that share layers or stages must have the same ones: {fix}")
    if get_rank() == 0:
        _log.warning("%s, and each rank takes only its part of its own, so that samples are left out: %s", fault, fix)


def agree_on_order(epoch: int, plan: list[list[list[list[int]]]]) -> None:
    """Raise DistributedError on every rank unless a sampler returned the same order of an epoch on all ranks."""

    def describe() -> dict[str, str]:
        batches = [indices for window in plan for batch in window for indices in batch]
        order = np.array([index for indices in batches for index in (len(indices), *indices)], dtype=np.int64)
        samples = sum(map(len, batches))
        return {f"the order of epoch {epoch}": f"{samples} samples with the digest {digest(order.tobytes())}"}

    fix = (
        "a sampler must give all samples in the same order on every rank, because the Trainer divides them itself: "
        "seed its generator alike on all ranks"
    )
    _agree("Trainer, at the start of an epoch,", describe, fix, "orders of samples")


def _agree(call_name: str, describe: Callable[[], dict[str, str]], fix: str, noun: str) -> None:
    if get_world_size() > 1:
        agree(call_name, describe, None, fix, noun)


def _describe_config(config: TrainConfig) -> dict[str, str]:
    names = [field.name for field in dataclasses.fields(config) if field.name not in _OF_A_RANK]
    settings = {name: getattr(config, name) for name in names}
    settings |= {name: settings[name] and "a path" for name in _PATHS}
    if config.resume not in ("auto", "never"):
        settings["resume"] = "a path"
    return {f"{name}=": describe_value(value) for name, value in settings.items()}


def _describe_optimizer(optimizer: Optimizer, model: nn.Module | None) -> dict[str, str]:
    if not isinstance(optimizer, torch.optim.Optimizer):
        return {"the optimizer": describe_value(optimizer)}
    names = {} if model is None else {parameter: name for name, parameter in model.named_parameters()}
    described = {"the optimizer": type(optimizer).__qualname__, **_describe_groups(optimizer.param_groups)}
    for number, group in enumerate(optimizer.param_groups):
        parameters = ", ".join(names.get(parameter, "another one") for parameter in group["params"])
        described[f"the list of parameters of the optimizer's group {number}"] = parameters
    return described


def _describe_groups(groups: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    return {
        f"{name} of the optimizer's group {number}": describe_value(value)
        for number, group in enumerate(groups)
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


def _describe_data(name: str, data: Any) -> dict[str, str]:
    """Describe data by its types and its number of samples; describe a stream only by its type."""
    subject = f"the {name} data"
    described = {subject: type(data).__qualname__}
    dataset = data
    if isinstance(data, DataLoader):
        dataset = data.dataset
        described[f"the dataset of {subject}"] = type(dataset).__qualname__
        described[f"batch_size of {subject}"] = str(data.batch_size)
        described[f"drop_last of {subject}"] = str(data.drop_last)
        for kind in ("sampler", "batch_sampler"):
            described[f"the {kind} of {subject}"] = type(getattr(data, kind)).__qualname__
        described[f"the collate_fn of {subject}"] = describe_value(data.collate_fn, 1)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return described
    described[f"the number of samples of {subject}"] = str(len(dataset))
    return described


def _ends(rows: Any) -> Any:
    if len(rows) <= 2 * _ROWS:
        return rows
    ends = rows[:_ROWS], rows[-_ROWS:]
    return torch.cat(ends) if isinstance(rows, Tensor) else ends[0] + ends[1]
