"""Compare QuantizedLinear, in each form, to nn.Linear in float32 and bfloat16 and to the integers of other engines.

Forward without gradients, of layers with random weights. A call takes as many copies of a layer as hold 8 MiB in 4
bits, one after the other, so that weights come from beyond the second-level cache as they do in a model; times are of
one layer. Ratios are to nn.Linear of the layer's dtype and to nn.Linear in float32: 2 is twice as fast. *rounded* is
``activations="int8"``; *no compiler* is without the compiled kernel, *packed* then with the copy that ``pr.pack_``
makes; *torch dynamic int8* is the layer of ``torch.ao.quantization.quantize_dynamic``, and onnxruntime's are
MatMulNBits (4 bits, blocks of 128, accuracy_level 0 and 4) and DynamicQuantizeMatMul, all in float32. GB/s are the
stored bytes over the time, and *reading* is ``torch.sum`` of 64 MiB. Errors are those of the product of up to 8 rows:
relative to that of the same weight in float64, without what quantizing the weight costs, for Gaussian inputs and for
heavy-tailed ones with a few columns ten times as large, as transformers have them. On several threads some layers are
measured, by wall time.

The pages on it have some of the rows, as :func:`write_page` puts them into docs/benchmarks/quantized-rows.inc.
"""

__all__ = ["run", "torch_alone", "write_page"]

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from panther.kernels.cpu import native
from torch import Tensor, nn

from benchmarks.harness import RESULTS, ROOT, figure, interleave, main, print_table, read_csv, write_csv
from panther.errors import MissingExtraError, require_extra
from panther.nn import QuantizedLinear
from panther.nn.sketch_record import plain_state

