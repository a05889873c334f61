"""What is drawn by code is what the code draws."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def script(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_logo_is_that_of_the_script(theme):
    assert (DOCS / f"_static/logo-{theme}.svg").read_text() == script("draw_logo").draw(theme)


@pytest.mark.parametrize("name", ["sketching", "layer", "parallelism", "ddp"])
def test_the_pictures_of_concepts_are_those_of_the_script(name):
    assert (DOCS / f"_static/concepts/{name}.svg").read_text() == script("draw_concepts").FIGURES[name]()
