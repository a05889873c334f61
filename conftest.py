"""What is not collected: what needs a library that is not installed, and scripts, which would run."""

from importlib.util import find_spec
from pathlib import Path

# Files that are not called after the library in their examples.
_LIBRARIES = {"pretrained": "transformers", "_model_card": "transformers"}


def _library(path: Path) -> str | None:
    """Return the library that an adapter's examples need; None for files that need none."""
    return _LIBRARIES.get(path.stem, None if path.name.startswith("_") else path.stem)


collect_ignore = [
    "docs/conf.py",
    "docs/_build",  # copies of the gallery's scripts
    "docs/directives.py",  # needs Sphinx
    "docs/examples",  # what sphinx-gallery makes of docs/gallery
    "docs/gallery",
    "docs/howto/scripts",
    "tests/integrations/horovod_worker.py",  # run by test_horovod.py
    "tests/integrations/keras_on_backend.py",  # run by test_keras.py
    *(
        str(path)
        for path in (Path(__file__).parent / "panther/integrations").iterdir()
        if (library := _library(path)) and find_spec(library) is None
    ),
]
