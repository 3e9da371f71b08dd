"""Sphinx's settings for the site that `make docs` builds. What is generated: tools/documentation.

The pages are the repository's own files, where they lie: links between them are the same here and in a checkout.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

project, author = "RoQ", "the RoQ authors"
root_doc = "docs/index"
include_patterns = ["docs/**", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]
exclude_patterns = [path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "docs"]  # not even looked into
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.linkcode", "tools.documentation.extension"]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # a heading is linked to as on GitHub
smartquotes = False
toc_object_entries = False  # classes have headings; each method in the contents of each page costs half the build
highlight_language = "none"

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "RoQ"
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["roq.css"]
html_additional_pages = {"index": "to_the_first_page.html"}
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6e4f", "color-brand-content": "#0b6e4f"},
    "dark_css_variables": {"color-brand-primary": "#5fd0a5", "color-brand-content": "#5fd0a5"},
}
