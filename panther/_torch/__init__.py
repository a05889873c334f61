"""Private names of torch, each with its reason and its public fallback.

A private name may change in any release of torch. Then only this package has to change, because no other module of
Panther uses a private name of torch: ``tests/test_private_torch.py`` refuses it. The kernels do not import Panther, and
have their private names in ``kernels/_torch.py``.

Names are imported when a function first needs them if their import is slow, or if they need a torch that was built with
``torch.distributed``.
"""

from . import execution, groups, modules, parallelism, processes
from .execution import *  # noqa: F403
from .groups import *  # noqa: F403
from .modules import *  # noqa: F403
from .parallelism import *  # noqa: F403
from .processes import *  # noqa: F403

__all__: list[str] = []
for _module in (execution, groups, modules, parallelism, processes):
    __all__ += _module.__all__
