"""What tests of pr.compress share: batches near a subspace, and whether a model is what it was."""

import torch

quick = {"measure_speed": False, "seed": 0}
low_rank = {**quick, "forms": ("dense", "low_rank")}


def batches_of(n=640, width=48, size=64, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=generator) @ torch.randn(12, width, generator=generator)
    return list((x + 0.1 * torch.randn(n, width, generator=generator)).to(dtype).split(size))


def state_of(model):
    return (
        {key: value.clone() for key, value in model.state_dict().items()},
        [(name, id(module), module.training) for name, module in model.named_modules()],
        [(name, id(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()],
    )


def assert_untouched(model, original):
    after = state_of(model)
    assert original[1:] == after[1:]
    assert all(torch.equal(original[0][key], value) for key, value in after[0].items())


def error(model, exact, x):
    with torch.no_grad():
        return ((model(x) - exact).norm() / exact.norm()).item()
