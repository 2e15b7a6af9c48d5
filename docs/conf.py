# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The configuration of Sphinx, which ``make docs`` runs."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from jupyter_gpupool import __version__ as release  # noqa: E402 (needs the path set above)

project = "jupyter_gpupool"
author = "jupyter_gpupool developers"
copyright = author  # noqa: A001 (Sphinx reads this name)
version = release

extensions = ["myst_parser", "state_diagram"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nitpicky = True

html_theme = "pydata_sphinx_theme"
html_title = "jupyter_gpupool"
html_static_path = []
html_show_sourcelink = False
html_theme_options = {
    "show_prev_next": True,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
}
