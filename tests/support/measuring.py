"""Bytes that a rank holds and sends while it trains a step, to compare with what was predicted."""

import ctypes
import gc
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.utils.checkpoint
from live_bytes import LiveBytes
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from panther.distributed import CommunicationCounter
from panther.nn.base import SketchedModule


def local(tensor):
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def storages(tensors):
    """Bytes of the different storages behind tensors, padding too."""
    return sum({local(t).untyped_storage()._cdata: local(t).untyped_storage().nbytes() for t in tensors}.values())


_LARGE, _MMAP_THRESHOLD = 1 << 17, -3  # of glibc's mallopt


def return_large_tensors():
    """Let glibc give the memory of large tensors back as soon as they are freed: it else keeps some of it."""
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)


def rise_of(work):
    """By how many bytes the peak of this process's resident memory rises in ``work()``, and what that returns."""
    return_large_tensors()
    gc.collect()  # sharded models are in circles
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins with what is held now
    first_peak = _resident_peak()
    result = work()
    return _resident_peak() - first_peak, result


def _resident_peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def assert_holds_one_checkpointed_call(function, x, parameters=()):
    """Fail if backward keeps what it computes anew for later calls, or for the garbage collector.

    Eight calls may rise above two by two outputs of ``function(x)``: each is held until its backward pass.
    """

    def peak_and_rest(calls):
        with LiveBytes() as live:
            total = sum(checkpoint(function, x, use_reentrant=False).square().mean() for _ in range(calls))
            first_bytes = live.now
            total.backward()
            del total
            for tensor in (x, *parameters):
                tensor.grad = None
        return live.peak - first_bytes, live.now

    peak_and_rest(1)  # caches of the first call
    gc.disable()
    try:
        (few, rest), (many, rest_of_many) = peak_and_rest(2), peak_and_rest(8)
    finally:
        gc.enable()
    assert rest_of_many <= rest
    assert many <= few + 2 * function(x).nbytes


class Kept:
    """A tensor that autograd keeps."""

    def __init__(self, owner, tensor):
        self.owner, self.tensor, self.key = owner, tensor, local(tensor).untyped_storage()._cdata
        size = local(tensor).untyped_storage().nbytes()
        if self.key in owner.given:  # a microbatch, of a batch that is there anyway
            self.key, size = (self.key, tensor.storage_offset()), tensor.nbytes
        owner.add(self.key, size)

    def __del__(self):
        self.owner.drop(self.key)


class Activations(torch.autograd.graph.saved_tensors_hooks):
    """The most bytes that autograd keeps at once, without parameters, buffers and what was received."""

    def __init__(self, modules, given, received=lambda: ()):
        self.given = {tensor.untyped_storage()._cdata for tensor in given}
        self.modules, self.received, self.users, self.sizes, self.now, self.peak = modules, received, {}, {}, 0, 0
        super().__init__(self.pack, lambda kept: kept.tensor if isinstance(kept, Kept) else kept)

    def pack(self, tensor):
        own = [t for m in self.modules for t in (*m.parameters(), *m.buffers())]
        if local(tensor).untyped_storage()._cdata in {
            local(t).untyped_storage()._cdata for t in (*own, *self.received())
        }:
            return tensor
        return Kept(self, tensor)

    def note(self, holder, tensor):
        """Count a tensor as long as an object of torch's lives that holds it."""
        holder.noted = self.pack(tensor)

    def add(self, key, size):
        self.users[key] = self.users.get(key, 0) + 1
        if self.users[key] == 1:
            self.sizes[key] = size
            self.now += size
            self.peak = max(self.peak, self.now)

    def drop(self, key):
        self.users[key] -= 1
        if self.users[key] == 0:
            self.now -= self.sizes.pop(key)


@contextmanager
def checkpointed(activations):
    """Let activations include what checkpointing saves selectively and makes again, of which torch tells no hook."""
    recomputing, cached = torch.utils.checkpoint._recomputation_hook, torch.utils.checkpoint._VersionWrapper
    begin, keep = recomputing.__init__, cached.__init__

    def init(self, frame, group):
        begin(self, frame, group)
        pack = self.pack_hook

        def noted(tensor):
            holders, place = frame().weak_holders, frame().recomp_counter[group]
            try:
                return pack(tensor)
            finally:  # the last one ends the recomputation by an exception
                holder = holders[place]() if place < len(holders) else None
                if holder is not None:
                    activations.note(holder.handles[group], tensor)

        self.pack_hook = noted

    def noted(self, value):
        keep(self, value)
        if isinstance(value, torch.Tensor):
            activations.note(self, value)

    recomputing.__init__, cached.__init__ = init, noted
    try:
        yield
    finally:
        recomputing.__init__, cached.__init__ = begin, keep


def received(trainer):
    """Buffers of a pipeline's stages."""
    infos = [info for stage in trainer.stages for args in stage.args_recv_info.values() for info in args]
    return [info.buffer for info in infos if getattr(info, "buffer", None) is not None]


def train(applied, x, target, loss_fn, steps=2, autocast_dtype=None):
    """Train what ``plan.apply`` gave, and measure the last step, before which the optimizer has made its states."""
    pipeline = hasattr(applied, "train_step")
    model = applied.model if pipeline else applied
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        activations = Activations([model], (x, target), (lambda: received(applied)) if pipeline else tuple)
        autocast = torch.autocast("cpu", autocast_dtype) if autocast_dtype else nullcontext()
        with activations, checkpointed(activations), CommunicationCounter() as traffic:
            if pipeline:
                loss = applied.train_step((x, target), optimizer, loss_fn)
            else:
                optimizer.zero_grad()
                with autocast:
                    loss = loss_fn(model(x), target)
                loss.backward()
        if not pipeline:
            optimizer.step()
    parameters = list(model.parameters())
    sketches = [
        getattr(m, name) for m in model.modules() if isinstance(m, SketchedModule) and not m.is_fitted
        for name in m.sketch_names
    ]  # fmt: skip
    sent = traffic.bytes_by_operation
    return {
        "parameters": storages(parameters),
        "gradients": storages([p.grad for p in parameters if p.grad is not None]),
        "optimizer": storages([t for state in optimizer.state.values() for t in state.values()]),
        "sketches": storages(sketches),
        "activations": activations.peak,
        "sent": {name: size for name, size in sent.items()},
        "loss": float(loss.detach() if isinstance(loss, torch.Tensor) else loss),
    }
