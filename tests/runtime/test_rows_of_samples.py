"""Samples that have several rows in a tensor train under every degree of ZeRO as in the user's own loop."""

from __future__ import annotations

import copy
from functools import cache

import pytest

from planner.ir.plan import Decision
from profiler.capture.graph import capture_for
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.pipeline.routing import CPU
from tests.runtime.plans import Trained, assert_equal, batch_of, decide
from tests.runtime.training import adamw, by_plan, sharded
from tests.zoo import NETWORKS

STEPS = 3
NAMES = ("language_model", "listed_inputs", "tagger", "masked_tokens", "listed_sentences")
PLANS = {
    "replicas": ([], [(0, 1)], [(1, 2)]),
    "stages of replicas": ([0.6], [(0, 1), (2, 3)], [(1, 1), (2, 1)]),
}


@cache
def model_of(name: str) -> LoadedModel:
    return capture_for(load_model(NETWORKS[f"merged:{name}"].source), CPU)[0]


def decision_of(model: LoadedModel, plan: str, zero: int) -> Decision:
    graph = capture_for(model, CPU)[1].graph
    cuts, ranks, shares = PLANS[plan]
    decision = decide(graph, cuts, (3, 2), ranks, shares)
    return sharded(decision, zero) if zero else decision


def by_user(model: LoadedModel, samples: int) -> Trained:
    """A loop over whole batches."""
    twin = copy.deepcopy(model)
    optimizer = adamw(list(twin.module.parameters()))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = twin.loss(*batch_of(model, samples, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    gradients = {name: each.grad for name, each in twin.module.named_parameters() if each.grad is not None}
    return Trained(losses, gradients, twin.module.state_dict())


@pytest.mark.cases(4)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_samples_are_divided_as_their_samples_are(name: str, plan: str, zero: int) -> None:
    model = model_of(name)
    found, _ = by_plan(model, decision_of(model, plan, zero), STEPS)
    expected = by_user(model, 5)
    if zero:
        found = Trained(found.losses, {}, found.state)
        expected = Trained(expected.losses, {}, expected.state)
    assert_equal(found, expected)
