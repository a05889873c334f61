"""Checkpoints: saved in one layout, loaded in others; bad files; the inference format from any layout."""

import json
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import panther as pr
from panther.distributed import checkpoint, data_parallel, launch, make_mesh, split_stages, tensor_parallel
from panther.distributed.pipelining import make_schedule
from panther.errors import CheckpointError, FormatError
from panther.nn import SKLinear

WIDTHS = [24, 36, 20, 28, 6]
pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")]


def build(seed=0, fitted=False):
    torch.manual_seed(seed)
    layers = []
    for n, m in pairwise(WIDTHS):
        layer = SKLinear(n, m, 2)
        layers += [SKLinear.from_linear(layer.to_linear(), 1, 2) if fitted else layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, WIDTHS[0], generator=generator, dtype=torch.float64)
    return x, torch.randint(WIDTHS[-1], (12,), generator=generator)


class Run:
    """A training run in one of several layouts."""

    def __init__(self, layout, seed=0, fitted=False):
        model = build(seed, fitted)
        self.layout, self.schedule, self.share = layout, None, slice(None)
        if layout == "one":
            self.model = model
        elif layout in ("ddp", "zero"):
            self.model = data_parallel(model)
            self.share = slice(dist.get_rank(), None, dist.get_world_size())
        elif layout == "fsdp":
            self.model = data_parallel(model, strategy="fsdp")
            self.share = slice(dist.get_rank(), None, dist.get_world_size())
        elif layout == "tp":
            tensor_parallel(model, make_mesh(tp=dist.get_world_size())["tp"])
            self.model = model
        elif layout == "tp x fsdp":
            mesh = make_mesh(dp=2, tp=2)
            tensor_parallel(model, mesh["tp"])
            self.model = data_parallel(model, mesh["dp"], "fsdp")
            self.share = slice(mesh["dp"].get_local_rank(), None, 2)
        elif layout == "pp":
            stages = split_stages(model, dist.get_world_size())
            self.schedule = make_schedule("gpipe", stages, 2, nn.CrossEntropyLoss())
            self.model = [stage.submod for stage in stages]
        parameters = [p for part in ([self.model] if self.schedule is None else self.model) for p in part.parameters()]
        if layout == "zero":
            self.optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.02)
        else:
            self.optimizer = torch.optim.AdamW(parameters, lr=0.02)

    def train(self, first, last):
        for step in range(first, last):
            x, y = batch(step)
            self.optimizer.zero_grad()
            if self.schedule is not None:
                self.schedule.step(x, y)
            else:
                nn.functional.cross_entropy(self.model(x[self.share]), y[self.share]).backward()
            self.optimizer.step()
        return self


def reference(fitted=False):
    model = Run("one", 0, fitted).train(0, 6).model
    return {name: value.detach() for name, value in model.state_dict().items()}


def save_at_three(directory, layout, fitted=False):
    run = Run(layout, 0, fitted).train(0, 3)
    return checkpoint.save(directory, run.model, run.optimizer, step=3, extra={"epoch": 1}).name


def go_on(directory, layout, exported, fitted=False):
    run = Run(layout, 77, fitted)
    restored = checkpoint.load(directory, run.model, run.optimizer)
    assert (restored.step, restored.extra) == (3, {"epoch": 1})
    run.train(3, 6)
    checkpoint.export(run.model, exported)


def check_export(exported, expected):
    # Any architecture of the right names serves: what is read are the sketches that were saved.
    whole = pr.load_compressed(exported, build(5)).state_dict()
    assert whole.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(whole[name].double(), value.double(), rtol=1e-9, atol=1e-11), name


LAYOUTS = {"one": 1, "ddp": 2, "zero": 2, "fsdp": 3, "tp": 2, "pp": 2, "tp x fsdp": 4}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("one", ["one", "tp", "fsdp"]),
        ("ddp", ["one", "zero", "pp"]),
        ("zero", ["ddp", "fsdp"]),
        ("fsdp", ["ddp", "tp", "pp"]),
        ("tp", ["one", "fsdp", "pp"]),
        ("pp", ["ddp", "tp", "fsdp"]),
        ("tp x fsdp", ["one", "tp4", "pp", "fsdp"]),
    ],
)
def test_saved_in_one_layout_and_trained_on_in_others(tmp_path, saved, loaded):
    expected = reference()
    launch(save_at_three, str(tmp_path / "run"), saved, nproc=LAYOUTS[saved], start_method="fork")
    for layout in loaded:
        layout, world = ("tp", 4) if layout == "tp4" else (layout, LAYOUTS[layout])
        launch(go_on, str(tmp_path / "run"), layout, str(tmp_path / layout), nproc=world, start_method="fork")
        check_export(tmp_path / layout, expected)
