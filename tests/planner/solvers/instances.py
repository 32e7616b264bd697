"""Random small problems, and exhaustive search over their plans: what the planner is held against."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, pairwise, product
from math import inf

import pytest

from benchmarks.chains import chain_profile
from planner.costs.candidate import Candidate, Recomputes
from planner.costs.cost_model import CostModel
from planner.ir.cluster import ACROSS_HOSTS, WITHIN_HOST
from planner.ir.constraints import broken, parse_rule
from planner.ir.errors import InfeasibleError
from planner.ir.graph import Graph, Layer, TensorSpec, producer
from planner.ir.layout import equal_shares, parts_of, samples_of
from planner.ir.problem import AUTO, Problem
from planner.ir.profile import Measurement, Optimizer, ParameterCost
from planner.layers import throughout_sites
from planner.schedules import positions, traits
from planner.solvers import solver
from planner.solvers.candidates.candidate import decision_of, part_shares, split_batch
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.feasibility import recompute_choices, schedule_names
from planner.solvers.ilp.solver import OTHER_WINDOWS
from tests.oracles.plans import check

SIZES = (1, 2, 4)


def random_problem(seed: int) -> Problem:
    """At most five layers and three devices: alike or not, one host or two, tight in memory or not."""
    draw = random.Random(seed)
    num_layers = draw.randint(2, 4)
    num_devices = draw.randint(1, 3)
    skips = [(i, j) for i, j in combinations(range(num_layers), 2) if j > i + 1 and draw.random() < 0.2]
    speeds = [draw.choice([1.0, 1.0, 0.6, 2.5]) for _ in range(num_devices)] if draw.random() < 0.5 else 1.0
    hosts = [draw.choice(["n0", "n1"]) for _ in range(num_devices)] if draw.random() < 0.4 else None
    memory = [draw.choice([2000, 4000, 9000, 2**30]) for _ in range(num_devices)] if draw.random() < 0.5 else 2**30

    def each(low: float, high: float) -> list[float]:
        return [draw.uniform(low, high) for _ in range(num_layers)]

    def words(high: int) -> list[int]:
        return [4 * draw.randint(0, high // 4) for _ in range(num_layers)]

    profile = chain_profile(
        num_layers,
        num_devices,
        forward_s=each(1e-4, 1e-3),
        backward_s=each(1e-4, 2e-3),
        parameter_bytes=words(600),
        activation_bytes=[max(4, n) for n in words(600)],
        saved_bytes=words(600),
        workspace_bytes=words(300),
        accumulate_s=draw.choice([0.0, 1e-4]),
        update_s=draw.choice([0.0, 3e-4]),
        loss_s=1e-5,
        speeds=speeds,
        hosts=hosts,
        memory_bytes=memory,
        latency_s=draw.choice([0.0, 1e-5, 3e-4]),
        bandwidth_bytes_per_s=draw.choice([1e6, 1e7, 1e9]),
        duplex=draw.random() < 0.8,
        all_reduce_latency_s=draw.choice([0.0, 1e-4]),
        sizes=SIZES,
        action_overhead_s=draw.choice([0.0, 2e-5]),
        optimizer=Optimizer("SGD", {"lr": 0.01, "momentum": 0.9}, 1.0),
        skips=skips,
    )
    schedules = draw.choice([(), (), ("gpipe",), ("1f1b",)])
    return Problem(profile, draw.choice([3, 4, 5]), schedules=schedules, memory_margin=0.0, confidence=0.0)


def branching_problem(seed: int) -> Problem:
    """The same with branches: layers read any earlier ones, or the input, and some make integers."""
    return with_branches(random_problem(seed), -seed)


def with_branches(problem: Problem, seed: int) -> Problem:
    """``problem`` with layers that read others of the earlier ones."""
    draw = random.Random(seed)
    graph = problem.profile.graph
    unread = set()
    layers = []
    for index, layer in enumerate(graph.layers[:-1]):
        earlier = [other.name for other in graph.layers[:index]]
        reads = sorted({draw.choice(["x", *earlier]) for _ in range(draw.randint(1, 2))})
        if index == len(graph.layers) - 2:
            reads = sorted({*reads, *unread})
        unread = (unread - set(reads)) | {layer.name}
        dtype = "int32" if index < len(graph.layers) - 2 and draw.random() < 0.2 else "float32"
        output = replace(layer.outputs[0], dtype=dtype)
        layers.append(replace(layer, kind="opaque", inputs=tuple(reads), outputs=(output,)))
    branched = replace(graph, layers=(*layers, graph.layers[-1]))
    return replace(problem, profile=replace(problem.profile, graph=branched))


def tied_problem(seed: int, make: Callable[[int], Problem] = random_problem) -> Problem:
    """The same with small parameters that two layers or three share, and large ones of their own, which part stages."""
    problem = make(seed)
    draw = random.Random(seed + 20_000)
    profile = problem.profile
    graph = problem.profile.graph
    times = draw.choice([1, 1000, 10_000])
    parameters = {
        name: replace(spec, shape=(times * spec.shape[0], *spec.shape[1:])) for name, spec in graph.parameters.items()
    }
    layers = list(graph.layers)
    costs = dict[str, ParameterCost]()
    for number in range(draw.choice([1, 1, 2])):
        users = draw.sample(range(len(layers) - 1), min(len(layers) - 1, draw.choice([2, 2, 3])))
        keeps = draw.random() < 0.5
        name = f"tied{number}"
        parameters[name] = TensorSpec(("dim0",), (draw.randint(1, 150),), "float32")
        for index in users:
            own = layers[index].parameters if keeps else ()
            layers[index] = replace(layers[index], kind="opaque", parameters=(*own, name))
    known = set[str]()
    for layer in layers:  # what another layer uses before is priced with that one
        updates_s = draw.choice([1e-5, 1e-4, 4e-4]) if set(layer.parameters) - known else 0.0
        costs[layer.name] = ParameterCost(draw.choice([0.0, 1e-4]) if updates_s else 0.0, updates_s)
        known |= set(layer.parameters)
    used = {name: spec for name, spec in parameters.items() if name in known}
    graph = replace(graph, layers=tuple(layers), parameters=used)
    changed = replace(profile, graph=graph, parameters=dict.fromkeys(profile.parameters, costs))
    memory = draw.choice([2**30, 2**30, 6000 * times])
    return with_memory(replace(problem, profile=changed), memory)


def heavy_problem(seed: int) -> Problem:
    """The same with parameters so large that their gradients are summed in several buckets, on as much faster links."""
    problem = random_problem(seed)
    times = 40_000
    profile = problem.profile
    heavy = {
        name: replace(spec, shape=(times * spec.shape[0], *spec.shape[1:]))
        for name, spec in profile.graph.parameters.items()
    }
    cluster = replace(
        profile.cluster,
        devices=tuple(replace(device, memory_bytes=2**50) for device in profile.cluster.devices),
        collectives=tuple(
            replace(found, points=tuple((times * size, seconds) for size, seconds in found.points))
            for found in profile.cluster.collectives
        ),
    )
    graph = replace(profile.graph, parameters=heavy)
    return replace(problem, profile=replace(profile, graph=graph, cluster=cluster))


def crowded_problem(seed: int) -> Problem:
    """Two or three layers on up to four devices of two or three hosts, whose cards outputs and sums have to share."""
    draw = random.Random(seed + 30_000)
    num_layers = draw.choice([2, 3, 3])
    hosts = draw.choice(["0011", "0011", "001", "0001", "0012"])
    times = draw.choice([1, 100, 20_000])
    rate = draw.choice([1e5, 1e6, 1e7])

    def words(high: int) -> list[int]:
        return [4 * draw.randint(1, high // 4) for _ in range(num_layers)]

    profile = chain_profile(
        num_layers,
        len(hosts),
        forward_s=[draw.uniform(1e-4, 1e-3) for _ in range(num_layers)],
        backward_s=[draw.uniform(1e-4, 2e-3) for _ in range(num_layers)],
        parameter_bytes=[times * size for size in words(600)],
        activation_bytes=words(2000),
        update_s=draw.choice([0.0, 3e-4]),
        loss_s=1e-5,
        speeds=[draw.choice([1.0, 1.7]) for _ in hosts] if draw.random() < 0.2 else 1.0,
        hosts=[f"n{host}" for host in hosts],
        memory_bytes=2**40,
        latency_s=draw.choice([0.0, 1e-4]),
        bandwidth_bytes_per_s=rate,
        duplex=draw.random() < 0.8,
        all_reduce_latency_s=draw.choice([0.0, 1e-4]),
        sizes=SIZES,
        action_overhead_s=draw.choice([0.0, 2e-5]),
        skips=[(0, 2)] if num_layers == 3 and draw.random() < 0.2 else [],
    )
    cluster = profile.cluster
    faster = draw.choice([1, 10, 100])
    within = replace(cluster.links[WITHIN_HOST], bandwidth_bytes_per_s=rate * faster, points=())
    across = cluster.links[ACROSS_HOSTS]
    if draw.random() < 0.3:  # a table whose middle is the fastest
        across = replace(across, points=((100, 120 / rate), (1000, 700 / rate), (10_000, 11_000 / rate)))
    tables = tuple(
        replace(
            table, points=tuple((size, seconds * draw.choice([0.3, 0.6, 1.0, 1.0])) for size, seconds in table.points)
        )
        for table in cluster.collectives
    )
    changed = replace(
        cluster,
        links={**cluster.links, WITHIN_HOST: within, ACROSS_HOSTS: across},
        collectives=draw.choice([(), (), tables]),
    )
    schedules = draw.choice([(), ("1f1b",), ("gpipe",), ("zb-h1",)])
    return Problem(
        replace(profile, cluster=changed),
        draw.choice([3, 4]),
        schedules=schedules,
        memory_margin=0.0,
        shard=draw.choice(["never", "never", "always"]),
        zero=draw.choice([1, 2, 3]) if schedules != ("zb-h1",) else 1,
        max_stages=3,
        confidence=0.0,
    )


def streaming(seed: int) -> Problem:
    """The same on devices that stream."""
    problem = random_problem(seed)
    draw = random.Random(seed + 10_000)
    cluster = problem.profile.cluster
    devices = tuple(replace(device, streams=True) for device in cluster.devices)
    schedules = draw.choice([(), ("fbp-as",), ("1f1b-as", "1f1b")])
    profile = replace(problem.profile, cluster=replace(cluster, devices=devices))
    return replace(problem, profile=profile, schedules=schedules)


def attention_problem(seed: int) -> Problem:
    """The same where the last three layers before the loss are scores, softmax and a weighted sum, and save the most.

    Memory is such that about half of the instances do not fit as they are.
    """
    problem = random_problem(seed)
    draw = random.Random(seed + 20_000)
    profile = problem.profile
    *others, loss = profile.graph.layers
    others = others if len(others) > 2 else [replace(others[0], name="first", inputs=("x",)), *others]
    before = others[-4].name if len(others) > 3 else "x"
    made = tuple(
        replace(layer, kind=kind, inputs=inputs, parameters=(), attributes={"op": f"aten.{op}.default", "dim": 1})
        for layer, kind, inputs, op in zip(
            others[-3:],
            ("opaque", "softmax", "opaque"),
            ((before, "x"), (others[-3].name,), (others[-2].name, before)),
            ("matmul", "softmax", "bmm"),
            strict=True,
        )
    )
    layers = (*others[:-3], *made, loss)
    used = {name for layer in layers for name in layer.parameters}
    graph = replace(
        profile.graph,
        layers=layers,
        parameters={name: spec for name, spec in profile.graph.parameters.items() if name in used},
    )
    core = {layer.name for layer in made}
    times = draw.choice([1, 3, 6])
    costs = {
        kind: tuple(
            replace(each, layer=name, saved_bytes=each.saved_bytes * (times if name in core else 1))
            for name in (layer.name for layer in layers)
            for each in found
            if each.layer == name or (name == "first" and each.layer == others[1].name)
        )
        for kind, found in profile.measurements.items()
    }
    nothing = ParameterCost(0.0, 0.0)
    parameters = {
        kind: {layer.name: found[layer.name] if layer.parameters else nothing for layer in layers}
        for kind, found in profile.parameters.items()
    }
    changed = replace(profile, graph=graph, measurements=costs, parameters=parameters)
    return with_memory(replace(problem, profile=changed), draw.choice([3000, 6000, 12000, 2**30]))


def uneven_problem(seed: int) -> Problem:
    """Any of the above, where no two layers, sizes or kinds of device are in proportion, with requests of some sort."""
    draw = random.Random(seed + 50_000)
    makers = random_problem, random_problem, branching_problem, tied_problem, tied_branches, attention_problem
    problem = draw.choice(makers)(seed)
    profile = problem.profile
    measured = {kind: tuple(_uneven(one, draw) for one in found) for kind, found in profile.measurements.items()}
    recompute = draw.choice(["never", "never", "auto", "always"])
    return replace(
        problem,
        profile=replace(profile, measurements=measured),
        recompute=recompute,
        micro_batch_sizes=draw.choice([(), (), (), (2,), (3, 4)]),
        max_stages=2 if recompute == "auto" else draw.choice([0, 0, 0, 2]),  # else plans are many
    )


def tied_branches(seed: int) -> Problem:
    """Branches with layers that share parameters."""
    return tied_problem(seed, branching_problem)


RULES = (
    *("l1=stage:0", "l1=stage:1", "l2=stage:1", "l*=replicas:1", "*=replicas:1", "l[01]=together", "l0,l2=together"),
    *("l1=device:n?/cpu0", "l1=kind:kind-*", "*=sample:1"),
)
SCHEDULES = (
    *((), ("gpipe",), ("1f1b",), ("1f1b", "gpipe"), ("1f1b-so",), ("1f1b-so",), ("1f1b-windowed",), ("1f1b-windowed",)),
    *(("1f1b-sno",), ("1f1b-2bp",), ("1f1b-2bp-fill",), ("zb-h1",), ("zb-h2",), ("naive",)),
)


def asked_problem(seed: int) -> Problem:
    """Three to six layers and a loss on two to four devices, with skips and ties, rules and whatever else is asked."""
    draw = random.Random(seed + 60_000)
    problem = _uneven_chain(draw)
    problem = replace(
        problem,
        schedules=draw.choice(SCHEDULES),
        recompute=draw.choice([*["never"] * 5, AUTO]),
        max_stages=draw.choice([0, 0, 0, 0, 2]),
    )
    if draw.random() < 0.2:
        problem = tied_problem(seed, lambda _: problem)
    rules = [parse_rule(text) for text in draw.sample(RULES, 2)]
    num_fixed, num_forbidden = draw.choice([(0, 0), (0, 0), (1, 0), (0, 1), (1, 1)])
    return replace(problem, fix=tuple(rules[:num_fixed]), forbid=tuple(rules[2 - num_forbidden :]))


def asked_of_branches(seed: int) -> Problem:
    """The same with branches: layers that read any earlier ones, or a few towers side by side."""
    problem = asked_problem(seed)
    return with_branches(problem, -seed) if seed % 5 < 2 else _with_towers(problem, -seed)


def _uneven_chain(draw: random.Random) -> Problem:
    """Layers that may cost nothing, in no proportion to one another or on other devices, and slow links."""
    num_devices = draw.choice([2, 3, 3, 3, 4])
    num_layers = draw.randint(3, 6 if num_devices < 4 else 5)
    costs = [draw.random() >= (0.3 if draw.random() < 0.2 else 0.0) for _ in range(num_layers)]

    def each(low: float, high: float) -> list[float]:
        return [draw.uniform(low, high) * is_some for is_some in costs]

    def words(high: int) -> list[int]:
        return [4 * draw.randint(1, high // 4) * is_some for is_some in costs]

    profile = chain_profile(
        num_layers,
        num_devices,
        forward_s=each(1e-4, 1e-3),
        backward_s=each(2e-4, 2e-3),
        backward_input_s=each(1e-4, 1e-3),
        backward_weight_s=each(1e-4, 1e-3),
        parameter_bytes=words(600),
        activation_bytes=[4 * draw.randint(1, 150) for _ in range(num_layers)],
        saved_bytes=words(600),
        workspace_bytes=words(300),
        accumulate_s=draw.choice([0.0, 1e-4]),
        update_s=draw.choice([0.0, 3e-4]),
        loss_s=1e-5,
        speeds=[draw.choice([1.0, 1.0, 0.6, 1.7]) for _ in range(num_devices)] if draw.random() < 0.6 else 1.0,
        hosts=[draw.choice(["n0", "n1", "n2"]) for _ in range(num_devices)] if draw.random() < 0.4 else None,
        memory_bytes=[draw.choice([4000, 9000, 2**30]) for _ in range(num_devices)] if draw.random() < 0.3 else 2**30,
        latency_s=draw.choice([0.0, 1e-5, 1e-4]),
        bandwidth_bytes_per_s=draw.choice([1e6, 1e6, 1e7, 1e9]),
        duplex=draw.random() < 0.75,
        all_reduce_latency_s=draw.choice([0.0, 1e-4]),
        sizes=SIZES,
        action_overhead_s=draw.choice([0.0, 2e-5, 1e-4]),
        skips=[(i, j) for i, j in combinations(range(num_layers), 2) if j > i + 1 and draw.random() < 0.15],
    )
    measured = profile.measurements
    if draw.random() < 0.5:
        measured = {kind: tuple(_uneven(one, draw) for one in found) for kind, found in measured.items()}
    sizes = draw.choice([(), (1,), (1,), (1,), (2,), (3,)])
    batch = draw.choice([2, 3, 3, 4])
    return Problem(
        replace(profile, measurements=measured),
        batch,
        schedules=(),
        micro_batch_sizes=sizes,
        memory_margin=0.0,
        confidence=0.0,
    )


def _uneven(one: Measurement, draw: random.Random) -> Measurement:
    """What was measured, each pass times a factor of its own."""
    names = ("forward_s", "backward_s", "backward_input_s", "backward_weight_s")
    return replace(one, **{name: draw.uniform(0.6, 1.4) * getattr(one, name) for name in names})


def _with_towers(problem: Problem, seed: int) -> Problem:
    """Two towers or three, of which layers read one another now and then; the last layer reads all their ends."""
    draw = random.Random(seed)
    graph = problem.profile.graph
    *body, top, loss = graph.layers
    ends = ["x"] * draw.choice([2, 2, 3])
    layers = list[Layer]()
    unread = set[str]()
    for layer in body:
        tower = draw.randrange(len(ends))
        reads = {ends[tower]}
        if layers and draw.random() < 0.15:
            reads.add(draw.choice(layers).name)
        unread = (unread - reads) | {layer.name}
        ends[tower] = layer.name
        layers.append(replace(layer, kind="opaque", inputs=tuple(sorted(reads))))
    layers.append(replace(top, kind="opaque", inputs=tuple(sorted(unread))))
    return replace(problem, profile=replace(problem.profile, graph=replace(graph, layers=(*layers, loss))))


MANY_PLANS = 5000


def with_fewer_plans(problem: Problem) -> Problem:
    """The problem if it has few plans to look at, else with less to choose from."""
    narrower: list[dict[str, object]] = [{}, {"recompute": "never"}, {"micro_batch_sizes": (1,)}, {"global_batch": 3}]
    narrower += [{"schedules": ("1f1b-so",)}, {"max_stages": 3}, {"max_stages": 2}]
    for changed in narrower:
        problem = replace(problem, **changed)
        if _num_plans(problem) <= MANY_PLANS:
            break
    return problem


def _num_plans(problem: Problem) -> int:
    """How many plans there are at most; shares of unlike devices aside."""
    every = (len(groups) for groups in _groups((), tuple(problem.ranks), problem))
    sequences = Counter(count for count in every if not 0 < problem.max_stages < count)
    total = 0
    for size in problem.micro_batch_sizes or range(1, problem.global_batch + 1):
        batches = split_batch(problem.global_batch, size)
        for count, times in sequences.items():
            ways = sum(1 for name in schedule_names(problem) for _ in _windows(name, count, len(batches)))
            again = len(recompute_choices(problem)) ** count
            total += times * ways * again * sum(1 for _ in _stages(problem.profile.graph, count))
    return total


def plans(problem: Problem, *, every_share: bool = False) -> Iterator[Candidate]:
    """Every plan of the space.

    Args:
        every_share: also those with unequal shares on devices that are alike.
    """
    graph = problem.profile.graph
    cost_model = CostModel(problem.profile)
    batch = problem.global_batch
    largest = SIZES[-1]
    along = throughout_sites(graph)
    others = [index for index, layer in enumerate(graph.layers) if layer.name not in along]
    schedules = schedule_names(problem)
    for size in sorted({min(size, batch) for size in problem.micro_batch_sizes}) or range(1, batch + 1):
        batches = split_batch(batch, size)
        for groups in _groups((), tuple(problem.ranks), problem):
            if 0 < problem.max_stages < len(groups):
                continue
            shared = _shares(problem, cost_model, groups, batches, largest, every_share)
            for (shares, by_parts), stage_of in product(shared, _stages(graph, len(groups))):
                if any(stage_of[index] in by_parts for index in others):
                    continue
                for schedule in schedules:
                    for windows in _windows(schedule, len(groups), len(batches)):
                        for again in _recompute(problem, len(groups)):
                            yield Candidate(stage_of, groups, shares, batches, schedule, windows, again)


def several_a_position(seed: int, schedule: str) -> Problem:
    """Three to five layers on two to four devices of one or two kinds, on one to four hosts, under a schedule."""
    draw = random.Random(seed)
    num_layers = draw.randint(3, 5)
    num_devices = draw.choice([2, 2, 3, 3, 4])

    def each(low: float, high: float) -> list[float]:
        return [draw.uniform(low, high) for _ in range(num_layers)]

    profile = chain_profile(
        num_layers,
        num_devices,
        forward_s=each(1e-4, 1e-3),
        backward_s=each(2e-4, 2e-3),
        backward_input_s=each(1e-4, 1e-3),
        backward_weight_s=each(1e-4, 1e-3),
        parameter_bytes=[4 * draw.randint(0, 200) for _ in range(num_layers)],
        activation_bytes=[4 * draw.randint(1, 200) for _ in range(num_layers)],
        update_s=draw.choice([0.0, 2e-4]),
        accumulate_s=draw.choice([0.0, 1e-4]),
        loss_s=draw.choice([0.0, 1e-5]),
        speeds=[draw.choice([1.0, 1.0, 1.7]) for _ in range(num_devices)] if draw.random() < 0.5 else 1.0,
        hosts=[f"n{draw.randint(0, 3)}" for _ in range(num_devices)] if draw.random() < 0.7 else None,
        memory_bytes=[draw.choice([4000, 8000, 2**30]) for _ in range(num_devices)] if draw.random() < 0.4 else 2**30,
        latency_s=draw.choice([0.0, 1e-4]),
        bandwidth_bytes_per_s=draw.choice([1e6, 1e7, 1e9]),
        all_reduce_latency_s=draw.choice([0.0, 1e-4]),
        sizes=SIZES,
        skips=[(0, 2)] if draw.random() < 0.2 else [],
    )
    apart = tuple(parse_rule(f"*=replicas:{count}") for count in (2, 3, 4))
    forbid = apart if num_devices == 4 and schedule != "chimera" else ()
    return Problem(
        profile, draw.choice([2, 3, 4]), schedules=(schedule,), memory_margin=0.0, forbid=forbid, confidence=0.0
    )


def virtual_plans(problem: Problem) -> Iterator[Candidate]:
    """Every plan with several stages a position, or one, under the problem's schedule."""
    known = traits(problem.schedules[0])
    for size in range(1, problem.global_batch + 1):
        batches = split_batch(problem.global_batch, size)
        for groups in _groups((), tuple(problem.ranks), problem):
            if known.bidirectional and any(len(group) != 2 for group in groups):
                continue
            shared = any(len(group) > 1 for group in groups)
            if (shared and problem.forbid) or (len(groups) == 1 and not known.bidirectional):
                continue
            flips = product((1, -1), repeat=len(groups)) if known.bidirectional else ((1,) * len(groups),)
            for flip, ways in product(
                flips, (known.stages_per_position,) if known.stages_per_position else (1, 2, 3, 4)
            ):
                ordered = [group[::step] for group, step in zip(groups, flip, strict=True)]
                yield from _virtual_plans(problem, ordered, ways, batches)


