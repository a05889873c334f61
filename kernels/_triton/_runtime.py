"""Private names of Triton that the launchers need, each with its reason and its public fallback.

No other module of the kernels uses a private name of Triton.
"""

__all__ = ["are_launches_observed", "bind", "current_target"]

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import triton

# Versions whose launchers were compared with ``kernel[grid](...)``, from the first up to the second, which is excluded.
_COMPARED_VERSIONS = ((3, 6), (3, 10))
# The parameters of the launcher of a compiled kernel in Triton 3.6 and in 3.9. Both take the same nine values before
# the arguments of the kernel.
_LAUNCHER_PARAMETERS = (
    ("gridX", "gridY", "gridZ", "stream", "function", "args"),
    (
        "gridX", "gridY", "gridZ", "stream", "function", "kernel_metadata", "launch_metadata", "launch_enter_hook",
        "launch_exit_hook", "args",
    ),
)  # fmt: skip


def current_target() -> Any:
    """Return the target that Triton compiles for: its ``backend``, ``"cuda"`` or ``"hip"``, and its ``arch``.

    The fallback is ``torch.cuda.get_device_capability``, which knows nothing of a target that a test names.
    """
    driver = triton.runtime.driver.active
    return _target(driver, driver.get_current_device())


@functools.lru_cache(maxsize=64)  # Triton asks the device for its properties in every call.
def _target(driver: Any, device: Any) -> Any:
    return driver.get_current_target()


def are_launches_observed() -> bool:
    """Return whether a tool, such as Triton's profiler, asked to be called at every launch.

    A chain of hooks that is empty calls nobody. The fallback is to assume that there is a hook.
    """
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def bind(
    kernel: Any, compiled: Any, grid: Sequence[int], scalars: Sequence[Any], constants: dict[str, Any]
) -> Callable[..., None] | None:
    """Return a function that launches a compiled kernel on pointers, or None if the launcher is not a known one.

    ``kernel[grid](...)`` binds and classifies all arguments in every call, which takes ten microseconds and selects the
    same compiled kernel again as long as nothing but the addresses changes, and these by multiples of 16 bytes. The
    function that is returned calls the launcher of the compiled kernel as ``kernel[grid](...)`` would. Addresses are
    passed as integers, which the launcher does not look up in the driver. The fallback is ``kernel[grid](...)``.

    Args:
        kernel: A function decorated with ``triton.jit`` whose parameters are tensors, then scalars, then constants.
        compiled: What ``kernel[grid](...)`` returned.
        grid: The numbers of programs.
        scalars: The arguments between the tensors and the constants.
        constants: The constants by name, and options of the compiler.
    """
    names = getattr(kernel, "arg_names", None)
    if not names or not isinstance(compiled, triton.compiler.CompiledKernel) or not _is_known(compiled.run):
        return None
    constant_names = [name for name in names if name in constants]
    first = len(names) - len(constant_names)
    if list(names[first:]) != constant_names or first < len(scalars):
        return None
    driver = triton.runtime.driver.active
    device, stream_of = driver.get_current_device(), driver.get_current_stream
    x, y, z = (*grid, 1, 1)[:3]
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    tail = (*scalars, *(constants[name] for name in constant_names))

    # The argument that has a default keeps the compiled kernel alive, which unloads its code when it is freed.
    def launch(*pointers: int | None, _owner: Any = compiled) -> None:
        run(x, y, z, stream_of(device), function, metadata, None, None, None, *pointers, *tail)

    return launch


def _is_known(launcher: Any) -> bool:
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not _COMPARED_VERSIONS[0] <= version < _COMPARED_VERSIONS[1]:
        return False
    return tuple(inspect.signature(launcher).parameters) in _LAUNCHER_PARAMETERS
