"""Which modules act on every entry of a tensor alone, and which blocks have only such modules between two layers.

Between the layers of a sharded pair every rank has a part of the features. Elementwise functions are right on such a
part; any other, a softmax or a sum, would be wrong without an error. So only known code is accepted: modules by their
class, and blocks of classes whose forward was read and is tested. Other blocks can declare a ``_tp_plan``.
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
# Of transformers; their forward applies only their activation and dropout between the layers of the pair.
_TRANSFORMERS_BLOCKS = (
    "BartDecoderLayer", "BartEncoderLayer", "BertLayer", "CLIPMLP", "ElectraLayer", "FFN", "OPTDecoderLayer",
    "RobertaLayer", "T5DenseActDense", "T5DenseGatedActDense", "ViTMLP", "WhisperDecoderLayer", "WhisperEncoderLayer",
)  # fmt: skip


def is_elementwise(module: nn.Module) -> bool:
    """Return whether a module is known to act on every entry of its input alone, without parameters."""
    if type(module).forward is nn.Sequential.forward:
        return all(map(is_elementwise, module.children()))
    own = type(module).__module__ == "transformers.activations" and next(module.parameters(), None) is None
    return own or type(module) in _MODULES


def reason_against_pair(block: nn.Module) -> str | None:
    """Return why two layers of a block cannot be sharded as a pair, None if only elementwise functions are between."""
    kind = type(block)
    if kind.forward is nn.Sequential.forward:
        return None  # the caller has looked at the modules between
    tested = kind.__name__ in _TRANSFORMERS_BLOCKS and kind.__module__.startswith("transformers.models.")
    if not (tested or kind in _TORCH_BLOCKS) or "forward" in vars(block):
        return f"{kind.__name__} is not known to be elementwise between its layers: use an nn.Sequential or a _tp_plan"
    for name, module in block.named_modules():
        # An activation with parameters, such as nn.PReLU, would get only a part of its gradient on each rank.
        checked = "act" in name.rpartition(".")[2] or next(module.parameters(), None) is None
        if checked and next(module.children(), None) is None and not is_elementwise(module):
            return f"its block's {name!r}, a {type(module).__name__}, is not known to be elementwise"
        for key, value in vars(module).items():
            if "act" in key and callable(value) and value not in _FUNCTIONS:
                return f"its block's function {key!r} is not known to be elementwise"
    return None
