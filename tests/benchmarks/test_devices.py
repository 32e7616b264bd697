"""Virtual and steady devices are as slow as they say, and SparsePipe's plan is compared with ours on such devices."""

from __future__ import annotations

import json
import multiprocessing
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.devices import virtual_device
from benchmarks.devices.ranks import RankStep, Step, on_ranks
from benchmarks.devices.virtual_device import REHEARSALS, HeldTransport, SteadyDevice, VirtualDevice, with_devices
from benchmarks.sparse_vgg import __main__ as sparse_vgg
from benchmarks.sparse_vgg.__main__ import (
    OURS,
    QUICK,
    SPARSEPIPE,
    UNRESTRICTED,
    Case,
    Network,
    batches,
    cases,
    count_samples,
    counted_out,
    rows,
    undisturbed,
)
from planner.costs.predict import forecast
from planner.costs.pricing import Pricing
from planner.ir.cluster import MEMORY, SITES, WITHIN_HOST, Collective
from planner.ir.plan import Decision
from planner.ir.problem import Problem
from planner.ir.profile import Profile
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


class Wire:
    """A transport of two ranks that does whatever it is asked by one function, of the name of what is asked."""

    rank = 1
    world_size = 2

    def __init__(self, does: object) -> None:
        self._does = does

    def __getattr__(self, name: str) -> object:
        return lambda *_: self._does(name)  # type: ignore[operator]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(virtual_device, "time", found)
    return found


def test_work_takes_the_factor_as_long_and_a_rank_that_had_no_core_is_held_the_less(clock: Clock) -> None:
    device = VirtualDevice(2.5)
    wall_s = 0.0
    for slept_s, took_s, late_s in ((0.0, 2.5, 0.0), (1.2, 2.5, 0.0), (3.0, 4.0, 1.5), (0.0, 2.5, 1.5)):
        with device.working():
            clock.work(1.0)
            clock.sleep(slept_s)
        wall_s += took_s
        assert clock.wall_s == pytest.approx(wall_s, abs=2e-3)
        assert device.late_s == pytest.approx(late_s, abs=1e-3)  # nothing is made up for later
    assert device.busy_s == 10.0
    with pytest.raises(ValueError, match="faster"):
        VirtualDevice(0.5)


def test_a_message_leaves_when_the_device_would_have_made_it_and_waiting_for_others_is_not_work(clock: Clock) -> None:
    sent = []

    def does(name: str) -> object:
        sent.append((name, clock.wall_s))
        clock.work(1.0)  # the transport's own
        return None if name == "send" else SimpleNamespace(wait=lambda: clock.sleep(7.0))

    device = VirtualDevice(3.0)
    transport = HeldTransport(Wire(does), device)  # type: ignore[arg-type]
    with device.working():
        clock.work(1.0)
        transport.send("key", 1, ())
        clock.work(0.5)
        transport.start_exchange({}, {}).wait()
        clock.work(1.0)
    assert sent == [("send", pytest.approx(3.0, abs=1e-3)), ("start_exchange", pytest.approx(5.5, abs=1e-3))]
    assert clock.wall_s == pytest.approx(3.0 + 1.0 + 1.5 + 1.0 + 7.0 + 3.0, abs=2e-3)
    assert device.busy_s == 7.5


def step(device: SteadyDevice, *pieces: float) -> None:
    device.begin_step()
    with device.working():
        for number, seconds in enumerate(pieces):
            if number:
                with device.talking():
                    pass
            end_s = time.thread_time() + seconds
            while time.thread_time() < end_s:
                pass


@pytest.fixture
def device() -> SteadyDevice:
    return SteadyDevice(2.0, multiprocessing.get_context("fork").Lock())


def test_after_its_rehearsals_a_piece_takes_what_it_took_there(device: SteadyDevice) -> None:
    for _ in range(REHEARSALS):
        step(device, 0.002, 0.004)
    before_s = device.busy_s
    step(device, 0.0, 0.0)  # whatever it takes now
    assert sum(device._seconds) >= 0.006
    assert device.busy_s - before_s == pytest.approx(2 * sum(device._seconds))
    assert device.held_s > 0
    later = SteadyDevice(1.0, multiprocessing.get_context("fork").Lock(), [[1.0]] * 5 * REHEARSALS)
    for _ in range(REHEARSALS):
        step(later, 0.0)
    later.begin_step()
    assert later._seconds == pytest.approx([1.0])  # rehearsals of earlier runs count as much


