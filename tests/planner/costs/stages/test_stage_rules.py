"""Rules of stages: sums behind a backward, inputs that hosts prepare, and the least that shares of a group take."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chains import chain_profile, cluster
from planner.costs.communication.links import NetworkPrices
from planner.costs.layers.cost_table import Array
from planner.costs.stages.gradient_overlap import Bucket, buckets_of_parts, exposed_s, least_reduction_s, least_sums_s
from planner.costs.stages.input_pipeline import Preparations, input_bytes, spare_cores
from planner.costs.stages.shared_bound import GroupTimes, MemberTimes, Times
from planner.ir.cluster import ALL_REDUCE, MEASURED, WITHIN_HOST, Cluster, Collective, DeviceSpec, Link
from planner.ir.profile import PreparationCost
from planner.ir.program import BUCKET_BYTES, in_buckets
from runtime.optim.gradient_buckets import GradientBuckets
from tests.planner.sparse_networks import classifier, sparse_profile


@dataclass(frozen=True, slots=True)
class Made:
    """A parameter's gradient: its bytes, and how much of the backward is left when it is complete."""

    num_bytes: int
    left_s: float


def waited_s(
    gradients: Sequence[Made],
    sum_s: Callable[[int], float],
    core_s: Callable[[int], float],
) -> float:
    """Seconds between the end of a backward and that of the last sum.

    Args:
        gradients: in the order of the model.
        core_s: what moving so many bytes takes from the core that computes.
    """
    buckets: list[list[Made]] = []
    for made in reversed(gradients):
        fits = buckets and made.num_bytes + sum(other.num_bytes for other in buckets[-1]) <= BUCKET_BYTES
        if fits:
            buckets[-1].append(made)
        else:
            buckets.append([made])
    sizes = [sum(made.num_bytes for made in bucket) for bucket in buckets]
    if len(buckets) <= 1:
        return sum(sum_s(size) for size in sizes)
    # The end of the backward is at 0; a sum starts when its gradients are complete and the one before has ended.
    starts = [-min(made.left_s for made in bucket) for bucket in buckets]
    clock = starts[0]
    for start, size in zip(starts, sizes, strict=True):
        clock = max(clock, start) + sum_s(size)
    total_s = sum(sum_s(size) for size in sizes)
    moving_s = sum(core_s(size) for size in sizes)
    hidden = min(1.0, -starts[0] / total_s) if total_s > 0 else 0.0
    return max(0.0, clock) + moving_s * hidden


def nothing(_: int) -> float:
    return 0.0


def test_putting_gradients_together_takes_the_core_whatever_hides_the_sums() -> None:
    left = {1: 5.0, 0: 0.0}
    found = [Bucket(2, 1, 2), Bucket(3, 0)]  # the second is a single gradient, which is not copied

    def copied_s(num_bytes: int) -> float:
        return num_bytes * 0.25

    several = exposed_s(found, left.__getitem__, lambda size: size / 2, nothing, copied_s)
    assert several == pytest.approx(1.5 + 0.5)
    assert exposed_s([Bucket(4, 0, 4)], left.__getitem__, float, nothing, copied_s) == pytest.approx(4.0 + 1.0)
    assert exposed_s([], left.__getitem__, float, nothing, copied_s) == 0.0


@given(
    st.lists(st.tuples(st.integers(1, 3 * BUCKET_BYTES), st.floats(0.0, 1.0)), min_size=1, max_size=12),
    st.floats(1e-9, 1e-7),
    st.floats(0.0, 1e-8),
)
def test_equal_to_a_clock_that_goes_bucket_by_bucket(
    layers: list[tuple[int, float]], s_per_byte: float, core_s_per_byte: float
) -> None:
    sizes, seconds = zip(*layers, strict=True)
    ends = np.concatenate(([0.0], np.cumsum(seconds)))
    found = [Bucket(sum(sizes[place] for place in places), min(places)) for places in in_buckets(sizes)]

    def sum_s(size: int) -> float:
        return 1e-4 + size * s_per_byte

    def core_s(size: int) -> float:
        return size * core_s_per_byte

    ours = exposed_s(found, lambda layer: float(ends[layer]), sum_s, core_s, nothing)
    made = [Made(size, float(end)) for size, end in zip(sizes, ends[:-1], strict=True)]
    assert ours == pytest.approx(waited_s(made, sum_s, core_s), rel=1e-9, abs=1e-12)


