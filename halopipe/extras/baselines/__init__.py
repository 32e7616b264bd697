"""Profiles that papers published, as ours.

Modules:

    command   ``halopipe import``: a published profile as one of ours
"""

from __future__ import annotations

HOOKS = {"verbs": {"64 import": "halopipe.extras.baselines.command:import_"}}
