"""What every compressed or sketched layer can be asked: the protocol that files, adapters and parallelism walk.

A layer is one file that implements :class:`CompressedModule` and calls :func:`allow_saving`. No other code asks for its
class. Writers of files take :meth:`CompressedModule.to_record`, readers :meth:`CompressedModule.from_record`, exporters
:meth:`CompressedModule.plain` and :meth:`CompressedModule.factors`, tensor parallelism
:attr:`CompressedModule.sharded_dims`, and all of them the traits, which are attributes.
"""

__all__ = [
    "TRAINED_SCALES", "CompressedModule", "LinearGeometry", "allow_saving", "allowed_layers", "arguments_of",
    "check_linear_input", "compressed_layers", "keep_own_forward", "recorded_class",
]  # fmt: skip

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from panther._hints import explain_keywords_of_class
from panther._torch import buffers_of, children_of, is_transformed, version_of
from panther.errors import DTypeError, FormatError, ShapeError, SketchMismatchError, check_size
from panther.kernels.ops.library import is_autocasting
from panther.nn.factors import inherit_settings
from panther.nn.sketch_record import RECORD_MARK, check_mark, has_values, record_mark

TRAINED_SCALES = "trained_scales"
"""Key of a record in a training checkpoint: the layer has parameters that train its scales."""

# Only these classes are built from a file, with the arguments of the dense class and of the layer's size.
_ALLOWED: dict[str, type["CompressedModule"]] = {}


def allow_saving(*layers: type["CompressedModule"], form_name: str = "") -> None:
    """Let files contain further layers, by the names of their classes.

    A layer that is not Panther's own has to be allowed in each process that loads such a file.

    Args:
        *layers: Classes of layers.
        form_name: The name by which reports show layers that do not describe themselves; ``""`` is the class's name.

    Raises:
        FormatError: If another class has the same name.
    """
    for layer in layers:
        if _ALLOWED.setdefault(layer.__name__, layer) is not layer:
            raise FormatError(f"{layer.__name__!r} names another class in files: rename the class {layer}")
        if form_name and not layer.form_name:
            layer.form_name = form_name


def allowed_layers() -> Mapping[str, type["CompressedModule"]]:
    """Return the classes of layers that files may contain, by name."""
    return MappingProxyType(_ALLOWED)


def recorded_class(layer: nn.Module) -> str | None:
    """Return the name of a layer's class in files; None if files do not contain such a layer.

    Subclasses that fully_shard and tensor parallelism derive have the name of the class that they are derived from.
    """
    for kind in type(layer).__mro__:
        if _ALLOWED.get(kind.__name__) is kind:
            return kind.__name__
        if not kind.__module__.startswith(("torch.distributed.", "panther.distributed.")):
            break
    return None


def compressed_layers(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, "CompressedModule"]]:
    """Yield the compressed layers of a model by name; a layer with more than one name once, unless told otherwise."""
    for name, module in model.named_modules(remove_duplicate=remove_duplicate):
        if isinstance(module, CompressedModule):
            yield name, module


def keep_own_forward(module: nn.Module, args: Any) -> None:
    """Do nothing, as a forward pre-hook: torch's fast paths are off for a module that has a hook.

    nn.TransformerEncoderLayer in eval mode reads the weights of its linear layers and its attention instead of calling
    them. Of a sketched layer that would be a dense product, and of a sharded one a rank's shard.
    """


def arguments_of(layer: nn.Module, names: tuple[str, ...]) -> dict[str, Any]:
    """Return arguments of a constructor as JSON has them, read from the attributes of a sketched or a dense layer."""
    values = {name: getattr(layer, name) for name in names}
    if "bias" in values:
        values["bias"] = layer.bias is not None
    return {name: _as_in_json(value) for name, value in values.items()}


def _as_in_json(value: Any) -> Any:
    return [_as_in_json(entry) for entry in value] if isinstance(value, tuple) else value


