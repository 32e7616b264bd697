"""The search for degrees beside all ways, on alike GPUs and through pools of unlike ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from planner.extras.export.launchers import LAUNCHERS, launcher_of
from planner.extras.kernels.estimates import TABLE, Estimate
from planner.extras.kernels.links import AlphaBeta
from planner.extras.transformers.cluster import GpuCluster, named_cluster
from planner.extras.transformers.fits import changes, least
from planner.extras.transformers.host import HOSTS
from planner.extras.transformers.memory import memory_of, stage_memory
from planner.extras.transformers.passes import Cost, Layers, Pass, Timed
from planner.extras.transformers.pools import GpuPool, Pools
from planner.extras.transformers.search import search
from planner.extras.transformers.shape import (
    ContextExchange,
    ExpertExchange,
    Fusion,
    Offload,
    ParallelDegrees,
    Recompute,
    Sends,
    Transformer,
    named_transformer,
)
from planner.extras.transformers.space import DegreesSpace
from planner.extras.transformers.step import hops_of, predict
from planner.ir.errors import InfeasibleError, UsageError

SMALL = named_transformer("gpt2-345m")

TINY = Transformer("tiny", 512, 2048, 8, 8, 1024, 512)

FEW = replace(TINY, layers=5, vocab=60000)

ROUTED = replace(
    FEW, layers=3, gated=True, experts=4, top_k=2, expert_ffn=512, shared_ffn=512, first_dense=1, mtp=1,
    parameters_tied=False,
)  # fmt: skip

LONG = replace(
    FEW, layers=3, vocab=4096, seq=4096, kv_heads=4, gated=True, rotary=True, fused_attention=True, dropout=False,
    parameters_tied=False,
)  # fmt: skip
"""Of which ranks may share the tokens of a sample."""

A100, H100, V100, T4 = map(named_cluster, ("a100-dgx", "h100-dgx", "p3.2xlarge", "g4dn.12xlarge"))

ON_HOST = replace(A100, memory_bytes=2.4 * 2**30, host=replace(HOSTS["a100-dgx"], memory_bytes=4 * 2**30))
"""Hosts that keep 0.4 GiB for each device: not all that these would have there."""


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
            of_stages = list(compositions(shape.layers, ways.pipeline)) if ways.interleave == 1 else [()]
            is_by_module = ways.recompute is Recompute.SELECTIVE
            sets = space.module_sets(shape) if is_by_module else (ways.recompute_modules,)
            every = (
                replace(ways, blocks=blocks, recompute_modules=names)
                for blocks, names in itertools.product(of_stages, sets)
            )
            yield from (way for way in every if fits(shape, cluster, way, batch))


@pytest.mark.parametrize(
    ("shape", "cluster", "devices", "batch", "space"),
    [
        (FEW, A100, 5, 12, DegreesSpace(recompute=(Recompute.NONE, Recompute.FULL))),
        (FEW, V100, 4, 12, DegreesSpace()),
        (FEW, replace(A100, memory_bytes=2.9 * 2**30), 4, 8, DegreesSpace(zero=(0, 1))),
        (replace(FEW, layers=4), T4, 6, 6, DegreesSpace(base=ParallelDegrees(sends=Sends.OVERLAPPED))),
        (FEW, V100, 3, 12, DegreesSpace(base=ParallelDegrees(overlap_gradients=True, sends=Sends.BLOCKING))),
        (ROUTED, A100, 5, 8, DegreesSpace(recompute=(Recompute.NONE,))),
        (LONG, A100, 5, 4, DegreesSpace(zero=(0, 1))),
        (LONG, replace(V100, memory_bytes=2.4 * 2**30), 4, 1, DegreesSpace()),
        (FEW, ON_HOST, 4, 8, DegreesSpace(base=ParallelDegrees(offload=Offload.OPTIMIZER))),
        (FEW, ON_HOST, 4, 8, DegreesSpace(base=ParallelDegrees(offload=Offload.ACTIVATIONS), zero=(0, 1))),
        (FEW, ON_HOST, 4, 8, DegreesSpace(base=ParallelDegrees(offload=Offload.PARAMETERS))),
        (replace(ROUTED, fused_attention=True, seq=256), T4, 4, 2, DegreesSpace(zero=(0, 3), micro_batch=(1,))),
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


@pytest.mark.parametrize("seed", range(8))
def test_the_search_equals_enumeration_with_experts_and_shared_samples(seed: int) -> None:
    """Of random small networks of experts, on few devices of hosts of two or four, of little memory or much."""
    shape, cluster, devices, batch, space = problem(random.Random(seed))
    steps_s = [
        predict(shape, cluster, ways, batch).step.seconds for ways in enumerated(shape, cluster, devices, batch, space)
    ]
    if not steps_s:
        with pytest.raises((InfeasibleError, UsageError)):
            search(shape, cluster, devices, batch, space, rivals=0)
        return
    found = search(shape, cluster, devices, batch, space, rivals=0)
    assert found.best.prediction.step.seconds == pytest.approx(min(steps_s), rel=1e-9)
    assert found.gap <= 1e-9
    assert fits(shape, cluster, found.best.ways, batch)


def problem(draw: random.Random) -> tuple[Transformer, GpuCluster, int, int, DegreesSpace]:
    """A network of experts, where it is, its devices and samples, and what may be chosen."""
    shape = replace(
        LONG, layers=draw.randint(1, 3), kv_heads=draw.choice([2, 4, 8]), seq=draw.choice([256, 4096]),
        experts=draw.choice([2, 4, 6]), top_k=draw.randint(1, 2), expert_ffn=draw.choice([256, 1024]),
        shared_ffn=draw.choice([0, 512]), first_dense=draw.randint(0, 1), mtp=draw.choice([0, 0, 1]),
        fused_attention=draw.random() < 0.8,
    )  # fmt: skip
    cluster = replace(
        draw.choice([A100, H100, V100, T4]), per_host=draw.choice([1, 2, 4]),
        memory_bytes=draw.choice([2.0, 2.3, 3.0, 16.0]) * 2**30,
    )  # fmt: skip
    base = ParallelDegrees(expert_exchange=draw.choice(list(ExpertExchange)), overlap_experts=draw.random() < 0.3)
    space = DegreesSpace(
        zero=tuple(draw.sample(range(4), 2)),
        recompute=tuple(draw.sample(list(Recompute), 2)),
        micro_batch=draw.choice([(), (1,)]),
        interleave=draw.choice([(1,), (1, 2)]),
        tensor=draw.choice([(), (2,)]),
        context=draw.choice([(), (), (1, 2)]),
        base=base,
    )
    return shape, cluster, draw.randint(2, 5), draw.choice([1, 2, 4, 6]), space


def test_the_space_has_every_way_to_spread_experts() -> None:
    """Written out: expert ranks among copies, or among tensor ranks too, of powers of two that divide both."""
    every = set()
    for tensor, data, expert, whole in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8), (False, True)):
        ways = ParallelDegrees(tensor, data=data, sequence_parallel=tensor > 1, expert=expert, whole_experts=whole)
        if ways.devices <= 8 and divides(ways, ROUTED) and not (whole and tensor == 1):
            every.add(ways)
    space = DegreesSpace(
        pipeline=(1,), micro_batch=(1,), context=(1,), zero=(0,), interleave=(1,), recompute=(Recompute.NONE,)
    )
    found = {replace(ways, blocks=()) for ways in enumerated(ROUTED, A100, 8, 4, space)}
    assert {ways for ways in found if ways.sequence_parallel or ways.tensor == 1} == every
    assert {ways.expert for ways in every} == {1, 2, 4}
    assert {(2, 1, 2, True), (4, 1, 4, True), (2, 4, 4, False)} <= {
        (ways.tensor, ways.data, ways.expert, ways.whole_experts) for ways in every
    }
    only = {ways.expert_tensor for ways in enumerated(ROUTED, A100, 8, 4, replace(space, expert_tensor=(2,)))}
    assert only == {2}


@pytest.mark.parametrize("seed", range(40))
def test_what_is_computed_again_and_who_shares_slices_equal_exhaustive_enumeration(seed: int) -> None:
    """Five draws of a network, a cluster whose hosts are far apart, memory that is short, and a launcher's limits."""
    draw = random.Random(seed)
    for _ in range(5):
        shape = drawn_shape(draw)
        named = draw.choice(("", "megatron", "torchtitan", "deepspeed"))
        limits = launcher_of(named).limits if named else DegreesSpace().limits
        space = DegreesSpace(
            draw.choice(((1,), (1, 2))), micro_batch=(draw.choice((1, 2, 4)),), interleave=(1, 2), limits=limits,
            zero=draw.choice(((0, 1), (2, 3), (3,))), shards=draw.choice(((), (), (0, 2))),
            base=ParallelDegrees(kernels=draw.choice(list(Fusion)), fp32_gradients=True),
        )  # fmt: skip
        far = AlphaBeta(60e-6, draw.choice((1e9, 1e10)))
        cluster = replace(draw.choice((A100, V100)), per_host=draw.choice((1, 2)), across=far)
        cluster = replace(cluster, memory_bytes=short_of(draw, shape, cluster, space))
        every = list(enumerated(shape, cluster, 4, 8, space))
        if not every:
            with pytest.raises((InfeasibleError, UsageError)):
                search(shape, cluster, 4, 8, space)
            continue
        found = search(shape, cluster, 4, 8, space)
        best_s = min(predict(shape, cluster, ways, 8).step.seconds for ways in every)
        assert found.best.prediction.step.seconds == pytest.approx(best_s, rel=1e-9)
        assert found.gap <= 1e-9
        assert fits(shape, cluster, found.best.ways, 8)


