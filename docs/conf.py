"""Sphinx settings: `make docs` builds the site in build/docs, warnings are errors, and reading it needs no network."""

from __future__ import annotations

import sys
from pathlib import Path

from clearhead import __version__

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "Clearhead"
copyright = "Clearhead contributors, Apache-2.0"
release = version = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "sphinx_click",
    "sphinx_copybutton",
    "sphinx_design",
    "mathml",
    "plain_docstrings",
    "repository_links",
    "themed_images",
]
root_doc = "index"
exclude_patterns = ["_ext", "figures.py"]
nitpicky = False

# GitHub renders the same pages: formulas are ```math fences and $…$, nothing else.
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 4
myst_dmath_allow_labels = False
html_math_renderer = "mathml"

nb_execution_mode = "off"  # tests/journeys/test_notebooks.py runs them; the pages show the outputs they hold

html_theme = "furo"
html_title = "Clearhead"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_theme_options = {
    "source_repository": "https://github.com/clearhead/clearhead",
    "source_branch": "main",
    "source_directory": "docs/",
}

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
copybutton_prompt_text = r"^\$ |^>>> "
copybutton_prompt_is_regexp = True
suppress_warnings = ["myst.xref_missing_noop"]
