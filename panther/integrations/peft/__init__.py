"""LoRA on compressed models by PEFT: adapters on compressed layers, starts from the weight's SVD, and resizing.

After one ``import panther.integrations.peft``, PEFT's own ``get_peft_model``, ``PeftModel.from_pretrained`` and all
that builds on them put LoRA adapters on compressed linear layers as they do on nn.Linear. ``layers`` is LoRA on one
layer and its merging, ``model`` makes PEFT find such layers, ``initialization`` starts adapters by what
``decomposition`` splits off the weights, and ``resize`` reads and writes saved ones.
"""

from typing import Any

from panther.errors import check_version, require_extra

_peft: Any = require_extra("peft", "peft")
check_version("peft", _peft.__version__, 0)  # before the modules that use what another version may lack

from .initialization import InitializedLayer, InitReport, init_corda_, init_pissa_  # noqa: E402
from .layers import LoraCompressedLinear  # noqa: E402
from .model import CompressedLoraModel  # noqa: E402
from .resize import ResizedLayer, ResizeReport, resize_lora  # noqa: E402

__all__ = [
    "CompressedLoraModel",
    "InitReport",
    "InitializedLayer",
    "LoraCompressedLinear",
    "ResizeReport",
    "ResizedLayer",
    "init_corda_",
    "init_pissa_",
    "resize_lora",
]
