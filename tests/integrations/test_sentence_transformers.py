"""Models of sentence-transformers: compressed as people call them, saved, and loaded in a process of its own."""

import json
import sys

import pytest
import torch
import waits

import panther as pr
from panther.cli import main
from panther.errors import CompressionError

sentence_transformers = pytest.importorskip("sentence_transformers")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
from sentence_transformers.sentence_transformer import modules  # noqa: E402  after the check that it is there

pytestmark = pytest.mark.extra

WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "dogs", "ran", "by", "an", "old", "red", "house", "near", "us"]
TEXTS = [" ".join(WORDS[(3 * i + 7 * j) % len(WORDS)] for j in range(3 + i % 6)) for i in range(200)]

LOAD = """
import sys, json, torch
exec(sys.argv[1])
from sentence_transformers import *
model = globals()[sys.argv[3]](sys.argv[2], device="cpu")
exec(sys.argv[1])
texts = json.loads(sys.argv[4])
vectors = model.predict(texts) if sys.argv[3] == "CrossEncoder" else model.encode(texts)
torch.save(torch.as_tensor(vectors), sys.argv[5])
"""


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """The folder of a small BERT with its tokenizer."""
    return saved_model(tmp_path_factory.mktemp("bert"), transformers.BertModel)


def saved_model(folder, kind, **options):
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    splitter = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate([*special.values(), *WORDS])}, unk_token="[UNK]")
    )
    splitter.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    splitter.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    transformers.PreTrainedTokenizerFast(tokenizer_object=splitter, model_max_length=32, **special).save_pretrained(
        folder
    )
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS) + 4, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=32, **options,
    )  # fmt: skip
    kind(config).save_pretrained(folder)
    return folder


def sentence_model(folder, *more, **options):
    torch.manual_seed(1)
    parts = [modules.Transformer(str(folder)), modules.Pooling(32), *more, modules.Normalize()]
    return sentence_transformers.SentenceTransformer(modules=parts, device="cpu", **options)


def vectors(model, texts=TEXTS[:20]):
    return torch.as_tensor(model.encode(texts))


def compress(model, calibration, **options):
    defaults = {"budget": 0.4, "forms": "int8", "seed": 0, "measure_speed": False}
    return pr.compress(model, calibration=calibration, **(defaults | options))


def vectors_elsewhere(folder, out, first_line="import panther", loader="SentenceTransformer", texts=TEXTS[:20]):
    """Return the vectors of a model that a fresh process loads, with ``first_line`` run first."""
    waits.run([sys.executable, "-c", LOAD, first_line, str(folder), loader, json.dumps(texts), str(out)], check=True)
    return torch.load(out)


@pytest.mark.parametrize(
    "kind", ["texts", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("batches", "features", "a loader"))]
)
def test_texts_are_calibration_batches(kind, encoder):
    """People have texts, and called pr.compress with what they call encode with."""
    model, reference = sentence_model(encoder), sentence_model(encoder)
    features = [reference.preprocess(TEXTS[i : i + 32]) for i in range(0, len(TEXTS), 32)]
    calibration = {
        "texts": TEXTS,
        "batches": [TEXTS[i : i + 32] for i in range(0, len(TEXTS), 32)],
        "features": features,
        "a loader": torch.utils.data.DataLoader(TEXTS, batch_size=32),
    }[kind]
    report = compress(model, calibration)
    assert report.output == "output['sentence_embedding']"
    compress(reference, features, forward_fn=lambda model, batch: model(batch))
    assert torch.equal(vectors(model), vectors(reference))
    error = (vectors(model) - vectors(sentence_model(encoder))).norm() / vectors(model).norm()
    assert 0 < error < 0.2


class Texts(torch.utils.data.Dataset):
    """A data set as torch defines them, without ``__iter__``."""

    def __len__(self):
        return len(TEXTS)

    def __getitem__(self, index):
        return TEXTS[index]


def test_data_sets_are_calibration(encoder):
    model, reference = sentence_model(encoder), sentence_model(encoder)
    compress(model, Texts())
    compress(reference, TEXTS)
    assert torch.equal(vectors(model), vectors(reference))


def test_few_texts_are_five_batches_and_prompts_count(encoder):
    prompts = {"prompts": {"query": "the old "}, "default_prompt_name": "query"}
    model, reference = sentence_model(encoder, **prompts), sentence_model(encoder)
    compress(model, TEXTS[:30])
    batches = [["the old " + sentence for sentence in TEXTS[i : i + 6]] for i in range(0, 30, 6)]
    compress(reference, [reference.preprocess(batch) for batch in batches])
    assert torch.equal(vectors(model), vectors(reference, ["the old " + sentence for sentence in TEXTS[:20]]))


@pytest.mark.parametrize("first_line", ["import panther", pytest.param("import panther.nn", marks=pytest.mark.slow)])
def test_save_pretrained_and_a_fresh_process(first_line, encoder, tmp_path):
    model = sentence_model(encoder, modules.Dense(32, 16))
    report = compress(model, TEXTS)
    (dense,) = [entry for entry in report.skipped if entry.name == "2.linear"]
    assert dense.reason.startswith("is outside of the transformers model")
    model.save_pretrained(str(tmp_path / "small"))
    assert torch.equal(vectors_elsewhere(tmp_path / "small", tmp_path / "vectors", first_line), vectors(model))
    inner = transformers.AutoModel.from_pretrained(tmp_path / "small")
    assert torch.equal(pr.from_pretrained(tmp_path / "small").embeddings.word_embeddings.weight,
                       inner.embeddings.word_embeddings.weight)  # fmt: skip


