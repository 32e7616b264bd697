"""Clouds prepared during the step before: the same numbers, made by a thread; errors at the step that they are of."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cuda_ops.device.host import work_beside
from cuda_ops.memory import available, meter_of
from planner.ir.errors import NotFiniteError, StageFailedError
from planner.ir.plan import Decision
from runtime.engine import Engine
from runtime.monitor.activity import Activity
from runtime.monitor.waits import BETWEEN
from runtime.numerics.finite import OnNan
from runtime.pipeline.microbatches import Batch, WholeBatch
from runtime.sparse.ahead import Expected
from runtime.sparse.batch import PreparedBatch
from runtime.sparse.preparing import Preparing
from runtime.sparse.share import SiteShare
from tests.runtime.engines import on_engines, trained, trained_on
from tests.runtime.plans import batch_of
from tests.runtime.sparse.test_plans import LAYOUTS, decision_of, network

STEPS = 3
Batches = list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]


def ahead(name: str, layout: str, micro_batches: tuple[int, ...]) -> Decision:
    return replace(decision_of(name, layout, micro_batches), prepares_next_step=True)


def batches_of(name: str) -> Batches:
    return [batch_of(network(name)[0], 4, step) for step in range(STEPS)]


def stepped(engine: Engine, batches: Batches, micro_batches: tuple[int, ...]) -> list[float | None]:
    """As a loop runs it: the next batch is told before this one's step."""
    bound = [WholeBatch(engine.context.inputs, (*inputs, *targets), micro_batches) for inputs, targets in batches]
    engine.expect(bound[0])
    losses = []
    for number, batch in enumerate(bound):
        if number + 1 < len(bound):
            engine.expect(bound[number + 1])
        losses.append(engine.step_on(batch).loss)
    return losses


