"""Memory of a rank, action by action.

Read ``activations`` (what the actions of a program keep), ``levels`` (how high memory rises while the layers of a stage
run), then ``peak``, which joins the two.
"""

from __future__ import annotations

__all__: list[str] = []
