"""Users' own autograd, modes, hooks and choices by data give under plans what the user's module does; in float64."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch

from planner.ir.errors import UnsupportedModelError
from planner.ir.plan import Decision
from profiler.capture.graph import capture
from profiler.source.losses import TrainedLoss
from profiler.source.model import LoadedModel
from tests.runtime import user_code
from tests.runtime.divided import divided
from tests.runtime.engines import Network, evaluated, trained
from tests.runtime.plans import assert_equal, batch_of, decide, train_serially

MODULES = [
    ("Signs",),
    ("Adversarial",),
    ("Identities",),
    ("Weighted",),
    ("InPlace",),
    ("Twice",),
    ("Attending",),
    ("Checkpointed", False),
    ("Checkpointed", True),
    ("Detached",),
    ("Hooked",),
    ("Parametrized",),
    ("Frozen",),
    ("Counting",),
    ("Experts",),
    ("Masked",),
]
Name = tuple[object, ...]
each_module = pytest.mark.parametrize("name", MODULES, ids=lambda name: "-".join(map(str, name)))
WRITES_ROWS = {("Counting",)}


@cache
def network(name: Name) -> Network:
    torch.manual_seed(0)
    module, (x, y), loss = user_code.made(*name)
    model = LoadedModel(module.double(), (x.double(),), (y.double(),), TrainedLoss(loss, unpacked=True))
    return model, capture(model)


def in_pipeline(network: Network, schedule: str = "1f1b") -> Decision:
    if isinstance(network[0].module, user_code.Counting):  # its buffer is on one stage, and joins samples
        return decide(network[1].graph, ["last"], (6,), schedule=schedule)
    return decide(network[1].graph, [0.34, 0.67], (2, 3, 1), schedule=schedule)


@each_module
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_pipeline_trains_as_the_module_does(name: Name, schedule: str) -> None:
    assert_trained(name, in_pipeline(network(name), schedule))


@each_module
def test_a_pipeline_that_computes_again_trains_as_the_module_does(name: Name) -> None:
    decision = in_pipeline(network(name))
    stages = tuple(replace(stage, recompute=True) for stage in decision.stages)
    assert_trained(name, replace(decision, stages=stages))


@each_module
def test_ranks_that_share_samples_train_as_the_module_does(name: Name) -> None:
    """One of them has none of a micro-batch."""
    decision = decide(network(name)[1].graph, [], (3, 1), [(0, 1)], [(1, 1)])
    assert_trained_or_refused(name, decision, name in WRITES_ROWS, "from the rows it sees|needs all samples")


@each_module
def test_layers_divided_along_features_train_as_the_module_does(name: Name) -> None:
    decision = divided(network(name)[1].graph, {"channel": (0, 2, 4)}, (3, 1))
    if name in WRITES_ROWS:
        assert_trained_or_refused(name, decision, True, "from the rows it sees|needs all samples")
    else:
        assert_trained_or_refused(name, decision, name == ("Identities",), "its backward is not linear")


@each_module
def test_evaluation_is_the_modules_own(name: Name) -> None:
    found = network(name)
    if name == ("Counting",):  # which micro-batch by micro-batch changes what it computes, in evaluation too
        return
    inputs, targets = batch_of(found[0], 6, 0)
    if name == ("Parametrized",):
        with pytest.raises(UnsupportedModelError, match="something else in evaluation"):
            evaluated(found, in_pipeline(found), inputs, targets)
        return
    _, rows = evaluated(found, in_pipeline(found), inputs, targets)
    twin = copy.deepcopy(found[0].module).eval()
    torch.testing.assert_close(rows, twin(*inputs), rtol=1e-12, atol=1e-14)


def assert_trained_or_refused(name: Name, decision: Decision, refused: bool, reason: str) -> None:
    if not refused:
        return assert_trained(name, decision)
    with pytest.raises(UnsupportedModelError, match=reason):
        trained(network(name), decision)


def assert_trained(name: Name, decision: Decision) -> None:
    """What parameters and buffers a plan has no use for stays as it was."""
    model, captured = network(name)
    expected = train_serially(model, decision.micro_batches, 2)
    found = trained((model, captured), decision)
    unused = expected.state.keys() - found.state.keys()
    start = model.module.state_dict()
    assert all(torch.equal(expected.state[each], start[each]) for each in unused)
    state = {key: value for key, value in expected.state.items() if key not in unused}
    gradients = {key: value for key, value in expected.gradients.items() if value is not None}
    assert_equal(found, replace(expected, gradients=gradients, state=state))
