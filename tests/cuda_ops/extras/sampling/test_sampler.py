"""Sampled neighbours are neighbours, as many as there should be, each as likely, and the same whoever asks for them."""

from __future__ import annotations

import copy
import math
import pickle
from collections import Counter
from pathlib import Path

import networkx
import numpy as np
import pytest
import torch

from cuda_ops.extras.sampling.draws import CompiledDraws, PlainDraws, base_of, fastest
from cuda_ops.extras.sampling.generated import power_law
from cuda_ops.extras.sampling.graph import GraphError, NodeGraph
from cuda_ops.extras.sampling.sampler import NeighbourSampler, SampledLevels, joined

GRAPH = power_law(400, seed=3, degree=8.0, channels=3, classes=2)
NX = networkx.DiGraph()
NX.add_nodes_from(range(GRAPH.num_nodes))
NX.add_edges_from(
    (int(source), target)
    for target in range(GRAPH.num_nodes)
    for source in GRAPH.neighbours[GRAPH.starts[target] : GRAPH.starts[target + 1]]
)
SEEDS = np.array([0, 399, 17, 0, 200])
BOTH = pytest.mark.parametrize("draws", [PlainDraws(), fastest()], ids=["plain", "compiled"])


def nodes_of(levels: SampledLevels, seeds: np.ndarray) -> list[np.ndarray]:
    """By level, from 0 on, the node of each row: a target is the source that its block says."""
    found = [levels.nodes]
    for _, own in levels.blocks:
        found.append(found[-1][own])
    assert (found[-1] == seeds).all()
    return found


def test_there_is_a_compiled_version_here() -> None:
    assert isinstance(fastest(), CompiledDraws)


@BOTH
@pytest.mark.parametrize("fanouts", [(3, 2), (-1, 5, 1), (1000,)], ids=str)
@pytest.mark.parametrize("self_loops", [False, True])
def test_each_target_gets_its_fan_out_of_distinct_neighbours_or_all_it_has(
    draws: PlainDraws, fanouts: tuple[int, ...], self_loops: bool
) -> None:
    levels = NeighbourSampler(GRAPH, fanouts, 7, self_loops, draws).levels(SEEDS, 2)
    nodes = nodes_of(levels, SEEDS)
    assert [len(each) for each in nodes] == list(levels.sizes)
    for level, (fanout, (edges, _)) in enumerate(zip(fanouts, levels.blocks, strict=True)):
        assert len(set(nodes[level])) == len(nodes[level])
        for row, target in enumerate(nodes[level + 1]):
            sources = nodes[level][edges[0, edges[1] == row]].tolist()
            neighbours = set(NX.predecessors(int(target)))
            count = len(neighbours) if fanout < 0 else min(fanout, len(neighbours))
            if self_loops:
                assert sources.pop() == target
            assert len(sources) == len(set(sources)) == count
            assert set(sources) <= neighbours


@pytest.mark.parametrize("seed", range(4))
def test_the_compiled_version_gives_the_bits_of_the_plain_one(seed: int) -> None:
    draw = np.random.default_rng(seed)
    seeds = draw.integers(0, GRAPH.num_nodes, 50)
    fanouts = tuple(int(each) for each in draw.choice([-1, 1, 2, 5, 9], 3))
    found = [
        NeighbourSampler(GRAPH, fanouts, seed, bool(seed % 2), d).levels(seeds, seed) for d in (PlainDraws(), fastest())
    ]
    assert (found[0].nodes == found[1].nodes).all()
    for ours, plain in zip(found[1].blocks, found[0].blocks, strict=True):
        assert all((a == b).all() for a, b in zip(ours, plain, strict=True))
    assert (fastest().gather(GRAPH.features, found[0].nodes) == GRAPH.features[found[0].nodes]).all()


@pytest.mark.parametrize(("degree", "fanout"), [(7, 1), (7, 3), (12, 11)])
def test_every_subset_and_every_neighbour_is_as_likely_as_another(degree: int, fanout: int) -> None:
    """Over fixed draws; a chi-square test that a fair sampler passes with a probability of 99.9 %."""
    from scipy.stats import chisquare  # late: it takes longer to load than the rest

    star = NodeGraph.of_edges(
        np.arange(1, degree + 1), np.zeros(degree, int), np.zeros((degree + 1, 1)), np.zeros(degree + 1)
    )
    counts: Counter[int] = Counter()
    pairs: Counter[tuple[int, ...]] = Counter()
    for draw in range(4000):
        _, found = fastest().sample(star, np.zeros(1, np.int64), fanout, base_of(5, draw, 0), with_self=False)
        counts.update(found.tolist())
        pairs[tuple(sorted(found.tolist()))] += 1
    assert chisquare([counts[node] for node in range(1, degree + 1)]).pvalue > 1e-3
    number = math.comb(degree, fanout)
    assert chisquare([*pairs.values(), *[0] * (number - len(pairs))]).pvalue > 1e-3


