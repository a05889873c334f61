"""Masks of models that somebody else wrote: which positions of which tensors count."""

import pytest
import torch
from foreign_models import WIDTH, Model, compressed, true_error
from torch import nn

from panther.compression.calibration.batches import positions_of


@pytest.mark.parametrize("kind", [torch.bool, torch.long, torch.float32, "added"])
def test_masks_of_every_kind(kind):
    kept = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = torch.where(kept, 0.0, -1e4) if kind == "added" else kept.to(kind)
    assert torch.equal(positions_of(mask), kept)


@pytest.mark.parametrize("shape", [(4, 1, 1, 6), (4, 6), (4, 1, 6), (4, 3, 6, 6), (4, 6, 6)])
@pytest.mark.parametrize("kind", [torch.bool, "added"])
def test_masks_of_pairs_keep_what_any_query_reads(shape, kind):
    kept = torch.arange(6) < torch.tensor([[6], [1], [4], [3]])
    pairs = kept.view(4, *(1 for _ in shape[2:]), 6).expand(shape)
    if shape[-2] == 6:
        pairs = pairs & torch.ones(6, 6, dtype=torch.bool).tril()
    assert torch.equal(positions_of(torch.where(pairs, 0.0, -1e9) if kind == "added" else pairs), kept)


class Translator(nn.Module):
    """An encoder whose masked mean is added to the decoder; the sequence can come first."""

    def __init__(self, sequence_first=False):
        super().__init__()
        torch.manual_seed(0)
        self.sequence_first = sequence_first
        self.embedding, self.encoder = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 64)
        self.decoder, self.head = nn.Linear(WIDTH, 64), nn.Linear(64, 100)

    def forward(self, input_ids, attention_mask, decoder_input_ids, decoder_attention_mask=None):
        if self.sequence_first:
            input_ids, decoder_input_ids = input_ids.mT, decoder_input_ids.mT
        mask = (attention_mask.mT if self.sequence_first else attention_mask)[..., None]
        axis = 0 if self.sequence_first else 1
        context = self.encoder(self.embedding(input_ids))
        context = (context * mask).sum(axis, keepdim=True) / mask.sum(axis, keepdim=True)
        return self.head(nn.functional.gelu(self.decoder(self.embedding(decoder_input_ids)) + context))


def sentences(length=16, target=16, count=8, rows=12):
    generator = torch.Generator().manual_seed(2)
    batches = []
    for _ in range(count):
        mask = torch.zeros(rows, length, dtype=torch.long)
        mask[:, :2] = 1
        common = torch.randint(0, 4, (rows, 2), generator=generator)
        ids = torch.cat([common, torch.randint(4, 100, (rows, target - 2), generator=generator)], 1)
        source = torch.randint(100, (rows, length), generator=generator)
        batches.append({"input_ids": source, "attention_mask": mask, "decoder_input_ids": ids})
    return batches


