"""The stages of a program on their ranks: layers, parts of micro-batches, parameters, and what is held of them.

Both accounts ask here: the one of times (``action_times``) and the one of memory (``memory``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from planner.check.structure import samples_of
from planner.costs.communication.links import shares_memory
from planner.costs.cost_model import CostModel
from planner.costs.layers.cost_table import runs_of
from planner.ir.graph import Layer
from planner.ir.plan import AxisPart, Decision, Size, samples_in
from planner.ir.program import Program
from planner.layers import throughout_sites
from planner.layers.division import has_layouts
from planner.layers.recomputed import layers_in_order
from tests.oracles.prices import LaidOut, LayerPrices
from tests.oracles.stage_memory import Holding

if TYPE_CHECKING:
    from tests.planner.extras.token_slices.plain_slices import Sliced


@dataclass(frozen=True, slots=True)
class _Kept:
    """By layer, as in :class:`tests.oracles.stage_memory.Holding`."""

    kept: Sequence[float] = ()
    same: Sequence[float] = ()


_NOTHING_KEPT = _Kept()


class Stages:
    """The stages of a program on their ranks: layers, parts of micro-batches, parameters, and what is held of them."""

    def __init__(self, cost_model: CostModel, decision: Decision, program: Program) -> None:
        self.cost_model = cost_model
        self.prices = LayerPrices(cost_model)
        self.decision = decision
        self.program = program
        self.graph = cost_model.profile.graph
        of_stage = [set(decision.layers_of(stage)) for stage in range(len(decision.stages))]
        self.layers = [[layer for layer in self.graph.layers if layer.name in names] for names in of_stage]
        self.indices = [[self.prices.index[layer.name] for layer in layers] for layers in self.layers]
        sliced = bool(decision.token_slices)
        self.sizes = decision.sizes
        self.has_layouts = [sliced or has_layouts(decision, stage) for stage in range(len(decision.stages))]
        self.throughout = throughout_sites(self.graph)
        self.spans = [stage.recomputed if program.trains else () for stage in decision.stages]
        self.again = [frozenset(name for span in spans for name in span) for spans in self.spans]
        self.users: dict[str, set[int]] = {}  # by parameter, the stages that use it
        for stage, layers in enumerate(self.layers):
            for layer in layers:
                for name in layer.parameters:
                    self.users.setdefault(name, set()).add(stage)
        self._laid_out: dict[tuple[int, int], LaidOut] = {}
        self._slices: dict[tuple[int, AxisPart], Sliced] = {}
        self._on_chip: dict[int, int] = {}
        self._holdings: dict[tuple[int, int, Size], Holding] = {}

    def holding(self, rank: int, stage: int, microbatch: int) -> Holding:
        """The stage on ``rank``, for the account of its memory; stages of like micro-batches are one object."""
        key = (rank, stage, self.sizes[microbatch])
        if key not in self._holdings:
            self._holdings[key] = self._held(rank, stage, microbatch)
        return self._holdings[key]

    def on_chip_bytes(self, rank: int) -> int:
        """Parameters, gradients and optimiser state, if the device has a memory on chip that takes all of them."""
        if rank not in self._on_chip:
            stages = [stage for stage, group in enumerate(self.program.ranks) if rank in group]
            names = {name for stage in stages for layer in self.layers[stage] for name in layer.parameters}
            size = sum(self.graph.parameters[name].num_bytes for name in names)
            others = 0
            for stage in stages:
                own = self.own_bytes(stage)
                members = len(self.program.ranks[stage])
                others += own - math.ceil(own / members) if self.is_sharded(stage) else 0
            state = round((size - others) * self.cost_model.profile.optimizer.state_bytes_per_parameter_byte)
            wanted = 2 * size + state if self.program.trains else size
            fits = stages and not any(self.has_layouts[stage] for stage in stages)
            room = self.cost_model.profile.cluster.devices[rank].on_chip_bytes
            self._on_chip[rank] = wanted if fits and wanted <= room else 0
        return self._on_chip[rank]

    def kind(self, rank: int) -> str:
        """Of the device of ``rank``, as prices name it: another one where parameters do not fit on chip."""
        return self.cost_model.kind(rank) if self.on_chip_bytes(rank) else self.cost_model.main_kind(rank)

    def is_sharded(self, stage: int) -> bool:
        """Whether the stage's ranks divide the optimiser's state among them."""
        several = len(self.program.ranks[stage]) > 1
        return self.decision.stages[stage].sharded and several and not self.has_layouts[stage]

    def zero(self, stage: int) -> int:
        """ZeRO's level of the stage."""
        return self.decision.stages[stage].zero if self.is_sharded(stage) and self.program.trains else 0

    def own_bytes(self, stage: int) -> int:
        """Of the parameters that this stage alone uses."""
        alone = [name for name, stages in self.users.items() if stages == {stage}]
        return sum(self.graph.parameters[name].num_bytes for name in alone)

    def of_size(self, stage: int, samples: Size) -> LaidOut | Sliced:
        """The stage, whose layers have layouts of their own, for micro-batches of ``samples``; or a token slice."""
        if isinstance(samples, AxisPart):
            return self._of_slice(stage, samples)
        if (stage, samples) not in self._laid_out:
            placements = {layer.name: self.decision.layers[layer.name] for layer in self.layers[stage]}
            group = self.decision.stages[stage]
            self._laid_out[stage, samples] = LaidOut(
                self.prices,
                self.layers[stage],
                placements,
                self.program.ranks[stage],
                samples,
                group.recompute,
                self.again[stage],
                group.blocks,
                not self.program.trains,
            )
        return self._laid_out[stage, samples]

    def _of_slice(self, stage: int, size: AxisPart) -> Sliced:
        from planner.extras.token_slices.prices import SlicePrices  # goes with the extra
        from tests.planner.extras.token_slices.plain_slices import Sliced

        if (stage, size) not in self._slices:
            kind = self.cost_model.kind(self.program.ranks[stage][0])
            recompute = self.decision.stages[stage].recompute
            table = self.cost_model.beside(SlicePrices).table(kind, size)
            self._slices[stage, size] = Sliced(self.prices, self.layers[stage], table, kind, size.samples, recompute)
        return self._slices[stage, size]

    def samples_on(self, rank: int, stage: int, microbatch: int) -> float:
        """How many of a micro-batch's samples ``rank`` has of a stage."""
        throughout = self.throughout.issuperset(layer.name for layer in self.layers[stage])
        return samples_of(self.decision, stage, samples_in(self.sizes[microbatch]), throughout)[
            self.program.ranks[stage].index(rank)
        ]

    def _held(self, rank: int, stage: int, microbatch: int) -> Holding:
        of = self._held_by_part if self.has_layouts[stage] else self._held_by_samples
        return of(rank, stage, microbatch)

    def _held_by_part(self, rank: int, stage: int, microbatch: int) -> Holding:
        """Of a stage whose layers have layouts."""
        kind = self.kind(rank)
        layers = self._as_they_run(stage)
        indices = [self.prices.index[layer.name] for layer in layers]
        recompute = self.decision.stages[stage].recompute
        size = self.sizes[microbatch]
        rows = samples_in(size)
        laid_out = self.of_size(stage, size)
        member = self.program.ranks[stage].index(rank)
        blocks = self.decision.stages[stage].blocks
        if blocks:
            kept = [0.0] * len(layers)
            of_layers = None
        else:
            kept = laid_out.saved_bytes(member)
            of_layers = None if recompute else laid_out.levels(member)
        waits = laid_out.puts_off() if of_layers is not None and isinstance(laid_out, LaidOut) else []
        waits = [] if self.spans[stage] or not self.prices.gradients(kind, [rows]) else waits
        put_off = [one[3] if waits and waits[k] else None for k, one in enumerate(of_layers or ())]
        if of_layers is not None:  # whose weight gradients are made with those of inputs, or put off
            whole = ((one, one[1] if own is None else one[2]) for one, own in zip(of_layers, put_off, strict=True))
            of_layers = [[one[0], level, level, 0.0, 0.0, *one[5:]] for one, level in whole]
        made = laid_out.made_bytes(member) if of_layers is not None else []
        parts = [] if of_layers is None else laid_out.parts(member)
        reads = [] if of_layers is None else laid_out.reads(member)
        saved = [] if of_layers is None else laid_out.own_bytes(member)
        stays = _NOTHING_KEPT
        if self.spans[stage] and isinstance(laid_out, LaidOut):
            order = [self.layers[stage].index(layer) for layer in layers]
            kept = [kept[at] for at in order]
            if of_layers is not None:
                of_layers = [of_layers[at] for at in order]
                made = [made[at] for at in order]
                parts = [parts[at] for at in order]
                reads = [reads[at] for at in order]
                saved = [saved[at] for at in order]
            stays = self._kept(stage, layers, of_layers, [laid_out.part(layer, member) for layer in layers])
        is_shared = shares_memory(self.cost_model.profile.cluster, self.program.ranks[stage])
        sizes = set[Size]() if is_shared else set(self.sizes)
        return Holding(
            layers=layers,
            saved=[laid_out.always_bytes()] if recompute else kept if of_layers or stays.kept else [sum(kept)],
            levels=of_layers,
            own=saved,
            put_off=put_off if any(waits) else (),
            meets=laid_out.meets(member) if any(waits) and isinstance(laid_out, LaidOut) else (),
            defers=() if of_layers is None else [False] * len(layers),
            gradients=self.prices.gradients(kind, [samples for samples, _ in parts]),
            parts=parts,
            reads=reads,
            workspace=laid_out.unrecorded_bytes(member) if blocks else laid_out.workspace_bytes(member),
            left=sum(kept),
            again=sum(kept) - laid_out.always_bytes() if recompute else 0.0,
            prepared=self.cost_model.preparations.num_bytes(indices, rows, len(self.program.ranks[stage])),
            samples=rows,
            standing=sum(self.of_size(stage, each).standing_bytes(member) for each in sizes),
            made=made,
            parameter_bytes=round(laid_out.parameter_bytes(member)),
            overlaps_sums=len(self.program.ranks[stage]) > 1,
            summed={name: each for name, each in laid_out.summed(member).items() if len(self.users[name]) == 1},
            recompute=False,
            has_layouts=True,
            spans=self._places(stage, layers),
            kept=stays.kept,
            same=stays.same,
        )

    def _held_by_samples(self, rank: int, stage: int, microbatch: int) -> Holding:
        """Of a stage whose ranks run whole layers, each on samples of its own."""
        kind = self.kind(rank)
        layers = self._as_they_run(stage)
        indices = [self.prices.index[layer.name] for layer in layers]
        samples = self.samples_on(rank, stage, microbatch)
        own = self.own_bytes(stage)
        costs = self.prices.columns(kind, samples, False)
        levels = self.cost_model.levels.at(kind, samples)
        deferring = self.cost_model.tables.deferring(kind)
        of_layers = None if levels is None else [levels[:, at].tolist() for at in indices]
        stays = self._kept(stage, layers, of_layers, [float(samples)] * len(layers))
        return Holding(
            layers=layers,
            saved=[float(costs["saved_bytes"][at]) for at in indices],
            levels=of_layers,
            gradients=self.prices.gradients(kind, [samples]),
            inputs_left=[self.prices.inputs_left(kind, samples, at) for at in indices],
            gradients_left=[self.prices.gradients_left(kind, samples, at) for at in indices],
            defers=() if levels is None else [bool(deferring[at]) for at in indices],
            workspace=max(float(costs["workspace_bytes"][at]) for at in indices),
            left=round(self.cost_model.tables.deferred_bytes(kind, samples, runs_of(indices))),
            prepared=self.cost_model.preparations.num_bytes(indices, samples, len(self.program.ranks[stage])),
            samples=samples,
            parameter_bytes=self.graph.parameter_bytes(frozenset(layer.name for layer in layers)),
            elsewhere=own - math.ceil(own / len(self.program.ranks[stage])) if self.is_sharded(stage) else 0,
            tied=frozenset(name for name, users in self.users.items() if len(users) > 1),
            overlaps_sums=len(self.program.ranks[stage]) > 1 and not self.is_sharded(stage),
            zero=self.zero(stage),
            slices=len(self.program.ranks[stage]),
            on_chip=self.on_chip_bytes(rank) > 0,
            recompute=self.decision.stages[stage].recompute,
            spans=self._places(stage, layers),
            kept=stays.kept,
            same=stays.same,
        )

    def _as_they_run(self, stage: int) -> list[Layer]:
        """The layers of a stage, each span that is computed again as one."""
        if not self.spans[stage]:
            return self.layers[stage]
        names = self.decision.layers_of(stage)
        return [layer for unit in layers_in_order(self.graph, names, self.spans[stage]) for layer in unit]

    def _places(self, stage: int, layers: Sequence[Layer]) -> list[list[int]]:
        """Where the layers of each span are among ``layers``."""
        place = {layer.name: at for at, layer in enumerate(layers)}
        return [sorted(place[name] for name in span) for span in self.spans[stage]]

    def _kept(
        self, stage: int, layers: Sequence[Layer], levels: list[list[float]] | None, parts: Sequence[float]
    ) -> _Kept:
        """What stays of what spans read, by layer: a price."""
        if not self.spans[stage]:
            return _NOTHING_KEPT
        spans = tuple(tuple(self.prices.index[name] for name in span) for span in self.spans[stage])
        order = np.array([self.prices.index[layer.name] for layer in layers], dtype=np.int64)
        by_layer = self.cost_model.levels.kept(
            order, spans, None if levels is None else np.array(levels).T, np.array(parts)
        )
        return _Kept(by_layer.kept.tolist(), by_layer.same.tolist())
