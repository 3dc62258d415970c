"""Configure the documentation site: `make docs` builds it into build/docs/html."""

from __future__ import annotations

import os
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "_ext"), str(DOCS.parent)]

from inventories import LOCAL, write_inventories  # noqa: E402

from torchext.version import __version__  # noqa: E402

project = "torchext"
author = "the torchext authors"
project_copyright = author
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "public_names",
    "repository_links",
    "llms_txt",
]
exclude_patterns = ["_ext", "_static"]
root_doc = "index"

# Anchors are GitHub's, so that a link works in both places.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist", "html_image"]

smartquotes = False  # `--` is a flag

# In docstrings, code has single backticks, as in Markdown. Names of the API become links.
default_role = "api-name"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "show-inheritance": True}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
autosummary_generate = False

# Builds need no network: the few names of PyTorch and Python that signatures mention are in a local inventory. With
# TORCHEXT_DOCS_ONLINE=1 they are read from the complete ones.
_ONLINE = os.environ.get("TORCHEXT_DOCS_ONLINE") == "1"
_LOCAL = write_inventories(DOCS.parent / "build" / "docs" / "inventories")
intersphinx_mapping = {name: (url, None if _ONLINE else str(_LOCAL[name])) for name, url in LOCAL.items()}

html_theme = "furo"
html_title = f"torchext {release}"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "default"
pygments_dark_style = "github-dark"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
