"""Whole networks whose every layer has a layout of its own, at random: the numbers of one device, in float64."""

from __future__ import annotations

import random
from functools import cache

import pytest

from tests.runtime.divided import at_random
from tests.runtime.engines import Network, network_of, trained
from tests.runtime.plans import Trained, assert_equal, train_serially

NETWORKS = {
    "resnet": ("resnet:resnet18", (3, 3, 32, 24), {"num_classes": 5, "width": 4}),
    "unet": ("unet3d:unet3d", (2, 3, 8, 16, 8), {"num_classes": 3, "width": 2, "depth": 2}),
    "mesh": ("mesh_tangling:mesh_tangling_128", (2, 18, 32, 48), {"width": 1 / 64}),
    "cosmoflow": ("cosmoflow:cosmoflow", (2, 2, 16, 16, 16), {"levels": 2, "width": 2, "dropout": 0.3}),
    "gpt": ("gpt:gpt", (3, 6), {"vocabulary": 17, "width": 8, "layers": 2, "heads": 2, "context": 9}),
}
FAMILIES = {
    "space": ("spatial",),
    "samples and space": ("sample", "spatial"),
    "all": ("sample", "spatial", "channel"),
}


@cache
def network(name: str) -> Network:
    return network_of(*NETWORKS[name])


def micro_batches(name: str) -> tuple[int, ...]:
    """The second is smaller: its parts are cut otherwise, and some are empty."""
    samples = NETWORKS[name][1][0]
    return samples, samples - 1


@cache
def serial(name: str) -> Trained:
    return train_serially(network(name)[0], micro_batches(name), 2)


@pytest.mark.parametrize("name", ["resnet", "unet", "mesh"])
@pytest.mark.parametrize("families", FAMILIES)
@pytest.mark.parametrize("seed", range(2))
def test_a_layout_for_every_layer(name: str, families: str, seed: int) -> None:
    rng = random.Random(seed)
    ranks, changes = rng.choice([2, 3, 4, 6]), rng.choice([0.1, 0.5, 1.0])
    graph = network(name)[1].graph
    decision = at_random(graph, ranks, FAMILIES[families], rng, micro_batches(name), changes=changes)
    assert_equal(trained(network(name), decision, 2), serial(name))


@pytest.mark.parametrize("name", ["mesh", "unet"])
def test_ranks_may_work_beyond_their_parts(name: str) -> None:
    rng = random.Random(7)
    graph = network(name)[1].graph
    decision = at_random(graph, 4, FAMILIES["samples and space"], rng, micro_batches(name), halo_depth=3, changes=0.2)
    assert any(placement.margin for placement in decision.layers.values())
    assert_equal(trained(network(name), decision, 2), serial(name))


def test_features_heads_and_time_of_a_transformer() -> None:
    rng = random.Random(3)
    decision = at_random(network("gpt")[1].graph, 4, FAMILIES["all"], rng, micro_batches("gpt"), changes=0.5)
    assert_equal(trained(network("gpt"), decision, 2), serial("gpt"))


def test_dropout_drops_the_same_wherever_a_volume_is_cut() -> None:
    graph = network("cosmoflow")[1].graph
    batches = micro_batches("cosmoflow")
    one, many = (
        trained(network("cosmoflow"), at_random(graph, ranks, FAMILIES["all"], random.Random(ranks), batches), 2)
        for ranks in (2, 4)
    )
    assert_equal(one, many)
