"""Parallel degrees of a transformer's training step, and plans of them.

Modules:

    command   ``halopipe ways``: how to divide a transformer's training step over a cluster of GPUs
    options   What ``halopipe ways`` takes
    ways      What ``halopipe ways`` searches and says; ``halopipe plan --ways``
"""

from __future__ import annotations

HOOKS = {
    "verbs": {"17 ways": "halopipe.extras.transformers.command:ways"},
    "plans": {"--ways": "halopipe.extras.transformers.ways:plan_by"},
}
