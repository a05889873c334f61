"""The settings and the folder of extensions that DeepSpeed gets, without a process group."""

import os

import pytest

from panther.errors import ConfigError
from panther.train import TrainConfig

pytestmark = pytest.mark.engine
adapter = pytest.importorskip("panther.integrations.deepspeed", exc_type=ImportError)
checked_settings, check_locks, private_folder = adapter.checked_settings, adapter.check_locks, adapter.private_folder


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


def test_the_folder_is_of_this_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    folder = private_folder()
    assert folder.parent == tmp_path / "panther/torch_extensions"
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(folder) == str(private_folder())
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setattr("sys.prefix", "/another/environment")
    assert private_folder() != folder


def test_a_folder_that_is_set_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert private_folder() == tmp_path


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_a_lock_is_left_over_if_no_process_has_it_open(tmp_path):
    lock = tmp_path / "cpu_adam" / "lock"
    check_locks(tmp_path)
    lock.parent.mkdir()
    with open(lock, "w"):  # as torch holds it while it builds
        check_locks(tmp_path)
    with pytest.raises(ConfigError, match=r"cpu_adam/lock was left by an interrupted build, .* with rm '"):
        check_locks(tmp_path)
    lock.unlink()
    check_locks(tmp_path)
