"""What a rank holds until a model that is larger than its share has started; a module, so that processes can be new."""

import resource
import warnings

import torch
from measuring import return_large_tensors, rise_of
from torch import nn
from torch.distributed.tensor import DTensor

from panther.distributed import (
    HybridParallelTrainer,
    checkpoint,
    data_parallel,
    make_mesh,
    materialize_,
    split_stages,
    tensor_parallel,
)
from panther.errors import PerformanceWarning
from panther.nn import SKLinear

WORLD = 4
GIBIBYTE = 1 << 30


def dense(layers=32, width=1536):
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))  # 302 MB


def sketched(layers=32, width=3072, rank=192, packed=False):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        made = (SKLinear(width, width, rank, bias=False, sketch="signs", packed=packed) for _ in range(layers))
        return nn.Sequential(*made)  # 151 MB of factors, and of sketches


def packed(*sizes):
    return sketched(*sizes, packed=True)


MODELS = {"dense": dense, "sketched": sketched, "packed": packed}
SMALL = {"dense": (WORLD, 8), "sketched": (WORLD, 64, 8), "packed": (WORLD, 64, 8)}


def two_gigabytes():
    return dense(128, 2048)  # 2,147 MB


def on_meta(model):
    with torch.device("meta"):
        return model()


def started(layout, model, weights=None):
    """The modules of this rank, of all ranks, with values."""
    if layout == "trainer":
        from panther.train import Callback, TrainConfig, Trainer  # memory that other layouts do without

        class Started(Callback):
            """Ends the run before its first step."""

            def on_start(self, trainer):
                trainer.stop = True

        config = TrainConfig(strategy="fsdp", max_steps=1, batch_size=1, initial_weights=weights)
        trainer = Trainer(model, torch.optim.SGD, nn.MSELoss(), config, [Started()])
        data = torch.zeros(WORLD, (model if isinstance(model, nn.Module) else on_meta(model))[0].in_features)
        trainer.fit([(x, x) for x in data])
        return [trainer.model]
    parts = sharded(layout, model)
    if any(parameter.is_meta for part in parts for parameter in part.parameters()):
        materialize_(parts if layout == "pp" else parts[0], weights)
    return parts


def sharded(layout, model):
    world = torch.distributed.get_world_size()
    if layout == "fsdp":
        return [data_parallel(model, strategy="fsdp")]
    if layout == "tp":
        return [tensor_parallel(model, make_mesh(tp=world)["tp"]).model]
    if layout == "hybrid":
        return [HybridParallelTrainer(model, {"tensor_parallel_size": 2}).model]
    return [stage.submod for stage in split_stages(model, world)]


def local_tensors(parts):
    tensors = (tensor for part in parts for tensor in (*part.parameters(), *part.buffers()))
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def mean_of(tensor):
    mean = tensor.detach().mean()
    return float(mean.full_tensor() if isinstance(mean, DTensor) else mean)


def peaks(layout, kind, folders, with_values):
    """By how much the peak of this process rises in each way to start; and the mean of each tensor that was read.

    Args:
        layout: The layout of the ranks.
        kind: A key of MODELS.
        folders: Folders that hold the weights of such a model, by name.
        with_values: Measure also the start of a model that has values, which every rank builds in full.
    """
    model, sizes = MODELS[kind], SMALL[kind]
    materialize_(sharded(layout if layout != "trainer" else "fsdp", lambda: model(*sizes)))  # loads what all need
    started(layout, lambda: model(*sizes))
    ways = {"drawn, of a function": (model, None), "drawn, of a model": (on_meta(model), None)}
    ways |= {f"read from {name}": (model, folder) for name, folder in folders.items()}
    rises, means = {}, {}
    for way, (given, folder) in ways.items():
        rises[way], parts = rise_of(lambda given=given, folder=folder: started(layout, given, folder))
        assert all(tensor.isfinite().all() for tensor in local_tensors(parts))
        if folder is not None:
            means[way] = {name: mean_of(p) for part in parts for name, p in part.named_parameters()}
        del parts, given
        ways[way] = None
    if with_values:
        rises["with values"], _ = rise_of(lambda: started(layout, model()))
    return rises, means


def export_peaks(folder):
    """The rise of writing a sharded model, and of writing it for inference."""
    return_large_tensors()  # before the first tensors, of which the heap would keep room for later ones
    [model] = started("fsdp", dense)
    saved, _ = rise_of(lambda: checkpoint.save(folder / "saved", model, step=1))
    exported, _ = rise_of(lambda: checkpoint.export(model, folder / "exported"))
    consolidated = None
    if torch.distributed.get_rank() == 0:
        consolidated, _ = rise_of(lambda: checkpoint.export(folder / "saved", folder / "consolidated"))
    return saved, exported, consolidated


def start_within_limit(layout):
    """Start two gigabytes in a process of one: bytes of its shards, whether all have values, and torch's error."""
    started(layout, lambda: dense(*SMALL["dense"]))
    return_large_tensors()
    resource.setrlimit(resource.RLIMIT_DATA, (GIBIBYTE, GIBIBYTE))
    try:
        torch.empty(GIBIBYTE, dtype=torch.uint8)
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    tensors = local_tensors(started(layout, two_gigabytes))
    return sum(tensor.nbytes for tensor in tensors), all(tensor.isfinite().all() for tensor in tensors), refused