def _virtual_plans(
    problem: Problem, groups: Sequence[tuple[int, ...]], ways: int, batches: tuple[int, ...]
) -> Iterator[Candidate]:
    name = problem.schedules[0]
    where = positions(name, len(groups), ways)
    halves = traits(name).bidirectional
    if len(where) > len(problem.profile.graph.layers):
        return
    mirrored = [groups[r][::-1] if halves and 2 * s >= len(where) else groups[r] for s, r in enumerate(where)]
    choices = [
        (equal_shares(batches[0], 2),) if halves else tuple(_divisions(problem, group, batches[0])) for group in groups
    ]
    for shares in product(*choices):
        loads = [n for share in shares for rows in set(batches) for n in samples_of(share, rows)]
        if min(loads) > 0 and max(loads) <= SIZES[-1]:
            for stage_of in _stages(problem.profile.graph, len(where)):
                yield Candidate(stage_of, tuple(mirrored), tuple(shares[r] for r in where), batches, name)


def _shares(
    problem: Problem,
    cost_model: CostModel,
    groups: tuple[tuple[int, ...], ...],
    batches: tuple[int, ...],
    largest: int,
    every_share: bool,
) -> Iterator[tuple[tuple[tuple[int, ...], ...], frozenset[int]]]:
    """Shares of all stages, in samples; and with those of some stages of several ranks in parts of sites."""
    size = max(batches)
    several = [stage for stage, group in enumerate(groups) if len(group) > 1]
    sparse = bool(throughout_sites(problem.profile.graph))
    for flags in product((False, True) if sparse else (False,), repeat=len(several)):
        by_parts = frozenset(stage for stage, flag in zip(several, flags, strict=True) if flag)
        choices = [
            (part_shares(problem, cost_model, group, size),)
            if stage in by_parts
            else tuple(_divisions(problem, group, size, every_share))
            for stage, group in enumerate(groups)
        ]
        for shares in product(*choices):
            loads = [
                n
                for stage, share in enumerate(shares)
                for rows in set(batches)
                for n in (parts_of if stage in by_parts else samples_of)(share, rows)
            ]
            if min(loads) > 0 and (max(loads) <= largest or problem.micro_batch_sizes):
                yield shares, by_parts


