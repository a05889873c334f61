"""LoRA on compressed models by PEFT: adapters on compressed layers, and starts from the weight's SVD.

``import panther`` makes PEFT's ``get_peft_model``, ``PeftModel.from_pretrained`` and functions that use them add LoRA
adapters to compressed linear layers in the same way as to nn.Linear. ``layers`` implements LoRA on one layer and its
merging, ``model`` is called before PEFT changes compressed layers, and ``initialization`` starts adapters from the
``decomposition`` of the weights.
"""

from typing import Any

from panther.errors import check_version, require_extra

_peft: Any = require_extra("peft", "peft")
check_version("peft", _peft.__version__, 0)  # before the imports below, which fail with unsupported versions

from .initialization import InitializedLayer, InitReport, init_corda_, init_pissa_  # noqa: E402
from .layers import LoraCompressedLinear  # noqa: E402
from .model import CompressedLoraModel  # noqa: E402

__all__ = [
    "CompressedLoraModel",
    "InitReport",
    "InitializedLayer",
    "LoraCompressedLinear",
    "init_corda_",
    "init_pissa_",
]
