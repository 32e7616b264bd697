"""Published planners that are asked for nothing that exists, for what does not fit, or run out of time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from planner.extras.baselines import bapipe, dapple, hpgo, sparsepipe
from planner.extras.baselines.bapipe import DeviceRow
from planner.extras.baselines.common.answer import INFEASIBLE, TIME_LIMIT, RivalAnswer
from planner.extras.baselines.common.problem import chain_of
from planner.extras.baselines.dapple import Hosts
from planner.extras.baselines.hpgo import HpgoMachines
from planner.extras.baselines.pipedream import planner as pipedream
from planner.extras.baselines.pipedream.format import LayerGraph, LayerNode, read, states_of
from planner.extras.baselines.pipedream.planner import PipeDreamOptions
from planner.extras.baselines.piper import format as piper_format
from planner.extras.baselines.piper import planner as piper
from planner.extras.baselines.sparsepipe import DeviceType
from planner.extras.baselines.tarnawski import planner as tarnawski
from planner.extras.baselines.tarnawski.format import TarnawskiInstance, TarnawskiNode
from planner.ir.errors import FormatError, HalopipeError, UnknownNameError, UsageError
from tests.planner.extras.baselines.peers import pipelines, placements
from tests.planner.extras.baselines.peers.chains import random_chain
from tests.planner.extras.baselines.peers.graphs import random_graph

PROFILES = Path(__file__).parents[3] / "data" / "profiles"
VGG16, TITANS = (read(PROFILES / f"{name}.graph.txt") for name in ("pipedream/vgg16", "sparsepipe/b64_tv"))
CHAIN = random_chain(0)
GRAPH = random_graph(0)
INPUTS = LayerGraph("inputs", (LayerNode("a", "Input0", 1.0, 1.0, 0.0, 0.0),), ())
PIPER = pipelines.random_instance(3)
PLACED = placements.random_instance(1)


def fan(number: int) -> LayerGraph:
    nodes = tuple(LayerNode(f"n{k}", "layer", 1.0, 1.0, 0.0, 0.0) for k in range(number))
    return LayerGraph("fan", nodes, tuple((0, k) for k in range(1, number)))


REFUSALS: list[tuple[Callable[[], object], type[HalopipeError], str | None]] = [
    (lambda: pipedream.solve(GRAPH, [], []), UsageError, None),
    (lambda: pipedream.solve(GRAPH, [0], [1.0]), UsageError, None),
    (lambda: pipedream.solve(GRAPH, [2], [0.0]), UsageError, None),
    (lambda: pipedream.solve(GRAPH, [2, 2], [1.0]), UsageError, None),
    (lambda: pipedream.solve(INPUTS, [2], [1.0]), FormatError, "no layers besides inputs"),
    (lambda: states_of(fan(20)), UsageError, "too many states"),
    (lambda: sparsepipe.best_pipeline([DeviceType("tv", TITANS, 2), DeviceType("other", GRAPH, 2)]),
     FormatError, "not a profile of the same network"),
    (lambda: sparsepipe.best_pipeline([]), UsageError, None),
    (lambda: sparsepipe.best_pipeline([DeviceType("tv", TITANS, 0)]), UsageError, None),
    (lambda: sparsepipe.best_pipeline([DeviceType("tv", TITANS, 1)], 0.0), UsageError, None),
    (lambda: dapple.best_pipeline(CHAIN, Hosts(0, 4, 1.0, 1.0), 4), UsageError, None),
    (lambda: dapple.best_pipeline(CHAIN, Hosts(1, 0, 1.0, 1.0), 4), UsageError, None),
    (lambda: dapple.best_pipeline(CHAIN, Hosts(1, 1, 0.0, 1.0), 4), UsageError, None),
    (lambda: bapipe.best_pipeline(CHAIN, DeviceRow((), 1.0), (1,)), UsageError, None),
    (lambda: bapipe.best_pipeline(CHAIN, DeviceRow((1.0,), 0.0), (1,)), UsageError, None),
    (lambda: bapipe.best_pipeline(CHAIN, DeviceRow((1.0,), 1.0), ()), UsageError, None),
    (lambda: hpgo.Planner(GRAPH, HpgoMachines(0, 4, 1.0, 1.0, 1.0), 1), UsageError, None),
    (lambda: hpgo.Planner(GRAPH, HpgoMachines(1, 4, 0.0, 1.0, 1.0), 1), UsageError, None),
    (lambda: hpgo.Planner(GRAPH, HpgoMachines(1, 4, 1.0, 1.0, 0.0), 1), UsageError, None),
    (lambda: hpgo.Planner(GRAPH, HpgoMachines(1, 4, 1.0, 1.0, 1.0), 0), UsageError, None),
    (lambda: hpgo.search(VGG16, HpgoMachines(1, 1, 1.0, 1.0, 1.0), 64, 64), UsageError, "nothing to choose"),
    (lambda: hpgo.search(VGG16, HpgoMachines(1, 4, 1.0, 1.0, 1.0), 32, 64), UsageError, "nothing to choose"),
    (lambda: piper.solve(replace(PIPER, devices=0)), UsageError, "nothing to plan for"),
    (lambda: piper.solve(replace(PIPER, bandwidth_bytes_per_s=0.0)), UsageError, "nothing to plan for"),
    (lambda: piper.solve(replace(PIPER, memory_bytes=-1.0)), UsageError, "nothing to plan for"),
    (lambda: piper.solve(PIPER, variant="best"), UnknownNameError, "no variant 'best'"),
    (lambda: tarnawski.solve(PLACED, accelerators=0, cpus=0), UsageError, "nothing to place on"),
    (lambda: tarnawski.solve(PLACED, accelerators=-1, cpus=2), UsageError, "nothing to place on"),
    (lambda: tarnawski.solve(PLACED, variant="best"), UnknownNameError, "no variant 'best'"),
]  # fmt: skip


@pytest.mark.every_case
@pytest.mark.parametrize(("ask", "error", "match"), REFUSALS)
def test_what_does_not_exist_is_refused(ask: Callable[[], object], error: type[Exception], match: str | None) -> None:
    with pytest.raises(error, match=match):
        ask()


STRAIGHT = PipeDreamOptions(straight=True)
LITTLE = PipeDreamOptions(straight=True, memory_bytes=1.0)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("ask", "has_plan"),
    [
        (lambda: pipedream.solve(VGG16, [4], [1e9], LITTLE), False),
        (lambda: pipedream.solve(fan(1), [2], [1.0], STRAIGHT), False),  # more stages than states
        (lambda: pipedream.solve(fan(1), [2], [1.0], STRAIGHT, released=True), True),
        (lambda: bapipe.best_pipeline(random_chain(1, 1), DeviceRow((1.0,) * 3, 1.0), (1,)), False),
        (
            lambda: sparsepipe.best_pipeline([DeviceType("tv", TITANS, 2)], memory_bytes=0.0),
            True,
        ),  # the last keeps none
    ],
)
def test_what_does_not_fit_has_no_plan(ask: Callable[[], RivalAnswer], has_plan: bool) -> None:
    answer = ask()
    assert answer.has_plan == has_plan
    assert (answer.status == INFEASIBLE) != has_plan


def parallel(width: int, length: int) -> TarnawskiInstance:
    """Chains side by side: ``(length + 1) ** width`` ideals."""
    nodes = tuple(
        TarnawskiNode(k, f"n{k}", 1.0 + k % 7, 9.0, 0.1, 1.0, True, False, None) for k in range(width * length)
    )
    edges = tuple((k, k + 1) for k in range(width * length) if (k + 1) % length)
    return TarnawskiInstance("parallel", 3, 0, 1e9, nodes, edges)


def test_out_of_time_or_of_room_for_ideals_there_is_a_plan_and_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    resnet = replace(piper_format.read(PROFILES / "piper" / "resnet.json"), devices=8, memory_bytes=8.0 * 2**30)
    best = tarnawski.solve(parallel(3, 3)).value
    hasty = piper.solve(resnet, time_limit_s=0.0), tarnawski.solve(parallel(4, 6), time_limit_s=0.0)
    monkeypatch.setattr(tarnawski, "_MOST_CELLS", 100)
    few = tarnawski.solve(parallel(3, 3))
    for answer in (*hasty, few):
        assert answer.status == TIME_LIMIT
        assert 0 < answer.bound <= answer.value < inf
    assert few.bound <= best <= few.value
    chain = chain_of(read(PROFILES / "pipedream" / "gnmt.graph.txt"))
    hosts = Hosts(1, 4, 1e9, 1e9)
    found = dapple.best_pipeline(chain, hosts, 16, time_limit_s=0.0)
    assert found.status in (TIME_LIMIT, INFEASIBLE)
    assert found.bound <= dapple.best_pipeline(chain, hosts, 16).value or not found.has_plan
