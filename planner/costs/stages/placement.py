"""The stages of a plan as the prices see them: cut alike along samples, or each layer in its own way."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from planner.costs.cost_model import CostModel
from planner.costs.layers.cost_table import Run, TiedParameter
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.costs.stages.layouts import LayoutPrices
from planner.costs.stages.stage_cost import StageCost, stage_cost
from planner.costs.stages.stage_sums import RecomputeMask
from planner.ir.cluster import RankIds
from planner.ir.extras import extras, required
from planner.ir.lazy import once_by
from planner.ir.plan import Block, Size
from planner.ir.planner_extra import PlannerExtra
from planner.ir.problem import SAMPLE_DIMS


@dataclass(frozen=True, slots=True)
class TiedWeights:
    """Parameters of a stage that the same other stages use too; their gradients are summed before the updates.

    Attributes:
        ranks: of all these stages.
        held_below: ranks that have them for a lower stage already.
        inside, outside: the layer whose parameters one of them is priced with (``TiedParameter.part``), and what part
            of these it is; layers of this stage, and of others.
    """

    ranks: RankIds
    num_bytes: int
    held_below: frozenset[int]
    inside: tuple[tuple[int, float], ...] = ()
    outside: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class StagePlacement:
    """A stage as the prices see it.

    Attributes:
        runs: its layers, as runs of indices.
        ranks: its ranks.
        samples: of each rank, by samples of the micro-batch (fractions: :func:`loads`); empty if ``laid_out``.
        parameter_bytes: of its distinct parameters.
        recompute: whether its activations are computed again before the backward.
        zero: what its ranks divide among them (``planner.ir.plan.Stage.level``).
        ties: its parameters that other stages use too.
        tied: names of these.
        laid_out: its price by samples of the micro-batch, if its layers have layouts of their own, or by part of it;
            else empty.
        recomputed: spans of layers, by index, whose activations alone are computed again, each by itself.
    """

    runs: tuple[Run, ...]
    ranks: RankIds
    samples: Mapping[int, tuple[float, ...]]
    parameter_bytes: int
    recompute: bool = False
    zero: int = 0
    ties: tuple[TiedWeights, ...] = ()
    tied: frozenset[str] = frozenset()
    laid_out: Mapping[Size, StageCost] = field(default_factory=dict)
    recomputed: tuple[tuple[int, ...], ...] = ()

    def samples_of(self, member: int, size: int) -> float:
        """Samples that a member has of a micro-batch of ``size``; where layers have layouts of their own all."""
        return self.samples[size][member] if self.samples else size

    @property
    def recompute_mask(self) -> RecomputeMask:
        """Which of its layers are computed again."""
        return self.recompute or (bool(self.recomputed) and tuple(index for span in self.recomputed for index in span))

    @property
    def sharded(self) -> bool:
        """Whether its ranks divide the optimiser's state among them."""
        return self.zero > 0

    @property
    def own_bytes(self) -> int:
        """Of the parameters that no other stage uses: those summed over its ranks, and divided among them."""
        return self.parameter_bytes - sum(tie.num_bytes for tie in self.ties)

    @property
    def overlaps_sums(self) -> bool:
        """Whether gradients are summed while backward runs, bucket by bucket."""
        return len(self.ranks) > 1 and not self.laid_out and not self.sharded

    @property
    def once(self) -> StageCost | None:
        """The price of a full micro-batch, which holds what is done once a step; None if cut along samples alone."""
        sizes = {size if isinstance(size, tuple) else (size,): size for size in self.laid_out}
        return self.laid_out[sizes[max(sizes)]] if sizes else None


