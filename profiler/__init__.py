"""Measures what a model costs on the devices at hand: capture, time, memory, links.

Names are imported when they are first used: a rank of a run loads the capture, and not the measurement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.ir.lazy import lazily

if TYPE_CHECKING:
    from profiler.capture.graph import CapturedModule
    from profiler.measure.progress import ProfileProgress
    from profiler.session import profile
    from profiler.source.losses import mean_of_squares
    from profiler.source.model import LoadedModel
    from profiler.source.source import load_model

__all__ = ["CapturedModule", "LoadedModel", "ProfileProgress", "load_model", "mean_of_squares", "profile"]


_HOMES = {
    "CapturedModule": "capture.graph",
    "LoadedModel": "source.model",
    "ProfileProgress": "measure.progress",
    "load_model": "source.source",
    "mean_of_squares": "source.losses",
    "profile": "session",
}

__getattr__ = lazily(__name__, _HOMES)
