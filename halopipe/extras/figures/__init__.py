"""Plans and runs as figures, as one offline page, and in notebooks: ``halopipe draw``, ``report`` and ``notebook``.

Read ``figures`` (matplotlib), ``report`` with ``charts`` (bokeh) and the templates in ``page``, then ``notebook``.

Besides:

    graph_layout   A network on paper: layers from left to right, wrapped into rows as words are, each value on a lane
                   of its own
    verbs          ``halopipe report``, ``draw`` and ``notebook``
"""

from __future__ import annotations

_HERE = "halopipe.extras.figures"
HOOKS = {
    "verbs": {
        "40 report": f"{_HERE}.verbs:report",
        "42 draw": f"{_HERE}.verbs:draw",
        "44 notebook": f"{_HERE}.verbs:notebook",
    },
    "reports": {"page": f"{_HERE}.report:write"},
    "notebooks": {"IPython": f"{_HERE}.notebook:register"},
    "pictures of a run": {"step.svg": f"{_HERE}.figures:draw_step"},
    "halopipe.reports.figures": {"*": f"{_HERE}.figures"},
}
