"""What a member of a stage holds at least, for any two cuts, and how many micro-batches it can keep at most.

The bound counts these lines of the table (:mod:`planner.costs.memory.table`) at the moment when a stage begins the
first of its backwards with as many micro-batches in flight, and leaves out all others:

    resident     the rank's parameters, gradients, optimiser state (or a part of it, ``divided``), and buffers that no
                 other layer reads                                                              ``state_factor``
    saved        for each micro-batch in flight (``most_held``), unless it is computed again; then of one at a time
    action       the workspace of the hungriest layer, where levels of layers are not known; where they are, the first
                 backward makes gradients as it lets go of what was saved: the lesser of the two need not be there with
                 everything else                                                                ``LeastMemory.needed``
    inputs       for each micro-batch in flight, where something surely comes in and no layer may save it where it lies
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from planner.costs.cost_model import CostModel
from planner.costs.layers.cost_table import Array
from planner.costs.memory.table import What, divided, most_held
from planner.costs.stages.stage_sums import RecomputeMask, of_those
from planner.ir.schedule import Pipeline, StageGraph
from planner.schedules import schedule as schedule_named

Numbers = NDArray[np.int64]


class Cuts(Protocol):
    """Places where stages may begin and end, as bounds see them."""

    def __hash__(self) -> int:
        """By identity."""

    def sums(self, by_layer: Array) -> Array:
        """The sum over the layers before each cut."""

    def largest(self, by_layer: Array) -> Array:
        """The largest value of the layers between two cuts (first, last)."""


@dataclass(frozen=True, slots=True, eq=False)
class Holder:
    """Members of a group that hold alike: sums at each cut, in bytes, and what they may hold.

    Attributes:
        resident: parameters, gradients, optimiser state, buffers of one layer each.
        saved, saved_rest: between F and B, for a full micro-batch and for the last one.
        workspace: by first and last cut, of the hungriest layer; of what is computed again, one micro-batch.
        gradients, once: of parameters, and what a full micro-batch saves, where the lesser need not count.
        received, received_rest: by first cut, what surely comes in of a full micro-batch, and of the last one.
    """

    resident: Array
    saved: Array
    saved_rest: Array
    workspace: Array
    limit_bytes: int
    gradients: Array | None = None
    once: Array | None = None
    received: Array | None = None
    received_rest: Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LeastMemory:
    """What stages hold on the members of a group."""

    holders: tuple[Holder, ...]

    def window(self, first: Numbers, last: Numbers, num_microbatches: int) -> Numbers:
        """How many micro-batches fit at most, 0 to ``num_microbatches``, for stages between two cuts, elementwise."""
        most = np.full(np.broadcast(first, last).shape, num_microbatches, dtype=np.int64)
        rounding = num_microbatches + 6  # the simulator rounds bytes slot by slot
        for holder in self.holders:
            free = holder.limit_bytes + rounding - self.needed(holder, first, last, 0)
            full = holder.saved[last] - holder.saved[first]
            rest = holder.saved_rest[last] - holder.saved_rest[first]
            if holder.received is not None and holder.received_rest is not None:
                full = full + holder.received[first]
                rest = rest + holder.received_rest[first]
            more = np.floor(np.maximum(free - rest, 0.0) / np.maximum(full, 1e-9))
            fitting = np.where(free < rest, 0, np.minimum(more + 1, num_microbatches))
            most = np.minimum(most, fitting.astype(np.int64))
        return most

    def needed(self, holder: Holder, first: Numbers, last: Numbers, kept: int) -> Array:
        """Bytes that a stage holds with ``kept`` full micro-batches, at least; what it receives aside."""
        held = holder.resident[last] - holder.resident[first] + kept * (holder.saved[last] - holder.saved[first])
        if holder.gradients is not None and holder.once is not None:
            gradients = holder.gradients[last] - holder.gradients[first]
            held = held - np.minimum(gradients, holder.once[last] - holder.once[first])
        return np.asarray(held + holder.workspace[first, last])

    def fullness(self, first: Numbers, last: Numbers, kept: int) -> Array:
        """The fullest member's share of its limit, with ``kept`` full micro-batches."""
        shares = (self.needed(holder, first, last, kept) / max(1, holder.limit_bytes) for holder in self.holders)
        return np.asarray(np.maximum.reduce(list(shares)))