def _divisions(
    problem: Problem, group: tuple[int, ...], size: int, every_share: bool = False
) -> Iterator[tuple[int, ...]]:
    """The samples of each rank of a group: equal on devices that are alike, else in every way."""
    devices = [problem.profile.cluster.devices[rank] for rank in group]
    if not every_share and len({(device.kind, device.memories) for device in devices}) == 1:
        yield equal_shares(size, len(group))
        return
    yield from (shares for shares in product(range(1, size + 1), repeat=len(group)) if sum(shares) == size)


def _stages(graph: Graph, num_stages: int) -> Iterator[tuple[int, ...]]:
    """The stage of each layer, every stage used, each layer behind all that it reads."""
    index = {layer.name: number for number, layer in enumerate(graph.layers)}
    reads = [[index[producer(v)] for v in layer.inputs if producer(v) in index] for layer in graph.layers]
    for stage_of in product(range(num_stages), repeat=len(reads)):
        in_order = all(stage_of[i] <= stage_of[j] for j, needed in enumerate(reads) for i in needed)
        if in_order and len(set(stage_of)) == num_stages:
            yield stage_of


def _windows(schedule: str, num_stages: int, num_microbatches: int) -> Iterator[tuple[int, ...]]:
    """All that differ; where they are lowered to those of stages before, each in some order of the stages."""
    for windows in product(range(1, num_microbatches + 1), repeat=num_stages) if traits(schedule).windowed else ((),):
        if traits(schedule).splits_backward or all(a >= b for a, b in pairwise(windows)):
            yield windows


