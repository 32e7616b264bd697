from __future__ import annotations

from dataclasses import replace

import pytest

from planner.ir.errors import InfeasibleError, UsageError
from planner.transformers import (
    Cluster,
    Space,
    Transformer,
    memory_of,
    named_cluster,
    named_transformer,
    predict,
    search,
)

SMALL = named_transformer("gpt2-345m")
TINY = Transformer("tiny", 512, 2048, 8, 8, 1024, 512)


@pytest.mark.parametrize(
    ("shape", "cluster", "devices", "batch"),
    [
        (TINY, named_cluster("a100-dgx"), 8, 16),
        (TINY, named_cluster("p3.2xlarge"), 4, 12),
        (SMALL, replace(named_cluster("a100-dgx"), memory_bytes=6 * 2**30), 8, 8),
    ],
)
def test_the_search_equals_exhaustive_enumeration(
    shape: Transformer, cluster: Cluster, devices: int, batch: int
) -> None:
    every = [
        (predict(shape, cluster, ways, batch).step.seconds, ways)
        for ways in Space().ways(shape, cluster, devices, batch)
        if memory_of(shape, ways, ways.micro_batches(batch)).total <= cluster.usable_bytes
    ]
    found = search(shape, cluster, devices, batch)
    assert found.best.prediction.step.seconds == min(seconds for seconds, _ in every)
    assert found.gap == 0
    assert found.num_ways - found.num_large == len(every)
    assert len({str(ways) for _, ways in every}) == len(every)


def test_a_search_that_is_stopped_says_how_far_it_may_be_off() -> None:
    best = search(TINY, named_cluster("p3.2xlarge"), 4, 12).best.prediction.step.seconds
    hasty = search(TINY, named_cluster("p3.2xlarge"), 4, 12, time_limit_s=0.0)
    assert hasty.num_simulated == 1
    assert hasty.bound_s <= best <= hasty.best.prediction.step.seconds
    near = search(TINY, named_cluster("p3.2xlarge"), 4, 12, gap=0.5)
    assert near.gap <= 0.5


def test_175_billion_parameters_on_1024_gpus_are_placed_to_a_proof() -> None:
    found = search(named_transformer("gpt3-175b"), named_cluster("a100-dgx"), 1024, 1536, gap=0.05)
    assert found.gap <= 0.05
    assert found.best.ways.devices == 1024
    assert found.best.prediction.memory.total <= found.usable_bytes


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(InfeasibleError, match=r"gpt3-175b does not fit on 8 A100-80GB") as told:
        search(named_transformer("gpt3-175b"), named_cluster("a100-dgx"), 8, 8)
    assert "usable" in told.value.details[0]
    with pytest.raises(UsageError, match="no way divides"):
        search(SMALL, named_cluster("a100-dgx"), 8, 8, Space(tensor=(3,)))