@pytest.mark.parametrize("gives_way", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_prepared_in_the_one_before_gives_the_same_bits(layout: str, gives_way: bool) -> None:
    micro_batches = (4,) if layout == "two ranks" else (1, 3)
    found = trained_on(
        network("unet"),
        ahead("unet", layout, micro_batches),
        lambda engine: stepped(engine, batches_of("unet"), micro_batches),
        gives_way=gives_way,
    )
    expected = trained(network("unet"), decision_of("unet", layout, micro_batches), STEPS)
    assert found.losses == expected.losses
    for one, other in ((found.gradients, expected.gradients), (found.state, expected.state)):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.skipif(bool(available()), reason="no compiler for the counting allocator")
def test_what_is_in_use_while_sites_are_found_is_counted() -> None:
    def steps(engine: Engine) -> list[float | None]:
        assert [engine.step(*batches_of("unet")[0]).before_bytes] == [0], "nobody counts"
        engine.context.meter = meter_of(torch.device("cpu"))
        return [float(engine.step(*batch).before_bytes > 0) for batch in batches_of("unet")]

    found = trained_on(network("unet"), decision_of("unet", "two ranks", (4,)), steps)
    assert found.losses == [1.0] * STEPS


@pytest.mark.parametrize("layout", ["two ranks", "two ranks, then one"])
@pytest.mark.parametrize("on_nan", [OnNan.STOP, OnNan.IGNORE])
def test_nothing_that_was_made_of_the_batch_before_is_there_while_sites_are_found(
    layout: str, on_nan: OnNan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sites and maps of a step go before those of the next are made; a rank would hold them twice."""
    made: dict[int, list[weakref.ref[PreparedBatch]]] = {}
    alive: list[int] = []
    new = Preparing._new

    def noted(self: Preparing, raw: Batch) -> PreparedBatch:
        mine = made.setdefault(threading.get_native_id(), [])
        alive.append(sum(each() is not None for each in mine))
        batch = new(self, raw)
        mine.append(weakref.ref(batch))
        return batch

    monkeypatch.setattr(Preparing, "_new", noted)
    gc.collect()
    gc.disable()  # cycles would hold them until some later collection
    try:
        micro_batches = (4,) if layout == "two ranks" else (1, 3)
        trained_on(
            network("unet"),
            decision_of("unet", layout, micro_batches),
            lambda engine: [engine.step(*batch).loss for batch in batches_of("unet")],
            on_nan=on_nan,
        )
    finally:
        gc.enable()
    assert alive == [0] * len(alive)
    assert len(alive) >= 2 * STEPS


@pytest.mark.parametrize("layout", ["two ranks", "two ranks, then one"])
def test_a_step_on_clouds_that_is_not_finite_is_run_again_from_its_sites(layout: str) -> None:
    micro_batches = (4,) if layout == "two ranks" else (1, 3)

    def steps(engine: Engine) -> str:
        engine.step(*batches_of("unet")[0])
        for each in engine._local_stages.values():
            next(iter(each.parameters.values())).data.fill_(torch.nan)
        engine.step(*batches_of("unet")[1])
        with pytest.raises(NotFiniteError) as caught:
            engine.settle()
        return "\n".join((caught.value.title, *caught.value.details))

    told = on_engines(network("unet"), decision_of("unet", layout, micro_batches), steps, on_nan=OnNan.STOP)
    assert len(set(told)) == 1, "all ranks say the same"
    assert "forward" in told[0]
    assert "could not be run again" not in told[0]


def test_all_that_a_rank_reads_is_made_by_the_thread_before_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites, maps and shares of all micro-batches: nothing is left for the rank's own thread."""
    made: list[tuple[int, str]] = []
    own = {name: getattr(cls, name) for cls, name in ((PreparedBatch, "whole"), (SiteShare, "_map"))}

    def noted(name: str) -> object:
        def call(*given: object) -> object:
            batch = given[0]
            value = given[1]
            is_new = name == "_map" or (given[2], value) not in batch._made  # type: ignore[attr-defined]
            if is_new:
                made.append((threading.get_native_id(), f"{name} {value}"))
            return own[name](*given)

        return call

    monkeypatch.setattr(PreparedBatch, "whole", noted("whole"))
    monkeypatch.setattr(SiteShare, "_map", noted("_map"))
    ranks: list[int] = []

    def work(engine: Engine) -> float:
        ranks.append(threading.get_native_id())
        stepped(engine, batches_of("unet"), (1, 3))
        return engine.preparing.clock.busy_s  # type: ignore[union-attr]

    busy_s = on_engines(network("unet"), ahead("unet", "two ranks, then one", (1, 3)), work)
    assert all(busy > 0 for busy in busy_s)
    assert made
    assert not {thread for thread, _ in made} & set(ranks)


@pytest.mark.parametrize(("gives_way", "begins"), [(True, ["0RECV_B0<1", "1RECV_F0<0"]), (False, [BETWEEN, BETWEEN])])
def test_a_thread_without_a_core_of_its_own_begins_when_its_rank_waits(
    gives_way: bool, begins: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it takes the interpreter from the rank's first passes."""
    activities: dict[int, Activity] = {}
    begun: dict[int, list[str]] = {}
    expect = Preparing.expect

    def noted(self: Preparing, raw: Batch, rank: int) -> None:
        begun.setdefault(rank, []).append(activities[rank].what)
        expect(self, raw, rank)

    monkeypatch.setattr(Preparing, "expect", noted)

    def work(engine: Engine) -> None:
        activities[engine.context.rank] = engine.context.activity
        stepped(engine, batches_of("unet"), (1, 3))

    on_engines(network("unet"), ahead("unet", "one rank, then one", (1, 3)), work, gives_way=gives_way)
    assert [begun[rank][-1] for rank in (0, 1)] == begins
    assert [len(begun[rank]) for rank in (0, 1)] == [STEPS - gives_way] * 2, "a batch that is bound is not made again"


def test_without_word_of_the_next_batch_a_step_prepares_itself() -> None:
    found = trained(network("unet"), ahead("unet", "two ranks, then one", (1, 3)), STEPS)
    expected = trained(network("unet"), decision_of("unet", "two ranks, then one", (1, 3)), STEPS)
    assert found.losses == expected.losses


def test_only_a_plan_that_says_so_looks_ahead() -> None:
    def looks(engine: Engine) -> bool:
        engine.expect(WholeBatch(engine.context.inputs, (*batches_of("unet")[0][0], *batches_of("unet")[0][1]), (4,)))
        return engine.looks_ahead

    assert on_engines(network("unet"), decision_of("unet", "one rank", (4,)), looks) == [False]
    assert on_engines(network("unet"), ahead("unet", "one rank", (4,)), looks) == [True]


def test_clouds_that_cannot_be_used_fail_at_their_own_step() -> None:
    good, bad = batches_of("unet")[:2]
    features = bad[0][1].clone()
    features[0, 0, 0] = float("nan")

    def work(engine: Engine) -> None:
        wrong = (bad[0][0], features, *bad[0][2:])
        bound = [
            WholeBatch(engine.context.inputs, (*inputs, *targets), (4,)) for inputs, targets in (good, (wrong, bad[1]))
        ]
        engine.expect(bound[0])
        engine.expect(bound[1])
        assert engine.step_on(bound[0]).loss is not None
        with pytest.raises(StageFailedError, match=r"step 1, finding sites: clouds of micro-batch 0: .*NaN"):
            engine.step_on(bound[1])

    on_engines(network("unet"), ahead("unet", "one rank", (4,)), work)


def test_of_what_is_expected_the_last_two_stay() -> None:
    expected: Expected[str] = Expected()
    raws = [object() for _ in range(3)]
    for number, raw in enumerate(raws):
        expected.add(raw, str(number))  # type: ignore[arg-type]
    assert [expected.take(raw) for raw in raws] == [None, "1", "2"]  # type: ignore[arg-type]
    assert len(expected) == 0
    assert expected.take(raws[1]) is None  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system knows no affinity")
def test_a_thread_that_works_beside_gives_way_or_has_a_core_and_no_other_thread_does() -> None:
    core = min(os.sched_getaffinity(0))
    found = []
    before = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)

    def beside(on: int | None) -> None:
        work_beside(on)
        found.append((os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))

    for on in (core, None):
        thread = threading.Thread(target=beside, args=(on,))
        thread.start()
        thread.join()
    assert found == [({core}, before[1]), (before[0], 19)]
    assert (os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())) == before
