"""The quantizer "panther" of transformers, which builds compressed layers on loading and returns tensors on saving."""

__all__ = [
    "CompressCallback", "PantherConfig", "PantherQuantizer", "is_ours", "put_compressed_", "resize_token_embeddings_",
    "set_quantization_config_",
]  # fmt: skip

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import panther as pr
from panther._model_libraries import layers_replaced
from panther._torch import buffers_of
from panther.distributed import TensorParallelReport, tensor_parallel
from panther.errors import ConfigError, FormatError, check_version, require_extra
from panther.integrations._training import checked_options, compare_and_log, compress_and_log
from panther.integrations.transformers.saved_weights import (
    SavedWeights,
    leave_out_zeros_,
    read_saved_weights,
    set_zeros_,
    share_tied_,
)
from panther.nn.attention.record import check_attention, convert_as_saved_, is_attention_record
from panther.nn.protocol import CompressedModule, compressed_layers
from panther.nn.quantized.conversions import conversions_to_keep, keep_expert_names_
from panther.nn.quantized.stacked import put_layer, stacked_layers
from panther.nn.quantized.state import inference_state
from panther.nn.quantized.ties import declare_ties_
from panther.nn.sketch_record import without_marks
from panther.nn.specs import CONFIG_VERSION, QUANTIZATION_METHOD, build_modules, module_specs

transformers: Any = require_extra("transformers", "transformers")
_quantizers: Any = require_extra("transformers.quantizers", "transformers")
_auto: Any = require_extra("transformers.quantizers.auto", "transformers")
_configs: Any = require_extra("transformers.utils.quantization_config", "transformers")

check_version("transformers", transformers.__version__, 5)


