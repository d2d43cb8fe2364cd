"""The site: `make docs`. Notebooks are shown with their stored outputs; the API reference comes from the docstrings."""

import re

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

project = "autopar"
copyright = "the autopar authors"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "autopar"
html_static_path = ["_static"]
html_css_files = ["site.css"]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]

nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath"]
html_math_renderer = "mathml"
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# A file whose lexer knows less than its author (`{...}`, `?`) is shown without colours.
suppress_warnings = ["misc.highlighting_failure"]


def _as_rst(app, what, name, obj, options, lines) -> None:
    """Docstrings write code as `x`, and `*args` as it is: to reStructuredText these are other things."""
    del app, what, name, obj, options
    text = "\n".join(lines)
    parts = re.split(r"(`+[^`]+`+)", text)
    for i, part in enumerate(parts):
        if i % 2:
            parts[i] = f"``{part.strip('`')}``" + ("\\ " if i + 1 < len(parts) and parts[i + 1][:1].isalnum() else "")
        elif ">>>" not in part:
            parts[i] = part.replace("*", "\\*")
    lines[:] = "".join(parts).split("\n")


def _mathml(self, node) -> None:
    """Formulas are MathML, which browsers draw without a script that is fetched from elsewhere."""
    self.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode


def setup(app) -> None:
    app.add_html_math_renderer("mathml", inline_renderers=(_mathml, None), block_renderers=(_mathml, None))
    app.connect("autodoc-process-docstring", _as_rst, priority=400)  # before napoleon's
