"""Parameters that layers of several stages use: an embedding that is the output's weight as well.

Every rank of every such stage has a copy, and a gradient that is its part of the whole.  Their sum over all these
ranks, once a step, is the gradient of one device; with it, and with equal optimisers, the copies stay equal.  A rank
that runs several of the stages has one copy, which the optimiser of the lowest of them updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.ir.graph import Graph


@dataclass(frozen=True, slots=True)
class Tie:
    """Parameters that the same stages use.

    Attributes:
        names: of the parameters, in the graph's order.
        stages: by growing number; at least two.
        stage_ranks: the ranks of each of them.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]
    stage_ranks: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that have a copy, by growing number; the first one speaks for all of them."""
        return tuple(sorted({rank for ranks in self.stage_ranks for rank in ranks}))

    def owner(self, rank: int) -> int:
        """The stage whose optimiser updates the copy of ``rank``."""
        return next(stage for stage, ranks in zip(self.stages, self.stage_ranks, strict=True) if rank in ranks)


def ties_of(graph: Graph, stage_of: Mapping[str, int], ranks: Sequence[tuple[int, ...]]) -> tuple[Tie, ...]:
    """The parameters that several stages use; the same on all ranks.

    Args:
        stage_of: by layer.
        ranks: of each stage.
    """
    stages: dict[str, set[int]] = {name: set() for name in graph.parameters}
    for layer in graph.layers:
        for name in layer.parameters:
            stages[name].add(stage_of[layer.name])
    names: dict[tuple[int, ...], list[str]] = {}
    for name, found in stages.items():
        if len(found) > 1:
            names.setdefault(tuple(sorted(found)), []).append(name)
    return tuple(
        Tie(tuple(tied), together, tuple(tuple(sorted(ranks[stage])) for stage in together))
        for together, tied in names.items()
    )


def groups_of_ties(ties: Iterable[Tie]) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that sum over each other, for the transport."""
    return tuple(dict.fromkeys(tie.ranks for tie in ties if len(tie.ranks) > 1))