def drawn_shape(draw: random.Random) -> Transformer:
    fused = draw.random() < 0.7
    seq = draw.choice((512, 2048))
    if draw.random() < 0.4:
        return replace(FEW, layers=3, vocab=2048, seq=seq, gated=fused, fused_attention=fused)
    routed = replace(
        ROUTED, layers=draw.choice((1, 2, 3)), seq=seq, vocab=2048, fused_attention=fused,
        first_dense=draw.choice((0, 1)), mtp=draw.choice((0, 1)), shared_ffn=draw.choice((0, 512)),
    )  # fmt: skip
    latent = {"kv_rank": 64, "rope_size": 16, "head_size": 64, "value_size": 48}
    return replace(routed, **latent) if draw.random() < 0.5 else routed


def short_of(draw: random.Random, shape: Transformer, cluster: GpuCluster, space: DegreesSpace) -> float:
    """Memory between what the way needs that holds least, and what it needs with nothing computed again."""
    held = [least(shape, cluster, 4, 8, each) for each in (space, replace(space, recompute=(Recompute.NONE,)))]
    low, high = (fit.memory.total if fit is not None else 2e9 for fit in held)
    return (low + draw.choice((0.01, 0.2, 0.5, 0.8, 1.1)) * (high - low)) / 0.94 + 1.5 * 2**30


