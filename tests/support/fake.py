"""A process group without processes, for what needs a mesh and sends nothing: plans, reports, refusals.

Collective operations on it return at once and leave their outputs as they are, so no values may be tested.
"""

from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_group(world_size, rank=0):
    """Be ``rank`` of ``world_size`` ranks of which the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # its results hold meshes of this group
