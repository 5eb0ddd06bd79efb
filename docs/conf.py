"""Sphinx's settings: ``make docs`` builds build/docs."""

from typing import Any

import dtx

project = "dtx"
author = "the dtx authors"
version = release = dtx.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
html_theme = "furo"
html_title = "dtx"
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"


def _escape(_app: object, _context: object, lines: list[str]) -> None:
    """Help texts are no markup: an asterisk is an asterisk."""
    lines[:] = [line.replace("*", r"\*").replace(r"\*\*Required\*\*", "**Required**") for line in lines]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    for part in ("description", "options", "arguments", "envvars", "epilog"):
        app.connect(f"sphinx-click-process-{part}", _escape)
