"""Compressed models in transformers: ``save_pretrained``, ``from_pretrained`` and everything that builds on them.

``import panther`` registers the quantization method "panther", and this module is imported when transformers uses it. A
folder that ``save_pretrained`` writes holds transformers' own config.json and sharded safetensors; config.json says
which layers are compressed, and ``AutoModel*.from_pretrained`` builds them, in any process that has imported Panther.
"""

__all__ = [
    "CompressCallback", "PantherConfig", "PantherQuantizer", "resize_token_embeddings_", "set_quantization_config_",
    "write_model_card",
]  # fmt: skip

from panther.integrations.transformers.model_card import write_model_card
from panther.integrations.transformers.quantizer import (
    CompressCallback,
    PantherConfig,
    PantherQuantizer,
    resize_token_embeddings_,
    set_quantization_config_,
)

# For the import hook and the commands.
from panther.integrations.transformers.quantizer import put_compressed_ as put_compressed_
from panther.integrations.transformers.records import layers_replaced as layers_replaced
from panther.integrations.transformers.records import model_files as model_files
from panther.integrations.transformers.records import saving as saving
from panther.integrations.transformers.saved_weights import check_loaded as check_loaded
