"""A plan cuts the batch, and trains by the loss that the user's own module has on the whole of it, or it is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from planner.ir.errors import UnsupportedModelError
from planner.ir.plan import Decision
from tests.runtime.divided import divided
from tests.runtime.engines import Network, on_engines, trained_on
from tests.runtime.losses import EXACT, JOINING, Learned, Scores, network, network_of, network_with, whole
from tests.runtime.plans import assert_equal, decide, split_backward
from tests.runtime.training import sharded

PLANS: dict[str, dict[str, object]] = {
    "uneven micro-batches": {"cuts": ["last"], "micro_batches": (4, 3, 3)},
    "a micro-batch a sample": {"cuts": ["last"], "micro_batches": (1,) * 10},
    "replicas of unequal share": {"cuts": [], "micro_batches": (10,), "ranks": [(0, 1)], "shares": [(4, 1)]},
    "replicas of which one is empty": {
        "cuts": [],
        "micro_batches": (9, 1),
        "ranks": [(0, 1, 2)],
        "shares": [(1, 1, 1)],
    },
    "a pipeline into replicas": {
        "cuts": ["last"],
        "micro_batches": (4, 6),
        "ranks": [(0,), (1, 2)],
        "shares": [(1,), (2, 1)],
        "schedule": split_backward,
    },
}


def trained(given: Network, decision: Decision) -> object:
    return trained_on(given, decision, lambda engine: [engine.step(*given[0].fed).loss for _ in range(2)])


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("loss", EXACT)
def test_the_loss_of_the_parts_is_that_of_the_batch(loss: str, plan: str) -> None:
    given = network(loss)
    assert_equal(trained(given, decide(given[1].graph, **PLANS[plan])), whole(given))


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("loss", EXACT)
def test_ranks_that_divide_gradients_have_the_terms_of_their_own_samples(loss: str, zero: int) -> None:
    given = network(loss)
    for plan in ("replicas of unequal share", "replicas of which one is empty"):
        decision = sharded(decide(given[1].graph, **PLANS[plan]), zero)
        assert_equal(trained(given, decision), whole(given))


@pytest.mark.parametrize("loss", EXACT)
def test_layers_cut_in_their_own_ways_have_the_same_loss(loss: str) -> None:
    given = network(loss)
    for cuts in ({"sample": (0, 2, 3)}, {"channel": (0, 1, 2)}):
        decision = divided(given[1].graph, cuts, (4, 3, 3))
        assert_equal(trained(given, decision), whole(given))


@pytest.mark.parametrize("loss", EXACT)
def test_evaluation_gives_the_loss_of_the_batch(loss: str) -> None:
    given = network(loss)
    expected = given[0].loss(*given[0].fed).item()
    decision = decide(given[1].graph, **PLANS["a pipeline into replicas"])
    found = on_engines(given, decision, lambda engine: engine.evaluate(*given[0].fed).loss)
    assert [loss for loss in found if loss is not None] == pytest.approx([expected] * 2, rel=1e-10)


@pytest.mark.parametrize("plan", ["uneven micro-batches", "a pipeline into replicas"])
def test_a_loss_with_a_state_of_its_own_is_trained_and_kept(plan: str) -> None:
    given = network_with(Scores(), Learned().double())
    found = trained(given, decide(given[1].graph, **PLANS[plan]))
    calls = found.state.pop("loss_fn.calls")
    assert calls == 2 * len(PLANS[plan]["micro_batches"])
    assert given[0].loss_fn.function.calls == 0
    assert_equal(found, whole(given))


def test_a_parameter_in_the_closure_of_a_loss_is_refused() -> None:
    temperature = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    with pytest.raises(UnsupportedModelError, match="no parameter of the module or of the loss"):
        network_of(Scores(), lambda s, c, m: functional.cross_entropy(s * temperature.exp(), c))


@pytest.mark.parametrize("loss", JOINING)
def test_a_loss_over_the_batch_is_refused_in_micro_batches(loss: str) -> None:
    given = network(loss)
    with pytest.raises(UnsupportedModelError, match="needs all samples of a step at once") as raised:
        trained(given, decide(given[1].graph, ["last"], (4, 6)))
    assert "plan again with --micro-batch 10" in raised.value.remedies


@pytest.mark.parametrize("loss", JOINING)
def test_a_loss_over_the_batch_is_exact_in_one_micro_batch(loss: str) -> None:
    given = network(loss)
    assert_equal(trained(given, decide(given[1].graph, ["last"], (10,))), whole(given))
    assert_equal(trained(given, divided(given[1].graph, {"channel": (0, 1, 2)}, (10,))), whole(given))
