"""Training where the modules of Unix are missing."""

import signal
import sys

import torch
from ranks import on_ranks
from torch import nn
from torch.utils.data import DataLoader


def test_windows_has_no_peak_memory(tmp_path):
    """With stand-ins, on Linux: panther.train is imported without fcntl and resource.

    Its loaders have workers where signals cannot be blocked.
    """

    def windows():
        for name in [name for name in sys.modules if name.startswith("panther.train")]:
            del sys.modules[name]
        sys.modules |= {"fcntl": None, "resource": None}
        del signal.pthread_sigmask
        from panther.train import TrainConfig, Trainer

        def fit(workers=0, **more):
            data = DataLoader([(torch.ones(4), torch.ones(2))] * 8, 4, num_workers=workers)
            return Trainer(nn.Linear(4, 2), None, nn.MSELoss(), TrainConfig(**more)).fit(data)

        assert fit().last["step"] == fit(workers=1).last["step"] == 2
        assert "memory_bytes" not in fit().last  # None
        return fit(checkpoint_dir=str(tmp_path)).last["step"]

    assert on_ranks(windows, 1, fresh=True) == [2]
