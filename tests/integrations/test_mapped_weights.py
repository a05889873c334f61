"""Folders of transformers that are loaded with all weights mapped: equal values, and no weight in the process's memory.

People expect a checkpoint larger than memory to load where its files are mapped. transformers maps what it need not
convert; experts that a file holds one by one and weights of a different dtype are in memory.
"""

import errno
import os
import sys

import pytest
import torch

from panther.errors import CompressionError, FormatError
from panther.files import tensors as tensor_files

transformers = pytest.importorskip("transformers")

from panther.integrations.folders import compress  # noqa: E402

SIZES = {"vocab_size": 300, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 320}
EXPERTS = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2}
QWEN = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 320, "shared_expert_intermediate_size": 320,
}  # fmt: skip
T5 = {"vocab_size": 300, "d_model": 256, "d_kv": 64, "d_ff": 320, "num_layers": 1, "num_heads": 4}
MODELS = {
    "llama": ("LlamaForCausalLM", {**EXPERTS, "tie_word_embeddings": True}),
    "mixtral": ("MixtralForCausalLM", {**EXPERTS, "num_local_experts": 4}),
    "qwen": ("Qwen2MoeForCausalLM", {**EXPERTS, **QWEN, "tie_word_embeddings": True}),
    "t5": ("T5ForConditionalGeneration", T5),  # its "wo" stays in float32
}


def save_model(kind, folder, **options):
    name, sizes = MODELS[kind]
    config = getattr(transformers, name).config_class(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(0)
    getattr(transformers, name)(config).save_pretrained(folder, **options)


def file_ranges():
    """Return the ranges of addresses at which files are mapped."""
    with open("/proc/self/maps") as maps:
        rows = [line.split(maxsplit=5) for line in maps]
    return [[int(end, 16) for end in row[0].split("-")] for row in rows if len(row) > 5 and row[5].startswith("/")]


def tensors_of(model):
    return {**dict(model.named_buffers()), **model.state_dict()}  # with buffers that are not saved


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", MODELS)
def test_values_are_those_of_transformers_and_weights_are_mapped(kind, dtype, tmp_path):
    source, folder = tmp_path / "source", tmp_path / "files"
    folder.mkdir()
    save_model(kind, source, max_shard_size="600KB" if dtype == "bfloat16" else "1GB")
    (folder / "mapped-by a killed process").touch()
    model = compress.mapped_from_pretrained(source, folder, dtype=dtype)
    expected = getattr(transformers, MODELS[kind][0]).from_pretrained(source, dtype=dtype)
    tensors, expected_tensors = tensors_of(model), tensors_of(expected)
    assert tensors.keys() == expected_tensors.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == expected_tensors[name].dtype
        assert tensor.stride() == expected_tensors[name].stride()
        assert torch.equal(tensor, expected_tensors[name]), name
    trained = [{name: p.requires_grad for name, p in each.named_parameters()} for each in (model, expected)]
    assert trained[0] == trained[1]  # by name, so tied weights are tied
    assert not list(folder.iterdir())
    if sys.platform == "linux":
        ranges = file_ranges()
        weights = {name: tensor for name, tensor in tensors.items() if tensor.nbytes >= 1 << 16}
        assert sum(tensor.nbytes for tensor in weights.values()) > 0.8 * sum(t.nbytes for t in tensors.values())
        for name, tensor in weights.items():
            assert any(begin <= tensor.data_ptr() < end for begin, end in ranges), name


def test_results_that_share_memory_stay_shared(tmp_path):
    base = torch.arange(40_000.0)
    with compress._ResultsInFiles(tmp_path):
        doubled = base * 2
        view = doubled.view(200, 200)
        view[0] = 1
        assert doubled[:200].eq(1).all()
        assert doubled.add_(1) is doubled
        transposed = view.T
        assert transposed.data_ptr() == view.data_ptr()
        filled = torch.empty(40_000)
        assert torch.mul(base, 3, out=filled) is filled
    assert torch.equal(doubled[200:], base[200:] * 2 + 1)
    assert torch.equal(filled, base * 3)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64], ids=str
)
def test_a_mapped_copy_has_the_values_of_any_dtype_and_no_file(dtype, tmp_path):
    tensor = (torch.arange(24).reshape(2, 3, 4) % 5).to(dtype).transpose(0, 1)
    copy = tensor_files.mapped_copy(tensor, tmp_path)
    assert copy.dtype is dtype
    assert torch.equal(copy.to(torch.complex128), tensor.to(torch.complex128))
    copy[0, 0, 0] = 1  # writes to a page of the process, and not to the file
    assert copy[0, 0, 0].item() == 1
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_sentence_and_leaves_settings_alone(tmp_path, monkeypatch):
    source, folder = tmp_path / "source", tmp_path / "files"
    folder.mkdir()
    save_model("mixtral", source)
    users_setting = os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")

    def full(tensor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tensor_files, "bytes_of", full)
    with pytest.raises(CompressionError, match=r"files cannot take the weights .*\(No space left on device\)"):
        compress.mapped_from_pretrained(source, folder)
    assert not list(folder.iterdir())
    assert os.environ.get("HF_DEACTIVATE_ASYNC_LOAD") == users_setting
    monkeypatch.undo()
    with pytest.raises(FormatError, match="there is no folder"):  # as from pr.from_pretrained
        compress.mapped_from_pretrained(tmp_path / "other", folder)
