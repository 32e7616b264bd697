from __future__ import annotations

import random
from itertools import combinations
from math import inf
from pathlib import Path

import pytest

from planner.extras.baselines.bapipe import (
    AS,
    FBP,
    SNO,
    SO,
    BapipePipeline,
    DeviceRow,
    best_pipeline,
    kept,
    minibatch_s,
)
from planner.extras.baselines.common.problem import ChainCosts, chain_of
from planner.extras.baselines.pipedream import format as graph_format
from planner.ir.errors import UsageError
from tests.planner.extras.baselines.peers.chains import random_chain

PROFILES = Path(__file__).parents[3] / "data" / "profiles" / "pipedream"


def even(layers: int, crossing: float = 0.0) -> ChainCosts:
    """Layers of F = 1 and B = 2 each."""
    names = tuple(f"l{k}" for k in range(layers))
    ones = (1.0,) * layers
    return ChainCosts(names, ones, (2.0,) * layers, ones, ones, (*(crossing,) * (layers - 1), 0.0))


@pytest.mark.parametrize("schedule", [SNO, SO, AS, FBP])
@pytest.mark.parametrize("seed", range(40))
def test_equals_brute_force(seed: int, schedule: str) -> None:
    draw = random.Random(seed)
    chain = random_chain(seed, 6)
    speeds = tuple(draw.choice([1.0, 1.0, 2.5]) for _ in range(draw.randint(1, 4)))
    row = DeviceRow(speeds, draw.uniform(0.5, 8), draw.choice([inf, draw.uniform(4, 40)]))
    counts = (1, 2, 8)
    inner = combinations(range(1, chain.num_layers), len(speeds) - 1)
    expected = min(
        (
            minibatch_s(chain, row, BapipePipeline(schedule, count, tuple(map(float, cuts))))
            for cuts in inner
            for count in counts
        ),
        default=inf,
    )
    assert best_pipeline(chain, row, counts, (schedule,)).value == pytest.approx(expected)


@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 8), (4, 4), (4, 16)])
def test_without_transfers_every_schedule_takes_the_closed_form(p: int, m: int) -> None:
    for schedule in (SNO, SO, AS, FBP):
        value = minibatch_s(
            even(p).scaled(m), DeviceRow((1.0,) * p, 1.0), BapipePipeline(schedule, m, tuple(map(float, range(1, p))))
        )
        assert value == pytest.approx((m + p - 1) * 3.0)


def test_transfers_cost_what_the_table_says() -> None:
    p, m, c = 4, 8, 0.5
    cuts = tuple(map(float, range(1, p)))
    chain, row = even(p, c).scaled(m), DeviceRow((1.0,) * p, 1.0)
    assert minibatch_s(chain, row, BapipePipeline(SO, m, cuts)) == pytest.approx((m + p - 1) * 3 + 2 * (p - 1) * c)
    assert minibatch_s(chain, row, BapipePipeline(SNO, m, cuts)) == pytest.approx(
        (m + p - 1) * 3 + 2 * c * (p + m - 2 - 2)
    )


def test_overlap_costs_twice_the_warm_up() -> None:
    assert [kept(SNO, i, 4, 99) for i in (1, 2, 3, 4)] == [4, 3, 2, 1]
    assert [kept(SO, i, 4, 99) for i in (1, 2, 3, 4)] == [7, 5, 3, 1]
    assert kept(SO, 1, 4, 3) == 3


def test_little_memory_takes_overlap_away() -> None:
    chain = even(4, 0.5).scaled(8)
    wide, narrow = DeviceRow((1.0,) * 4, 1.0), DeviceRow((1.0,) * 4, 1.0, memory_bytes=2 + 4.0)
    assert best_pipeline(chain, wide, (8,)).plan["schedule"] == SO
    assert best_pipeline(chain, narrow, (8,)).plan["schedule"] == SNO
    assert not best_pipeline(chain, DeviceRow((1.0,) * 4, 1.0, memory_bytes=2 + 3.9), (8,)).has_plan


def test_a_cut_inside_a_layer_balances() -> None:
    chain = even(3)
    assert best_pipeline(chain, DeviceRow((1.0, 1.0), 1.0), (1,)).value == 2 * 6.0
    answer = best_pipeline(chain, DeviceRow((1.0, 1.0), 1.0), (1,), intra_layer=True)
    assert answer.value == pytest.approx(2 * 4.5)
    assert answer.plan["cuts"] == [1.5]


def test_slow_links_move_cuts_to_where_little_crosses() -> None:
    chain = ChainCosts(("a", "b", "c", "d"), (1.0,) * 4, (2.0,) * 4, (1.0,) * 4, (1.0,) * 4, (1.0, 100.0, 1.0, 0.0))
    assert best_pipeline(chain, DeviceRow((1.0, 1.0), 1e6), (4,)).plan["cuts"] == [2.0]
    assert best_pipeline(chain, DeviceRow((1.0, 1.0), 10.0), (4,)).plan["cuts"] in ([1.0], [3.0])


def test_data_parallelism_is_the_fall_back() -> None:
    chain = chain_of(graph_format.read(PROFILES / "resnet50.graph.txt"))
    row = DeviceRow((1.0,) * 4, 1e10)
    pipeline, either = best_pipeline(chain, row, (4, 8)), best_pipeline(chain, row, (4, 8), data_parallel=True)
    assert either.plan["schedule"] == "data-parallel"
    assert either.value < pipeline.value


def test_faster_devices_take_more() -> None:
    assert best_pipeline(even(6), DeviceRow((1.0, 2.0), 1.0), (1,)).plan["cuts"] == [2.0]


@pytest.mark.parametrize(
    ("row", "counts"), [(DeviceRow((), 1.0), (1,)), (DeviceRow((1.0,), 0.0), (1,)), (DeviceRow((1.0,), 1.0), ())]
)
def test_no_devices_links_or_micro_batches_are_refused(row: DeviceRow, counts: tuple[int, ...]) -> None:
    with pytest.raises(UsageError):
        best_pipeline(even(2), row, counts)


def test_fewer_layers_than_devices_are_infeasible() -> None:
    assert not best_pipeline(even(2), DeviceRow((1.0,) * 3, 1.0), (1,)).has_plan
