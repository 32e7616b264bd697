"""Plans in the formats of other tools.

Modules:

    command   ``halopipe export``: a plan in another tool's format
"""

from __future__ import annotations

HOOKS = {"verbs": {"46 export": "halopipe.extras.export.command:export"}}
