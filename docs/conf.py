"""How the documentation is built: ``sphinx-build -W docs docs/_build``.

Pages are Markdown. The reference comes from the docstrings of public names, the list of errors from the
docstrings of `dsa.errors` and the messages in the sources.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

from error_list import error_list

import dsa

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "dsa"
author = "the dsa authors"
release = version = dsa.__version__
copyright = author

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
default_role = "py:obj"  # single backticks link where they can
smartquotes = False  # quotes in messages are those that a program prints

myst_enable_extensions = ["deflist"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True

toc_object_entries_show_parents = "hide"

html_theme = "alabaster"
html_theme_options = {
    "description": "Embedding tables that do not fit in memory",
    "page_width": "75rem",
    "body_max_width": "60rem",
    "code_font_size": "0.8em",
    "sidebar_width": "15rem",
    "fixed_sidebar": True,
    "show_powered_by": False,
}
html_show_copyright = False
html_copy_source = False


def setup(app: Sphinx) -> None:
    """Fill in the parts of pages that are made from the sources."""

    def fill_in(app: Sphinx, page: str, source: list[str]) -> None:
        if page == "guide/errors":
            source[0] = source[0].replace("<!-- the list of errors -->", error_list())

    app.connect("source-read", fill_in)
