"""Sphinx configuration. Neither the build nor the built pages need the network: mathematics is MathML."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import MagicMock

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.pycode.parser import VariableCommentPicker
from sphinx.util import logging

import panther.errors

# Libraries that only .venv-engines has: their adapters' pages need a version and names alone.
_ENGINES = {"torchao": "0.18.0", "keras": "3.15.1", "ray": "2.60.0", "deepspeed": "0.19.8", "horovod": "0.28.1"}
_require = panther.errors.require_extra


def _require_or_stand_in(module: str, extra: str) -> object:
    name = module.partition(".")[0]
    if name in _ENGINES and find_spec(name) is None:
        stand_in = MagicMock(__version__=_ENGINES[name])
        stand_in.layers.Layer = object
        stand_in.saving.register_keras_serializable = lambda package: lambda layer: layer
        return stand_in
    return _require(module, extra)


panther.errors.require_extra = _require_or_stand_in

project = "Panther"
copyright = "the Panther authors"
release = version = panther.__version__

sys.path[:0] = [
    str(Path(__file__).parent),  # for directives.py, output_lines.py and gallery_build.py
    str(Path(__file__).parents[1]),  # for the package benchmarks, which knows the files of results
]

from gallery_build import sphinx_gallery_conf  # noqa: E402, F401
from switcher import folder_of  # noqa: E402

extensions = [
    "directives",
    "output_lines",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "gallery_build",
]
templates_path = ["_templates"]
exclude_patterns = ["_build", "gallery"]  # sphinx-gallery makes docs/examples of docs/gallery
default_role = "code"
smartquotes = False  # quotes are those of code

# Named, because autosummary looks for pages before Sphinx has found those that are new since the last build.
autosummary_generate = sorted(
    f"reference/api/{page.name}" for page in Path(__file__).parent.glob("reference/api/*.rst")
)

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"  # the names of methods fit into the list beside the page
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Shape"]

# Every reference to a name of Panther has a target. Names of other libraries have none, because intersphinx would need
# the network. Neither have classes that are shown with the path of their module, as base classes and types of fields,
# because the reference does not list them: its names have at most one package, or are in the exceptions below.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|transformers|collections|concurrent|enum|functools|multiprocessing|os|pathlib|abc)(\..*)?"),
    (r"py:.*", r"pybind11_builtins\..*|nn\.Module|Tensor|Module|Sequential|CancelledError|optional"),
    (r"py:class", r"panther\._settings\.Settings"),
    (r"py:class", r"panther\.(?!integrations\.)\w+\.(?!checkpoint\.|functional\.)(\w+\.)+\w+"),
]

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_math_renderer = "mathml"
html_theme = "pydata_sphinx_theme"
html_title = f"Panther {release}"
html_static_path = ["_static"]
html_favicon = "_static/logo-light.svg"
html_css_files = ["panther.css"]
html_js_files = ["accessibility.js"]
html_search_scorer = str(Path(__file__).parent / "search_scorer.js")  # Sphinx looks in the current folder otherwise
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "logo": {
        "image_light": "_static/logo-light.svg",
        "image_dark": "_static/logo-dark.svg",
        "text": "Panther",
        "alt_text": "Panther",
    },
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button"],
    "header_links_before_dropdown": 7,
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_toc_level": 2,
}
html_sidebars = {"index": [], "sharp-bits": []}

# The switcher between versions needs the address at which all of them are published: see docs/switcher.py.
if _address := os.environ.get("PANTHER_DOCS_URL", "").rstrip("/"):
    _version = folder_of(release)
    html_baseurl = f"{_address}/{_version}/"
    html_theme_options |= {
        "switcher": {"json_url": f"{_address}/switcher.json", "version_match": _version},
        "check_switcher": False,  # which would ask the network
        "show_version_warning_banner": True,
        "navbar_end": ["version-switcher", "theme-switcher"],
    }

# Napoleon takes what stands before a colon in a property's first line for its type; types are in the annotations here.
GoogleDocstring._parse_attribute_docstring = GoogleDocstring._consume_to_end
# Pages show the signature that is implemented, with its defaults, in place of its overloads.
VariableCommentPicker.add_overload_entry = lambda self, function: None


def _visit_math(self, node):
    block = isinstance(node, nodes.math_block)
    try:
        mathml = str(latex2mathml.tex2mathml(node.astext(), as_block=block))
    except MathError as error:
        logging.getLogger(__name__).warning("%s in %s", error, node.astext(), location=node)
    else:
        mathml = mathml.replace("<mo>‖</mo>", '<mo stretchy="false">‖</mo>')  # norms keep the height of the text
        self.body.append(f'<div class="math-block">{mathml}</div>' if block else mathml)
    raise nodes.SkipNode


def setup(app):
    """Let docutils translate TeX to MathML, which browsers show without a script."""
    app.add_html_math_renderer("mathml", (_visit_math, None), (_visit_math, None))