def test_who_rehearses_is_alone_but_for_while_it_talks_and_afterwards_ranks_work_side_by_side(
    device: SteadyDevice,
) -> None:
    device.begin_step()
    assert not device.mirrors
    with device.working():
        assert device.mirrors
        assert not device._alone.acquire(block=False)
        with device.talking():
            assert device._alone.acquire(block=False)
            device._alone.release()
        with device.mirroring():
            assert not device._alone.acquire(block=False)
    with device.working(shared=True):
        assert not device.mirrors
    device._steps.clear()
    for _ in range(REHEARSALS):
        step(device, 0.0)
    device.begin_step()
    with device.working():
        assert device._alone.acquire(block=False)
        assert not device.mirrors


@pytest.mark.parametrize(
    ("rehearsed", "then", "fault"),
    [
        ([2] * (REHEARSALS - 1) + [1], 1, r"steps have \[1, 2\] pieces"),
        ([1] * REHEARSALS, 2, "more than 1 pieces"),
    ],
)
def test_steps_of_other_pieces_are_refused(device: SteadyDevice, rehearsed: list[int], then: int, fault: str) -> None:
    for pieces in rehearsed:
        step(device, *[0.0] * pieces)
    with pytest.raises(RuntimeError, match=fault):
        step(device, *[0.0] * then)


def test_what_ranks_do_together_amid_work_is_really_done_after_the_rehearsals_alone(device: SteadyDevice) -> None:
    done = list[str]()
    held = HeldTransport(Wire(done.append), device)
    tensor = torch.ones(2)  # type: ignore[arg-type]
    for _ in range(REHEARSALS + 1):
        assert done == []
        device.begin_step()
        with device.working():
            held.all_reduce(tensor, (0, 1))
    assert done == ["all_reduce"]
    assert tensor.tolist() == [2.0**REHEARSALS] * 2


def test_what_a_rank_raises_is_told() -> None:
    def work(transport: object) -> None:
        if transport.rank == 2:  # type: ignore[attr-defined]
            raise ValueError("so it is")

    with pytest.raises(RuntimeError, match=r"rank 2:\n(.|\n)*ValueError: so it is"):
        on_ranks(3, work)


def unlike(**costs: float) -> Profile:
    return with_devices(sparse_profile(classifier(), (1.0, 1.0), **costs), (1.0, 2.0))


def test_a_slower_device_takes_the_factor_as_long_for_everything() -> None:
    profile = sparse_profile(classifier(), (1.0, 1.0), preparation_s=1e-3)
    kind = profile.cluster.devices[0].kind
    prepared = tuple(replace(cost, shared_s=3.0) for cost in profile.preparations[kind])
    calls = Collective(SITES, 1, WITHIN_HOST, ((64, 1.0), (128, 2.0))), Collective(MEMORY, 1, WITHIN_HOST, ((64, 1.0),))
    parts = profile.measurements[kind][:1]
    slow = with_devices(profile, (1.0, 2.0))
    assert slow.cluster.devices[0] == profile.cluster.devices[0]

    def busy_s(found: Profile, rank: int) -> float:
        decision = decide(profile.graph, [], (4,), ranks=[(rank,)])
        return forecast(Pricing.of(found), decision, 0.0).prediction.step_s

    assert busy_s(slow, 0) == busy_s(profile, 0)
    assert busy_s(slow, 1) == pytest.approx(2 * busy_s(profile, 0))
    cluster = replace(profile.cluster, collectives=calls)
    slow = with_devices(
        replace(profile, preparations={kind: prepared}, parts={kind: parts}, cluster=cluster), (2.0, 5.0)
    )
    kinds = [each.kind for each in slow.cluster.devices]
    assert [{cost.shared_s for cost in slow.preparations[each]} for each in kinds] == [{6.0}, {15.0}]
    assert [part.forward_s for part in slow.parts[kinds[1]]] == [5 * part.forward_s for part in parts]
    assert slow.cluster.collectives == (Collective(SITES, 1, WITHIN_HOST, ((64, 5.0), (128, 10.0))), calls[1])


