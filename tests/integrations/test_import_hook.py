"""`import panther` registers the method of compressed folders, whatever is imported first. Each case is a process."""

import sys

import pytest
import torch
import waits

import panther as pr

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.extra

IS_REGISTERED = """
from transformers.quantizers import auto
assert auto.AUTO_QUANTIZER_MAPPING["panther"].__name__ == "PantherQuantizer"
assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["panther"].from_dict({"modules": {}}).quant_method == "panther"
assert auto.AUTO_QUANTIZER_MAPPING["panther"] is sys.modules["panther.integrations.transformers"].PantherQuantizer
import transformers.modeling_utils
hooks = [finder for finder in sys.meta_path if type(finder).__module__.startswith("panther")]
assert not [hook for hook in hooks if hook.name != "peft"]
assert "exec_module" not in vars(auto.__spec__.loader)
base, count = transformers.PreTrainedModel, 0
for name in ("save_pretrained", "from_pretrained"):
    function = getattr(base, name)
    count += hasattr(function, "__wrapped__") and not hasattr(function.__wrapped__, "__wrapped__")
assert count == 2
"""


def run(code, *arguments):
    return waits.run([sys.executable, "-c", "import sys\n" + code, *arguments], check=True).stdout


@pytest.mark.parametrize(
    "imports",
    [
        "import transformers.quantizers.auto\nimport panther",
        *(
            pytest.param(imports, marks=pytest.mark.slow)
            for imports in (
                "import panther, transformers\ntransformers.BertModel",
                "import panther\nfrom transformers import pipeline, AutoModelForCausalLM, Trainer",
                "import transformers\ntransformers.BertModel\nimport panther",
                "import transformers\nimport panther\ntransformers.BertModel",
                "import panther.integrations.transformers",
                "import panther.nn\nimport transformers.quantizers.auto",
            )
        ),
    ],
)
def test_every_order_of_imports_registers(imports):
    run(imports + IS_REGISTERED)


def test_the_hook_loads_nothing_and_goes_away():
    run("""
before = list(sys.meta_path)
import panther, importlib
hooks = [finder for finder in sys.meta_path if finder not in before]
assert sorted(hook.name for hook in hooks) == ["peft", "transformers.modeling_utils", "transformers.quantizers.auto"]
importlib.reload(panther)
assert [finder for finder in sys.meta_path if finder not in before] == hooks
loaded = {"torch", "transformers", "numpy", "panther.nn", "panther.integrations.transformers"} & set(sys.modules)
assert not loaded, loaded
import importlib.util, transformers
assert importlib.util.find_spec("transformers.quantizers.auto").name == "transformers.quantizers.auto"
import transformers.quantizers.auto
assert [hook.name for hook in sys.meta_path if hook in hooks and hook.name != "peft"] == ["transformers.modeling_utils"]
import inspect
assert "class AutoHfQuantizer" in inspect.getsource(transformers.quantizers.auto)
""")


def test_a_transformers_that_does_not_load_is_as_without_panther(tmp_path):
    run(
        """
import pathlib
folder = pathlib.Path(sys.argv[1]) / "transformers" / "quantizers"
folder.mkdir(parents=True)
for name in (folder.parent, folder):
    (name / "__init__.py").write_text("")
(folder / "auto.py").write_text("raise RuntimeError('of its own')")
sys.path.insert(0, sys.argv[1])
import panther
for _ in range(2):
    try:
        import transformers.quantizers.auto
    except RuntimeError as error:
        assert str(error) == "of its own" and error.__cause__ is None
    else:
        raise AssertionError
assert sum(type(finder).__module__.startswith("panther") for finder in sys.meta_path) == 3
(folder / "auto.py").write_text("AUTO_QUANTIZER_MAPPING, AUTO_QUANTIZATION_CONFIG_MAPPING = {}, {}")
import importlib
importlib.invalidate_caches()
sys.dont_write_bytecode = True
import transformers.quantizers.auto as registry
assert list(registry.AUTO_QUANTIZER_MAPPING) == ["panther"]
assert "torch" not in sys.modules
""",
        str(tmp_path),
    )


@pytest.mark.slow
def test_threads_that_import_at_the_same_time():
    run(
        """
import threading, panther
start, errors = threading.Barrier(4), []
def load(statement):
    start.wait()
    try:
        exec(statement)
    except BaseException as error:
        errors.append(error)
# Not "from transformers import ...": its package replaces itself in sys.modules at the end of its import, so that a
# thread that waits for the import gets the old module, also without panther, and finds no names in it. Not "import
# transformers.trainer": it and modeling_utils import each other's modules, and where two threads would wait for each
# other, Python lets one of them go on with a module that is half imported.
statements = ["import transformers.models.bert.modeling_bert", "import panther.integrations.transformers",
              "import transformers.models.auto", "import panther; panther.compress"]
threads = [threading.Thread(target=load, args=(statement,)) for statement in statements]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not errors, errors
"""
        + IS_REGISTERED
    )


def test_a_process_that_imported_panther_loads_a_compressed_folder(tmp_path):
    """Only the import of the adapter made AutoModel build the layers; without it they had random numbers."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    model = transformers.BertModel(config).eval()
    pr.sketch_layers_(model, pr.SketchConfig(low_rank=4), seed=0)
    ids = torch.arange(8)[None]
    pr.save_compressed(model, tmp_path)
    torch.save(model(ids).last_hidden_state, tmp_path / "expected.pt")
    run(
        """
import panther, torch, transformers
model = transformers.AutoModel.from_pretrained(sys.argv[1])
expected = torch.load(sys.argv[1] + "/expected.pt")
assert torch.equal(model(torch.arange(8)[None]).last_hidden_state, expected)
""",
        str(tmp_path),
    )
