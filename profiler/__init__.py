"""Measures what a model costs on the devices at hand: capture, time, memory, links.

Names are imported when they are first used: a rank of a run loads the capture, and not the measurement.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profiler.capture.graph import Captured
    from profiler.measure.progress import ProfileProgress
    from profiler.session import profile
    from profiler.source.model import LoadedModel, mean_of_squares
    from profiler.source.source import load_model

__all__ = ["Captured", "LoadedModel", "ProfileProgress", "load_model", "mean_of_squares", "profile"]


_HOMES = {
    "Captured": "profiler.capture.graph",
    "LoadedModel": "profiler.source.model",
    "ProfileProgress": "profiler.measure.progress",
    "load_model": "profiler.source.source",
    "mean_of_squares": "profiler.source.model",
    "profile": "profiler.session",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
