"""Plans in the formats of other tools.

Modules:

    command   ``halopipe export``: a plan in another tool's format
"""

from __future__ import annotations

from typing import ClassVar

from halopipe.extra import FaceExtra


class Export(FaceExtra):
    """Plans in the formats of other tools."""

    verbs: ClassVar = {"46 export": "halopipe.extras.export.command:export"}


EXTRA = Export()