def test_slices_within_a_host_are_the_best_where_hosts_are_far_apart() -> None:
    """Gathers stay on the host's links, and one sum a step leaves it; of slices of all copies every pass leaves it."""
    llama = replace(named_transformer("llama3-8b"), seq=2048)
    far = replace(A100, across=AlphaBeta(60e-6, 5e10))
    space = DegreesSpace((1,), (1,), micro_batch=(1,), zero=(3,), recompute=(Recompute.NONE,), context=(1,))
    best = search(llama, far, 32, 128, space).best
    assert best.ways.shards == 8
    whole = search(llama, far, 32, 128, replace(space, shards=(0,))).best
    assert (best.ways.data, whole.ways.data, whole.ways.shards) == (32, 32, 0)
    assert best.prediction.step.seconds < 0.8 * whole.prediction.step.seconds
    small = replace(far, memory_bytes=24e9)
    assert search(llama, small, 32, 128, space).best.ways.shards == 0


def test_the_space_has_every_way_to_share_the_tokens_of_a_sample() -> None:
    """Written out, without the space: all degrees that are powers of two, all exchanges, where the network divides."""
    powers = (1, 2, 4, 8)
    every = set()
    for tensor, context, data, pipeline in itertools.product(powers, powers, (1, 2), (1, 2, 3)):
        for exchange in (ContextExchange.RING, ContextExchange.ALL_TO_ALL)[: 1 if context == 1 else 2]:
            ways = ParallelDegrees(tensor, pipeline, data, context=context, context_exchange=exchange)
            if ways.devices <= 8 and divides(ways, LONG):
                every.add(ways)
    space = DegreesSpace(
        micro_batch=(1,), zero=(0,), interleave=(1,), sequence_parallel=(False,), recompute=(Recompute.NONE,)
    )
    assert {replace(ways, blocks=()) for ways in enumerated(LONG, A100, 8, 2, space)} == every
    assert {ways.context for ways in every} == {1, 2, 4, 8}
    assert {ways.context_exchange for ways in every} == {ContextExchange.RING, ContextExchange.ALL_TO_ALL}


