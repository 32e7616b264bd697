"""Parameters that several stages use are trained as on one device."""

from __future__ import annotations

from functools import cache

import pytest

from planner.ir.graph import Graph, Layer, TensorSpec
from profiler.source.model import LoadedModel
from runtime.captured import CapturedModule
from runtime.optim.ties import TiedParameters, groups_of_ties, ties_of
from tests.captures import capture
from tests.runtime.plans import Trained, assert_equal, decide, folded, run_ranks, split_backward
from tests.runtime.training import alone, by_plan, cosine, sharded, tied_model

PLANS = {
    "two ranks": {"cuts": [0.5]},
    "three ranks, the one between has no part": {"cuts": [0.3, 0.6]},
    "replicas of both": {"cuts": [0.5], "ranks": [(0, 1), (2, 3)], "shares": [(3, 1), (1, 1)]},
    "replicas of the first, the second of which has no rows": {
        "cuts": [0.5],
        "ranks": [(0, 1), (2,)],
        "shares": [(7, 1), (1,)],
    },
    "first and last stage on one rank": {"cuts": [0.3, 0.6], "ranks": [(0,), (1,), (0,)], "schedule": folded},
    "first and last stage on two ranks": {
        "cuts": [0.3, 0.6],
        "ranks": [(0, 1), (2,), (0, 1)],
        "shares": [(1, 1), (1,), (1, 1)],
        "schedule": folded,
    },
    "one stage, replicas": {"cuts": [], "ranks": [(0, 1)], "shares": [(1, 2)]},
    "backward split": {"cuts": [0.5], "ranks": [(0,), (1, 2)], "shares": [(1,), (1, 1)], "schedule": split_backward},
}
MICRO_BATCHES = (3, 2)


@cache
def network() -> tuple[LoadedModel, CapturedModule]:
    model = tied_model()
    return model, capture(model)


@cache
def expected() -> Trained:
    return alone(network()[0], MICRO_BATCHES, scheduler=cosine)[0]


@pytest.mark.parametrize("plan", PLANS)
def test_tied_parameters_are_trained_as_on_one_device(plan: str) -> None:
    model, captured = network()
    found, _ = by_plan(model, decide(captured.graph, micro_batches=MICRO_BATCHES, **PLANS[plan]), scheduler=cosine)
    assert_equal(found, expected())


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("plan", ["replicas of both", "first and last stage on two ranks"])
def test_tied_parameters_beside_divided_optimisers(plan: str, zero: int) -> None:
    model, captured = network()
    decision = sharded(decide(captured.graph, micro_batches=MICRO_BATCHES, **PLANS[plan]), zero)
    found, _ = by_plan(model, decision, scheduler=cosine)
    assert_equal(Trained(found.losses, {}, found.state), Trained(expected().losses, {}, expected().state))


def test_a_rank_with_two_of_its_stages_keeps_one_copy_and_one_state() -> None:
    model, captured = network()
    decision = decide(captured.graph, micro_batches=MICRO_BATCHES, **PLANS["first and last stage on one rank"])
    engines, _ = run_ranks(model, decision, [])
    first, last = engines[0]._local_stages[0], engines[0]._local_stages[2]
    assert first.parameters["token.weight"] is last.parameters["token.weight"]
    assert "token.weight" in first.optimizer.tensors
    assert "token.weight" not in last.optimizer.tensors


def graph(**used: tuple[str, ...]) -> Graph:
    spec = TensorSpec(("feature",), (1,), "float32")
    layers = tuple(Layer(name, "opaque", (), (spec,), parameters) for name, parameters in used.items())
    names = dict.fromkeys(name for parameters in used.values() for name in parameters)
    return Graph(1, {}, layers, dict.fromkeys(names, spec), layers[-1].name)


def test_ties_are_named_by_stages_and_ranks() -> None:
    found = ties_of(
        graph(a=("x", "y"), b=("z", "x"), c=("y", "w"), d=("z",)),
        {"a": 0, "b": 1, "c": 2, "d": 1},
        [(4, 1), (2,), (1, 0)],
    )
    assert found == (TiedParameters(("x",), (0, 1), ((1, 4), (2,))), TiedParameters(("y",), (0, 2), ((1, 4), (0, 1))))
    assert [tie.ranks for tie in found] == [(1, 2, 4), (0, 1, 4)]
    assert [found[1].owner(rank) for rank in (0, 1, 4)] == [2, 0, 0]
    assert groups_of_ties(found) == ((1, 2, 4), (0, 1, 4))


def test_ties_of_one_rank_need_no_group() -> None:
    ties = ties_of(graph(a=("x",), b=("x",)), {"a": 0, "b": 1}, [(3,), (3,)])
    assert groups_of_ties(ties) == ()
    assert ties[0].ranks == (3,)
