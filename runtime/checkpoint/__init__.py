"""Checkpoints that survive a crash at any moment, tell damage, and load under another plan.

:func:`save` is called by every rank; :class:`Checkpoint` is read by any rank of any plan;
:class:`BackgroundSaver` writes while training goes on.

Modules:

    folders          Names of checkpoint folders, and changes to them that a crash cannot leave half done
    lock             One job a folder: a lock file that says who writes the checkpoints there, and whether it still does
    manifest         What a checkpoint holds and where, read strictly; whether it is what was written (hashes)
    reader           A complete checkpoint, read piece by piece: nothing is given to anybody before its hash has been
                     compared
    saving           Saving: every rank writes its folder, then rank 0 makes it a checkpoint; in the background; which
                     old ones go
    state            What one rank of a plan has to save, under keys that mean the same whatever the plan
    training_state   All that one rank has to save so that training goes on, also under another plan: by the model's own
                     names
    writer           One rank's folder of a checkpoint: a file of safetensors, hashed and written one tensor at a time
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