def test_a_further_module_is_compressed_if_its_type_is_named(encoder, tmp_path):
    dense = modules.Dense(32, 24)
    model = sentence_model(encoder, dense)
    compress(model, TEXTS, include=torch.nn.Linear)
    assert type(dense.linear).__name__ in ("LowRankLinear", "QuantizedLinear")
    pr.save_compressed(model, tmp_path)
    loaded = pr.load_compressed(tmp_path, sentence_model(encoder, modules.Dense(32, 24)))
    assert torch.equal(vectors(loaded), vectors(model))


@pytest.mark.parametrize("layout", ["root", "0_Transformer"])
def test_panther_compress_keeps_every_module(layout, encoder, tmp_path, monkeypatch, capsys):
    """1_Pooling was lost, and SentenceTransformer raised a TypeError; older folders have the model in a sub-folder."""
    monkeypatch.chdir(tmp_path)
    source = sentence_model(encoder, modules.Dense(32, 16))
    source.save_pretrained("large")
    if layout != "root":
        in_sub_folder(tmp_path / "large", layout)
    (tmp_path / "text.txt").write_text("\n".join(TEXTS))
    command = ["compress", "large", "--budget", "0.4", "--calibration", "text.txt", "--out", "small", "--forms", "int8"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:] == [
        "or, with checksums verified:", "import panther as pr",
        f"model = pr.from_pretrained({'small' if layout == 'root' else 'small/0_Transformer'!r})",
    ]  # fmt: skip
    assert lines[lines.index("import panther, sentence_transformers") + 1] == (
        "model = sentence_transformers.SentenceTransformer('small')"
    )
    copied = {str(path.relative_to(tmp_path / "small")) for path in (tmp_path / "small").rglob("*") if path.is_file()}
    assert {"modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors"} <= copied
    small = sentence_transformers.SentenceTransformer("small", device="cpu")
    assert type(small[0].model.encoder.layer[0].output.dense).__name__ == "QuantizedLinear"
    error = (vectors(small) - vectors(source)).norm() / vectors(source).norm()
    assert 0 < error < 0.05
    assert torch.equal(vectors_elsewhere("small", tmp_path / "vectors"), vectors(small))


def in_sub_folder(folder, name):
    """Move the files of the model to a sub-folder, as sentence-transformers saved it before version 1."""
    (folder / name).mkdir()
    at_the_root = ("modules.json", "config_sentence_transformers.json", "README.md")
    for path in folder.iterdir():
        if path.is_file() and path.name not in at_the_root:
            path.rename(folder / name / path.name)
    listed = json.loads((folder / "modules.json").read_text())
    listed[0]["path"] = name
    (folder / "modules.json").write_text(json.dumps(listed))


@pytest.mark.slow
def test_a_folder_block_by_block(encoder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sentence_model(encoder).save_pretrained("large")
    in_sub_folder(tmp_path / "large", "0_Transformer")
    (tmp_path / "text.txt").write_text("\n".join(TEXTS))
    command = ["compress", "large", "--budget", "0.4", "--calibration", "text.txt", "--forms", "int8", "--out"]
    assert main([*command, "whole"]) == 0
    assert main([*command, "streamed", "--stream"]) == 0
    both = [vectors(sentence_transformers.SentenceTransformer(name, device="cpu")) for name in ("whole", "streamed")]
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-4)


def test_a_cross_encoder(tmp_path):
    folder = saved_model(tmp_path / "bert", transformers.BertForSequenceClassification, num_labels=1)
    model = sentence_transformers.CrossEncoder(str(folder), device="cpu")
    pairs = list(zip(TEXTS[:100], TEXTS[100:], strict=True))
    report = compress(model, pairs)
    assert report.output == "output['scores']"
    model.save_pretrained(str(tmp_path / "small"))
    expected = torch.as_tensor(model.predict(pairs[:20]))
    elsewhere = vectors_elsewhere(tmp_path / "small", tmp_path / "scores", loader="CrossEncoder", texts=pairs[:20])
    assert torch.equal(elsewhere, expected)


def test_what_cannot_be_done_is_one_sentence(encoder, tmp_path, capsys):
    static = modules.StaticEmbedding(sentence_transformers.SentenceTransformer(str(encoder)).tokenizer, embedding_dim=8)
    model = sentence_transformers.SentenceTransformer(modules=[static], device="cpu")
    with pytest.raises(CompressionError, match=r"no layer to compress: '0\.embedding' is outside of the transformers"):
        compress(model, TEXTS)
    model.save_pretrained(str(tmp_path / "static"))
    (tmp_path / "text.txt").write_text("\n".join(TEXTS))
    arguments = ["--budget", "0.5", "--calibration", str(tmp_path / "text.txt"), "--out", str(tmp_path / "small")]
    assert main(["compress", str(tmp_path / "static"), *arguments]) == 2
    message = capsys.readouterr().err
    assert "holds no config.json: call pr.compress(sentence_transformers.SentenceTransformer(folder), ...)" in message
    with pytest.raises(CompressionError, match="not a str"):
        compress(sentence_model(encoder), TEXTS[0])
