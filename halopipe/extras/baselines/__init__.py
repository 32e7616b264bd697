"""Profiles that papers published, as ours.

Modules:

    command   ``halopipe import``: a published profile as one of ours
"""

from __future__ import annotations

from typing import ClassVar

from halopipe.extra import FaceExtra


class PublishedProfiles(FaceExtra):
    """Profiles that papers published."""

    verbs: ClassVar = {"64 import": "halopipe.extras.baselines.command:import_"}


EXTRA = PublishedProfiles()
