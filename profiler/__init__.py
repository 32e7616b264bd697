"""Measures what a model costs on the devices at hand: capture, time, memory, links.

Names are imported when they are first used: a rank of a run loads the capture, and not the measurement.

Modules:

    capture    A module and its loss as one clean graph of layers, checked against the module itself
    extra      All that extras may add to the profiler
    extras     What few models and machines need: a folder each, which it does without
    links      What messages and sums between ranks cost, on this host and between hosts
    measure    What each layer takes: seconds, bytes and optimiser steps, in fresh and quiet processes
    merge      What several processes, or several hosts, measured of the same, as one: medians of their trimmed means
    models     The reference networks: plain `torch.nn.Module` files that know nothing of planning
    session    ``profile``: measures a model and the links of this host, each in fresh, pinned processes
    shards     Parts of layers, measured at their own shapes
    source     From a MODEL string to a module with example inputs and a loss
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.ir.lazy import lazily

if TYPE_CHECKING:
    from profiler.measure.progress import ProfileProgress
    from profiler.session import profile
    from profiler.source.losses import mean_of_squares
    from profiler.source.model import LoadedModel
    from profiler.source.source import load_model
    from runtime.captured import CapturedModule

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
