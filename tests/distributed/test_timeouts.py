"""Every wait of the library has the timeout that init was given, whichever group it waits in."""

import ast
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.utils.data import TensorDataset

from panther.distributed import checkpoint, launch, make_mesh
from panther.distributed.checkpoint import _save
from panther.distributed.comm.ranks import apply_timeout, flatten_mesh, new_subgroup, split_axis
from panther.train import TrainConfig, Trainer

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]
MAKERS = {
    "_flatten", "_unflatten", "flat_mesh", "from_group", "init_device_mesh", "new_group",
    "new_subgroups", "new_subgroups_by_enumeration", "split_group", "with_inner_axis",
}  # fmt: skip
"""Functions of torch that make process groups."""
ALLOWED = {
    "panther/_torch/groups.py",
    "panther/distributed/comm/ranks.py",
    "panther/distributed/advisor/fake_run.py",  # on a fake group, which waits for nobody
}


def calls_of(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
            of_class = isinstance(function, ast.Attribute) and getattr(function.value, "id", None) == "dist"
            if name in MAKERS and (name != "new_group" or of_class or isinstance(function, ast.Name)):
                yield name, node.lineno


def test_groups_are_made_in_one_module():
    offenders = []
    for path in sorted((ROOT / "panther").rglob("*.py")):
        name, source = str(path.relative_to(ROOT)), path.read_text()
        imported = re.search(r"comm\.ranks import .*\bnew_group\b", source)
        for maker, line in calls_of(source) if any(f"{maker}(" in source for maker in MAKERS) else ():
            if name not in ALLOWED and not (maker == "new_group" and imported):
                offenders.append(f"{name}:{line}: {maker}")
    assert not offenders, "make groups by panther.distributed.comm.ranks, which sets their timeout"
    assert list(calls_of("m = init_device_mesh('cpu', (2,)); dist.new_group([0])")) == [
        ("init_device_mesh", 1), ("new_group", 1),
    ]  # fmt: skip


def timeout_of(group):
    return group._get_backend(torch.device("cpu")).options._timeout


def test_all_groups_have_the_timeout_of_init(tmp_path):
    def work():
        apply_timeout(77.0)
        mesh = make_mesh(replicate=2, dp=1, tp=1)
        line = make_mesh(dp=2)
        groups = [mesh.get_group(axis) for axis in range(3)]
        groups.append(flatten_mesh(mesh["replicate", "dp"], "data").get_group())
        inner = split_axis(line, ("replicate", "shard"))
        groups += [inner.get_group(axis) for axis in range(2)]
        checkpoint.async_save(tmp_path, nn.Linear(2, 2), step=1).result()
        groups += list(_save._sides.values())
        groups.append(new_subgroup(2))
        assert dist.distributed_c10d.default_pg_timeout == default_pg_timeout
        return [timeout_of(group) for group in groups]

    assert on_ranks(work, 2) == [[timedelta(seconds=77)] * 8] * 2


def train(timeout_s):
    data = TensorDataset(torch.randn(8, 4), torch.randn(8, 2))
    config = TrainConfig(max_steps=1, batch_size=4, strategy="ddp", timeout_s=timeout_s)
    Trainer(nn.Linear(4, 2), None, nn.MSELoss(), config).fit(data)
    return timeout_of(dist.group.WORLD).total_seconds()


def test_the_timeout_of_a_trainer_holds_in_a_group_that_exists():
    assert on_ranks(train, 2, 77.0) == [77.0, 77.0]


def test_the_timeout_of_launch_is_that_of_a_trainer_without_one():
    assert launch(train, None, nproc=2, start_method="fork", timeout_s=77.0) == [77.0, 77.0]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"timeout_s": 0}, ValueError, "timeout_s=0 must be a positive number of seconds"),
        ({"timeout_s": "long"}, TypeError, "timeout_s must be a number of seconds, not str"),
        ({"grace_period_s": -1.0}, ValueError, "grace_period_s=-1 must be a positive number of seconds"),
    ],
)
def test_limits_that_are_not_seconds_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        launch(max, 1, 2, nproc=1, start_method="fork", **settings)
