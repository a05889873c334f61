"""What tests of pr.tune share: a small trained classifier, its calibration batches and its accuracy."""

import torch
from torch import nn

WIDTH, CLASSES = 24, 6


def classifier(seed=0):
    """Three layers fitted to a random teacher, in a moment; and inputs with the teacher's labels."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(8, WIDTH, generator=generator)
    x = torch.randn(768, 8, generator=generator) @ basis + 0.1 * torch.randn(768, WIDTH, generator=generator)
    labels = (x[:, : 2 * CLASSES].unflatten(1, (2, CLASSES)).prod(1) + x[:, :CLASSES]).argmax(1)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Linear(WIDTH, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, CLASSES)
        )  # fmt: skip
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[:512]), labels[:512]).backward()
            optimizer.step()
    for parameter in net.parameters():
        parameter.grad = None
    return net.eval(), x, labels


class Accuracy:
    """The share of right answers on the last 256 inputs; it counts its calls, and does something in one of them."""

    def __init__(self, x, labels, at=None, do=None):
        self.x, self.labels, self.calls, self.at, self.do = x[512:], labels[512:], 0, at, do

    @torch.no_grad()
    def __call__(self, model):
        self.calls += 1
        if self.calls == self.at:
            self.do(model)
        return (model(self.x).argmax(1) == self.labels).double().mean()


def batches(x):
    return list(x[:512].split(64))
