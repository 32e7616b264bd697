"""Random plans on hosts that share network cards and cores: what both simulators are held to."""

from __future__ import annotations

import random
from dataclasses import replace

from benchmarks.chains import chain_profile
from planner.ir.cluster import Cluster, Link
from planner.ir.layout import Layout, cut_points
from planner.ir.plan import Decision, Placement, Stage
from planner.ir.profile import Profile
from planner.ir.schedule import Pipeline, StageGraph
from planner.layers.boundary import Boundaries
from planner.passes import lower
from planner.schedules import positions, traits
from planner.schedules import schedule as schedule_named

Points = tuple[tuple[int, float], ...]


def random_plan(
    draw: random.Random, schedule: str, *, alone: bool = False, small: bool = False
) -> tuple[Profile, Decision]:
    """Stages of 1 to 3 ranks on 2 to 4 hosts of several ranks each, links that differ in all that a link can, and ties.

    Args:
        alone: each rank on a host of its own, cards that nothing fills, calls and cores that cost nothing.
        small: more skips of fewer bytes, so that several sends of an action travel as one message.
    """
    per_position = traits(schedule).stages_per_position
    num_positions = draw.randint(2, 4)
    where = positions(schedule, num_positions, per_position or 2) if per_position != 1 else tuple(range(num_positions))
    groups: list[tuple[int, ...]] = []
    for _ in range(num_positions):
        first = sum(map(len, groups))
        groups.append(tuple(range(first, first + (draw.choice((1, 1, 2, 3)) if per_position == 1 else 1))))
    num_ranks = sum(map(len, groups))
    num_layers = len(where) + draw.randint(0, 2)
    profile = _profile(draw, num_layers, num_ranks, alone, small)
    decision = _decision(draw, profile, schedule, where, tuple(groups))
    return _tied(draw, profile) if draw.random() < 0.5 else profile, decision


def _tied(draw: random.Random, profile: Profile) -> Profile:
    """Some layers use the parameters of others too, in whatever stages these are."""
    layers = list(profile.graph.layers)
    for _ in range(draw.randint(1, 2)):
        first, *others = sorted(draw.sample(range(len(layers) - 1), min(len(layers) - 1, draw.choice((2, 3)))))
        for index in others:
            own = dict.fromkeys((*layers[index].parameters, *layers[first].parameters))
            layers[index] = replace(layers[index], kind="opaque", parameters=tuple(own))
    return replace(profile, graph=replace(profile.graph, layers=tuple(layers)))


def _profile(draw: random.Random, num_layers: int, num_ranks: int, alone: bool, small: bool) -> Profile:
    hosts = [f"n{rank}" for rank in range(num_ranks)]
    if not alone:
        hosts = [f"n{draw.randint(0, draw.choice((1, 3)))}" for _ in range(num_ranks)]
    num_skips = (6 if small else draw.randint(0, 2)) if num_layers > 2 else 0
    skips = {tuple(sorted(draw.sample(range(num_layers), 2))) for _ in range(num_skips)}
    profile = chain_profile(
        num_layers,
        num_ranks,
        forward_s=[draw.uniform(1e-4, 2e-3) for _ in range(num_layers)],
        backward_s=[draw.uniform(1e-4, 4e-3) for _ in range(num_layers)],
        parameter_bytes=[4 * draw.randint(1, 50_000) for _ in range(num_layers)],
        activation_bytes=[4 * draw.randint(1, 2_000 if small else 50_000) for _ in range(num_layers)],
        update_s=draw.choice((0.0, 1e-4)),
        accumulate_s=draw.choice((0.0, 1e-4)),
        speeds=[draw.choice((1.0, 0.7)) for _ in range(num_ranks)],
        hosts=hosts,
        latency_s=draw.choice((0.0, 1e-4)),
        bandwidth_bytes_per_s=draw.choice((2e7, 1e8, 1e9)),
        duplex=alone or draw.random() < 0.7,
        all_reduce_latency_s=1e-5,
        action_overhead_s=draw.choice((0.0, 3e-5)),
        skips=sorted((a, b) for a, b in skips if b > a + 1),
    )
    return profile if alone else replace(profile, cluster=_shared(draw, profile.cluster))


def _shared(draw: random.Random, cluster: Cluster) -> Cluster:
    """Calls that take time, cores that lose some, cards of other widths."""
    links = {name: _link(draw, link) for name, link in cluster.links.items()}
    devices = tuple(replace(device, core_share=draw.choice((0.0, 0.5, 1.0))) for device in cluster.devices)
    return replace(cluster, links=links, devices=devices)


def _link(draw: random.Random, link: Link) -> Link:
    def table(part: float) -> Points:
        if draw.random() < 0.5:
            return ()
        return tuple((size, seconds * part * draw.uniform(0.5, 1.0)) for size, seconds in link.points[:6:2])

    return replace(
        link,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * draw.choice((0.8, 1.0, 3.0)),
        sending=table(0.5),
        sender_core=table(0.4),
        receiver_core=table(0.8),
    )


def _decision(
    draw: random.Random, profile: Profile, schedule: str, where: tuple[int, ...], groups: tuple[tuple[int, ...], ...]
) -> Decision:
    graph = profile.graph
    num_stages = len(where)
    ranks = tuple(groups[position] for position in where)
    cuts = sorted(draw.sample(range(1, len(graph.layers)), num_stages - 1))
    bounds = [0, *cuts, len(graph.layers)]
    stage_of = {layer.name: s for s in range(num_stages) for layer in graph.layers[bounds[s] : bounds[s + 1]]}
    layouts = [Layout({"sample": cut_points((1,) * len(group))} if len(group) > 1 else {}) for group in ranks]
    micro_batches = tuple(draw.choice((4, 6)) for _ in range(draw.randint(1, 6)))
    boundaries = Boundaries.of(graph, stage_of, layouts, ranks)
    edges = boundaries.edges()
    stages = StageGraph(num_stages, len(micro_batches), edges, boundaries.prepares())
    routes = boundaries.routes(edges, micro_batches)
    pipeline = Pipeline(stages, where if traits(schedule).stages_per_position != 1 else ())
    program = lower(schedule_named(schedule)(pipeline), stages, ranks, routes, sum(map(len, groups)))
    devices = profile.cluster.devices
    return Decision(
        schedule=schedule,
        micro_batches=micro_batches,
        stages=tuple(Stage(group, tuple(devices[rank].name for rank in group)) for group in ranks),
        layers={name: Placement(stage, layouts[stage].cuts) for name, stage in stage_of.items()},
        program=tuple(tuple(map(str, row)) for row in program.rows),
    )
