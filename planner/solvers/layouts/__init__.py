"""The best option (layout, recompute) of every layer of a stage, exactly.

Read ``stage`` (the prices as a labelled graph, and what else a layer could do), ``factor_graph``, and ``solve``, which
chooses between ``variable_elimination`` (also of all stretches of layers at once) and ``milp``.
"""

from __future__ import annotations

__all__: list[str] = []
