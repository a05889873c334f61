"""The scripts of the guide's page on trainers, on one process and on two; they compare what they save and load."""

import os
import re
import sys
from pathlib import Path

import pytest
import waits

SCRIPTS = Path(__file__).resolve().parents[2] / "docs/howto/scripts"
NEEDS = {
    "train_transformers.py": ("transformers", "accelerate"),
    "train_accelerate.py": ("accelerate",),
    "train_lightning.py": ("lightning",),
    "train_fabric.py": ("lightning",),
}
SAYS = {
    "train_transformers.py": "Linear at step 3, QuantizedLinear at the end; resumed from there, the same weights",
    "train_accelerate.py": "saved and resumed on {} processes",
    "train_lightning.py": "saved, resumed and compressed on {} processes",
    "train_fabric.py": "saved and resumed on {} processes",
}
pytestmark = [pytest.mark.extra, pytest.mark.slow]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("script", NEEDS)
def test_the_script_of_the_page(script, processes, tmp_path):
    for module in NEEDS[script]:
        pytest.importorskip(module)
    command = [sys.executable, "-W", "ignore"]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = os.environ | {"OUT": str(tmp_path / "out"), "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    done = waits.run([*command, SCRIPTS / script], env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert SAYS[script].format(processes) in done.stdout
    if script == "train_transformers.py":  # what the callback logged, before and after
        assert "{'compressed_layers': 8, 'compressed_bytes': " in done.stdout
        assert re.search(r"'compressed_layers': 12, .*'largest_rank': 8, .*'healed_error': \d", done.stdout)
