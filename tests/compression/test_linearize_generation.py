"""Generation with linearized models of transformers: states of constant size against forwards without a cache."""

import copy
import pickle

import pytest
import torch

import panther as pr
from panther.nn.attention.decoding.cache import RunningStateLayer
from panther.nn.attention.interface import UnsupportedCallError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.extra

VOCABULARY, WIDTH = 61, 32
SMALL = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
MORE = {"intermediate_size": 2 * WIDTH, "max_position_embeddings": 2048, "num_key_value_heads": 2, "pad_token_id": 0}
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def fresh(family):
    torch.manual_seed(0)
    if family == "gpt2":
        sizes = {"n_positions": 64, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, **sizes)).eval()
    name = {"llama": "Llama", "qwen": "Qwen2"}[family]
    config = getattr(transformers, f"{name}Config")(**SMALL, **MORE)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def linearized(family="llama", **settings):
    """A model in float64, with maps that are far from uniform."""
    model = fresh(family)
    pr.linearize_(model, num_features=6, window=4, **settings)
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if ".linear_attention." in name:
            torch.nn.init.normal_(parameter, std=0.5)
        elif parameter.dim() == 2 and "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.3)  # Otherwise the next token hardly depends on earlier tokens.
    return model.double().eval()


def prompts(pads=(0, 0), length=21):
    tokens = torch.randint(1, VOCABULARY, (len(pads), length), generator=torch.Generator().manual_seed(2))
    mask = torch.arange(length) >= torch.tensor(pads)[:, None]
    return tokens * mask, mask.long()


def tensors_of(layer):
    return [x for x in layer.state if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("pads", [(0, 0), (5, 0), (1, 13)])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen"])
def test_generation_equals_forwards_without_a_cache(family, beams, pads):
    model, (tokens, mask) = linearized(family), prompts(pads)
    options = GREEDY | {"max_new_tokens": 25, "num_beams": beams, "num_return_sequences": min(beams, 2)}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    result = model.generate(tokens, attention_mask=mask, **options)
    expected = model.generate(tokens, attention_mask=mask, use_cache=False, **options)
    assert torch.equal(result.sequences, expected.sequences)
    for ours, theirs in zip(result.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)
    layers = result.past_key_values.layers
    assert all(isinstance(layer, RunningStateLayer) for layer in layers)
    assert result.past_key_values.get_seq_length() == tokens.shape[1] + 24
    assert {x.numel() for x in tensors_of(layers[0])} == {x.numel() for x in tensors_of(layers[1])}


def read(model, tokens, mask, chunks, cache=None):
    """Return the logits of a sequence that is read in chunks, and its cache."""
    positions, logits, start = (mask.cumsum(-1) - 1).clamp_min(0), [], 0
    with torch.no_grad():
        for chunk in tokens.split(chunks, 1):
            stop = start + chunk.shape[1]
            result = model(
                chunk, attention_mask=mask[:, :stop], position_ids=positions[:, start:stop], past_key_values=cache,
                use_cache=True,
            )  # fmt: skip
            cache, start = result.past_key_values, stop
            logits.append(result.logits)
    return torch.cat(logits, 1), cache


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("pads", [(0, 0), (7, 2)])
@pytest.mark.parametrize("chunks", [1, 5, [3, 1, 17], [20, 1]])
def test_a_prompt_in_chunks(chunks, pads, implementation):
    model, (tokens, mask) = linearized(), prompts(pads)
    model.set_attn_implementation(implementation)
    for module in model.modules():
        if hasattr(module, "linear_attention"):
            assert module.config._attn_implementation == "panther_linear"
    mask[1, 9] = 0  # a masked token in the middle
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
    logits, cache = read(model, tokens, mask, chunks)
    real = mask.bool()
    torch.testing.assert_close(logits[real], whole[real], rtol=1e-8, atol=1e-8)
    sizes = [x.shape for x in tensors_of(cache.layers[0])]
    _, cache = read(model, *prompts((0, 0), length=50), 25)
    assert [x.shape for x in tensors_of(cache.layers[0])] == sizes


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("exact", [0, 1])
def test_layers_with_softmax_attention_beside_states(family, exact):
    """A mask is made for all layers together, with as many keys as the layers with softmax attention have."""
    names = [f"*layers.{exact}*", f"*h.{exact}.*"]
    model, (tokens, mask) = linearized(family, exclude=names), prompts((5, 0))
    kinds = [isinstance(layer, RunningStateLayer) for layer in read(model, tokens, mask, 21)[1].layers]
    assert kinds == [exact == 1, exact == 0]
    options = GREEDY | {"max_new_tokens": 9}
    expected = model.generate(tokens, attention_mask=mask, use_cache=False, **options)
    assert torch.equal(model.generate(tokens, attention_mask=mask, **options), expected)
    for chunks in (1, [10, 11]):
        logits, _ = read(model, tokens, mask, chunks)
        torch.testing.assert_close(logits[:, -1], read(model, tokens, mask, 21)[0][:, -1], rtol=1e-8, atol=1e-8)


def test_a_step_reads_one_token():
    """Time and memory do not depend on the length: neither keys nor masks grow."""
    model, (tokens, mask) = linearized(), prompts((5, 0))
    widths = []

    def look(module, args, kwargs):
        widths.append(args[1].shape[-2] if len(args) > 1 else kwargs["k"].shape[-2])

    attention = model.model.layers[1].self_attn.linear_attention
    step = attention.step
    attention.step = lambda *args, **kwargs: (look(None, args, kwargs), step(*args, **kwargs))[1]
    masks = []
    handle = model.model.layers[1].register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    model.generate(tokens, attention_mask=mask, max_new_tokens=6, **GREEDY)
    handle.remove()
    assert widths == [1] * 5
    assert masks[1:] == [None] * 5


def test_caches_that_are_copied_repeated_and_selected():
    model, (tokens, mask) = linearized(), prompts((5, 0))
    more = torch.randint(1, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(7))
    longer, longer_mask = torch.cat((tokens, more), 1), torch.cat((mask, torch.ones_like(more)), 1)
    expected = read(model, longer, longer_mask, 27)[0][:, -6:]
    _, cache = read(model, tokens, mask, 21)

    def continued(cache, rows):
        positions = (longer_mask.cumsum(-1) - 1)[rows, -6:]
        with torch.no_grad():
            options = {"attention_mask": longer_mask[rows], "position_ids": positions, "past_key_values": cache}
            return model(more[rows], **options).logits

    rows = torch.tensor([0, 1])
    for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        torch.testing.assert_close(continued(copied, rows), expected, rtol=1e-8, atol=1e-8)
    repeated = copy.deepcopy(cache)
    repeated.batch_repeat_interleave(2)
    rows = torch.tensor([0, 0, 1, 1])
    torch.testing.assert_close(continued(repeated, rows), expected[rows], rtol=1e-8, atol=1e-8)
    for indices in (torch.tensor([1]), torch.tensor([False, True])):
        selected = copy.deepcopy(cache)
        selected.batch_select_indices(indices)
        torch.testing.assert_close(continued(selected, torch.tensor([1])), expected[1:], rtol=1e-8, atol=1e-8)
    cache.reset()
    assert cache.get_seq_length() == 0
    again, _ = read(model, longer, longer_mask, 27, cache)
    torch.testing.assert_close(again[:, -6:], expected, rtol=1e-8, atol=1e-8)


def test_what_a_state_cannot_do_is_refused():
    model, (tokens, mask) = linearized(), prompts((0,))
    _, cache = read(model, tokens, mask, 21)
    cache.crop(0)
    with pytest.raises(ValueError, match=r"crop\(-1\): linear attention keeps sums over its 21 tokens"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="keeps sums"):
        model.generate(tokens, attention_mask=mask, prompt_lookup_num_tokens=3, max_new_tokens=9, **GREEDY)
    both_ways = torch.ones(1, 1, 3, 24, dtype=torch.bool)
    with pytest.raises(UnsupportedCallError, match="attends to later tokens"):
        model(tokens[:, :3], attention_mask=both_ways, past_key_values=cache)


def test_a_module_that_keeps_its_keywords_is_refused():
    model, (tokens, mask) = linearized(), prompts((0,))
    _, cache = read(model, tokens, mask, 21)
    layer = cache.layers[0]
    layer.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8))
    with pytest.raises(RuntimeError, match="has no state to continue from: pass use_cache=False"):
        layer.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8))


