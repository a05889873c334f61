"""Settings of the whole process: blocks of several threads leave them as they were, and keep them until they end."""

import os
import random
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import panther as pr
from panther._process_settings import (
    ProcessSetting,
    deterministic_algorithms,
    full_precision,
    ignored_warnings,
    preserved_generators,
)
from panther._torch import FAKE_LOG, compiler_stance
from panther.compression.calibration.runner import _EAGER, _SLOW_PATH
from panther.compression.streaming import spool
from panther.distributed.advisor.fake_run import _NO_FAKE_LOG
from panther.errors import PerformanceWarning


def end(block):
    """Return the function that ends a block."""
    return lambda: block.__exit__(None, None, None)


def _precisions():
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision


def _deterministic_modes():
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _filter_is_set():
    return any(entry[1] is not None and "panther" in entry[1].pattern for entry in warnings.filters)


# What opens a block, what reads the setting, and its value in the block.
_SETTINGS = {
    "precision": (full_precision, _precisions, ("ieee", "ieee")),
    "deterministic": (deterministic_algorithms, _deterministic_modes, (True, False)),
    "stance": (_EAGER.held, compiler_stance, ("force_eager", False, None)),
    "fast path": (_SLOW_PATH.held, torch.backends.mha.get_fastpath_enabled, False),
    "heap limit": (spool.freed_blocks_returned, lambda: spool._heap_limit[0], 2**20),
    "log of fake tensors": (
        _NO_FAKE_LOG.held,
        lambda: FAKE_LOG.disabled,
        True,
    ),
    "warnings": (lambda: ignored_warnings(category=PerformanceWarning), _filter_is_set, True),
}


@pytest.fixture
def threads():
    """Two threads, each of which runs one call after another."""
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        yield [lambda call, thread=thread: thread.submit(call).result(20) for thread in (first, second)]


@pytest.fixture(autouse=True)
def _user_values():
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", _SETTINGS)
def test_of_two_blocks_the_last_to_end_restores_the_users_value(name, threads):
    make, read, value = _SETTINGS[name]
    users_value, (one, two) = read(), threads
    assert users_value != value
    first, second = make(), make()
    one(first.__enter__)
    two(second.__enter__)
    one(end(first))
    assert read() == value
    two(end(second))
    assert read() == users_value
    with make(), make():  # blocks of one thread in each other
        assert read() == value
    assert read() == users_value


def test_generators_have_their_states_again_after_two_blocks(threads):
    def draw():
        return float(torch.rand(())), random.random(), float(np.random.rand())

    with preserved_generators():
        expected = draw()
    one, two = threads
    first, second = preserved_generators(), preserved_generators()
    one(first.__enter__)
    draw()
    two(second.__enter__)
    draw()
    one(end(first))
    draw()
    two(end(second))
    with preserved_generators():
        assert draw() == expected
    with preserved_generators():
        draw()
        with preserved_generators():  # in one thread, each block restores the states that it has found
            third = draw()
        assert draw() == third
    assert draw() == expected


def test_what_a_user_sets_meanwhile_stays_and_the_next_block_has_its_own_value(threads):
    one, two = threads
    first, second = full_precision(), full_precision()
    one(first.__enter__)
    torch.set_float32_matmul_precision("highest")
    torch.set_float32_matmul_precision("medium")
    medium = _precisions()
    two(second.__enter__)
    assert _precisions() == ("ieee", "ieee")
    one(end(first))
    two(end(second))
    assert _precisions() == medium != ("ieee", "ieee")
    with full_precision():
        torch.set_float32_matmul_precision("high")
    assert _precisions()[0] == "tf32"


def test_a_filter_of_warnings_goes_with_the_last_block_and_leaves_the_users_filters(threads):
    one, two = threads
    first, second = (ignored_warnings(category=PerformanceWarning) for _ in range(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one(first.__enter__)
        two(second.__enter__)
        warnings.filterwarnings("always", "a filter of the user")
        one(end(first))
        warnings.warn("ignored", PerformanceWarning, stacklevel=1)
        warnings.warn("of another kind", UserWarning, stacklevel=1)
        two(end(second))
        warnings.warn("afterwards", PerformanceWarning, stacklevel=1)
        assert not _filter_is_set()
        assert any(entry[1] is not None and entry[1].pattern == "a filter of the user" for entry in warnings.filters)
    assert [str(each.message) for each in caught] == ["of another kind", "afterwards"]


def test_a_suspended_setting_does_not_change_until_the_end_of_the_suspension(threads):
    values = ["user"]
    setting = ProcessSetting(lambda: values[-1], values.append, "run")
    one, _ = threads
    first, suspension, second = setting.held(), setting.suspended(), setting.held()
    with setting.suspended():  # nothing to suspend
        assert values == ["user"]
    one(first.__enter__)
    one(suspension.__enter__)
    assert values[-1] == "user"
    waiting = threading.Thread(target=second.__enter__)
    waiting.start()
    assert values[-1] == "user"
    assert waiting.is_alive()
    one(end(suspension))
    waiting.join(20)
    assert values[-1] == "run"
    with setting.suspended():  # other threads need the value
        assert values[-1] == "run"
    later = setting.suspended()
    one(later.__enter__)
    assert values[-1] == "run"
    one(end(later))
    one(end(first))
    assert values[-1] == "run"
    end(second)()
    assert values[-1] == "user"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_has_the_users_value_although_a_block_of_a_thread_was_open(threads):
    values = ["user"]
    setting = ProcessSetting(lambda: values[-1], values.append, "run")
    block = setting.held()
    threads[0](block.__enter__)
    process = os.fork()
    if not process:
        os._exit(values[-1] != "user")
    assert os.waitpid(process, 0)[1] == 0
    assert values[-1] == "run"


def test_drivers_in_two_threads_compute_in_full_precision_until_each_of_them_ends():
    """The first driver to end restored the precision of the user, with which the second driver continued."""
    seen, barrier = [], threading.Barrier(2)

    class Slow:
        """A matrix whose first product waits for the other driver. Each product notes the precision."""

        dtype = torch.float32

        def __init__(self, A, waits):
            self.A, self.shape, self.waits = A, A.shape, waits

        @property
        def T(self):
            return Slow(self.A.T, [])

        def __matmul__(self, X):
            if self.waits:
                self.waits.pop().wait(20)
            seen.append(_precisions())
            return self.A @ X

    def run():
        pr.linalg.randomized_svd(Slow(torch.eye(60, 50), [barrier]), 3, n_iter=2, seed=0)

    users_precisions = _precisions()
    with ThreadPoolExecutor(2) as pool:
        for driver in [pool.submit(run) for _ in range(2)]:
            driver.result(60)
    assert set(seen) == {("ieee", "ieee")}
    assert len(seen) > 4
    assert _precisions() == users_precisions


def test_compressions_in_two_threads_leave_the_process_as_it_was():
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)) for _ in range(2)]
    batches = [torch.randn(64, 32) for _ in range(3)]
    state, filters = torch.get_rng_state(), [*warnings.filters]
    entered = threading.Barrier(2)

    def run(model):
        is_first = True

        def forward(model, batch):
            nonlocal is_first
            if is_first:
                is_first = False
                entered.wait(20)
            return model(batch)

        pr.compress(model, 0.5, batches, forward_fn=forward, forms=("int4",), seed=0, measure_speed=False)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, models))
    assert torch.backends.mha.get_fastpath_enabled()
    assert compiler_stance()[0] == "default"
    assert torch.equal(torch.get_rng_state(), state)
    assert warnings.filters == filters
