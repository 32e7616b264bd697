"""What a measuring process is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.ir.errors import UsageError
from planner.ir.graph import Graph
from planner.ir.profile import ModelSource, Optimizer, PartShape
from profiler.finished import Chosen, Done
from profiler.sampling import Read

Shapes = Callable[[Graph, tuple[int, ...]], tuple[PartShape, ...]]
"""Which parts of layers to measure for micro-batches of these sizes; a function that another process can import."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure.

    Attributes:
        sizes: numbers of samples; empty for those that matter (:mod:`profiler.sampling`).
        shapes: parts of layers that may be measured at their own shapes; None for whole layers alone.
        read: what sizes and parts that are not measured are read by; None: the divisors of the batch, and all parts.
        device: that runs the model, as torch names it.
        num_processes: that share the passes.
        chosen: what another process found worth measuring, which this one repeats.
        done: what an earlier process finished of the same job.
        graph: fingerprint that the graph must have; empty: any.
    """

    source: ModelSource
    optimizer: Optimizer
    sizes: tuple[int, ...]
    quick: bool
    seed: int = 0
    shapes: Shapes | None = None
    read: Read | None = None
    device: str = "cpu"
    num_processes: int = 1
    chosen: Chosen | None = None
    done: Done = Done()  # noqa: RUF009 - it is frozen
    graph: str = ""


def given_sizes(job: Job, batch: int, polymorphic: bool) -> tuple[int, ...]:
    """The sizes that are known beforehand; empty if they are to be chosen as they are measured.

    Args:
        batch: of the example.
        polymorphic: whether the model runs with other numbers of samples.

    Raises:
        UsageError: the model cannot run at the sizes of ``job``.
    """
    if job.chosen is not None:
        return job.chosen.sizes
    wanted = job.sizes
    if not polymorphic:
        if wanted and wanted != (batch,):
            raise UsageError(
                f"the model runs with {batch} samples only",
                [f"asked for {', '.join(map(str, wanted))}"],
                ["leave out --sizes"],
            )
        return (batch,)
    if any(size < 1 for size in wanted):
        raise UsageError("a number of samples is below 1", [f"sizes: {', '.join(map(str, wanted))}"])
    if not wanted and job.read is None:
        return tuple(size for size in range(1, batch + 1) if batch % size == 0)
    return tuple(sorted(set(wanted)))
