"""What the adapters of engines say where an engine is missing or too old, and a TrainConfig in DeepSpeed's words."""

import importlib
import re
import sys
from types import ModuleType

import pytest

from panther.errors import ConfigError, MissingExtraError, install_command
from panther.integrations._deepspeed_settings import checked_settings
from panther.train import TrainConfig

ENGINES = {"ray": ("2.9.3", "2.60"), "deepspeed": ("0.14.5", "0.19")}


@pytest.fixture
def without(monkeypatch):
    """Remove an adapter and its engine from the modules, in whose place there is ``stand_in``."""

    def remove(engine, stand_in):
        adapter = f"panther.integrations.{engine}"
        monkeypatch.delitem(sys.modules, adapter, raising=False)
        monkeypatch.setitem(sys.modules, engine, stand_in)
        return adapter

    return remove


@pytest.mark.parametrize("engine", ENGINES)
def test_a_missing_engine(engine, without):
    adapter = without(engine, None)
    with pytest.raises(
        MissingExtraError, match=rf"^{engine} is needed here .* run {re.escape(install_command(engine))}"
    ):
        importlib.import_module(adapter)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_version_that_is_too_old(engine, without):
    old, minimum = ENGINES[engine]
    stand_in = ModuleType(engine)
    stand_in.__version__ = old
    adapter = without(engine, stand_in)
    with pytest.raises(
        ConfigError, match=rf"{engine} {old} is installed, and Panther needs {minimum} or newer: pip install"
    ):
        importlib.import_module(adapter)


def test_a_train_config_for_deepspeed():
    config = TrainConfig(
        strategy="zero1", mixed_precision="fp16", scaler_init_scale=2.0**12, scaler_growth_interval=50, batch_size=4,
        gradient_accumulation_steps=2, gradient_clipping=0.5, learning_rate=0.1,
    )  # fmt: skip
    assert checked_settings(config, 2, has_optimizer=False) == {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "steps_per_print": 1 << 30,
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 50},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    }
    three = checked_settings(TrainConfig(strategy="fsdp", cpu_offload=True, batch_size=4), 1, has_optimizer=False)
    cpu = {"device": "cpu"}
    assert three["zero_optimization"] == {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}
    assert three["zero_force_ds_cpu_optimizer"] is False
    two = TrainConfig(strategy="fsdp", reshard_after_forward=False, mixed_precision="bf16", batch_size=4)
    settings = checked_settings(two, 1, has_optimizer=True)
    assert settings["zero_optimization"] == {"stage": 2}
    assert settings["bf16"] == {"enabled": True}
    assert "optimizer" not in settings


@pytest.mark.parametrize(
    ("total", "micro", "accumulation", "fits"),
    [(8, 4, None, True), (8, 4, 1, True), (8, 4, 2, False), (8, 3, None, False), (8, None, None, True),
     (7, None, None, False), (None, 3, 2, True), (8, None, 2, True), (6, None, 2, False)],
)  # fmt: skip
def test_batch_sizes_fit_two_processes(total, micro, accumulation, fits):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {name: value for name, value in zip(names, (total, micro, accumulation), strict=True) if value is not None}
    if fits:
        assert checked_settings(config, 2, has_optimizer=True) == config
    else:
        with pytest.raises(ConfigError, match=rf"train_batch_size={total} does not fit 2 processes of "):
            checked_settings(config, 2, has_optimizer=True)
