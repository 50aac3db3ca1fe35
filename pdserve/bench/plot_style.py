"""How plots look on the pages of the docs, on light and on dark ground."""

from __future__ import annotations

from contextlib import AbstractContextManager

import matplotlib

INK = "#7d8590"


def page_style() -> AbstractContextManager[None]:
    """Returns a context in which figures have this style."""
    return matplotlib.rc_context(
        {
            # Text remains text in the file, so that readers can search it. A fixed salt gives the same file for the
            # same figures.
            "svg.fonttype": "none",
            "svg.hashsalt": "pdserve",
            "font.size": 10,
            "text.color": INK,
            "axes.edgecolor": INK,
            "axes.labelcolor": INK,
            "axes.titlecolor": INK,
            "axes.facecolor": "none",
            "xtick.color": INK,
            "ytick.color": INK,
            "grid.color": INK,
            "grid.alpha": 0.25,
            "legend.frameon": False,
        }
    )
