"""Parameters that layers of several stages use: an embedding that is the output's weight as well.

Every rank of every such stage has a copy, and a gradient that is its part of the whole.  Their sum over all these
ranks, once a step, is the gradient of one device; with it, and with equal optimisers, the copies stay equal.  A rank
that runs several of the stages has one copy, which the optimiser of the lowest of them updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.ir.graph import Graph
from planner.ir.plan import Decision
from planner.layers.division import divides
from planner.layers.stage_rules import boxes_in
from runtime import spatial


@dataclass(frozen=True, slots=True)
class TiedParameters:
    """Parameters that the same stages use, or a part of them; every part has a tie of its own.

    Attributes:
        names: of the parameters, in the graph's order.
        stages: by growing number; at least two.
        stage_ranks: the ranks of each of them that have it.
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


def ties_of(graph: Graph, stage_of: Mapping[str, int], ranks: Sequence[tuple[int, ...]]) -> tuple[TiedParameters, ...]:
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
    for name, users in stages.items():
        if len(users) > 1:
            names.setdefault(tuple(sorted(users)), []).append(name)
    return tuple(
        TiedParameters(tuple(tied), together, tuple(tuple(sorted(ranks[stage])) for stage in together))
        for together, tied in names.items()
    )


def groups_of_ties(ties: Iterable[TiedParameters]) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that sum over each other, for the transport."""
    return tuple(dict.fromkeys(tie.ranks for tie in ties if len(tie.ranks) > 1))


def groups_of(decision: Decision, graph: Graph) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that sum over each other, for the transport: of stages on several ranks, and of ties."""
    groups = {tuple(sorted(stage.ranks)): None for stage in decision.stages if len(stage.ranks) > 1}
    if any(divides(decision, stage, graph) for stage in range(len(decision.stages))):
        groups |= dict.fromkeys(spatial.groups_of_parameters(graph, decision))
    return tuple(groups | dict.fromkeys(groups_of_ties(ties_in(decision, graph))))


def ties_in(decision: Decision, graph: Graph) -> tuple[TiedParameters, ...]:
    """The parameters that several stages use, a tie for the ranks of each part.

    Stages that use other parts are refused elsewhere (``parts_of``).
    """
    stage_of = {name: placement.stage for name, placement in decision.layers.items()}
    ties = []
    for tie in ties_of(graph, stage_of, [stage.ranks for stage in decision.stages]):
        names: dict[tuple[tuple[int, ...], ...], list[str]] = {}
        for name in tie.names:
            boxes = [boxes_in(graph, decision, stage, name) for stage in tie.stages]
            for box in dict.fromkeys(boxes[0]):
                ranks = tuple(
                    tuple(sorted(r for r, own in zip(decision.stages[stage].ranks, of, strict=True) if own == box))
                    for stage, of in zip(tie.stages, boxes, strict=True)
                )
                names.setdefault(ranks, []).append(name)
        ties += [TiedParameters(tuple(own), tie.stages, ranks) for ranks, own in names.items()]
    return tuple(ties)
