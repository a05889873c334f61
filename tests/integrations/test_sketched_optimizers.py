"""SketchedAdamW in the loops of other libraries: the steps of a plain loop, checkpoints, steps in the backward pass."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, weights_of
from torch import nn

from panther.distributed import data_parallel
from panther.optim import SketchedAdamW, sketched_param_groups

pytestmark = [pytest.mark.extra, pytest.mark.slow]

STEPS = 4
BATCH = 4


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def sketched(model, in_backward=False):
    groups = sketched_param_groups(model, rank=2, lr=0.02)
    return SketchedAdamW(groups, rank=2, period=2, seed=7).step_in_backward_(in_backward)


def samples():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(STEPS * BATCH, 12, generator=generator), torch.randint(3, (STEPS * BATCH,), generator=generator)


def expected_weights():
    model = network()
    optimizer = sketched(model)
    for x, y in zip(*(tensor.split(BATCH) for tensor in samples()), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return weights_of(model)


def assert_equal(weights, expected, **tolerances):
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, msg=name, **tolerances)


EXACT = {"rtol": 0.0, "atol": 0.0}


class Classifier(nn.Module):
    """The network as transformers' Trainer calls a model."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, x, labels):
        logits = self.network(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("in_backward", [False, True])
def test_transformers_trainer_takes_the_same_steps_and_resumes(in_backward, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    x, y = samples()
    data = [{"x": row, "labels": label} for row, label in zip(x, y, strict=True)]

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, dataset=None):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    def train(folder, resume_from=None):
        arguments = transformers.TrainingArguments(
            str(folder), per_device_train_batch_size=BATCH, num_train_epochs=1, save_steps=2, report_to=[],
            use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant", max_grad_norm=0.0,
        )  # fmt: skip
        model = Classifier()
        # The names of the plain loop, because a name selects the projections.
        optimizer = sketched(model.network, in_backward)
        trainer = InOrder(model, arguments, train_dataset=data, optimizers=(optimizer, None))
        trainer.train(resume_from_checkpoint=resume_from)
        return weights_of(model.network)

    assert_equal(train(tmp_path / "first"), expected_weights(), **EXACT)
    assert_equal(train(tmp_path / "second", str(tmp_path / "first" / "checkpoint-2")), expected_weights(), **EXACT)


def accelerated(folder, in_backward):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    data = torch.utils.data.TensorDataset(*samples())
    loader = torch.utils.data.DataLoader(data, BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, sketched(model, in_backward), loader)
    for number, (x, y) in enumerate(loader):
        if number == 2:
            accelerator.save_state(folder)
            for p in model.parameters():  # the state has to restore what follows
                p.data.zero_()
            accelerator.load_state(folder)
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(accelerator.unwrap_model(model))


@pytest.mark.parametrize("in_backward", [False, True])
def test_accelerate_takes_the_same_steps_and_restores_its_state(in_backward, tmp_path):
    pytest.importorskip("accelerate")
    assert_equal(accelerated(str(tmp_path), in_backward), expected_weights(), **EXACT)


@pytest.mark.distributed
def test_accelerate_takes_the_same_steps_on_two_processes(tmp_path):
    pytest.importorskip("accelerate")
    for weights in on_ranks(lambda: accelerated(str(tmp_path), False), 2, fresh=True):
        assert_equal(weights, expected_weights(), rtol=1e-4, atol=1e-5)


@pytest.mark.distributed
def test_the_parameters_that_accelerate_exchanges_under_fsdp2():
    """Accelerate shards on GPUs only; what it does to an optimizer then is this function."""
    exchange = pytest.importorskip("accelerate.utils.fsdp_utils").fsdp2_switch_optimizer_parameters

    def run():
        model = network()
        optimizer, whole = sketched(model), dict(model.named_parameters())
        data_parallel(model, strategy="fsdp")
        exchange(optimizer, {whole[name].data_ptr: p for name, p in model.named_parameters()})
        for x, y in zip(*(tensor.split(BATCH) for tensor in samples()), strict=True):
            optimizer.zero_grad()
            half = slice(dist.get_rank() * BATCH // 2, (dist.get_rank() + 1) * BATCH // 2)
            nn.functional.cross_entropy(model(x[half]), y[half]).backward()
            optimizer.step()
        return {name: p.full_tensor().detach() for name, p in model.named_parameters()}

    for weights in on_ranks(run, 2, fresh=True):
        assert_equal(weights, expected_weights(), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # torch's, of names that Lightning uses
@pytest.mark.parametrize("in_backward", [False, True])
def test_lightning_takes_the_same_steps_and_resumes(in_backward, tmp_path):
    lightning = pytest.importorskip("lightning")

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()

        def training_step(self, batch, index):
            x, y = batch
            return nn.functional.cross_entropy(self.network(x), y)

        def configure_optimizers(self):
            return sketched(self.network, in_backward)

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples()), BATCH)
    options = {
        "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "default_root_dir": str(tmp_path),
    }  # fmt: skip
    saved = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, filename="half", every_n_train_steps=2, save_top_k=-1)
    net = Net()
    lightning.Trainer(max_steps=2, callbacks=[saved], **options).fit(net, loader)
    # Lightning begins the epoch anew, so the rest of the samples is the data of the second run.
    rest = torch.utils.data.TensorDataset(*(tensor[2 * BATCH :] for tensor in samples()))
    checkpoint = torch.load(tmp_path / "half.ckpt", weights_only=True)
    resumed = Net()
    resumed.load_state_dict(checkpoint["state_dict"])
    optimizer = sketched(resumed.network, in_backward)
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    resumed.configure_optimizers = lambda: optimizer
    lightning.Trainer(max_steps=2, enable_checkpointing=False, **options).fit(
        resumed, torch.utils.data.DataLoader(rest, BATCH)
    )
    assert_equal(weights_of(resumed.network), expected_weights(), **EXACT)