def divides(ways: ParallelDegrees, shape: Transformer) -> bool:
    try:
        ways.check(shape)
    except UsageError:
        return False
    return True


def test_long_samples_are_shared_where_their_memory_does_not_fit_otherwise() -> None:
    long = replace(named_transformer("llama3-8b"), seq=131072)
    space = DegreesSpace(recompute=(Recompute.NONE, Recompute.FULL))
    found = search(long, H100, 64, 16, space, gap=0.02, rivals=0).best
    assert found.ways.context > 1
    assert found.prediction.memory.total <= H100.usable_bytes
    alone = replace(space, context=(1,))
    kept = replace(alone, recompute=(Recompute.NONE,), pipeline=(1,))
    with pytest.raises(InfeasibleError) as told:
        search(long, H100, 64, 16, kept, rivals=0)
    assert any(remedy.startswith("--context ") for remedy in told.value.remedies)
    other = search(long, H100, 64, 16, alone, gap=0.02, rivals=0).best
    assert found.prediction.step.seconds < 0.98 * other.prediction.step.seconds


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_best_for_a_launcher_equals_the_best_of_all_that_it_can_be_told(launcher: str) -> None:
    limits = launcher_of(launcher).limits
    every = list(enumerated(FEW, A100, 4, 12, DegreesSpace()))
    told = [ways for ways in every if not any(limits.refusals(ways))]
    assert told
    assert launcher.startswith("megatron") or len(told) < len(every)
    best_s = min(predict(FEW, A100, ways, 12).step.seconds for ways in told)
    found = search(FEW, A100, 4, 12, DegreesSpace(limits=limits))
    assert found.best.prediction.step.seconds == pytest.approx(best_s, rel=1e-9)
    assert not any(limits.refusals(found.best.ways))
    assert found.gap <= 1e-9


