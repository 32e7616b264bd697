"""A plan bound to the sizes of one batch: its messages, and every stage's share of every micro-batch.

The order of actions is the plan's, whatever the sizes.  A micro-batch without rows is left out on all ranks.  What
follows from the sizes is worked out once for each combination that comes along, and kept for the next such batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

from torch import Tensor

from planner.ir.errors import UnsupportedModelError
from planner.ir.graph import SAMPLE, Graph
from planner.ir.plan import Size, samples_in, sizes_of
from planner.ir.program import Message, Program, Route
from planner.ir.schedule import ADDS_GRADIENTS, PER_STEP, Action, Edge, Op
from planner.layers.boundary import Boundaries
from planner.layers.division import Division
from runtime.pipeline.loss_weighting import LossWeighting
from runtime.pipeline.microbatches import Batch, InputShapes, part_in
from runtime.pipeline.routing import Routing
from runtime.rank import RankContext
from runtime.recent import Recent
from runtime.stage.local_stage import Feed, LocalStage
from runtime.stage.modes import MicrobatchShard
from runtime.stage.sample_weights import is_factor
from runtime.stage.shapes import graph_at, without_data

if TYPE_CHECKING:
    from runtime.sparse.batch import AnyShare
    from runtime.sparse.share import AnyBatch


GraphAt = Callable[[InputShapes], Graph]
"""The graph in the shapes of one micro-batch."""


@dataclass(frozen=True, slots=True, eq=False)  # one object for each combination of sizes
class Specialization:
    """The plan for one combination of sizes, on one rank.

    Attributes:
        rows: samples of each micro-batch; of their parts, too, those of whole ones.
        program: with the messages of these sizes; actions of micro-batches without rows are left out.
        routing: this rank's messages.
        local_stages: the stages of this rank, with their shares.
        is_kept: whether another batch of the same sizes gets it as well.
    """

    rows: tuple[int, ...]
    program: Program
    routing: Routing
    local_stages: Mapping[int, LocalStage]
    is_kept: bool = True


class Specializer:
    """Makes bindings of a decision on one rank.

    Args:
        context: of its model nothing is kept but its graph without numbers.
        loss_weighting: knows the factors that stages read beside the graph's inputs.
    """

    def __init__(self, context: RankContext, loss_weighting: LossWeighting) -> None:
        model = context.model
        decision = context.decision
        self._context = context
        self._decision = decision
        self._boundaries = context.boundaries
        self._graph = context.graph
        self._loss_weighting = loss_weighting
        self._sizes = dict(model.sizes)
        self._fixed = model.fixed
        # Shapes that are not the capture's are found on a copy without parameters.
        is_reshaped = model.sizes and context.preparation is None
        self._graph_at: GraphAt | None = partial(graph_at, without_data(model)) if is_reshaped else None
        in_parts = context.boundaries.axis is not None
        self._divided = frozenset(s for s in context.stages if in_parts or s in context.divided)
        self._at: dict[object, Boundaries] = {}  # by the shapes of the inputs
        self._divisions = Recent[object, Division]()  # by boundaries, stage, samples and sizes
        # By stage, samples and sizes, what divisions call themselves in the keys of their exchanges.
        self._numbers: dict[tuple[int, int, tuple[int, ...]], int | None] = {}
        self._bindings = Recent[object, Specialization]()  # by samples and shapes of all micro-batches

    def require_possible(self, local_stages: Mapping[int, LocalStage]) -> None:
        """Raises :class:`UnsupportedModelError` unless the model can be run with the samples that are planned."""
        for stage in local_stages:
            if stage in self._divided:
                divisions = [self._division(self._boundaries, stage, n, ()) for n in self._decision.micro_batches]
                self._require_possible(stage, {count for each in divisions for count in self._rows_in(each, stage)})
                continue
            layout = self._decision.layout_of(stage)
            position = self._context.position(stage)
            self._require_possible(stage, {layout.samples(n)[position] for n in self._decision.micro_batches})

    def bind(self, local_stages: Mapping[int, LocalStage], batch: Batch) -> Specialization:
        """The binding to the sizes of ``batch``.

        Raises:
            UnsupportedModelError: the model cannot be run with these numbers of samples.
        """
        if self._context.preparation is not None:
            return self._bound_to_sites(local_stages, cast("AnyBatch", batch))
        varying = enumerate(batch.rows) if self._sizes else ()
        key = (batch.rows, tuple(self._varying(batch.shapes(m)) if rows else () for m, rows in varying))
        specialization = self._bindings.get(key)
        if specialization is None:
            specialization = self._bindings[key] = self._bound(local_stages, batch)
        return specialization

    def _bound(self, local_stages: Mapping[int, LocalStage], batch: Batch) -> Specialization:
        rows = batch.rows
        num_parts = self._decision.num_parts
        of_whole = [
            self._boundaries_of(batch.shapes(m)) if count and self._sizes else self._boundaries
            for m, count in enumerate(rows)
        ]
        boundaries = [each for each in of_whole for _ in range(num_parts)]
        sizes = sizes_of(rows, self._decision.token_slices)
        program = self._program(sizes, boundaries)
        divisions = {
            (stage, m * num_parts + k): self._division(
                of_whole[m], stage, count, self._sizes_of(tuple(self._sizes), batch.shapes(m))
            )
            for stage in self._divided
            for m, count in enumerate(rows)
            if count
            for k in range(num_parts)
        }
        return Specialization(
            rows,
            program,
            Routing(boundaries, program, tuple(map(samples_in, sizes)), self._context.rank, divisions, num_parts),
            {
                stage: self._divided_shares(stage, local_stage, batch, divisions)
                if stage in self._divided
                else self._shared(stage, local_stage, batch)
                for stage, local_stage in local_stages.items()
            },
        )

    def _bound_to_sites(self, local_stages: Mapping[int, LocalStage], batch: AnyBatch) -> Specialization:
        """Of clouds and sampled graphs: no two batches have the same sites."""
        from runtime.sparse.share import boundaries_of_sites  # late: other networks do without

        shares = {
            (stage, m): self._site_share(stage, batch, m)
            for stage, each in enumerate(self._decision.stages)
            for m, rows in enumerate(batch.rows)
            if rows and len(each.ranks) > 1
        }
        boundaries = [
            boundaries_of_sites(self._decision, batch, m, shares, self._boundaries) if count else self._boundaries
            for m, count in enumerate(batch.rows)
        ]
        program = self._program(batch.rows, boundaries)
        return Specialization(
            batch.rows,
            program,
            Routing(boundaries, program, batch.rows, self._context.rank),
            {
                stage: self._shared(
                    stage, local_stage, batch, {m: share for (s, m), share in shares.items() if s == stage}
                )
                for stage, local_stage in local_stages.items()
            },
            is_kept=False,
        )

    def _site_share(self, stage: int, batch: AnyBatch, m: int) -> AnyShare:
        """This rank's, or of a stage that it has no part in the first rank's, whose cut points are asked for."""
        from runtime.sparse.share import share_of

        ranks = self._decision.stages[stage].ranks
        position = ranks.index(self._context.rank) if self._context.rank in ranks else 0
        return share_of(self._decision, batch, m, stage, position)

    def _division(self, boundaries: Boundaries, stage: int, rows: int, sizes: tuple[int, ...]) -> Division:
        key = (id(boundaries), stage, rows, sizes)
        cached = self._divisions.get(key)
        if cached is None:
            named = dict(zip(self._sizes, sizes, strict=False))
            number = self._numbers.setdefault((stage, rows, sizes), _number(stage, self._numbers))
            if boundaries.axis is not None:
                division: Division = boundaries.axis.division(self._decision, stage, rows).in_use(named, 0)
            else:
                division = Division.of(boundaries.graph, self._decision, stage, rows).in_use(named, number)
            cached = self._divisions[key] = division
        return cached

    def _rows_in(self, division: Division, stage: int) -> set[int]:
        """Numbers of samples that this rank runs layers of the stage with."""
        if self._boundaries.axis is not None:
            return {division.samples}
        position = self._context.position(stage)
        return {layer.rows[position] for layer in division.layers.values()}

    def _program(self, sizes: tuple[Size, ...], boundaries: Sequence[Boundaries]) -> Program:
        by_size: dict[tuple[Edge, Size, int], tuple[Message, ...]] = {}
        messages: dict[Route, tuple[Message, ...]] = {}
        for edge in self._context.program.stages.edges:
            for m, size in enumerate(sizes):
                key = (edge, size, id(boundaries[m]))
                if key not in by_size:
                    by_size[key] = boundaries[m].messages(edge, size) if samples_in(size) else ()
                messages[edge.src, edge.dst, m] = by_size[key]

        def runs(action: Action) -> bool:
            return action.op in PER_STEP or action.microbatch is None or samples_in(sizes[action.microbatch]) > 0

        actions = tuple(tuple(action for action in row if runs(action)) for row in self._context.program.rows)
        return replace(self._context.program, rows=actions, messages=messages)

    def _boundaries_of(self, shapes: InputShapes) -> Boundaries:
        varying = self._varying(shapes)
        if not varying or self._graph_at is None:
            return self._boundaries
        key = tuple(shapes.items())
        if key not in self._at:
            self._at[key] = Boundaries.of_decision(self._graph_at(shapes), self._decision)
        return self._at[key]

    def _varying(self, shapes: InputShapes) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The inputs that have other dims than the capture's, samples apart."""
        return tuple(
            (name, shape)
            for name, shape in shapes.items()
            if any(
                extent != wanted and dim != SAMPLE
                for extent, wanted, dim in zip(
                    shape, self._graph.inputs[name].shape, self._graph.inputs[name].dims, strict=True
                )
            )
        )

    def _shared(
        self, stage: int, local_stage: LocalStage, batch: Batch, sites: Mapping[int, AnyShare] | None = None
    ) -> LocalStage:
        layout = self._decision.layout_of(stage)
        position = self._context.position(stage)
        counts = [
            sites[m].shares if sites and m in sites else layout.samples(samples) for m, samples in enumerate(batch.rows)
        ]
        self._require_possible(stage, {count[position] for count, rows in zip(counts, batch.rows, strict=True) if rows})
        weights = list(self._weights(batch.rows))
        names = [name for name in local_stage.passes.inputs if name in self._graph.inputs]
        shares = list[MicrobatchShard]()
        feeds = list[dict[str, Feed]]()
        for m, count in enumerate(counts):
            start = sum(count[:position])
            share = (sites or {}).get(m)
            sizes: tuple[int, ...] = ()
            if batch.rows[m] and sites is None:
                sizes = self._sizes_of(local_stage.passes.sizes, batch.shapes(m))
            elif batch.rows[m]:
                extents = cast("AnyBatch", batch).sizes(m) if share is None else share.sizes
                sizes = tuple(extents[word] for word in local_stage.passes.sizes)
            weight = count[position] * weights[m]
            shares.append(
                MicrobatchShard(m, count[position], start, batch.rows[m], sizes, sites=share, loss_weight=weight)
            )
            feeds.append(
                {name: partial(_feed, name=name, m=m, start=start, count=count[position]) for name in names}
                if share is None
                else {name: partial(_feed_of_sites, name=name, share=share) for name in names}
            )
            feeds[-1].update(self._factors(stage, local_stage, m))
        return replace(local_stage, shares=tuple(shares), feeds=tuple(feeds))

    def _divided_shares(
        self, stage: int, local_stage: LocalStage, batch: Batch, divisions: Mapping[tuple[int, int], Division]
    ) -> LocalStage:
        """Every rank, or part, runs the whole micro-batch, as far as its layers' parts go."""
        num_parts = self._decision.num_parts
        weights = list(self._weights(batch.rows))
        names = [name for name in local_stage.passes.inputs if name in self._graph.inputs]
        shares = list[MicrobatchShard]()
        feeds = list[dict[str, Feed]]()
        for number in range(len(batch.rows) * num_parts):
            m, k = divmod(number, num_parts)
            rows = batch.rows[m]
            division = divisions.get((stage, number))
            sizes = self._sizes_of(local_stage.passes.sizes, batch.shapes(m)) if rows else ()
            position = k if num_parts > 1 else self._context.position(stage)
            weight = rows * weights[m]
            shares.append(MicrobatchShard(number, rows, 0, rows, sizes, division, whole=m, loss_weight=weight))
            feeds.append(self._factors(stage, local_stage, m))
            if division is None:
                continue
            self._require_possible(stage, self._rows_in(division, stage))
            for name in names:
                box = division.held(name)[position]
                shape = batch.shapes(m)[name]
                spec = replace(self._graph.inputs[name], shape=tuple(shape))
                feeds[-1][name] = partial(part_in, name=name, microbatch=m, box=box, spec=spec)
        return replace(local_stage, shares=tuple(shares), feeds=tuple(feeds))

    def _factors(self, stage: int, local_stage: LocalStage, microbatch: int) -> dict[str, Feed]:
        factor = partial(self._loss_weighting.factor, stage=stage, microbatch=microbatch)
        return {name: partial(factor, name=name) for name in filter(is_factor, local_stage.passes.inputs)}

    def _weights(self, rows: tuple[int, ...]) -> Iterator[float]:
        """What one sample of each micro-batch counts for in the gradients of its update."""
        first = 0
        for last in self._context.updates_after:
            total = sum(rows[first : last + 1])
            yield from [1 / total if total else 0.0] * (last + 1 - first)
            first = last + 1

    def _sizes_of(self, names: Sequence[str], shapes: InputShapes) -> tuple[int, ...]:
        return tuple(shapes[source][dim] for source, dim in (self._sizes[name] for name in names))

    def _require_possible(self, stage: int, counts: set[int]) -> None:
        if not self._context.takes_any and counts - {self._graph.samples}:
            raise UnsupportedModelError(
                f"the model was captured for {self._graph.samples} samples only",
                [
                    f"stage {stage} would run it with {', '.join(map(str, sorted(counts)))}",
                    *([f"the number of samples is fixed {self._fixed}"] if self._fixed else []),
                ],
                [
                    f"plan with micro-batches of {self._graph.samples} and one rank a stage",
                    "leave a smaller last batch out: drop_last=True",
                    "sizes from x.shape, and no Python loop over samples",
                ],
            )


