"""How the parameters of one stage are updated: over which ranks gradients are summed, when, and what steps them.

    a parameter            its gradient is summed over            when
    ---------------------  -------------------------------------  -----------------------------------------------
    of the stage alone     all ranks of the stage                 in buckets, from the last backward on
    in parts (a layout)    the ranks that have the same part      the same
    tied to other stages   the ranks of all these stages          before the step's first update
    divided (ZeRO)         all ranks of the stage, each a shard   by its level (:mod:`runtime.optim.sharding`)

Ties are summed by :mod:`runtime.optim.gradient_sync`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import nn

from runtime.optim.gradient_buckets import GradientBuckets, StartSum
from runtime.optim.optimizer import StageOptimizer
from runtime.optim.sharding import FlatExchange, ShardedParameters
from runtime.rank import RankContext

if TYPE_CHECKING:
    from runtime.optim.pass_shards import PassShards, UsePlaces
    from runtime.spatial import ParameterParts


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
    parts: ParameterParts = field(default_factory=dict)
    in_passes: PassShards | None = None

    def group(self, name: str, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks, of those of the stage, that have the same part of a parameter, by growing number."""
        part = self.parts.get(name)
        return ranks if part is None else part.group

    @property
    def slices(self) -> dict[str, nn.Parameter] | None:
        """By name, what has gradients once a backward is over; None: the parameters."""
        return None if self.in_passes is None else {name: part.view for name, part in self.in_passes.slices.items()}


def updates_of(
    context: RankContext,
    stage: int,
    parameters: Mapping[str, nn.Parameter],
    parts: ParameterParts,
    places: Mapping[str, UsePlaces] = MappingProxyType({}),
) -> Updates:
    """The updates of ``stage``.

    Args:
        parameters: that are trained, by name, each as this rank has it.
        parts: what this rank has of the parameters, where the stage's layers are divided along more than samples.
        places: of parameters in the stage's passes, where gradients are divided, in the order of their use.

    Raises:
        UsageError: the optimiser cannot be used.
    """
    rank = context.rank
    of_stage = context.decision.stages[stage]
    is_alone = len(context.decision.stages) == 1
    ranks = tuple(sorted(of_stage.ranks))
    ties = context.ties
    zero = of_stage.level
    tie_of = {name: tie for tie in ties if rank in tie.ranks for name in tie.names if name in parameters}
    own = {name: parameter for name, parameter in parameters.items() if name not in tie_of}
    shards: ShardedParameters | None = None
    in_passes: PassShards | None = None
    if zero and len(ranks) > 1:
        if places:
            own = {name: own[name] for name in places if name in own}
            in_passes = _pass_shards(context, own, places, ranks, zero)
        shards = in_passes or _shards(context, own, ranks)
    reduction = _buckets(context, own, parts, ranks) if shards is None and len(ranks) > 1 else shards
    trained = {
        name: parameter for name, parameter in parameters.items() if name in own or tie_of[name].owner(rank) == stage
    }
    first = {name: parts[name].group[0] if name in parts else ranks[0] for name in trained}
    first |= {name: tie_of[name].ranks[0] for name in trained if name in tie_of}
    own_parts = {name: parts[name] for name in trained if name in parts}
    optimizer = StageOptimizer(trained, context.optimizer, shards, own_parts, is_alone=is_alone) if trained else None
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


def _pass_shards(
    context: RankContext,
    own: Mapping[str, nn.Parameter],
    places: Mapping[str, UsePlaces],
    ranks: tuple[int, ...],
    zero: int,
) -> PassShards:
    from runtime.optim.pass_shards import PassShards  # late: few plans divide so much

    index = ranks.index(context.rank)
    return PassShards(own, places, index, len(ranks), *_halves(context, ranks), gathers=zero > 2)


def _shards(context: RankContext, own: Mapping[str, nn.Parameter], ranks: tuple[int, ...]) -> ShardedParameters:
    return ShardedParameters(own, ranks.index(context.rank), len(ranks), *_halves(context, ranks))


def _halves(context: RankContext, ranks: tuple[int, ...]) -> tuple[FlatExchange, FlatExchange]:
    """The two halves of a sum over ``ranks``: scattered, and gathered."""
    transport = context.transport
    return partial(transport.reduce_scatter, ranks=ranks), partial(transport.all_gather, ranks=ranks)


def _buckets(
    context: RankContext, own: Mapping[str, nn.Parameter], parts: ParameterParts, ranks: tuple[int, ...]
) -> GradientBuckets:
    @cache  # one function for each group of ranks
    def sum_over(group: tuple[int, ...]) -> StartSum | None:
        return partial(context.transport.start_sum, ranks=group) if len(group) > 1 else None

    others = {own[name]: sum_over(part.group) for name, part in parts.items() if name in own}
    return GradientBuckets(own.values(), sum_over(ranks), others=others)
