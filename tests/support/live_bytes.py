"""The bytes of tensors that are made and not freed yet."""

import weakref

from torch import Tensor

from panther._torch import TorchDispatchMode, storage_key, tree_leaves


class LiveBytes(TorchDispatchMode):
    """Count the bytes of tensors that are made within the block and not freed yet.

    ``now`` is the present number of bytes on all devices, and ``peak`` the largest one; the workspace within an
    operation is not counted.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        new_tensors = {storage_key(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):  # a view, or written to in place
                new_tensors.pop(storage_key(leaf), None)
        for key, tensor in new_tensors.items():
            if key not in self._known:
                storage = tensor.untyped_storage()
                self.now += storage.nbytes()
                # torch keeps the Python object of a storage alive as long as the storage, so that the weak reference
                # ends when the memory is freed.
                self._known[key] = weakref.ref(storage, self._freed(key, storage.nbytes()))
        self.peak = max(self.peak, self.now)
        return result

    def _freed(self, key, size):
        def freed(_):
            self.now -= size
            del self._known[key]

        return freed
