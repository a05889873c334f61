import numpy as np
import pytest
import torch
from panther.kernels import philox_4x32, sign_block
from panther.kernels.reference import sketched_matmul

# Known answers published with Random123 (kat_vectors, philox4x32 10): counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, 0xFFFFFFFFFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers(counter, key, expected):
    words = philox_4x32(tuple(torch.tensor(c) for c in counter), key)
    assert tuple(int(word) for word in words) == expected


def test_philox_agrees_with_python_integers():
    """Random counters and keys against arbitrary-precision arithmetic, which cannot overflow."""
    generator = np.random.default_rng(0)
    counters = generator.integers(0, 2**32, (50, 4))
    for row in counters:
        key = int(generator.integers(0, 2**63)) * 2 + 1
        c = [int(v) for v in row]
        k = [key & 0xFFFFFFFF, key >> 32]
        for _ in range(10):
            p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
            k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
        words = philox_4x32(tuple(torch.tensor(int(v)) for v in row), key)
        assert [int(word) for word in words] == c


def test_sign_entry_is_the_documented_bit():
    """Bit j % 32 of word j % 128 // 32 of counter (i, j // 128, stream, tag); set means minus."""
    seed, stream, tag = 0x123456789ABCDEF, 5, 0x10001
    block = sign_block(seed, stream, tag, range(3), range(300), dtype=torch.float32, device="cpu")
    for i, j in [(0, 0), (0, 31), (0, 32), (1, 127), (1, 128), (2, 255), (2, 299)]:
        words = philox_4x32(tuple(torch.tensor(c) for c in (i, j // 128, stream, tag)), seed)
        bit = int(words[j % 128 // 32]) >> (j % 32) & 1
        assert block[i, j] == (-1 if bit else 1)


@pytest.mark.parametrize("rows", [range(0), range(1), range(3, 8), range(2**20, 2**20 + 2)])
@pytest.mark.parametrize("cols", [range(0), range(1), range(127, 129), range(130, 700), range(2**31, 2**31 + 5)])
def test_sign_block_is_the_slice_of_the_whole(rows, cols):
    block = sign_block(7, 0, 0, rows, cols, dtype=torch.float32, device="cpu")
    assert block.shape == (len(rows), len(cols))
    if len(rows) and len(cols):
        wide = range(max(cols.start - 200, 0), cols.stop + 77)
        tall = range(max(rows.start - 1, 0), rows.stop + 3)
        whole = sign_block(7, 0, 0, tall, wide, dtype=torch.float32, device="cpu")
        i, j = rows.start - tall.start, cols.start - wide.start
        assert torch.equal(block, whole[i : i + len(rows), j : j + len(cols)])


def test_sign_block_is_the_same_in_slabs(monkeypatch):
    whole = sign_block(7, 0, 0, range(50), range(300), dtype=torch.float32, device="cpu")
    monkeypatch.setattr("panther.kernels.reference.philox._SLAB", 7)
    assert torch.equal(sign_block(7, 0, 0, range(50), range(300), dtype=torch.float32, device="cpu"), whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_signs_are_exact_in_every_dtype(dtype):
    block = sign_block(1, 0, 0, range(9), range(9), dtype=dtype, device="cpu")
    assert block.dtype == dtype
    assert set(block.unique().tolist()) == {-1.0, 1.0}


@pytest.mark.gpu
def test_signs_are_the_same_on_cuda():
    here = sign_block(2**62 + 3, 1, 65537, range(1000), range(1000), dtype=torch.float32, device="cpu")
    there = sign_block(2**62 + 3, 1, 65537, range(1000), range(1000), dtype=torch.float32, device="cuda")
    assert torch.equal(here, there.cpu())


def test_signs_are_balanced_and_uncorrelated():
    """The mean and the correlations of neighbours of n fair signs lie within 6/sqrt(n) but with probability 1e-8."""
    block = sign_block(11, 0, 65537, range(500), range(1000), dtype=torch.float64, device="cpu")
    bound = 6 / block.numel() ** 0.5
    assert block.mean().abs() < bound
    assert (block[:, 1:] * block[:, :-1]).mean().abs() < bound * 1.01
    assert (block[1:] * block[:-1]).mean().abs() < bound * 1.01
    other = sign_block(11, 1, 65537, range(500), range(1000), dtype=torch.float64, device="cpu")
    assert (block * other).mean().abs() < bound


def test_reference_product_against_float64():
    torch.manual_seed(0)
    x, S1, U2 = torch.randn(7, 30), torch.randn(30, 4), torch.randn(30, 4)
    U1, S2, b = torch.randn(4, 20), torch.randn(4, 20), torch.randn(20)
    exact = 0.3 * (x.double() @ (S1.double() @ U1.double() + U2.double() @ S2.double())) + b.double()
    assert torch.allclose(sketched_matmul(x, S1, U1, S2, U2, b, 0.3).double(), exact, atol=1e-4)
    assert torch.allclose(sketched_matmul(x, S1, U1, S2, U2, None, 0.3).double(), exact - b, atol=1e-4)