def ties_between(
    parameters: Sequence[TiedParameter], stage_of: Sequence[int], ranks: Sequence[tuple[int, ...]]
) -> tuple[list[tuple[TiedWeights, ...]], frozenset[str]]:
    """By stage, what it shares with others; and the names of all that several stages use.

    Args:
        stage_of: by layer.
        ranks: by stage.
    """
    shared: dict[tuple[int, ...], list[TiedParameter]] = {}
    for parameter in parameters:
        together = tuple(sorted({stage_of[layer] for layer in parameter.layers}))
        if len(together) > 1:
            shared.setdefault(together, []).append(parameter)
    ties: list[list[TiedWeights]] = [[] for _ in ranks]
    for together, own in shared.items():
        everyone = ranks_of(together, ranks)
        size = sum(parameter.num_bytes for parameter in own)
        for stage in together:
            below = frozenset(rank for other in together if other < stage for rank in ranks[other])
            where: tuple[list[tuple[int, float]], list[tuple[int, float]]] = ([], [])
            for parameter in own:
                first = parameter.layers[0]
                where[stage_of[first] != stage].append((first, parameter.part))
            ties[stage].append(TiedWeights(everyone, size, below, *map(tuple, where)))
    return [tuple(each) for each in ties], frozenset(p.name for own in shared.values() for p in own)


def bytes_elsewhere(parameters: Sequence[TiedParameter], stage_of: Sequence[int], stage: int) -> int:
    """Of parameters that layers of ``stage`` use and that count at a layer of another one."""
    return sum(
        parameter.num_bytes
        for parameter in parameters
        if stage_of[parameter.layers[0]] != stage and any(stage_of[layer] == stage for layer in parameter.layers)
    )


def ranks_of(stages: Sequence[int], ranks: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """All ranks of some stages, by growing number."""
    return tuple(sorted({rank for stage in stages for rank in ranks[stage]}))


@dataclass(eq=False)
class LayoutCosts:
    """Prices of layouts by group and size of the micro-batch, each looked up once.

    Attributes:
        allow: families of dims that may be cut (``Problem.allow``).
        halo_depth: most rows by which a rank may work beyond its part (``Problem.halo_depth``).
        evaluates: whether it is about forward passes alone.
    """

    cost_model: CostModel
    allow: tuple[str, ...] = (SAMPLE_DIMS,)
    halo_depth: int = 0
    evaluates: bool = False
    _prices: dict[tuple[tuple[int, ...], int], LayoutPrices] = field(init=False, default_factory=dict, repr=False)

    def prices(self, ranks: RankIds, samples: int) -> LayoutPrices:
        """The prices of layers on ``ranks``."""
        of_group = self._prices.get((ranks, samples))
        if of_group is None:
            made = LayoutPrices(self.cost_model, ranks, samples, self.allow, self.halo_depth, self.evaluates)
            of_group = self._prices[ranks, samples] = made
        return of_group

    def forget_options(self) -> None:
        """Lets the prices of single layers go, which many options make large; those of stages stay."""
        self._prices.clear()

    def costs(
        self,
        ranks: RankIds,
        options: Mapping[int, ShardingSpec],
        sizes: Collection[int],
        blocks: tuple[Block, ...] = (),
    ) -> dict[Size, StageCost]:
        """The price of a stage whose layers (by index) have layouts of their own, by samples of the micro-batch.

        Args:
            blocks: of them, those that are run in blocks.
        """
        return {size: self._cost(ranks, tuple(sorted(options.items())), size, blocks) for size in sorted(sizes)}

    @once_by(lambda self, ranks, options, size, blocks: (ranks, options, size, str(blocks)))
    def _cost(
        self,
        ranks: RankIds,
        options: tuple[tuple[int, ShardingSpec], ...],
        size: int,
        blocks: tuple[Block, ...],
    ) -> StageCost:
        prices = self.prices(ranks, size)
        chosen = dict(options)
        if not blocks:
            return stage_cost(prices, chosen)
        costs = (extra.cost_in_blocks(prices, chosen, blocks) for extra in extras(PlannerExtra))
        return required(costs, "planner", "what a stage in blocks costs")