@pytest.mark.parametrize("lazy", [True, False])
def test_caches_of_the_caller(lazy):
    model, (tokens, mask) = linearized(), prompts((5, 0))
    cache = transformers.DynamicCache() if lazy else transformers.DynamicCache(config=model.config)
    expected, _ = read(model, tokens, mask, 21)
    logits, cache = read(model, tokens, mask, 5, cache)
    assert all(isinstance(layer, RunningStateLayer) for layer in cache.layers)
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=1e-8, atol=1e-8)
    begun = transformers.DynamicCache(config=model.config)
    exact = fresh("llama").double()
    read(exact, tokens, mask, 21, begun)  # Keys and values of softmax attention are continued as they are.
    logits, _ = read(model, *prompts((0, 0), 22), [21, 1], None)
    with torch.no_grad():
        model(tokens[:, :1], past_key_values=begun)
    assert not any(isinstance(layer, RunningStateLayer) for layer in begun.layers)


@pytest.mark.parametrize("kernel", ["hermite", "oprf"])
def test_attention_by_random_features_generates(kernel):
    from panther.tuning.attention import replacement_of

    model, (tokens, mask) = fresh("llama"), prompts((5, 0))
    for i in (0, 1):
        name = f"model.layers.{i}.self_attn"
        settings = {name: {"kernel_fn": kernel, "num_random_features": 16}}
        (new,) = replacement_of(dict(model.named_modules()), settings, 3).values()
        model.set_submodule(name, new.eval())
    model.double()
    options = GREEDY | {"max_new_tokens": 12, "num_beams": 2}
    result = model.generate(tokens, attention_mask=mask, **options)
    assert torch.equal(result, model.generate(tokens, attention_mask=mask, use_cache=False, **options))


def test_float32_after_a_thousand_tokens():
    model = fresh("llama")
    pr.linearize_(model, num_features=6, window=32)
    tokens = torch.randint(1, VOCABULARY, (1, 1000), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(tokens)
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
    logits, _ = read(model, tokens, mask, [900, *[1] * 100])
    assert ((logits - whole).norm() / whole.norm()).item() < 1e-5
