"""Measures what a model costs on the devices at hand: capture, time, memory, links."""

from __future__ import annotations

from profiler.capture import Captured, capture
from profiler.session import ProfileProgress, profile
from profiler.source import LoadedModel, load_model, mean_of_squares

__all__ = ["Captured", "LoadedModel", "ProfileProgress", "capture", "load_model", "mean_of_squares", "profile"]
