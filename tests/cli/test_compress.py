"""panther compress as a user meets it: a folder of transformers, a function that returns a model, and every error."""

import json
import re
import signal
import sys
import warnings
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import waits

import panther as pr
from panther.cli import main
from panther.compression.calibration.runner import logged_items
from panther.errors import NumericalWarning, PantherError, PerformanceWarning, install_command
from panther.nn import LowRankLinear, QuantizedConv2d
from panther.nn.sketch_record import plain_state

ROOT = Path(__file__).resolve().parents[2]
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards quietly box five grey mice near old river banks"
NUMBERS = torch.Generator().manual_seed(0)
LINES = [
    " ".join(WORDS.split()[i] for i in torch.randint(21, (int(n),), generator=NUMBERS))
    for n in torch.randint(3, 20, (60,), generator=NUMBERS)
]

MODELS = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 10)
    )

def net_without_batches():
    return net(), None

def batches():
    return list(torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(0)).split(8))

def both():
    return net(), batches()

def number():
    return 3

def raises():
    raise RuntimeError("no weights here")

LIMIT = 3
"""


STUCK = """
import os, signal, torch
from torch import nn

class Stuck(nn.Linear):
    def forward(self, x):
        os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(x)

def both():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), Stuck(64, 64))
    return model, list(torch.randn(40, 64).split(8))
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder with a text, in which the command runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("\n\n".join(LINES), encoding="utf-8")
    return tmp_path


@pytest.fixture
def models(here, monkeypatch):
    """The same, with a module of functions."""
    (here / "my_models.py").write_text(MODELS)
    yield here
    sys.modules.pop("my_models", None)


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def bert(transformers, tmp_path_factory):
    """A folder with a small BERT and a tokenizer that knows the words above."""
    tokenizer = save_tokenizer(transformers, folder := tmp_path_factory.mktemp("models") / "bert")
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    torch.manual_seed(0)
    save(transformers, transformers.BertModel(config), folder)
    return folder


def save(transformers, model, folder):
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)


def save_tokenizer(transformers, folder, **more):
    tokenizers = pytest.importorskip("tokenizers")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer_object = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
    tokenizer_object.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer_object.train_from_iterator(
        [WORDS], tokenizers.trainers.WordLevelTrainer(special_tokens=special, show_progress=False)
    )
    tokenizer_object.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    kinds = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"} | more
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer_object, **kinds)
    tokenizer.save_pretrained(folder)
    return tokenizer


def copied(folder, to, *names):
    to.mkdir()
    for name in names:
        (to / name).write_bytes((folder / name).read_bytes())
    return to


