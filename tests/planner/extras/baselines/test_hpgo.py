"""HPGO beside what its released source says of a pipeline, and all of its pipelines."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from planner.extras.baselines.hpgo import (
    HALVES,
    ONE_BY_ONE,
    ONE_STAGE,
    TWO_STAGES,
    HpgoMachines,
    HpgoPipeline,
    Planner,
    search,
)
from planner.extras.baselines.pipedream.format import LayerGraph, LayerNode, read, states_of
from tests.planner.extras.baselines.peers.chains import random_chain

PROFILES = Path(__file__).parents[3] / "data" / "profiles" / "pipedream"

Stages = Sequence[tuple[int, set[int]]]
"""(State done behind it, devices by number) of each stage."""


class Released:
    """What HPGO's source says of one pipeline, device by device."""

    def __init__(self, graph: LayerGraph, machines: HpgoMachines, count: int) -> None:
        self.states = states_of(graph)
        self.machines = machines
        self.count = count
        self.done = [0.0, *self.states.compute_s.tolist()]
        self.parameters = [0.0, *self.states.parameter_bytes.tolist()]
        self.num_states = self.states.num_states

    def hosts(self, devices: set[int]) -> set[int]:
        return {device // self.machines.per_host for device in devices}

    def sent_s(self, src: set[int], dst: set[int], size: float) -> float:
        if len(self.hosts(dst)) > 1:
            return size / self.machines.sums_bytes_per_s
        far = [device for device in src if self.hosts({device}) != self.hosts(dst)]
        if far:
            return size / len(src) * len(far) / self.machines.across_bytes_per_s
        return size / self.machines.within_bytes_per_s

    def summed_s(self, devices: set[int], size: float) -> float:
        count = len(devices)
        if count == 1:
            return 0.0
        if len(self.hosts(devices)) > 1:
            return size * 2 * (count - 1) / count / self.machines.sums_bytes_per_s
        return size * 2 * (count - 1) / count / self.machines.within_bytes_per_s / (count // 2)

    def longest_s(self, stages: Stages, times: float) -> float:
        """The longest of stages and cuts of a whole mini-batch; ``times``: how often a cut is crossed."""
        starts = [0, *(end + 1 for end, _ in stages)]
        blocks = [
            (self.done[last] - self.done[first]) / len(devices)
            for (first, last), (_, devices) in zip(pairwise(starts), stages, strict=True)
        ]
        cuts = [
            self.sent_s(src, dst, times * float(self.states.output_bytes[end]))
            for (end, src), (_, dst) in pairwise(stages)
        ]
        return max(*blocks, *cuts, 0.0)

    def estimate_s(self, copies: int, stages: Stages, times: float) -> float:
        count = self.count
        block_s = self.longest_s(stages, times) / count
        seconds = block_s * (count - 1) + self.done[-1] / copies / count
        for (end, src), (_, dst) in pairwise(stages):
            seconds += self.sent_s(src, dst, float(self.states.output_bytes[end]) / copies / count)
        wait_s = 0.0
        first = 0
        for number, (end, devices) in enumerate(stages):
            size = self.parameters[min(end + 2, self.num_states)] - self.parameters[first]
            wait_s = max(wait_s, self.summed_s(devices, size) - number * block_s)
            first = end + 1
        return seconds + wait_s

    def two_stages(self) -> Iterator[float]:
        total = self.machines.devices
        each = self.machines.per_host
        for cut in range(self.num_states - 1):
            for number in range(1, total):
                in_turn = sorted(range(total), key=lambda device: (device % each, device // each))
                for taken in (set(range(number)), set(in_turn[:number])):
                    rest = set(range(total)) - taken
                    yield self.estimate_s(1, [(cut, taken), (self.num_states - 1, rest)], 1.0)


def chain(seed: int, largest: int = 6) -> LayerGraph:
    found = random_chain(seed, largest)
    rows = zip(found.names, found.forward_s, found.backward_s, found.crossing_bytes, found.parameter_bytes, strict=True)
    nodes = tuple(LayerNode(name, "layer", f, b, size, parameters) for name, f, b, size, parameters in rows)
    return LayerGraph("chain", nodes, tuple((k, k + 1) for k in range(len(nodes) - 1)))


def machines(draw: random.Random, shapes: Sequence[tuple[int, int]]) -> HpgoMachines:
    return HpgoMachines(*draw.choice(shapes), draw.uniform(5, 20), draw.uniform(0.5, 2), draw.uniform(0.5, 4))


def by_number(found: HpgoPipeline, shape: HpgoMachines) -> list[tuple[int, set[int]]]:
    """The stages with devices by number, the lowest that are free on each host."""
    free = [list(range(host * shape.per_host, (host + 1) * shape.per_host)) for host in range(shape.hosts)]
    return [
        (end, {mine.pop(0) for mine, count in zip(free, counts, strict=True) for _ in range(count)})
        for end, counts in zip(found.ends, found.devices, strict=True)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_estimates_are_those_of_the_released_source(seed: int) -> None:
    draw = random.Random(seed)
    graph = chain(seed)
    shape = machines(draw, [(1, 4), (2, 2), (2, 3), (4, 1), (3, 2)])
    count = draw.choice([1, 2, 8])
    oracle = Released(graph, shape, count)
    for family, found in Planner(graph, shape, count).pipelines().items():
        expected = oracle.estimate_s(found.copies, by_number(found, shape), 1.0 if family == TWO_STAGES else 2.0)
        assert found.estimate_s == pytest.approx(expected), family


@pytest.mark.parametrize("seed", range(60))
def test_no_two_stages_are_better(seed: int) -> None:
    draw = random.Random(seed)
    graph = chain(seed)
    shape = machines(draw, [(1, 3), (2, 2), (4, 1), (2, 3)])
    count = draw.choice([1, 4])
    found = Planner(graph, shape, count).pipelines().get(TWO_STAGES)
    best = min(Released(graph, shape, count).two_stages(), default=None)
    assert (found is None) == (best is None)
    if found is not None:
        assert found.estimate_s == pytest.approx(best)


@pytest.mark.parametrize("seed", range(60))
def test_no_cuts_of_halves_or_of_one_by_one_have_a_shorter_longest_stage(seed: int) -> None:
    draw = random.Random(seed)
    graph = chain(seed)
    shape = machines(draw, [(1, 4), (4, 1), (1, 2), (3, 1)])
    oracle = Released(graph, shape, 4)
    found = Planner(graph, shape, 4).pipelines()
    last = oracle.num_states - 1
    total = shape.devices
    expected = {ONE_BY_ONE: [{device} for device in range(total)]}
    if total == 4:
        expected[HALVES] = [{0, 1}, {2, 3}]
    for family, groups in expected.items():
        every = [
            oracle.longest_s(list(zip((*cuts, last), groups, strict=True)), 2.0)
            for cuts in combinations(range(last), len(groups) - 1)
        ]
        assert (family in found) == bool(every)
        if every:
            assert oracle.longest_s(by_number(found[family], shape), 2.0) == pytest.approx(min(every))


@pytest.mark.parametrize("name", ["vgg16", "resnet50", "gnmt"])
def test_a_plan_holds_every_layer_once_and_its_devices(name: str) -> None:
    graph = read(PROFILES / f"{name}.graph.txt")
    shape = HpgoMachines(2, 4, 25e9, 1e9, 3e9)
    planner = Planner(graph, shape, 16)
    found = planner.pipelines()
    assert set(found) == {ONE_STAGE, HALVES, ONE_BY_ONE, TWO_STAGES}
    for family, pipeline in found.items():
        layers = [layer for stage in planner.layers(pipeline) for layer in stage]
        assert sorted(layers) == sorted(node.name for node in planner.states.nodes)
        taken = [sum(host) for host in zip(*pipeline.devices, strict=True)]
        assert taken == [4, 4] or (family == ONE_STAGE and max(taken) <= 4)


@pytest.mark.parametrize("shape", [(2, 4), (8, 1)])
@pytest.mark.parametrize("name", ["vgg16", "gnmt"])
def test_the_answer_is_the_best_of_all_numbers_of_pipelines_side_by_side(name: str, shape: tuple[int, int]) -> None:
    graph = read(PROFILES / f"{name}.graph.txt")
    cluster = HpgoMachines(*shape, 25e9, 1e9, 3e9)
    speed_up, found = search(graph, cluster, 1024, 64)
    for copies in range(1, 9):
        count = 1024 // copies // 64
        planner = Planner(graph, cluster, count, 16.0)
        for other in planner.pipelines().values():
            assert other.copies != copies or planner.batch_s / other.estimate_s <= speed_up * (1 + 1e-12)
    assert speed_up <= cluster.devices
    assert speed_up == pytest.approx(16 * states_of(graph).compute_s[-1] / found.estimate_s)
