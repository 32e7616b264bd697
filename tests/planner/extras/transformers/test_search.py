from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from planner.extras.transformers.cluster import GpuCluster, named_cluster
from planner.extras.transformers.memory import memory_of
from planner.extras.transformers.search import search
from planner.extras.transformers.shape import ParallelDegrees, Recompute, Sends, Transformer, named_transformer
from planner.extras.transformers.space import DegreesSpace
from planner.extras.transformers.step import predict
from planner.ir.errors import InfeasibleError, UsageError

SMALL = named_transformer("gpt2-345m")
TINY = Transformer("tiny", 512, 2048, 8, 8, 1024, 512)
FEW = replace(TINY, layers=5, vocab=60000)
A100 = named_cluster("a100-dgx")


def compositions(blocks: int, stages: int) -> Iterator[tuple[int, ...]]:
    if stages == 1:
        yield (blocks,)
        return
    for first in range(1, blocks - stages + 2):
        yield from ((first, *rest) for rest in compositions(blocks - first, stages - 1))


def fits(shape: Transformer, cluster: GpuCluster, ways: ParallelDegrees, batch: int) -> bool:
    return memory_of(shape, ways, ways.micro_batches(batch)).total <= cluster.usable_bytes


def enumerated(
    shape: Transformer, cluster: GpuCluster, devices: int, batch: int, space: DegreesSpace
) -> Iterator[ParallelDegrees]:
    """Every way of the space, with blocks in all numbers, that fits."""
    for division in space.divisions(shape, cluster, devices, batch):
        for ways in space.details(shape, cluster, division, batch):
            of_stages = compositions(shape.layers, ways.pipeline) if ways.interleave == 1 else [()]
            every = (replace(ways, blocks=blocks) for blocks in of_stages)
            yield from (way for way in every if fits(shape, cluster, way, batch))


@pytest.mark.parametrize(
    ("shape", "cluster", "devices", "batch", "space"),
    [
        (FEW, A100, 5, 12, DegreesSpace(recompute=(Recompute.NONE, Recompute.FULL))),
        (FEW, named_cluster("p3.2xlarge"), 4, 12, DegreesSpace()),
        (FEW, replace(A100, memory_bytes=2.9 * 2**30), 4, 8, DegreesSpace(zero=(0, 1))),
        (
            replace(FEW, layers=4),
            named_cluster("g4dn.12xlarge"),
            6,
            6,
            DegreesSpace(base=ParallelDegrees(sends=Sends.OVERLAPPED)),
        ),
        (
            FEW,
            named_cluster("p3.2xlarge"),
            3,
            12,
            DegreesSpace(base=ParallelDegrees(overlap_gradients=True, sends=Sends.BLOCKING)),
        ),
    ],
)
def test_the_search_equals_exhaustive_enumeration(
    shape: Transformer, cluster: GpuCluster, devices: int, batch: int, space: DegreesSpace
) -> None:
    every = list(enumerated(shape, cluster, devices, batch, space))
    best_s = min(predict(shape, cluster, ways, batch).step.seconds for ways in every)
    found = search(shape, cluster, devices, batch, space)
    assert found.best.prediction.step.seconds == pytest.approx(best_s, rel=1e-9)
    assert found.gap <= 1e-9
    assert fits(shape, cluster, found.best.ways, batch)
    used = {ways.devices for ways in every}
    assert min(used) < devices  # some of them leave devices idle


def test_stages_of_unlike_numbers_of_blocks_are_better_where_the_head_is_long() -> None:
    """On four stages of 32 blocks the last has the head beside its blocks: 8 each is not the best."""
    shape = replace(TINY, layers=32, vocab=40000)
    space = DegreesSpace(tensor=(1,), pipeline=(4,), micro_batch=(1,), zero=(0,), interleave=(1,))
    found = search(shape, A100, 4, 32, space)
    assert len(set(found.best.ways.blocks)) > 1
    assert sum(found.best.ways.blocks) == 32
    even = predict(shape, A100, replace(found.best.ways, blocks=()), 32)
    assert found.best.prediction.step.seconds < 0.98 * even.step.seconds
    assert f"({', '.join(map(str, found.best.ways.blocks))} blocks)" in str(found.best.ways)


@pytest.mark.parametrize("batch", [8, 60])
def test_more_devices_are_never_worse(batch: int) -> None:
    """Also where the batch, or a host, is not divided by their number."""
    cluster = named_cluster("g4dn.12xlarge")
    steps = [search(FEW, cluster, devices, batch, rivals=0).best.prediction.step.seconds for devices in range(1, 14)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < steps[0] / 2


@pytest.mark.parametrize(("devices", "used"), [(1032, 1024), (1000, 960)])
def test_devices_that_do_not_divide_are_left_idle(devices: int, used: int) -> None:
    shape = named_transformer("gpt3-175b")
    space = DegreesSpace(tensor=(4, 8), micro_batch=(1,), sequence_parallel=(True,), recompute=(Recompute.SELECTIVE,))
    fewer, more = (search(shape, A100, number, 1536, space, rivals=0) for number in (used, devices))
    assert more.best.prediction.step.seconds <= fewer.best.prediction.step.seconds
    assert more.gap == 0
    assert more.best.ways.devices <= devices


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
        search(SMALL, named_cluster("a100-dgx"), 8, 8, DegreesSpace(tensor=(3,)))
