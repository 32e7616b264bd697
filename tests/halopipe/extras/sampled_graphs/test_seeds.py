"""Batches of seeds: every node once a pass, each batch a draw of its own, and the next one known a step ahead."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

import halopipe.data
from cuda_ops.extras.sampling.generated import power_law
from halopipe.extras.sampled_graphs.seeds import seed_batches

GRAPH = power_law(50, degree=4.0)


def test_a_pass_has_every_node_once_with_its_label_and_batches_are_numbered() -> None:
    found = list(islice(seed_batches(GRAPH, 8, 3), 25))
    seeds = torch.cat([nodes for (nodes, _), _ in found])
    for start in (0, 50, 100, 150):
        assert seeds[start : start + 50].sort().values.tolist() == list(range(50))
    assert not torch.equal(seeds[:50], seeds[50:100])
    assert [set(draws.tolist()) for (_, draws), _ in found] == [{number} for number in range(25)]
    assert all(torch.equal(labels, torch.from_numpy(GRAPH.labels)[nodes]) for (nodes, _), labels in found)


def test_the_seed_says_the_order_and_one_pass_ends() -> None:
    again = [list(seed_batches(GRAPH, 8, seed, torch.arange(20), endless=False)) for seed in (1, 1, 2)]
    seeds = [torch.cat([nodes for (nodes, _), _ in batches]).tolist() for batches in again]
    assert seeds[0] == seeds[1] != seeds[2]
    assert sorted(seeds[0]) == list(range(20))
    assert [len(labels) for _, labels in again[0]] == [8, 8, 4]


def test_the_factories_of_generated_graphs_give_their_seeds(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (nodes, draws), labels = next(halopipe.data.small_graph_seeds(16, (16,), 0))
    assert nodes.shape == draws.shape == labels.shape == (16,)
    assert 0 <= int(nodes.min()) <= int(nodes.max()) < 20_000
