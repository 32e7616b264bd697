"""BaPipe on FPGA boards (Zhao et al., arXiv 2012.12544): schedules that stream, and boards with two memories.

- *Closed form* and *predicted*: a step of equal stages, F = 1, B = 2, whose messages take SR, over that of 1F1B-AS or
  1F1B, by BaPipe's table and by the simulator; they are one number.
- *On chip*: layers whose weights fit on chip on four boards, not on one, and which read them all for each sample: four
  boards over one, planned, beside the closed form.  It is more than four times, since the weights come near.
- *Planned*: the best plan for boards over data parallelism, on the network's own operations and a roofline.  BaPipe's
  abstract says up to 3.2 times, on any of its platforms; its figures for boards by network are not at hand, nor are the
  rates of its boards, so that this is no reproduction: the boards here are a VCU118's on-chip memory (catalogue) beside
  DDR4 at 38.4 GB/s, 1 TFLOP/s, links of 10 Gbit/s.
- *Executed*: the schedules on two processors, where nothing streams, beside one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import planner
from benchmarks.layouts import graph_of, profile_of
from benchmarks.report import Row
from benchmarks.seeds.branches import best_of_these, builder, with_loss
from benchmarks.seeds.branches import profile_of as profile_of_layers
from benchmarks.seeds.jobs import largest_error
from benchmarks.seeds.schedules import MODEL
from planner.costs.candidate import Candidate
from planner.costs.layers.roofline import on_cluster
from planner.extras.baselines import bapipe
from planner.extras.baselines.common.problem import ChainCosts
from planner.extras.catalogue.listing import device
from planner.ir.cluster import ACROSS_HOSTS, WITHIN_HOST, Cluster, DeviceSpec, Link
from planner.ir.constraints import parse_rule
from planner.ir.graph import Graph, Layer, TensorSpec
from planner.ir.problem import Problem
from planner.ir.profile import ModelSource, ParameterCost, Profile
from planner.solvers.best_first.solver import solve

NETWORKS = {
    "ResNet-50": ModelSource("profiler.models.resnet:resnet50", {}, (4, 3, 224, 224)),
    "VGG-16": ModelSource("profiler.models.vgg:vgg16", {}, (4, 3, 224, 224)),
    "GNMT": ModelSource("profiler.models.gnmt:gnmt", {}, (4, 25)),
}
PUBLISHED = 3.2
"""Over data parallelism, on the best of all platforms and networks (abstract)."""
DDR_BYTES_PER_S = 38.4e9
FLOP_PER_S = 1e12
LINK_BYTES_PER_S = 1.25e9


def rows(quick: bool) -> Iterator[Row]:
    """All rows."""
    for transfer in (0.5, 1.5, 2.5):
        yield from predicted(4, 16, transfer)
    yield from on_chip()
    for name in () if quick else NETWORKS:  # capture takes half a minute each
        yield planned(name, 8)
    if not quick:
        yield from executed()


def predicted(p: int, m: int, transfer: float) -> Iterator[Row]:
    """What is arithmetic: streaming beside sending what is complete, a pass at a time beside two at once."""
    ones = (float(m),) * p
    two = (2.0 * m,) * p
    chain = ChainCosts(tuple(map(str, range(p))), ones, two, ones, ones, (*(float(m),) * (p - 1), 0.0))
    row = bapipe.DeviceRow((1.0,) * p, 1 / transfer)
    cuts = tuple(map(float, range(1, p)))
    pairs = (bapipe.BapipePipeline(name, m, cuts) for name in (bapipe.AS, bapipe.FBP))
    alone_s, in_pairs_s = (bapipe.minibatch_s(chain, row, each) for each in pairs)
    closed = alone_s / in_pairs_s
    steps = {name: _step_s(p, m, transfer, name) for name in ("1f1b", "1f1b-as", "fbp-as")}
    gain = steps["1f1b-as"] / steps["fbp-as"]
    name = f"BaPipe, {p} boards, SR = {transfer:g} F"
    yield Row(f"{name}, FBP-AS over 1F1B-AS: predicted gain", gain, "x", f"{closed:.6g}", abs(gain - closed) <= 1e-6)
    yield Row(f"{name}, FBP-AS over 1F1B-AS: closed form", closed, "x")
    yield Row(f"{name}, 1F1B-AS over 1F1B: predicted gain", steps["1f1b"] / steps["1f1b-as"], "x")


def _step_s(p: int, m: int, transfer: float, schedule: str) -> float:
    layers, add = builder(_FEATURES, is_chain=False)
    last = "x"
    for number in range(p):
        last = add(f"layer{number}", (last,))
    profile = profile_of_layers(with_loss(layers, last, _FEATURES), _FEATURES, 1.0, p)
    devices = tuple(replace(each, streams=True) for each in profile.cluster.devices)
    link = Link(0.0, 4 * _FEATURES / transfer)
    profile = replace(profile, cluster=Cluster(devices, {WITHIN_HOST: link}))
    bounds = (*range(p), len(profile.graph.layers))
    ranks = tuple((rank,) for rank in range(p))
    candidate = Candidate.chain(bounds, ranks, ((1,),) * p, (1,) * m, schedule)
    problem = Problem(profile, m, schedules=(schedule,), micro_batch_sizes=(1,), confidence=0.0)
    return best_of_these(problem, lambda *_: [candidate], "by hand", "a layer a board").prediction.step_s


_FEATURES = 2**18


def on_chip(num_layers: int = 8, num_boards: int = 4, m: int = 8, times: float = 4.0) -> Iterator[Row]:
    """Layers that read little but their weights, ``times`` faster on chip; additions and updates take no time."""
    steps = {}
    for count in (1, num_boards):
        graph = _linear(num_layers)
        num_bytes = 4 * _WIDTH**2
        room = 2 * num_bytes * num_layers // num_boards  # with gradients
        board = DeviceSpec("", "board", "", 2**30, {"float32": 1e18}, 1e9, streams=True, on_chip_bytes=room)
        board = replace(board, on_chip_bytes_per_s=times * 1e9)
        free = {layer.name: ParameterCost(0.0, 0.0) for layer in graph.layers if layer.parameters}
        measured = replace(profile_of_layers(graph, _WIDTH, 1.0, 1), parameters={"GPU": free})
        found = on_boards(measured, board, count)
        found = replace(found, parameters=dict.fromkeys(found.measurements, free))
        problem = Problem(
            found, m, schedules=("1f1b-as",), micro_batch_sizes=(1,), fix=(parse_rule("*=replicas:1"),), confidence=0.0
        )
        steps[count] = solve(problem).prediction.step_s
    gain = steps[1] / steps[num_boards]
    closed = times * num_boards * m / (m + num_boards - 1)
    name = f"On chip, {num_boards} boards over one"
    yield Row(f"{name}: predicted gain", gain, "x", f"{closed:.4g} within 5 %", abs(gain / closed - 1) <= 0.05)
    yield Row(f"{name}: closed form, without activations", closed, "x")


_WIDTH = 512


def _linear(num_layers: int) -> Graph:
    """Square linear layers in a row."""
    shape = TensorSpec(("sample", "feature"), (1, _WIDTH), "float32")
    layers = []
    attributes = {"op": "aten.linear.default"}
    for number in range(num_layers):
        reads = (f"layer{number - 1}" if number else "x",)
        layers.append(Layer(f"layer{number}", "linear", reads, (shape,), (f"weight{number}",), attributes=attributes))
    parameters = {
        f"weight{number}": TensorSpec(("dim0", "dim1"), (_WIDTH, _WIDTH), "float32") for number in range(num_layers)
    }
    return replace(with_loss(layers, layers[-1].name, _WIDTH), parameters=parameters)


def on_boards(profile: Profile, board: DeviceSpec, count: int) -> Profile:
    """The profile on so many boards, one a host, by their roof alone."""
    devices = tuple(replace(board, name=f"n{k}/fpga0", host=f"n{k}") for k in range(count))
    return on_cluster(profile, Cluster(devices, {ACROSS_HOSTS: Link(0.0, LINK_BYTES_PER_S)}))


def planned(name: str, count: int, batch: int = 32) -> Row:
    """The best plan for ``count`` boards over data parallelism."""
    problem = board_problem(name, count, batch)
    best = solve(problem)
    replicas = planner.plan(problem, "data-parallel")
    on_chip = sum(rank.on_chip_bytes > 0 for rank in best.prediction.ranks)
    words = f"planned on {count} boards (weights on chip on {on_chip}): gain over data parallelism"
    gain = replicas.prediction.step_s / best.prediction.step_s
    return Row(f"BaPipe, {name}, {words}", gain, "x", f"published: up to {PUBLISHED:g}")


def board_problem(name: str, count: int, batch: int) -> Problem:
    """A network on boards."""
    source = NETWORKS[name]
    profile = profile_of(source, graph_of(source), 1)
    on_chip = device("VCU118").on_chip_bytes
    size = int(on_chip.value) if on_chip is not None else 0
    peak = {"float32": FLOP_PER_S}
    board = DeviceSpec("", "VCU118", "", 2**33, peak, DDR_BYTES_PER_S, streams=True, on_chip_bytes=size)
    schedules = ("1f1b-as", "fbp-as", "1f1b")
    return Problem(
        on_boards(profile, board, count),
        batch,
        schedules=schedules,
        micro_batch_sizes=(1, 2, 4, batch),
        time_limit_s=30.0,
        confidence=0.0,
    )


def executed() -> Iterator[Row]:
    """Jobs of two workers beside one device."""
    for name in ("1f1b-as", "fbp-as"):
        yield largest_error(f"BaPipe, {name}", MODEL, plan=["--schedule", name, "--fix", "*=replicas:1"])
