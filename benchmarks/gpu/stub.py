"""A GPU that runs nothing, so that what happens on the host before a launch can be measured and checked without one.

Triton classifies the arguments of every launch as for sm_90, and its own launcher gets them. The compiler and the
function in C that would call the driver are replaced. Tensors on the CPU count as tensors on the GPU.
"""

__all__ = ["Recorder", "StubKernel", "install"]

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

# Before Triton is imported.
os.environ.pop("TRITON_INTERPRET", None)
os.environ["PANTHER_KERNELS"] = "triton"

import triton
import triton.backends.nvidia.driver as nvidia
from panther.kernels import selection
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

_TARGET = GPUTarget("cuda", 90, 32)


class StubKernel(CompiledKernel):
    """A compiled kernel without code."""

    def __init__(self, src: Any, options: dict[str, Any]) -> None:
        self.src, self.name, self.hash = src, src.fn.__name__, ""
        self.metadata = SimpleNamespace(
            target=_TARGET, warp_size=32, shared=0, num_warps=options["num_warps"], num_ctas=1, global_scratch_size=0,
            global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1, launch_cooperative_grid=False,
            launch_pdl=False, tensordesc_meta=None,
        )  # fmt: skip
        self.packed_metadata = (self.metadata.num_warps, 1, 0)
        self.metadata_group: dict[str, str] = {}
        self.kernel = b""
        self.module = self.function = self._module_pid = self._run = None
        self.options = options


class Recorder:
    """Keeps what reaches the driver: the arguments of every launch, if ``is_on``."""

    stream = 0
    """The stream that is current."""

    def __init__(self) -> None:
        self.is_on = False
        self.launches: list[tuple[Any, ...]] = []

    def launch(self, *arguments: Any) -> None:
        """Stand for the function in C that launches."""
        if self.is_on:
            self.launches.append(arguments)


class _Utils:
    def __init__(self, launch: Callable[..., None]) -> None:
        self.launch = launch

    def get_device_properties(self, device: object) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}

    def build_signature_metadata(self, signature: list[str]) -> list[str]:
        return signature

    def load_binary(self, name: str, kernel: bytes, shared: int, device: object) -> tuple[Any, ...]:
        return object(), name, 0, 0, 1024

    def unload_module(self, module: object) -> None:
        pass


class _Driver:
    launcher_cls = nvidia.CudaLauncher

    def __init__(self, recorder: Recorder) -> None:
        self.utils = _Utils(recorder.launch)
        self.recorder = recorder

    def get_current_stream(self, device: int) -> int:
        return self.recorder.stream

    def get_current_target(self) -> GPUTarget:
        return _TARGET

    def get_current_device(self) -> int:
        return 0


def install() -> Recorder:
    """Replace the driver, the compiler and the test for a GPU in this process; return what will record launches."""
    recorder = Recorder()
    triton.runtime.driver.set_active(_Driver(recorder))
    triton.compiler.compile = lambda src, target, options, _env_vars=None: StubKernel(src, options)
    # Triton 3.6 compiles a launcher in C for each kernel. Triton 3.9 has one for all kernels, in a module in C that
    # needs the driver, as the class of its arguments does.
    nvidia.library_dirs = list
    nvidia.compile_module_from_src = lambda **_: SimpleNamespace(launch=recorder.launch)
    nvidia.PyKernelArg = lambda nested_tuple, type: type
    nvidia.ARG_CONSTEXPR, nvidia.ARG_KERNEL = "constexpr", "argument"
    selection.interpreting = lambda: True
    selection.backend.cache_clear()
    return recorder
