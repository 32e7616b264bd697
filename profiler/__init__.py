"""Measures what a model costs on the devices at hand: capture, time, memory, links."""

from __future__ import annotations

from profiler.capture.graph import Captured, capture
from profiler.measure.progress import ProfileProgress
from profiler.session import profile
from profiler.source.model import LoadedModel, mean_of_squares
from profiler.source.source import load_model

__all__ = ["Captured", "LoadedModel", "ProfileProgress", "capture", "load_model", "mean_of_squares", "profile"]
