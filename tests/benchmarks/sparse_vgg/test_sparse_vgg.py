"""The comparison is a fair one: every plan computes the same, and the slower device is as slow as it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.devices import virtual_device
from benchmarks.devices.ranks import RankStep, Step
from benchmarks.devices.virtual_device import HeldTransport, VirtualDevice, with_devices
from benchmarks.sparse_vgg import __main__ as sparse_vgg
from benchmarks.sparse_vgg.__main__ import QUICK, rows, sums, undisturbed
from benchmarks.sparse_vgg.plans import OURS, SPARSEPIPE, UNRESTRICTED, Case, batches, cases, counted_out, sizes
from benchmarks.sparse_vgg.runs import Network, count_samples
from planner.costs.predict import forecast
from planner.costs.pricing import Pricing
from planner.ir.cluster import MEMORY, SITES, WITHIN_HOST, Collective
from planner.ir.plan import Decision
from planner.ir.problem import Problem
from planner.ir.schedule import Op
from planner.ir.timeline import Span
from tests.planner.sparse_networks import classifier, sparse_profile
from tests.runtime.plans import decide

RESULTS = Path(sparse_vgg.__file__).parents[1] / "results" / "sparse_vgg.json"


class Clock:
    """A machine whose time passes by work and sleep alone."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    def work(self, seconds: float) -> None:
        self.wall_s += seconds
        self.cpu_s += seconds

    def sleep(self, seconds: float) -> None:
        self.wall_s += seconds

    def perf_counter(self) -> float:
        self.wall_s += 2e-7  # who looks at the clock again and again gets on
        return self.wall_s

    def thread_time(self) -> float:
        return self.cpu_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(virtual_device, "time", found)
    return found


def test_work_takes_the_factor_as_long(clock: Clock) -> None:
    device = VirtualDevice(2.5)
    with device.working():
        clock.work(1.0)
    assert clock.wall_s == pytest.approx(2.5, abs=1e-3)
    assert (device.busy_s, device.held_s) == (2.5, pytest.approx(1.5, abs=1e-3))
    device.settle()
    assert device.held_s == pytest.approx(1.5, abs=1e-3)


def test_a_rank_that_had_no_core_is_held_the_less(clock: Clock) -> None:
    device = VirtualDevice(2.5)
    with device.working():
        clock.work(1.0)
        clock.sleep(1.2)
    assert clock.wall_s == pytest.approx(2.5, abs=1e-3)
    assert device.late_s == pytest.approx(0.0, abs=1e-3)
    with device.working():
        clock.work(1.0)
        clock.sleep(3.0)
    assert clock.wall_s == pytest.approx(2.5 + 4.0, abs=1e-3)
    assert device.late_s == pytest.approx(1.5, abs=1e-3)
    with device.working():  # nothing is made up for later
        clock.work(1.0)
    assert clock.wall_s == pytest.approx(2.5 + 4.0 + 2.5, abs=1e-3)


def test_waiting_for_others_is_not_work(clock: Clock) -> None:
    class Wire:
        rank, world_size = 0, 2

        def __getattr__(self, name: str) -> object:
            return lambda *_: SimpleNamespace(wait=lambda: clock.sleep(7.0))

    device = VirtualDevice(2.0)
    transport = HeldTransport(Wire(), device)  # type: ignore[arg-type]
    with device.working():
        clock.work(1.0)
        transport.start_exchange({}, {}).wait()
        clock.work(1.0)
    assert clock.wall_s == pytest.approx(2.0 + 7.0 + 2.0, abs=1e-3)
    assert device.busy_s == 4.0


def test_little_work_adds_up(clock: Clock) -> None:
    device = VirtualDevice(2.0)
    for _ in range(1000):
        with device.working():
            clock.work(1e-5)
    assert device.held_s == pytest.approx(1e-2, abs=5e-4)


def test_a_faster_device_than_the_core_is_refused() -> None:
    with pytest.raises(ValueError, match="faster"):
        VirtualDevice(0.5)


