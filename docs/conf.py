"""The documentation as a site: ``sphinx-build -W -c docs . build/site``, with the extra ``docs``."""

from __future__ import annotations

import importlib.metadata
import json
import re

project = "dshuffle"
author = "The dshuffle developers"
release = importlib.metadata.version("dshuffle")
version = re.match(r"\d+(\.\d+)*", release)[0]  # without the commit of a checkout

# The source folder is the root of the repository. So links between the pages, and to files beside them, hold in the
# site as they do in a checkout.
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/*.md",
    "docs/*.ipynb",
    "docs/api/*.rst",
    "pipelines/README.md",
    "storage/README.md",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext", ".ipynb": "markdown"}
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.mathjax", "numpydoc"]

myst_heading_anchors = 4  # the pages link to headings as GitHub names them
autosummary_generate = True
autodoc_typehints = "none"  # the sections "Parameters" say more
autodoc_default_options = {"members": True, "exclude-members": "set_score_request"}  # which scikit-learn adds
numpydoc_show_class_members = False  # autosummary has a table of them

html_theme = "sphinx_book_theme"
html_title = f"dshuffle {version}"
html_sidebars = {"**": ["navbar-logo.html", "sbt-sidebar-nav.html"]}  # the search is in the header of each page
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False


def setup(app):  # type: ignore[no-untyped-def]
    """Leave private parameters out of signatures, and read notebooks as Markdown."""

    def notebook_as_markdown(app, docname, source):  # type: ignore[no-untyped-def]
        if str(app.env.doc2path(docname)).endswith(".ipynb"):
            cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(source[0])["cells"]]
            source[0] = "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for kind, text in cells)

    app.connect("source-read", notebook_as_markdown)

    def without_private(app, what, name, obj, options, signature, returns):  # type: ignore[no-untyped-def]
        return (re.sub(r", _\w+=\w+", "", signature or "") or signature), returns

    app.connect("autodoc-process-signature", without_private)