SHAPES = [(384, 1536), (2048, 2048), (1024, 4096), (4096, 4096)]  # in, out
BATCHES = [1, 8, 16, 32, 128, 512]
FORMS: dict[str, dict[str, Any]] = {
    "int8": {"bits": 8, "group_size": None},
    "int8, groups": {"bits": 8, "group_size": 128},
    "int4": {"bits": 4, "group_size": 128},
    "int3": {"bits": 3, "group_size": 128},
    "int4 + rank 32": {"bits": 4, "group_size": 128, "low_rank": 32},
    "rank in / 4": {"bits": None},  # in int8; of half the parameters where the weight is square
    "int8, rounded": {"bits": 8, "group_size": None, "activations": "int8"},
    "int4, rounded": {"bits": 4, "group_size": 128, "activations": "int8"},
}
DYNAMIC, READING = "torch dynamic int8", "reading"
RUNTIME = ("onnxruntime int4, level 0", "onnxruntime int4, level 4", "onnxruntime dynamic int8")
SEVERAL_THREADS = ([(384, 1536), (4096, 4096)], [1, 32, 512], ("int8", "int4"))
PAGE_FORMS = {  # as the figure of the page calls them
    "int8": "int8", "int8, rounded": "int8, rounded inputs", DYNAMIC: "int8, torch's dynamic layer", "int4": "int4",
    "int4, rounded": "int4, rounded inputs", "int3": "int3", "rank in / 4": "low rank in int8, a quarter",
}  # fmt: skip
PAGE_LAYERS = ((384, 1536, "float32"), (4096, 4096, "float32"), (4096, 4096, "bfloat16"))
PAGE_BATCHES = (1, 32, 128, 512)
ROWS_PAGE = ROOT / "docs" / "benchmarks" / "quantized-rows.inc"
ROWS_FORMS = {
    "bfloat16": {"int4": "4 bits", "int8, groups": "8 bits", "int4, no compiler": "4 bits, no compiler",
                 "int4, no compiler, packed": "the same, packed"},
    "float32": {"int4": "4 bits", "int8, groups": "8 bits", "int4, no compiler": "4 bits, no compiler",
                **{form: form for form in (DYNAMIC, *RUNTIME)}},
}  # fmt: skip
_BYTES = 8 << 20  # of the copies of a layer in 4 bits


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Measure every case, print each as it comes, and write the CSV."""
    rows: list[dict[str, Any]] = []
    shapes, batches, forms = (SHAPES, BATCHES, tuple(FORMS)) if torch.get_num_threads() == 1 else SEVERAL_THREADS
    for shape in shapes[:1] if quick else shapes:
        is_on_page = shape in {layer[:2] for layer in PAGE_LAYERS}
        named = forms if is_on_page else tuple(form for form in forms if form in ROWS_FORMS["bfloat16"])
        for batch in batches[:1] if quick else batches:
            found = _case(*shape, batch, named, device, budget_s)
            print_table(found)
            rows += found
            path = None if quick else write_csv("quantized", rows, device=device)
    if path is not None:
        print(f"written to {path}")
        if device == "cpu":
            write_page()


def write_page() -> None:
    """Write the tables of the page, one for each processor and number of threads with results."""
    lines: list[str] = []

    def line(*cells: str) -> None:
        lines.extend(f"      {'* -' if not number else '  -'} {cell}".rstrip() for number, cell in enumerate(cells))

    for path in sorted(RESULTS.glob("quantized-cpu-*-threads-*.csv")):
        rows = [row for row in read_csv(path) if row["memory"] == "default"]
        found = {tuple(row[key] for key in ("in", "out", "batch", "dtype", "form")): row for row in rows}
        batches = [n for n in BATCHES if any(row["batch"] == str(n) for row in rows)]
        threads = {"1": "one thread", "2": "two threads"}[rows[0]["threads"]]
        lines += [
            f".. dropdown:: {rows[0]['device']}, {threads}",
            "",
            "   .. list-table:: Times as fast as nn.Linear of the same dtype, by rows of the batch",
            "      :header-rows: 1",
            "",
        ]
        line("in, out", "", *map(str, batches), "GB/s, 1 row")
        for dtype, forms in ROWS_FORMS.items():
            for columns, outputs in SHAPES:
                for form, name in forms.items():
                    several = [found.get((str(columns), str(outputs), str(n), dtype, form)) for n in batches]
                    if several[0] is not None:
                        ratios = [f"{float(row['x nn.Linear']):.2f}" if row else "" for row in several]
                        line(f"{columns}, {outputs}", f"{name}, {dtype}", *ratios, several[0]["gb_per_s"])
        lines.append("")
    ROWS_PAGE.write_text("\n".join(lines[:-1]) + "\n")


@contextmanager
def torch_alone() -> Iterator[None]:
    """Run layers that have not run yet without the compiled kernel, as they run without a compiler."""
    takes = native.takes
    native.takes = lambda *_: False
    try:
        yield
    finally:
        native.takes = takes


@torch.no_grad()
def _case(
    columns: int, outputs: int, batch: int, forms: tuple[str, ...], device: str, budget_s: float
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    x = torch.randn(batch, columns, device=device)
    copies = max(1, _BYTES * 2 // (columns * outputs)) if budget_s else 1
    calls: dict[str, Callable[[], object]] = {}
    stored: dict[str, int] = {}
    errors: dict[str, tuple[str, str]] = {}
    heavy = _heavy_tailed(x[:8])

    def add(name: str, layer: nn.Module, weight: Tensor, bias: Tensor, size: int, context: Any = None) -> None:
        given = x.to(getattr(torch, name.partition(" ")[0]))
        calls[name] = functools.partial(_all_of, [copy.deepcopy(layer) for _ in range(copies)], given, context)
        stored[name] = size
        exact = functools.partial(_exact, weight.double(), bias.double())
        errors[name] = _error(layer, exact, given[:8]), _error(layer, exact, heavy.to(given.dtype))

    for dtype in (torch.float32, torch.bfloat16):
        prefix = str(dtype).removeprefix("torch.")
        layers: dict[str, Any] = {"nn.Linear": nn.Linear(columns, outputs, device=device, dtype=dtype)}
        for form in forms:
            arguments = FORMS[form]
            rank = min(columns, outputs) // 4 if arguments["bits"] is None else arguments.get("low_rank", 0)
            layers[form] = QuantizedLinear(
                columns, outputs, **arguments | {"low_rank": rank}, device=device, dtype=dtype
            )
        for form, layer in layers.items():
            size = sum(tensor.nbytes for tensor in plain_state(layer).values())
            wide = copy.deepcopy(layer).double()
            add(f"{prefix} {form}", layer, cast(Tensor, wide.weight), layer.bias, size)
            if form == "int4" and device == "cpu":
                with torch_alone():
                    name, fresh = f"{prefix} int4, no compiler", copy.deepcopy(layer)
                    add(name, fresh, cast(Tensor, wide.weight), layer.bias, size, torch_alone)
                    if dtype is torch.bfloat16:
                        packed = copy.deepcopy(layer).hold_packed_()
                        add(f"{name}, packed", packed, cast(Tensor, wide.weight), layer.bias, size, torch_alone)
    if device == "cpu":
        dense = nn.Linear(columns, outputs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is deprecated for torchao
            dynamic = torch.ao.quantization.quantize_dynamic(nn.Sequential(dense))[0]
        size = dynamic.weight().int_repr().nbytes + 8 + outputs * 4
        add(f"float32 {DYNAMIC}", dynamic, dynamic.weight().dequantize(), dynamic.bias(), size)
        for form in RUNTIME:
            if (session := _runtime(form, columns, outputs, x, copies)) is not None:
                calls[f"float32 {form}"], stored[f"float32 {form}"] = session
        memory = torch.ones(_BYTES * 8 // 4)
        calls[f"float32 {READING}"], stored[f"float32 {READING}"] = memory.sum, memory.nbytes
    timings = interleave(calls, device=device, budget_s=budget_s, min_rounds=5)
    rows = []
    for name, timing in timings.items():
        dtype_name, _, form = name.partition(" ")
        seconds = timing.median_s / (1 if form == READING else copies)
        beside = {"x nn.Linear": f"{dtype_name} nn.Linear", "x float32": "float32 nn.Linear"}
        if form == READING:
            beside = dict.fromkeys(beside, name)
        rows.append(
            {
                "in": columns,
                "out": outputs,
                "batch": batch,
                "dtype": dtype_name,
                "form": form,
                "copies": copies,
                "time_us": round(seconds * 1e6, 1),
                **{key: figure(timing.ratio_to(timings[other])) for key, other in beside.items()},
                "gb_per_s": figure(stored[name] / seconds / 1e9),
                "stored_bytes": stored[name],
                **dict(zip(("rms_error", "heavy_error"), errors.get(name, ("", "")), strict=True)),
            }
        )
    return rows


def _all_of(layers: list[nn.Module], x: Tensor, context: Any) -> None:
    if context is None:
        for layer in layers:
            layer(x)
    else:
        with context():
            for layer in layers:
                layer(x)


def _runtime(form: str, columns: int, outputs: int, x: Tensor, copies: int) -> tuple[Callable[[], object], int] | None:
    """Return a call of layers of random weights in onnxruntime, and the bytes of one; None without the extra."""
    try:
        runtime: Any = require_extra("onnxruntime", "onnx")
        onnx: Any = require_extra("onnx", "onnx")
    except MissingExtraError:
        return None
    batch, blocks = len(x), columns // 128
    nodes, tensors = [], []
    options: Any = {}
    for index in range(copies):
        if form == RUNTIME[2]:
            weights = {
                "B": torch.randint(-127, 128, (columns, outputs), dtype=torch.int8),
                "scale": torch.full((1,), 1e-3),
                "zero": torch.zeros(1, dtype=torch.int8),
                "bias": torch.zeros(outputs),
            }
            inputs, operator = ["B", "scale", "zero", "bias"], "DynamicQuantizeMatMul"
        else:
            weights = {
                "B": torch.randint(256, (outputs, blocks, 64), dtype=torch.uint8),
                "scales": torch.full((outputs, blocks), 1e-3),
                "zeros": torch.randint(256, (outputs, -(-blocks // 2)), dtype=torch.uint8),
                "bias": torch.zeros(outputs),
            }
            inputs, operator = ["B", "scales", "zeros", "", "bias"], "MatMulNBits"
            options = {"K": columns, "N": outputs, "bits": 4, "block_size": 128, "accuracy_level": int(form[-1])}
        tensors += [onnx.numpy_helper.from_array(value.numpy(), f"{key}{index}") for key, value in weights.items()]
        names = ["x", *(f"{name}{index}" if name else "" for name in inputs)]
        nodes.append(onnx.helper.make_node(operator, names, [f"y{index}"], domain="com.microsoft", **options))
    size = sum(value.nbytes for value in weights.values())
    kind = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        nodes, "layers", [onnx.helper.make_tensor_value_info("x", kind, [batch, columns])],
        [onnx.helper.make_tensor_value_info(f"y{index}", kind, [batch, outputs]) for index in range(copies)], tensors,
    )  # fmt: skip
    domains = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=domains, ir_version=9)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # on the cores of the next call
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    binding.bind_cpu_input("x", x.numpy())
    for index in range(copies):
        output = runtime.OrtValue.ortvalue_from_shape_and_type([batch, outputs], "float32", "cpu")
        binding.bind_ortvalue_output(f"y{index}", output)
    return functools.partial(session.run_with_iobinding, binding), size


def _heavy_tailed(x: Tensor) -> Tensor:
    """Return inputs as transformers have them: Student's t with 4 degrees of freedom, and 1 % of columns ten times."""
    tails = torch.distributions.StudentT(4.0).sample(x.shape).to(x.device)
    tails[:, ::100] *= 10
    return tails


def _exact(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return torch.nn.functional.linear(x.double(), weight.double(), bias.double())


def _error(layer: Callable[[Tensor], Tensor], exact: Callable[[Tensor], Tensor], x: Tensor) -> str:
    wanted = exact(x)
    return f"{((layer(x).double() - wanted).norm() / wanted.norm()).item():.1e}"


if __name__ == "__main__":
    main(run, __doc__, threads=(1, 2), budget_s=1.0, memory=("default",))
