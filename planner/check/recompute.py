"""A second, plain evaluation of a program, for checking the first: one loop over layers, one over actions.

Follows the same model as ``planner.costs`` (its module docstrings say what that is) but none of its code.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.check.communication import moving_s, site_exchange_s, sum_s
from planner.check.events import Step, Times, adding_to_gradients, sum_of_gradients_s, times_of
from planner.check.gradient_overlap import Made, waited_s
from planner.check.layer_costs import Modelled, remaining, restated
from planner.check.layouts import LaidOut
from planner.check.memory import Account, levels_at
from planner.check.memory import Stage as Holding
from planner.check.preparing import preparation_s, prepared_bytes
from planner.check.reading import at_samples
from planner.ir.cluster import ALL_REDUCE, STATISTICS
from planner.ir.graph import BYTES_PER_ELEMENT, SAMPLE, Layer
from planner.ir.plan import Decision
from planner.ir.profile import Measurement, Profile
from planner.ir.program import Program
from planner.ir.schedule import Action, Op
from planner.layers import kind, throughout_sites

_SECONDS = {
    Op.FORWARD: "forward_s",
    Op.BACKWARD: "backward_s",
    Op.BACKWARD_INPUT: "backward_input_s",
    Op.BACKWARD_WEIGHT: "backward_weight_s",
}


@dataclass(frozen=True, slots=True)
class Reckoning:
    """The step, the most that each rank holds, and where its time goes.

    Attributes:
        times: by rank.
        longest_sum_s: the longest that a rank is in a sum of gradients.
        most_messages_s: the most communication that a rank has beside it.
    """

    step_s: float
    peak_bytes: tuple[int, ...]
    times: tuple[Times, ...]
    longest_sum_s: float
    most_messages_s: float

    @property
    def bubble_fraction(self) -> float:
        """Of the time of the ranks that are used, what is bubble or idle."""
        used = [times for times in self.times if times.is_used]
        lost_s = sum(times.bubble_s + times.idle_s for times in used)
        return lost_s / (self.step_s * len(used)) if used and self.step_s > 0 else 0.0


def reckon(profile: Profile, decision: Decision, program: Program) -> Reckoning:
    """Evaluates a legal program.

    Raises:
        ValueError: it never ends.
        LookupError: the profile lacks a measurement.
    """
    plain = _Plain(profile, decision, program)
    peaks = tuple(plain.peak_bytes(rank) for rank in range(len(program.rows)))
    step = plain.step()
    step_s = step.seconds()
    spent = tuple(times_of(program, step.spans, step_s, plain.exchanged_s))
    sums = [sum_of_gradients_s(program.rows[rank], spans) for rank, spans in enumerate(step.spans)]
    messages_s = max((each.communication_s - last for each, (_, last) in zip(spent, sums, strict=True)), default=0.0)
    return Reckoning(step_s, peaks, spent, max((longest for longest, _ in sums), default=0.0), messages_s)


class _Plain:
    """The evaluation of one program."""

    def __init__(self, given: Profile, decision: Decision, program: Program) -> None:
        self.profile = profile = restated(given)
        self.given = given
        self.decision = decision
        self.program = program
        of_stage = [set(decision.layers_of(stage)) for stage in range(len(decision.stages))]
        self.layers = [[layer for layer in profile.graph.layers if layer.name in names] for names in of_stage]
        self.measured: dict[tuple[str, str], list[Measurement]] = {}
        for device_kind, measurements in profile.measurements.items():
            for measurement in measurements:
                self.measured.setdefault((device_kind, measurement.layer), []).append(measurement)
        self.laid_out: dict[tuple[int, int], LaidOut] = {}
        self.known: dict[tuple[str, str, float, str], float] = {}
        self.models: dict[str, Modelled] = {}
        self.values = profile.graph.values()
        self.throughout = throughout_sites(profile.graph)
        self.users = self._users()
        self.left: dict[tuple[str, int, float], int] = {}
        self.holdings: dict[tuple[int, int, int], Holding] = {}
        self.places: dict[int, dict[Action, int]] = {}
        self.exchanges: dict[tuple[int, Op, int], float] = {}
        self.computing: dict[tuple[int, int, Op, int, bool], float] = {}
        self.adding = {(rank, index) for rank, row in enumerate(program.rows) for index in adding_to_gradients(row)}

    def step(self) -> Step:
        """The step, not yet run."""
        return Step(self.profile, self.program, self._action_s, self._summed)

    def _summed(self, stage: int) -> tuple[float, float]:
        """Of the sum of a stage's gradients that is waited for: seconds, and bytes/s on each card of its hosts."""
        group, size = self.program.ranks[stage], self._stage_bytes(stage)
        if len(group) < 2 or size == 0 or self._has_layouts(stage):
            return 0.0, 0.0
        overhead_s = self.profile.action_overhead_s.get(self.profile.cluster.devices[group[0]].kind, 0.0)
        whole_s = self._sum_s(group, size, (ALL_REDUCE,))
        waited_s = self._action_s(group[0], Action(stage, Op.REDUCE_GRAD), 0) - overhead_s
        return waited_s, 2 * (len(group) - 1) / len(group) * size / whole_s if whole_s > 0 else 0.0

    def peak_bytes(self, rank: int) -> int:
        """The most that ``rank`` holds."""
        parameters = {
            name
            for stage, group in enumerate(self.program.ranks)
            if rank in group and not self._has_layouts(stage)
            for layer in self.layers[stage]
            for name in layer.parameters
        }
        weights = sum(self.profile.graph.parameters[name].num_bytes for name in parameters)
        weights += sum(
            self._laid_out_bytes(stage, rank) for stage, group in enumerate(self.program.ranks) if rank in group
        )
        row = self.program.rows[rank]
        trains = any(action.op in (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) for action in row)
        gradients = weights if trains else 0
        elsewhere = sum(self._held_elsewhere(stage) for stage, group in enumerate(self.program.ranks) if rank in group)
        held = gradients - elsewhere if trains else 0
        state = round(held * self.profile.optimizer.state_bytes_per_parameter_byte)
        weights += sum(self._older_bytes(stage, row) for stage, group in enumerate(self.program.ranks) if rank in group)
        mine = [stage for stage, group in enumerate(self.program.ranks) if rank in group]
        buffers = sum(layer.buffer_bytes for stage in mine for layer in self.layers[stage])
        account = Account(self.profile, self.decision, self.program, rank, self._holding, self._samples, self.places)
        return weights + state + buffers + account.batch_bytes() + account.most()

    def _older_bytes(self, stage: int, row: Sequence[Action]) -> int:
        """Of the parameters that micro-batches under way still need, beside the newest."""
        newest = most = 0
        under_way: dict[int | None, int] = {}
        for action in row:
            if action.stage != stage:
                continue
            if action.op is Op.UPDATE:
                newest += 1
            elif action.op is Op.FORWARD:
                under_way[action.microbatch] = action.version
            elif action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
                under_way.pop(action.microbatch, None)
            most = max(most, len({newest, *under_way.values()}) - 1)
        names = {name for layer in self.layers[stage] for name in layer.parameters}
        return most * sum(self.profile.graph.parameters[name].num_bytes for name in names)

    def _action_s(self, rank: int, action: Action, index: int) -> float:
        device_kind = self.profile.cluster.devices[rank].kind
        overhead = self.profile.action_overhead_s.get(device_kind, 0.0)
        group = self.program.ranks[action.stage]
        if action.op is Op.PREPARE:
            samples = self.decision.micro_batches[action.microbatch or 0]
            layers = self.layers[action.stage]
            return overhead + preparation_s(self.profile, device_kind, layers, samples, len(group))
        if self._has_layouts(action.stage) and (action.op in _SECONDS or action.op in (Op.REDUCE_GRAD, Op.UPDATE)):
            return overhead + self._laid_out_s(rank, action, index)
        if action.op is Op.REDUCE_GRAD:
            size = self._stage_bytes(action.stage)
            if self._sharded(action.stage) or len(group) < 2:
                return overhead + self._sum_s(group, size, (ALL_REDUCE,)) / 2
            return overhead + self._waited_s(action.stage, group)
        costs = self.profile.parameters.get(device_kind, {})
        if action.op is Op.UPDATE:
            update_s = sum(costs[x.name].update_s for x in self.layers[action.stage] if x.name in costs)
            overhead += self._ties_s(rank, action.stage)
            if self._sharded(action.stage):  # a part of it, then the parts are gathered: half a sum of gradients
                gathered_s = self._sum_s(group, self._stage_bytes(action.stage), (ALL_REDUCE,)) / 2
                return overhead + update_s / len(group) + gathered_s
            return overhead + update_s
        if action.op not in _SECONDS:
            return overhead
        accumulates = (rank, index) in self.adding
        exchanged_s = self.exchanged_s(action)
        members = group if exchanged_s > 0 else (rank,)
        return overhead + exchanged_s + max(self._computed_s(m, action, accumulates) for m in members)

    def exchanged_s(self, action: Action) -> float:
        """The part of a computation in which the ranks of its stage exchange something."""
        size = self.decision.micro_batches[action.microbatch or 0]
        if self._has_layouts(action.stage):
            return self._laid_out(action.stage, size).exchanged_s(_SECONDS[action.op])
        key = (action.stage, action.op, size)
        if key not in self.exchanges:
            layers, group = self.layers[action.stage], self.program.ranks[action.stage]
            found = sum(self._exchange_s(layer, group, action.op, size) for layer in layers)
            again = self.decision.stages[action.stage].recompute and action.op in (Op.BACKWARD, Op.BACKWARD_INPUT)
            found += sum(self._exchange_s(layer, group, Op.FORWARD, size) for layer in layers) if again else 0.0
            self.exchanges[key] = found
        return self.exchanges[key]

    def _computed_s(self, rank: int, action: Action, accumulates: bool) -> float:
        key = (rank, action.stage, action.op, self.decision.micro_batches[action.microbatch or 0], accumulates)
        if key not in self.computing:
            self.computing[key] = self._compute_s(rank, action, accumulates)
        return self.computing[key]

    def _sharded(self, stage: int) -> bool:
        """Whether the stage's ranks divide the optimiser's state among them."""
        divided = self.decision.stages[stage].sharded and len(self.program.ranks[stage]) > 1
        return divided and not self._has_layouts(stage)

    def _waited_s(self, stage: int, group: tuple[int, ...]) -> float:
        """For the sums of the stage's gradients, when its slowest rank has ended its last backward."""
        last, alone = len(self.decision.micro_batches) - 1, {n for n, stages in self.users.items() if stages == {stage}}
        ways_back = []
        for rank in group:
            action = Action(stage, Op.BACKWARD, last)
            ways_back.append([self._layer_s(rank, layer, action) for layer in self.layers[stage]])
        slowest, size = max(ways_back, key=sum), self.decision.micro_batches[last]
        left_s, made = 0.0, []
        for layer, layer_s in zip(self.layers[stage], slowest, strict=True):
            mine = [name for name in layer.parameters if name in alone]
            made += [Made(self.profile.graph.parameters[name].num_bytes, left_s) for name in mine]
            alone.difference_update(mine)
            left_s += layer_s + self._exchange_s(layer, group, Op.BACKWARD, size)
        return waited_s(
            made,
            lambda num_bytes: self._sum_s(group, num_bytes, (ALL_REDUCE,)),
            lambda num_bytes: moving_s(self.profile.cluster, group, num_bytes),
        )

    def _stage_bytes(self, stage: int) -> int:
        """Of the parameters that this stage alone uses."""
        alone = [name for name, stages in self.users.items() if stages == {stage}]
        return sum(self.profile.graph.parameters[name].num_bytes for name in alone)

    def _users(self) -> dict[str, set[int]]:
        """By parameter, the stages that use it."""
        found: dict[str, set[int]] = {}
        for stage, layers in enumerate(self.layers):
            for layer in layers:
                for name in layer.parameters:
                    found.setdefault(name, set()).add(stage)
        return found

    def _ties_s(self, rank: int, stage: int) -> float:
        """Seconds of the sums of gradients that several stages make, done with the lowest of them on each rank."""
        sizes: dict[frozenset[int], int] = {}
        for name, stages in self.users.items():
            mine = [each for each in sorted(stages) if rank in self.program.ranks[each]]
            if len(stages) > 1 and mine and mine[0] == stage:
                key = frozenset(stages)
                sizes[key] = sizes.get(key, 0) + self.profile.graph.parameters[name].num_bytes
        groups = {key: tuple(sorted({r for each in key for r in self.program.ranks[each]})) for key in sizes}
        return sum(self._sum_s(groups[key], size, (ALL_REDUCE,)) for key, size in sizes.items())

    def _held_elsewhere(self, stage: int) -> int:
        """Bytes of the stage's parameters whose state another rank of it holds."""
        size, ranks = self._stage_bytes(stage), len(self.program.ranks[stage])
        return size - math.ceil(size / ranks) if self._sharded(stage) else 0

    def _has_layouts(self, stage: int) -> bool:
        """Whether the stage's layers are not all cut alike along samples."""
        cuts = [tuple(self.decision.layers[layer.name].cuts.items()) for layer in self.layers[stage]]
        return len(set(cuts)) > 1 or any(dim != SAMPLE for each in cuts for dim, _ in each)

    def _laid_out(self, stage: int, samples: int) -> LaidOut:
        found = self.laid_out.get((stage, samples))
        if found is None:
            found = self.laid_out[stage, samples] = LaidOut(
                self.profile,
                tuple(self.layers[stage]),
                {layer.name: self.decision.layers[layer.name] for layer in self.layers[stage]},
                self.program.ranks[stage],
                samples,
                self.decision.stages[stage].recompute,
                self._cost,
                self._sum_s,
                self._modelled,
                functools.partial(self._left, stage),
            )
        return found

    def _laid_out_s(self, rank: int, action: Action, index: int) -> float:
        if action.microbatch is None or action.op not in _SECONDS:
            once = self._laid_out(action.stage, max(self.decision.micro_batches))
            return once.reduction_s() if action.op is Op.REDUCE_GRAD else once.update_s()
        of_size = self._laid_out(action.stage, self.decision.micro_batches[action.microbatch])
        return of_size.action_s(_SECONDS[action.op], (rank, index) in self.adding)

    def _laid_out_bytes(self, stage: int, rank: int) -> int:
        """Of parameters of a stage whose layers have layouts of their own."""
        if not self._has_layouts(stage):
            return 0
        once = self._laid_out(stage, max(self.decision.micro_batches))
        return round(once.parameter_bytes(self.program.ranks[stage].index(rank)))

    def _compute_s(self, rank: int, action: Action, accumulates: bool) -> float:
        device_kind = self.profile.cluster.devices[rank].kind
        samples = self._samples(rank, action.stage, action.microbatch or 0)
        costs = self.profile.parameters.get(device_kind, {})
        total = 0.0
        left = functools.partial(self._left, action.stage, device_kind)
        for layer in self.layers[action.stage]:
            what = _SECONDS[action.op]
            total += self._cost(device_kind, layer, samples, what) * left(what)
            if self.decision.stages[action.stage].recompute and action.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
                total += self._cost(device_kind, layer, samples, "forward_s") * left("forward_s")
            if accumulates and layer.name in costs:
                total += costs[layer.name].accumulate_s * left("accumulate_s")
        return total

    def _left(self, stage: int, device_kind: str, what: str) -> float:
        """What corrections add to a quantity on the ranks of a stage."""
        return remaining(self.given, what, device_kind, len(self.program.ranks[stage]))

    def _layer_s(self, rank: int, layer: Layer, action: Action) -> float:
        """The layer's part of an action."""
        samples, what = self._samples(rank, action.stage, action.microbatch or 0), _SECONDS[action.op]
        device_kind = self.profile.cluster.devices[rank].kind
        return self._cost(device_kind, layer, samples, what) * self._left(action.stage, device_kind, what)

    def _exchange_s(self, layer: Layer, group: tuple[int, ...], op: Op, samples: int) -> float:
        if len(group) < 2 or op is Op.BACKWARD_WEIGHT:
            return 0.0
        if kind(layer.kind).REDUCTION != "statistics":
            x = self.values[layer.inputs[0]] if layer.inputs else layer.outputs[0]
            sum_s = functools.partial(self._sum_s, group, operations=(STATISTICS, ALL_REDUCE))
            return site_exchange_s(self.profile, layer, x, group, op, samples, sum_s)
        spec = layer.outputs[0]
        channels = spec.shape[spec.dims.index("channel") if "channel" in spec.dims else 1]
        if op is Op.FORWARD:
            return self._sum_s(group, len(group) * (1 + 2 * channels) * 8, (STATISTICS, ALL_REDUCE))
        return self._sum_s(group, 2 * channels * BYTES_PER_ELEMENT[spec.dtype], (STATISTICS, ALL_REDUCE))

    def _sum_s(self, group: tuple[int, ...], size: int, operations: tuple[str, ...]) -> float:
        """By the first of ``operations`` that was measured."""
        return sum_s(self.profile.cluster, operations[0], group, size)

    def _holding(self, rank: int, stage: int, microbatch: int) -> Holding:
        """The stage on ``rank``, for the account of its memory."""
        key = (rank, stage, self.decision.micro_batches[microbatch])
        if key not in self.holdings:
            self.holdings[key] = self._held(rank, stage, microbatch)
        return self.holdings[key]

    def _held(self, rank: int, stage: int, microbatch: int) -> Holding:
        layers, prepared = self.layers[stage], self._prepared_bytes(rank, stage, microbatch)
        recompute, device_kind = self.decision.stages[stage].recompute, self.profile.cluster.devices[rank].kind
        if self._has_layouts(stage):
            of_size = self._laid_out(stage, self.decision.micro_batches[microbatch])
            member = self.program.ranks[stage].index(rank)
            whole, workspace = of_size.saved_bytes(member), of_size.workspace_bytes(member)
            again, parameters = (whole if recompute else 0.0), round(of_size.parameter_bytes(member))
            return Holding(layers, (whole - again,), None, workspace, whole, again, prepared, parameters, False)
        samples = self._samples(rank, stage, microbatch)
        saved = [self._cost(device_kind, layer, samples, "saved_bytes") for layer in layers]
        needs = max(self._cost(device_kind, layer, samples, "workspace_bytes") for layer in layers)
        every = [self.measured.get((device_kind, layer.name), []) for layer in self.profile.graph.layers]
        levels, mine = levels_at(every, samples), {layer.name for layer in layers}
        if levels is not None:
            names = (layer.name for layer in self.profile.graph.layers)
            levels = [each for name, each in zip(names, levels, strict=True) if name in mine]
        names_of = {name for layer in layers for name in layer.parameters}
        parameters = sum(self.profile.graph.parameters[name].num_bytes for name in names_of)
        left = self._left_bytes(rank, stage, microbatch)
        defers = [self._defers(device_kind, layer) for layer in layers] if levels is not None else ()
        return Holding(layers, saved, levels, needs, left, 0.0, prepared, parameters, recompute, defers)

    def _defers(self, device_kind: str, layer: Layer) -> bool:
        """Whether the layer's weight gradients may come later than those of its inputs."""
        return any(m.backward_weight_s > 0 for m in self.measured.get((device_kind, layer.name), ()))

    def _prepared_bytes(self, rank: int, stage: int, microbatch: int) -> int:
        """Of what the host prepares of a micro-batch: the rank's own part, or all where layers have layouts."""
        whole = self.decision.micro_batches[microbatch]
        samples = whole if self._has_layouts(stage) else self._samples(rank, stage, microbatch)
        return prepared_bytes(self.profile, self.layers[stage], samples)

    def _left_bytes(self, rank: int, stage: int, microbatch: int) -> int:
        """Inputs, and gradients of outputs, of the layers whose weight gradients may come later than their inputs'."""
        if self._has_layouts(stage):
            return 0
        device_kind = self.profile.cluster.devices[rank].kind
        samples, captured = self._samples(rank, stage, microbatch), self.profile.graph.samples
        key = (device_kind, stage, samples)
        if key in self.left:
            return self.left[key]
        total = 0.0
        for layer in self.layers[stage]:
            if self._defers(device_kind, layer):
                floats = [s for s in (*(self.values[name] for name in layer.inputs), *layer.outputs) if s.is_float]
                total += sum(spec.num_bytes * (samples / captured if spec.has_samples else 1.0) for spec in floats)
        self.left[key] = round(total)
        return self.left[key]

    def _samples(self, rank: int, stage: int, microbatch: int) -> float:
        """Whole samples; but a part of the sites where there are no others, and shares do not sum to samples."""
        rows, member = self.decision.micro_batches[microbatch], self.program.ranks[stage].index(rank)
        layout = self.decision.layout_of(stage)
        points = layout.cuts.get(SAMPLE, (0,))
        throughout = all(layer.name in self.throughout for layer in self.layers[stage])
        if throughout and len(points) > 2 and points[-1] != max(self.decision.micro_batches):
            return (points[member + 1] - points[member]) * rows / points[-1]
        return layout.samples(rows)[member]

    def _cost(self, device_kind: str, layer: Layer, samples: float, what: str) -> float:
        key = (device_kind, layer.name, samples, what)
        if key not in self.known:
            try:
                found = at_samples(self.measured.get((device_kind, layer.name), ()), samples, what)
            except LookupError:
                found = self._modelled(device_kind).whole(layer.name, samples, what)
            self.known[key] = found
        return self.known[key]

    def _modelled(self, device_kind: str) -> Modelled:
        if device_kind not in self.models:
            self.models[device_kind] = Modelled(self.profile, device_kind)
        return self.models[device_kind]
