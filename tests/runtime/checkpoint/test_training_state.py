"""Training that stops goes on as if it had not, also under another plan."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch

from planner.ir.plan import Decision
from profiler.capture.graph import Captured, capture
from profiler.source.model import LoadedModel
from runtime.checkpoint.state import RankState
from runtime.stage.builder import groups_of
from runtime.transport import InProcessTransport
from tests.runtime.plans import batch_of, decide, engine_of, folded
from tests.runtime.ranks import on_ranks
from tests.runtime.saved import Saved
from tests.runtime.training import adamw, alone, cosine, sharded, tied_model

MICRO_BATCHES = (3, 2)
OPTIONS = {"scheduler": cosine, "clip_norm": 0.5}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@cache
def network() -> tuple[LoadedModel, Captured]:
    model = tied_model()
    return model, capture(model)


@cache
def plans() -> dict[str, Decision]:
    graph = network()[1].graph
    replicas = decide(graph, [0.5], MICRO_BATCHES, [(0, 1), (2, 3)], [(3, 1), (1, 1)])
    ring = decide(graph, [0.3, 0.6], MICRO_BATCHES, [(0,), (1, 2), (0,)], [(1,), (1, 1), (1,)], folded)
    return {"divided": sharded(replicas), "ring": ring}


def run(decision: Decision, first: int, last: int, source: Saved | None = None) -> list[RankState]:
    """What each rank has to save after the steps from ``first`` to ``last``."""
    copies = [copy.deepcopy(network()) for _ in range(decision.num_ranks)]

    def work(end: InProcessTransport) -> RankState:
        model, captured = copies[end.rank]
        engine = engine_of(decision, model, captured, end, optimizer=adamw, **OPTIONS)
        if source is not None:
            engine.load_state(source)
        for step in range(first, last):
            engine.step(*batch_of(model, decision.global_batch, step))
        return engine.state()

    return on_ranks(decision.num_ranks, work, groups_of(decision, network()[1].graph))


@pytest.mark.parametrize(("before", "after"), [("divided", "ring"), ("ring", "divided"), ("divided", "divided")])
def test_training_goes_on_under_another_plan(before: str, after: str) -> None:
    saved = Saved(*run(plans()[before], 0, 3))
    assert saved.number("run/step") == 3
    found = Saved(*run(plans()[after], 3, 5, saved))
    expected, _ = alone(network()[0], MICRO_BATCHES, steps=5, **OPTIONS)
    assert found.number("run/step") == 5
    for name, tensor in expected.state.items():
        torch.testing.assert_close(found.read(f"model/{name}"), tensor, rtol=1e-12, atol=1e-12)
