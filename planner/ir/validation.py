"""Whether a file of the right types makes sense: one list of faults, each with its path inside the file.

Types are the codec's.  Here are the rules that types cannot say: names that refer to something, layers in topological
order, quantities that are none (a bandwidth of 0, a negative cost, 1e30 s) and shapes that contradict each other.
Quantities are judged by their names (:mod:`planner.ir.quantities`).  What layer kinds ask of attributes and shapes is
theirs to say (:mod:`planner.layers.fitting`), and joins by :func:`also`.

    graph.layers[3].inputs[0]: reads 'conv9', which layers[7] makes: layers are in topological order
    cluster.links.across-hosts.bandwidth_bytes_per_s: 0 is not above 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

from planner.ir.cluster import HOST, Cluster, Link
from planner.ir.constraints import format_rule, parse_rule
from planner.ir.errors import UsageError
from planner.ir.graph import BYTES_PER_ELEMENT, SAMPLE, Graph, Layer, TensorSpec, value_name
from planner.ir.plan import Decision, Placement, Plan
from planner.ir.problem import CHUNKS, OBJECTIVES, RECOMPUTE, SHARD, STATISTICS, ZERO
from planner.ir.profile import LEVEL_PAIRS, Measurement, PreparationCost, Profile, Slowdown
from planner.ir.quantities import BYTES_LIMITS, SECONDS_LIMITS, Fault, out_of_limits
from planner.ir.schedule import Action
from planner.ir.timeline import Timeline, TimelineFile

MOST_DEVICES = 4096
"""More devices, or ranks, than a plan is searched or run for."""

MOST_MICRO_BATCHES = 65_536
MOST_SAMPLES = 2**31
MOST_EXTENT = 2**40
MOST_RATIO = 1e12
"""Costs of one kind of device further apart than this are no measurements; solvers lose their digits on them."""

MOST_SLOWDOWN = 1000.0
"""More that devices of a host take from one another is no measurement."""

_EXTRA: dict[type, list[Callable[[Any], Iterable[Fault]]]] = {}


def also(cls: type, rule: Callable[[Any], Iterable[Fault]]) -> None:
    """From now on ``rule`` is asked of every ``cls`` in which nothing else is wrong."""
    _EXTRA.setdefault(cls, []).append(rule)


def faults(value: object) -> tuple[str, ...]:
    """What is wrong with a profile, plan, timeline or cluster, in the order of the file; nothing if it makes sense."""
    problems = [*out_of_limits(value, "", "")]
    rules: Mapping[type, Callable[[Any], Iterator[Fault]]] = {
        Profile: _profile,
        Plan: _plan,
        Cluster: _cluster,
        TimelineFile: lambda file: (fault for name in ("predicted", "measured") for fault in _timeline(file, name)),
    }
    rule = rules.get(type(value))
    if rule is not None:
        problems += rule(value)
    for extra in () if problems else _EXTRA.get(type(value), ()):
        problems += extra(value)
    return tuple(f"{path}: {text}" for path, text in problems)


def _at_least(path: str, value: int, least: int, most: int = MOST_EXTENT) -> Iterator[Fault]:
    if value < least:
        yield path, f"{value} is less than {least}"
    elif value > most:
        yield path, f"{value} is more than {most}"


def _known(path: str, what: str, name: str, allowed: Iterable[str]) -> Iterator[Fault]:
    names = tuple(allowed)
    if name not in names:
        yield path, f"no {what} {name!r}{_near(name, names)}"


def _near(name: str, names: Sequence[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name[:100], names[:2000], 1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {len(names)}" if len(names) > 1 else ""


def _twice(path: str, what: str, names: Iterable[object]) -> Iterator[Fault]:
    """Names that come a second time, with both places."""
    first: dict[object, int] = {}
    for index, name in enumerate(names):
        if first.setdefault(name, index) != index:
            yield f"{path}[{index}]", f"{what} {name!r} is there already, at [{first[name]}]"


# Profiles.


def _profile(profile: Profile) -> Iterator[Fault]:
    yield from _graph(profile.graph)
    yield from _cluster(profile.cluster)
    yield from _source("model", profile.model)
    names = profile.graph.by_name()
    for section in ("measurements", "parts"):
        for kind, measurements in getattr(profile, section).items():
            yield from _measured(f"{section}.{kind}", measurements, names)
    for kind, costs in profile.parameters.items():
        for layer in costs:
            yield from _known(f"parameters.{kind}.{layer}", "layer", layer, names)
    for kind, made in profile.preparations.items():
        yield from _prepared(f"preparations.{kind}", made, profile.graph)
    for kind, slowed in profile.slowdowns.items():
        yield from _slowed(f"slowdowns.{kind}", slowed, names)
    for index, halo in enumerate(profile.site_halos):
        path = f"site_halos[{index}]"
        yield from _known(f"{path}.layer", "layer", halo.layer, names)
        yield from _at_least(f"{path}.parts", halo.parts, 1, MOST_DEVICES)
        yield from _at_least(f"{path}.samples", halo.samples, 1, MOST_SAMPLES)


def _source(path: str, model: Any) -> Iterator[Fault]:
    yield from _known(f"{path}.dtype", "dtype", model.dtype, BYTES_PER_ELEMENT)
    for index, extent in enumerate(model.input_shape):
        yield from _at_least(f"{path}.input_shape[{index}]", extent, 1)


def _graph(graph: Graph) -> Iterator[Fault]:
    yield from _at_least("graph.samples", graph.samples, 1, MOST_SAMPLES)
    if not graph.layers:
        yield "graph.layers", "there is no layer"
    for section in ("inputs", "parameters"):
        for name, spec in getattr(graph, section).items():
            yield from _spec(f"graph.{section}.{name}", spec, graph.samples if section == "inputs" else 0)
    yield from _twice("graph.layers", "layer", (layer.name for layer in graph.layers))
    made_at = {
        value_name(layer.name, output): index
        for index, layer in enumerate(graph.layers)
        for output in range(len(layer.outputs))
    }
    for index, layer in enumerate(graph.layers):
        yield from _layer(f"graph.layers[{index}]", index, layer, graph, made_at)
    yield from _known("graph.loss", "value", graph.loss, made_at)


def _layer(path: str, index: int, layer: Layer, graph: Graph, made_at: Mapping[str, int]) -> Iterator[Fault]:
    if not layer.name or ":" in layer.name:
        yield f"{path}.name", f"{layer.name!r}: a name is not empty and has no colon, which numbers outputs"
    if layer.name in graph.inputs:
        yield f"{path}.name", f"{layer.name!r} is called like one of graph.inputs"
    if not layer.outputs:
        yield f"{path}.outputs", "a layer makes at least one value"
    for position, spec in enumerate(layer.outputs):
        yield from _spec(f"{path}.outputs[{position}]", spec, graph.samples)
    for position, value in enumerate(layer.inputs):
        where = f"{path}.inputs[{position}]"
        if value not in made_at and value not in graph.inputs:
            yield where, f"no value {value!r}{_near(value, (*graph.inputs, *made_at))}"
        elif made_at.get(value, -1) >= index:
            what = "itself" if made_at[value] == index else f"layers[{made_at[value]}]"
            yield where, f"reads {value!r}, which {what} makes: layers are in topological order, without cycles"
    for position, name in enumerate(layer.parameters):
        yield from _known(f"{path}.parameters[{position}]", "parameter", name, graph.parameters)


def _spec(path: str, spec: TensorSpec, samples: int) -> Iterator[Fault]:
    """A tensor; of one with samples, its extent must be proportional to them (``samples`` 0: it has none)."""
    yield from _known(f"{path}.dtype", "dtype", spec.dtype, BYTES_PER_ELEMENT)
    if len(spec.dims) != len(spec.shape):
        yield f"{path}.shape", f"{len(spec.shape)} extents for {len(spec.dims)} dims"
        return
    for position, extent in enumerate(spec.shape):
        yield from _at_least(f"{path}.shape[{position}]", extent, 0)
        if spec.dims[position] == SAMPLE and samples > 0 and extent % samples:
            yield f"{path}.shape[{position}]", f"{extent} is no multiple of graph.samples, {samples}"
    if all(extent >= 0 for extent in spec.shape) and prod(spec.shape) > BYTES_LIMITS[1] / 16:
        yield f"{path}.shape", f"{' x '.join(map(str, spec.shape))} elements are beyond any machine"


def _measured(path: str, measured: Sequence[Measurement], names: Mapping[str, Layer]) -> Iterator[Fault]:
    keys = ((each.layer, each.samples, each.part, each.before) for each in measured)
    yield from _twice(path, "the measurement of (layer, samples, part)", keys)
    for index, each in enumerate(measured):
        yield from _known(f"{path}[{index}].layer", "layer", each.layer, names)
        yield from _at_least(f"{path}[{index}].samples", each.samples, 0 if each.part else 1, MOST_SAMPLES)
        for position, extent in enumerate(each.part):
            yield from _at_least(f"{path}[{index}].part[{position}]", extent, 0)
        for what in LEVEL_PAIRS if each.levels is not None else ():
            for position, (layer, _) in enumerate(getattr(each.levels, what)):
                yield from _known(f"{path}[{index}].levels.{what}[{position}]", "layer", layer, names)
    for what in ("forward_s", "backward_s"):
        seconds = [(getattr(each, what), index) for index, each in enumerate(measured) if getattr(each, what) > 0]
        if seconds and max(seconds)[0] > MOST_RATIO * min(seconds)[0]:
            low, first = min(seconds)
            high, last = max(seconds)
            yield (
                f"{path}[{last}].{what}",
                f"{high:g} s is {high / low:.0e} times the {low:g} s of [{first}]; {MOST_RATIO:.0e} is the most",
            )


def _slowed(path: str, slowdowns: Sequence[Slowdown], names: Mapping[str, Layer]) -> Iterator[Fault]:
    """A factor below 1 would make bounds of layers alone untrue."""
    yield from _twice(path, "the slow-down of", (each.layer for each in slowdowns))
    for index, each in enumerate(slowdowns):
        yield from _known(f"{path}[{index}].layer", "layer", each.layer, names)
        yield from _at_least(f"{path}[{index}].samples", each.samples, 1, MOST_SAMPLES)
        yield from _at_least(f"{path}[{index}].num_devices", each.num_devices, 2, MOST_DEVICES)
        for way in ("forward", "backward"):
            if not 1 <= getattr(each, way) <= MOST_SLOWDOWN:
                yield f"{path}[{index}].{way}", f"{getattr(each, way):g} is not between 1 and {MOST_SLOWDOWN:g}"


def _prepared(path: str, made: Sequence[PreparationCost], graph: Graph) -> Iterator[Fault]:
    yield from _twice(path, "what is prepared as (name, samples)", ((each.name, each.samples) for each in made))
    earlier: set[tuple[str, int]] = set()
    for index, each in enumerate(made):
        yield from _at_least(f"{path}[{index}].samples", each.samples, 1, MOST_SAMPLES)
        for position, value in enumerate(each.inputs):
            yield from _known(f"{path}[{index}].inputs[{position}]", "graph input", value, graph.inputs)
        for position, name in enumerate(each.after):
            if (name, each.samples) not in earlier:
                yield f"{path}[{index}].after[{position}]", f"nothing before is called {name!r}"
        earlier.add((each.name, each.samples))


def _cluster(cluster: Cluster) -> Iterator[Fault]:
    if not cluster.devices:
        yield "cluster.devices", "there is no device"
    if len(cluster.devices) > MOST_DEVICES:
        yield "cluster.devices", f"{len(cluster.devices)} devices; {MOST_DEVICES} are the most"
    yield from _twice("cluster.devices", "a device called", (device.name for device in cluster.devices))
    for index, device in enumerate(cluster.devices):
        yield from _at_least(f"cluster.devices[{index}].memory_bytes", device.memory_bytes, 1, int(BYTES_LIMITS[1]))
        for name in ("name", "kind", "host"):
            if not getattr(device, name):
                yield f"cluster.devices[{index}].{name}", "is empty"
    for name, link in cluster.links.items():
        yield from _link(f"cluster.links.{name}", link)
    yield from _tiers(cluster)
    hosts = dict.fromkeys(device.host for device in cluster.devices)
    ends = ((pair.src_host, pair.dst_host) for pair in cluster.pairs)
    yield from _twice("cluster.pairs", "the link between", ends)
    for index, pair in enumerate(cluster.pairs):
        for end in ("src_host", "dst_host"):
            yield from _known(f"cluster.pairs[{index}].{end}", "host", getattr(pair, end), hosts)
        yield from _link(f"cluster.pairs[{index}].link", pair.link)
    for index, collective in enumerate(cluster.collectives):
        path = f"cluster.collectives[{index}]"
        yield from _at_least(f"{path}.num_ranks", collective.num_ranks, 1, MOST_DEVICES)
        yield from _at_least(f"{path}.num_hosts", collective.num_hosts, 0, MOST_DEVICES)
        yield from _known(f"{path}.link", "link", collective.link, cluster.links)
        yield from _points(f"{path}.points", collective.points, above_zero=True)
        if not collective.points:
            yield f"{path}.points", "nothing was measured"


def _tiers(cluster: Cluster) -> Iterator[Fault]:
    """Levels are named once, groups nest, and whatever two devices use has a link."""
    tiers = cluster.nested_tiers
    levels = [tier.within for tier in cluster.nested_tiers]
    yield from _twice("cluster.tiers", "a tier called", (tier.name for tier in tiers))
    yield from _twice("cluster.tiers", "the tier within", levels)
    if HOST not in levels:
        yield "cluster.tiers", "no tier is within 'host'"
    if "" in levels[:-1] or levels[-1]:
        yield "cluster.tiers", "the last tier, and no other, is within all devices: its 'within' is empty"
    group_levels = [level for level in levels if level not in ("", HOST)]
    for index, device in enumerate(cluster.devices):
        for level, group in device.groups.items():
            path = f"cluster.devices[{index}].groups.{level}"
            if level == HOST:
                yield path, "is named by 'host'"
            elif not group:
                yield path, "is empty"
            else:
                yield from _known(path, "tier within", level, group_levels)
    if any(device.groups for device in cluster.devices):
        yield from nesting_faults(cluster)
    for name in cluster.links if cluster.tiers else ():
        yield from _known(f"cluster.links.{name}", "tier", name, [tier.name for tier in tiers])
    missing = cluster.unlinked() if cluster.tiers and cluster.devices and HOST in levels else None
    if missing is not None:
        name, src, dst = missing
        ends = " and ".join(cluster.devices[rank].name for rank in (src, dst))
        yield f"cluster.links.{name}", f"is missing: {ends} use it"


def nesting_faults(cluster: Cluster) -> Iterator[Fault]:
    """A group lies in one group of every larger level."""
    outside: dict[tuple[int, str], tuple[str, int]] = {}
    levels = [tier.within for tier in cluster.nested_tiers[:-1]]
    for index in range(len(cluster.devices)):
        groups = cluster.groups_of(index)
        for level, (inner, outer) in enumerate(pairwise(groups)):
            first_outer, first = outside.setdefault((level, inner), (outer, index))
            if first_outer != outer:
                larger = levels[level + 1]
                ends = [cluster.devices[each].name for each in (index, first)]
                where = larger if larger == HOST else f"groups.{larger}"
                what = (
                    f"{levels[level]} {inner!r} is in {larger} {outer!r} ({ends[0]}) and in {first_outer!r} ({ends[1]})"
                )
                yield f"cluster.devices[{index}].{where}", f"{what}: groups nest"


def _link(path: str, link: Link) -> Iterator[Fault]:
    yield from _points(f"{path}.points", link.points, above_zero=True)
    for name in ("sending", "sender_core", "receiver_core"):
        yield from _points(f"{path}.{name}", getattr(link, name))


def _points(path: str, points: Sequence[tuple[int, float]], *, above_zero: bool = False) -> Iterator[Fault]:
    """A table of (message bytes, seconds), by growing size; read on logarithms where it must be above zero."""
    for index, (size, seconds) in enumerate(points):
        if not 0 < size <= BYTES_LIMITS[1]:
            yield f"{path}[{index}][0]", f"{size:g} is no size of a message"
        if not 0 <= seconds <= SECONDS_LIMITS[1] or (above_zero and seconds <= 0):
            yield f"{path}[{index}][1]", f"{seconds:g} s is no duration of a message"
    for index, ((a, _), (b, _)) in enumerate(pairwise(points)):
        if b <= a:
            yield f"{path}[{index + 1}][0]", f"{b} bytes after {a}: sizes grow"


# Plans.


def _plan(plan: Plan) -> Iterator[Fault]:
    decision = plan.decision
    yield from _source("inputs.model", plan.inputs.model)
    yield from _request(plan)
    yield from _decision(decision)
    ranks = [rank.rank for rank in plan.prediction.ranks]
    yield from _ranks("prediction.ranks", ranks, decision.num_ranks)
    if not plan.prediction.step_s > 0:
        yield "prediction.step_s", f"{plan.prediction.step_s:g} is not above 0"
    if plan.measured is not None:
        yield from _ranks("measured.ranks", [rank.rank for rank in plan.measured.ranks], decision.num_ranks)
        for name in ("stage_forward_s", "stage_backward_s", "stage_update_s", "stage_reduction_s"):
            by_stage = getattr(plan.measured, name)
            if by_stage and len(by_stage) != len(decision.stages):
                yield f"measured.{name}", f"{len(by_stage)} numbers for {len(decision.stages)} stages"
        if not plan.measured.step_s > 0:
            yield "measured.step_s", f"{plan.measured.step_s:g} is not above 0"


def _request(plan: Plan) -> Iterator[Fault]:
    request = plan.inputs.request
    path = "inputs.request"
    for name, what, allowed in (
        ("objective", "objective", OBJECTIVES),
        ("recompute", "way to recompute", RECOMPUTE),
        ("shard", "way to shard", SHARD),
        ("batch_statistics", "batch of statistics", STATISTICS),
        ("chunks", "way to look at several stages a device", CHUNKS),
    ):
        yield from _known(f"{path}.{name}", what, getattr(request, name), allowed)
    yield from _zero(f"{path}.zero", request.zero)
    for name in ("max_stages", "num_ranks", "memory_bytes"):
        yield from _at_least(f"{path}.{name}", getattr(request, name), 0, int(BYTES_LIMITS[1]))
    for index, size in enumerate(request.micro_batch_sizes):
        yield from _at_least(f"{path}.micro_batch_sizes[{index}]", size, 1, MOST_SAMPLES)
    for name in ("fix", "forbid"):
        for index, rule in enumerate(getattr(request, name)):
            try:
                parse_rule(format_rule(rule))
            except UsageError as error:
                yield f"{path}.{name}[{index}]", error.title


def _decision(decision: Decision) -> Iterator[Fault]:
    path = "decision"
    num_stages = len(decision.stages)
    num_ranks = decision.num_ranks
    if not decision.micro_batches:
        yield f"{path}.micro_batches", "there is none"
    for what, count, most in (
        ("micro_batches", len(decision.micro_batches), MOST_MICRO_BATCHES),
        ("stages", num_stages, MOST_DEVICES),
        ("program", num_ranks, MOST_DEVICES),
    ):
        if count > most:
            yield f"{path}.{what}", f"{count} are more than {most}"
    for index, size in enumerate(decision.micro_batches):
        yield from _at_least(f"{path}.micro_batches[{index}]", size, 1, MOST_SAMPLES)
    for index, length in enumerate(decision.token_slices):
        yield from _at_least(f"{path}.token_slices[{index}]", length, 1, MOST_EXTENT)
    if len(decision.token_slices) * len(decision.micro_batches) > MOST_MICRO_BATCHES:
        yield f"{path}.token_slices", f"{len(decision.sizes)} slices of all micro-batches, {MOST_MICRO_BATCHES} at most"
    if not decision.program:
        yield f"{path}.program", "there is no rank"
    used: set[int] = set()
    for index, stage in enumerate(decision.stages):
        where = f"{path}.stages[{index}]"
        yield from _ranks(f"{where}.ranks", stage.ranks, num_ranks)
        if not stage.ranks:
            yield f"{where}.ranks", "a stage runs on at least one rank"
        if len(stage.devices) != len(stage.ranks):
            yield f"{where}.devices", f"{len(stage.devices)} devices for {len(stage.ranks)} ranks"
        yield from _zero(f"{where}.zero", stage.zero)
        if stage.zero > 1 and not stage.sharded:
            yield f"{where}.zero", f"{stage.zero} of a stage that is not sharded"
    for name, placement in decision.layers.items():
        yield from _placement(f"{path}.layers.{name}", placement, decision)
        used.add(placement.stage)
    for index in range(min(num_stages, MOST_DEVICES)):
        if index not in used:
            yield f"{path}.stages[{index}]", "has no layer"
    yield from _program(decision)


def _zero(path: str, level: int) -> Iterator[Fault]:
    if level not in ZERO:
        yield path, f"{level} is no level of ZeRO: {', '.join(map(str, ZERO))}"


def _placement(path: str, placement: Placement, decision: Decision) -> Iterator[Fault]:
    if not 0 <= placement.stage < len(decision.stages):
        yield f"{path}.stage", f"{placement.stage} is none of {len(decision.stages)} stages"
        return
    yield from _at_least(f"{path}.ways", placement.ways, 1, MOST_DEVICES)
    yield from _at_least(f"{path}.margin", placement.margin, 0)
    good = True
    for dim, points in placement.cuts.items():
        if len(points) < 2 or points[0] != 0 or points[-1] < 1 or any(a > b for a, b in pairwise(points)):
            good = False
            yield f"{path}.cuts.{dim}", f"{list(points)[:8]}: cut points ascend from 0, at least two"
    ranks = decision.stages[placement.stage].ranks
    if good and placement.layout.num_parts != len(ranks):
        yield f"{path}.cuts", f"{placement.layout.num_parts} parts for the {len(ranks)} ranks of its stage"


def _program(decision: Decision) -> Iterator[Fault]:
    most = {"stage": len(decision.stages), "microbatch": len(decision.sizes), "peer": len(decision.stages)}
    for rank, row in enumerate(decision.program):
        for index, text in enumerate(row):
            path = f"decision.program[{rank}][{index}]"
            try:
                action = Action.parse(text)
            except ValueError:
                yield path, f"{_shortened(text)} is no action such as 2F0, 1SEND_F3>2 or 0UPDATE"
                continue
            for what, count in most.items():
                number = getattr(action, what)
                if number is not None and number >= count:
                    yield path, f"{_shortened(text)} names {what} {number}, there are {count}"


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


def _ranks(path: str, ranks: Sequence[int], num_ranks: int) -> Iterator[Fault]:
    yield from _twice(path, "rank", ranks)
    for index, rank in enumerate(ranks):
        if not 0 <= rank < num_ranks:
            yield f"{path}[{index}]", f"rank {rank}; the program has {num_ranks}, from 0"


# Timelines.


def _timeline(file: TimelineFile, path: str) -> Iterator[Fault]:
    timeline: Timeline = getattr(file, path)
    for index, span in enumerate(timeline.spans):
        where = f"{path}.spans[{index}]"
        yield from _at_least(f"{where}.rank", span.rank, 0, MOST_DEVICES - 1)
        if span.stop_s < span.start_s:
            yield f"{where}.stop_s", f"{span.stop_s:g} is before start_s, {span.start_s:g}"
        try:
            Action.parse(span.action)
        except ValueError:
            yield f"{where}.action", f"{_shortened(span.action)} is no action such as 2F0"
    for index, sample in enumerate(timeline.memory):
        yield from _at_least(f"{path}.memory[{index}].rank", sample.rank, 0, MOST_DEVICES - 1)
