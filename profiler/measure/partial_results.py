"""What one measuring process finds, in the pieces that are kept as they are finished: a size, some parts, the rest.

They are kept in a file (:class:`Unfinished`), so that an interrupted profile can be gone on with.  It is written anew,
in one move, after every piece; one for another job is dropped.  A process is known by its number and by whether it
repeats a contended one.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from planner.ir.codec import canonical, from_json
from planner.ir.files import read_plain, write_text
from planner.ir.graph import Graph
from planner.ir.profile import Measurement, ParameterCost, PartShape, PreparationCost, SiteHalo, Slowdown
from profiler.measure.contention import MOST_RUN_DELAY, is_contended, is_throttled


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
        calls_share: of the host's calls in its passes (:mod:`profiler.measure.host_time`).
        failure: why the model does not run.
        run_delay: share of its time that the process waited for its core meanwhile; 1: not known.
        canaries_s: of the fixed kernel before and after; none: not known.
    """

    samples: int
    measurements: tuple[Measurement, ...] = ()
    iteration_s: float = 0.0
    failure: str = ""
    calls_share: float = 0.0
    run_delay: float = 1.0
    canaries_s: tuple[float, ...] = ()

    @property
    def step_s(self) -> float:
        """Forward and backward of all layers."""
        return sum(one.passes_s for one in self.measurements)


@dataclass(frozen=True, slots=True)
class PartCosts:
    """One round of parts: ``shapes`` were tried, of those that can be run alone there are ``measurements``.

    Attributes:
        run_delay, canaries_s: as of :class:`SizeCosts`.
    """

    shapes: tuple[PartShape, ...]
    measurements: tuple[Measurement, ...]
    run_delay: float = 1.0
    canaries_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class FinishedMeasurements:
    """What a process has finished of its job."""

    sizes: tuple[SizeCosts, ...] = ()
    parts: tuple[PartCosts, ...] = ()

    def beside(self, other: FinishedMeasurements) -> FinishedMeasurements:
        """These, and those of ``other``."""
        return FinishedMeasurements((*self.sizes, *other.sizes), (*self.parts, *other.parts))


@dataclass(frozen=True, slots=True)
class ChosenMeasurements:
    """What the first process found worth measuring; the others repeat it."""

    sizes: tuple[int, ...]
    shapes: tuple[PartShape, ...]


@dataclass(frozen=True, slots=True)
class Rest:
    """What is found once all sizes are measured, and how quiet the machine was.

    Attributes:
        action_overhead_s: as of a ``Profile``; None: not measured.
        slowdowns: of the process that had others beside it.
        clocks_before, clocks_after: hertz by name of an accelerator, right after each canary; empty if not known.
    """

    parameters: Mapping[str, ParameterCost]
    canary_before_s: float
    canary_after_s: float
    run_delay: float
    preparations: tuple[PreparationCost, ...] = ()
    site_halos: tuple[SiteHalo, ...] = ()
    action_overhead_s: float | None = None
    clocks_before: Mapping[str, float] = field(default_factory=dict)
    clocks_after: Mapping[str, float] = field(default_factory=dict)
    slowdowns: tuple[Slowdown, ...] = ()

    @property
    def is_contended(self) -> bool:
        """Whether what was measured is to be trusted less."""
        return self.has_drifted or self.run_delay > MOST_RUN_DELAY

    @property
    def has_drifted(self) -> bool:
        """Whether the device was faster or slower at the end."""
        return self.is_throttled or is_contended(0.0, self.canary_before_s, self.canary_after_s)

    @property
    def is_throttled(self) -> bool:
        """Whether an accelerator's clock was, and nobody knows since when."""
        return is_throttled(self.clocks_before, self.clocks_after)


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What was measured of a model in one process.

    Attributes:
        left_out: changes of back end whose two sides were not both measured, in words.
    """

    done: FinishedMeasurements
    rest: Rest
    left_out: tuple[str, ...] = ()

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Of whole layers, by growing number of samples."""
        by_samples = sorted(self.done.sizes, key=lambda size: size.samples)
        return tuple(one for size in by_samples for one in size.measurements)

    @property
    def parts(self) -> tuple[Measurement, ...]:
        """Of parts of layers."""
        return tuple(one for each in self.done.parts for one in each.measurements)

    @property
    def iteration_s(self) -> dict[str, float]:
        """Seconds of a whole step by samples."""
        by_samples = sorted(self.done.sizes, key=lambda size: size.samples)
        return {str(size.samples): size.iteration_s for size in by_samples if size.measurements}

    @property
    def undisturbed(self) -> FinishedMeasurements:
        """What was measured while the process had its core, and that its usual pace.

        That is the median over the times of the fixed kernel; a piece of which they are not known lies between those
        of the whole process.
        """
        around_s = (self.rest.canary_before_s, self.rest.canary_after_s)
        pieces: list[SizeCosts | PartCosts] = [*self.done.sizes, *self.done.parts]
        usual_s = statistics.median_low([*around_s, *(seconds for each in pieces for seconds in each.canaries_s)])

        def is_undisturbed(piece: SizeCosts | PartCosts) -> bool:
            had_pace = not any(is_contended(0.0, usual_s, each) for each in piece.canaries_s or around_s)
            return piece.run_delay <= MOST_RUN_DELAY and had_pace

        if self.rest.is_throttled:
            return FinishedMeasurements()
        return FinishedMeasurements(
            tuple(each for each in self.done.sizes if is_undisturbed(each)),
            tuple(each for each in self.done.parts if is_undisturbed(each)),
        )

    @property
    def chosen(self) -> ChosenMeasurements:
        """What another process is to repeat."""
        sizes = sorted(size.samples for size in self.done.sizes if size.measurements)
        return ChosenMeasurements(tuple(sizes), tuple(shape for each in self.done.parts for shape in each.shapes))


