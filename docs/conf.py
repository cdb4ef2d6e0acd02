"""The site of these pages: `make site` builds it into site/."""

import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

project, author = "TorchShard", "The TorchShard developers"
release = metadata.version("torchshard-fx")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["conf.py", "make_collectives.py"]
html_theme = "furo"
html_title = "TorchShard"
html_show_sphinx = False

myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing"]  # links to files of the repository, which tests/test_docs.py follows

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "undoc-members": True}
napoleon_google_docstring = True
napoleon_use_rtype = False
default_role = "code"


def _mark_code(app, what, name, obj, options, lines):
    """Docstrings are Markdown where they show code: a block that is indented behind an empty line."""
    marked, is_inside = [], False
    for before, line in zip(["", *lines], [*lines], strict=False):
        is_indented = line.startswith("    ")
        if is_indented and not before.strip() and not is_inside and marked:
            marked += [".. code-block:: python", ""]
            is_inside = True
        is_inside = is_inside and (is_indented or not line.strip())
        marked.append(line)
    lines[:] = marked


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _mark_code, priority=400)  # before napoleon reads the sections
