"""What pr.compress fits for readers of compressed-tensors, and the layout of the codes there."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import panther as pr
from panther.compression.readers import READERS, decodes_in_silence
from panther.integrations.compressed_tensors.layout import (
    Scheme,
    decode_weight,
    pack_weight,
    quantization_config,
    selected_scheme,
)
from tests.support.compressing import batches_of, quick


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 40, 97])
@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_are_a_stream_of_bits_in_words(bits, columns):
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(2**bits, (3, columns), generator=generator, dtype=torch.uint8)
    codes[0], codes[1] = 0, 2**bits - 1
    packed = pack_weight(codes, bits)
    assert packed.dtype is torch.int32
    assert packed.shape == (3, -(-columns * bits // 32))
    for row, stored in zip(codes.tolist(), packed.tolist(), strict=True):
        stream = sum(code << (place * bits) for place, code in enumerate(row))
        assert [word % 2**32 for word in stored] == [(stream >> (32 * word)) % 2**32 for word in range(len(stored))]
    scale = torch.rand(3, 1, generator=generator)
    expected = (codes.double() - 2 ** (bits - 1)) * scale.double()
    assert torch.equal(decode_weight(packed, scale, (3, columns), bits), expected)


def test_scales_belong_to_groups_of_columns():
    codes = torch.full((2, 6), 9, dtype=torch.uint8)
    scale = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert decode_weight(pack_weight(codes, 4), scale, (2, 6), 4).tolist() == [[1, 1, 2, 2, 3, 3], [4, 4, 5, 5, 6, 6]]


def test_layers_are_matched_with_and_without_the_prefix_of_the_body():
    schemes = {"model.layers.0.up": Scheme(4, 128), "model.layers.1.up": Scheme(8, 128), "score": Scheme(4, 0)}
    config = quantization_config(schemes, ["model.layers.0.down"], "model")
    assert [entry["weights"]["num_bits"] for entry in config["config_groups"].values()] == [8, 4, 4]  # widest first
    for name, scheme in schemes.items():
        assert selected_scheme(name, config) == scheme
        assert selected_scheme(name.removeprefix("model."), config) == scheme
    for name in ("model.layers.0.down", "layers.0.down", "model.layers.00up", "model.layers.10.up", "other.score"):
        assert selected_scheme(name, config) is None


@pytest.mark.parametrize(
    ("columns", "bits", "group_size", "wider", "first_group", "expected"),
    [
        (256, 4, 128, 8, 128, True),  # half of the columns are one group, which is spread over two
        (384, 4, 128, 8, 128, False),
        (512, 4, 128, 8, 128, False),
        (32, 4, None, 8, None, True),  # words are padded
        (64, 4, None, 8, None, False),
        (64, 4, 32, 4, 32, False),
    ],
)
def test_narrow_codes_read_as_wide_ones(columns, bits, group_size, wider, first_group, expected):
    assert decodes_in_silence(columns, bits, group_size, wider, first_group) is expected


@pytest.mark.extra
def test_the_prediction_is_what_compressed_tensors_does():
    pack = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    num_silent = 0
    for columns in (32, 64, 96, 128, 256, 384, 512, 768):
        for bits in (2, 3, 4, 5, 6, 8):
            for group_size in (None, 32, 128):
                if group_size is not None and (group_size >= columns or columns % group_size):
                    continue
                codes = torch.full((1, columns), 1, dtype=torch.uint8)
                scale = torch.ones(1, 1 if group_size is None else columns // group_size)
                state = {"weight_packed": pack_weight(codes, bits), "weight_scale": scale}
                state["weight_shape"] = torch.tensor(codes.shape)
                for wider in (2, 3, 4, 5, 6, 8):
                    for first_group in (None, 32, 128):
                        args = quantization.QuantizationArgs(
                            num_bits=wider, strategy="group" if first_group else "channel", group_size=first_group
                        )
                        scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
                        try:
                            weight = pack.PackedQuantizationCompressor.decompress(state, scheme)["weight"]
                        except (RuntimeError, ValueError):
                            continue
                        if bits < wider and weight.shape == codes.shape:
                            num_silent += 1
                            assert decodes_in_silence(columns, bits, group_size, wider, first_group)
                        elif bits == wider and weight.shape == codes.shape:
                            assert (weight == 1 - 2 ** (bits - 1)).all()
    assert num_silent


class Body(nn.Module):
    """An embedding with a tied head, layers that groups of 16 divide, and one that they do not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.up, self.odd = nn.Embedding(90, 48), nn.Linear(48, 64), nn.Linear(64, 60)
        self.down, self.head = nn.Linear(60, 48), nn.Linear(48, 90, bias=False)
        self.mix = nn.Conv2d(1, 48, (1, 48))
        self.head.weight = self.words.weight

    def forward(self, ids):
        states = self.words(ids)
        states = states + self.down(torch.tanh(self.odd(torch.tanh(self.up(states)))))
        return self.head(states + self.mix(nn.functional.pad(states, (0, 0))[:, None]).squeeze(3).mT)


