"""Launches that are prepared once: a kernel, its grid and all its arguments except for the tensors."""

__all__ = ["Launch"]

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ._runtime import are_launches_observed, bind


class Launch:
    """A launch of a kernel on tensors that differ from the tensors of the first call only in their addresses.

    The first call goes through ``kernel[grid](...)``, which compiles the kernel. Later calls go to the compiled kernel,
    on the stream that is current then. Calls continue to go through ``kernel[grid](...)`` in the interpreter, with a
    version of Triton whose launcher is not known, and while a profiler observes the launches.

    The caller sees to it that shapes, strides, dtypes and the device stay the same, and that an address is a multiple
    of 16 if it was one in the first call.

    Args:
        kernel: A function decorated with ``triton.jit`` whose parameters are tensors, then scalars, then constants.
        grid: The numbers of programs.
        *scalars: The arguments between the tensors and the constants.
        **constants: The constants of the kernel, and options of the compiler.
    """

    __slots__ = ("_constants", "_direct", "_grid", "_is_bound", "_kernel", "_scalars")

    def __init__(self, kernel: Any, grid: tuple[int, ...], *scalars: float, **constants: Any) -> None:
        self._kernel, self._grid, self._scalars, self._constants = kernel, grid, scalars, constants
        self._direct: Callable[..., None] | None = None
        self._is_bound = False

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch the kernel on tensors; None stands for a tensor that the kernel does not read."""
        if self._direct is not None and not are_launches_observed():
            self._direct(*[tensor if tensor is None else tensor.data_ptr() for tensor in tensors])
            return
        compiled = self._kernel[self._grid](*tensors, *self._scalars, **self._constants)
        if not self._is_bound:
            self._direct = bind(self._kernel, compiled, self._grid, self._scalars, self._constants)
            self._is_bound = True