def test_a_message_leaves_when_the_device_would_have_made_it(clock: Clock) -> None:
    sent = []

    class Wire:
        rank, world_size = 0, 2

        def __getattr__(self, name: str) -> object:
            def say(*_: object) -> None:
                sent.append((name, clock.wall_s))
                clock.work(1.0)  # the transport's own

            return say

    device = VirtualDevice(3.0)
    transport = HeldTransport(Wire(), device)
    with device.working():
        clock.work(1.0)
        transport.send("key", 1, ())
        clock.work(0.5)
    assert sent == [("send", pytest.approx(3.0, abs=1e-3))]
    assert clock.wall_s == pytest.approx(3.0 + 1.0 + 1.5, abs=1e-3)
    assert device.busy_s == 4.5


def test_a_slower_device_takes_the_factor_as_long_for_everything() -> None:
    profile = sparse_profile(classifier(), (1.0, 1.0), preparation_s=1e-3)
    slow = with_devices(profile, (1.0, 2.0))
    assert slow.cluster.devices[0] == profile.cluster.devices[0]
    assert slow.cluster.devices[1].kind != profile.cluster.devices[1].kind
    assert Problem(slow, 4).ranks == (0, 1)

    def busy_s(found: object, rank: int) -> float:
        graph = profile.graph
        decision = decide(graph, [], (4,), ranks=[(rank,)])
        return forecast(Pricing.of(found), decision, 0.0).prediction.step_s  # type: ignore[arg-type]

    assert busy_s(slow, 0) == busy_s(profile, 0)
    assert busy_s(slow, 1) == pytest.approx(2 * busy_s(profile, 0))
    parts = profile.measurements[profile.cluster.devices[0].kind][:1]
    slow = with_devices(replace(profile, parts={profile.cluster.devices[0].kind: parts}), (1.0, 2.0))
    slowed = slow.parts[slow.cluster.devices[1].kind]
    assert [part.forward_s for part in slowed] == [2 * part.forward_s for part in parts]


def test_what_is_made_of_shared_sites_and_computed_around_exchanges_is_slower_too() -> None:
    profile = sparse_profile(classifier(), (1.0, 1.0))
    kind = profile.cluster.devices[0].kind
    prepared = tuple(replace(cost, shared_s=3.0) for cost in profile.preparations[kind])
    calls = Collective(SITES, 1, WITHIN_HOST, ((64, 1.0), (128, 2.0))), Collective(MEMORY, 1, WITHIN_HOST, ((64, 1.0),))
    cluster = replace(profile.cluster, collectives=calls)
    slow = with_devices(replace(profile, preparations={kind: prepared}, cluster=cluster), (2.0, 5.0))
    kinds = [device.kind for device in slow.cluster.devices]
    assert [{cost.shared_s for cost in slow.preparations[each]} for each in kinds[:2]] == [{6.0}, {15.0}]
    assert slow.cluster.collectives == (Collective(SITES, 1, WITHIN_HOST, ((64, 5.0), (128, 10.0))), calls[1])


def test_published_sparsepipe_has_one_stage_on_two_devices_and_without_its_restrictions_a_better_plan() -> None:
    profile = with_devices(sparse_profile(classifier(), (1.0, 1.0), preparation_s=1e-6), (1.0, 2.0))
    found = {case.name: case for case in cases(Problem(profile, 4))}
    assert [stage.ranks for stage in found[SPARSEPIPE].decision.stages] == [(0, 1)]
    assert found[SPARSEPIPE].decision.layout_of(0).cuts["sample"] == (0, 2, 4)
    assert found[OURS].predicted_s <= found[UNRESTRICTED].predicted_s <= found[SPARSEPIPE].predicted_s
    assert {len(case.decision.program) for case in found.values()} == {2}


def test_ranks_that_count_out_samples_prepare_just_their_own() -> None:
    profile = sparse_profile(classifier(), (1.0, 1.0), preparation_s=1e-3)
    halves = {(cost.seconds, cost.shared_s) for cost in counted_out(profile, 2).preparations["kind-1"]}
    assert halves == {(0.5e-3, 0.0)}