def test_nodes_seeds_layers_and_draws_are_independent_of_one_another() -> None:
    """Of a node of 100 neighbours, 5 drawn twice share none or one as often as independent ones: 0.25 on average."""
    star = NodeGraph.of_edges(np.tile(np.arange(2, 102), 2), np.repeat([0, 1], 100), np.zeros((102, 1)), np.zeros(102))

    def drawn(node: int, *base: int) -> set[int]:
        return set(fastest().sample(star, np.array([node]), 5, base_of(*base), with_self=False)[1].tolist())

    for other in (
        lambda n: drawn(1, 0, n, 0),
        lambda n: drawn(0, 1, n, 0),
        lambda n: drawn(0, 0, n, 1),
        lambda n: drawn(0, 0, n + 1, 0),
    ):
        shared = [len(drawn(0, 0, n, 0) & other(n)) for n in range(1000)]
        assert 0.19 < np.mean(shared) < 0.31


@BOTH
def test_parts_of_the_seeds_get_the_neighbours_that_all_of_them_get(draws: PlainDraws) -> None:
    sampler = NeighbourSampler(GRAPH, (4, 3), 1, draws=draws)
    seeds = np.arange(60)
    whole = sampler.levels(seeds, 9)
    parts = [sampler.levels(seeds[a:b], 9) for a, b in ((0, 7), (7, 7), (7, 60))]

    def trees(levels: SampledLevels) -> list[set[tuple[int, int]]]:
        """Of each layer, which node sends to which."""
        nodes = nodes_of(levels, seeds)
        return [
            {(int(nodes[at][a]), int(nodes[at + 1][b])) for a, b in edges.T}
            for at, (edges, _) in enumerate(levels.blocks)
        ]

    side_by_side = joined(parts)
    assert trees(side_by_side) == trees(whole)
    assert side_by_side.sizes[0] > whole.sizes[0]  # what parts have in common is there twice
    assert trees(sampler.levels(seeds, 10)) != trees(whole)


def test_expected_work_is_the_mean_of_what_is_sampled_where_nothing_is_shared() -> None:
    sampler = NeighbourSampler(GRAPH, (3, 2))
    for node in (0, 50, 399):
        counted = []
        for draw in range(300):
            levels = sampler.levels(np.array([node]), draw)
            nodes = nodes_of(levels, np.array([node]))
            taken = np.minimum(GRAPH.degrees, 3)
            counted.append(levels.blocks[1][0].shape[1] + taken[nodes[1]].sum())
        assert sampler.work(np.array([node]))[0] / 16 == pytest.approx(np.mean(counted), rel=0.05)


def test_a_graph_is_mapped_from_its_files_and_goes_to_other_processes_by_name(tmp_path: Path) -> None:
    opened = GRAPH.save(tmp_path / "graph")
    assert isinstance(opened.features, np.memmap)
    assert len(pickle.dumps(opened)) < 1000
    again = pickle.loads(pickle.dumps(NeighbourSampler(opened, (2,), 3)))
    assert (again.levels(SEEDS, 1).nodes == NeighbourSampler(GRAPH, (2,), 3).levels(SEEDS, 1).nodes).all()
    assert copy.deepcopy(opened) is opened
    assert (GRAPH.save(tmp_path / "graph").neighbours == GRAPH.neighbours).all()  # it is there: left as it is
    batch = pickle.loads(pickle.dumps(NeighbourSampler(GRAPH, (2, 2)).sample([3, 4], 8)))
    assert torch.equal(batch.x, torch.from_numpy(GRAPH.features[batch.sampler.levels(np.array([3, 4]), 8).nodes]))


def test_what_is_no_graph_or_no_node_is_refused() -> None:
    with pytest.raises(GraphError, match="seed 400 is no node; the graph has 400"):
        NeighbourSampler(GRAPH, (2,)).levels(np.array([0, 400]), 0)
    with pytest.raises(GraphError, match="fan-outs"):
        NeighbourSampler(GRAPH, (2, 0))
    with pytest.raises(GraphError, match="join nodes 0 to 5, there are 5"):
        NodeGraph.of_edges([0, 1], [0, 5], np.zeros((5, 1)), np.zeros(5))
    with pytest.raises(GraphError, match="4 features of 5 nodes"):
        NodeGraph.of_edges([0], [1], np.zeros((4, 1)), np.zeros(5))
    for starts, neighbours in (([0, 3, 1, 2], [0, 1]), ([0, 0, 1, 2], [1, 3]), ([0, 0, 1, 2], [-1, 1])):
        arrays = np.array(starts, np.int64), np.array(neighbours, np.int32)
        odd = NodeGraph(*arrays, np.zeros((3, 1)), np.zeros(3, np.int64))
        with pytest.raises(GraphError, match="damaged"):
            NeighbourSampler(odd, (-1,), draws=fastest()).levels(np.arange(3), 0)
