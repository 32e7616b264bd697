"""What a stranger does: a module and a batch of one's own, from ``import halopipe`` to a checked first step.

Read ``__main__`` for how a script is run and judged, ``packages`` for networks with their package's own loss and
batches, ``habits`` for what people do in modules of their own.
"""

from __future__ import annotations

__all__: list[str] = []
