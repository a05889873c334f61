"""What happens to compressed layers before PEFT changes a model: adapters, trained copies, and refusals.

``import panther`` wraps methods of PEFT that all entry points use (``integrations/import_hook.py``), and they call the
functions of this module first. PEFT's own hook for new kinds of layers, ``LoraConfig._register_custom_module``, belongs
to a config and is not saved with it: ``PeftModel.from_pretrained``, ``load_adapter`` and transformers' ``add_adapter``
make new configs.
"""

__all__ = ["CompressedLoraModel"]

import copy
from typing import Any

from torch import nn

from panther._model_libraries import layers_replaced
from panther.errors import ConfigError, require_extra
from panther.integrations.peft.layers import LoraCompressedLinear, is_compressed_linear, is_quantized
from panther.nn.linears import to_linears_
from panther.nn.protocol import CompressedModule, compressed_layers

_utils: Any = require_extra("peft.tuners.tuners_utils", "peft")
_HEADS: Any = _utils.SEQ_CLS_HEAD_NAMES
_LoraModel: Any = require_extra("peft", "peft").LoraModel


class CompressedLoraModel(_LoraModel):
    """PEFT's LoraModel with :class:`LoraCompressedLinear` for compressed layers.

    ``target_modules="all-linear"`` also includes compressed linear layers, except for the head, as for nn.Linear.
    """

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Add an adapter to the model's layers."""
        config = self.peft_config[adapter_name]
        if _is_all_linear(config):
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
            if isinstance(module, LoraCompressedLinear) and is_quantized(module.base_layer)
        ]
        if quantized:
            raise ConfigError(
                f"{len(quantized)} of the layers with adapters are quantized (first {quantized[0]!r}), and codes "
                "cannot hold an adapter without rounding it: keep the adapters beside them, or load the adapter onto a "
                "model with dense layers (dequantize() of a transformers model) and merge it there"
            )

    def _unload_and_optionally_merge(self, *args: Any, **kwargs: Any) -> Any:
        model = super()._unload_and_optionally_merge(*args, **kwargs)
        layers_replaced(model)  # dense copies may be in the place of compressed layers
        return model


def before_tuner(tuner: Any, model: nn.Module, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
    """Choose the class of a new tuner, and refuse other methods than LoRA on compressed layers.

    Some methods collect the sizes of layers before they inject an adapter, and find none.
    """
    if type(tuner) is _LoraModel:
        tuner.__class__ = CompressedLoraModel
    nn.Module.__init__(tuner)
    tuner.model = model  # methods that prepare a config read it
    _check_targets(tuner, model, peft_config[adapter_name] if isinstance(peft_config, dict) else peft_config)


def before_injection(tuner: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
    """Refuse other methods than LoRA on compressed layers, also for further adapters."""
    _check_targets(tuner, model, tuner.peft_config[adapter_name])


def before_parameters(tuner: Any, peft_config: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Refuse parameters of compressed layers, which PEFT would not find."""
    for name, layer in compressed_layers(model):
        names = (name, f"{name}.weight", *(f"{name}.{stored}" for stored in layer.stored_names()))
        for target in peft_config.target_parameters:
            if any(f".{each}".endswith(f".{target}") for each in names):
                raise ConfigError(
                    f"target_parameters={target!r} names a weight of {name!r}, which is a {type(layer).__name__} and "
                    "has no such parameter: leave it out, name linear layers in target_modules, or keep the layer "
                    "dense (exclude= of pr.compress)"
                )


def before_token_training(trained: Any, base_layer: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Refuse to train single rows of a compressed layer."""
    if isinstance(base_layer, CompressedModule):
        raise ConfigError(
            f"single tokens are trained as rows of a dense weight, and this layer is a {type(base_layer).__name__}: "
            "name it in modules_to_save, which trains a dense copy of it, or keep it dense (exclude= of pr.compress)"
        )


def before_copy(wrapper: Any, adapter_name: str, tied_module: nn.Module | None = None, **kwargs: Any) -> None:
    """Put a copy into PEFT's wrapper of a module to save, with dense layers in the place of codes.

    Low-rank, interpolative and sketched layers train their factors.
    """
    if tied_module is not None or adapter_name in wrapper.modules_to_save:
        return
    original = wrapper.original_module
    if isinstance(original, CompressedModule) and original.replaces_parameter:
        raise ConfigError(
            "modules_to_save names a weight of compressed experts: name the module that holds the experts, whose copy "
            "gets dense weights"
        )
    container = nn.Sequential(copy.deepcopy(original))
    report = to_linears_(container, lambda layer, _: is_quantized(layer))
    if report.skipped:
        raise ConfigError(f"modules_to_save names a layer that cannot become dense: {report.skipped[0][1]}")
    new = container[0].train(original.training)
    if hasattr(original, "_hf_hook"):  # PEFT gives the copy a new hook of this kind
        new._hf_hook = original._hf_hook
    wrapper.modules_to_save[adapter_name] = new


def _check_targets(tuner: Any, model: nn.Module, config: Any) -> None:
    """Refuse a method that adapts dense layers only and is told to adapt compressed ones."""
    if isinstance(tuner, CompressedLoraModel) or not hasattr(config, "target_modules"):
        return
    config = tuner._prepare_adapter_config(copy.copy(config), tuner.get_model_config(model))
    if _is_all_linear(config):
        names = sorted(_compressed_linears(model, config))
    else:
        names = [name for name, _ in compressed_layers(model) if tuner._check_target_module_exists(config, name)]
    if names:
        raise ConfigError(
            f"{type(tuner).__name__} adapts dense layers, and {len(names)} of the layers that target_modules names are "
            f"compressed (first {names[0]!r}): use PeftModel with LoraConfig, or name dense layers in target_modules"
        )


def _is_all_linear(config: Any) -> bool:
    return isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear"


def _compressed_linears(model: Any, config: Any) -> set[str]:
    """Return the names of compressed linear layers, except for heads and layers that have adapters already."""
    heads = {getattr(model, name, None) for name in _HEADS} if config.task_type == "SEQ_CLS" else set()
    if hasattr(model, "get_output_embeddings"):
        heads.add(model.get_output_embeddings())
    # PEFT itself finds layers that have adapters, by their wrappers.
    wrapped = {module.get_base_layer() for module in model.modules() if isinstance(module, _utils.BaseTunerLayer)}
    return {
        name for name, module in model.named_modules() if is_compressed_linear(module) and module not in heads | wrapped
    }
