"""A second, plain evaluation of a program, for checking the first: one loop over layers, one over actions.

Follows the same model as ``planner.costs`` (its module docstrings say what that is) but none of its code.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.check.laid_out import LaidOut
from planner.check.preparing import preparation_s, prepared_bytes, prepares_beside
from planner.check.reading import at_samples, from_points
from planner.check.site_exchanges import site_exchange_s
from planner.ir.cluster import ALL_REDUCE, STATISTICS
from planner.ir.graph import BYTES_PER_ELEMENT, SAMPLE, Layer
from planner.ir.plan import Decision
from planner.ir.profile import Measurement, Profile
from planner.ir.program import Message, Program, receive_window
from planner.ir.schedule import RECEIVE, SEND, Action, Op
from planner.layers import kind, throughout_sites

_SECONDS = {
    Op.FORWARD: "forward_s",
    Op.BACKWARD: "backward_s",
    Op.BACKWARD_INPUT: "backward_input_s",
    Op.BACKWARD_WEIGHT: "backward_weight_s",
}


@dataclass(frozen=True, slots=True)
class Reckoning:
    """The step, and the most that each rank holds."""

    step_s: float
    peak_bytes: tuple[int, ...]


def reckon(profile: Profile, decision: Decision, program: Program) -> Reckoning:
    """Evaluates a legal program.

    Raises:
        ValueError: it never ends.
        LookupError: the profile lacks a measurement.
    """
    plain = _Plain(profile, decision, program)
    peaks = tuple(plain.peak_bytes(rank) for rank in range(len(program.rows)))
    return Reckoning(plain.step_s(), peaks)


class _Plain:
    """The evaluation of one program."""

    def __init__(self, profile: Profile, decision: Decision, program: Program) -> None:
        self.profile = profile
        self.decision = decision
        self.program = program
        layers = profile.graph.by_name()
        self.layers = [[layers[name] for name in decision.layers_of(s)] for s in range(len(decision.stages))]
        self.measured: dict[tuple[str, str], list[Measurement]] = {}
        for device_kind, measurements in profile.measurements.items():
            for measurement in measurements:
                self.measured.setdefault((device_kind, measurement.layer), []).append(measurement)
        self.laid_out: dict[tuple[int, int], LaidOut] = {}
        self.known: dict[tuple[str, str, float, str], float] = {}
        self.values = profile.graph.values()
        self.throughout = throughout_sites(profile.graph)
        self.users = self._users()
        self.left: dict[tuple[str, int, float], int] = {}
        self.prepared: dict[tuple[int, int, int | None], float] = {}

    def step_s(self) -> float:
        """Always runs, of all actions that can run, the one that can start first."""
        rows, ranks = self.program.rows, range(len(self.program.rows))
        clock, position = [0.0 for _ in ranks], [0 for _ in ranks]
        arrived: dict[tuple[object, ...], float] = {}
        wire_free: dict[object, float] = {}
        self.prepared.clear()
        host_free = [0.0 for _ in ranks]
        while any(position[rank] < len(rows[rank]) for rank in ranks):
            starts = [self._start(rank, clock, position, arrived) for rank in ranks]
            possible = [(start, rank) for rank, start in enumerate(starts) if start is not None]
            if not possible:
                raise ValueError("the program never ends")
            start, rank = min(possible)
            action = rows[rank][position[rank]]
            if action.op is Op.REDUCE_GRAD:
                for member in self.program.ranks[action.stage]:
                    clock[member] = start + self._action_s(member, action, position[member])
                    position[member] += 1
                continue
            if action.op is Op.PREPARE:
                host_free[rank] = max(start, host_free[rank]) + self._action_s(rank, action, position[rank])
                self.prepared[rank, action.stage, action.microbatch] = host_free[rank]
                clock[rank] = start if prepares_beside(self.profile, rank) else host_free[rank]
                position[rank] += 1
                continue
            clock[rank] = start + self._action_s(rank, action, position[rank])
            if action.blocking and action.op in RECEIVE:  # it takes as long again to take what was sent
                moves = [self._transfer(action, message)[1:] for message in self.program.messages_of(rank, action)]
                clock[rank] += sum(self._travel_s(*move) for move in moves)
            position[rank] += 1
            for message in self.program.messages_of(rank, action) if action.op in SEND else ():
                key, src, dst, size = self._transfer(action, message)
                wire = (src, dst) if self.profile.cluster.link(src, dst).duplex else frozenset((src, dst))
                begin = max(clock[rank], wire_free.get(wire, 0.0))
                arrived[key] = wire_free[wire] = begin + self._travel_s(src, dst, size)
                if action.blocking:
                    clock[rank] = arrived[key]
        return max(clock)

    def _travel_s(self, src: int, dst: int, num_bytes: int) -> float:
        link = self.profile.cluster.link(src, dst)
        seconds = from_points(link.points, num_bytes) if link.points else None
        return link.latency_s + num_bytes / link.bandwidth_bytes_per_s if seconds is None else seconds

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
        incoming = [
            self._transfer(action, message)[3]
            for action in self.program.rows[rank]
            if action.op in RECEIVE
            for message in self.program.messages_of(rank, action)
        ]
        resident = weights + gradients + state + buffers + sum(sorted(incoming)[-receive_window(incoming) :])
        fullest = self.decision.micro_batches.index(max(self.decision.micro_batches))
        resident += sum(self._prepared_bytes(rank, stage, fullest) for stage in mine)
        held = most = 0
        for action in self.program.rows[rank]:
            if action.op not in _SECONDS or action.microbatch is None:
                continue
            saved, handed, workspace = self._activation(rank, action.stage, action.microbatch)
            again = saved if self.decision.stages[action.stage].recompute else 0
            kept, left = saved + handed - again, max(0, self._left_bytes(rank, action.stage, action.microbatch) - saved)
            held += {Op.FORWARD: kept, Op.BACKWARD: again, Op.BACKWARD_INPUT: again + left}.get(action.op, 0)
            most = max(most, held + workspace)
            ends = action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT) or not trains
            held -= kept + again + (left if action.op is Op.BACKWARD_WEIGHT else 0) if ends else 0
        return resident + most

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

    def _start(
        self, rank: int, clock: list[float], position: list[int], arrived: dict[tuple[object, ...], float]
    ) -> float | None:
        """When the rank's next action can start (a wait: end); None if that is not known yet."""
        rows = self.program.rows
        if position[rank] >= len(rows[rank]):
            return None
        action = rows[rank][position[rank]]
        if action.op is Op.REDUCE_GRAD:
            group = self.program.ranks[action.stage]
            there = [position[m] < len(rows[m]) and rows[m][position[m]] == action for m in group]
            return max(clock[m] for m in group) if all(there) else None
        if action.op is Op.FORWARD:
            return max(clock[rank], self.prepared.get((rank, action.stage, action.microbatch), 0.0))
        if action.op not in RECEIVE:
            return clock[rank]
        keys = [self._transfer(action, message)[0] for message in self.program.messages_of(rank, action)]
        if any(key not in arrived for key in keys):
            return None
        return max(clock[rank], *(arrived[key] for key in keys)) if keys else clock[rank]

    def _transfer(self, action: Action, message: Message) -> tuple[tuple[object, ...], int, int, int]:
        """(key, source rank, destination rank, bytes) of what ``action`` sends or receives."""
        forward = action.op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
        src, dst = (message.src, message.dst) if forward else (message.dst, message.src)
        size = message.forward_bytes if forward else message.backward_bytes
        ends = frozenset((action.stage, action.peer))
        return (ends, forward, action.microbatch, src, dst), src, dst, size

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
            summed_s = self._sum_s(group, size, (ALL_REDUCE,))
            return overhead + (summed_s / 2 if self._sharded(action.stage) else summed_s)
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
        accumulates = self._accumulates(rank, action, index)
        stage_layers, recompute = self.layers[action.stage], self.decision.stages[action.stage].recompute
        size = self.decision.micro_batches[action.microbatch or 0]
        exchanges = [self._exchange_s(layer, group, action.op, size) for layer in stage_layers]
        if recompute and action.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
            exchanges += [self._exchange_s(layer, group, Op.FORWARD, size) for layer in stage_layers]
        members = group if sum(exchanges) > 0 else (rank,)
        return overhead + sum(exchanges) + max(self._compute_s(m, action, accumulates) for m in members)

    def _accumulates(self, rank: int, action: Action, index: int) -> bool:
        """Whether gradients of an earlier micro-batch are there to add to."""
        adds = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
        before = [a.op for a in self.program.rows[rank][:index] if a.stage == action.stage]
        since = before[len(before) - before[::-1].index(Op.UPDATE) :] if Op.UPDATE in before else before
        return action.op in adds and any(op in adds for op in since)

    def _sharded(self, stage: int) -> bool:
        """Whether the stage's ranks divide the optimiser's state among them."""
        divided = self.decision.stages[stage].sharded and len(self.program.ranks[stage]) > 1
        return divided and not self._has_layouts(stage)

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
            )
        return found

    def _laid_out_s(self, rank: int, action: Action, index: int) -> float:
        if action.microbatch is None or action.op not in _SECONDS:
            once = self._laid_out(action.stage, max(self.decision.micro_batches))
            return once.reduction_s() if action.op is Op.REDUCE_GRAD else once.update_s()
        of_size = self._laid_out(action.stage, self.decision.micro_batches[action.microbatch])
        return of_size.action_s(_SECONDS[action.op], self._accumulates(rank, action, index))

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
        for layer in self.layers[action.stage]:
            total += self._cost(device_kind, layer, samples, _SECONDS[action.op])
            if self.decision.stages[action.stage].recompute and action.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
                total += self._cost(device_kind, layer, samples, "forward_s")
            if accumulates and layer.name in costs:
                total += costs[layer.name].accumulate_s
        return total

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
        """By the first of ``operations`` that was measured, else a ring over the link."""
        if size == 0:
            return 0.0
        name = self.profile.cluster.group_link_class(group)
        tables = {(t.operation, t.num_ranks, t.link): t.points for t in self.profile.cluster.collectives}
        for operation in operations:
            if points := tables.get((operation, len(group), name)):
                return from_points(points, size)
        link, part = self.profile.cluster.links[name], size / len(group)
        seconds = from_points(link.points, part) if link.points else link.latency_s + part / link.bandwidth_bytes_per_s
        return 2 * (len(group) - 1) * seconds

    def _activation(self, rank: int, stage: int, microbatch: int) -> tuple[int, int, int]:
        """(bytes that layers save, bytes received, prepared and sent, workspace)."""
        device_kind = self.profile.cluster.devices[rank].kind
        if self._has_layouts(stage):
            of_size = self._laid_out(stage, self.decision.micro_batches[microbatch])
            member = self.program.ranks[stage].index(rank)
            saved, workspace = of_size.saved_bytes(member), of_size.workspace_bytes(member)
        else:
            samples = self._samples(rank, stage, microbatch)
            saved = sum(self._cost(device_kind, layer, samples, "saved_bytes") for layer in self.layers[stage])
            workspace = max(self._cost(device_kind, layer, samples, "workspace_bytes") for layer in self.layers[stage])
        handed = sum(
            message.forward_bytes
            for (src, dst, m), messages in self.program.messages.items()
            if m == microbatch
            for message in messages
            if message.src != message.dst
            and (message.src if src == stage else message.dst) == rank
            and stage in (src, dst)
        )
        return round(saved), handed + self._prepared_bytes(rank, stage, microbatch), round(workspace)

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
            if any(m.backward_weight_s > 0 for m in self.measured.get((device_kind, layer.name), ())):
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
            self.known[key] = at_samples(self.measured[device_kind, layer.name], samples, what)
        return self.known[key]
