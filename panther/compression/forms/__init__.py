"""The forms that a weight can take: :mod:`.base` says what a form is, and each further file registers forms.

``metric`` has the norm in which weights are approximated, and the low-rank components in it.
The order of the imports is the order of the names of all forms.
"""

from panther.compression.forms import low_rank, interpolative, codes, corrected  # isort: skip
from panther.compression.forms.base import (
    DENSE,
    LOW_RANK,
    Choice,
    Fits,
    Form,
    FormSettings,
    Option,
    Options,
    Replacement,
    TargetFit,
    default_forms,
    form_named,
    inherit_flags,
    known_forms,
    least_bytes,
    register,
    total_bytes,
    total_loss,
)

__all__ = [
    "DENSE", "LOW_RANK", "Choice", "Fits", "Form", "FormSettings", "Option", "Options", "Replacement", "TargetFit",
    "codes", "corrected", "default_forms", "form_named", "inherit_flags", "interpolative", "known_forms",
    "least_bytes", "low_rank", "register", "total_bytes", "total_loss",
]  # fmt: skip
