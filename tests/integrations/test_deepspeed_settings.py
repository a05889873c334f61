"""The settings that DeepSpeed gets, without a process group."""

import pytest

from panther.train import TrainConfig

pytestmark = pytest.mark.engine
adapter = pytest.importorskip("panther.integrations.deepspeed", exc_type=ImportError)
checked_settings = adapter.checked_settings


def test_a_train_config_for_deepspeed():
    config = TrainConfig(
        strategy="zero1", mixed_precision="fp16", scaler_init_scale=2.0**12, scaler_growth_interval=50, batch_size=4,
        gradient_accumulation_steps=2, gradient_clipping=0.5, learning_rate=0.1,
    )  # fmt: skip
    assert checked_settings(config, has_optimizer=False) == {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "steps_per_print": 1 << 30,
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 50},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    }
    three = checked_settings(TrainConfig(strategy="fsdp", cpu_offload=True, batch_size=4), has_optimizer=False)
    cpu = {"device": "cpu"}
    assert three["zero_optimization"] == {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}
    assert three["zero_force_ds_cpu_optimizer"] is False
    two = TrainConfig(strategy="fsdp", reshard_after_forward=False, mixed_precision="bf16", batch_size=4)
    settings = checked_settings(two, has_optimizer=True)
    assert settings["zero_optimization"] == {"stage": 2}
    assert settings["bf16"] == {"enabled": True}
    assert "optimizer" not in settings
