"""The Keras layers, on each of Keras' backends in a process of its own: one process has one backend."""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import waits

from panther.errors import install_command

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
pytestmark = pytest.mark.engine
BACKENDS = ("torch", "tensorflow", "jax")
needs_keras = pytest.mark.skipif(find_spec("keras") is None, reason="needs keras")


def run(command, tmp_path, **environment):
    """Output of a command with its own folder for Keras' settings; TensorFlow says on stderr that it starts."""
    environment = {"KERAS_HOME": str(tmp_path), "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", **environment}
    return waits.run([sys.executable, *command], 850, env=os.environ | environment, cwd=tmp_path)


@needs_keras
@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_layers_on_a_backend(backend, tmp_path):
    if find_spec(backend) is None:
        pytest.skip(f"needs {backend}")
    flags = "--xla_force_host_platform_device_count=2"  # two devices of JAX; TensorFlow's are made in its test
    done = run(
        ["-m", "pytest", "-p", "no:cacheprovider", "-m", "", "-q", "--rootdir", ROOT, HERE / "keras_on_backend.py"],
        tmp_path, KERAS_BACKEND=backend, XLA_FLAGS=flags,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    assert passed > 40, done.stdout


@needs_keras
@pytest.mark.slow
def test_the_script_of_the_page(tmp_path):
    if find_spec("tensorflow") is None:
        pytest.skip("needs tensorflow")
    done = run(["-W", "ignore", ROOT / "docs/howto/scripts/train_keras.py"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"2 devices, losses [12]\.\d+ to 0\.\d+: those of one device", done.stdout.splitlines()[-1])


@needs_keras
def test_a_backend_that_is_not_installed_is_one_sentence(tmp_path):
    hide = "import sys; sys.modules['tensorflow'] = None; import panther.integrations.keras"
    done = run(["-c", hide], tmp_path, KERAS_BACKEND="tensorflow")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == (
        "panther.errors.MissingExtraError: Keras is set to a backend that needs tensorflow, which is not installed: "
        "install it, or set the environment variable KERAS_BACKEND to torch, tensorflow or jax, whichever is installed"
    )


def test_keras_missing_or_of_another_version_is_one_sentence(tmp_path):
    (tmp_path / "keras.py").write_text("__version__ = '2.15.0'")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run(["-c", "import panther.integrations.keras"], tmp_path, PYTHONPATH=path)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("panther.errors.ConfigError: keras 2.15.0 is installed, and")
    assert "made for 3.x" in last
    hide = "import sys; sys.modules['keras'] = None; import panther.integrations.keras"
    last = run(["-c", hide], tmp_path).stderr.strip().splitlines()[-1]
    assert last.startswith("panther.errors.MissingExtraError: keras is needed here")
    assert last.endswith(install_command("keras"))
