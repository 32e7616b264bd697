"""Random numbers that depend on the seed, the step, the micro-batch and the node, whoever draws them.

Modules:

    layers        Layers with dropout and its like, with the random numbers given to them
    streams       Dropout and other random numbers, by seed, step, micro-batch and node: who draws which
    user_module   The user's own module with the numbers of a plan: its random operators are answered, in the order of
                  its calls
"""

from __future__ import annotations

__all__: list[str] = []
