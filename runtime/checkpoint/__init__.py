"""Checkpoints that survive a crash at any moment, tell damage, and load under another plan.

:func:`save` is called by every rank; :class:`Checkpoint` is read by any rank of any plan;
:class:`BackgroundSaver` writes while training goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.ir.lazy import lazily

if TYPE_CHECKING:
    from runtime.checkpoint.folders import complete_steps
    from runtime.checkpoint.reader import Checkpoint, whole_state_dict
    from runtime.checkpoint.saving import BackgroundSaver, save
    from runtime.checkpoint.state import BoxOf, Number, RankState, Slice, joined

__all__ = [
    "BackgroundSaver",
    "BoxOf",
    "Checkpoint",
    "Number",
    "RankState",
    "Slice",
    "complete_steps",
    "joined",
    "save",
    "whole_state_dict",
]

_HOMES = {
    "BackgroundSaver": "saving",
    "BoxOf": "state",
    "Checkpoint": "reader",
    "Number": "state",
    "RankState": "state",
    "Slice": "state",
    "complete_steps": "folders",
    "joined": "state",
    "save": "saving",
    "whole_state_dict": "reader",
}
"""Imported when first used: most ranks neither write nor read one."""

__getattr__ = lazily(__name__, _HOMES)
