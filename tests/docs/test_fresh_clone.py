"""README and quickstart are followed to the letter in a fresh clone: only what is committed is there."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import waits

ROOT = Path(__file__).resolve().parents[2]


def run(command, folder):
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MAKEFLAGS")}
    done = waits.run(command, 600, cwd=folder, env=environment)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone of HEAD whose .venv sees the libraries of this environment, so that pip has nothing to download."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    folder = tmp_path_factory.mktemp("fresh") / "checkout"
    run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(folder)], ROOT)
    run([sys.executable, "-m", "venv", "--without-pip", ".venv"], folder)
    (site,) = (folder / ".venv/lib").glob("python*/site-packages")
    (site / "libraries.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    (folder / ".venv/.torch-stamp").touch()  # the one step left out: torch is here
    run(["make", ".venv/.demo-stamp"], folder)  # what `make demo` does first
    return folder


def console(page):
    """Return the commands of the README's console blocks."""
    blocks = re.findall(r"^```console\n(.*?)^```", page, flags=re.M | re.S)
    return [re.sub(r"\s+#.*", "", line[2:]) for block in blocks for line in block.splitlines() if line.startswith("$ ")]


@pytest.mark.tool
def test_make_demo_prints_the_table_of_the_readme(clone):
    _, _, section = (clone / "README.md").read_text().partition("## Try it from a checkout")
    assert console(section)[0] == "make demo"
    printed = run(["make", "demo"], clone)
    labels = re.findall(r"^(?:  )?([a-z][a-z ,0-9]+?)  +\S", re.search(r"```text\n(.*?)```", section, re.S)[1], re.M)
    assert "test accuracy, mean of 4 seeds" in labels
    assert [label for label in labels if label not in printed] == []
    assert (clone / ".venv/bin/panther").exists()
    module_path = run([clone / ".venv/bin/python", "-c", "import panther; print(panther.__file__)"], clone.parent)
    assert module_path.startswith(str(clone))


@pytest.mark.tool
def test_the_code_of_the_readme_and_the_quickstart_runs(clone):
    python = clone / ".venv/bin/python"
    readme = (clone / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", readme, flags=re.M | re.S)
    run([python, "-W", "error", "-c", "\n".join(blocks)], clone.parent)
    run([python, "-m", "doctest", clone / "docs/start/quickstart.rst"], clone.parent)
