"""Training where the modules of Unix are missing."""

import signal
import sys
import types

import torch
from ranks import on_ranks
from torch import nn
from torch.utils.data import DataLoader


def test_windows_has_a_lock_of_its_own_and_no_peak_memory(tmp_path):
    """With stand-ins, on Linux: panther.train is imported without fcntl and resource, and locks by msvcrt.

    Its loaders have workers where signals cannot be blocked.
    """

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
        del signal.pthread_sigmask
        from panther.errors import TrainingError
        from panther.train import TrainConfig, Trainer

        def fit(workers=0, **more):
            data = DataLoader([(torch.ones(4), torch.ones(2))] * 8, 4, num_workers=workers)
            return Trainer(nn.Linear(4, 2), None, nn.MSELoss(), TrainConfig(**more)).fit(data)

        assert fit().last["step"] == fit(workers=1).last["step"] == 2
        assert "memory_bytes" not in fit().last  # None
        assert fit(checkpoint_dir=str(tmp_path)).last["step"] == 2
        try:
            fit(checkpoint_dir=str(tmp_path))
        except TrainingError as error:
            return calls, str(error)

    ((calls, message),) = on_ranks(windows, 1, fresh=True)
    assert calls == [(2, 1)] * 2
    assert message.startswith(f"another run writes to {tmp_path} (process ")
