"""Checkpoints that survive a crash at any moment, tell damage, and load under another plan.

:func:`save` is called by every rank; :class:`Checkpoint` is read by any rank of any plan;
:class:`BackgroundSaver` writes while training goes on.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    "Checkpoint": "reader",
    "complete_steps": "folders",
    "save": "saving",
    "whole_state_dict": "reader",
}


def __getattr__(name: str) -> Any:
    """Imported when first used: most ranks neither write nor read one."""
    if name in __all__:
        return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'state')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