def test_clouds_vary_and_batches_do_not() -> None:
    found = [sizes(16, 800, 6000, 3224, seed) for seed in range(5)]
    assert all(min(each) >= 800 and max(each) <= 6000 and max(each) > 2 * min(each) for each in found)
    assert all(abs(sum(each) / 16 / 3224 - 1) <= 0.01 for each in found)
    (coordinates, features, counts), (classes,) = batches(1, 4, 7, 10, 60, 30)[0]
    assert coordinates.shape == (4, 60, 3)
    assert features.shape == (4, 60, 1)
    assert int(classes.max()) < 7
    for rows_of, count in zip(coordinates, counts.tolist(), strict=True):
        assert len(rows_of[:count].unique(dim=0)) == count


@pytest.mark.exhaustive("three plans of a sparse network")
def test_every_way_to_share_a_batch_computes_the_same() -> None:
    network = Network(replace(QUICK.source, input_shape=(4, 60, 1)), (1.0, 1.5))
    graph = network.captured.graph
    alone = decide(graph, [], (4,), ranks=[(0,)])
    plans = {
        "alone": (replace(alone, program=(*alone.program, ())), False),
        "shared": (decide(graph, [], (4,), ranks=[(0, 1)], shares=[(2, 2)]), False),
        "counted": (decide(graph, [], (4,), ranks=[(0, 1)], shares=[(2, 2)]), True),
    }
    data = batches(2, 4, 40, 20, 100, 60)
    losses = {}
    for name, (decision, counts) in plans.items():
        steps = network.run(_case(name, decision, counts), data, warm_up=1)
        losses[name] = [step.ranks[0].loss for step in steps]
        assert all(step.seconds > 0 and 1 <= step.balance <= 2 for step in steps)
    assert losses["shared"] == pytest.approx(losses["alone"], rel=1e-5)
    assert losses["counted"] == pytest.approx(losses["alone"], rel=1e-5)


def test_samples_are_counted_out_in_plans_of_one_stage_alone() -> None:
    decision = decide(classifier(), [0.5], (4,), [(0, 1), (2,)], [(2, 2), (4,)])
    with pytest.raises(ValueError, match="one stage alone"):
        count_samples(SimpleNamespace(preparing=object()), decision)  # type: ignore[arg-type]


def test_disturbed_steps_are_left_out_as_long_as_enough_are_left() -> None:
    quiet, loud = [_step(1.0, 0.0)] * 3, [_step(9.0, 0.5), _step(8.0, 0.4)]
    assert undisturbed([*loud, *quiet]) == quiet
    assert undisturbed([*loud, *quiet[:2]]) == [*quiet[:2], loud[1]]


def test_rows_say_what_was_predicted_and_what_was_measured() -> None:
    profile = with_devices(sparse_profile(classifier(), (1.0, 1.0)), (1.0, 2.0))
    planned = cases(Problem(profile, 4))
    steps = {case.name: [_step(2 * case.predicted_s, 0.0)] for case in planned}
    found = {row.name: row for row in rows(planned, steps)}
    assert len(found) == len(list(rows(planned, steps)))
    assert found["ours: error"].value == pytest.approx(100)
    assert not found["ours: error"].holds
    by = {case.name: case.predicted_s for case in planned}
    assert found["SparsePipe / ours, measured"].value == pytest.approx(by[SPARSEPIPE] / by[OURS])


def test_seconds_of_actions_are_summed_without_messages() -> None:
    spans = [Span(0, "0F0", 0.0, 1.0), Span(0, "0SEND_F0>1", 1.0, 9.0), Span(0, "0F1", 9.0, 9.5)]
    assert sums(spans) == {(0, 0, Op.FORWARD): 1.5}


def test_the_committed_rows_hold() -> None:
    found = {row["name"]: row for row in json.loads(RESULTS.read_text(encoding="utf-8"))}
    assert found["SparsePipe / ours, measured"]["value"] > 1
    assert len(found) > 50


def _case(name: str, decision: Decision, counts: bool) -> Case:
    return Case(name, decision, None, counts)  # type: ignore[arg-type]


def _step(seconds: float, delay: float) -> Step:
    rank = RankStep(1.0, 1.0 + seconds, seconds, 0.0, delay, 0.0, (), 0, None)
    return Step((rank, rank))
