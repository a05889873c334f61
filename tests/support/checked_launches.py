"""Launch every kernel twice on a GPU that runs nothing, and compare each direct launch with ``kernel[grid](...)``.

The second launch of a plan goes to the compiled kernel without Triton's front end. It must reach the driver with the
arguments that Triton's front end passes for the same tensors, and with the kernel that Triton selects for them.
It prints the number of comparisons for each kernel, and ends with an error at the first difference.
"""

import random
import sys
from collections import Counter

from benchmarks.gpu import stub

RECORDER = stub.install()

import torch  # noqa: E402
import triton  # noqa: E402
from panther.kernels._triton import _launch  # noqa: E402
from panther.kernels.ops._crossover import using_path  # noqa: E402
from triton.knobs import HookChain  # noqa: E402

from benchmarks.gpu.kernel_cases import CASES  # noqa: E402
from panther import kernels  # noqa: E402

COMPARED = Counter()
launch_unchecked = _launch.Launch.__call__


def passed_values(arguments):
    """Return what a launch passes to the driver, with addresses for tensors and without hooks, which are empty."""
    values = []
    for value in arguments:
        if isinstance(value, tuple | list):
            values += passed_values(value)
        elif isinstance(value, torch.Tensor):
            values.append(value.data_ptr())
        elif isinstance(value, HookChain) or type(value).__name__ == "LazyDict":
            values.append(None)
        else:
            values.append(value)
    return values


def launch_checked(self, *tensors):
    """Launch, and again through Triton's front end, and compare."""
    RECORDER.launches.clear()
    RECORDER.stream += 1  # Every launch must read the stream that is current.
    was_direct = self._direct is not None
    launch_unchecked(self, *tensors)
    self._kernel[self._grid](*tensors, *self._scalars, **self._constants)
    ours, reference = (passed_values(launch) for launch in RECORDER.launches)
    assert ours == reference, (self._kernel, ours, reference)
    assert self._direct is not None, "the launcher of this version of Triton is not known"
    COMPARED[self._kernel.fn.__name__] += was_direct


def compare_cases():
    """Launch all cases of the table of resources."""
    for case in CASES:
        if case.name != "signs":  # Signs are drawn once, when a layer is made.
            for _ in range(2):
                case.launch(case.dtypes[0])


def random_operand(generator, rows, columns, dtype):
    """Return a matrix of random layout: transposed, part of a larger one, and at any address."""
    extra, first = generator.choice((0, 0, 8, 3)), generator.choice((0, 0, 0, 1))
    shape = (columns, rows + extra) if generator.random() < 0.3 else (rows, columns + extra)
    memory = torch.empty(shape[0] * shape[1] + first, dtype=dtype)[first:].view(shape)
    return memory[:, :rows].mT if shape[0] == columns and shape[1] == rows + extra else memory[:, :columns]


def compare_sketched(generator):
    """Call the sketched product of random operands, so that plans of one key serve other addresses."""
    size = (1, 2, 3, 16, 17, 32, 64, 100, 256)
    rows, n_in, n_out, R = (generator.choice(size) for _ in range(4))
    dtype = generator.choice((torch.bfloat16, torch.float32))
    packed = generator.random() < 0.3
    bias = torch.empty(n_out, dtype=dtype) if generator.random() < 0.5 else None
    shapes = ((rows, n_in), (n_in, R), (R, n_out), (R, n_out), (n_in, R))
    layouts = generator.getrandbits(64)
    for _ in range(2):
        draw = random.Random(layouts)
        x, S1, U1, S2, U2 = (random_operand(draw, *shape, dtype) for shape in shapes)
        if packed:
            U1 = torch.empty(R, -(-n_out // 32), dtype=torch.int32)
            U2 = torch.empty(R, -(-n_in // 32), dtype=torch.int32)
        scale = generator.choice((0.25, 0.5))
        kernels.sketched_matmul(x, S1, U1, S2, U2, bias, scale)
        with torch.enable_grad():
            trained = [t.detach().requires_grad_() for t in (x, S1, S2)]
            output = kernels.sketched_matmul(trained[0], trained[1], U1, trained[2], U2, bias, scale)
            torch.autograd.grad(output, trained, random_operand(draw, rows, n_out, dtype))
        if not packed:
            kernels.sketched_matmul(x, S1, U1[0].contiguous(), S2, U2[:, 0].contiguous(), bias, scale)
            kernels.sketched_outer(kernels.sketched_inner(x, S1, U2, 0.5), U1, S2, bias)


def compare_quantized(generator):
    """Multiply by a quantized weight twice, at other addresses."""
    rows, columns, n_out = (generator.choice((1, 3, 16, 17, 64, 100)) for _ in range(3))
    bits, rank = generator.choice((2, 3, 4, 8)), generator.choice((0, 5))
    group_size = generator.choice((16, 33, 64))
    dtype = generator.choice((torch.bfloat16, torch.float32))
    groups = -(-columns // group_size)
    for _ in range(2):
        codes = kernels.QuantizedCodes(
            torch.zeros(n_out, kernels.code_bytes(columns, bits), dtype=torch.uint8), bits,
            torch.zeros(n_out, groups, dtype=torch.bfloat16), torch.zeros(n_out, groups, dtype=torch.uint8), group_size,
        )  # fmt: skip
        factors = None
        if rank:
            left, right = torch.zeros(n_out, rank, dtype=torch.int8), torch.zeros(rank, columns, dtype=torch.int8)
            factors = kernels.QuantizedFactors(left, right, torch.zeros(rank))
        weight = kernels.QuantizedOperands(columns, codes, factors)
        kernels.quantized_matmul(torch.zeros(rows, columns, dtype=dtype), weight, torch.zeros(n_out, dtype=dtype))


def compare_attention(generator):
    """Attend twice, forward and backward, to operands of random layout at other addresses."""
    n = generator.choice((1, 17, 100, 300))  # chunks have 64 rows and more, and three chunks a scan
    D, E = (generator.choice((1, 16, 17, 64, 100)) for _ in range(2))
    dtype = generator.choice((torch.bfloat16, torch.float32))
    layouts = generator.getrandbits(64)
    for _ in range(2):
        draw = random.Random(layouts)
        q, k, v = (random_operand(draw, n, width, dtype).requires_grad_() for width in (D, D, E))
        c = draw.choice((None, torch.empty(n, requires_grad=True)))
        kernels.causal_linear_attention(q, k, v, c).backward(random_operand(draw, n, E, dtype))


def main():
    """Compare, and print the number of comparisons."""
    RECORDER.is_on = True
    _launch.Launch.__call__ = launch_checked
    generator = random.Random(5)
    with torch.no_grad():
        compare_cases()
        for path in ("pair", "fused"):
            for _ in range(int(sys.argv[1])):
                with using_path(path):
                    compare_sketched(generator)
        for _ in range(int(sys.argv[1])):  # Without a path that is forced, plans are kept from call to call.
            compare_sketched(generator)
            compare_quantized(generator)
        with torch.enable_grad():
            for _ in range(int(sys.argv[1])):
                compare_attention(generator)
    print(triton.__version__)
    for name, count in COMPARED.items():
        print(name, count)


if __name__ == "__main__":
    main()
