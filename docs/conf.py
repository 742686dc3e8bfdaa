"""Sphinx configuration; the build needs no network."""

from __future__ import annotations

import re

import pararnn

project = "pararnn"
author = "The pararnn developers"
copyright = "2026, The pararnn developers"
version = release = pararnn.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"pararnn {release}"

# Docstrings put code in single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_use_rtype = False
napoleon_custom_sections = [("Class attributes", "params_style")]

# Types that are documented elsewhere: PyTorch's, transformers', the standard library's, private
# aliases of ours.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|transformers|nn|numpy|collections|typing|dataclasses|abc|pathlib)\..*"),
    # Sphinx cuts this at its comma where a signature holds a default such as <factory>.
    (r"py:class", r"tuple\[(str|int)"),
    (r"py:class", r"Tensor|Optimizer|RemovableHandle|Any|ClassVar|Path|TrainingData|DeviceMesh"),
]


def _escape_bars(app, what, name, obj, options, lines):
    """Docstrings write |x| for absolute values, which reStructuredText takes for substitutions."""
    for number, line in enumerate(lines):
        parts = re.split(r"(`[^`]*`)", line)
        lines[number] = "".join(
            part if part.startswith("`") else part.replace("|", r"\|") for part in parts
        )


def setup(app):
    app.connect("autodoc-process-docstring", _escape_bars)
