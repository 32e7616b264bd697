"""What a plan uses that its profile has no measurement of: whole layers at numbers of samples, and parts of layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.costs.candidate import candidate_of
from planner.costs.cost_model import CostModel
from planner.costs.layers.cost_table import layers_of
from planner.costs.layers.shards import part_of
from planner.costs.pricing import Pricing
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.costs.stages.input_pipeline import has_host_beside
from planner.costs.stages.layouts import LayoutPrices
from planner.costs.stages.placement import StagePlacement
from planner.ir.cluster import AROUND, GRADIENT_SUMS, MEASURED, NORMALISATION, PARTIAL_SUMS, PIECES
from planner.ir.plan import AxisPart, Decision
from planner.ir.profile import PartShape, Profile
from planner.ir.schedule import Op
from planner.layers import takes_statistics

_PartOnKind = tuple[str, str, int, tuple[int, ...]]
"""(device kind, layer, samples, part); no part where the layer is whole."""


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """By kind of device.

    Attributes:
        sizes: numbers of samples at which layers are used whole that were not measured there.
        shapes: parts, by growing number of samples.
        waits: actions wait for messages, and it is not known by how much they are longer then.
        exchanges: kinds of exchanges between ranks that share layers, of which it is not known what they compute around
            them (:data:`planner.ir.cluster.AROUND`), in that order.
    """

    sizes: tuple[int, ...] = ()
    shapes: tuple[PartShape, ...] = ()
    waits: bool = False
    exchanges: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.sizes or self.shapes or self.waits or self.exchanges)


def unmeasured(cost_model: CostModel, decisions: Iterable[Decision]) -> dict[str, Unmeasured]:
    """What ``decisions`` use and nobody measured; kinds of devices of which all was measured are left out.

    Fractions of a sample, which ranks that share sites do, cannot be measured and are not asked for.

    Raises:
        MissingMeasurementError: nothing says what a layer costs.
    """
    profile = cost_model.profile
    planned = [(each, Pricing(cost_model).stages(candidate_of(profile.graph, each))) for each in decisions]
    placed = [(decision, stage) for decision, stages in planned for stage in stages]
    used = dict.fromkeys(use for decision, stage in placed for use in _uses(cost_model, decision, stage))
    measured = _measured(profile)
    missing = [use for use in used if use not in measured]
    waiting = {kind for _, stages in planned if len(stages) > 1 for kind in _processors(cost_model, stages)}
    waiting -= profile.action_overhead_s.keys()
    collectives = {table.operation for table in profile.cluster.collectives}
    exchanging = {
        (kind, operation)
        for decision, stage in placed
        for operation in _exchanges(cost_model, decision, stage) - collectives
        for kind in _processors(cost_model, [stage])
    }
    kinds = dict.fromkeys((*(kind for kind, *_ in missing), *sorted(waiting | {kind for kind, _ in exchanging})))
    return {
        kind: Unmeasured(
            *_missing_on(kind, missing),
            kind in waiting,
            tuple(operation for operation in AROUND if (kind, operation) in exchanging),
        )
        for kind in kinds
    }


def _measured(profile: Profile) -> set[_PartOnKind]:
    return {
        (kind, one.layer, one.samples, one.part)
        for by_kind in (profile.measurements, profile.parts)
        for kind, measurements in by_kind.items()
        for one in measurements
        if one.evidence == MEASURED
    }


def _missing_on(kind: str, missing: Sequence[_PartOnKind]) -> tuple[tuple[int, ...], tuple[PartShape, ...]]:
    """The sizes and shapes on a kind of device, as of :class:`Unmeasured`."""
    mine = [each[1:] for each in missing if each[0] == kind]
    sizes = sorted({samples for _, samples, part in mine if not part})
    shapes = [PartShape((layer,), samples, part) for layer, samples, part in mine if part]
    return tuple(sizes), tuple(sorted(shapes, key=lambda shape: shape.samples))


def _processors(cost_model: CostModel, stages: Iterable[StagePlacement]) -> set[str]:
    """Kinds of the ranks' devices, but of accelerators: beside these nothing is measured of waits and calls."""
    devices = (cost_model.cluster.devices[rank] for stage in stages for rank in stage.ranks)
    return {device.kind for device in devices if not has_host_beside(device)}


def _exchanges(cost_model: CostModel, decision: Decision, stage: StagePlacement) -> set[str]:
    """What its ranks exchange, in the words of :data:`planner.ir.cluster.AROUND`."""
    if len(stage.ranks) < 2:
        return set()
    own = layers_of(stage.runs)
    graph = cost_model.graph
    kinds = {graph.layers[index].kind for index in own}
    exchanges = set()
    if any(takes_statistics(graph.layers[index], decision.trains) for index in own):
        exchanges.add(NORMALISATION)
    if stage.laid_out:
        exchanges |= {PIECES, PARTIAL_SUMS}
    for more in cost_model.stage_exchanges:
        exchanges |= {*more.around(kinds, bool(stage.laid_out))}
    sums = Op.REDUCE_GRAD.value
    if not stage.sharded and stage.own_bytes and any(sums in text for row in decision.program for text in row):
        exchanges.add(GRADIENT_SUMS)
    return exchanges


def _uses(cost_model: CostModel, decision: Decision, stage: StagePlacement) -> Iterable[_PartOnKind]:
    """What the ranks of a stage do."""
    layers = cost_model.graph.layers
    for samples in stage.samples.values():
        for rank, number in zip(stage.ranks, samples, strict=True):
            if number and number == int(number):
                yield from (
                    (cost_model.kind(rank), layers[index].name, int(number), ()) for index in layers_of(stage.runs)
                )
    for rows in stage.laid_out:
        if isinstance(rows, AxisPart):  # read between what was measured of a few
            continue
        prices = LayoutPrices(cost_model, stage.ranks, rows)
        for index in layers_of(stage.runs):
            name = layers[index].name
            shards = prices.shards(index, (ShardingSpec.placed(decision.layers[name]),))
            whole = part_of(shards.sized, shards.sized.work.shape)
            for member, rank in enumerate(stage.ranks):
                box = shards.done[0, member]
                number = int(shards.samples[0, member])
                part = part_of(shards.sized, (box[:, 1] - box[:, 0]).tolist())
                if number and 0 not in part:
                    yield cost_model.kind(rank), name, number, () if part == whole else part