@dataclass(frozen=True, slots=True, eq=False)
class Holders:
    """Makes holders for one way to cut the batch.

    Attributes:
        received: by cut, bytes a sample that surely come in there; None: nothing does.  Not added where levels of
            layers are known: layers may save what came where it lies.
        workspaces: those worked out before, by kind, samples and what is recomputed; added to.
    """

    cost_model: CostModel
    cuts: Cuts
    trains: bool
    received: Array | None
    workspaces: dict[tuple[str, float, RecomputeMask], Array]

    def of(
        self, member: tuple[str, int, tuple[float, float]], recompute: RecomputeMask, parts: int, zero: int
    ) -> Holder:
        """What a member holds: its kind, its limit, and its samples of a full micro-batch and of the last one.

        Args:
            recompute: which layers' activations are computed again; of attention's cores alone what they save may not
                be there.
            parts: among how many members the optimiser's state is divided, and what else ``zero`` says.
        """
        kind, limit_bytes, sizes = member
        cuts = self.cuts
        graph = self.cost_model.tables.graph
        factor = state_factor(self.cost_model, self.trains, parts, zero)
        resident = cuts.sums(factor * np.diff(graph.parameter_bytes) + np.diff(graph.own_buffer_bytes))
        keeps = self.trains and recompute is not True
        by_layer = self.cost_model.levels.at(kind, sizes[0]) is not None
        once = self._saved(kind, sizes[0], recompute)
        nothing = np.zeros_like(once)
        adds = by_layer and self.trains
        gradients = cuts.sums(np.diff(graph.parameter_bytes)) / divided(What.GRADIENTS, zero, parts)
        comes = self.received if not by_layer else None
        return Holder(
            resident,
            once if keeps else nothing,
            self._saved(kind, sizes[1], recompute) if keeps else nothing,
            self._workspace(kind, sizes[0], recompute, once, by_layer),
            limit_bytes,
            gradients if adds else None,
            once if adds else None,
            *(None if comes is None else comes * size for size in sizes),
        )

    def _saved(self, kind: str, samples: float, recompute: RecomputeMask) -> Array:
        """Before each cut, what layers save, but those whose activations are computed again alone."""
        saved = self.cost_model.tables.at(kind, samples).saved_bytes
        return self.cuts.sums(np.diff(saved - of_those(saved, recompute if isinstance(recompute, tuple) else ())))

    def _workspace(self, kind: str, samples: float, recompute: RecomputeMask, once: Array, by_layer: bool) -> Array:
        """As of :class:`Holder`; ``once``: what is saved before each cut, ``by_layer``: whether levels are known."""
        key = (kind, samples, recompute)
        if key not in self.workspaces:
            workspace = self.cost_model.tables.at(kind, samples).workspace_bytes
            # Where levels of layers are known, the hungriest may run when others have let go: nothing is sure.
            self.workspaces[key] = self.cuts.largest(np.zeros_like(workspace) if by_layer else workspace)
            if recompute is True and self.trains:
                self.workspaces[key] = self.workspaces[key] + (once[None, :] - once[:, None])
        return self.workspaces[key]


def state_factor(cost_model: CostModel, trains: bool, parts: int = 1, zero: int = 1) -> float:
    """Bytes a byte of parameters: parameters, and where they are trained gradients and the state, or parts of them."""
    if not trains:
        return 1
    state = cost_model.profile.optimizer.state_bytes_per_parameter_byte
    times = (What.PARAMETERS, 1), (What.GRADIENTS, 1), (What.OPTIMISER_STATE, state)
    return sum(each / divided(what, zero, parts) for what, each in times)


def may_bind(cost_model: CostModel, sizes: Iterable[tuple[str, float, int]], num_microbatches: int) -> bool:
    """Whether memory can matter at all: whether the whole network with all micro-batches overflows some device.

    Args:
        sizes: kind, samples and limit of each kind of member.
    """
    graph = cost_model.tables.graph
    always = state_factor(cost_model, trains=True) * graph.parameter_bytes[-1] + graph.buffer_bytes[-1]
    for kind, samples, limit in sizes:
        table = cost_model.tables.at(kind, samples)
        levels = cost_model.levels.at(kind, samples)
        highest = table.workspace_bytes.max(initial=0.0) if levels is None else levels[:4].max(initial=0.0)
        most = always + num_microbatches * table.saved_bytes[-1] + highest
        if most > limit:
            return True
    return False


def kept_by(schedule: str, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """The most micro-batches that the schedule keeps on each of a chain's stages."""
    return kept_on(schedule, StageGraph.chain(num_stages, num_microbatches))


def kept_on(schedule: str, graph: StageGraph) -> tuple[int, ...]:
    """The same of any stages."""
    few = min(graph.num_microbatches, 2 * graph.num_stages + 2)  # what grows with these grows on
    all_kept = _kept_of(schedule, replace(graph, num_microbatches=few))
    return tuple(graph.num_microbatches if kept == few else kept for kept in all_kept)


@functools.lru_cache(maxsize=4096)
def _kept_of(schedule: str, graph: StageGraph) -> tuple[int, ...]:
    """The same, where all micro-batches run."""
    return most_held(schedule_named(schedule)(Pipeline(graph)).rows, graph.num_stages)


def fewest_kept(schedule: str, most_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """The fewest micro-batches that a stage ever keeps, by stages downstream (itself included) from 1.

    Of all chains of at most ``most_stages`` stages.
    """
    fewest = [num_microbatches] * most_stages
    for depth in range(1, most_stages + 1):
        kept = reversed(kept_by(schedule, depth, num_microbatches))
        fewest[:depth] = map(min, fewest, kept)
    return tuple(fewest)
