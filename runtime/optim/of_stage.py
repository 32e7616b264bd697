"""How the parameters of one stage are updated: over which ranks gradients are summed, and what steps them.

Parameters that layers of several stages use: an embedding that is the output's weight as well.

Every rank of every such stage has a copy, and a gradient that is its part of the whole.  Their sum over all these
ranks, once a step, is the gradient of one device; with it, and with equal optimisers, the copies stay equal.  A rank
that runs several of the stages has one copy, which the optimiser of the lowest of them updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import nn

from planner.ir.graph import Graph
from runtime.optim.optimizer import MakeOptimizer, StageOptimizer
from runtime.optim.sharding import GradientBuckets, ShardedParameters, StartSum
from runtime.transport import Transport

if TYPE_CHECKING:
    from runtime.optim.pass_shards import PassShards, UsePlaces
    from runtime.spatial import Parts


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


@dataclass(frozen=True, slots=True)
class Updates:
    """What makes gradients into new parameters.

    Attributes:
        tied: names of the parameters that other stages use too; their gradients are summed over all these stages when
            the step is finished (:mod:`runtime.optim.gradient_sync`), not with the others.
        reduction: makes one gradient of those of the stage's ranks; None on a stage of one rank.
        optimizer: None where there is nothing to train.
        speaks_for: names of the parameters that this rank saves, or its part of them, for all ranks that have the same.
        parts: what this rank has of parameters and buffers; those that are not named are whole on all ranks.
        in_passes: the reduction, where ranks have gradients or parameters in slices while passes run.
    """

    tied: frozenset[str]
    reduction: GradientBuckets | ShardedParameters | None
    optimizer: StageOptimizer | None
    speaks_for: frozenset[str]
    parts: Parts = field(default_factory=dict)
    in_passes: PassShards | None = None

    def group(self, name: str, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks, of those of the stage, that have the same part of a parameter, by growing number."""
        part = self.parts.get(name)
        return ranks if part is None else part.group


def updates_of(
    stage: int,
    parameters: Mapping[str, nn.Parameter],
    ranks: tuple[int, ...],
    ties: Iterable[TiedParameters],
    transport: Transport,
    make: MakeOptimizer,
    *,
    zero: int,
    parts: Parts | None = None,
    places: Mapping[str, UsePlaces] = MappingProxyType({}),
    is_alone: bool = True,
) -> Updates:
    """The updates of ``stage``, which runs on ``ranks`` (by growing number).

    Args:
        parameters: that are trained, by name, each as this rank has it.
        ties: of the whole plan.
        make: called once, with the parameters that this stage's optimiser updates, if there are any.
        zero: what the ranks divide (``planner.ir.plan.Stage.level``).
        parts: what this rank has of the parameters, where the stage's layers are divided along more than samples; its
            groups of ranks are declared to ``transport``.
        places: of parameters in the stage's passes, where gradients are divided, in the order of their use.
        is_alone: whether there is no other stage.

    Raises:
        UsageError: the optimiser cannot be used.
    """
    rank, parts = transport.rank, parts or {}
    tie_of = {name: tie for tie in ties if rank in tie.ranks for name in tie.names if name in parameters}
    own = {name: parameter for name, parameter in parameters.items() if name not in tie_of}
    reduction: GradientBuckets | ShardedParameters | None = None
    shards: ShardedParameters | None = None
    in_passes: PassShards | None = None
    if zero and len(ranks) > 1:
        scatter = partial(transport.reduce_scatter, ranks=ranks)
        gather = partial(transport.all_gather, ranks=ranks)
        if places:
            from runtime.optim.pass_shards import PassShards  # late: few plans divide so much

            own = {name: own[name] for name in places if name in own}
            in_passes = PassShards(own, places, ranks.index(rank), len(ranks), scatter, gather, gathers=zero > 2)
            shards = in_passes
        else:
            shards = ShardedParameters(own, ranks.index(rank), len(ranks), scatter, gather)
        reduction = shards
    elif len(ranks) > 1:
        sums = _GroupSums(transport)
        others = {own[name]: sums.over(part.group) for name, part in parts.items() if name in own}
        reduction = GradientBuckets(own.values(), sums.over(ranks), others=others)
    trained = {
        name: parameter for name, parameter in parameters.items() if name in own or tie_of[name].owner(rank) == stage
    }
    first = {name: parts[name].group[0] if name in parts else ranks[0] for name in trained}
    first |= {name: tie_of[name].ranks[0] for name in trained if name in tie_of}
    held = {name: parts[name] for name in trained if name in parts}
    optimizer = StageOptimizer(trained, make, shards, held, is_alone=is_alone) if trained else None
    if in_passes is not None:
        in_passes.divide()
    return Updates(
        frozenset(tie_of),
        reduction,
        optimizer,
        frozenset(name for name in trained if rank == first[name]),
        parts,
        in_passes,
    )


class _GroupSums:
    """What starts sums, one function for each group of ranks."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._start_sums: dict[tuple[int, ...], StartSum] = {}

    def over(self, ranks: tuple[int, ...]) -> StartSum | None:
        """None where a rank is alone."""
        if len(ranks) < 2:
            return None
        if ranks not in self._start_sums:
            self._start_sums[ranks] = partial(self._transport.start_sum, ranks=ranks)
        return self._start_sums[ranks]