class PantherConfig(_configs.QuantizationConfigMixin):
    """The entry ``quantization_config`` of a compressed model's config.

    ``AutoModel.from_pretrained(folder, quantization_config=PantherConfig(budget=0.5, calibration=batches))`` loads a
    dense model and compresses it. For a folder that is compressed already, the entry is read from its config.json, and
    users need not make one.

    Args:
        modules: Class, arguments and dtype of every compressed layer, by name; written by ``save_pretrained``.
        version: Version of this entry.
        quant_method: Name of the method, always ``"panther"``.
        panther_version: Version of the Panther that wrote the entry.
        parts: Records of parts of the model that were compressed separately, by the names of the layers in the part.
        options: Arguments of :func:`panther.compress` by name, except for the model. They are not saved.

    Raises:
        ConfigError: If neither ``modules`` nor a size is given, or an option is unknown.
        FormatError: If the entry was written by a newer Panther, or is damaged.
        CompressionError, TypeError, ValueError: If :func:`panther.compress` does not take an option.

    Example:
        >>> from panther.integrations.transformers import PantherConfig
        >>> PantherConfig(bits=4.25, calibration=[]).options["bits"]
        4.25
    """

    def __init__(
        self,
        *,
        modules: Mapping[str, Any] | None = None,
        version: int = 1,
        quant_method: str = QUANTIZATION_METHOD,
        panther_version: str = pr.__version__,
        parts: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> None:
        if quant_method != QUANTIZATION_METHOD:
            raise ConfigError(f"quant_method is {quant_method!r}, and this class is for {QUANTIZATION_METHOD!r} only")
        if version not in range(1, CONFIG_VERSION + 1):
            raise FormatError(
                f"the model's quantization_config has version {version!r} and this Panther reads 1 to "
                f"{CONFIG_VERSION}: use the Panther that wrote it ({panther_version}), or a newer one"
            )
        entries = parts if isinstance(parts, Sequence) else [None]
        parts_records = [part.get("modules") if isinstance(part, Mapping) else None for part in entries]
        if modules is not None and not all(
            isinstance(each, Mapping) and all(isinstance(spec, Mapping) for spec in each.values())
            for each in [modules, *(records or None for records in parts_records)]
        ):
            raise FormatError(
                "the model's quantization_config is damaged, 'modules' must name each layer with its class and "
                "arguments: save the model again"
            )
        self.quant_method = QUANTIZATION_METHOD
        self.version = version
        self.panther_version = panther_version
        self.modules = None if modules is None else dict(modules)
        self.parts = list(parts)
        self.options = checked_options(options, "PantherConfig") if modules is None else options

    def to_dict(self) -> dict[str, Any]:
        """Return what config.json holds: without options, which may be tensors or functions."""
        names = ("quant_method", "version", "panther_version", "modules")
        return {name: getattr(self, name) for name in names} | ({"parts": self.parts} if self.parts else {})


class PantherQuantizer(_quantizers.HfQuantizer):
    """The quantizer that transformers calls when it loads and saves a compressed model."""

    quantization_config: PantherConfig

    report: pr.CompressionReport | None = None
    """The report of the compression, if the model was compressed on loading."""

    saved: SavedWeights | None = None
    """Names and shapes of the tensors in the weights files, while a model is loaded."""

    tied: Sequence[tuple[str, str]] = ()
    """Pairs of names of layers that share their tensors: the first one is loaded."""

    state: Mapping[str, Tensor] | None = None
    """The tensors that ``save_pretrained`` was given, while a model is saved."""

    placements: TensorParallelReport | None = None
    """Placements of the layers, with ``tp_plan="auto"``."""

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse a dense folder without a size."""
        if not self.pre_quantized and not self.options:
            raise ConfigError(
                "the folder is not compressed: give PantherConfig a size and batches, as PantherConfig(bits=4.25, "
                "calibration=batches)"
            )

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of :func:`panther.compress`."""
        return self.quantization_config.options

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        """Replace the layers that config.json lists as compressed by layers without values, on the meta device."""
        parallel_config = getattr(model.config, "distributed_config", None)
        if parallel_config is not None:
            sizes = parallel_config if isinstance(parallel_config, dict) else vars(parallel_config)
            unsupported = {
                name: sizes.get(name) for name in ("pp_size", "dp_size", "ep_size") if (sizes.get(name) or 1) > 1
            }
            if unsupported or not self.pre_quantized or isinstance(sizes.get("tp_plan"), dict):
                raise ConfigError(
                    "compressed layers know tp_plan='auto' only, of transformers' plans (distributed_config, tp_plan), "
                    "and only on a folder that is compressed already, not "
                    f"{unsupported or 'a plan of your own or a dense folder'}: load the folder without a plan on every "
                    "rank, and call panther.distributed.tensor_parallel(model) or data_parallel(model)"
                )
            # The rules of transformers shard a parameter called "weight", which compressed layers do not have. Every
            # rank therefore loads the full model, and Panther shards it afterwards.
            model._resolve_parallel_plans = lambda config: ({}, {}, {})  # type: ignore[assignment]
        if self.pre_quantized:
            config = self.quantization_config
            self.saved = read_saved_weights(kwargs.get("checkpoint_files"))
            config.modules = (config.modules or {}) | self._modules_of_parts(model)
            config.modules = put_compressed_(model, config.modules)
            config.parts, config.version = [], 1
            self.tied = share_tied_(model, self.saved)
            leave_out_zeros_(model, config.modules)
            if self.saved is not None:
                self.saved.train_scales_(model)
                self.saved.check(model, config.modules)
        return model

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Leave out conversions of the weights of experts that are compressed here: their tensors keep their names."""
        return conversions_to_keep(super().update_weight_conversions(weight_conversions, model), model)

    def _modules_of_parts(self, model: Any) -> dict[str, Any]:
        """Return the records of parts by the layers' names in the entire model, which the weights files show."""
        modules: dict[str, Any] = {}
        for part in self.quantization_config.parts:
            prefixes = [] if self.saved is None else self.saved.prefixes_of(part["modules"])
            places = [
                {prefix + name: _with_prefix(spec, prefix) for name, spec in part["modules"].items()}
                for prefix in prefixes
            ]
            places = [records for records in places if records.keys().isdisjoint(modules)]
            if len(places) > 1:  # parts with the same names, such as the blocks of an encoder, are told apart by shapes
                places = [records for records in places if self._are_saved(model, records)]
            if not places:
                raise FormatError(
                    f"the layers of the part {part.get('class')}, which was compressed alone, are not found in the "
                    "weights files: save the whole model by pr.save_compressed"
                )
            modules |= places[0]
        return modules

    def _are_saved(self, model: Any, records: Mapping[str, Any]) -> bool:
        """Return whether the weights files hold layers of these records, with equal shapes."""
        layers = {name: spec for name, spec in records.items() if not is_attention_record(spec)}
        specs = _specs_for(model, layers)
        if len(specs) < len(layers):
            return False
        built = build_modules(specs, model, device="meta")
        return self.saved is not None and self.saved.holds(dict(zip(layers, built.values(), strict=True)))

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        """Draw the sketches, which are not stored, or compress the model if the folder was dense."""
        if not self.pre_quantized:
            self.report = pr.compress(model, **self.options)
        if self.saved is not None:
            self.saved.share_(model)
            self.saved = None
        specs = self.quantization_config.modules or {}
        set_zeros_(model, specs)
        shared = {other for _, other in self.tied}
        for name, layer in compressed_layers(model):
            layer.adopt_values_(name, is_shared=name in shared)
        for loaded, other in self.tied:
            buffers_of(model.get_submodule(other)).update(buffers_of(model.get_submodule(loaded)))
        check_attention(model)
        set_quantization_config_(model)
        declare_ties_(model, transformers.PreTrainedModel)
        if getattr(model, "_tp_size", None) is not None and model.__dict__.pop("_resolve_parallel_plans", None):
            mesh = model._mesh_manager.get_mesh("tp")  # type: ignore[union-attr, operator]
            model._tp_size = model._device_mesh = model._mesh_manager = None  # type: ignore[assignment]
            model._is_distributed_loading_by_transformers = False  # type: ignore[assignment]
            self.placements = tensor_parallel(model, mesh)
        return model

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """Make config.json, which is written afterwards, describe the present layers.

        Factors that layers share are copied, because transformers refuses to save shared memory twice, except for
        tensors of layers that the model ties. A model whose layers are all dense again is saved as a dense model.
        """
        if getattr(model, "_hf_peft_config_loaded", False):
            return None, {}  # only adapters are saved
        if not module_specs(model):
            self.remove_quantization_config(model)
            return None, {}
        set_quantization_config_(model)
        declare_ties_(model, transformers.PreTrainedModel)  # the scales of one layer of a pair may be trained now
        # A run of the Trainer continues from these files, so factors of scales that are trained are not rounded.
        state = inference_state(model, keep_logs=True) if self.state is None else without_marks(self.state)
        addresses = set[int]()
        ties = getattr(model, "all_tied_weights_keys", {})
        copies: dict[str, Tensor] = {}
        for name, layer in compressed_layers(model, remove_duplicate=False):
            keys = (f"{name}.{key}" for key in layer.state_dict())
            for key in (key for key in keys if key in state):
                if state[key].numel() and state[key].data_ptr() in addresses and key not in ties:
                    copies[key] = state[key].clone()
                addresses.add(state[key].data_ptr())
        return state | copies, {}

    def dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """Replace compressed layers by dense ones; attention stays linear, which config.json records."""
        config_dtype = model.config.dtype
        if dtype is None and isinstance(config_dtype, str):  # save_pretrained leaves the name of a dtype there
            dtype = getattr(torch, config_dtype)
        model = super().dequantize(model, dtype)
        layers_replaced(model)
        return model

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        """Replace compressed layers by dense layers with the effective weights."""
        for name, layer in [*compressed_layers(model)]:
            put_layer(model, name, layer.to_dense().to(dtype))
        layers_replaced(model)
        weights: Any = model.state_dict()
        ties: Any = model.all_tied_weights_keys
        # Weights differ if the scales of an embedding and its head were trained separately.
        if all(torch.equal(weights[target], weights[source]) for target, source in ties.items()):
            model.tie_weights()  # type: ignore[operator]
        return model

    def is_serializable(self) -> bool:
        """Return True: everything is in config.json and safetensors."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: factors and biases are parameters, and scales where ``train_scales_`` was called."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """True: the Trainer may train the compressed model itself, not adapters alone."""
        return True

    @property
    def is_compileable(self) -> bool:
        """True."""
        return True


class CompressCallback(transformers.TrainerCallback):
    """For transformers' Trainer: log the sizes of compressed layers, and compress and heal the model after training.

    When training starts, the sketches of all processes are compared, and the number of compressed layers, their ranks
    and bytes go to the log (logger ``panther.integrations``, level INFO) and to ``trainer.state.log_history``. When
    training ends, the trained model is compressed on all processes jointly if options are given, before it is saved.

    Args:
        options: Arguments of :func:`panther.compress` by name, such as ``bits``, ``calibration`` and ``heal``. Without
            options, the model is not compressed.

    Attributes:
        report: The report of the compression; None before it.

    Raises:
        ConfigError: If an option is unknown, or no option is a size.
        CompressionError, TypeError, ValueError: If :func:`panther.compress` does not take an option.
        SketchMismatchError: When training starts, if processes have different sketches.

    Example:
        >>> from panther.integrations.transformers import CompressCallback
        >>> callback = CompressCallback(
        ...     bits=4.25, calibration=[], forms=("int8", "int4")
        ... )
    """

    def __init__(self, **options: Any) -> None:
        self.options = checked_options(options, "CompressCallback") if options else {}
        self.report: pr.CompressionReport | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Compare sketches, and log sizes."""
        state.log_history.append(compare_and_log(model) | {"step": state.global_step})

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Compress, if there are options."""
        if self.options:
            self.report, entry = compress_and_log(model, self.options)
            set_quantization_config_(model)
            state.log_history.append(entry | {"step": state.global_step})


def resize_token_embeddings_(model: Any, new_num_tokens: int, **kwargs: Any) -> Any:
    """Resize the vocabulary of a model whose head and embeddings may be compressed; both are dense afterwards.

    ``model.resize_token_embeddings`` of transformers requires an nn.Linear as the head and an nn.Embedding, and changes
    the input embeddings before it raises. This function first replaces compressed layers there by dense ones of their
    effective weights: logits of the old tokens stay the same up to rounding, and new rows are trained as in any model.
    Tied layers are tied again. Compress the layers again afterwards if they should be small.

    Args:
        model: A PreTrainedModel, changed in place.
        new_num_tokens: The new size.
        **kwargs: Arguments of ``resize_token_embeddings``.

    Returns:
        The input embeddings, as ``resize_token_embeddings`` returns them.

    Raises:
        TypeError: If ``model`` is not a PreTrainedModel.

    Cost: the memory of the dense weights.
    """
    _check_pretrained(model, "resize_token_embeddings_")
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if isinstance(head, CompressedModule):
        model.set_output_embeddings(head.to_dense())
    if isinstance(embeddings, CompressedModule):
        # An encoder and a decoder can share one table.
        for name, layer in [*compressed_layers(model, remove_duplicate=False)]:
            if layer is not head and _share_codes(layer, embeddings):
                put_layer(model, name, layer.to_dense())
    if isinstance(head, CompressedModule) or isinstance(embeddings, CompressedModule):
        layers_replaced(model)
        model.tie_weights()
    return model.resize_token_embeddings(new_num_tokens, **kwargs)


def _share_codes(module: nn.Module, other: nn.Module) -> bool:
    codes = buffers_of(module).get("codes")
    return module is other or (codes is not None and codes is buffers_of(other).get("codes"))


def set_quantization_config_(model: Any) -> Any:
    """Set the quantizer of this module, as ``from_pretrained`` does, for a model with compressed layers.

    ``save_pretrained`` writes the record of the compressed layers in any case. With the quantizer,
    ``model.dequantize()`` works, and transformers and other libraries know that the model is quantized. Models that
    ``from_pretrained`` compressed or loaded have the quantizer.

    Args:
        model: A PreTrainedModel with compressed layers.

    Returns:
        ``model``.

    Raises:
        TypeError: If ``model`` is not a PreTrainedModel.
        FormatError: If the model has no compressed layer, or a layer that cannot be saved.
    """
    _check_pretrained(model, "set_quantization_config_", ": save other models by pr.save_compressed")
    specs = module_specs(model)
    if not specs:
        raise FormatError(
            f"this {type(model).__name__} has no compressed layer: call pr.compress or pr.sketch_layers_ first"
        )
    quantizer = getattr(model, "hf_quantizer", None)
    if not isinstance(quantizer, PantherQuantizer):
        if quantizer is not None:
            raise FormatError(
                f"this {type(model).__name__} is quantized by {type(quantizer).__name__} too, and config.json has room "
                "for one method: save it by pr.save_compressed"
            )
        quantizer = PantherQuantizer(PantherConfig(modules=specs))
        model.hf_quantizer, model.is_quantized, model.quantization_method = quantizer, True, QUANTIZATION_METHOD
    quantizer.quantization_config.modules = specs
    quantizer.quantization_config.parts = []
    if is_ours(getattr(model.config, "quantization_config", None)):  # other models can have the same config object
        model.config.quantization_config = quantizer.quantization_config
    keep_expert_names_(model)
    return model


def is_ours(entry: Any) -> bool:
    """Return whether an entry ``quantization_config`` of a config, or None, is Panther's."""
    method = entry.get("quant_method") if isinstance(entry, Mapping) else getattr(entry, "quant_method", None)
    return bool(method == QUANTIZATION_METHOD)


def _check_pretrained(model: Any, function: str, fix: str = "") -> None:
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(f"{function} takes a PreTrainedModel of transformers, not {type(model).__name__}{fix}")


def put_compressed_(model: Any, specs: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the layers that ``specs`` lists by layers without values; return the records by this model's names."""
    specs = _specs_for(model, specs)
    layers, _ = convert_as_saved_(model, specs)
    for name, layer in build_modules(layers, model, device="meta").items():
        if not layer.replaces_parameter:  # Stacked experts have the dtype of from_pretrained(dtype=) already.
            layer = layer.to(model.get_submodule(name).get_parameter("weight").dtype)
        put_layer(model, name, layer)
    return specs


def _specs_for(model: Any, specs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the records by the layers' names in this class; the body may be loaded alone, or with a different head."""
    present = {name for name, _ in model.named_modules(remove_duplicate=False)} | stacked_layers(model).keys()
    # Layers that a class ignores by its own rules, as T5EncoderModel ignores the decoder and, with it, the head.
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    if left_out := {name for name in specs if any(re.search(pattern, name) for pattern in ignored)} - present:
        specs = {
            name: spec for name, spec in specs.items() if name not in left_out and ("." in name or name in present)
        }
    if specs.keys() <= present:
        return dict(specs)
    prefix = f"{model.base_model_prefix}."
    body = {name.removeprefix(prefix): spec for name, spec in specs.items() if name.startswith(prefix)}
    # A compressed head that this class does not have is left out, as transformers leaves out its tensors.
    shared = {name: spec for name, spec in specs.items() if name in present or name.startswith(prefix)}
    bodies = [body, {prefix + name: spec for name, spec in specs.items()}]
    for records in [shared, *bodies] if body else bodies:
        if records and records.keys() <= present:
            return {name: _renamed(spec, specs, records, prefix) for name, spec in records.items()}
    return dict(specs)  # build_modules raises an error that names the missing layers


def _with_prefix(spec: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return dict(spec) | ({"alias_of": prefix + spec["alias_of"]} if "alias_of" in spec else {})


def _renamed(spec: Any, specs: Mapping[str, Any], records: Mapping[str, Any], prefix: str) -> Any:
    first = spec.get("alias_of") if isinstance(spec, dict) else None
    if first is None or first in records:
        return spec
    return {"alias_of": first.removeprefix(prefix) if first in specs and first.startswith(prefix) else prefix + first}


# These assignments replace the entries of `import panther`, which transformers' register functions would refuse.
_auto.AUTO_QUANTIZATION_CONFIG_MAPPING[QUANTIZATION_METHOD] = PantherConfig
_auto.AUTO_QUANTIZER_MAPPING[QUANTIZATION_METHOD] = PantherQuantizer
