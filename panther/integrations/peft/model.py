"""A subclass of PEFT's LoRA model that also finds compressed layers; importing this module registers it in PEFT.

PEFT has a hook for new kinds of layers, ``LoraConfig._register_custom_module``, but it belongs to a config and is not
saved with it: ``PeftModel.from_pretrained``, ``load_adapter`` and transformers' ``add_adapter`` make new configs. All
    of
them look up the class of the tuner in a table of PEFT, and this module replaces the entry of the table.
"""

__all__ = ["CompressedLoraModel"]

from typing import Any

from torch import nn

from panther.errors import ConfigError, require_extra
from panther.integrations.peft.layers import LINEAR_LAYERS, LoraCompressedLinear
from panther.nn.base import CompressedModule
from panther.nn.quantized import QuantizedLinear

_peft: Any = require_extra("peft", "peft")
_utils: Any = require_extra("peft.tuners.tuners_utils", "peft")
_HEADS: Any = _utils.SEQ_CLS_HEAD_NAMES
_LoraModel: Any = _peft.LoraModel


class CompressedLoraModel(_LoraModel):
    """PEFT's LoraModel with :class:`LoraCompressedLinear` for compressed layers.

    ``target_modules="all-linear"`` also includes compressed linear layers, except for the head, as for nn.Linear.
    """

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Add an adapter to the model's layers."""
        config = self.peft_config[adapter_name]
        if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
            linear_names = _compressed_linears(model, config)
            _utils._maybe_include_all_linear_layers(config, model)
            config.target_modules = {*config.target_modules, *linear_names}
        super().inject_adapter(model, adapter_name, *args, **kwargs)

    @staticmethod
    def _create_new_module(lora_config: Any, adapter_name: str, target: nn.Module, **kwargs: Any) -> nn.Module:
        lora_config._register_custom_module({CompressedModule: LoraCompressedLinear})
        return _LoraModel._create_new_module(lora_config, adapter_name, target, **kwargs)

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        """Replace a layer; PEFT's method would compute the dense weight many times per layer, to read its device."""
        if isinstance(new_module, LoraCompressedLinear) or isinstance(child, LoraCompressedLinear):
            setattr(parent, child_name, new_module)
        else:
            super()._replace_module(parent, child_name, new_module, child)

    def _check_merge_allowed(self) -> None:
        """Refuse before the first layer is merged, so that a refusal changes nothing."""
        super()._check_merge_allowed()
        quantized = [
            name
            for name, module in self.model.named_modules()
            if isinstance(module, LoraCompressedLinear) and isinstance(module.base_layer, QuantizedLinear)
        ]
        if quantized:
            raise ConfigError(
                f"{len(quantized)} of the layers with adapters are quantized (first {quantized[0]!r}), and codes "
                "cannot hold an adapter without rounding it: keep the adapters beside them, or load the adapter onto a "
                "model with dense layers (dequantize() of a transformers model) and merge it there"
            )


def _compressed_linears(model: Any, config: Any) -> set[str]:
    """Return the names of compressed linear layers, except for heads and layers that have adapters already."""
    heads = {getattr(model, name, None) for name in _HEADS} if config.task_type == "SEQ_CLS" else set()
    if hasattr(model, "get_output_embeddings"):
        heads.add(model.get_output_embeddings())
    # PEFT itself finds layers that have adapters, by their wrappers.
    wrapped = {module.get_base_layer() for module in model.modules() if isinstance(module, _utils.BaseTunerLayer)}
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, LINEAR_LAYERS) and module not in heads | wrapped
    }


def _refusing_compressed(tuner: Any, method: str) -> type[Any]:
    """Return a subclass of a tuner that names compressed layers among its targets; PEFT finds "no layers" there."""

    class RefusingModel(tuner):
        def _pre_injection_hook(self, model: nn.Module, config: Any, adapter_name: str) -> None:
            if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
                names = sorted(_compressed_linears(model, config))
            else:
                compressed = (name for name, each in model.named_modules() if isinstance(each, CompressedModule))
                names = [name for name in compressed if self._check_target_module_exists(config, name)]
            if names:
                raise ConfigError(
                    f"{method} adapts dense layers, and {len(names)} of the layers that target_modules names are "
                    f"compressed (first {names[0]!r}): use LoraConfig, or name dense layers in target_modules"
                )
            super()._pre_injection_hook(model, config, adapter_name)

    RefusingModel.__name__ = RefusingModel.__qualname__ = tuner.__name__
    return RefusingModel


_TUNERS: Any = _peft.PEFT_TYPE_TO_TUNER_MAPPING
_TUNERS[_peft.PeftType.LORA] = CompressedLoraModel
for _name, _method in {"VERA": "VeRA", "PVERA": "PVeRA", "RANDLORA": "RandLora", "FROD": "FRoD"}.items():
    if (_kind := getattr(_peft.PeftType, _name, None)) in _TUNERS:  # a version of PEFT need not have all of them
        _TUNERS[_kind] = _refusing_compressed(_TUNERS[_kind], _method)
