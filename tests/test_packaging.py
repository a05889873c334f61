"""The wheel holds all of Panther and nothing else, and works from an empty folder; the README's code runs."""

import re
import shutil
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import waits

import panther

ROOT = Path(__file__).resolve().parents[1]

# Run with `-I -S`: neither the checkout, nor the environment's editable install (a .pth file) can answer for the wheel.
# The dependencies are put on the path after it.
USE = """
import sys
target, site = sys.argv[1:]
sys.path[:0] = [target]
sys.path.append(site)
import torch
import panther as pr
import panther.kernels
for module in (pr, panther.kernels, pr.nn.linear):
    assert module.__file__.startswith(target), module.__file__
layer = pr.nn.SKLinear(64, 48, num_terms=1, low_rank=2)
assert layer(torch.ones(3, 64)).shape == (3, 48)
print(pr.__version__)
"""


def run(*command: object, cwd: Path) -> str:
    done = waits.run([sys.executable, *command], cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built by the environment's own setuptools, from a copy, as building leaves folders beside the sources."""
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("not a source checkout")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("panther", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", out, source, cwd=out)
    (built,) = out.glob("*.whl")
    return built


def test_every_package_is_shipped():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {"panther": ROOT / "panther", "panther.kernels": ROOT / "kernels"}
    packages = {
        ".".join((name, *path.parent.relative_to(folder).parts))
        for name, folder in folders.items()
        for path in folder.rglob("__init__.py")
    }
    assert sorted(listed) == sorted(packages)


@pytest.mark.tool
def test_the_wheel_holds_every_module_and_no_top_level_kernels(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {"panther", wheel.name.split("-py3")[0] + ".dist-info"}
    assert {"panther/py.typed", "panther/hints.toml"} <= set(names)
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "panther").rglob("*.py")}
    expected |= {f"panther/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "kernels").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == expected
    for folder, minimum in (("panther/cli/init/templates", 5), ("panther/cli/explain/topics", 9)):
        data = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).iterdir()}
        assert len(data) >= minimum
        assert data <= set(names)


@pytest.mark.tool
def test_the_wheel_works_from_an_empty_folder(wheel, tmp_path):
    target, empty = tmp_path / "target", tmp_path / "empty"
    empty.mkdir()
    run("-m", "pip", "install", "--no-deps", "--no-index", "--target", target, wheel, cwd=empty)
    site = Path(pytest.__file__).parents[1]
    assert run("-I", "-S", "-c", USE, target, site, cwd=empty).strip() == panther.__version__


@pytest.mark.slow
def test_the_readme_runs(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    assert blocks
    run("-W", "error", "-c", "\n".join(blocks), cwd=tmp_path)


def texts_with_extras():
    """The files whose text users read: messages, pages and README."""
    for folder, patterns in (("panther", ("*.py", "*.rst")), ("kernels", ("*.py",)), ("docs", ("*.py", "*.rst"))):
        for pattern in patterns:
            yield from (path for path in (ROOT / folder).rglob(pattern) if not {"_build", "examples"} & set(path.parts))
    yield from (ROOT / "README.md", ROOT / "CONTRIBUTING.md")


def test_extras_are_installed_from_one_place():
    """The checkout, or the name on the package index: one constant decides, and all texts agree with it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed_from = panther.errors._INSTALLED_FROM
    assert installed_from in (".", project["name"])
    assert panther.errors.install_command("demo").startswith(f"pip install '{installed_from}[demo]'")
    extra = "|".join(project["optional-dependencies"])
    pattern = re.compile(rf"([\w.-]+)\[((?:{extra})(?:,(?:{extra}))*)\]")
    different = [
        f"{path.relative_to(ROOT)}: {match[0]!r} must be {installed_from}[{match[2]}]"
        for path in texts_with_extras()
        for match in pattern.finditer(path.read_text())
        if match[1] in (".", "panther", project["name"]) and match[1] != installed_from
    ]
    assert not different