def test_only_what_the_reader_holds_is_fitted():
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(90, (16, 7), generator=generator) for _ in range(8)]
    model = Body()
    report = pr.compress(model, budget=0.4, calibration=batches, target="compressed-tensors", group_size=16, **quick)
    assert {layer.names for layer in report.layers} == {("up",), ("odd",)}
    assert all((layer.zeros == 2 ** (layer.bits - 1)).all() for layer in (model.up, model.odd))
    reasons = {entry.name: entry.reason for entry in report.skipped}
    assert reasons["words"] == "is of class Embedding, and reader='transformers' holds codes of nn.Linear only"
    assert reasons["mix"] == "is of class Conv2d, and reader='transformers' holds codes of nn.Linear only"
    assert reasons["down"] == "has rows of 60 columns, which groups of 16 do not divide"


def test_a_reader_that_fuses_layers_gets_one_width():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    batches = batches_of(width=64)
    report = pr.compress(model, bits=6.5, calibration=batches, reader="vllm", group_size=32, **quick)
    assert {layer.form for layer in report.layers} == {"int4"}
    assert report.allocate == "uniform"


def test_the_page_shows_what_readers_hold():
    page = (Path(__file__).parents[2] / "docs/howto/compressed-tensors.rst").read_text()
    table = page[page.index("   * -\n     - ``reader=") :]
    cells = {}
    for row in re.split(r"^   \* - ?", table[: table.index("\n\n")], flags=re.M)[1:]:
        title, *columns = re.split(r"\n     - ", row.rstrip("\n"))
        cells[title] = columns
    assert cells[""] == [f'``reader="{name}"``' for name in list(READERS)[:2]]
    transformers, vllm, _ = READERS.values()
    assert cells["Versions"][0] == f"transformers {transformers.version}"
    assert transformers.was_run
    assert not vllm.was_run
    assert cells["Versions"][1] == "none was run"
    for reader, cell in zip((transformers, vllm), cells["Widths"], strict=True):
        assert tuple(map(int, re.findall(r"\d+", cell))) == tuple(sorted(reader.widths))
    assert re.findall(r"\d+", cells["Groups"][1]) == [str(size) for size in vllm.group_sizes or ()]
    assert transformers.group_sizes is None
    assert [cell != "dense" for cell in cells["Heads that are not tied"]] == [
        transformers.packs_heads,
        vllm.packs_heads,
    ]
    adapters = [cell != "no" for cell in cells['Corrections of codes, as ``"int4+low_rank"``']]
    assert adapters == [transformers.takes_adapters, vllm.takes_adapters]


def test_bad_arguments():
    model, batches = nn.Sequential(nn.Linear(64, 64)), batches_of(width=64)
    refused = {
        "target='onnx' is unknown: use one of 'compressed-tensors', 'gguf'": {"target": "onnx"},
        "reader 'vlm' is unknown \\(did you mean 'vllm'\\?\\)": {"reader": "vlm"},
        "form 'low_rank' is not held by reader='transformers'": {
            "reader": "transformers",
            "forms": "low_rank",
        },
        "form 'int3' is not held by reader='vllm': use some of 'int8', 'int4'": {"reader": "vllm", "forms": "int3"},
        "group_size=16 is not held by reader='vllm': use None or one of 32, 64, 128": {
            "reader": "vllm",
            "group_size": 16,
        },
        "activations='int8' is not held": {"reader": "vllm", "activations": "int8"},
        "allocate='global' gives layers different widths": {"reader": "vllm", "allocate": "global"},
    }
    for message, options in refused.items():
        with pytest.raises(ValueError, match=message):
            pr.compress(model, bits=5.0, calibration=batches, **options)
    assert READERS["vllm"].has_one_width
