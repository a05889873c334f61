"""What tests, docstrings and pages share: Triton's interpreter, what is not collected, marks, and limits of tests.

This file is at the root because pytest does not read tests/conftest.py for docstrings and pages alone.
"""

import importlib
import json
import os
import resource
import signal
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import garbage  # noqa: F401 (before torch)
import pytest
import torch
import waits
from checks import ENGINE_PATHS
from fuzzing import fuzz
from hypothesis import settings

# Kernels run in the interpreter where there is no GPU, which Triton must know before it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Keras' pages and docstrings run on torch; other backends have processes of their own.
os.environ.setdefault("KERAS_BACKEND", "torch")
# torch 2.11 warns once of unchecked sparse tensors, also where a test asks for them.
torch.sparse.check_sparse_tensor_invariants.disable()
# A build of torch for CUDA gives autograd a thread for a GPU that is not there once a test has used fake tensors, and
# no process that is forked after that can run backward.
if torch.version.cuda and not torch.cuda.is_available():
    torch._C._ensureCUDADeviceGuardSet = lambda: None

# Workers of Ray run at a niceness of 15, and starve beside the tests of another process.
os.environ.setdefault("RAY_worker_niceness", "0")
# Tests compress with clocks of their own, and neither read nor write the speeds in the user's cache.
os.environ["PANTHER_SPEEDS"] = "off"
# Each brings an LLVM: Triton's ends a process that has TensorFlow's, which Keras imports where it finds it.
if find_spec("tensorflow") and find_spec("triton"):
    importlib.import_module("triton")

# A program that ignores a signal, as nohup and background jobs of a shell do, passes that on to the runs under test,
# which then ignore it too.
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

# For property tests without the decorator too: hypothesis' deadline of 200 ms fails tests on a busy machine.
settings.register_profile("panther", fuzz)
settings.load_profile("panther")

# Adapters whose file does not have the name of the library that its examples need.
_LIBRARIES = {"pretrained": "transformers"}


def _library(path: Path) -> str | None:
    """Return the library that an adapter's examples need; None for files that need none."""
    return _LIBRARIES.get(path.stem, None if path.name.startswith("_") else path.stem)


collect_ignore = [
    "docs/conf.py",
    "docs/_build",  # copies of the gallery's scripts
    "docs/directives.py",  # needs Sphinx
    "docs/examples",  # what sphinx-gallery makes of docs/gallery
    "docs/gallery",
    "docs/howto/scripts",
    "tests/integrations/keras_on_backend.py",  # run by test_keras.py
    *(
        str(path)
        for path in (Path(__file__).parent / "panther/integrations").iterdir()
        if (library := _library(path)) and find_spec(library) is None
    ),
]

_file_seconds = Counter()
# They train, or plan for many layouts. Run alone, a page is not deselected.
SLOW_PAGES = ("migrate-ddp.rst", "advisor.rst")
# Pages, and the module without which they are skipped; the pages of ENGINES are tested in .venv-engines.
EXTRA_PAGES = {
    "transformers.rst": "transformers", "compressed-tensors.rst": "transformers", "peft.rst": "peft",
    "torchao.rst": "torchao", "keras.rst": "keras",
}  # fmt: skip
# Libraries that `make test` does not install. A test that calls importorskip with one of them has the mark extra.
EXTRA_LIBRARIES = {
    "transformers", "compressed_tensors", "tokenizers", "onnx", "onnxruntime", "onnxscript", "tensorboard", "mlflow",
    "gguf",
}  # fmt: skip
ENGINES = ("torchao", "keras", "ray", "deepspeed")


def pytest_collection_modifyitems(items):
    """Mark property tests ``fuzz``, long pages ``slow``, and tests of the fixture ``transformers`` as of an extra."""
    for item in items:
        code = getattr(getattr(item, "function", None), "__code__", None)
        asks_for_extra = code and "importorskip" in code.co_names and EXTRA_LIBRARIES & set(map(str, code.co_consts))
        if asks_for_extra or "transformers" in getattr(item, "fixturenames", ()):
            item.add_marker("extra")
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("fuzz")
        if item.path.name in SLOW_PAGES:
            item.add_marker("slow")
        if "integrations" in item.path.parts and {item.path.stem, item.path.parent.name} & set(ENGINES):
            item.add_marker("engine")
        if module := EXTRA_PAGES.get(item.path.name):
            item.add_marker("engine" if module in ENGINES else "extra")
            item.add_marker(pytest.mark.skipif(find_spec(module) is None, reason=f"needs {module}"))
        if item.get_closest_marker("engine") and not item.location[0].startswith((*ENGINE_PATHS, "docs/howto/")):
            raise pytest.UsageError(
                f"{item.nodeid} has the mark engine, whose tests are looked for in {', '.join(ENGINE_PATHS)} only: "
                "move the test, or add its folder to ENGINE_PATHS in tests/support/checks.py"
            )


def pytest_timeout_set_timer(item, settings):
    """Let the limit of a test, which pytest-timeout reads from its mark or from the settings, grow with the load."""
    if settings.method != "signal":
        return None
    waits.start_test_limit(item, settings)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Count the seconds of processor time of each file. The time on the clock says nothing on a busy machine."""
    begun = _processor_s()
    result = yield
    _file_seconds[item.location[0]] += _processor_s() - begun
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Skip what torch itself compiles where no C++ compiler works: Panther runs there, and torch.compile does not."""
    try:
        return (yield)
    except Exception as error:
        if "No working C++ compiler found" in str(error):
            pytest.skip("torch.compile needs a C++ compiler")
        raise


def _processor_s():
    """Return the processor seconds of this process, of its children that have ended, and of the pools of ranks."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    pool = sys.modules.get("pool")
    return time.process_time() + ended.ru_utime + ended.ru_stime + (pool.processor_s() if pool else 0.0)


def pytest_sessionfinish(session):
    """Write the numbers of tests by result, and the seconds of each file, for the queue of checks."""
    if path := os.environ.get("PANTHER_RESULTS_FILE"):
        stats = session.config.pluginmanager.get_plugin("terminalreporter").stats
        words = {"passed": ("passed", "xpassed"), "failed": ("failed",), "errors": ("error",)}
        words["skipped"] = ("skipped", "xfailed")
        counts = {word: sum(len(stats.get(key, ())) for key in keys) for word, keys in words.items()}
        Path(path).write_text(json.dumps({"counts": counts, "seconds": _file_seconds}))