def _recompute(problem: Problem, num_stages: int) -> tuple[tuple[Recomputes, ...], ...]:
    return tuple(product(recompute_choices(problem), repeat=num_stages))


def best_by_exhaustion(
    problem: Problem, every: Callable[[Problem], Iterator[Candidate]] = plans, known_s: float = inf
) -> tuple[Evaluation | None, int]:
    """The fastest plan that fits and keeps to the side constraints, and how many there are.

    Args:
        known_s: slower plans are of no interest.

    Of a plan that is slower than one before, the evaluator asks no memory, and maybe a bound of the step alone: of each
    eighth it is asked for everything, and may not be faster.
    """
    evaluator = Evaluator(problem, CostModel(problem.profile))
    best = None
    num_plans = 0
    for num_plans, candidate in enumerate(every(problem), 1):
        one = evaluator.evaluate(candidate, known_s if best is None else best.step_s)
        if not num_plans % 8 and not one.memories:
            assert evaluator.evaluate(candidate).step_s >= one.step_s * (1 - 1e-9)
        if (
            one.fits
            and one.step_s < (known_s if best is None else best.step_s)
            and not _breaks_rules(problem, candidate)
        ):
            best = one
    return best, num_plans


def _breaks_rules(problem: Problem, candidate: Candidate) -> bool:
    if not problem.fix and not problem.forbid:
        return False
    decision = decision_of(problem, candidate)
    return bool(broken(problem.fix, problem.forbid, decision, problem.profile.cluster))


