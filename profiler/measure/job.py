"""What a measuring process is asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from planner.ir.graph import Graph
from planner.ir.profile import ModelSource, Optimizer, PartShape
from profiler.measure.partial_results import ChosenMeasurements, FinishedMeasurements
from profiler.measure.sizes import ReadBetween

PartShapesOf = Callable[[Graph, tuple[int, ...]], tuple[PartShape, ...]]
"""Which parts of layers to measure for micro-batches of these sizes; a function that another process can import."""


@dataclass(frozen=True, slots=True)
class MeasuringJob:
    """What to measure.

    Attributes:
        sizes: numbers of samples; empty for those that matter (:mod:`profiler.measure.sizes`).
        shapes: parts of layers that may be measured at their own shapes; None for whole layers alone.
        read: what sizes and parts that are not measured are read by; None: the divisors of the batch, and all parts.
        device: that runs the model, as torch names it.
        num_processes: that share the passes.
        chosen: what another process found worth measuring, which this one repeats.
        done: what an earlier process finished of the same job.
        num_devices: of the host, that may compute at once.
        signals: the file by which their processes tell one another what to do (:mod:`profiler.measure.together`);
            empty: this one is alone.
        cores_beside: of the processes of the other devices, if the measuring one forks them; empty: they are there.
        graph: fingerprint that the graph must have; empty: any.
    """

    source: ModelSource
    optimizer: Optimizer
    sizes: tuple[int, ...]
    quick: bool
    seed: int = 0
    shapes: PartShapesOf | None = None
    read: ReadBetween | None = None
    device: str = "cpu"
    num_processes: int = 1
    chosen: ChosenMeasurements | None = None
    done: FinishedMeasurements = FinishedMeasurements()  # noqa: RUF009 - it is frozen
    graph: str = ""
    num_devices: int = 1
    signals: str = ""
    cores_beside: tuple[int | Collection[int] | None, ...] = ()
