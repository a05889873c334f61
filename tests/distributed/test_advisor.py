from itertools import product

import pytest
import torch
from covering import half_of

import panther as pr
from panther.distributed import ModelStats, choose_parallelism_strategy
from panther.distributed.advisor.measured import _loss_of_tokens, plain_transformer


def guide(model_size, num_gpus, memory_per_gpu):
    """The rules as the guide has them."""
    strategies = []
    if model_size * 4 < memory_per_gpu * 0.7:
        strategies.append("data_parallel")
    if model_size * 4 > memory_per_gpu:
        strategies.append("model_parallel")
    if num_gpus >= 4:
        strategies.append("tensor_parallel")
    if num_gpus >= 8 and model_size * 4 > memory_per_gpu * 0.5:
        strategies.append("hybrid_parallel")
    return strategies


@pytest.mark.parametrize("size", [1, 10**9, 15 * 10**8, 2 * 10**9, 25 * 10**8, 35 * 10**8, 10**11])
@pytest.mark.parametrize("gpus", [1, 3, 4, 7, 8, 64])
@pytest.mark.parametrize("memory", [8e9, 10**10, 14e9])
def test_the_guide_s_rules(size, gpus, memory):
    assert choose_parallelism_strategy(size, gpus, memory) == guide(size, gpus, memory)


def test_it_is_at_the_top_and_checks_what_it_gets():
    assert pr.choose_parallelism_strategy is choose_parallelism_strategy
    with pytest.raises(ValueError, match="num_gpus=0 must be positive"):
        choose_parallelism_strategy(1, 0, 1)
    with pytest.raises(TypeError, match="memory_per_gpu must be a number, not str"):
        choose_parallelism_strategy(1, 1, "80GB")


@pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")
@pytest.mark.parametrize(
    ("layers", "sketch", "tp"),
    [
        *half_of([3], [None, 2], [1, 2, 3]),
        *(pytest.param(1, *case, marks=pytest.mark.slow) for case in product([None, 2], [1, 2, 3])),
    ],
)
def test_layers_of_a_transformer_have_the_figures_of_the_first(layers, sketch, tp):
    sizes = {"hidden": 12, "heads": 6, "ffn": 20, "vocab": 31, "sequence": 5}
    stats = ModelStats.transformer(**sizes, layers=layers, sketch=sketch).shard(tp)
    with torch.device("meta"):
        model = plain_transformer(12, layers, 6, 20, 31, sketch)
    tokens = torch.empty(1, 5, dtype=torch.int64, device="meta")
    assert stats == ModelStats.of(model, tokens, loss_fn=_loss_of_tokens).shard(tp)