@given(
    st.lists(st.tuples(st.integers(1, 3 * BUCKET_BYTES), st.floats(0.0, 0.2)), min_size=1, max_size=12),
    st.lists(st.floats(1e-4, 1.0), min_size=3, max_size=3),
)
def test_no_stage_waits_less_than_the_bound(layers: list[tuple[int, float]], seconds: list[float]) -> None:
    points = tuple(zip((1024, 1 << 20, 1 << 26), sorted(seconds), strict=True))
    devices = tuple(DeviceSpec(f"n0/cpu{rank}", "cpu", "n0", 1) for rank in range(2))
    link = Link(1e-4, 1e9, evidence=MEASURED)
    cluster = Cluster(devices, {WITHIN_HOST: link}, (Collective(ALL_REDUCE, 2, WITHIN_HOST, points),))
    network = NetworkPrices(cluster)
    backward = [seconds for _, seconds in layers]
    profile = replace(chain_profile(len(layers), parameter_bytes=[size for size, _ in layers]), cluster=cluster)
    sizes = [parameter.num_bytes for parameter in profile.graph.parameters.values()]
    ends = np.concatenate(([0.0], np.cumsum(backward)))
    found = [Bucket(sum(sizes[place] for place in places), min(places)) for places in in_buckets(sizes)]
    exact = exposed_s(found, lambda k: float(ends[k]), lambda n: network.all_reduce_s((0, 1), n), nothing, nothing)
    total = np.array([float(sum(sizes))])
    behind_s = np.array([ends[-1]])
    sums_s = least_sums_s(profile, lambda some: network.all_reduces_s((0, 1), some)).sum()
    assert sums_s <= sum(network.all_reduce_s((0, 1), bucket.num_bytes) for bucket in found) * (1 + 1e-9)
    assert least_reduction_s(network, (0, 1), total, sums_s, behind_s, 0)[0] <= exact + 1e-12


@pytest.mark.parametrize("seed", range(6))
def test_parts_are_put_together_as_the_runtime_does_it(seed: int) -> None:
    """Of three ranks all have some parameters alike, two of them others, and of some each has a part of its own."""
    draw = random.Random(seed)
    graph = chain_profile(9, 3, parameter_bytes=[draw.choice((1, 2, 5)) << 20 for _ in range(9)]).graph
    layers = [k for k, layer in enumerate(graph.layers) if layer.parameters]
    weights = []
    others = {}
    sizes = []
    found = list[torch.nn.Parameter]()
    starts = {group: lambda flat: pytest.fail("nothing is summed here") for group in ("all", "two")}
    for k in layers:
        (name,) = graph.layers[k].parameters
        extent = graph.parameters[name].num_bytes // 4
        kind = draw.choice(("all", "two", "own"))
        cuts = {"all": [(0, 1)] * 3, "two": [(0, 0.5)] * 2 + [(0.5, 1)], "own": [(0, 0.25), (0.25, 0.5), (0.5, 1)]}[
            kind
        ]
        weights.append((np.array([[[round(a * extent), round(b * extent)]] for a, b in cuts]),))
        part = torch.empty(weights[-1][0][0, 0, 1], device="meta")
        found.append(torch.nn.Parameter(part, requires_grad=True))
        sizes.append(part.nbytes)
        others[found[-1]] = starts.get(kind)
    expected = GradientBuckets(found, None, others=others).buckets
    seen = buckets_of_parts(graph, layers, weights, 0)
    assert [bucket.num_bytes for bucket in seen] == [sum(p.nbytes for p in bucket) for bucket in expected]
    first = dict(zip(found, layers, strict=True))
    assert [bucket.first_layer for bucket in seen] == [min(first[p] for p in bucket) for bucket in expected]
    assert all(bucket.copied_bytes in (0, bucket.num_bytes) for bucket in seen)


