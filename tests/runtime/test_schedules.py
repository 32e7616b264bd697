"""Every schedule, run by threads on two to four ranks, computes what one device computes; in float64.

Where the weights change within a step, one device is an emulation that gives each micro-batch and stage the version of
the weights that the program names (``tests/runtime/versioned.py``).
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from planner.ir.plan import Decision
from planner.ir.profile import ModelSource
from planner.ir.schedule import Op, Pipeline, Schedule
from planner.schedules import names, positions, schedule, traits
from profiler.models.example import Example, normal
from profiler.source.source import load_model
from tests.captures import capture
from tests.runtime.engines import Network, evaluated, trained
from tests.runtime.plans import Trained, assert_equal, batch_of, decide, train_serially
from tests.runtime.versioned import train_on_versions

TRAINING = tuple(name for name in names() if traits(name).trains)
FORWARD = tuple(name for name in names() if not traits(name).trains)
MICRO_BATCHES = (2, 1, 3, 1, 2)  # not a multiple of the positions
STEPS = 2
WIDTH = 4


class Branches(nn.Module):
    """Two parallel branches, a join, and two skips, one over all that lies between."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.join = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        stem, a1, a2, b1, b2, c, d, e = self.parts
        x = stem(x).tanh()
        a = a2(a1(x).tanh())
        b = b2(b1(x).sigmoid())
        y = self.join(torch.cat((a, b), 1)).tanh()
        z = d(c(y).tanh()) + x
        return e(z.tanh()) + y


def chain(*, input_shape: tuple[int, ...] = (4, WIDTH)) -> Example:
    layers = [layer for _ in range(7) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers), (normal(input_shape, 0), normal(input_shape, 1)), nn.functional.mse_loss


def dag(*, input_shape: tuple[int, ...] = (4, WIDTH)) -> Example:
    return Branches(), (normal(input_shape, 0), normal(input_shape, 1)), nn.functional.mse_loss


GROUPS = {
    ("chain", 2): [((0,), (1,)), ((1,), (1,))],
    ("chain", 3): [((0,), (1,), (2,)), ((1,), (1,), (1,))],
    ("chain", 4): [((0,), (1,), (2,), (3,)), ((1,), (1,), (1,), (1,))],
    ("dag", 2): [((0,), (1,)), ((1,), (1,))],
    ("dag", 3): [((0, 1), (2,)), ((2, 1), (1,))],
    ("dag", 4): [((0,), (1, 2), (3,)), ((1,), (1, 2), (1,))],
}
"""By network and number of ranks, the ranks of each position and their shares."""
each_layout = pytest.mark.parametrize(("kind", "num_ranks"), GROUPS)


@cache
def network(kind: str) -> Network:
    model = load_model(ModelSource(f"{__name__}:{kind}", {}, (4, WIDTH), "float64"))
    return model, capture(model)


@cache
def serial(kind: str) -> Trained:
    return train_serially(network(kind)[0], MICRO_BATCHES, STEPS)


def decision_of(kind: str, num_ranks: int, name: str, **how: object) -> Decision:
    """One group of ranks a position, two stages on each where the schedule allows it."""
    groups, shares = GROUPS[kind, num_ranks]
    per_position = 1 if traits(name).stages_per_position == 1 else 2
    where = positions(name, len(groups), per_position)

    def order(pipeline: Pipeline) -> Schedule:
        return schedule(name)(replace(pipeline, positions=where, **how))

    return decide(
        network(kind)[1].graph,
        [cut / len(where) for cut in range(1, len(where))],
        MICRO_BATCHES,
        [groups[position] for position in where],
        [shares[position] for position in where],
        order,
    )


@pytest.mark.parametrize("name", TRAINING)
@each_layout
def test_a_schedule_computes_what_one_device_computes(kind: str, num_ranks: int, name: str) -> None:
    decision = decision_of(kind, num_ranks, name)
    model, captured = network(kind)
    expected = serial(kind) if traits(name).synchronous else train_on_versions(model, captured.graph, decision, STEPS)
    assert_equal(trained((model, captured), decision, STEPS), expected)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("kind", ["chain", "dag"])
def test_two_pipelines_in_opposite_directions_compute_what_one_device_computes(kind: str, num_ranks: int) -> None:
    """Stage s is on the ranks s and D - 1 - s, of which the first has the samples that the last has at D - 1 - s."""
    sizes = (2, 4, 3, 2)
    groups = tuple((s, num_ranks - 1 - s) for s in range(num_ranks))
    where = positions("chimera", num_ranks // 2, 2)

    def order(pipeline: Pipeline) -> Schedule:
        return schedule("chimera")(replace(pipeline, positions=where))

    cuts = [cut / num_ranks for cut in range(1, num_ranks)]
    decision = decide(network(kind)[1].graph, cuts, sizes, groups, ((1, 1),) * num_ranks, order)
    sends = [action for action in decision.rows()[0] if action.op is Op.SEND_FORWARD]
    assert {(action.stage, action.peer) for action in sends} >= {(0, 1)}  # also where one position has both stages
    assert_equal(trained(network(kind), decision, STEPS), train_serially(network(kind)[0], sizes, STEPS))


@pytest.mark.parametrize("name", [name for name in TRAINING if traits(name).windowed])
def test_windows_change_nothing(name: str) -> None:
    windows = (4, 3, 3) * (2 if name == "greedy" else 1)
    assert_equal(trained(network("chain"), decision_of("chain", 3, name, windows=windows), STEPS), serial("chain"))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "pipedream", "pipedream-2bw"])
def test_a_stage_may_have_nothing_to_train(name: str) -> None:
    """The loss alone; its weights are of some version nevertheless."""
    model, captured = network("chain")
    decision = decide(captured.graph, [0.5, "loss"], MICRO_BATCHES, schedule=name)
    expected = (
        serial("chain") if traits(name).synchronous else train_on_versions(model, captured.graph, decision, STEPS)
    )
    assert_equal(trained((model, captured), decision, STEPS), expected)


@pytest.mark.parametrize("name", [*FORWARD, "interleaved"])
@each_layout
def test_forward_passes_give_the_outputs_of_one_device(kind: str, num_ranks: int, name: str) -> None:
    model, captured = network(kind)
    inputs, targets = batch_of(model, sum(MICRO_BATCHES), 0)
    loss, rows = evaluated((model, captured), decision_of(kind, num_ranks, name), inputs, targets)
    twin = copy.deepcopy(model.module).eval()
    torch.testing.assert_close(rows, twin(*inputs), rtol=1e-12, atol=1e-14)
    assert loss == pytest.approx(model.loss_fn(rows, targets).item(), rel=1e-12)


@pytest.mark.parametrize(("kind", "longest"), [("chain", 1), ("dag", 4)])
def test_the_networks_are_a_chain_and_a_dag_with_skips(kind: str, longest: int) -> None:
    actions = [
        action for row in decision_of(kind, 4, "interleaved").rows() for action in row if action.peer is not None
    ]
    assert max(abs(action.stage - action.peer) for action in actions) == longest


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_weights_that_change_within_a_step_are_not_those_of_one_update(name: str) -> None:
    decision = decision_of("chain", 3, name)
    model, captured = network("chain")
    with pytest.raises(AssertionError, match="relative error"):
        assert_equal(train_on_versions(model, captured.graph, decision, STEPS), serial("chain"))
