"""The planners of other papers, and the strategies of everyday use.

A paper is a folder: ``planner`` is its own objective and search, ``format`` reads the files that it published,
``solver`` turns a problem of ours into one of its own and its answer into a plan.  A small paper without files of its
own is one module, ``best_pipeline`` its planner and ``solve`` its solver.  ``common`` is what they share;
``everyday`` has the strategies of no paper.
"""

from __future__ import annotations

__all__: list[str] = []
