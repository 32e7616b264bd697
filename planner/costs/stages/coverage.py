"""What a plan uses that its profile has no measurement of: whole layers at numbers of samples, and parts of layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planner.costs.cost_model import PriceBook
from planner.costs.layers.cost_table import layers_of
from planner.costs.layers.shards import part_of
from planner.costs.shards.option import Option
from planner.costs.stages.input_pipeline import has_host_beside
from planner.costs.stages.layouts import LayoutPrices
from planner.costs.stages.placement import StagePlacement, placements
from planner.ir.cluster import MEASURED
from planner.ir.plan import Decision
from planner.ir.profile import PartShape

_Whole = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """By kind of device.

    Attributes:
        sizes: numbers of samples at which layers are used whole that were not measured there.
        shapes: parts, by growing number of samples.
        waits: actions wait for messages, and it is not known by how much they are longer then.
    """

    sizes: tuple[int, ...] = ()
    shapes: tuple[PartShape, ...] = ()
    waits: bool = False

    def __bool__(self) -> bool:
        return bool(self.sizes or self.shapes or self.waits)


def unmeasured(book: PriceBook, decisions: Iterable[Decision]) -> dict[str, Unmeasured]:
    """What ``decisions`` use and nobody measured; kinds of devices of which all was measured are left out.

    Fractions of a sample, which ranks that share sites do, cannot be measured and are not asked for.

    Raises:
        MissingMeasurementError: nothing says what a layer costs.
    """
    measured = {
        (kind, one.layer, one.samples, one.part)
        for by_kind in (book.profile.measurements, book.profile.parts)
        for kind, found in by_kind.items()
        for one in found
        if one.evidence == MEASURED
    }
    wanted: dict[tuple[str, str, int, tuple[int, ...]], None] = {}
    waiting: set[str] = set()
    for decision in decisions:
        waiting |= _waiting_kinds(book, decision)
        for stage in placements(book, decision):
            wanted.update(dict.fromkeys(_uses(book, decision, stage)))
    missing = [each for each in wanted if each not in measured]
    waiting -= book.profile.action_overhead_s.keys()
    found = {}
    for kind in dict.fromkeys((*(kind for kind, *_ in missing), *sorted(waiting))):
        sizes = sorted({samples for other, _, samples, part in missing if other == kind and not part})
        shapes = [
            PartShape((layer,), samples, part) for other, layer, samples, part in missing if other == kind if part
        ]
        found[kind] = Unmeasured(tuple(sizes), tuple(sorted(shapes, key=lambda shape: shape.samples)), kind in waiting)
    return found


def _waiting_kinds(book: PriceBook, decision: Decision) -> set[str]:
    """Kinds of processors on which actions wait for messages; beside an accelerator nothing is measured of that."""
    ranks = {rank for stage in decision.stages for rank in stage.ranks} if len(decision.stages) > 1 else set[int]()
    devices = (book.profile.cluster.devices[rank] for rank in ranks)
    return {device.kind for device in devices if not has_host_beside(device)}


def _uses(
    book: PriceBook, decision: Decision, stage: StagePlacement
) -> Iterable[tuple[str, str, int, tuple[int, ...]]]:
    """(device kind, layer, samples, part) of what the ranks of a stage do; no part where it is whole."""
    layers = book.profile.graph.layers
    for samples in stage.samples.values():
        for rank, number in zip(stage.ranks, samples, strict=True):
            if number and number == int(number):
                yield from ((book.kind(rank), layers[index].name, int(number), ()) for index in layers_of(stage.runs))
    for rows in stage.laid_out:
        prices = LayoutPrices(book, stage.ranks, rows)
        for index in layers_of(stage.runs):
            name = layers[index].name
            shards = prices.shards(index, (Option.placed(decision.layers[name]),))
            whole = part_of(shards.sized, shards.sized.work.shape)
            for member, rank in enumerate(stage.ranks):
                box, number = shards.work[0, member], int(shards.samples[0, member])
                part = part_of(shards.sized, (box[:, 1] - box[:, 0]).tolist())
                if number and 0 not in part:
                    yield book.kind(rank), name, number, () if part == whole else part
