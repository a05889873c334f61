"""Signs drawn by the Triton kernel are those of the reference, bit for bit."""

import pytest
import torch
from panther.kernels import normal_block, reference, selection, sign_block, uniform_block, word_block

CASES = [
    (0, 0, 0, range(1), range(1)),
    (2**63 - 1, 2**32 - 1, 0x10001, range(5, 40), range(100, 900)),
    (2**64 - 1, 1, 9, range(17), range(127, 129)),
    (12345678901234567, 7, 3, range(2**31 - 3, 2**31 + 3), range(128)),
    (3, 1, 9, range(1), range(2**38, 2**38 + 200)),
    (3, 1, 9, range(4), range(5, 5)),
    (3, 1, 9, range(0), range(5)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_signs_are_the_references(device, case, dtype):
    drawn = sign_block(*case, dtype=dtype, device=device)
    assert drawn.device.type == device.type
    assert torch.equal(drawn.cpu(), reference.random_block("sign", *case, dtype=dtype, device="cpu"))


def test_operator_passes_opcheck(device):
    out = torch.empty(3, 200, device=device)
    torch.library.opcheck(torch.ops.panther.fill_block_.default, (out, "sign", 5, 0, 1, 2, 130, 1.0))


def test_operator_without_triton_draws_the_same():
    out = torch.empty(3, 200)
    torch.ops.panther.fill_block_(out, "sign", -1, 0, 1, 2, 130, 1.0)
    expected = reference.random_block(
        "sign", 2**64 - 1, 0, 1, range(2, 5), range(130, 330), dtype=torch.float32, device="cpu"
    )
    assert torch.equal(out, expected)


@pytest.mark.parametrize("backend", ["counted", pytest.param("inductor", marks=pytest.mark.slow)])
def test_draws_compile_whole_and_soon(backend):
    """One operator each: Inductor would take longer than anyone waits for ten rounds of Philox as an expression."""
    targets = []

    def counted(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    place = (5, 0, 1, range(3), range(20, 220))
    options = {"dtype": torch.float32, "device": "cpu"}

    def draw(x):
        signs = sign_block(*place, **options)
        reals = uniform_block(*place, scale=2.0, **options) + normal_block(*place, scale=3.0, **options)
        return x + signs * reals, word_block(*place, device="cpu")

    selection.backend.cache_clear()
    x = torch.randn(3, 200)
    compiled = torch.compile(draw, fullgraph=True, backend=counted if backend == "counted" else backend)
    for ours, theirs in zip(compiled(x), draw(x), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert targets.count("panther.fill_block_.default") == (4 if backend == "counted" else 0)


def test_layers_may_be_built_on_the_cpu_where_triton_is_demanded(monkeypatch):
    """They are moved later; drawing is the same everywhere."""
    monkeypatch.setenv("PANTHER_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    selection.backend.cache_clear()
    drawn = sign_block(5, 0, 1, range(3), range(200), dtype=torch.float32, device="cpu")
    selection.backend.cache_clear()
    assert torch.equal(
        drawn, reference.random_block("sign", 5, 0, 1, range(3), range(200), dtype=torch.float32, device="cpu")
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": -1}, r"seed=-1 must be in \[0, 2\^64\)"),
        ({"seed": 1 << 64}, r"must be in \[0, 2\^64\)"),
        ({"stream": 1 << 32}, r"stream=4294967296"),
        ({"tag": -3}, r"tag=-3"),
        ({"rows": range(0, 8, 2)}, r"must be ranges of step 1"),
        ({"cols": range(-1, 3)}, r"from 0 or more"),
    ],
)
def test_bad_counters(change, message):
    case = {"seed": 5, "stream": 0, "tag": 1, "rows": range(3), "cols": range(4), **change}
    with pytest.raises(ValueError, match=message):
        sign_block(*case.values(), dtype=torch.float32, device="cpu")
