"""What kinds of weights share that multiply rows: their moments, their metric, and the memory that both take."""

__all__ = ["DOUBLE", "MatrixKind"]

from collections.abc import Sequence
from typing import Any

import torch

from panther.compression.calibration.targets import Target, WeightKind
from panther.compression.forms.metric import metric_of
from panther.compression.forms.rounding import sensitivity
from panther.compression.moments.sums import Moments, Sums
from panther.nn.quantized import stored_bytes

DOUBLE = torch.float64.itemsize
_LARGEST_BLOCK = 2**25  # bytes; larger blocks are not on glibc's heap


class MatrixKind(WeightKind):
    """Weights that multiply rows of their input, and are fitted in one metric of inputs and outputs.

    A kind of such weights has to define ``classes`` and :meth:`quantized_layer`. If the weight does not multiply the
    last dimension of the input, it also defines :meth:`input_rows` and :meth:`gradient_rows`.
    """

    def sums(self, targets: Sequence[Target], gradients: bool, device: torch.device, *, keep: bool) -> Any:
        """Return the sums of products of inputs, and of gradients."""
        return Sums(targets, gradients, device, keep=keep)

    def moments_bytes(self, targets: Sequence[Target], gradients: bool) -> int:
        """Return the bytes of A, which targets share without gradients, and of the G of each."""
        A = targets[0].groups * targets[0].inner ** 2 * (len(targets) if gradients else 1)
        return DOUBLE * (A + gradients * sum(target.groups * target.outer**2 for target in targets))

    def sensitivity(self, target: Target, moments: Moments | None, ridge: float) -> float:
        """Return the loss of codes, up to a factor that depends on their width alone."""
        return sensitivity(metric_of(target, moments, ridge=ridge))

    def work_bytes(self, target: Target, num_widths: int, heap: float) -> int:
        """Return the bytes of three or four matrices of each moment's size, and of six of the weight's size."""
        n, m = target.inner, target.outer
        groups = self.num_joint_groups(target, num_widths)
        squares = 4 if num_widths else 3
        is_on_heap = target.weight.device.type == "cpu" and DOUBLE * groups * max(n, m) ** 2 < _LARGEST_BLOCK
        return int((heap if is_on_heap else 1.0) * DOUBLE * groups * (squares * (n**2 + m**2) + 6 * n * m))

    def num_joint_groups(self, target: Target, num_widths: int) -> int:
        """Return how many groups are fitted at once."""
        return target.groups

    def code_bytes(self, target: Target, width: int | None, rank: int, group_size: int | None) -> int:
        """Return the bytes of codes, scales, zeros and the factors of a correction, as ``QuantizedMatrix`` has them."""
        rows = target.groups * target.outer
        return stored_bytes(target.inner, rows, width, group_size=group_size, low_rank=rank)
