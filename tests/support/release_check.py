"""Install the wheel in dist/ into new, empty environments, and use it there from an empty folder.

``release_check.py [--python PATH ...] [--torch-index URL]``, after ``python -m build``: see ``make release-check``. It
uses the interpreter that runs it and the interpreters of ``--python``, by default those of ``PYTHONS`` that are on
PATH, and says which are not. torch is installed first, alone, at the version of constraints.txt, from the index of
``--torch-index`` or from pip's own. Then the demo runs, and the command line compresses a model that was trained on
scikit-learn's digits, as a user would write it, in a file of the folder.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13")

# The module of the user, and what is asked of the folder that the command line wrote.
DIGITS = """\
import panther as pr
import torch
from sklearn.datasets import load_digits

digits = load_digits()
images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)


def model():
    torch.manual_seed(0)
    classifier = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(classifier.parameters(), 1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(classifier(images[:1200]), labels[:1200]).backward()
        optimizer.step()
    return classifier


def batches():
    return list(images[:1200].split(100))


def accuracy(classifier):
    with torch.no_grad():
        return (classifier(images[1200:]).argmax(1) == labels[1200:]).float().mean().item()


if __name__ == "__main__":
    dense = model()
    small = pr.load_compressed("small", model())
    print(f"accuracy of the dense model {accuracy(dense):.3f}, of the compressed model {accuracy(small):.3f}")
    assert accuracy(dense) > 0.85
    assert accuracy(small) > accuracy(dense) - 0.02
"""


def main(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", action="append", metavar="PATH", help="a further interpreter; can be repeated")
    parser.add_argument("--torch-index", metavar="URL")
    options = parser.parse_args(arguments)
    wheels = list((ROOT / "dist").glob("*.whl"))
    if len(wheels) != 1:
        raise SystemExit(f"dist/ has {len(wheels)} wheels, one is needed: rm -r dist; python -m build")
    pythons, absent = interpreters(options.python)
    checked = [
        f"Python {version}" for version, python in pythons.items() if check(wheels[0], python, options.torch_index)
    ]
    print(f"{wheels[0].name} works in an empty environment of {', '.join(checked)}")
    if absent:
        print(f"not checked, because no interpreter was found: Python {', '.join(absent)}: see CONTRIBUTING.md")
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    if placeholders := ", ".join(name for name, url in urls.items() if ".invalid" in url):
        print(f"WARNING: [project.urls] of pyproject.toml has a placeholder for {placeholders}: write the address")


def interpreters(paths):
    """Return the interpreters by their version, this one first, and those of ``PYTHONS`` that there are none of."""
    here = "{}.{}".format(*sys.version_info)
    pythons = {here: sys.executable}
    on_path = (shutil.which(f"python{version}") for version in PYTHONS)
    for path in paths or filter(None, on_path):
        command = [path, "-c", "import sys; print('{}.{}'.format(*sys.version_info))"]
        try:
            version = run(command, ROOT, capture_output=True).stdout.strip()
        except SystemExit:
            if paths:
                raise
            continue  # a shim of pyenv, which knows the name of a Python that is not installed
        pythons.setdefault(version, path)
    return pythons, [version for version in PYTHONS if version not in pythons]


def check(wheel, python, torch_index):
    """Use the wheel in an empty environment of an interpreter; SystemExit says what failed."""
    with tempfile.TemporaryDirectory(prefix="panther-release-") as folder:
        environment, empty = Path(folder, "environment"), Path(folder, "empty")
        empty.mkdir()
        run([python, "-m", "venv", environment], empty)
        inside, panther = environment / "bin/python", environment / "bin/panther"
        pip = [inside, "-m", "pip", "--disable-pip-version-check", "install", "--no-cache-dir"]
        index = ["--index-url", torch_index] if torch_index else []
        run([*pip, "-c", ROOT / "constraints.txt", *index, "--no-deps", "torch"], empty)
        constraints = Path(folder, "constraints.txt")
        command = [inside, ROOT / "tests/support/torch_constraints.py"]
        constraints.write_text(run(command, empty, capture_output=True).stdout)
        run([*pip, "-c", constraints, f"{wheel}[demo]"], empty)
        import_command = [inside, "-c", "import panther; print(panther.__file__, panther.__version__)"]
        printed = run(import_command, empty, capture_output=True).stdout
        if not printed.startswith(str(environment)):
            raise SystemExit(f"panther was imported from {printed}, not from {environment}")
        run([panther, "demo", "--runs", "1", "--epochs", "3"], empty)
        (empty / "digits.py").write_text(DIGITS)
        compress = [panther, "compress", "digits:model", "--bits", "4.5", "--calibration", "digits:batches"]
        run([*compress, "--out", "small"], empty)
        run([inside, "digits.py"], empty)
    return True


def run(command, folder, **options):
    done = subprocess.run(list(map(str, command)), cwd=folder, text=True, timeout=1800, **options)
    if done.returncode:
        raise SystemExit(f"exit status {done.returncode}: {' '.join(map(str, command))}")
    return done


if __name__ == "__main__":
    main(sys.argv[1:])
