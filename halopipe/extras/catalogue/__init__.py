"""Machines that are described: the catalogue of devices, and cluster files.

Modules:

    command   ``halopipe devices``: the catalogue; ``halopipe cluster``: this host, or the machines of a cluster file
"""

from __future__ import annotations

from typing import ClassVar

from halopipe.extra import FaceExtra


class CatalogueVerbs(FaceExtra):
    """Machines that are described."""

    verbs: ClassVar = {
        "60 devices": "halopipe.extras.catalogue.command:devices",
        "62 cluster": "halopipe.extras.catalogue.command:cluster",
    }


EXTRA = CatalogueVerbs()
