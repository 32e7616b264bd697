"""Training with channels and filters divided: losses, gradients, weights and checkpoints are those of one device."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner.ir.errors import UnsupportedModelError, UsageError
from planner.ir.plan import Decision
from runtime.checkpoint import Checkpoint, save
from runtime.engine import Engine
from runtime.numerics.single_device import serial_step
from tests.runtime.engines import on_engines, trained, trained_on
from tests.runtime.plans import Trained, assert_equal, batch_of, decide, split_backward
from tests.runtime.spatial.channel_models import Cut, divided, network, piped
from tests.runtime.training import sharded

MICRO_BATCHES = (3, 2)
STEPS = 3
EXACT = 1e-12


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


@cache
def alone(name: str, optimizer: object = sgd, steps: int = STEPS, clip_norm: float = 0.0) -> Trained:
    """One device."""
    model = copy.deepcopy(network(name)[0])
    parameters = list(model.module.parameters())
    made = optimizer(parameters)
    step_once = made.step

    def clip_and_step() -> None:
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        step_once()

    made.step = clip_and_step
    batches = [batch_of(network(name)[0], sum(MICRO_BATCHES), step) for step in range(steps)]
    losses = [serial_step(model.loss, made, *batch, MICRO_BATCHES) for batch in batches]
    return Trained(losses, {k: p.grad for k, p in model.module.named_parameters()}, model.module.state_dict())


def features(*shares: int, ways: int = 1, samples: tuple[int, ...] = ()) -> Cut:
    return {**({"sample": samples} if samples else {}), "feature": shares}, ways


def channels(*shares: int, ways: int = 1, samples: tuple[int, ...] = ()) -> Cut:
    return {**({"sample": samples} if samples else {}), "channel": shares}, ways


MLP = {
    "y, two": ({}, features(1, 1)),
    "y, three uneven": ({}, features(1, 2, 3)),
    "x, two": ({name: features(1, 1, ways=2) for name in "024"}, features(1, 1)),
    "x, three uneven": (
        {"0": features(1, 2, 1, ways=3), "2": features(3, 1, 1, ways=3), "4": features(1, 2, 1, ways=3)},
        features(1, 2, 1),
    ),
    "x then y": ({"0": features(1, 1, 1, 1, ways=4), "4": features(1, 1, 1, 1, ways=4)}, features(1, 1, 1, 1)),
    "w, four": ({name: features(1, 1, 1, 1, ways=2) for name in "024"}, features(1, 1, 1, 1)),
    "w uneven, ranks without filters": (
        {"0": features(1, 2, 1, 3, ways=2), "2": features(1, 1, 20, 1, ways=4), "4": features(1, 1, 1, 30, ways=2)},
        features(1, 1, 2, 1),
    ),
    "samples and x": (
        {"0": features(1, 1, ways=2, samples=(1, 1)), "2": features(1, 2, ways=2, samples=(2, 1))},
        features(1, 1, samples=(1, 1)),
    ),
    "copies": ({"2": ({"replica": (1, 1), "feature": (2, 1)}, 2)}, ({"replica": (1, 1), "feature": (1, 1)}, 1)),
    "samples, then features": ({"0": ({"sample": (1, 1, 1)}, 1), "2": features(1, 1, 1, ways=3)}, features(1, 1, 1)),
}
CONVOLUTIONS = {
    "y, two": ({}, channels(1, 1)),
    "y, three uneven": ({}, channels(1, 2, 1)),
    "x for the first and the last": ({name: channels(1, 1, ways=2) for name in "06"}, channels(1, 1)),
    "x, three": ({"0": channels(1, 1, 1, ways=3), "6": channels(2, 1, 1, ways=3)}, channels(1, 1, 1)),
    "w, four": ({"6": channels(1, 1, 1, 1, ways=2)}, channels(1, 1, 1, 1)),
    "samples and channels": ({"6": channels(1, 2, ways=2, samples=(2, 1))}, channels(1, 1, samples=(1, 1))),
    "height, then channels": ({"0": ({"height": (1, 1)}, 1), "1": ({"height": (1, 1)}, 1)}, channels(1, 1)),
    "height and channels": (
        {"6": ({"height": (1, 2), "channel": (1, 1)}, 2)},
        ({"height": (1, 1), "channel": (1, 1)}, 1),
    ),
}
PLANS = [*(("mlp", plan) for plan in MLP), *(("convolutions", plan) for plan in CONVOLUTIONS)]


def plan_of(name: str, plan: str) -> Decision:
    cuts, otherwise = (MLP if name == "mlp" else CONVOLUTIONS)[plan]
    return divided(network(name), MICRO_BATCHES, cuts, otherwise)


@pytest.mark.parametrize(("name", "plan"), PLANS)
def test_training_is_that_of_one_device(name: str, plan: str) -> None:
    found = trained(network(name), plan_of(name, plan), STEPS, optimizer=sgd)
    assert_equal(found, alone(name), EXACT)


@pytest.mark.parametrize("plan", ["x, three uneven", "w uneven, ranks without filters", "copies"])
@pytest.mark.parametrize("clip_norm", [0.0, 0.1])
def test_so_it_is_with_adam_and_with_clipping(plan: str, clip_norm: float) -> None:
    found = trained(network("mlp"), plan_of("mlp", plan), STEPS, optimizer=adam, clip_norm=clip_norm)
    assert_equal(found, alone("mlp", adam, clip_norm=clip_norm), EXACT)


@pytest.mark.parametrize(("name", "plan"), [("mlp", "x, three uneven"), ("convolutions", "y, three uneven")])
def test_each_rank_takes_its_own_parts_of_a_state_that_it_is_given(name: str, plan: str) -> None:
    own = network(name)
    before = own[0].module.state_dict()
    state = {key: (100 * torch.rand(tensor.shape)).to(tensor.dtype) for key, tensor in before.items()}

    def work(engine: Engine) -> dict[str, Tensor]:
        engine.load_state_dict(state)
        return engine.state_dict()

    for found in on_engines(own, plan_of(name, plan), work):
        for key, tensor in found.items():
            assert torch.equal(tensor, state[key]), key


def test_the_norm_counts_each_element_once() -> None:
    model = network("mlp")
    batch = batch_of(model[0], 5, 0)
    expected = torch.nn.utils.get_total_norm(alone("mlp", steps=1).gradients.values()).item()
    for plan in MLP:
        found = on_engines(
            model, plan_of("mlp", plan), lambda engine: engine.step(*batch).gradient_norm, clip_norm=1000.0
        )
        assert found == pytest.approx([expected] * len(found), rel=1e-12)


def test_a_rank_holds_its_parts_alone() -> None:
    held = on_engines(
        network("mlp"),
        plan_of("mlp", "w, four"),
        lambda engine: sum(tensor.numel() for tensor in engine.held_tensors()),
    )
    whole = sum(parameter.numel() for parameter in network("mlp")[0].module.parameters())
    assert sum(held) == whole
    assert max(held) < 0.3 * whole


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("mlp", "w uneven, ranks without filters", None),
        ("mlp", None, "w uneven, ranks without filters"),
        ("mlp", "samples and x", "y, three uneven"),
        ("convolutions", "w, four", "height and channels"),
        ("convolutions", None, "samples and channels"),
        ("convolutions", "x, three", None),
    ],
)
def test_a_checkpoint_goes_on_under_another_plan(
    name: str, before: str | None, after: str | None, tmp_path: Path
) -> None:
    model = network(name)
    on_one = decide(model[1].graph, [], MICRO_BATCHES)
    plans = [on_one if each is None else plan_of(name, each) for each in (before, after)]
    batches = [batch_of(model[0], 5, step) for step in range(4)]

    def first(engine: Engine) -> dict[str, Tensor]:
        for batch in batches[:2]:
            engine.step(*batch)
        end = engine._transport
        save(tmp_path, 2, engine.state(), end.rank, end.world_size, lambda: end.barrier(), {})
        return {key: tensor.clone() for key, tensor in engine.state_dict().items()}

    states = on_engines(model, plans[0], first, optimizer=adam)
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.verify()
    for key, tensor in states[0].items():
        assert torch.equal(checkpoint.read(f"model/{key}"), tensor), key

    def second(engine: Engine) -> list[float | None]:
        engine.load_state(checkpoint)
        loaded = engine.state_dict()
        assert all(torch.equal(loaded[key], tensor) for key, tensor in states[0].items())
        return [engine.step(*batch).loss for batch in batches[2:]]

    found = trained_on(model, plans[1], second, optimizer=adam)
    expected = alone(name, adam, steps=4)
    assert_equal(found, Trained(expected.losses[2:], expected.gradients, expected.state), EXACT)


def test_a_divided_optimiser_goes_with_space_but_not_with_parts() -> None:
    model = network("convolutions")
    in_space = sharded(divided(model, MICRO_BATCHES, {}, ({"height": (1, 1)}, 1)))
    found = trained(model, in_space, STEPS, optimizer=sgd)
    assert_equal(found, alone("convolutions"), EXACT)
    with pytest.raises(UnsupportedModelError, match="stage 0 divides parameters over its ranks"):
        trained(model, sharded(plan_of("convolutions", "y, two")), 1, optimizer=sgd)


WHOLE: Cut = ({}, 1)
PIPES = {
    "x, then uneven x": (
        "mlp",
        "2",
        (features(1, 1), features(1, 2, 1)),
        {"0": features(1, 1, ways=2), "2": features(1, 2, 1, ways=3)},
    ),
    "three ranks, then two": ("convolutions", "3", (channels(1, 1, 1), channels(1, 2)), {"6": channels(1, 2, ways=2)}),
    "two ranks, then one": ("convolutions", "3", (channels(1, 1), WHOLE), {}),
    "height, then channels": ("convolutions", "3", (({"height": (1, 1)}, 1), channels(1, 2)), {}),
}


@pytest.mark.parametrize(
    ("pipe", "schedule"), [*((pipe, "1f1b") for pipe in PIPES), *((pipe, split_backward) for pipe in list(PIPES)[:2])]
)
def test_stages_of_other_cuts_follow_one_another(pipe: str, schedule: str) -> None:
    name, begins, otherwise, cuts = PIPES[pipe]
    decision = piped(network(name), MICRO_BATCHES, begins, otherwise, cuts, schedule)
    for recompute in (False, True) if schedule == "1f1b" else (False,):
        stages = tuple(replace(stage, recompute=recompute) for stage in decision.stages)
        found = trained(network(name), replace(decision, stages=stages), STEPS, optimizer=sgd)
        assert_equal(found, alone(name), EXACT)


@pytest.mark.parametrize(
    ("pipe", "schedule"),
    [("x, then uneven x", "pipedream"), ("three ranks, then two", "pipedream-2bw"), ("three ranks, then two", "zb-h1")],
)
def test_parts_have_versions_and_halved_backwards(pipe: str, schedule: str) -> None:
    name, begins, otherwise, cuts = PIPES[pipe]
    rows = (2, 2, 1)
    many, one = (
        trained(network(name), piped(network(name), rows, begins, both, special, schedule), STEPS, optimizer=adam)
        for both, special in ((otherwise, cuts), ((WHOLE, WHOLE), {}))
    )
    assert_equal(many, one, EXACT)


@pytest.mark.parametrize(("name", "plan"), [("mlp", "w, four"), ("convolutions", "height and channels")])
def test_evaluation_is_that_of_one_device(name: str, plan: str) -> None:
    model = network(name)
    batch = batch_of(model[0], 5, 0)
    plans = [decide(model[1].graph, [], MICRO_BATCHES), plan_of(name, plan)]
    one, many = (on_engines(model, each, lambda engine: _scores(engine, batch), optimizer=sgd) for each in plans)
    for found in many:
        assert found == pytest.approx(one[0], rel=EXACT)


def _scores(engine: Engine, batch: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]) -> list[float | None]:
    """Before and after a step of training."""
    first = engine.evaluate(*batch).loss
    engine.step(*batch)
    return [first, engine.evaluate(*batch).loss]


def test_several_batches_make_up_one_update() -> None:
    model = network("convolutions")
    batches = [batch_of(model[0], 5, 0)] * 4  # gradients of one batch, taken twice

    def work(engine: Engine) -> list[float | None]:
        return [engine.step(*batch).loss for batch in batches]

    plans = [decide(model[1].graph, [], MICRO_BATCHES), plan_of("convolutions", "samples and channels")]
    one, many = (trained_on(model, plan, work, optimizer=sgd, accumulate=2) for plan in plans)
    assert_equal(many, one, EXACT)


def test_an_optimiser_that_looks_at_more_than_elements_is_refused() -> None:
    def adafactor(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(parameters)

    with pytest.raises(UsageError, match="the state of Adafactor cannot be divided"):
        trained(network("mlp"), plan_of("mlp", "y, two"), 1, optimizer=adafactor)
