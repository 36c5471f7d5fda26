"""The documentation as a site: ``sphinx-build -W -c docs . build/site``, with the extra ``docs``."""

from __future__ import annotations

import importlib.metadata
import re

from pygments.lexers.special import TextLexer

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
    "docs/*.md",
    "docs/api/*.rst",
    "pipelines/README.md",
    "storage/README.md",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
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
    """Leave private parameters out of signatures, and show diagrams as text. GitHub draws them."""
    app.add_lexer("mermaid", TextLexer)

    def without_private(app, what, name, obj, options, signature, returns):  # type: ignore[no-untyped-def]
        return (re.sub(r", _\w+=\w+", "", signature or "") or signature), returns

    app.connect("autodoc-process-signature", without_private)