_KIND = "unfinished profile"


@dataclass(frozen=True, slots=True)
class ProcessResults:
    """What is known of one process.

    Attributes:
        rest: None while it has not ended.
    """

    done: FinishedMeasurements = FinishedMeasurements()
    rest: Rest | None = None


@dataclass(frozen=True, slots=True)
class Contents:
    """What the file holds.

    Attributes:
        job: fingerprint of all that decides what is measured, and on what.
        graph: fingerprint of the captured graph; empty until there is one.
        processes: by name.
    """

    job: str
    graph: str = ""
    processes: Mapping[str, ProcessResults] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _File:
    halopipe: str
    contents: Contents


class Unfinished:
    """Keeps pieces as they come.

    Args:
        path: None: nowhere.
        job: as of :class:`Contents`.
        resume: go on with what the file holds, if it is of the same job.
        say: takes a sentence for people.
    """

    def __init__(self, path: Path | None, job: str, resume: bool, say: Callable[[str], None]) -> None:
        self._path = path
        self.contents = Contents(job)
        self._is_old = (
            False  # what is in the file is another profile's, and stays until there is something in its place
        )
        if path is None or not path.exists():
            if resume:
                say("there is nothing to go on with; the profile starts at its beginning")
            return
        kept = _read(path)
        if not resume:
            say(f"{path} keeps an interrupted profile until this one has its first size; --resume goes on with it")
        elif kept is None:
            say(f"{path} cannot be read; the profile starts at its beginning")
        elif kept.job != job:
            say("the interrupted profile was another job (model, options, versions or machine): it starts again")
        else:
            self.contents = kept
            return
        self._is_old = True

    def of(self, process: str) -> ProcessResults:
        """What ``process`` has finished."""
        return self.contents.processes.get(process, ProcessResults())

    def captured(self, graph: str) -> None:
        """The graph is known."""
        if self._is_old:
            self.contents = replace(self.contents, graph=graph)
        else:
            self._write(replace(self.contents, graph=graph))

    def add(self, process: str, piece: SizeCosts | PartCosts | Rest) -> None:
        """``process`` has finished a piece."""
        kept = self.of(process)
        if isinstance(piece, SizeCosts):
            kept = replace(kept, done=replace(kept.done, sizes=(*kept.done.sizes, piece)))
        elif isinstance(piece, PartCosts):
            kept = replace(kept, done=replace(kept.done, parts=(*kept.done.parts, piece)))
        else:
            kept = replace(kept, rest=piece)
        self._write(replace(self.contents, processes={**self.contents.processes, process: kept}))

    def drop(self) -> None:
        """Forgets everything; the file goes."""
        self.contents = Contents(self.contents.job)
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()

    def _write(self, contents: Contents) -> None:
        self.contents = contents
        self._is_old = False
        if self._path is not None:
            write_text(self._path, canonical(_File(_KIND, contents)))


def _read(path: Path) -> Contents | None:
    """None if the file is damaged or of another release."""
    try:
        file = from_json(read_plain(path), _File)
    except (OSError, ValueError):
        return None
    return file.contents if file.halopipe == _KIND else None