def refusal(capsys, *args, status=2):
    """The sentence on standard error of a command that fails; there is nothing else on it."""
    assert main(["compress", *map(str, args)]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    *phases, last = captured.err.splitlines()
    assert all(line.endswith(" to do") for line in phases), captured.err
    assert last.startswith("panther: error: ")
    return last.removeprefix("panther: error: ").rstrip()


def test_a_folder_of_transformers(bert, here, transformers, capsys):
    command = ["compress", str(bert), "--budget", "0.5", "--calibration", "text.txt", "--out", "small", "--max-length"]
    command = [*command, "64", "--forms", "low_rank", "--allow-slower"]
    assert main([*command, "--heal", "3", "--report", "report.json", "--plot", "report.svg"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("whole model")
    assert "kept dense: embeddings.word_embeddings (Embedding)" in out
    *_, imports, by_transformers, _, first, second = out.splitlines()
    assert imports.startswith("import panther, transformers  # without panther, ")
    assert by_transformers == "model = transformers.BertModel.from_pretrained('small')"
    assert second == "model = pr.from_pretrained('small')"
    names: dict = {}
    exec(f"{first}\n{second}", names)
    model = names["model"]
    assert type(model) is transformers.BertModel
    assert not model.training
    assert type(model.encoder.layer[0].output.dense) is LowRankLinear

    tokenizer = transformers.AutoTokenizer.from_pretrained("small", local_files_only=True)
    original = transformers.BertModel.from_pretrained(bert)
    batch = tokenizer(LINES[:8], padding=True, truncation=True, max_length=16, return_tensors="pt")
    with torch.no_grad():
        wanted, found = original(**batch).last_hidden_state, model(**batch).last_hidden_state
    assert (found - wanted).norm() < 0.3 * wanted.norm()

    report = json.loads((here / "report.json").read_text())
    assert report["eligible_ratio"] <= 0.5
    assert report["healed"]["steps"] == 3
    assert "<svg" in (here / "report.svg").read_text()
    assert {path.name for path in (here / "small").iterdir()} == {
        "config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "panther.json", "README.md",
    }  # fmt: skip
    card = (here / "small" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: panther-sketch")
    assert "A BertModel of bert, compressed by Panther" in card
    assert "- Asked for: --budget 0.5." in card
    assert f"after healing {report['healed']['error']:.3g}" in card
    import_module("panther.integrations.transformers")
    again = transformers.AutoModel.from_pretrained("small")  # as the card says
    assert torch.equal(again(**batch).last_hidden_state, found)
    assert main(["compress", "small", "--budget", "0.5", "--calibration", "text.txt", "--out", "smaller"]) == 2
    assert "small holds a model that is compressed or quantized already" in capsys.readouterr().err

    assert main([*command[:-1], "--seed", "1"]) == 2  # what is there stays
    assert "--out small is not empty" in capsys.readouterr().err


def test_a_folder_block_by_block(bert, here, transformers, capsys):
    command = ["compress", str(bert), "--budget", "0.5", "--calibration", "text.txt", "--max-length", "64"]
    command += ["--forms", "low_rank", "--out"]
    (here / "scratch").mkdir()
    assert main([*command, "streamed", "--stream", "--scratch-dir", "scratch", "--report", "report.json"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("whole model")
    assert out.rstrip().endswith("model = pr.from_pretrained('streamed')")
    assert not list((here / "scratch").iterdir())
    assert main([*command, "small", "--allow-slower"]) == 0
    capsys.readouterr()
    streamed, small = (
        transformers.AutoModel.from_pretrained(here / name).state_dict() for name in ("streamed", "small")
    )
    assert streamed.keys() == small.keys()
    for name, tensor in small.items():
        torch.testing.assert_close(streamed[name], tensor, rtol=1e-3, atol=1e-4)
    names = {path.name for path in (here / "small").iterdir()}
    assert {path.name for path in (here / "streamed").iterdir()} == names
    options = [str(bert), "--budget", "0.5", "--calibration", "text.txt", "--out", "more"]
    assert "heal needs the whole model in memory" in refusal(capsys, *options, "--stream", "--heal", "2")
    assert "method='svd' needs no batches" in refusal(capsys, *options, "--stream", "--method", "svd")
    assert "--scratch-dir is for --stream" in refusal(capsys, *options, "--scratch-dir", "scratch")
    assert "is not a folder" in refusal(capsys, "module:function", *options[1:], "--stream")
    assert not (here / "more").exists()


@pytest.mark.extra
def test_one_process_compresses(bert, here, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    options = [str(bert), "--bits", "6", "--calibration", "long.txt", "--out", "memory"]
    assert "one process compresses a model, and 2 are started: start one" in refusal(capsys, *options)


@pytest.mark.extra
def test_an_interruption_leaves_no_model_without_its_tokenizer(bert, here, monkeypatch):
    def interrupted(model, out):
        raise PantherError("interrupted")

    monkeypatch.setattr(pr, "save_compressed", interrupted)
    command = ["compress", str(bert), "--budget", "0.5", "--method", "svd", "--out", "small", "--forms", "int8"]
    assert main(command) == 2
    names = {path.name for path in (here / "small").iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json", "README.md"}


@pytest.mark.extra
@pytest.mark.slow
def test_it_runs_in_a_checkout(bert, here):
    """There transformers takes the folder kernels/ for the package of that name, which it looks for."""
    options = ["--budget", "0.5", "--method", "svd", "--out", here / "small"]
    command = [sys.executable, "-m", "panther", "compress", bert, *options]
    done = waits.run(command, cwd=ROOT)
    assert (ROOT / "kernels").is_dir()
    assert done.returncode == 0, done.stderr
    assert (here / "small" / "panther.json").is_file()


def test_a_causal_model_is_calibrated_on_windows(here, transformers, capsys):
    tokenizer = save_tokenizer(transformers, folder := here / "gpt", pad_token=None)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=2, eos_token_id=3
    )
    torch.manual_seed(0)
    save(transformers, transformers.GPT2LMHeadModel(config), folder)
    args = ["--calibration", "text.txt", "--out", "small", "--max-error", "0.2"]
    assert main(["compress", "gpt", *args, "--exclude", "*.c_attn", "*.attn.c_proj", "*.wte"]) == 0
    out = capsys.readouterr().out
    assert "kept dense: lm_head (Linear) shares its weight with 'transformer.wte' (Embedding)" in out
    assert "kept dense: transformer.h.0.attn.c_attn (Conv1D) is excluded" in out
    names: dict = {}
    exec("\n".join(out.splitlines()[-2:]), names)
    model = names["model"]
    assert type(model.transformer.h[0].mlp.c_fc) is LowRankLinear
    assert model.lm_head.weight is model.transformer.wte.weight
    assert (here / "small" / "generation_config.json").is_file()


def test_windows_have_no_padding_and_begin_as_texts_do(here, transformers):
    from panther.cli._transformers import text_batches

    tokenizer = save_tokenizer(transformers, here / "gpt", pad_token=None, bos_token="[CLS]")
    config = transformers.GPT2Config(vocab_size=30, n_positions=16, n_embd=8, n_layer=1, n_head=1, bos_token_id=2)
    batches = text_batches(here / "gpt", here / "text.txt", transformers.GPT2LMHeadModel(config), 64, 16)
    assert all(batch.keys() == {"input_ids"} and batch["input_ids"].shape[1] == 16 for batch in batches)
    assert all((batch["input_ids"][:, 0] == 2).all() for batch in batches)
    tokens = torch.cat([batch["input_ids"][:, 1:].flatten() for batch in batches])
    exact = torch.tensor(tokenizer(" ".join(LINES), add_special_tokens=False)["input_ids"])
    assert torch.equal(tokens, exact[: len(tokens)])
    assert len(exact) - len(tokens) < 15


@pytest.mark.parametrize(
    ("kind", "positions", "length"),
    [
        ("Roberta", {"max_position_embeddings": 34, "pad_token_id": 1}, 32),
        ("XLMRoberta", {"max_position_embeddings": 34, "pad_token_id": 3}, 30),
        ("MPNet", {"max_position_embeddings": 34, "pad_token_id": 1}, 32),
        ("Bert", {"max_position_embeddings": 34}, 34),
        ("OPT", {"max_position_embeddings": 30, "ffn_dim": 16, "word_embed_proj_dim": 8, "pad_token_id": 1}, 30),
        ("GPT2", {"n_positions": 20}, 20),
    ],
)
def test_texts_take_no_more_tokens_than_the_model_has_positions_for(here, transformers, kind, positions, length):
    """Positions of RoBERTa begin after the number of its padding token: "index 34 is out of bounds" was the error."""
    from panther.cli._transformers import text_batches, usable_positions

    save_tokenizer(transformers, here / "folder")
    (here / "long.txt").write_text("\n".join(" ".join(LINES) for _ in range(6)))
    size = {
        "vocab_size": 30,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 16,
    }
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**size, **positions)).eval()
    assert usable_positions(model) == length
    batches = text_batches(here / "folder", here / "long.txt", model, 128, 4)
    assert max(batch["input_ids"].shape[1] for batch in batches) == length
    for batch in batches:
        model(**batch)


@pytest.mark.parametrize("function", ["net", "net_without_batches"])
def test_a_function_that_returns_a_model(models, monkeypatch, capsys, function):
    args = [f"my_models:{function}", "--calibration", "my_models:batches", "--max-bytes", "20000"]
    assert main(["compress", *args, "--out", "small"]) == 0
    assert {path.name for path in (models / "small").iterdir()} == {"model.safetensors", "panther.json"}
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert lines[0] == f"import panther as pr; from my_models import {function}"
    monkeypatch.syspath_prepend(str(models))  # as where a user runs Python in that folder
    sys.modules.pop("my_models", None)
    names: dict = {}
    exec("\n".join(lines), names)
    model = names["model"]
    assert type(model[2]) is QuantizedConv2d
    assert not model.training
    assert model(torch.ones(1, 3, 8, 8)).isfinite().all()
    assert sum(value.numel() * value.element_size() for value in plain_state(model).values()) <= 20000


def test_a_function_that_returns_a_model_and_batches(models, capsys, monkeypatch):
    assert main(["compress", "my_models:both", "--budget", "0.5", "--forms", "low_rank", "--out", "small"]) == 0
    assert str(models) not in sys.path
    lines = capsys.readouterr().out.splitlines()[-2:]
    monkeypatch.syspath_prepend(models)
    names: dict = {}
    exec("\n".join(lines), names)
    assert any(type(module) is LowRankLinear for module in names["model"])
    # What --calibration names goes before what the model's function returns.
    with_other = ["--calibration", "my_models:number"]
    assert main(["compress", "my_models:both", "--budget", "0.5", "--out", "other", *with_other]) == 2
    assert "calibration must be a list" in capsys.readouterr().err


def test_a_warning_becomes_a_note(models, capsys, monkeypatch):
    def warns(*args, **options):
        warnings.warn("2 layers are slower", PerformanceWarning, stacklevel=1)
        warnings.warn("the report has it", NumericalWarning, stacklevel=1)
        return compress(*args, **options)

    compress = pr.compress
    monkeypatch.setattr(pr, "compress", warns)
    assert main(["compress", "my_models:net", "--budget", "0.3", "--method", "svd", "--out", "small"]) == 0
    err = capsys.readouterr().err
    assert err.startswith("panther: note: 2 layers are slower\n")
    assert "the report has it" not in err


def test_no_calibration_where_none_is_needed(models, capsys):
    assert main(["compress", "my_models:net", "--budget", "0.3", "--method", "svd", "--out", "small"]) == 0
    assert "method=svd, allocate=uniform" in capsys.readouterr().out


def test_forms_and_bits(models, capsys):
    flags = ["--bits", "6", "--forms", "low_rank", "int4", "int6", "--report", "report.json"]
    assert main(["compress", "my_models:both", "--out", "out", *flags]) == 0
    layers = json.loads(Path("report.json").read_text())["layers"]
    assert layers[-1]["form"] in ("int4", "int6")
    assert sum(8 * layer["bytes_after"] for layer in layers) <= 6 * sum(layer["bytes_before"] / 4 for layer in layers)
    capsys.readouterr()
    assert main(["compress", "my_models:both", "--out", "other", "--bits", "6", "--forms", "int7"]) == 2
    assert "form 'int7' is unknown" in capsys.readouterr().err


def test_the_same_seed_gives_the_same_file(models, capsys):
    for out in ("one", "two"):
        assert main(["compress", "my_models:both", "--budget", "0.5", "--seed", "7", "--out", out]) == 0
    assert (models / "one/model.safetensors").read_bytes() == (models / "two/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["m", "--out", "o"],
            "one of the arguments --budget --bits --max-bytes --max-error --speedup --max-latency-ms is required",
        ),
        (["m", "--budget", "0.5"], "the following arguments are required: --out"),
        (["m", "--out", "o", "--budget", "1", "--max-bytes", "9"], "not allowed with argument --budget"),
        (["m", "--out", "o", "--budget", "1", "--max-length", "1"], "argument --max-length: 1 must be at least 2"),
    ],
)
def test_bad_flags_exit_with_2(args, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["compress", *args])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--budget", "1.5"], "budget=1.5 must be a fraction in (0, 1]"),
        (["--budget", "0"], "budget=0 must be a fraction in (0, 1]"),
        (["--budget", "half"], "budget must be a number, not str"),
        (["--max-error", "inf"], "max_error=inf must be positive and finite"),
        (["--speedup", "0.5"], "speedup=0.5 must be finite and at least 1"),
        (["--budget", "1", "--method", "magic"], "method='magic' is unknown: use one of 'two_sided', 'activation', "),
        (["--budget", "1", "--allocate", "all"], "allocate='all' is unknown: use one of 'global', 'uniform'"),
        (["--budget", "1", "--method", "svd", "--no-measure-speed", "--no-allow-slower"], "needs measured times"),
        (["--budget", "1", "--rank-multiple", "3"], "rank_multiple=3 must be even"),
    ],
)
@pytest.mark.usefixtures("models")
def test_settings_are_checked_before_the_model_is_loaded(args, message, capsys):
    assert message in refusal(capsys, "my_models:raises", "--out", "o", *args)


HALF = ("--budget", "0.5", "--out", "small")
TEXT = (*HALF, "--calibration", "text.txt")


def test_errors_of_folders(bert, here, capsys):
    assert refusal(capsys, "nothing", *TEXT) == (
        "nothing is not a folder, and not of the form module:function: give one of the two (nothing is downloaded)"
    )
    (here / "empty").mkdir()
    assert refusal(capsys, "empty", *TEXT).startswith("empty holds no config.json: give a folder that save_pretrained")
    copied(bert, here / "compressed", "config.json", "model.safetensors")
    (here / "compressed" / "panther.json").write_text("{}")
    assert refusal(capsys, "compressed", *TEXT).startswith(
        "compressed holds a model that is compressed or quantized already: compress the original"
    )
    copied(bert, here / "weightless", "config.json")
    assert "weightless holds no model.safetensors" in refusal(capsys, "weightless", *TEXT)
    copied(bert, here / "pickled", "config.json")
    (here / "pickled" / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    said = refusal(capsys, "pickled", *TEXT)
    assert "pytorch_model.bin, a pickle, which can run code and is not opened" in said
    assert said.endswith("transformers.BertModel.from_pretrained('pickled').save_pretrained('pickled')")
    assert not (here / "opened").exists()
    copied(bert, here / "mute", "config.json", "model.safetensors")
    assert refusal(capsys, "mute", *TEXT).startswith("mute holds no tokenizer, which text needs: save it there with")
    assert not (here / "small").exists()


def test_errors_of_what_a_folder_holds(bert, here, capsys):
    folder = copied(bert, here / "model", "config.json", "tokenizer.json", "tokenizer_config.json")
    weights = (bert / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-100])
    assert refusal(capsys, "model", *TEXT).startswith("model/model.safetensors is not a valid safetensors file (")
    (folder / "model.safetensors").write_bytes(weights)
    config = json.loads((bert / "config.json").read_text())

    def said(**changes):
        (folder / "config.json").write_text(json.dumps(config | changes))
        return refusal(capsys, "model", *TEXT)

    assert "does not fit the BertModel that its config.json describes" in said(num_hidden_layers=3)
    assert "embeddings.word_embeddings.weight" in said(vocab_size=99)
    for name in ("BirtModel", "BertTokenizer", "pipeline"):
        assert f"names the architecture {name} of the type 'bert', which transformers" in said(architectures=[name])
    code = {"model_type": "birt", "auto_map": {"AutoConfig": "code.Birt", "AutoModel": "code.BirtModel"}}
    for name in ("BertModel", "BirtModel"):
        assert "its code is in the folder, and runs if you trust it" in said(architectures=[name], **code)
    (folder / "config.json").write_text("{")
    assert "config.json cannot be used (" in refusal(capsys, "model", *TEXT)


def test_errors_of_the_text(bert, here, capsys):
    assert refusal(capsys, bert, *HALF, "--calibration", "nothing.txt") == (
        "--calibration nothing.txt is not a file, and not of the form module:function: give one of the two"
    )
    assert "method='two_sided' needs calibration" in refusal(capsys, bert, *HALF)
    assert "heal needs calibration" in refusal(capsys, bert, *HALF, "--method", "svd", "--heal", "3")
    path = here / "other.txt"
    for content, message in (
        (b" \n\n", "other.txt has no text in it: give one sample a line"),
        (b"the fox\n\nthe dog\n", "other.txt has 2 lines with text and needs at least 5, because a fifth is held out"),
        (b"the fox \xff", "other.txt is not text in UTF-8 (byte 8): convert it first"),
    ):
        path.write_bytes(content)
        assert message in refusal(capsys, bert, *HALF, "--calibration", "other.txt")


def test_errors_of_causal_and_two_part_models(here, transformers):
    from panther.cli._transformers import text_batches
    from panther.errors import PantherError

    save_tokenizer(transformers, here / "gpt", pad_token=None)
    config = transformers.GPT2Config(vocab_size=30, n_positions=512, n_embd=8, n_layer=1, n_head=1, bos_token_id=2)
    with pytest.raises(PantherError, match=r"has \d+ tokens, 1 windows of 512, and needs at least 5"):
        text_batches(here / "gpt", here / "text.txt", transformers.GPT2LMHeadModel(config), 512, 16)
    config = transformers.T5Config(vocab_size=30, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(PantherError, match="T5ForConditionalGeneration has an encoder and a decoder"):
        text_batches(here / "gpt", here / "text.txt", transformers.T5ForConditionalGeneration(config), 8, 16)


def test_errors_of_the_budget_and_the_outputs(bert, models, capsys, monkeypatch):
    function = ("my_models:both", "--budget", "0.5")
    said = refusal(capsys, "my_models:both", "--budget", "0.01", "--out", "small")
    assert "the smallest feasible budget is " in said
    smallest_budget = re.search(r"budget is (0\.\d+)", said)[1]
    assert main(["compress", "my_models:both", "--budget", smallest_budget, "--out", "least"]) == 0
    capsys.readouterr()
    assert "smallest feasible" in refusal(capsys, "my_models:both", "--max-bytes", "9", "--out", "small")
    said = refusal(capsys, *function, "--out", "small", "--method", "svd", "--allocate", "global")
    assert said.startswith("allocate='global' needs method='two_sided'")
    assert "the model has no layer to compress" in refusal(capsys, *function, "--out", "small", "--include", "x*")

    assert refusal(capsys, *function, "--out", "least").startswith("--out least is not empty, and might hold another")
    assert refusal(capsys, *function, "--out", bert).startswith(f"--out {bert} is not empty")
    assert refusal(capsys, *function, "--out", "") == "--out is empty: name a folder"
    assert "--out text.txt cannot be written to (Not a directory)" in refusal(capsys, *function, "--out", "text.txt")
    said = refusal(capsys, *function, "--out", "small", "--report", "nowhere/report.json")
    assert said.startswith("--report nowhere/report.json cannot be written")
    said = refusal(capsys, *function, "--out", "small", "--plot", "report.doc")
    assert said.startswith("no plot can be written to 'report.doc': use one of the suffixes ")
    assert not (models / "small").exists()


def test_errors_of_functions(models, capsys):
    def said(spec, *more):
        return refusal(capsys, spec, *HALF, *more)

    assert said("no_models:net") == (
        "no_models:net: there is no module no_models, neither in the current folder nor installed: run this in the "
        "folder that holds no_models.py"
    )
    assert "the module my_models has no function nett: it has net, net_without_batches, batches, both" in said(
        "my_models:nett"
    )
    assert "has no function LIMIT" in said("my_models:LIMIT")
    assert said("my_models:number").startswith(
        "my_models:number returns a value of type int: it must return an nn.Module"
    )
    assert said("my_models:raises") == (
        f"my_models:raises failed: RuntimeError: no weights here (my_models.py, line {_line('no weights')})"
    )
    assert "no_batches:f: there is no module no_batches" in said("my_models:net", "--calibration", "no_batches:f")
    assert "--calibration text.txt is a text, and only a folder" in said("my_models:net", "--calibration", "text.txt")
    assert "calibration must be a list or a DataLoader" in said("my_models:net", "--calibration", "my_models:number")
    (models / "half_models.py").write_text("import torch\nimport no_such_package\n")
    assert said("half_models:f") == "half_models cannot be imported: it needs no_such_package, which is not installed"
    (models / "bad_models.py").write_text("1 / 0\n")
    assert said("bad_models:f") == (
        "bad_models cannot be imported: ZeroDivisionError: division by zero (bad_models.py, line 1)"
    )


def _line(code):
    return next(number for number, line in enumerate(MODELS.splitlines(), 1) if code in line)


def test_a_missing_transformers_names_its_install_line(here, capsys, monkeypatch):
    (here / "model").mkdir()
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert refusal(capsys, "model", *TEXT, status=1) == (
        f"transformers is needed here and is not installed: run {install_command('transformers')}"
    )


def test_a_class_in_the_place_of_a_function(models, capsys):
    (models / "my_models.py").write_text(
        MODELS + "\nclass Wrapped(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.inner = net()\n    def forward(self, x):\n        return {'logits': self.inner(x)}\n"
    )
    args = ["--calibration", "my_models:batches", "--method", "activation", "--include", "inner.[02]"]
    assert main(["compress", "my_models:Wrapped", "--budget", "0.5", "--out", "small", *args]) == 0
    assert "kept dense: inner.5 (Linear) is not included" in capsys.readouterr().out


def test_phases_are_lines_where_there_is_no_terminal(models, capsys):
    assert main(["compress", "my_models:both", "--budget", "0.5", "--out", "small"]) == 0
    lines = capsys.readouterr().err.splitlines()
    for phase in ("moments 1/1: 4 to do", "fits 1/1: 3 to do", "error: 1 to do"):
        assert f"panther: {phase}" in lines
    assert lines[-1] == "panther: writing to small"


def test_a_long_phase_says_what_is_left(monkeypatch, caplog):
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr("panther.compression.calibration.runner.time", SimpleNamespace(monotonic=lambda: next(clock)))
    with caplog.at_level("INFO", "panther"):
        assert list(logged_items(range(8), "moments")) == list(range(8))
    texts = [record.getMessage() for record in caplog.records]
    assert texts == ["moments: 8 to do", "moments: 2 of 8, 0:00:36 left", "moments: 5 of 8, 0:00:14 left"]


def test_sigterm_ends_it_with_a_sentence_and_no_files(here, capsys):
    (here / "stuck_model.py").write_text(STUCK, encoding="utf-8")
    assert main(["compress", "stuck_model:both", "--budget", "0.5", "--out", "small"]) == 143
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "panther: SIGTERM ended compress before its result was written"
    assert not (here / "small").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
