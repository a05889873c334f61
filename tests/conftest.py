"""What all tests share: Triton's interpreter, marks that follow from the test, and which tests take too long."""

import importlib
import os
import resource
import sys
import time
from importlib.util import find_spec

import pytest
import torch
from fuzzing import fuzz
from hypothesis import settings

# Kernels run in the interpreter where there is no GPU, which Triton must know before it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Keras' pages and docstrings run on torch; other backends have processes of their own.
os.environ.setdefault("KERAS_BACKEND", "torch")
# Each brings an LLVM: Triton's ends a process that has TensorFlow's, which Keras imports where it finds it.
if find_spec("tensorflow") and find_spec("triton"):
    importlib.import_module("triton")

# For property tests without the decorator too: hypothesis' deadline of 200 ms fails tests on a busy machine.
settings.register_profile("panther", fuzz)
settings.load_profile("panther")

LONG_S = 5.0
_long = []
SLOW_PAGES = ("migrate-ddp.rst", "sketched-convolutions.rst")  # they train; run alone, a page is not deselected
# Pages, and the module without which they are skipped; those of ENGINES are in the environment of `make test-engines`.
EXTRA_PAGES = {"transformers.rst": "transformers", "peft.rst": "peft", "torchao.rst": "torchao", "keras.rst": "keras"}
ENGINES = ("torchao", "keras", "ray", "deepspeed")


def pytest_collection_modifyitems(items):
    """Mark property tests ``fuzz``, long pages ``slow``, and tests of the fixture ``transformers`` as of an extra."""
    for item in items:
        if "transformers" in getattr(item, "fixturenames", ()):
            item.add_marker("extra")
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("fuzz")
        if item.path.name in SLOW_PAGES:
            item.add_marker("slow")
        if "integrations" in item.path.parts and {item.path.stem, item.path.parent.name} & set(ENGINES):
            item.add_marker("engine")
        if item.path.name == "horovod.py":  # its examples
            item.add_marker("engine_slow")
        if module := EXTRA_PAGES.get(item.path.name):
            item.add_marker("engine" if module in ENGINES else "extra")
            item.add_marker(pytest.mark.skipif(find_spec(module) is None, reason=f"needs {module}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Note a test without the mark ``slow`` or ``tool`` that takes more than 5 s of processor time.

    Processor time, not time on the clock, which on a busy machine says nothing of the test.
    """
    begun = _processor_s()
    result = yield
    used = _processor_s() - begun
    if used > LONG_S and not any(item.get_closest_marker(name) for name in ("slow", "tool")):
        _long.append((used, item.nodeid))
    return result


def _processor_s():
    """Seconds of this process, of its children that have ended, and of the pools of ranks."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    pool = sys.modules.get("pool")
    return time.process_time() + children.ru_utime + children.ru_stime + (pool.processor_s() if pool else 0.0)


def pytest_terminal_summary(terminalreporter):
    if _long:
        terminalreporter.section(f"tests of more than {LONG_S:g} s of processor time: mark them slow, or mend them")
        for used, name in sorted(_long, reverse=True):
            terminalreporter.line(f"{used:6.1f} s  {name}")


def pytest_sessionfinish(session, exitstatus):
    """Fail where ``PANTHER_LONG_TESTS=fail`` asks for it; by default a slow machine fails no test."""
    if _long and exitstatus == 0 and os.environ.get("PANTHER_LONG_TESTS") == "fail":
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
