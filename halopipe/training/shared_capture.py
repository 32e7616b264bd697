"""One capture of a job's model for all its processes of this host: they are forked from the process that made it.

    capture_ahead(JOB)  loads and captures the model  -- fork -->  rank 0, rank 1, ..., one device
                        forgets it                                 load(source, seed)

What is captured is never older than the job, nor is it written anywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from cuda_ops.memory import meter_of
from halopipe.run_spec.job import Job
from planner.ir.codec import fingerprint
from planner.ir.profile import ModelSource
from profiler.capture.graph import capture_for
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.captured import CapturedModule
from runtime.pipeline.routing import CPU

_captures: dict[str, tuple[LoadedModel, CapturedModule]] = {}
"""Models that nobody has trained yet, by what they were loaded of; each is taken once."""


def capture_ahead(path: str) -> Callable[[], None]:
    """Captures the model of the job that is written at ``path``, as planned and as run; gives what forgets it.

    Its memory is counted from here on, so that ranks know what they have of it.

    Raises:
        HalopipeError: it cannot be loaded or captured, which each rank of the job will find as well.
    """
    job = Job.read(Path(path))
    meter_of(CPU)
    for source in (job.plan.inputs.model, job.source):
        key = _key(source, job.options.seed)
        if key not in _captures:
            _captures[key] = capture_for(load_model(source, job.options.seed), CPU)
    _end_progress_thread()
    return _captures.clear


def _end_progress_thread() -> None:
    """Of tqdm, which ``torch.fx.Interpreter`` starts though it shows nothing: with a thread no process is forked."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    monitor = getattr(bars, "monitor", None)
    if bars is not None and monitor is not None:
        monitor.exit()
        bars.monitor = None  # it is started again where it is needed


def load(source: ModelSource, seed: int) -> tuple[LoadedModel, CapturedModule | None]:
    """As :func:`profiler.source.source.load_model`, with its capture on the processor if that was made ahead.

    Whoever asks a second time gets a model that is loaded anew: the first one may be trained by then.
    """
    return _captures.pop(_key(source, seed), None) or (load_model(source, seed), None)


def _key(source: ModelSource, seed: int) -> str:
    return fingerprint([source, seed])
