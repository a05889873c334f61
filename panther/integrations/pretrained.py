"""``panther.from_pretrained``: a transformers model from its folder. transformers is imported by the call."""

__all__ = ["from_pretrained"]

import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from panther.errors import FormatError, require_extra
from panther.nn.attention.record import check_recorded
from panther.nn.io import check_folder


def from_pretrained(dir: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Load the transformers model of a folder, compressed or not, in the class that its config.json names.

    The folder is one of :func:`panther.save_compressed`, of ``panther compress``, or of ``save_pretrained``. Nothing is
    downloaded, pickles are not opened, and code that a folder brings is not run. Where the folder has checksums (one of
    the first two) they are verified. transformers' own ``AutoModel*.from_pretrained`` loads such a folder too, in any
    class, without checksums.

    Args:
        dir: The folder.
        **kwargs: Of transformers' ``from_pretrained``, such as ``dtype`` and ``device_map``.

    Returns:
        The model, in eval mode.

    Raises:
        MissingExtraError: Without transformers.
        FormatError: If the folder has no config.json, names a class that transformers does not have, or a file is
            damaged.

    Example:
        >>> import tempfile, transformers, panther as pr
        >>> config = transformers.BertConfig(
        ...     vocab_size=50, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128
        ... )
        >>> model = transformers.BertModel(config)
        >>> report = pr.sketch_layers_(model, pr.SketchConfig(low_rank=4))
        >>> folder = pr.save_compressed(model, tempfile.mkdtemp())
        >>> type(pr.from_pretrained(folder).encoder.layer[0].intermediate.dense).__name__
        'SKLinear'
    """
    require_extra("panther.integrations.transformers", "transformers")  # registers the method "panther"
    transformers: Any = require_extra("transformers", "transformers")
    folder = Path(dir)
    if not folder.is_dir():
        raise FormatError(f"there is no folder {folder}: give one that pr.save_compressed or save_pretrained wrote")
    if not (folder / "config.json").is_file():
        raise FormatError(
            f"{folder} holds no config.json, which would name the architecture: build it, and call "
            "pr.load_compressed(folder, model)"
        )
    if (folder / "panther.json").is_file():
        check_folder(folder)
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    config = transformers.AutoConfig.from_pretrained(folder, **local)
    name = next(iter(config.architectures or ()), "AutoModel")
    make = getattr(transformers, name, None)
    if not isinstance(make, type) or not hasattr(make, "from_pretrained"):
        raise FormatError(
            f"{folder / 'config.json'} names the architecture {name}, which transformers {transformers.__version__} "
            "does not have: build it, and call pr.load_compressed(folder, model)"
        )
    kwargs |= {"use_safetensors": True, "local_files_only": True}
    try:
        model = make.from_pretrained(folder, **kwargs).eval()
        files = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
        check_recorded({name for file in files for name in file.keys()}, model, folder)  # noqa: SIM118  not a mapping
        return model
    except SafetensorError as error:
        raise FormatError(f"a weights file in {folder} is damaged ({error}): copy or write it again") from error