@pytest.mark.parametrize("sequence_first", [False, True])
@pytest.mark.parametrize(("length", "target", "rows"), [(16, 16, 12), (12, 12, 12), (16, 9, 12), (2, 16, 12)])
def test_masks_are_of_the_side_that_their_names_say(sequence_first, length, target, rows):
    batches = sentences(length, target, rows=rows)
    model = Translator(sequence_first)
    report, exact, last = compressed(model, batches, 0.35)
    true = true_error(model, exact, last, lambda model, batch: model(**batch))
    assert report.measured_error == pytest.approx(true, rel=1e-4)  # all positions of the decoder count
    # With a mask of the decoder, its positions and no others count.
    kept = torch.zeros(rows, target, dtype=torch.long)
    kept[:, : target // 2] = 1
    model = Translator(sequence_first)
    report, exact, last = compressed(model, [{**batch, "decoder_attention_mask": kept} for batch in batches], 0.35)
    rows_of = kept.bool().mT if sequence_first else kept.bool()
    true = true_error(model, exact, last, lambda model, batch: model(**batch)[rows_of])
    assert report.measured_error == pytest.approx(true, rel=1e-4)


class Captioner(nn.Module):
    """Patches of an image, which the mean of a text is added to; the text can have boxes, one for each word."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text, self.box = nn.Linear(WIDTH, 64), nn.Embedding(50, 64), nn.Linear(4, 64)
        self.head = nn.Linear(64, 50)

    def forward(self, input_ids, attention_mask, pixel_values, boxes=None):
        caption = self.text(input_ids) if boxes is None else self.text(input_ids) + self.box(boxes)
        caption = (caption * attention_mask[..., None]).sum(1, keepdim=True)
        patches = pixel_values if pixel_values.dim() == 3 else pixel_values.flatten(1, 2)  # as many as there are words
        return self.head(nn.functional.gelu(self.image(patches) + caption))


@pytest.mark.parametrize("size", [(3, 2), (6,)])
@pytest.mark.parametrize("boxes", [False, True])
def test_positions_of_an_image_are_not_masked_by_the_mask_of_a_text(size, boxes):
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(6) < 2).long().expand(16, -1)
    batches = []
    for _ in range(6):
        pixels = torch.randn(16, 6, WIDTH, generator=generator)
        pixels[:, 2:] *= 3  # the patches at the places of masked words are unlike the others
        ids = torch.randint(50, (16, 6), generator=generator)
        batch = {"pixel_values": pixels.unflatten(1, size), "input_ids": ids, "attention_mask": mask}
        if boxes:
            batch["boxes"] = torch.rand(16, 6, 4, generator=generator)
        batches.append(batch)
    model = Captioner()
    report, exact, last = compressed(model, batches, 0.4)
    true = true_error(model, exact, last, lambda model, batch: model(**batch))
    masked = true_error(model, exact, last, lambda model, batch: model(**batch)[mask.bool()])
    assert report.measured_error == pytest.approx(true, rel=1e-4)
    assert report.measured_error != pytest.approx(masked, rel=1e-2)


@pytest.mark.parametrize("reads_mask", [False, True])
@pytest.mark.parametrize("length", [2, 6])
def test_embeddings_have_the_positions_of_their_mask(reads_mask, length):
    class Tagger(Model):
        def forward(self, inputs_embeds, attention_mask):
            x = inputs_embeds
            return self.network(x * attention_mask[..., None] if reads_mask else x)

    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(length) < length // 2).long().expand(16, -1)
    batches = [
        {"inputs_embeds": torch.randn(16, length, WIDTH, generator=generator), "attention_mask": mask} for _ in range(6)
    ]
    model = Tagger()
    report, exact, last = compressed(model, batches)
    true = true_error(model, exact, last, lambda model, batch: model(**batch)[mask.bool()])
    assert report.measured_error == pytest.approx(true, rel=1e-4)


def test_attention_runs_as_the_user_runs_it():
    """Where there is padding, torch fills the output of an encoder with zeros, in eval mode without gradients."""

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, 16)

        def forward(self, x, padding):
            return self.head(self.encoder(x, src_key_padding_mask=padding).mean(1))

    model = Classifier().eval()
    padding = torch.arange(12) >= torch.tensor([[12], [9], [5], [3]])
    padding = padding.repeat(8, 1)
    batches = [
        (torch.randn(32, 12, WIDTH, generator=torch.Generator().manual_seed(seed)), padding) for seed in range(4)
    ]
    report, exact, last = compressed(model, batches, 0.6)
    true = true_error(model, exact, last, lambda model, batch: model(*batch))
    assert report.measured_error == pytest.approx(true, rel=1e-4)
    assert report.measured_error < 0.4
    assert model.encoder.use_nested_tensor
    assert any("use_nested_tensor=False of encoder" in note for note in report.notes)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sequence_first", [False, True])
def test_a_mask_of_pairs_leaves_padding_out(is_causal, sequence_first):
    """As many sentences as positions, so that shapes alone do not say which dimension is which."""

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.project, self.head = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, 100)

        def forward(self, input_ids, attention_mask):
            x = self.project(self.embedding(input_ids))
            x = nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attention_mask)[:, 0]
            return self.head(x.movedim(0, 1) if sequence_first else x)

    model, batches = Attends(), []
    for seed in range(6):
        ids = torch.randint(100, (12, 12), generator=torch.Generator().manual_seed(seed))
        kept = torch.arange(12) < 1 + torch.arange(12)[:, None] % 4
        ids[~kept] = 7
        mask = kept[:, None, None].expand(12, 1, 12, 12)
        batches.append({"input_ids": ids, "attention_mask": mask.tril() if is_causal else mask})
    report, exact, last = compressed(model, batches, 0.35)

    def call(model, batch):
        output = model(**batch)
        return (output.movedim(0, 1) if sequence_first else output)[kept]

    assert report.measured_error == pytest.approx(true_error(model, exact, last, call), rel=1e-4)