def assert_best_of_all(
    problem: Problem,
    every: Callable[[Problem], Iterator[Candidate]] = plans,
    solvers: Sequence[str] = ("best-first",),
) -> None:
    """Each of the solvers finds the best of all plans, proves it, and the checker agrees; or there is none."""
    best, _ = best_by_exhaustion(problem, every)
    for name in solvers:
        try:
            plan = solver(name)(problem, None)
        except InfeasibleError:
            assert best is None, name
            continue
        assert best is not None, name
        assert plan.search.status == "proven", name
        if best.candidate.windows and any(rejected.what == OTHER_WINDOWS for rejected in plan.search.rejected):
            assert plan.prediction.step_s >= best.step_s * (1 - 1e-9), name
            continue
        assert plan.prediction.step_s == pytest.approx(best.step_s, rel=1e-9), name
        assert plan.search.bound_s == pytest.approx(best.step_s, rel=1e-8), name
        assert check(plan, problem.profile) == (), name


def assert_nothing_is_faster(problem: Problem) -> None:
    """The plan is proven, and no other is faster; where there is none, none fits and keeps to what is asked."""
    known_s = inf
    status = "proven"
    with suppress(InfeasibleError):
        plan = solver("best-first")(problem, None)
        known_s = plan.prediction.step_s
        status = plan.search.status
    faster, _ = best_by_exhaustion(problem, known_s=known_s * (1 - 1e-9))
    assert faster is None, f"{faster.step_s} s, {known_s} s is {status}: {faster.candidate}"
    assert status == "proven"


