"""Errors about wrong names say what to use: keyword arguments, and attributes of Panther's modules."""

import copy
import inspect
import pickle
import re
import warnings

import pytest
import torch
from torch import nn

import panther as pr
from panther._hints import check_keywords, explain_keywords

WEIGHTS = torch.linspace(-1, 1, 64).reshape(8, 8)
CALLS = {
    "SKLinear rank": (lambda: pr.nn.SKLinear(8, 8, rank=2), "did you mean 'low_rank'?"),
    "SKLinear W_init": (lambda: pr.nn.SKLinear(8, 8, 1, 2, W_init=WEIGHTS), "pass the weight to SKLinear.from_linear"),
    "SKLinear nbits": (lambda: pr.nn.SKLinear(8, 8, nbits=4), "use panther.nn.QuantizedLinear"),
    "SKConv2d rank": (lambda: pr.nn.SKConv2d(8, 8, 3, rank=2), "did you mean 'low_rank'?"),
    "LowRankLinear low_rank": (lambda: pr.nn.LowRankLinear(8, 8, low_rank=2), "did you mean 'rank'?"),
    "QuantizedLinear nbits": (lambda: pr.nn.QuantizedLinear(8, 8, nbits=4), "did you mean 'bits'?"),
    "attention dim": (lambda: pr.nn.RandMultiHeadAttention(dim=8, num_heads=2), "did you mean 'embed_dim'?"),
    "attention causal": (lambda: pr.nn.RandMultiHeadAttention(8, 2, causal=True), "did you mean 'iscausal'?"),
    "sketch random_state": (lambda: pr.sketch.SparseSketch(2, 8, random_state=0), "did you mean 'seed'?"),
    "svd n_components": (lambda: pr.linalg.randomized_svd(WEIGHTS, n_components=2), "did you mean 'k'?"),
    "svd q": (lambda: pr.linalg.randomized_svd(WEIGHTS, q=2), "did you mean 'k'?"),
    "svd niter": (lambda: pr.linalg.randomized_svd(WEIGHTS, 2, niter=2), "did you mean 'n_iter'?"),
    "svd n_oversamples": (lambda: pr.linalg.randomized_svd(WEIGHTS, 2, n_oversamples=2), "did you mean 'oversample'?"),
    "svd flip_sign": (lambda: pr.linalg.randomized_svd(WEIGHTS, 2, flip_sign=True), "leave it out"),
    "eigh rank": (lambda: pr.linalg.randomized_eigh(WEIGHTS, rank=2), "did you mean 'k'?"),
    "compress nbits": (lambda: pr.compress(nn.Linear(8, 8), nbits=4), "did you mean 'bits'?"),
    "compress dataset": (lambda: pr.compress(nn.Linear(8, 8), bits=4, dataset=[]), "did you mean 'calibration'?"),
    "compress rank": (lambda: pr.compress(nn.Linear(8, 8), rank=4), "use budget="),
    "compress load_in_4bit": (lambda: pr.compress(nn.Linear(8, 8), load_in_4bit=True), "use bits=4.25"),
    "compress targets": (lambda: pr.compress(nn.Linear(8, 8), bits=4, target_modules="a"), "did you mean 'include'?"),
    "compress ignore": (lambda: pr.compress(nn.Linear(8, 8), bits=4, ignore=["a"]), "did you mean 'exclude'?"),
    "tune n_trials": (lambda: pr.tune(nn.Linear(8, 8), len, n_trials=2), "did you mean 'trials'?"),
    "sketch_layers_ rank": (lambda: pr.sketch_layers_(nn.Linear(8, 8), rank=2), "SketchConfig(low_rank=64)"),
    "linearize_ features": (lambda: pr.linearize_(nn.Linear(8, 8), [], features=2), "did you mean 'num_features'?"),
    "load map_location": (lambda: pr.load_compressed("a", nn.Linear(8, 8), map_location="cpu"), "with .to(device)"),
    "save state_dict": (lambda: pr.save_compressed(nn.Linear(8, 8), "a", state_dict={}), "not its state_dict"),
    "unknown": (lambda: pr.linalg.cqrrpt(WEIGHTS, shade=1), "use some of M, gamma, rtol, seed, return_error"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_error_about_a_keyword_names_the_right_one(call):
    function, hint = call
    with pytest.raises(TypeError, match=rf"\(\) got an unexpected keyword argument '\w+': .*{re.escape(hint)}"):
        function()


ATTRIBUTES = {
    "panther.nn.Linear": "torch.nn",
    "panther.nn.SKLinaer": "did you mean 'SKLinear'?",
    "panther.nn.Linear4bit": "panther.nn.QuantizedLinear.from_linear",
    "panther.linalg.svd_lowrank": "panther.linalg.randomized_svd",
    "panther.linalg.PCA": "A - A.mean(0)",
    "panther.linalg.lstsq": "panther.linalg.sketch_lstsq",
    "panther.linalg.cg": "panther.linalg.pcg",
    "panther.linalg.hutchpp": "panther.linalg.trace",
    "panther.linalg.slogdet": "panther.linalg.logdet",
    "panther.linalg.Nystroem": "panther.linalg.rp_cholesky",
    "panther.linalg.IncrementalPCA": "panther.linalg.StreamingSVD",
    "panther.linalg.cur": "panther.linalg.interpolative",
    "panther.linalg.interp_decomp": "panther.linalg.interpolative",
    "panther.sketch.CountSketch": "panther.sketch.SparseSketch",
    "panther.sketch.FJLT": "panther.sketch.SRHT",
}


@pytest.mark.parametrize(("name", "hint"), ATTRIBUTES.items())
def test_the_error_about_an_attribute_names_the_right_one(name, hint):
    module, _, attribute = name.rpartition(".")
    with pytest.raises(AttributeError, match=rf"{module} has no attribute '{attribute}': .*{re.escape(hint)}"):
        eval(
            f"module.{attribute}", {"module": inspect.getmodule(pr) if module == "panther" else eval(f"pr{module[7:]}")}
        )
    with pytest.raises(ImportError, match=rf"cannot import name '{attribute}' from '{module}': .*{re.escape(hint)}"):
        exec(f"from {module} import {attribute}")


def test_advice_names_what_exists():
    from panther._hints import hints

    for module, advice in hints()["attributes"].items():
        for names, advice_text in advice.items():
            for path in re.findall(r"panther\.\w+(?:\.\w+)*", advice_text):
                if not path.startswith("panther.integrations"):
                    eval(path.replace("panther", "pr", 1))
            for name in names.split():
                assert not hasattr(eval(module.replace("panther", "pr", 1)), "__all__") or name not in eval(
                    f"{module.replace('panther', 'pr', 1)}.__all__"
                )


def test_the_decorator_keeps_the_signature_and_python_s_errors():
    @explain_keywords
    def scaled(matrix, factor=2, *, seed=None):
        return matrix * factor

    assert list(inspect.signature(scaled).parameters) == ["matrix", "factor", "seed"]
    assert scaled(3, factor=3) == 9
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'matrix'"):
        scaled()


def test_a_function_that_takes_all_keywords_is_left_alone():
    check_keywords(lambda **options: None, ["rank"])


def test_layers_keep_their_signature_and_are_copied_and_pickled():
    assert "low_rank" in inspect.signature(pr.nn.SKLinear).parameters
    layer = pr.nn.SKLinear(8, 8, num_terms=1, low_rank=1, seed=0)
    x = torch.ones(2, 8)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), layer(x))


@pytest.mark.parametrize(
    "make",
    [lambda: pr.nn.SKLinear(8, 8, 1, 8), lambda: pr.nn.LowRankLinear(8, 8, 8), lambda: pr.nn.MonarchLinear(8, 8, 8)],
    ids=["SKLinear", "LowRankLinear", "MonarchLinear"],
)
def test_a_warning_of_a_constructor_names_the_line_that_calls_it(make):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    assert [warning.filename for warning in caught] == [__file__]