def test_published_sparsepipe_has_one_stage_on_two_devices_and_without_its_restrictions_a_better_plan() -> None:
    found = {case.name: case for case in cases(Problem(unlike(preparation_s=1e-6), 4, confidence=0.0))}
    assert [stage.ranks for stage in found[SPARSEPIPE].decision.stages] == [(0, 1)]
    assert found[SPARSEPIPE].decision.layout_of(0).cuts["sample"] == (0, 2, 4)
    assert found[OURS].predicted_s <= found[UNRESTRICTED].predicted_s <= found[SPARSEPIPE].predicted_s
    assert {len(case.decision.program) for case in found.values()} == {2}


def test_ranks_that_count_out_samples_prepare_just_their_own_in_plans_of_one_stage() -> None:
    profile = sparse_profile(classifier(), (1.0, 1.0), preparation_s=1e-3)
    halves = {(cost.seconds, cost.shared_s) for cost in counted_out(profile, 2).preparations["kind-1"]}
    assert halves == {(0.5e-3, 0.0)}
    decision = decide(classifier(), [0.5], (4,), [(0, 1), (2,)], [(2, 2), (4,)])
    with pytest.raises(ValueError, match="one stage alone"):
        count_samples(SimpleNamespace(preparing=object()), decision)  # type: ignore[arg-type]


@pytest.mark.exhaustive("three plans of a sparse network")
def test_every_way_to_share_a_batch_computes_the_same() -> None:
    network = Network(replace(QUICK.source, input_shape=(4, 60, 1)), (1.0, 1.5))
    graph = network.captured.graph
    alone = decide(graph, [], (4,), ranks=[(0,)])
    shared = decide(graph, [], (4,), ranks=[(0, 1)], shares=[(2, 2)])
    plans: dict[str, tuple[Decision, bool]] = {
        "alone": (replace(alone, program=(*alone.program, ())), False),
        "shared": (shared, False),
        "counted": (shared, True),
    }
    data = batches(2, 4, 40, 20, 100, 60)
    losses = {}
    for name, (decision, counts) in plans.items():
        steps = network.run(Case(name, decision, None, counts), data, warm_up=1)  # type: ignore[arg-type]
        losses[name] = [each.ranks[0].loss for each in steps]
        assert all(each.seconds > 0 and 1 <= each.balance <= 2 for each in steps)
    assert losses["shared"] == pytest.approx(losses["alone"], rel=1e-5)
    assert losses["counted"] == pytest.approx(losses["alone"], rel=1e-5)


def took(seconds: float, delay: float) -> Step:
    rank = RankStep(1.0, 1.0 + seconds, seconds, 0.0, delay, 0.0, (), 0, None)
    return Step((rank, rank))


def test_disturbed_steps_are_left_out_as_long_as_enough_are_left() -> None:
    quiet = [took(1.0, 0.0)] * 3
    loud = [took(9.0, 0.5), took(8.0, 0.4)]
    assert undisturbed([*loud, *quiet]) == quiet
    assert undisturbed([*loud, *quiet[:2]]) == [*quiet[:2], loud[1]]


def test_rows_say_what_was_predicted_and_what_was_measured() -> None:
    planned = cases(Problem(unlike(), 4, confidence=0.0))
    by = {case.name: case.predicted_s for case in planned}
    found = list(rows(planned, {name: [took(2 * predicted_s, 0.0)] for name, predicted_s in by.items()}))
    named = {row.name: row for row in found}
    assert len(named) == len(found)
    assert (named["ours: error"].value, named["ours: error"].holds) == (pytest.approx(100), False)
    assert named["SparsePipe / ours, measured"].value == pytest.approx(by[SPARSEPIPE] / by[OURS])
    committed = {row["name"]: row for row in json.loads(RESULTS.read_text(encoding="utf-8"))}
    assert committed["SparsePipe / ours, measured"]["value"] > 1
