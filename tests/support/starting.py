"""What a rank holds until a model that is larger than its share has started; a module, so that processes can be new."""

import resource

import torch
from measuring import forget_peak
from torch import nn
from torch.distributed.tensor import DTensor

from panther.distributed import data_parallel, make_mesh, materialize_, split_stages, tensor_parallel
from panther.train.history import peak_memory

LAYERS, WIDTH, WORLD = 32, 1536, 4
GIBIBYTE = 1 << 30


def model_of(layers=LAYERS, width=WIDTH):
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def two_gigabytes():
    return model_of(128, 2048)  # 2,147 MB


def sharded(strategy, model):
    """The modules of this rank, of WORLD ranks."""
    if strategy == "fsdp":
        return [data_parallel(model, strategy="fsdp")]
    if strategy == "tp":
        return [tensor_parallel(model, make_mesh(tp=WORLD)["tp"]).model]
    return [stage.submod for stage in split_stages(model, WORLD)]


def local_tensors(parts):
    return [p.to_local() if isinstance(p, DTensor) else p for part in parts for p in part.parameters()]


def peaks(strategy, folder):
    """By how much the peak of this process rises in each way to start; and what was read from the folder."""
    materialize_(sharded(strategy, lambda: model_of(WORLD, 4)))  # loads what all need

    def rise(start):
        forget_peak()
        before = peak_memory()
        parts = start()
        return peak_memory() - before, parts

    with_values, _ = rise(lambda: sharded(strategy, model_of()))
    drawn, _ = rise(lambda: materialize_(sharded(strategy, model_of)))
    read, parts = rise(lambda: materialize_(sharded(strategy, model_of), folder))
    means = {name: float(p.mean().item()) for part in parts for name, p in part.named_parameters()}
    return {"with values": with_values, "drawn": drawn, "file": read}, means


def start_within_limit(strategy):
    """Start two gigabytes in a process of one: bytes of its shards, whether all have values, and torch's error."""
    materialize_(sharded(strategy, lambda: model_of(WORLD, 4)))
    resource.setrlimit(resource.RLIMIT_DATA, (GIBIBYTE, GIBIBYTE))
    try:
        torch.empty(GIBIBYTE, dtype=torch.uint8)
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    tensors = local_tensors(materialize_(sharded(strategy, two_gigabytes)))
    return sum(tensor.nbytes for tensor in tensors), all(tensor.isfinite().all() for tensor in tensors), refused
