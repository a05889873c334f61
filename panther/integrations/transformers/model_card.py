"""Write the model card of a compressed model, which hubs show beside its files."""

__all__ = ["write_model_card"]

import os
from collections import Counter
from pathlib import Path
from typing import Any

import panther as pr
from panther.compression import CompressionReport
from panther.files import write_text
from panther.integrations.folders.sentence_transformers import loader_of


def write_model_card(model: Any, report: CompressionReport, dir: str | os.PathLike[str], *, settings: str = "") -> Path:
    """Write README.md, a model card with the original model, the sizes, the error, and the code to load the model.

    With the card, a folder of ``save_pretrained`` has everything that ``push_to_hub`` would upload. ``panther
    compress`` writes a card.

    Args:
        model: The compressed PreTrainedModel.
        report: The report of :func:`panther.compress` for this model.
        dir: The folder that ``save_pretrained`` wrote.
        settings: Arguments of the compression to name in the card.

    Returns:
        The path of the file.

    Example:
        >>> import tempfile, torch, transformers, panther as pr
        >>> from panther.integrations.transformers import write_model_card
        >>> config = transformers.BertConfig(
        ...     vocab_size=50,
        ...     hidden_size=64,
        ...     num_hidden_layers=1,
        ...     num_attention_heads=2,
        ...     intermediate_size=128,
        ... )
        >>> model = transformers.BertModel(config).eval()
        >>> batches = [
        ...     {"input_ids": torch.randint(50, (16, 12))} for _ in range(8)
        ... ]
        >>> report = pr.compress(
        ...     model,
        ...     bits=5,
        ...     calibration=batches,
        ...     forms=("int8", "int4"),
        ...     measure_speed=False,
        ... )
        >>> folder = tempfile.mkdtemp()
        >>> model.save_pretrained(folder)
        >>> "# BertModel, compressed" in write_model_card(
        ...     model, report, folder
        ... ).read_text()
        True
    """
    base = getattr(model.config, "_name_or_path", "")
    title = Path(base).name or type(model).__name__
    on_a_hub = base.count("/") == 1 and not Path(base).exists()  # a path of a local folder is not named in the card
    base_entry = [f"base_model: {base}"] if on_a_hub else []
    front = ["---", "library_name: panther-sketch", "tags: [compressed, panther]", *base_entry]
    sizes = f"{report.bytes_before / 1e6:,.1f} MB to {report.bytes_after / 1e6:,.1f} MB"
    forms = Counter(layer.form for layer in report.layers)
    code = [
        "import panther.integrations.transformers", "import transformers", "",
        f'model = transformers.{type(model).__name__}.from_pretrained("this folder")',
    ]  # fmt: skip
    if (loader := loader_of(Path(dir))) is not None:
        code += ["", "# with the further modules of the folder", "import sentence_transformers", ""]
        code += [f'model = sentence_transformers.{loader}("this folder")']
    errors = {"measured": report.measured_error, "after healing": report.healed_error}
    errors_text = [f"{name} {value:.3g}" for name, value in errors.items() if value is not None]
    lines = [
        *front, "---", "", f"# {title}, compressed", "",
        f"A {type(model).__name__} of {title}, compressed by Panther {pr.__version__} from {sizes}.", "",
        *([f"- Asked for: {settings}."] if settings else []),
        f"- Layers: {', '.join(f'{count} {form}' for form, count in forms.most_common())}.",
        f"- Relative error of the output on held-out batches: {', '.join(errors_text) or 'not measured'}.",
        "- The licence and the limits of the original apply.", "",
        "```python", *code, "```", "",
    ]  # fmt: skip
    file = Path(dir) / "README.md"
    write_text(file, "\n".join(lines))
    return file
