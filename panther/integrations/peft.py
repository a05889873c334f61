r"""LoRA on compressed models by PEFT.

``import panther`` makes PEFT's ``get_peft_model``, ``PeftModel.from_pretrained`` and functions that use them add LoRA
adapters to compressed linear layers in the same way as to nn.Linear: it wraps methods of PEFT that all entry points use
(``integrations/import_hook.py``), and they call the functions of this module first. PEFT's own hook for new kinds of
layers, ``LoraConfig._register_custom_module``, belongs to a config and is not saved with it:
``PeftModel.from_pretrained``, ``load_adapter`` and transformers' ``add_adapter`` make new configs.

An adapter adds :math:`s\, x A^T B^T` to the output. Merging appends r columns to the two factors of the weight, which
is exact and increases the layer's rank by r. Codes of few bits cannot hold an adapter.
"""

__all__ = ["CompressedLoraModel", "LoraCompressedLinear"]

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from panther._model_libraries import layers_replaced
from panther.errors import ConfigError, check_version, require_extra
from panther.nn.linears import to_linears_
from panther.nn.pairs import LinearPair
from panther.nn.protocol import CompressedModule, compressed_layers

_peft: Any = require_extra("peft", "peft")
check_version("peft", _peft.__version__, 0)  # before the lines below, which fail with unsupported versions
_Linear: Any = require_extra("peft.tuners.lora", "peft").Linear
_utils: Any = require_extra("peft.tuners.tuners_utils", "peft")
_HEADS: Any = _utils.SEQ_CLS_HEAD_NAMES
_LoraModel: Any = _peft.LoraModel

# Values of init_lora_weights that do not change the layer. PEFT's other values write to `weight.data`, which is a copy
# for a compressed layer.
_STARTS = (True, False, "gaussian", "orthogonal")


def is_compressed_linear(layer: nn.Module) -> bool:
    """Return whether a layer is a compressed layer in the place of an nn.Linear."""
    return isinstance(layer, CompressedModule) and layer.dense_class is nn.Linear


def is_quantized(layer: nn.Module) -> bool:
    """Return whether a layer holds its weight in codes or integers, which cannot hold an adapter."""
    return isinstance(layer, CompressedModule) and layer.record_mode == "quantized"


