"""Processes that serve many tests: each test runs its function on all of them, in a process group of its own.

Forking two processes and starting torch's elastic agent takes a few tenths of a second, and what a process does for
the first time (imports, the first sharded operation) takes more. A pool does both once for each world size. A test
gets a new process group, and its processes are put in the state of the pytest process: working directory, environment,
warning filters, random generators, default dtype. A pool in which a test failed, hung or left anything behind is
ended, and the next test starts another.
"""

import atexit
import contextlib
import gc
import io
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import wait

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
import waits
from output_shapes import keep_output_shapes
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from panther.distributed.comm.process_group import shutdown, start_group

LIMIT_S = 120.0


class RankError(AssertionError):
    """A function raised on a rank, or did not return: which rank, and its traceback."""


class Pool:
    """One process for each rank of a world of ``n``."""

    def __init__(self, n):
        self.folder = tempfile.mkdtemp(prefix="panther-pool-")
        self.jobs, self.processor_s, self.pids, self.pipes = 0, 0.0, [], []
        for rank in range(n):
            ours, theirs = multiprocessing.Pipe()
            pid = os.fork()
            if pid == 0:
                ours.close()
                for pipe in self.pipes:
                    pipe.close()
                _serve(rank, n, theirs)
            theirs.close()
            self.pids.append(pid)
            self.pipes.append(ours)

    def run(self, work, args, limit_s):
        """Return what ``work(*args)`` returned, by rank."""
        self.jobs += 1
        # A collective operation gives up only after the wait below, which knows a hang from a busy machine.
        timeout_s = 2 * waits.LONGEST * limit_s
        job = _pickled((work, args, _state(), f"{self.folder}/store-{self.jobs}", timeout_s))
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send_bytes(job)
            except BrokenPipeError:
                raise RankError(f"rank {rank} ended after job {self.jobs - 1}, {self._ended(rank)}") from None
        results, deadline, reusable = {}, waits.Deadline(limit_s), True
        while len(results) < len(self.pipes):
            missing = [rank for rank in range(len(self.pipes)) if rank not in results]
            ready = wait([self.pipes[rank] for rank in missing], waits.PERIOD_S)
            if not ready and deadline.passed():
                stacks = "\n".join(f"rank {rank}:\n{waits.stack_of(self.pids[rank])}" for rank in missing)
                raise RankError(
                    f"ranks {missing} of {len(self.pipes)} had not returned after {limit_s:g} s\n\n{stacks}"
                )
            for rank in missing:
                if self.pipes[rank] in ready:
                    results[rank], clean = self._answer(rank)
                    reusable = reusable and clean
        if not reusable:
            self.close()
        return [results[rank] for rank in range(len(self.pipes))]

    def _answer(self, rank):
        try:
            outcome, value, clean, seconds = pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            raise RankError(f"rank {rank} ended {self._ended(rank)}") from None
        self.processor_s += seconds
        if outcome == "raised":
            raise RankError(f"rank {rank} of {len(self.pipes)} raised {value}")
        return value, clean

    def _ended(self, rank):
        _, status = os.waitpid(self.pids[rank], 0)
        self.pids[rank] = None
        return f"with exit code {os.waitstatus_to_exitcode(status)}"

    def close(self):
        """End the processes; the pool cannot be used after it."""
        for pid in filter(None, self.pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        for pipe in self.pipes:
            pipe.close()
        self.pids, self.pipes = [], []
        shutil.rmtree(self.folder, ignore_errors=True)


_pools = {}


def run(work, n, args=(), limit_s=LIMIT_S):
    """Run ``work(*args)`` on the pool of ``n`` processes, which is started if there is none; results by rank."""
    pool = _pools.get(n)
    if pool is None or not pool.pids:
        pool = _pools[n] = Pool(n)
    try:
        return pool.run(work, args, limit_s)
    except BaseException:  # KeyboardInterrupt and the timeout of pytest too: its processes wait in the middle of a test
        pool.close()
        raise


def processor_s():
    """Return the seconds of processor time that the tests on the pools that are running have taken."""
    return sum(pool.processor_s for pool in _pools.values() if pool.pids)


@atexit.register
def close_all():
    """End all pools."""
    while _pools:
        _pools.popitem()[1].close()


class _Pickler(cloudpickle.Pickler):
    """Takes functions of tests along, but not what would not come back."""

    def reducer_override(self, thing):
        if isinstance(thing, pytest.MonkeyPatch):
            raise TypeError("monkeypatch would change a process that other tests use: on_ranks(..., fresh=True)")
        return super().reducer_override(thing)


def _pickled(job):
    with io.BytesIO() as file:
        _Pickler(file).dump(job)
        return file.getvalue()


def _state():
    """What a forked process would have inherited from this one."""
    return {
        "directory": os.getcwd(),
        "environment": dict(os.environ),
        "filters": list(warnings.filters),
        "torch": torch.get_rng_state(),
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "path": list(sys.path),
    }


def _restore(state, rank, n):
    os.chdir(state["directory"])
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n}
    environment = state["environment"] | {name: str(value) for name, value in own.items()}
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    warnings.filters[:] = state["filters"]
    warnings._filters_mutated()  # else what was warned of once is not warned of in the next test
    torch.set_rng_state(state["torch"])
    random.setstate(state["random"])
    np.random.set_state(state["numpy"])
    torch.set_default_dtype(state["dtype"])
    torch.use_deterministic_algorithms(state["deterministic"])
    torch.set_grad_enabled(True)
    sys.path[:] = state["path"]


def _serve(rank, n, pipe):
    """Run jobs in a process of the pool until its parent ends."""
    try:
        atexit.unregister(close_all)
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):  # those of pytest and its timeout
            signal.signal(name, signal.SIG_DFL)
        torch.set_num_threads(1)
        keep_output_shapes()
        gc.collect()
        gc.freeze()  # collecting after each test then looks only at what tests made
        while True:
            work, args, state, store, timeout_s = pickle.loads(pipe.recv_bytes())
            _restore(state, rank, n)
            pipe.send_bytes(_answer_to(work, args, rank, n, store, timeout_s))
            work = args = None
            _clean()
    except (EOFError, BrokenPipeError):
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _answer_to(work, args, rank, n, store, timeout_s):
    begun = time.process_time()
    try:
        start_group(rank, n, "gloo", timeout_s, dist.FileStore(store, n))
        group = dist.group.WORLD
        value = work(*args)
        clean = dist.is_initialized() and dist.group.WORLD is group
        answer = pickle.dumps(("returned", value, clean, time.process_time() - begun))
    except BaseException as error:
        lines = "".join(traceback.format_exception(error))
        return pickle.dumps(("raised", f"{type(error).__name__}: {error}\n\n{lines}", False, 0.0))
    shutdown()
    return answer


def _clean():
    """Forget what the last test left: groups in caches would be used for a mesh that compares equal."""
    gc.collect()
    _clear_sharding_prop_cache()
    torch._dynamo.reset()
