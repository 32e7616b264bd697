"""The best option (layout, recompute) of every layer of a stage, exactly.

Read ``stage`` (the prices as a factor graph), ``factor_graph`` and ``solve``, which chooses between
``variable_elimination``, ``branch_and_bound`` and ``milp``.  ``spans`` has all stretches of layers at once,
``alternatives`` what else a layer could do.
"""

from __future__ import annotations

__all__: list[str] = []
