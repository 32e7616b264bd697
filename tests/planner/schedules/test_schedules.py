"""Every schedule: as its picture says, legal on any DAG, and as long as the reference and closed forms say."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from planner.ir.errors import UnknownNameError, UsageError
from planner.ir.schedule import Action, Op, Pipeline, Schedule, StageGraph, StageTimes, Traits
from planner.passes import in_flight, staleness, validate, versions_kept
from planner.schedules import default_names, max_in_flight, names, positions, schedule, traits
from planner.schedules import staleness as claimed_staleness
from tests.planner.random_programs import random_pipeline, random_positions
from tests.planner.schedules.simulated import Simulated, chain, dag, lowered, peaks, uniform

ONE_EACH = tuple(name for name in names() if traits(name).stages_per_position == 1)


def pictures(name: str) -> Iterator[str]:
    yield from (line.strip() for line in documentation(name).splitlines() if "F0 " in line)


def documentation(name: str) -> str:
    return schedule(name).__doc__ or ""


def random_stages(rng: random.Random, num_stages: int) -> StageGraph:
    """A DAG in which every stage but the last is read by a later one."""
    pairs = {(s, rng.randint(s + 1, num_stages - 1)) for s in range(num_stages - 1)}
    pairs |= {(s, t) for s in range(num_stages) for t in range(s + 1, num_stages) if rng.random() < 0.3}
    return dag(num_stages, rng.randint(1, 9), *sorted(pairs))


def ops(name: str) -> int:
    """Compute actions of a micro-batch on a stage."""
    return 1 if not traits(name).trains else 3 if traits(name).splits_backward else 2


def test_the_registry_has_the_default_names_and_refuses_others() -> None:
    assert default_names() == ("1f1b", "1f1b-so", "1f1b-windowed", "gpipe")
    with pytest.raises(UnknownNameError, match="no schedule '1f2b'"):
        schedule("1f2b")


@pytest.mark.parametrize("name", names())
def test_the_picture_in_the_docstring_is_what_the_schedule_does(name: str) -> None:
    drawn = list(pictures(name))
    first = {action for row in drawn for text in row.split() if (action := Action.parse(text)).op is Op.FORWARD}
    num_microbatches, num_stages = (1 + max(getattr(a, what) or 0 for a in first) for what in ("microbatch", "stage"))
    pipeline = chain(name, len(drawn), num_microbatches, num_stages // len(drawn))
    if name == "1f1b-windowed":
        pipeline = replace(pipeline, windows=(3, 4, 1))
    assert [" ".join(map(str, row)) for row in schedule(name)(pipeline).rows] == drawn


@pytest.mark.parametrize("name", names())
def test_what_a_schedule_does_is_what_its_traits_say(name: str) -> None:
    found = traits(name)
    assert isinstance(found, Traits)
    order = schedule(name)(chain(name, 2, 5, found.stages_per_position or 2))
    done = {action.op for row in order.rows for action in row}
    assert (Op.BACKWARD_WEIGHT in done) == found.splits_backward
    assert bool(done - {Op.FORWARD}) == found.trains
    assert (Op.UPDATE in done) == (not found.synchronous)
    assert (order.blocking, order.streams) == (found.blocking, found.streams)
    assert ("This changes the optimisation" in documentation(name)) == (not found.synchronous)
    assert not found.by_default or found == Traits(windowed=found.windowed, by_default=True)


@pytest.mark.cases(60)
@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("seed", range(40))
def test_every_dag_is_legal_and_has_every_action_once(name: str, seed: int) -> None:
    rng = random.Random(seed)
    where = random_positions(rng, name)
    stages = random_stages(rng, len(where) or rng.randint(1, 6))
    pipeline = random_pipeline(rng, name, stages, where)
    order = schedule(name)(pipeline)
    computes = [action for row in order.rows for action in row if action.op is not Op.UPDATE]
    assert len(set(computes)) == len(computes) == ops(name) * stages.num_stages * stages.num_microbatches
    assert all(pipeline.position(a.stage) == position for position, row in enumerate(order.rows) for a in row)
    validate(lowered(pipeline, order), staleness=claimed_staleness(name, pipeline))
    seconds = uniform(rng.random(), rng.random(), rng.random())
    assert Simulated.of(lowered(pipeline, order)).run(seconds, rng.random()).step > 0


@pytest.mark.parametrize("name", ONE_EACH)
def test_a_schedule_of_one_stage_a_position_refuses_two(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} cannot order these stages") as caught:
        schedule(name)(Pipeline(StageGraph.chain(4, 4), (0, 1, 0, 1)))
    assert "position 0 has 2 of the 4 stages" in str(caught.value)


WRONG = [("zb-v", (0, 1, 0, 1)), ("zb-v", (0, 1)), ("interleaved", (0, 1, 1, 0)), ("hanayo", (0, 1, 0, 1))]


@pytest.mark.parametrize(("name", "where"), [*WRONG, ("chimera", (0, 1, 0, 1))])
def test_stages_in_the_wrong_place_are_refused(name: str, where: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=f"{name} cannot order stages at positions {', '.join(map(str, where))}"):
        schedule(name)(Pipeline(StageGraph.chain(len(where), 4), where))
    right = positions(name, 2, 2)
    assert schedule(name)(Pipeline(StageGraph.chain(4, 4), right)).rows


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (2, 7), (4, 8), (4, 13)])
def test_steps_that_the_reference_lacks_are_the_closed_forms(p: int, m: int) -> None:
    """F = I = W = 1; and forwards stream at the pace of the slowest stage."""

    def step(name: str, per_position: int = 1) -> float:
        costs = uniform(*[1.0 / per_position] * 3)
        return Simulated.of(lowered(chain(name, p, m, per_position), name)).run(costs, 0.0).step

    for name in ("1f1b-windowed", "greedy"):
        assert step(name) == (m + p - 1) * 3, name
    assert step("forward") == m + p - 1
    if m >= 2 * p - 1:
        assert step("zb-v", 2) == m * 3 + (p - 1) / 2
    lasts = range(1, p + 1)
    found = Simulated.of(lowered(chain("forward", p, m), "forward")).run(lambda action: lasts[action.stage], 0.5)
    assert found.step == sum(lasts) + (m - 1) * p + (p - 1) * 0.5


CHIMERA = {  # D stages, N micro-batches, B over F: the step in F, by list scheduling of both directions
    (4, 4, 1): 10,
    (4, 8, 1): 18,
    (4, 4, 2): 16,
    (4, 8, 2): 29,
    (6, 6, 1): 16,
    (6, 12, 1): 28,
    (6, 6, 2): 26,
    (6, 12, 2): 47,
    (8, 8, 1): 22,
    (8, 16, 1): 38,
    (8, 8, 2): 36,
    (8, 16, 2): 65,
}


HANAYO = {(4, 1): 18, (4, 2): 15, (8, 1): 38, (8, 2): 31}  # p positions and micro-batches, waves, B = 2 F
FLUSHES = {(4, 4): 7 / 4, (4, 8): 11 / 8, (4, 16): 19 / 16, (8, 8): 15 / 8, (8, 32): 39 / 32}  # p, m: 1F1B over 2BW


@pytest.mark.parametrize(("depth", "count", "backward"), CHIMERA)
def test_chimera_takes_what_an_independent_simulation_of_both_directions_takes(
    depth: int, count: int, backward: int
) -> None:
    program = Simulated.of(lowered(chain("chimera", depth // 2, count // 2, 2), "chimera"))
    found = program.run(uniform(1.0, backward / 2, backward / 2), 0.0).step
    kept = peaks(schedule("chimera")(chain("chimera", depth // 2, count // 2, 2)).rows, [1.0] * depth)
    assert found == CHIMERA[depth, count, backward]
    assert max(kept) <= depth
    if backward == 1:
        assert 1 - 2 * count / found == pytest.approx((depth - 2) / (2 * count + depth - 2))  # as published


@pytest.mark.parametrize(("p", "waves"), HANAYO)
def test_hanayo_takes_what_its_published_bubble_says_and_keeps_no_more_than_a_stage_each(p: int, waves: int) -> None:
    def step(m: int, backward: float) -> float:
        part = 1 / (2 * waves)
        costs = uniform(part, backward * part / 2, backward * part / 2)
        return Simulated.of(lowered(chain("hanayo", p, m, 2 * waves), "hanayo")).run(costs, 0.0).step

    assert step(p, 2.0) == pytest.approx(HANAYO[p, waves])
    assert 1 - 3 * p / HANAYO[p, waves] == pytest.approx((2 * p - 2) / (3 * p * waves + 2 * p - 2))
    assert [step(m, 1.0) for m in (p, 2 * p, 3 * p)] == [2 * m + (p - 1) / waves for m in (p, 2 * p, 3 * p)]
    kept = peaks(schedule("hanayo")(chain("hanayo", p, 3 * p, 2 * waves)).rows, [1 / (2 * waves)] * (2 * p * waves))
    assert max(kept) <= p


@pytest.mark.parametrize(("p", "m"), FLUSHES)
def test_two_versions_of_weights_save_the_flush(p: int, m: int) -> None:
    def step(name: str, count: int) -> float:
        return Simulated.of(lowered(chain(name, p, count), name)).run(uniform(1.0, 1.0, 1.0), 0.0).step

    endless = step("pipedream-2bw", 5 * m) - step("pipedream-2bw", 4 * m)
    assert endless == 3 * m
    assert step("1f1b", m) / endless == FLUSHES[p, m]


WINDOWED = tuple(name for name in names() if traits(name).windowed)


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.cases(30)
@pytest.mark.parametrize("seed", range(30))
def test_no_stage_keeps_more_than_its_window(name: str, seed: int) -> None:
    rng = random.Random(seed)
    stages = random_stages(rng, rng.randint(1, 6))
    windows = tuple(rng.randint(1, stages.num_microbatches + 1) for _ in range(stages.num_stages))
    kept = in_flight(schedule(name)(Pipeline(stages, windows=windows)).rows, stages.num_stages)
    assert all(found <= window for found, window in zip(kept, windows, strict=True))


def test_windows_run_from_1f1b_to_gpipe() -> None:
    stages = StageGraph.chain(4, 6)
    windowed = schedule("1f1b-windowed")
    for name, windows in {"1f1b": (4, 3, 2, 1), "1f1b-so": (7, 5, 3, 1), "gpipe": (6,) * 4, "naive": (1,) * 4}.items():
        assert windowed(Pipeline(stages, windows=windows)) == schedule(name)(Pipeline(stages)), name
    with pytest.raises(ValueError, match="3 windows are given for 4 stages"):
        windowed(Pipeline(stages, windows=(1, 2, 3)))


@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 6), (4, 16)])
def test_asynchronous_schedules_are_as_stale_as_they_claim_and_keep_as_many_versions(p: int, m: int) -> None:
    dream, double = (lowered(chain(name, p, m), name) for name in ("pipedream", "pipedream-2bw"))
    assert staleness(dream) == claimed_staleness("pipedream", chain("pipedream", p, m)) == tuple(range(p - 1, -1, -1))
    assert versions_kept(dream.rows, dream.stages.num_stages) == tuple(range(p, 0, -1))
    assert staleness(double) == claimed_staleness("pipedream-2bw", chain("pipedream-2bw", p, m)) == (1,) * p
    assert set(versions_kept(double.rows, double.stages.num_stages)) <= {1, 2}
    assert staleness(lowered(chain("1f1b", p, m), "1f1b")) == (0,) * p == claimed_staleness("1f1b", chain("1f1b", p, m))


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_without_a_flush_the_period_is_that_of_the_slowest_stage(name: str) -> None:
    def seconds(action: Action) -> float:
        return uniform(*((1.0, 2.0, 1.0) if action.stage == 1 else (1.0, 1.0, 1.0)))(action)

    short, long = (Simulated.of(lowered(chain(name, 4, m), name)).run(seconds, 0.0).step for m in (16, 64))
    assert long - short == 48 * 4.0


@pytest.mark.parametrize("p", [2, 4])
def test_w_is_put_off_no_longer_than_memory_allows(p: int) -> None:
    m = 8
    pipeline = replace(chain("1f1b-2bp", p, m), windows=tuple(p + 1 for _ in range(p)))
    limited = schedule("1f1b-2bp")(pipeline)
    free = schedule("1f1b-2bp")(chain("1f1b-2bp", p, m))
    assert in_flight(limited.rows, p) == (p + 1,) * p
    assert in_flight(free.rows, p) == (m,) * p
    for row in limited.rows:  # nothing but the limit makes a W run: a forward follows it, or the end of the row
        last = max(index for index, action in enumerate(row) if action.op is not Op.BACKWARD_WEIGHT)
        after = [row[i + 1].op for i, action in enumerate(row[:last]) if action.op is Op.BACKWARD_WEIGHT]
        assert set(after) <= {Op.FORWARD, Op.BACKWARD_WEIGHT}


def test_w_fills_gaps_and_makes_none_longer() -> None:
    times = (StageTimes(1.0, 2.0, 1.0),) * 4
    pipeline = Pipeline(StageGraph.chain(4, 8), times=times, transfer=0.5)
    seconds = uniform(1.0, 2.0, 1.0)
    late, filled = (Simulated.of(lowered(pipeline, name)).run(seconds, 0.5) for name in ("1f1b-2bp", "1f1b-2bp-fill"))
    assert filled.step < late.step
    for stage in range(4):
        inputs = [Action(stage, Op.BACKWARD_INPUT, m) for m in range(8)]
        assert all(filled.ends[action] <= late.ends[action] for action in inputs)


def test_greedy_is_1f1b_on_equal_stages_and_beats_it_where_links_are_slow() -> None:
    stages = StageGraph.chain(4, 16)
    assert schedule("greedy")(Pipeline(stages)) == schedule("1f1b")(Pipeline(stages))
    times = (StageTimes(1.0, 1.0, 1.0),) * 4
    slow = Pipeline(stages, times=times, transfer=1.5)
    steps = {
        name: Simulated.of(lowered(slow, name)).run(uniform(1.0, 1.0, 1.0), 1.5).step for name in ("greedy", "1f1b")
    }
    assert steps["greedy"] < 0.75 * steps["1f1b"]


@pytest.mark.parametrize("transfer", [0.0, 0.5])
@pytest.mark.parametrize("windows", [(1, 1, 1, 1), (2, 2, 2, 2), (4, 3, 2, 1), (7, 5, 3, 1)])
def test_greedy_chooses_windows_no_worse_than_these(windows: tuple[int, ...], transfer: float) -> None:
    times = tuple(StageTimes(f, 1.0, f) for f in (1.0, 2.0, 1.0, 1.5))
    pipeline = Pipeline(StageGraph.chain(4, 12), times=times, transfer=transfer)

    def step(pipeline: Pipeline) -> float:
        def seconds(action: Action) -> float:
            return uniform(times[action.stage].forward, 1.0, times[action.stage].forward)(action)

        return Simulated.of(lowered(pipeline, "greedy")).run(seconds, transfer).step

    assert step(pipeline) <= step(replace(pipeline, windows=windows))


def test_greedy_runs_parallel_branches_side_by_side() -> None:
    """Two branches of four stages each and a stage that joins them: as long as a chain of five."""
    edges = [(a, a + 1) for a in (0, 1, 2, 4, 5, 6)] + [(3, 8), (7, 8)]
    branches = dag(9, 8, *edges)
    row = StageGraph.chain(9, 8)
    steps = [
        Simulated.of(lowered(Pipeline(stages), name)).run(uniform(1.0, 1.0, 1.0), 0.0).step
        for stages in (branches, row)
        for name in ("greedy", "1f1b")
    ]
    assert steps == [(8 + 4) * 3, (8 + 4) * 3, (8 + 8) * 3, (8 + 8) * 3]


STATING = [name for name in names() if max_in_flight(name, Pipeline(StageGraph.chain(2, 2))) is not None]


@pytest.mark.parametrize("name", STATING)
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 3), (3, 2), (4, 9)])
def test_a_schedule_that_states_its_micro_batches_in_flight_is_windowed_with_these(
    name: str, num_stages: int, num_microbatches: int
) -> None:
    pipeline = Pipeline(StageGraph.chain(num_stages, num_microbatches))
    stated = max_in_flight(name, pipeline)
    assert stated is not None
    rows = schedule(name)(pipeline).rows
    assert stated == in_flight(rows, num_stages)
    assert rows == schedule("1f1b-windowed")(replace(pipeline, windows=stated)).rows


REFERENCE = Path(__file__).parents[2] / "data" / "reference" / "schedules.csv"


# Name in the reference: (ours, stages on a position, messages block).
OURS = {
    "naive": ("naive", 1, False),
    "gpipe": ("gpipe", 1, False),
    "gpipe_block": ("gpipe", 1, True),
    "gpipe_2bp": ("gpipe-2bp", 1, False),
    "1f1b": ("1f1b", 1, False),
    "1f1b_block": ("1f1b-sno", 1, True),
    "1f1b_so": ("1f1b-so", 1, False),
    "1f1b_2bp": ("1f1b-2bp", 1, False),
    "1f1b_2bp_fill": ("1f1b-2bp-fill", 1, False),
    "interleaved_v2": ("interleaved", 2, False),
    "interleaved_v4": ("interleaved", 4, False),
    "zbh1": ("zb-h1", 1, False),
    "zbh2": ("zb-h2", 1, False),
    "zbv_v2": ("zb-v", 2, False),
}


@cache
def reference() -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {name: [] for name in OURS}
    with REFERENCE.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            found[row["schedule"]].append(row)
    return found


def number(text: str) -> float:
    above, _, below = text.partition("/")
    return float(above) / float(below or 1)


def ordered(name: str, pipeline: Pipeline, blocking: bool) -> Schedule:
    order = schedule(name)(pipeline)
    assert blocking or not order.blocking
    return replace(order, blocking=blocking)


def test_the_reference_has_2280_rows_of_these_schedules() -> None:
    assert sum(map(len, reference().values())) == 2280


@pytest.mark.parametrize("published", OURS)
def test_steps_bubbles_and_peaks_are_the_references(published: str) -> None:
    name, per_position, blocking = OURS[published]
    known: dict[tuple[int, int], tuple[Simulated, list[float]]] = {}
    for row in reference()[published]:
        parts = [number(row[part]) / per_position for part in "FIW"]
        size = (int(row["stages"]), int(row["microbatches"]))
        transfer = number(row["c"])
        if size not in known or traits(name).timed:
            pipeline = chain(name, *size, per_position)
            times = (StageTimes(*parts),) * pipeline.stages.num_stages
            pipeline = replace(pipeline, times=times, transfer=transfer)
            order = ordered(name, pipeline, blocking)
            kept = peaks(order.rows, [1 / per_position] * pipeline.stages.num_stages)
            known[size] = Simulated.of(lowered(pipeline, order)), list(kept)
        simulated, kept_by_rank = known[size]
        found = simulated.run(uniform(*parts), transfer)
        assert found.step == float(row["iter_time"]), row
        assert [found.step - busy for busy in extremes(found.busy)] == [
            pytest.approx(float(row[which]), abs=1e-9) for which in ("max_rank_bubble", "min_rank_bubble")
        ]
        assert kept_by_rank == [float(peak) for peak in row["peak_act_per_rank"].split()], row
        assert max(kept_by_rank) == float(row["peak_act_max"])


def extremes(values: Iterable[float]) -> tuple[float, float]:
    found = tuple(values)
    return min(found), max(found)
