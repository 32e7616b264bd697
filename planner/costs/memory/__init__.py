"""Memory of a rank, action by action.

Read ``activations`` (what the actions of a program keep), ``levels`` (how high memory rises while the layers of a stage
run), then ``peak``, which joins the two.  ``memory_bound`` is the lower bound that searches use, and how
many micro-batches a schedule keeps.
"""

from __future__ import annotations

__all__: list[str] = []