def test_stages_of_unlike_numbers_of_blocks_are_better_where_the_head_is_long() -> None:
    """On four stages of 32 blocks the last has the head beside its blocks: 8 each is not the best."""
    shape = replace(
        TINY, hidden=1024, ffn=4096, seq=512, layers=32, vocab=160_000
    )  # its kernels outlast their launches
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
    steps = [search(FEW, T4, devices, batch, rivals=0).best.prediction.step.seconds for devices in range(1, 14)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < 0.6 * steps[0]


@pytest.mark.parametrize(("devices", "used"), [(1032, 1024), (1000, 960)])
def test_devices_that_do_not_divide_are_left_idle(devices: int, used: int) -> None:
    shape = named_transformer("gpt3-175b")
    space = DegreesSpace(tensor=(4, 8), micro_batch=(1,), sequence_parallel=(True,), recompute=(Recompute.SELECTIVE,))
    fewer, more = (search(shape, A100, number, 1536, space, rivals=0) for number in (used, devices))
    assert more.best.prediction.step.seconds <= fewer.best.prediction.step.seconds
    assert more.gap == 0
    assert more.best.ways.devices <= devices
    assert more.best.prediction.memory.total <= more.usable_bytes


def test_a_search_that_is_stopped_says_how_far_it_may_be_off() -> None:
    best = search(TINY, V100, 4, 12).best.prediction.step.seconds
    hasty = search(TINY, V100, 4, 12, time_limit_s=0.0)
    assert hasty.num_simulated == 1
    assert hasty.bound_s <= best <= hasty.best.prediction.step.seconds
    near = search(TINY, V100, 4, 12, gap=0.5)
    assert near.gap <= 0.5


def test_a_search_whose_time_is_over_before_a_way_fits_takes_the_one_that_holds_least_or_says_that_none_fits() -> None:
    tight = replace(V100, memory_bytes=2.2e9)
    assert search(TINY, tight, 4, 12, time_limit_s=0.0).best.prediction.memory.total <= tight.usable_bytes
    with pytest.raises(InfeasibleError, match="does not fit on") as told:
        search(named_transformer("megatron-1t"), V100, 4, 12, time_limit_s=0.0)
    held = least(named_transformer("megatron-1t"), V100, 4, 12, DegreesSpace())
    assert held is not None
    assert f"at least {held.memory.total / 2**30:.1f} GiB" in told.value.details[0]


def test_no_more_devices_are_advised_than_a_way_may_have() -> None:
    with pytest.raises(InfeasibleError, match="does not fit on"):
        search(
            replace(TINY, hidden=2**22, ffn=2**24), V100, 2**19, 2**19, DegreesSpace(micro_batch=(1,)), time_limit_s=0
        )


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(InfeasibleError, match=r"gpt3-175b does not fit on 8 A100-80GB") as told:
        search(named_transformer("gpt3-175b"), A100, 8, 8)
    assert "usable" in told.value.details[0]
    assert told.value.remedies[0].startswith("--gpus 64 (")
    with pytest.raises(UsageError, match="no way divides"):
        search(SMALL, A100, 8, 8, DegreesSpace(tensor=(3,)))


@pytest.mark.parametrize(("what", "gib"), [(Offload.OPTIMIZER, 4), (Offload.ACTIVATIONS, 0.3)])
def test_what_is_on_the_host_has_room_there(what: Offload, gib: float) -> None:
    host = replace(HOSTS["a100-dgx"], memory_bytes=gib * 2**30)
    space = DegreesSpace(base=ParallelDegrees(offload=what))
    wide = set(enumerated(FEW, A100, 4, 8, space))
    narrow = set(enumerated(FEW, replace(A100, host=host), 4, 8, space))
    assert narrow < wide
    for ways in narrow:
        even = replace(ways, blocks=())
        held = (stage_memory(FEW, even, stage, ways.micro_batches(8)).host for stage in range(ways.pipeline))
        assert max(held) <= host.room_bytes(8)
    with pytest.raises(UsageError, match=r"nothing says how much the hosts of p3.2xlarge keep"):
        search(FEW, V100, 1, 8, space)


@pytest.mark.parametrize(
    ("shape", "space"),
    [
        (FEW, DegreesSpace()),
        (ROUTED, DegreesSpace(zero=(0, 1))),
        (replace(FEW, fused_attention=True), DegreesSpace(tensor=(1,), recompute=(Recompute.NONE,), zero=(3, 2))),
        (ROUTED, DegreesSpace(pipeline=(3,))),
        (LONG, DegreesSpace(zero=(0, 2))),
    ],
)
def test_the_way_that_holds_least_is_the_least_of_all(shape: Transformer, space: DegreesSpace) -> None:
    roomy = replace(A100, memory_bytes=1e15)
    every = enumerated(shape, roomy, 6, 12, space)
    held = min(memory_of(shape, ways, ways.micro_batches(12)).total for ways in every)
    found = least(shape, A100, 6, 12, space)
    assert found is not None
    assert found.memory.total == pytest.approx(held, rel=1e-12)
    assert fits(shape, replace(A100, memory_bytes=1e15), found.ways, 12)


def test_each_change_that_is_told_makes_it_fit_and_is_no_longer_than_need_be() -> None:
    """One at a time; more devices, or shorter samples, half of which do not do."""
    shape = named_transformer("llama3-8b")
    space = DegreesSpace(tensor=(1,), pipeline=(1,), zero=(0,), recompute=(Recompute.NONE,))
    told = changes(shape, A100, 8, 8, space)
    assert {change.opened for change in told} == {("tensor",), ("pipeline",), ("zero",), ("offload",)}
    for change in told:
        assert search(change.shape, A100, change.devices, 8, change.space, gap=0.5, rivals=0).best.ways
    few = replace(A100, memory_bytes=24 * 2**30)
    (more,) = changes(shape, replace(few, host=None), 4, 4, DegreesSpace())
    assert more.devices == 8
    assert more.options(shape, 4) == "--gpus 8"
    long = replace(shape, seq=2**17)
    shorter = changes(long, A100, 8, 8, DegreesSpace(recompute=(Recompute.NONE,)))[-1]
    assert shorter.shape.seq < long.seq
    twice = least(replace(long, seq=2 * shorter.shape.seq), A100, 8, 8, shorter.space)
    assert twice is None or not twice.fits
    for nothing in (more, shorter):
        asked = least(shape if nothing is more else long, few if nothing is more else A100, 4, 4, nothing.space)
        assert asked is not None
        assert not asked.fits


SHAPE = Transformer("tiny", 512, 2048, 8, 4, 8000, 512)

NVLINK = AlphaBeta(10e-6, 50e9)
CARD = AlphaBeta(20e-6, 4e9)


def timed(block_s: float) -> Timed:
    """Passes of so many seconds a sample on one GPU; twice the tensor degree takes 0.6 of it."""

    def passes(seconds: float) -> Pass:
        ahead, back = (Estimate(part * seconds, part * seconds, part * seconds, TABLE) for part in (1 / 3, 2 / 3))
        return Pass(Cost.of("forward", ahead), Cost.of("backward", back))

    layers = {}
    for power, size in itertools.product(range(3), (1, 2)):
        seconds = block_s * 0.6**power * size**0.9
        layers[2**power, size] = Layers(passes(0.1 * seconds), passes(seconds), passes(0.8 * seconds))
    return Timed(layers)


def pool(name: str, devices: int, block_s: float, per_host: int = 2, gib: float = 16) -> GpuPool:
    known = {"of_network": 1.0, "memory_bytes": gib * 2**30, "timed": timed(block_s)}
    return GpuPool(GpuCluster(name, "V100-16GB", per_host, NVLINK, CARD, **known), devices)


def pools(*of: GpuPool, wire: AlphaBeta = CARD, between: Mapping[tuple[str, str], AlphaBeta] | None = None) -> Pools:
    names = [each.cluster.name for each in of]
    links = dict.fromkeys(itertools.permutations(names, 2), wire) | dict(between or {})
    return Pools("unlike", of, links)


def enumerated_through(shape: Transformer, of: Pools, batch: int, space: DegreesSpace) -> Iterator[ParallelDegrees]:
    """Every pipeline through the pools that has room and fits."""
    names = {each.cluster.name: each.devices for each in of.pools}
    seats = [(each.cluster.name, tensor) for each in of.pools for tensor in (1, 2) if tensor <= each.cluster.per_host]
    for base in replace(space, sequence_parallel=(False,)).through_pools(shape, of, batch):
        for stages in range(1, shape.layers + 1):
            for chain in itertools.product(seats, repeat=stages):
                for blocks in compositions(shape.layers, stages):
                    ways = replace(
                        base, pipeline=stages, blocks=blocks, tensor=max(tensor for _, tensor in chain),
                        tensors=tuple(tensor for _, tensor in chain), pools=tuple(name for name, _ in chain),
                    )  # fmt: skip
                    has_room = all(place.stop <= names[place.cluster.name] for place in of.places(ways))
                    if has_room and fits_through(shape, of, ways, batch):
                        yield ways


def fits_through(shape: Transformer, of: Pools, ways: ParallelDegrees, batch: int) -> bool:
    count = ways.micro_batches(batch)
    return all(
        stage_memory(shape, ways, stage, count).total <= of.at(ways, stage).usable_bytes
        for stage in range(ways.pipeline)
    )


@pytest.mark.parametrize("seed", range(10))
def test_no_pipeline_through_two_kinds_is_better_than_what_is_proven(seed: int) -> None:
    """Blocks, GPUs, speeds, memory, links and the batch are drawn; every pipeline is enumerated."""
    draw = random.Random(seed)
    shape = replace(SHAPE, layers=draw.choice((4, 5, 6)), parameters_tied=draw.random() < 0.5)
    of = pools(
        pool("fast", draw.choice((2, 3)), 2e-3, gib=draw.choice((1.68, 1.72, 16))),
        pool("slow", draw.choice((2, 3, 4)), draw.choice((3e-3, 5e-3)), gib=draw.choice((1.68, 1.72, 16))),
        wire=draw.choice((CARD, AlphaBeta(50e-6, 5e8))),
    )
    how = draw.choice(((Recompute.NONE,), (Recompute.FULL,)))
    space = DegreesSpace((1, 2), micro_batch=(draw.choice((1, 2)),), zero=(draw.choice((0, 1)),), recompute=how)
    batch = draw.choice((4, 8, 24))
    every = [predict(shape, of, ways, batch).step.seconds for ways in enumerated_through(shape, of, batch, space)]
    if not every:
        with pytest.raises(InfeasibleError):
            search(shape, of, of.devices, batch, space)
        return
    found = search(shape, of, of.devices, batch, space, rivals=0)
    assert found.gap <= 1e-9
    best = found.best
    assert best.prediction.step.seconds <= min(every) * (1 + 1e-9)
    if len(set(best.ways.pools)) > 1 or best.ways.tensors:
        assert best.prediction.step.seconds == pytest.approx(min(every), rel=1e-9)
        assert fits_through(shape, of, best.ways, batch)
    assert predict(shape, of, best.ways, batch) == best.prediction


def test_both_kinds_work_where_both_are_of_use_and_a_kind_that_is_none_is_idle() -> None:
    shape = replace(SHAPE, layers=12)
    both = search(shape, pools(pool("fast", 2, 2e-3), pool("slow", 2, 4e-3)), 4, 32, rivals=0).best.ways
    assert set(both.pools) == {"fast", "slow"}
    counts = {name: sum(n for of, n in zip(both.pools, both.blocks, strict=True) if of == name) for name in both.pools}
    assert counts["fast"] > counts["slow"]
    alone = search(shape, pools(pool("fast", 2, 2e-3), pool("slow", 2, 400e-3)), 4, 8, rivals=0).best.ways
    assert set(alone.pools) == {"fast"}


@pytest.mark.parametrize("batch", [6, 8])
def test_more_gpus_of_any_kind_are_never_worse(batch: int) -> None:
    steps = {}
    for fast, slow in itertools.product((1, 2, 3, 4), repeat=2):
        of = pools(pool("fast", fast, 2e-3), pool("slow", slow, 4e-3))
        found = search(SHAPE, of, of.devices, batch, rivals=0)
        assert found.gap <= 1e-9
        steps[fast, slow] = found.best.prediction.step.seconds
    for (fast, slow), seconds in steps.items():
        for more in ((fast + 1, slow), (fast, slow + 1)):
            assert steps.get(more, 0.0) <= seconds * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_a_kind_under_two_names_is_one_kind(seed: int) -> None:
    draw = random.Random(seed)
    slow = pool("slow", draw.choice((2, 4)), 5e-3)
    devices = draw.choice((4, 6))
    one = pools(pool("fast", devices, 2e-3), slow).joined()
    two = pools(pool("fast", 2, 2e-3), slow, pool("quick", devices - 2, 2e-3)).joined()
    assert [(each.cluster.name, each.devices) for each in two.pools] == [("fast", devices), ("slow", slow.devices)]
    assert search(SHAPE, one, one.devices, 8, rivals=0) == search(SHAPE, two, two.devices, 8, rivals=0)
    apart = pools(pool("fast", 2, 2e-3), pool("quick", 2, 2e-3), wire=AlphaBeta(50e-6, 1e8)).joined()
    assert len(apart.pools) == 2  # alike, and far from each other


def test_messages_between_zones_take_the_link_that_joins_them() -> None:
    far = AlphaBeta(1e-3, 1e8)
    of = pools(pool("a", 2, 2e-3), pool("b", 2, 2e-3), pool("c", 2, 2e-3), between={("a", "b"): far, ("b", "a"): far})
    ways = ParallelDegrees(pipeline=3, micro_batch=2, tensors=(1, 1, 2), pools=("b", "a", "c"), blocks=(1, 1, 2))
    num_bytes = 2.0 * 2 * SHAPE.seq * SHAPE.hidden
    to_a, to_c = hops_of(SHAPE, of, ways)
    assert to_a.seconds == pytest.approx(1e-3 + num_bytes / 1e8)
    gathered = of.pools[2].cluster.exchange("all_gather", num_bytes, 2).seconds
    assert to_c.seconds == pytest.approx(CARD.alpha_s + num_bytes / CARD.bytes_per_s + gathered)
    near = search(SHAPE, of, of.devices, 8, DegreesSpace(pipeline=(2,), tensor=(1,)), rivals=0).best.ways
    assert set(near.pools) != {"a", "b"}
    apart = pools(pool("a", 1, 2e-3), pool("b", 1, 2e-3), wire=AlphaBeta(1.0, 1e8))
    assert len(set(search(SHAPE, apart, 2, 8, rivals=0).best.ways.pools)) == 1


def test_stages_of_a_pool_share_a_host_where_they_fit() -> None:
    of = pools(pool("a", 8, 2e-3, per_host=4))
    ways = ParallelDegrees(pipeline=4, data=2, tensors=(2, 1, 1, 1), pools=("a",) * 4, blocks=(1, 1, 1, 1))
    assert [(place.start, place.stop) for place in of.places(ways)] == [(8, 12), (4, 6), (2, 4), (0, 2)]
    num_bytes = 2.0 * SHAPE.seq * SHAPE.hidden
    first, second, third = hops_of(SHAPE, of, ways)
    assert third.seconds == pytest.approx(NVLINK.alpha_s + num_bytes / NVLINK.bytes_per_s)
    assert second.seconds == pytest.approx(CARD.alpha_s + 2 * num_bytes / CARD.bytes_per_s)
    assert first.seconds > second.seconds  # and two ranks gather it