class CompressedModule(nn.Module):
    """Base of layers that replace a dense layer with fewer numbers or bits. The inference format can store them.

    A subclass has to name its constructor's arguments and what it stores, and to define ``weight``, ``dtype``,
    :meth:`stored_names` and :meth:`check_record`. Everything else has a default that is right for a layer whose tensors
    are plain parameters and buffers. :func:`allow_saving` lets files contain it. ``weight`` is a new tensor at each
    access, so that writing to it, as ``nn.init`` would, does not change the layer.
    """

    dense_class: type[Any]
    """The class of torch.nn that the layer replaces."""

    dense_arguments: tuple[str, ...]
    """Names of the constructor's arguments that the dense class has too."""

    size_arguments: tuple[str, ...]
    """Names of those that say how much is stored."""

    replaces_parameter: bool = False
    """Whether the layer stands for a parameter of a module, such as stacked weights of experts, not for a module."""

    sizes_may_be_none: bool = False
    """Whether None is a valid value of each size argument."""

    saved_buffer_names: tuple[str, ...]
    """Names of the buffers that are saved with the parameters."""

    factor_names: tuple[str, ...] = ()
    """Names of the parameters that are factors of the weight, where the products of factors are the weight."""

    has_matrix_stacks: bool = False
    """Whether parameters of three dimensions are stacks of matrices; Muon orthogonalises each matrix."""

    sketch_names: tuple[str, ...] = ()
    """Names of the sketches, which are attributes of the layer and are drawn from its seed."""

    checked_names: tuple[str, ...] = ()
    """Names of the buffers on which arithmetic has no meaning, such as codes and seeds; the record is the last."""

    sharded_dims: ClassVar[Mapping[int, Mapping[str, int]]] = MappingProxyType({})
    """How the tensors of a linear layer are sharded along dimension 0 or 1 of the weight, its outputs or its inputs.

    For each of these dimensions, the names of the sharded tensors with the dimension along which each is sharded. The
    remaining tensors are replicated. A layer that cannot be sharded along a dimension does not have it as a key.
    """

    form_name: str = ""
    """Name of the form, for reports; ``""`` is the name of the class. See :meth:`describe_form`."""

    bits: int | None = None
    """Width of the codes; None of a layer without codes."""

    activations: str | None = None
    """How the layer rounds its inputs: None or "int8"."""

    packed: bool = False
    """Whether the sketches are held as one bit for each entry."""

    _checked: list[tuple[int, int]] | None = None
    """Which tensors :meth:`check_writes` last saw, and how often they had been written to."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        explain_keywords_of_class(cls)

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(keep_own_forward)
        self.register_buffer(RECORD_MARK, None)  # Tools that look up the names of a state_dict find this one.

    def __setattr__(self, name: str, value: Any) -> None:
        self._check_settable(name)
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, or raise AttributeError if the layer computes a tensor of this name."""
        self._check_settable(name)  # torchao registers quantized weights
        super().register_parameter(name, param)

    def _check_settable(self, name: str) -> None:
        # nn.Module raises a KeyError without a reason if a Parameter has the name of a property.
        attribute = getattr(type(self), name, None)
        if isinstance(attribute, property) and attribute.fset is None:
            makers = [maker for maker in dir(self) if maker.startswith("from_") and maker != "from_record"]
            raise AttributeError(
                f"{name} of {type(self).__name__} is computed from {', '.join(self.stored_names())} and cannot be set: "
                f"change these tensors, make a new layer from a dense layer by {' or '.join(makers) or 'its class'}, "
                "or call pr.to_linears_(model) first for a tool that looks for torch's layers"
            )

    bias: nn.Parameter | None

    if TYPE_CHECKING:  # A layer can define it as a property, or set it.

        @property
        def dtype(self) -> torch.dtype:
            """The dtype of input, output and bias."""

    @property
    def record_mode(self) -> str:
        """The kind of the tensors: "seeded", "sparse", "fitted", "stored", "interpolative" or "quantized"."""
        return "stored"

    @property
    def is_seeded(self) -> bool:
        """Whether the layer has sketches that are drawn from its seed, so that files hold only the seed."""
        return False

    @property
    def trains_scales(self) -> bool:
        """Whether the layer has parameters that train its scales."""
        return False

    @property
    def is_symmetric(self) -> bool:
        """Whether the values of :meth:`implied_tensors` follow from the record, so that files need not hold them."""
        return False

    def stored_names(self) -> tuple[str, ...]:
        """Return the names of the tensors that the weight is computed from."""
        raise NotImplementedError

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors that the weight is computed from, by name."""
        return {name: getattr(self, name) for name in self.stored_names()}

    def factors(self) -> tuple[Tensor, Tensor] | None:  # (out, r), (r, in)
        """Return two matrices whose product is the weight, unfolded to a matrix; None if there are none.

        A layer of codes has none, except for a layer that only has a correction. A convolution with groups has none.
        """
        return None

    def why_not_sharded(self, dim: int, ranks: int) -> str | None:
        """Return why a linear layer cannot be sharded over ranks along a key of :attr:`sharded_dims`; None if it can.

        The answer is for the plan's report. That a size is at least the number of ranks is checked elsewhere.
        """
        return None

    @property
    def rate_factors(self) -> Mapping[str, float]:
        """Factors of AdamW's learning rate by the name of the parameter; functions for parameter groups apply them."""
        return {}

    @property
    def muon_rate_factors(self) -> Mapping[str, float]:
        """Factors of Muon's learning rate by the name of the parameter; functions for parameter groups apply them."""
        return {}

    @property
    def inner_rank(self) -> int | None:
        """Numbers in each row between the two products of a layer of factors; None of a layer of one product."""
        return None

    @classmethod
    def in_place_of(cls, dense: Any, **size: Any) -> Self:
        """Return a new layer of this size with the arguments, the device and the dtype of a dense layer."""
        make: Any = cls  # The constructors of subclasses have arguments.
        weight, arguments = dense.weight, arguments_of(dense, cls.dense_arguments)
        layer: Self = make(**arguments, **size, device=weight.device, dtype=weight.dtype)
        return layer

    @torch.no_grad()
    def _with_bias_of(self, dense: Any) -> Self:
        """Copy the bias and the settings of the dense layer that this layer replaces, and return this layer."""
        if self.bias is not None:
            self.bias.copy_(dense.bias)
        inherit_settings(self, dense)
        return self

    @torch.no_grad()
    def to_dense(self) -> Any:
        """Return a dense layer with copies of the effective weight and the bias, in the same training mode."""
        weight: Any = self.weight
        arguments = arguments_of(self, self.dense_arguments)
        dense = self._new_dense(**arguments, device=weight.device, dtype=weight.dtype)
        dense.weight.copy_(weight)
        if self.bias is not None:
            dense.bias.copy_(self.bias)
        return dense.train(self.training)

    def _new_dense(self, **arguments: Any) -> Any:
        """Return a new dense layer with these arguments of its constructor."""
        return self.dense_class(**arguments)

    @torch.no_grad()
    def plain(self) -> nn.Module:
        """Return layers of torch.nn with the same output, which :func:`panther.to_linears_` puts in the layer's place.

        A layer of factors becomes a pair of layers, and any other layer the dense layer of its weight. The new
        parameters are trained if the layer's are.
        """
        dense: nn.Module = self.to_dense()
        dense.get_parameter("weight").requires_grad_(self._is_trained)
        if self.bias is not None:
            dense.get_parameter("bias").requires_grad_(self.bias.requires_grad)
        return dense

    @property
    def _is_trained(self) -> bool:
        """Whether the weight of :meth:`plain` is trained: unless a parameter of the layer is frozen."""
        return all(parameter.requires_grad for parameter in self.parameters())

    def plus_product(self, left: Tensor, right: Tensor) -> "CompressedModule | None":  # (out, r), (r, in)
        """Return a layer with a copy of the bias, whose weight is this layer's plus ``left @ right``; its rank grows.

        None: such a layer would not be smaller than the dense one, or does not exist.
        """
        return None

    def to_record(self, *, in_training: bool = False) -> dict[str, Any]:
        """Return everything that :meth:`from_record` and the stored tensors need to build the layer again, as JSON.

        With ``in_training``, the record of a checkpoint: it says which layers train their scales.
        """
        record: dict[str, Any] = {
            "class": recorded_class(self) or type(self).__name__,
            "args": arguments_of(self, (*self.dense_arguments, *self.size_arguments)),
            "mode": self.record_mode,
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        if in_training and self.trains_scales:
            record[TRAINED_SCALES] = True
        if self.packed:  # Optional, because it does not change the function.
            record["packed"] = True
        if self.activations is not None:
            record["activations"] = self.activations
        return record

    @classmethod
    def from_record(
        cls, record: Mapping[str, Any], *, dtype: torch.dtype, device: torch.device | str, seed: int | None = None
    ) -> Self:
        """Return a new layer of a checked record's arguments, with random values; None for ``seed`` draws one."""
        make: Any = cls
        layer: Self = make(**record["args"], dtype=dtype, device=device)
        return layer

    def follow_record_(self, record: Mapping[str, Any]) -> None:
        """Set what a record says beyond the constructor's arguments, such as packing; ValueError if it is unknown."""

    def implied_tensors(self, device: torch.device | str) -> dict[str, Tensor]:
        """Return the values of the stored tensors that files leave out if :attr:`is_symmetric` is true, by name."""
        return {}

    def drawn_names(self) -> tuple[str, ...]:
        """Return the names of the buffers that the layer draws from its seed when it leaves the meta device."""
        return ()

    def recorded_dtypes(self) -> set[torch.dtype]:
        """Return the dtypes of the tensors that the ``dtype`` of a record speaks about; files hold one of them."""
        return {parameter.dtype for parameter in self.parameters()} or {self.dtype}

    def why_not_saved(self) -> str | None:
        """Return why a file would change the layer, as the end of a sentence with the remedy; None if it would not."""
        return None

    @classmethod
    def describe_form(cls, arguments: Mapping[str, Any], mode: str = "stored") -> str:
        """Return the form in words, for reports and trees, from arguments of the constructor and a mode.

        The default is :attr:`form_name`, with the rank if ``low_rank`` is one of the arguments.
        """
        rank = arguments.get("low_rank")
        name = cls.form_name or cls.__name__
        return name if rank is None else f"{name}, rank {rank}"

    def adopt_values_(self, name: str, *, is_shared: bool = False) -> None:
        """Compute with the values that were put into the stored tensors without ``load_state_dict``.

        With ``is_shared`` the caller will put the tensors of another layer here, so that these have no values yet.
        Raise SketchMismatchError or FormatError if the values do not belong together.
        """
        if not is_shared:
            self.check_record()

    def check_record(self) -> None:
        """Make the record of the layer's form valid for saving, or raise SketchMismatchError."""
        raise NotImplementedError

    def check_writes(self) -> None:
        """Call :meth:`follow_writes` if a checked buffer was written to or replaced since the last call.

        Other code writes to buffers in place: it broadcasts or copies them, which the layer has to follow, or averages
        them, which destroys codes and seeds and raises SketchMismatchError.
        """
        if not torch.compiler.is_compiling() and (writes := self._writes()) != self._checked:
            tensors = self._checked_tensors()
            # Tensors without values, shards, and tensors inside of vmap or a trace cannot be compared.
            plain = all(type(tensor) is Tensor and has_values(tensor) for tensor in tensors)
            if plain and not torch.jit.is_tracing() and not any(map(is_transformed, tensors)):
                self._take_mark()
                self.follow_writes(writes)
                self._checked = self._writes()

    def _take_mark(self) -> None:
        """Compare the mark, and remove it, if a tool has set each tensor of a state_dict by its name."""
        if self.checked_names and (mark := buffers_of(self).get(RECORD_MARK)) is not None:
            check_mark(mark, buffers_of(self)[self.checked_names[-1]])
            buffers_of(self)[RECORD_MARK] = None

    def _writes(self) -> list[tuple[int, int]]:
        """Return the identity and the number of writes of each checked buffer; inference tensors count no writes."""
        tensors = map(buffers_of(self).get, self.checked_names)
        try:
            return [(id(tensor), version_of(tensor)) for tensor in tensors if tensor is not None]
        except RuntimeError:
            return [(id(tensor), -1) for tensor in self._checked_tensors()]

    def note_writes(self) -> None:
        """Regard the present values of the checked buffers as valid, if there are values."""
        self._checked = self._writes() if all(map(has_values, self._checked_tensors())) else None

    def _checked_tensors(self) -> list[Tensor]:
        return [tensor for name in self.checked_names if (tensor := buffers_of(self).get(name)) is not None]

    def follow_writes(self, writes: list[tuple[int, int]]) -> None:
        """Compute with what other code wrote to the checked buffers, or raise SketchMismatchError."""
        self.check_record()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save, unless the checked buffers do not belong together: the error names the layer."""
        try:
            self._take_mark()
            self.check_record()
        except SketchMismatchError as error:
            if self._checked is not None:  # Otherwise the values are still being loaded.
                raise SketchMismatchError(f"layer {prefix[:-1]!r}: {error}" if prefix else str(error)) from None
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.checked_names and (mark := record_mark(destination.get(prefix + self.checked_names[-1]))) is not None:
            destination[prefix + RECORD_MARK] = mark

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load, if the mark, which earlier versions did not save, belongs to the record."""
        state_dict = dict(state_dict)
        mark = state_dict.pop(prefix + RECORD_MARK, None)
        check_mark(mark, state_dict.get(prefix + self.checked_names[-1]) if self.checked_names else None, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply ``fn``, which moves or casts the values of checked buffers, and does not change them."""
        was_checked = self._checked is not None and self._checked == self._writes()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if was_checked:
            self._checked = self._writes()
        return self

    def _fits(self, state: dict[str, Any], expected: Mapping[str, torch.Size], prefix: str, *args: Any) -> bool:
        """Return whether a checkpoint has all tensors in the expected shapes; report differences as torch does."""
        missing_keys, unexpected_keys, error_msgs = args[-3:]
        strange = [name for name in expected if name in state and not isinstance(state[name], Tensor)]
        if strange:
            error_msgs += [f"{prefix}{name} must be a tensor, not {type(state[name]).__name__}." for name in strange]
            return False
        missing = [prefix + name for name in expected if name not in state]
        unexpected = [
            prefix + name
            for name in state
            if name not in {*expected, RECORD_MARK} and name.partition(".")[0] not in children_of(self)
        ]
        wrong = [
            f"size mismatch for {prefix}{name}: copying a param with shape {tuple(state[name].shape)} from checkpoint, "
            f"the shape in current model is {tuple(shape)}."
            for name, shape in expected.items()
            if name in state and state[name].shape != shape
        ]
        matching = [name for name in expected if name in state and name != "bias"]
        if missing and matching:  # strict=False would hide that these are not loaded
            wrong.append(
                f"{type(self).__name__} {prefix[:-1]!r} needs all of its tensors, and the state_dict only has "
                f"{', '.join(matching)}: load the shards of a checkpoint as one state_dict, or by pr.from_pretrained."
            )
        elif missing:
            missing = [prefix + name for name in expected]
        missing_keys += missing
        unexpected_keys += unexpected
        error_msgs += wrong
        return not (missing or wrong)


def check_linear_input(x: Tensor, in_features: int, dtype: torch.dtype) -> None:
    """Raise unless the input fits a linear layer of ``in_features`` inputs and this dtype."""
    if not isinstance(x, Tensor):
        raise TypeError(f"the input must be a tensor, not {type(x).__name__}: use torch.as_tensor")
    if x.dtype is not dtype and not is_autocasting(x.device):
        other = f", or the layer, layer.to({x.dtype}), or run under torch.autocast" if x.is_floating_point() else ""
        raise DTypeError(f"the input is {x.dtype} and the layer {dtype}: cast the input, x.to({dtype}){other}")
    # Tracing would warn about a comparison of sizes, which are tensors.
    if not (torch.jit.is_tracing() or x.is_nested) and (not x.dim() or x.shape[-1] != in_features):
        features = f"{x.shape[-1]} features" if x.dim() else "no dimension"
        raise ShapeError(f"the input has {features} and the layer takes {in_features}")


class LinearGeometry(CompressedModule):
    """The sizes that a compressed linear layer shares with nn.Linear, and its way back.

    Args:
        in_features: Size of each input sample.
        out_features: Size of each output sample.
        bias: Whether to add a bias.
        device: None is torch's default.
        dtype: Floating dtype; None is torch's default.

    Raises:
        ShapeError: If a size is out of range.
        TypeError: If an argument has the wrong type.
        DTypeError: If ``dtype`` is not floating.
    """

    dense_class = nn.Linear
    dense_arguments = ("in_features", "out_features", "bias")
    in_features: int
    out_features: int

    def _set_sizes(self, in_features: int, out_features: int) -> None:
        self.in_features = check_size("in_features", in_features, least=1)
        self.out_features = check_size("out_features", out_features, least=1)

    def to_linear(self) -> nn.Linear:
        """Return the nn.Linear with this layer's effective weight and bias, copied.

        Example:
            >>> import torch
            >>> from panther.nn import SKLinear
            >>> layer, x = SKLinear(256, 128, 4), torch.randn(2, 256)
            >>> torch.allclose(layer(x), layer.to_linear()(x), atol=1e-5)
            True
        """
        linear: nn.Linear = self.to_dense()
        return linear

    def extra_repr(self) -> str:
        """Return sizes and form, as shown by print."""
        names = ("in_features", "out_features", *self.size_arguments)
        return ", ".join([*(f"{name}={getattr(self, name)}" for name in names), f"bias={self.bias is not None}"])
