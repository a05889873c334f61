"""The models of transformers that llama.cpp has under a name of its own, and what differs between the two."""

__all__ = ["ARCHITECTURES", "Architecture", "architecture_of", "row_order", "write_sizes"]

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from panther.errors import PantherError


@dataclass(frozen=True)
class Architecture:
    """What llama.cpp computes for a class of models.

    Attributes:
        name: Its name there.
        rotates_neighbours: Whether rotary embeddings turn neighbouring rows of a head, and not rows half a head apart.
        has_biases: Whether projections may have a bias.
        has_head: Whether the head may differ from the embedding.
        norm_offset: What is added to the weights of norms.
        window_period: Layers from one with full attention to the next; None if a window of attention is not known.
        large_depth: Layers of the one size whose queries are scaled by the mean width of a head; None without such one.
    """

    name: str
    rotates_neighbours: bool = False
    has_biases: bool = False
    has_head: bool = True
    norm_offset: float = 0.0
    window_period: int | None = None
    large_depth: int | None = None


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", rotates_neighbours=True, has_biases=True),
    "MistralForCausalLM": Architecture("llama", rotates_neighbours=True),
    "Qwen2ForCausalLM": Architecture("qwen2", has_biases=True),
    "Qwen3ForCausalLM": Architecture("qwen3"),
    "GemmaForCausalLM": Architecture("gemma", has_head=False, norm_offset=1.0),
    "Gemma2ForCausalLM": Architecture("gemma2", has_head=False, norm_offset=1.0, window_period=2, large_depth=46),
    "Gemma3ForCausalLM": Architecture("gemma3", norm_offset=1.0, window_period=6, large_depth=62),
}
"""The architectures by the class of the model in transformers."""


def architecture_of(model: Any) -> Architecture:
    """Return the architecture of a model, or raise PantherError if llama.cpp would compute something else."""
    name = type(model).__name__
    if name not in ARCHITECTURES:
        raise PantherError(f"{name} cannot be written in GGUF: use one of {', '.join(ARCHITECTURES)}, or --to onnx")
    architecture, config = ARCHITECTURES[name], model.config
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    supported_activations = ("gelu_pytorch_tanh", "gelu") if architecture.norm_offset else ("silu",)
    reasons = {
        f"the activation {activation!r}": activation not in supported_activations,
        "attention in both directions": bool(getattr(config, "use_bidirectional_attention", False)),
    }
    for kind, rope in _ropes(config).items():
        scaling = rope.get("rope_type", "default")
        allowed = ("default", "linear", "llama3") if architecture.name == "llama" else ("default", "linear")
        reasons[f"rope_type {scaling!r} of {kind}"] = scaling not in allowed
        reasons[f"partial rotary embeddings of {kind}"] = rope.get("partial_rotary_factor", 1.0) != 1.0
    if (period := architecture.window_period) is not None:
        layers = range(1, config.num_hidden_layers + 1)
        kinds = ["sliding_attention" if layer % period else "full_attention" for layer in layers]
        reasons["another order of layers with a window"] = list(config.layer_types) != kinds
        is_large = config.num_hidden_layers == architecture.large_depth
        width = config.hidden_size // config.num_attention_heads if is_large else config.head_dim
        reasons[f"query_pre_attn_scalar={config.query_pre_attn_scalar}"] = config.query_pre_attn_scalar != width
    if broken := [reason for reason, holds in reasons.items() if holds]:
        raise PantherError(f"this {name} has {broken[0]}, which llama.cpp does not compute: use --to onnx")
    return architecture


def _ropes(config: Any) -> dict[str, dict[str, Any]]:
    """Return the settings of rotary embeddings by the kind of layer."""
    parameters = config.rope_parameters
    return {"full_attention": parameters} if "rope_theta" in parameters else parameters


def _head_width(config: Any) -> int:
    width: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return width


def write_sizes(writer: Any, model: Any, architecture: Architecture) -> None:
    """Write the sizes and constants of a model by a GGUFWriter."""
    config = model.config
    width, window = _head_width(config), getattr(config, "sliding_window", None)
    positions = config.max_position_embeddings
    if window is not None and architecture.window_period is None:
        positions = min(positions, window)  # Within its window, attention is full.
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    ropes = _ropes(config)
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    if "sliding_attention" in ropes:
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    if ropes["full_attention"].get("rope_type") == "linear":
        writer.add_string(f"{architecture.name}.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(ropes["full_attention"]["factor"])
    if architecture.window_period is not None:
        writer.add_sliding_window(window)
        if getattr(config, "attn_logit_softcapping", None) is not None:
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        if getattr(config, "final_logit_softcapping", None) is not None:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)


def rope_divisors(model: Any) -> Tensor | None:  # (head width / 2,)
    """Return what frequencies are divided by in a model of ``rope_type`` llama3; None for other models."""
    (rope, *_) = _ropes(model.config).values()
    if rope.get("rope_type") != "llama3":
        return None
    width = _head_width(model.config)
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    frequencies: Tensor = model.model.rotary_emb.inv_freq.detach().cpu().double()
    return (rope["rope_theta"] ** -exponents / frequencies).float()


def row_order(model: Any, architecture: Architecture, layer_name: str) -> Tensor | None:  # (rows,)
    """Return the order of a layer's rows in the file; None if it does not change.

    Where neighbouring rows are turned, row i of a head's first half is followed by row i of its second half.
    """
    projections = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    heads = projections.get(layer_name.rpartition(".")[2])
    if heads is None or not architecture.rotates_neighbours:
        return None
    width = _head_width(model.config)
    return torch.arange(heads * width).view(heads, 2, width // 2).mT.flatten()
