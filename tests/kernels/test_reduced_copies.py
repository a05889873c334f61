"""Half-precision copies of sketches: made once, and again after every write."""

import copy
import gc

import torch
from panther.kernels.ops import reduced_copies
from panther.kernels.ops.reduced_copies import reduced_copy
from torch._subclasses.fake_tensor import FakeTensorMode

from panther.nn import SKLinear
from panther.nn.sketch_record import plain_state

BF16 = torch.bfloat16


def test_a_copy_is_made_once_for_each_dtype():
    signs = torch.ones(3, 4)
    first = reduced_copy(signs, BF16)
    assert reduced_copy(signs, BF16) is first
    assert reduced_copy(signs, torch.float16).dtype is torch.float16
    assert reduced_copy(signs, torch.float32) is signs
    assert torch.equal(first, signs.to(BF16))


def test_a_write_makes_a_new_copy():
    signs = torch.ones(3, 4)
    reduced_copy(signs, BF16)
    signs[1] = -1
    assert torch.equal(reduced_copy(signs, BF16), signs.to(BF16))


def test_a_copy_ends_with_its_sketch():
    signs = torch.ones(3, 4)
    reduced_copy(signs, BF16)
    count = len(reduced_copies._copies)
    del signs
    gc.collect()
    assert len(reduced_copies._copies) == count - 1


def test_what_is_not_kept():
    trained = torch.ones(3, 4, requires_grad=True)
    copied = reduced_copy(trained, BF16)
    assert copied.requires_grad
    with torch.inference_mode():
        temporary = torch.ones(3, 4)
        assert reduced_copy(temporary, BF16) is not reduced_copy(temporary, BF16)
        normal = reduced_copy(trained.detach(), BF16)
    assert not normal.is_inference()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(3, 4))
        assert reduced_copy(fake, BF16).dtype is BF16
    signs = torch.ones(3, 4)
    torch.func.vmap(lambda x: reduced_copy(signs, BF16).float() * x)(torch.ones(2))
    assert (id(signs), BF16) not in reduced_copies._copies


def test_a_layer_under_autocast_casts_its_sketches_once():
    layer, x = SKLinear(40, 30, 3, sketch="signs", seed=1), torch.randn(2, 40)
    other = SKLinear(40, 30, 3, sketch="signs", seed=2)
    other.load_state_dict(plain_state(layer) | {"sketch_seed": other.sketch_seed})

    def call(module):
        with torch.autocast("cpu", BF16):
            return module(x)

    first = call(layer)
    sketches = {id(layer.U1), id(layer.U2)}
    assert sketches <= {identity for identity, _ in reduced_copies._copies}
    assert torch.equal(call(layer), first)
    assert torch.equal(call(copy.deepcopy(layer)), first)
    layer.load_state_dict(other.state_dict())  # another seed draws other sketches
    assert torch.equal(call(layer), call(other))
    assert not torch.equal(call(layer), first)
    call(layer).sum().backward()
    assert layer.S1.grad.dtype is torch.float32
