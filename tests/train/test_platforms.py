"""Training where the modules of Unix are missing."""

import sys
import types

import torch
from ranks import on_ranks
from torch import nn


def test_windows_has_a_lock_of_its_own_and_no_peak_memory(tmp_path):
    """With stand-ins, on Linux: panther.train is imported without fcntl and resource, and locks by msvcrt."""

    def windows():
        calls = []

        def locking(descriptor, mode, size):
            calls.append((mode, size))
            if len(calls) > 1:
                raise PermissionError(13, "Permission denied")

        for name in [name for name in sys.modules if name.startswith("panther.train")]:
            del sys.modules[name]
        sys.modules |= {"fcntl": None, "resource": None}
        sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=2, locking=locking)
        from panther.errors import TrainingError
        from panther.train import TrainConfig, Trainer

        def fit(**more):
            config = TrainConfig(batch_size=4, **more)
            return Trainer(nn.Linear(4, 2), None, nn.MSELoss(), config).fit([(torch.ones(4), torch.ones(2))] * 8)

        assert fit().last["step"] == 2
        assert "memory_bytes" not in fit().last  # None
        assert fit(checkpoint_dir=str(tmp_path)).last["step"] == 2
        try:
            fit(checkpoint_dir=str(tmp_path))
        except TrainingError as error:
            return calls, str(error)

    ((calls, message),) = on_ranks(windows, 1, fresh=True)
    assert calls == [(2, 1)] * 2
    assert message.startswith(f"another run writes to {tmp_path} (process ")
