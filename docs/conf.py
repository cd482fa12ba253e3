"""Sphinx configuration of the documentation: `make docs` writes docs/_build/html."""

from typing import Any

from infcl_gen.version import __version__

project = "infcl_gen"
copyright = "The infcl_gen authors"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx_click", "sphinx_design"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "infcl_gen"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
exclude_patterns = ["_build"]
nitpicky = False


def literal_details(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are aligned plain text: after the first paragraph they are shown as written."""
    if "" not in lines:
        return
    first = lines.index("")
    details = lines[first + 1 :]
    while details and not details[-1]:
        details.pop()
    lines[first:] = ["", "::", "", *(f"    {line}" for line in details), ""] if details else [""]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", literal_details)