def last_gradients(row: Sequence[Action], ranks: Sequence[tuple[int, ...]]) -> frozenset[Action]:
    """The last action before each update that adds to the gradients of the updated stage, where their sum may start.

    What ranks sum over each other starts on all of them in one order, that of their reductions: no sum starts before
    the reduction of another stage on the same ranks that stands in between.
    """
    last_actions: set[Action] = set()
    latest: dict[int, Action] = {}
    for action in row:
        if action.op in ADDS_GRADIENTS:
            latest[action.stage] = action
        elif action.op in (Op.REDUCE_GRAD, Op.UPDATE) and action.stage in latest:
            last_actions.add(latest.pop(action.stage))
        if action.op is Op.REDUCE_GRAD:
            latest = {s: last for s, last in latest.items() if set(ranks[s]) != set(ranks[action.stage])}
    return frozenset(last_actions)


def ends_step(action: Action) -> bool:
    """Whether it is an update of the whole step."""
    return action.op is Op.UPDATE and action.microbatch is None


def last_updates(row: Sequence[Action]) -> frozenset[Action]:
    """The last update of each stage."""
    return frozenset({action.stage: action for action in row if action.op is Op.UPDATE}.values())


def _feed_of_sites(batch: Batch, name: str, share: AnyShare) -> Tensor:
    return share.tensor(name)


def _feed(batch: Batch, name: str, m: int, start: int, count: int) -> Tensor:
    return batch.part(name, m, start, count)


def _number(stage: int, numbers: Mapping[tuple[int, int, tuple[int, ...]], int | None]) -> int | None:
    """Of a stage's next division: its ranks meet sizes in the same order.  None if there are too many."""
    count = sum(one == stage for one, *_ in numbers)
    return stage << 7 | count if stage < 1 << 7 and count < 1 << 7 else None
