"""Lists of elementwise modules, and of blocks that have only elementwise modules between two layers.

Between the layers of a sharded pair, every rank has a part of the features. Elementwise functions are correct on a
part; other functions, such as a softmax or a sum, would be wrong without an error. Therefore only tested code is
accepted: modules by their class, and blocks of classes whose forward was read and is tested. Other blocks can declare a
``_tp_plan``.
"""

__all__ = ["is_elementwise", "reason_against_pair"]

import torch
import torch.nn.functional as F
from torch import nn

_MODULES = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.Softplus, nn.Softsign,
    nn.Mish, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.ReLU6, nn.LogSigmoid, nn.Dropout, nn.Identity,
)  # fmt: skip
_FUNCTIONS = (F.relu, F.gelu, F.silu, F.mish, F.elu, F.leaky_relu, torch.relu, torch.tanh, torch.sigmoid)
_TORCH_BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
# Classes of transformers whose forward applies only an activation and dropout between the layers of the pair.
_TRANSFORMERS_BLOCKS = (
    "BartDecoderLayer", "BartEncoderLayer", "BertLayer", "CLIPMLP", "ElectraLayer", "FFN", "OPTDecoderLayer",
    "RobertaLayer", "T5DenseActDense", "T5DenseGatedActDense", "ViTMLP", "WhisperDecoderLayer", "WhisperEncoderLayer",
)  # fmt: skip


def is_elementwise(module: nn.Module) -> bool:
    """Return whether a module is known to be an elementwise function without parameters."""
    if type(module).forward is nn.Sequential.forward:
        return all(map(is_elementwise, module.children()))
    is_activation = type(module).__module__ == "transformers.activations" and next(module.parameters(), None) is None
    return is_activation or type(module) in _MODULES


def reason_against_pair(block: nn.Module) -> str | None:
    """Return why two layers of a block cannot be sharded as a pair, or None if there is no reason."""
    kind = type(block)
    if kind.forward is nn.Sequential.forward:
        return None  # the caller has checked the modules between the layers
    tested = kind.__name__ in _TRANSFORMERS_BLOCKS and kind.__module__.startswith("transformers.models.")
    if not (tested or kind in _TORCH_BLOCKS) or "forward" in vars(block):
        return f"{kind.__name__} is not known to be elementwise between its layers: use an nn.Sequential or a _tp_plan"
    for name, module in block.named_modules():
        # On each rank, an activation with parameters, such as nn.PReLU, would get only a part of its gradient.
        checked = "act" in name.rpartition(".")[2] or next(module.parameters(), None) is None
        if checked and next(module.children(), None) is None and not is_elementwise(module):
            return f"its block's {name!r}, a {type(module).__name__}, is not known to be elementwise"
        for key, value in vars(module).items():
            if "act" in key and callable(value) and value not in _FUNCTIONS:
                return f"its block's function {key!r} is not known to be elementwise"
    return None
