"""LoRA on compressed models by PEFT.

``import panther`` makes PEFT's ``get_peft_model``, ``PeftModel.from_pretrained`` and functions that use them add LoRA
adapters to compressed linear layers in the same way as to nn.Linear. ``layers`` implements LoRA on one layer and its
merging, and ``model`` is called before PEFT changes compressed layers.
"""

from typing import Any

from panther.errors import check_version, require_extra

_peft: Any = require_extra("peft", "peft")
check_version("peft", _peft.__version__, 0)  # before the imports below, which fail with unsupported versions

from .layers import LoraCompressedLinear  # noqa: E402
from .model import CompressedLoraModel  # noqa: E402

__all__ = ["CompressedLoraModel", "LoraCompressedLinear"]