def with_memory(problem: Problem, memory_bytes: int) -> Problem:
    """The problem with that much on every device."""
    cluster = problem.profile.cluster
    devices = tuple(replace(device, memory_bytes=memory_bytes) for device in cluster.devices)
    return replace(problem, profile=replace(problem.profile, cluster=replace(cluster, devices=devices)))


def _groups(
    taken: tuple[tuple[int, ...], ...], free: tuple[int, ...], problem: Problem
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every sequence of groups."""
    if taken:
        yield taken
    for count in range(1, len(free) + 1):
        for group in combinations(free, count):
            rest = tuple(r for r in free if r not in group)
            yield from _groups((*taken, _in_order(group, problem)), rest, problem)


def _in_order(group: tuple[int, ...], problem: Problem) -> tuple[int, ...]:
    """Kinds after one another, then by memory; then the smallest group (a host, an island) with more members first."""
    cluster = problem.profile.cluster
    devices = cluster.devices
    kinds = list(dict.fromkeys(device.kind for device in devices))
    pool = {rank: (devices[rank].kind, cluster.groups_of(rank), devices[rank].memory_bytes) for rank in problem.ranks}
    pools = list(dict.fromkeys(pool.values()))
    count = Counter(pool[rank] for rank in group)
    return tuple(
        sorted(
            group,
            key=lambda r: (
                kinds.index(devices[r].kind),
                -devices[r].memory_bytes,
                -count[pool[r]],
                pools.index(pool[r]),
                r,
            ),
        )
    )
