"""The forms that a weight can take: :mod:`.base` says what a form is, and each further file registers forms.

``metric`` has the norm in which weights are approximated and the low-rank components in it, ``rounding`` the codes, and
``replacement`` what all forms need to make new layers. The order of the imports is the order of the names of all forms.
"""

from panther.compression.forms import dense, low_rank, interpolative, codes, corrected  # isort: skip
from panther.compression.forms.base import (
    DENSE,
    LOW_RANK,
    Choice,
    Fits,
    Form,
    FormSettings,
    Option,
    Options,
    TargetFit,
    default_forms,
    form_named,
    known_forms,
    least_bytes,
    register,
    total_bytes,
    total_loss,
)
from panther.compression.forms.replacement import Replacement, inherit_flags

__all__ = [
    "DENSE", "LOW_RANK", "Choice", "Fits", "Form", "FormSettings", "Option", "Options", "Replacement", "TargetFit",
    "codes", "corrected", "default_forms", "dense", "form_named", "inherit_flags", "interpolative", "known_forms",
    "least_bytes", "low_rank", "register", "total_bytes", "total_loss",
]  # fmt: skip