def test_inputs_take_what_was_measured_of_the_nearest_size_and_all_of_it_in_the_program() -> None:
    graph = classifier(samples=4)
    maps = ("neighbours_0_0", "reverse_0_0")
    made = (
        PreparationCost("collate", ("lengths",), (), 1.0, 1, 0.5),
        PreparationCost("maps", maps, ("collate",), 8.0, 4),
        PreparationCost("maps", maps, ("collate",), 3.0, 1),
        PreparationCost("unread", ("reverse_1_1",), (), 100.0, 1),
    )
    preparations = Preparations(replace(sparse_profile(graph), preparations={"kind-1": made}))
    for shared in (False, True):
        assert preparations.seconds("kind-1", [0], 1, shared=shared) == 1.0 + 3.0
        assert preparations.seconds("kind-1", [0], 4, shared=shared) == 4 * 1.0 + 8.0
        assert preparations.before_program_s("kind-1", 4, shared=shared) == 0
        assert preparations.before_program_bytes(4, shared=shared) == 0
    assert preparations.seconds("kind-1", [1], 4) == 0  # it reads none
    assert preparations.num_bytes([0], 2, parts=2) == sum(input_bytes(graph, name, 2) for name in maps)


def test_spare_cores_are_taken_by_turns_and_never_from_another_host() -> None:
    assert spare_cores(cluster((1.0,) * 4), 4) == (None,) * 4
    assert spare_cores(cluster((1.0,) * 5), 3) == (3, 4, 3)
    assert spare_cores(cluster((1.0,) * 4, ("n0", "n1", "n0", "n0")), 2) == (2, None)
    parts = tuple(replace(device, core_share=0.0) for device in cluster((1.0,) * 3).devices)
    assert spare_cores(replace(cluster((1.0,) * 3), devices=parts), 2) == (None, None)


LAYERS = 3


class Chain:
    """Cuts before, between and behind layers."""

    def sums(self, by_layer: Array) -> Array:
        return np.concatenate(([0.0], np.cumsum(by_layer)))

    def largest(self, by_layer: Array) -> Array:
        raise NotImplementedError(by_layer)


def member(draw: np.random.Generator, most: int) -> MemberTimes:
    """Times that grow, sometimes by nothing."""
    more = draw.uniform(0, 1, (most, LAYERS)) * draw.choice([0, 1], (most, LAYERS))
    times = Times.of(np.cumsum(more, axis=0) + draw.uniform(0, 1, (1, LAYERS)), Chain())
    return MemberTimes(times, times, times, times, np.zeros(LAYERS + 1), 1.0)


def work(member: MemberTimes) -> Times:
    return member.work


def all_shares(size: int, count: int) -> Iterator[tuple[int, ...]]:
    return (shares for shares in product(range(1, size + 1), repeat=count) if sum(shares) == size)


@pytest.mark.parametrize("seed", range(60))
def test_no_shares_have_a_lesser_largest_time_nor_a_lesser_mean(seed: int) -> None:
    draw = np.random.default_rng(seed)
    counts = tuple(int(count) for count in draw.integers(1, 3, draw.integers(1, 4)))
    size = int(draw.integers(sum(counts), sum(counts) + 4))
    tops = [np.full((LAYERS + 1, LAYERS + 1), draw.integers(1, size + 1)) for _ in counts]
    group = GroupTimes(
        tuple(member(draw, size) for _ in counts),
        counts,
        size,
        tuple(top if draw.random() < 0.5 else None for top in tops),
    )
    first, last = (np.array(ends) for ends in zip(*((a, b) for b in range(LAYERS + 1) for a in range(b)), strict=True))
    seconds, level = group.levels(work, first, last)
    mean = group.mean(work, first, last)
    sorts = [sort for sort, count in enumerate(counts) for _ in range(count)]
    for place, (a, b) in enumerate(zip(first, last, strict=True)):

        def takes(sort: int, samples: int, a: int = int(a), b: int = int(b)) -> float:
            most = group.most[sort]
            if most is not None and samples > most[a, b]:
                return float("inf")
            sums = group.members[sort].work.sums
            return float(sums[samples - 1, b] - sums[samples - 1, a])

        every = [list(map(takes, sorts, shares)) for shares in all_shares(size, len(sorts))]
        least_s = min(map(max, every))
        assert seconds[place] == pytest.approx(least_s)
        for shares, own in zip(all_shares(size, len(sorts)), every, strict=True):
            assert sum(n * s for n, s in zip(shares, own, strict=True)) / size >= mean[place] - 1e-9
        if np.isfinite(least_s):
            shares = group.shares(level[:, place].tolist())
            assert sum(shares) == size
            assert max(map(takes, sorts, shares)) == pytest.approx(least_s)
