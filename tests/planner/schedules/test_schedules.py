"""Every schedule: as its picture says, legal on any DAG it can order, and as long as its closed form says."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from planner.ir.errors import UnknownNameError, UsageError
from planner.ir.schedule import Action, Op, Pipeline, StageGraph, StageTimes, Traits
from planner.passes import in_flight, staleness, validate, versions_kept
from planner.schedules import default_names, max_in_flight, names, positions, schedule, traits
from planner.schedules import staleness as claimed_staleness
from tests.planner.passes.occupancy import peaks
from tests.planner.random_programs import random_pipeline, random_positions
from tests.planner.schedules.simulated import Simulated, chain, dag, lowered, uniform

PUBLISHED = {
    *("1f1b-as", "fbp-as"),
    *("1f1b", "1f1b-2bp", "1f1b-2bp-fill", "1f1b-sno", "1f1b-so", "1f1b-windowed", "forward", "gpipe", "gpipe-2bp"),
    *("chimera", "greedy", "hanayo", "interleaved", "naive", "pipedream", "pipedream-2bw", "zb-h1", "zb-h2", "zb-v"),
}
ONE_EACH = tuple(name for name in names() if traits(name).stages_per_position == 1)
SPLIT = tuple(name for name in names() if traits(name).splits_backward)


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


def test_the_registry_has_the_published_names() -> None:
    assert set(names()) == PUBLISHED
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


@pytest.mark.parametrize("name", ONE_EACH)
def test_rows_stand_by_position(name: str) -> None:
    order = schedule(name)(Pipeline(StageGraph.chain(3, 4), (2, 0, 1)))
    assert [row[0].stage for row in order.rows] == [1, 2, 0]


WRONG = [("zb-v", (0, 1, 0, 1)), ("zb-v", (0, 1)), ("interleaved", (0, 1, 1, 0)), ("hanayo", (0, 1, 0, 1))]


@pytest.mark.parametrize(("name", "where"), [*WRONG, ("chimera", (0, 1, 0, 1))])
def test_stages_in_the_wrong_place_are_refused(name: str, where: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=f"{name} cannot order stages at positions {', '.join(map(str, where))}"):
        schedule(name)(Pipeline(StageGraph.chain(len(where), 4), where))
    right = positions(name, 2, 2)
    assert schedule(name)(Pipeline(StageGraph.chain(4, 4), right)).rows


SIZES = [(1, 3), (2, 2), (2, 7), (4, 8), (4, 13)]


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("forward", "inputs", "weights"), [(1.0, 1.0, 1.0), (2.0, 2.0, 1.0), (4.0, 5.0, 3.0)])
def test_steps_are_the_closed_forms(p: int, m: int, forward: float, inputs: float, weights: float) -> None:
    seconds, t = uniform(forward, inputs, weights), forward + inputs + weights

    def step(name: str, per_position: int = 1) -> float:
        costs = uniform(forward / per_position, inputs / per_position, weights / per_position)
        return Simulated.of(lowered(chain(name, p, m, per_position), name)).run(costs, 0.0).step

    for name in ("gpipe", "1f1b", "1f1b-so", "1f1b-windowed", "1f1b-sno", "greedy"):
        assert step(name) == (m + p - 1) * t, name
    assert step("naive") == m * p * t
    assert step("gpipe-2bp") == (m + p - 1) * (forward + inputs) + m * weights
    assert step("forward") == (m + p - 1) * forward
    if m % p == 0:
        assert step("interleaved", 2) == m * t + (p - 1) * t / 2
    if m >= p:
        assert step("zb-h1") == m * t + (p - 1) * max(forward, forward + inputs - weights)
    if m >= 2 * p - 1:
        assert step("zb-h2") == m * t + (p - 1) * max(forward, forward + inputs - 2 * weights)
        if forward == inputs == weights:
            assert step("zb-v", 2) == m * t + (p - 1) * forward / 2
    assert Simulated.of(lowered(chain("gpipe", p, m), "gpipe")).run(seconds, 0.0).busy == (m * t,) * p


@pytest.mark.parametrize("waves", [1, 2, 4])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_waves_divide_the_bubble(p: int, waves: int) -> None:
    """Of as many micro-batches as positions also where a backward lasts twice as long as a forward."""

    def step(m: int, backward: float) -> float:
        part = 1 / (2 * waves)
        costs = uniform(part, backward * part / 2, backward * part / 2)
        return Simulated.of(lowered(chain("hanayo", p, m, 2 * waves), "hanayo")).run(costs, 0.0).step

    assert [step(m, 1.0) for m in (p, 2 * p, 3 * p)] == [2 * m + (p - 1) / waves for m in (p, 2 * p, 3 * p)]
    assert 1 - 3 * p / step(p, 2.0) == pytest.approx((2 * p - 2) / (3 * p * waves + 2 * p - 2))
    kept = peaks(schedule("hanayo")(chain("hanayo", p, 3 * p, 2 * waves)).rows, [1 / (2 * waves)] * (2 * p * waves))
    assert max(kept) <= p


@pytest.mark.parametrize("depth", [2, 4, 6, 8, 16])
def test_chimera_has_the_published_bubbles_and_activations(depth: int) -> None:
    """Of D stages and N = D micro-batches, which are D / 2 pairs, one half down and the other up (Li and Hoefler)."""
    pipeline = chain("chimera", depth // 2, depth // 2, 2)
    program = Simulated.of(lowered(pipeline, "chimera"))
    equal, twice = (program.run(uniform(1.0, each, each), 0.0).step for each in (0.5, 1.0))
    assert 1 - 2 * depth / equal == pytest.approx((depth - 2) / (2 * depth + depth - 2))
    assert 1 - 3 * depth / twice == pytest.approx((depth - 2) / (1.5 * depth + depth - 2))
    kept = peaks(schedule("chimera")(pipeline).rows, [1.0] * depth)
    assert (min(kept), max(kept)) == (depth / 2 + 1, depth)


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
    assert found == CHIMERA[depth, count, backward]
    if backward == 1:
        assert 1 - 2 * count / found == pytest.approx((depth - 2) / (2 * count + depth - 2))  # as published


@pytest.mark.parametrize(("p", "waves"), HANAYO)
def test_hanayo_takes_what_its_published_bubble_says(p: int, waves: int) -> None:
    part = 1 / (2 * waves)
    found = Simulated.of(lowered(chain("hanayo", p, p, 2 * waves), "hanayo")).run(uniform(part, part, part), 0.0).step
    assert found == pytest.approx(HANAYO[p, waves])
    assert 1 - 3 * p / found == pytest.approx((2 * p - 2) / (3 * p * waves + 2 * p - 2))


@pytest.mark.parametrize(("p", "m"), FLUSHES)
def test_two_versions_of_weights_save_the_flush(p: int, m: int) -> None:
    def step(name: str, count: int) -> float:
        return Simulated.of(lowered(chain(name, p, count), name)).run(uniform(1.0, 1.0, 1.0), 0.0).step

    endless = step("pipedream-2bw", 5 * m) - step("pipedream-2bw", 4 * m)
    assert endless == 3 * m
    assert step("1f1b", m) / endless == FLUSHES[p, m]


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("c", [0.25, 1.0])
def test_transfers_add_what_the_closed_forms_say(p: int, m: int, c: float) -> None:
    extra = {
        "gpipe": 2 * (p - 1),
        "1f1b": 2 * (p + m - 2 - -(-(m - 1) // p)) if p > 1 else 0,
        "1f1b-so": 2 * (p - 1),
    }
    for name, hops in extra.items():
        found = Simulated.of(lowered(chain(name, p, m), name)).run(uniform(1.0, 1.0, 1.0), c).step
        assert found == pytest.approx((m + p - 1) * 3 + hops * c), name


@pytest.mark.parametrize("m", [1, 3, 8])
@pytest.mark.parametrize("p", [1, 2, 5])
def test_what_each_schedule_keeps(p: int, m: int) -> None:
    kept = {
        "1f1b": [p - s for s in range(p)],
        "1f1b-so": [2 * (p - s) - 1 for s in range(p)],
        "gpipe": [m] * p,
        "naive": [1] * p,
        "zb-h1": [p] * p,
        "zb-h2": [2 * p - 1] * p,
        "1f1b-2bp": [m] * p,
        "forward": [0] * p,
    }
    for name, most in kept.items():
        assert in_flight(schedule(name)(chain(name, p, m)).rows, p) == tuple(min(m, each) for each in most), name


def test_1f1b_warms_up_by_the_longest_path() -> None:
    branches = dag(5, 9, (0, 1), (1, 2), (2, 4), (0, 3), (3, 4))
    assert in_flight(schedule("1f1b")(Pipeline(branches)).rows, 5) == (4, 3, 2, 2, 1)
    assert in_flight(schedule("1f1b-so")(Pipeline(branches)).rows, 5) == (7, 5, 3, 3, 1)


WINDOWED = tuple(name for name in names() if traits(name).windowed)


@pytest.mark.parametrize("name", WINDOWED)
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


def test_windows_that_would_deadlock_are_lowered_along_edges() -> None:
    stages = dag(5, 9, (0, 1), (1, 4), (0, 2), (2, 3), (3, 4))
    order = schedule("1f1b-windowed")(Pipeline(stages, windows=(5, 3, 9, 2, 4)))
    assert in_flight(order.rows, 5) == (5, 3, 5, 2, 2)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("m", range(1, 14))
def test_interleaving_takes_any_number_of_micro_batches_and_stages(p: int, m: int) -> None:
    for num_stages in (p, 2 * p, 2 * p + 1, 3 * p):
        pipeline = Pipeline(StageGraph.chain(num_stages, m), tuple(s % p for s in range(num_stages)))
        program = lowered(pipeline, "interleaved")
        validate(program)
        if num_stages == 2 * p:
            twice_as_long = (m + p - 1) * 6
            assert Simulated.of(program).run(uniform(1.0, 1.0, 1.0), 0.0).step <= twice_as_long


def test_interleaving_one_stage_each_is_1f1b() -> None:
    stages = StageGraph.chain(4, 7)
    assert schedule("interleaved")(Pipeline(stages)) == schedule("1f1b")(Pipeline(stages))


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
    limited, free = schedule("1f1b-2bp")(pipeline), schedule("1f1b-2bp")(chain("1f1b-2bp", p, m))
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
    branches, row = dag(9, 8, *edges), StageGraph.chain(9, 8)
    steps = [
        Simulated.of(lowered(Pipeline(stages), name)).run(uniform(1.0, 1.0, 1.0), 0.0).step
        for stages in (branches, row)
        for name in ("greedy", "1f1b")
    ]
    assert steps == [(8 + 4) * 3, (8 + 4) * 3, (8 + 8) * 3, (8 + 8) * 3]


def test_forwards_stream_at_the_pace_of_the_slowest_stage() -> None:
    lasts = (1.0, 5.0, 2.0, 3.0)
    program = lowered(chain("forward", 4, 6), "forward")
    found = Simulated.of(program).run(lambda action: lasts[action.stage], 0.5)
    assert found.step == sum(lasts) + 5 * max(lasts) + 3 * 0.5


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
