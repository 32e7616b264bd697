"""Training that stops goes on as if it had not, also under another plan."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from planner.ir.plan import Decision
from profiler.source.model import LoadedModel
from profiler.source.parts import model_of
from runtime.captured import CapturedModule
from runtime.checkpoint.state import RankState
from runtime.optim.ties import groups_of
from runtime.transport import InProcessTransport
from tests.captures import capture
from tests.runtime.plans import batch_of, decide, engine_of, folded
from tests.runtime.ranks import on_ranks
from tests.runtime.saved import Saved
from tests.runtime.training import adamw, alone, cosine, sharded, tied_model

MICRO_BATCHES = (3, 2)
OPTIONS = {"scheduler": cosine, "clip_norm": 0.5}


@cache
def network() -> tuple[LoadedModel, CapturedModule]:
    model = tied_model()
    return model, capture(model)


@cache
def plans() -> dict[str, Decision]:
    graph = network()[1].graph
    replicas = decide(graph, [0.5], MICRO_BATCHES, [(0, 1), (2, 3)], [(3, 1), (1, 1)])
    ring = decide(graph, [0.3, 0.6], MICRO_BATCHES, [(0,), (1, 2), (0,)], [(1,), (1, 1), (1,)], folded)
    return {"divided": sharded(replicas), "parameters": sharded(replicas, 3), "ring": ring}


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


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("divided", "ring"),
        ("ring", "divided"),
        ("divided", "divided"),
        ("parameters", "ring"),
        ("divided", "parameters"),
        ("parameters", "parameters"),
    ],
)
def test_training_goes_on_under_another_plan(before: str, after: str) -> None:
    saved = Saved(*run(plans()[before], 0, 3))
    assert saved.number("run/step") == 3
    found = Saved(*run(plans()[after], 3, 5, saved))
    expected, _ = alone(network()[0], MICRO_BATCHES, steps=5, **OPTIONS)
    assert found.number("run/step") == 5
    for name, tensor in expected.state.items():
        torch.testing.assert_close(found.read(f"model/{name}"), tensor, rtol=1e-12, atol=1e-12)


class Spare(nn.Module):
    """Has a parameter and a buffer that no operator reads, beside layers that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.unread = nn.Parameter(torch.randn(3))
        self.register_buffer("table", torch.arange(5))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def spare() -> tuple[LoadedModel, CapturedModule]:
    torch.manual_seed(0)
    model = model_of("spare", (Spare(), (torch.randn(4, 4), torch.randint(2, (4,))), nn.CrossEntropyLoss()))
    return model, capture(model)


@pytest.mark.parametrize("cuts", [[], [0.5]])
def test_what_no_operator_reads_is_saved_once_and_put_back(cuts: list[float]) -> None:
    decision = decide(spare()[1].graph, cuts, (2, 2))

    def engines(end: InProcessTransport, source: Saved | None) -> tuple[RankState, nn.Module]:
        model, captured = made[end.rank]
        engine = engine_of(decision, model, captured, end, optimizer=adamw)
        if source is not None:
            with torch.no_grad():
                model.module.unread.zero_()  # type: ignore[union-attr, operator]
            engine.load_state(source)
        return engine.state(), model.module

    made = [spare() for _ in range(decision.num_ranks)]
    with torch.no_grad():
        for model, _ in made:
            model.module.unread.fill_(7.0)  # type: ignore[union-attr, operator]
    groups = groups_of(decision, made[0][1].graph)
    saved = Saved(*(state for state, _ in on_ranks(decision.num_ranks, lambda end: engines(end, None), groups)))
    keys = {key.removeprefix("model/") for key in saved.tensors() if key.startswith("model/")}
    assert keys == made[0][0].module.state_dict().keys()
    assert torch.equal(saved.read("model/table"), torch.arange(5))
    for _, module in on_ranks(decision.num_ranks, lambda end: engines(end, saved), groups):
        assert torch.equal(module.unread, torch.full((3,), 7.0))
    for key in ("model/unread", "model/table"):
        del saved.parts[key]  # as releases before this one saved it
    on_ranks(decision.num_ranks, lambda end: engines(end, saved), groups)


def test_weights_alone_begin_with_an_optimiser_of_their_own() -> None:
    expected = Saved(*run(plans()["ring"], 0, 2))
    weights = Saved(*run(plans()["divided"], 0, 0))
    for key in [*weights.parts]:
        if not key.startswith("model/"):
            del weights.parts[key]
    weights.values = {"run/step": 0, "run/weights_alone": True}
    found = Saved(*run(plans()["ring"], 0, 2, weights))
    assert found.tensors() == expected.tensors()
    assert all(torch.equal(found.read(key), expected.read(key)) for key in expected.tensors())
