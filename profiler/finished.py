"""What one measuring process finds, in the pieces that are kept as they are finished: a size, some parts, the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.ir.graph import Graph
from planner.ir.profile import Measurement, ParameterCost, PartShape, PreparationCost, SiteHalo
from profiler.quiet import is_contended, is_throttled


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """What a process says first: the graph whose layers it measures, and what a user may not expect of it."""

    graph: Graph
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SizeCosts:
    """Whole layers at one number of samples.

    Attributes:
        measurements: of every layer; none if the model does not run.
        iteration_s: of a whole step.
        failure: why the model does not run.
    """

    samples: int
    measurements: tuple[Measurement, ...] = ()
    iteration_s: float = 0.0
    failure: str = ""

    @property
    def step_s(self) -> float:
        """Forward and backward of all layers."""
        return sum(one.forward_s + one.backward_s for one in self.measurements)


@dataclass(frozen=True, slots=True)
class PartCosts:
    """One round of parts: ``shapes`` were tried, of those that can be run alone there are ``measurements``."""

    shapes: tuple[PartShape, ...]
    measurements: tuple[Measurement, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """What a process has finished of its job."""

    sizes: tuple[SizeCosts, ...] = ()
    parts: tuple[PartCosts, ...] = ()


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the first process found worth measuring; the others repeat it."""

    sizes: tuple[int, ...]
    shapes: tuple[PartShape, ...]


@dataclass(frozen=True, slots=True)
class Rest:
    """What is found once all sizes are measured, and how quiet the machine was.

    Attributes:
        clocks_before, clocks_after: hertz by name of an accelerator, right after each canary; empty if not known.
    """

    parameters: Mapping[str, ParameterCost]
    canary_before_s: float
    canary_after_s: float
    run_delay: float
    preparations: tuple[PreparationCost, ...] = ()
    site_halos: tuple[SiteHalo, ...] = ()
    clocks_before: Mapping[str, float] = field(default_factory=dict)
    clocks_after: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_contended(self) -> bool:
        """Whether what was measured is to be trusted less."""
        throttled = is_throttled(self.clocks_before, self.clocks_after)
        return throttled or is_contended(self.run_delay, self.canary_before_s, self.canary_after_s)


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What was measured of a model in one process.

    Attributes:
        left_out: changes of back end whose two sides were not both measured, in words.
    """

    done: Done
    rest: Rest
    left_out: tuple[str, ...] = ()

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Of whole layers, by growing number of samples."""
        found = sorted(self.done.sizes, key=lambda size: size.samples)
        return tuple(one for size in found for one in size.measurements)

    @property
    def parts(self) -> tuple[Measurement, ...]:
        """Of parts of layers."""
        return tuple(one for each in self.done.parts for one in each.measurements)

    @property
    def iteration_s(self) -> dict[str, float]:
        """Seconds of a whole step by samples."""
        found = sorted(self.done.sizes, key=lambda size: size.samples)
        return {str(size.samples): size.iteration_s for size in found if size.measurements}

    @property
    def chosen(self) -> Chosen:
        """What another process is to repeat."""
        sizes = sorted(size.samples for size in self.done.sizes if size.measurements)
        return Chosen(tuple(sizes), tuple(shape for each in self.done.parts for shape in each.shapes))
