r"""AdamW with orthogonalised updates of selected matrices, or with sketches as moments, of sharded parameters too.

A factor of a sketched layer is a tall or a wide matrix. The orthogonalised update of a matrix M (m, n) with momentum
:math:`M = P \Sigma Q^T` is :math:`P Q^T`: all its singular values are 1, so that every direction the factor can learn
is learned at the same pace, and the change of the layer's weight :math:`s\,(\Delta S_1 U_1 + U_2 \Delta S_2)` has a
known size, as U1 and U2 are fixed. It is the update of Muon (K. Jordan et al., 2024), applied to the factors of a
factorised weight as in Spectron (2026, arXiv:2602.12429), which for plain low rank also limits the product.

Matrices of dense layers get the same updates, and stay sharded under FSDP2, hybrid sharding and tensor parallelism; see
:doc:`/howto/muon`.

:class:`SketchedAdamW` has moments of a few random projections of each gradient, in place of two numbers for each
weight; see :doc:`/howto/sketched-adamw`.
"""

__all__ = ["MuonAdamW", "SketchedAdamW", "orthogonalize", "param_groups", "sketched_param_groups"]

from panther.optim.muon_adamw import MuonAdamW
from panther.optim.newton_schulz import orthogonalize
from panther.optim.parameter_groups import param_groups, sketched_param_groups
from panther.optim.sketched_adamw import SketchedAdamW