class LoraCompressedLinear(_Linear):
    """LoRA adapters on a compressed linear layer.

    PEFT makes this layer for every compressed layer that ``target_modules`` names, and users need not make it. It is
    PEFT's LoRA layer for nn.Linear (more than one adapter, batches that mix adapters, dropout, dtypes), except for
    methods that read or write the dense weight, which a compressed layer does not have.

    Merging replaces the base layer by a layer whose rank is larger by r, or by an nn.Linear if this is not larger;
    unmerging restores the base layer itself, equal in every bit.

    Args:
        base_layer: The compressed layer.
        adapter_name: Name of the first adapter.
        config: PEFT's LoraConfig.
        r: Rank of the adapter.
        lora_alpha: The adapter is multiplied by ``lora_alpha / r``.
        **kwargs: Further arguments of PEFT.

    Raises:
        ConfigError: If the layer is a convolution; if ``init_lora_weights`` would change the weight; or for DoRA and
            other variants of LoRA.
    """

    def __init__(
        self, base_layer: nn.Module, adapter_name: str, config: Any, r: int = 0, lora_alpha: float = 1, **kwargs: Any
    ) -> None:
        if not is_compressed_linear(base_layer):
            raise ConfigError(
                f"LoRA is for linear layers, and {kwargs.get('target_name') or 'the target'!r} is a "
                f"{type(base_layer).__name__}: leave it out of target_modules, or call pr.to_linears_(model) first and "
                "target the plain layers that stand there then"
            )
        super().__init__(base_layer, adapter_name, config, r=r, lora_alpha=lora_alpha, **kwargs)
        # Compressed layers have nn.Linear's orientation, even if they replace transformers' Conv1D.
        self.fan_in_fan_out = False
        self._unmerged: list[nn.Module] = []  # the layer under merged adapters; in a list, it is not a submodule

    def update_layer(self, adapter_name: str, r: int, lora_alpha: float, config: Any, **kwargs: Any) -> None:
        """Add an adapter."""
        start = config.init_lora_weights
        if start not in _STARTS:
            raise ConfigError(
                f"init_lora_weights={start!r} is for dense weights, which a {type(self.get_base_layer()).__name__} has "
                "not: leave it at True, or put dense layers back first (pr.to_linears_)"
            )
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def resolve_lora_variant(self, *, config: Any, **kwargs: Any) -> None:
        """Refuse DoRA and other variants."""
        try:
            super().resolve_lora_variant(config=config, **kwargs)
        except ValueError as error:
            raise ConfigError(
                f"compressed layers take plain LoRA only ({error}): leave the variant out of LoraConfig, or put dense "
                "layers back first (to_linear() of a layer, dequantize() of a transformers model)"
            ) from error

    @property
    def lora_variants(self) -> dict[tuple[str, ...], None]:
        """The variants of LoRA that are possible here: none."""
        return {(): None}

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.in_features, module.out_features  # type: ignore[return-value]  # PEFT's method would warn

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[torch.device, torch.dtype]:
        return _device_and_dtype(base_layer)  # PEFT's method would compute the dense weight

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge adapters into a layer of a larger rank, which replaces the base layer.

        Args:
            safe_merge: Whether to raise ValueError if the result is not finite.
            adapter_names: Names of the adapters; None merges the active ones.

        Raises:
            ConfigError: If the layer is quantized, or has no bias where the adapter has one.
        """
        names = [name for name in _utils.check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not names:
            return
        base = self.get_base_layer()
        with torch.no_grad():
            left = torch.cat([_wide(self.lora_B[name].weight) * self.scaling[name] for name in names], 1)
            right = torch.cat([_wide(self.lora_A[name].weight) for name in names])
            biases = [_wide(self.lora_B[name].bias) * self.scaling[name] for name in names if self.lora_bias[name]]
            merged = merged_layer(base, left, right, sum(biases[1:], biases[0]) if biases else None)
        if safe_merge and not all(bool(tensor.isfinite().all()) for tensor in merged.parameters()):
            raise ValueError(
                f"the merged weight is not finite: adapter {', '.join(map(repr, names))} has broken values"
            )
        if not self._unmerged:
            self._unmerged.append(base)
        self.base_layer = merged
        self.merged_adapters += names

    def unmerge(self) -> None:
        """Restore the layer from before the adapters were merged."""
        if not self.merged:
            warnings.warn("no adapter is merged, so nothing was unmerged", stacklevel=2)
            return
        device, dtype = _device_and_dtype(self.base_layer)
        self.base_layer = self._unmerged.pop().to(device=device, dtype=dtype).train(self.base_layer.training)
        self.merged_adapters.clear()


@torch.no_grad()
def merged_layer(
    layer: Any,  # a compressed linear layer, an nn.Linear or a LinearPair
    left: Tensor,  # (out, r)
    right: Tensor,  # (r, in)
    bias: Tensor | None = None,  # (out,)
) -> nn.Module:
    """Return a new layer with ``left @ right`` added to the weight, and ``bias`` to the bias, exact up to rounding.

    A layer of factors and a pair of nn.Linear get a larger rank; an SKLinear becomes a LowRankLinear. If an nn.Linear
    is not larger than the result, an nn.Linear is returned.
    """
    if is_quantized(layer):
        raise ConfigError(
            f"a {type(layer).__name__} cannot hold an adapter without rounding it: keep the adapter beside it, or load "
            "the adapter onto a model with dense layers (dequantize() of a transformers model, to_linear() of a layer) "
            "and merge it there"
        )
    if bias is not None and layer.bias is None:
        raise ConfigError("the adapter has a bias and the layer has none to add it to: train with lora_bias=False")
    inner, outer = layer.in_features, layer.out_features
    _, dtype = _device_and_dtype(layer)
    new: Any = layer.plus_product(left, right) if isinstance(layer, CompressedModule) else None
    if isinstance(layer, LinearPair):
        first, second = (each.get_parameter("weight") for each in layer)
        if (len(first) + len(right)) * (inner + outer) < inner * outer:
            outer_factor, inner_factor = torch.cat((_wide(second), left), 1), torch.cat((_wide(first), right))
            new = LinearPair.of_factors(outer_factor.to(dtype), inner_factor.to(dtype), layer.bias, trained=True)
    if new is None:
        new = nn.Linear(inner, outer, bias=layer.bias is not None, device="meta", dtype=dtype)
        new.weight = nn.Parameter((_wide(layer.weight) + left @ right).to(dtype))
    if layer.bias is not None:
        old: Any = layer.bias
        holder = new[1] if isinstance(new, LinearPair) else new
        holder.bias = nn.Parameter(old.clone() if bias is None else (old + bias).to(old.dtype))
    # The merged layer is frozen if the base layer is, as PEFT keeps the weights of a dense model frozen.
    trained = next(iter(layer.parameters())).requires_grad
    return new.requires_grad_(trained).train(layer.training)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _device_and_dtype(layer: Any) -> tuple[torch.device, torch.dtype]:
    """Return the device and the dtype of a layer's input, without computing its weight."""
    if isinstance(layer, CompressedModule):
        return next(iter(layer.stored().values())).device, layer.dtype
    like = next(iter(layer.parameters()))
    return like.device, like.dtype


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
