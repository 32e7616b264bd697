"""Users' own autograd, modes, hooks and choices by data under plans give what the user's own module does; in float64."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch

from planner.ir.plan import Decision
from planner.ir.profile import ModelSource
from profiler.capture import capture
from profiler.source import load_model
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
each_module = pytest.mark.parametrize("name", MODULES, ids=lambda name: "-".join(map(str, name)))
_WRITES_FROM_ROWS = {("Counting",), ("Parametrized",)}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@cache
def network(name: tuple[object, ...]) -> Network:
    factory = f"{user_code.__name__}:made"
    from profiler.model import LoadedModel, Loss

    torch.manual_seed(0)
    module, (x, y), loss = user_code.made(*name)
    model = LoadedModel(module.double(), (x.double(),), (y.double(),), Loss(loss, unpacked=True))
    return model, capture(model)


def in_pipeline(network: Network, schedule: str = "1f1b") -> Decision:
    return decide(network[1].graph, [0.34, 0.67], (2, 3, 1), schedule=schedule)


@each_module
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_pipeline_trains_as_the_module_does(name: tuple[object, ...], schedule: str) -> None:
    found = network(name)
    assert_equal(trained(found, in_pipeline(found, schedule)), train_serially(found[0], (2, 3, 1), 2))


@each_module
def test_ranks_that_share_samples_train_as_the_module_does(name: tuple[object, ...]) -> None:
    found = network(name)
    decision = decide(found[1].graph, [], (3, 1), [(0, 1)], [(1, 1)])
    assert_equal(trained(found, decision), train_serially(found[0], (3, 1), 2))


@each_module
def test_layers_divided_along_features_train_as_the_module_does(name: tuple[object, ...]) -> None:
    found = network(name)
    decision = divided(found[1].graph, {"channel": (0, 2, 4)}, (3, 1))
    assert_equal(trained(found, decision), train_serially(found[0], (3, 1), 2))
@each_module
def test_evaluation_is_the_modules_own(name: tuple[object, ...]) -> None:
    found = network(name)
    inputs, targets = batch_of(found[0], 6, 0)
    twin = copy.deepcopy(found[0].module).eval()
    loss, rows = evaluated(found, in_pipeline(found), inputs, targets)
    torch.testing.assert_close(rows, twin(*inputs), rtol=1e-12, atol=1e-14)
