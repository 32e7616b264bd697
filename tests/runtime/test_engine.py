"""A plan computes what one device computes: losses over three steps, gradients, parameters, buffers, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import ClassVar

import pytest
import torch

from planner.ir.errors import CorruptFileError, UnsupportedModelError, UsageError
from planner.ir.profile import ModelSource
from planner.ir.schedule import SEND, Pipeline, Schedule
from planner.layers.boundary import Boundaries
from planner.schedules import schedule
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.captured import CapturedModule
from runtime.memory import storage_bytes
from runtime.transport import Hub, InProcessTransport, MessageKey
from tests.captures import capture
from tests.runtime.engines import Network, network_of
from tests.runtime.plans import (
    Trained,
    assert_equal,
    batch_of,
    decide,
    engine_of,
    folded,
    run_ranks,
    sgd,
    split_backward,
    train_by_plan,
    train_serially,
)

NETWORKS = {
    "resnet": ("resnet:resnet18", (4, 3, 16, 16), {"width": 4, "num_classes": 5, "depths": (1, 1)}),
    "vgg": ("vgg:vgg16", (4, 3, 32, 32), {"width": 4, "num_classes": 5, "hidden": 8}),
    "gnmt": ("gnmt:gnmt", (4, 5), {"vocabulary": 17, "width": 8, "layers": 2}),
    "gpt": ("gpt:gpt", (4, 6), {"vocabulary": 17, "width": 8, "layers": 2, "heads": 2}),
    "unet": ("unet3d:unet3d", (4, 1, 8, 8, 8), {"width": 2, "depth": 2}),
}

PLANS = {
    "two ranks": {"cuts": [0.5], "micro_batches": (2, 2)},
    "three ranks, gpipe, ten rows": {"cuts": [0.3, 0.6], "micro_batches": (4, 3, 3), "schedule": "gpipe"},
    "four ranks, a later micro-batch larger": {"cuts": [0.25, 0.5, 0.75], "micro_batches": (2, 3, 2, 2)},
    "replicas 3 to 1, then one": {
        "cuts": [0.5],
        "micro_batches": (4, 3, 3),
        "ranks": [(0, 1), (2,)],
        "shares": [(3, 1), (1,)],
    },
    "one, then replicas 2 to 1": {
        "cuts": [0.5],
        "micro_batches": (4, 2),
        "ranks": [(0,), (1, 2)],
        "shares": [(1,), (2, 1)],
    },
    "replicas only, the second without rows": {
        "cuts": [],
        "micro_batches": (4, 2),
        "ranks": [(0, 1)],
        "shares": [(7, 1)],
    },
    "replicas, the second without rows, then one": {
        "cuts": [0.5],
        "micro_batches": (4, 2),
        "ranks": [(0, 1), (2,)],
        "shares": [(7, 1), (1,)],
    },
    "replicas, then other shares": {
        "cuts": [0.5],
        "micro_batches": (4, 3),
        "ranks": [(0, 1), (2, 3)],
        "shares": [(1, 1), (3, 1)],
    },
    "first and last stage on one rank": {
        "cuts": [0.3, 0.6],
        "micro_batches": (2, 2),
        "ranks": [(0,), (1,), (0,)],
        "schedule": folded,
    },
    "backward split, replicas in the middle": {
        "cuts": [0.3, 0.6],
        "micro_batches": (2, 3),
        "ranks": [(0,), (1, 2), (3,)],
        "schedule": split_backward,
    },
}
EVERYWHERE = ("three ranks, gpipe, ten rows", "replicas 3 to 1, then one", "first and last stage on one rank")
CASES = [(network, plan) for network in NETWORKS for plan in PLANS if network == "resnet" or plan in EVERYWHERE]


@cache
def network(name: str) -> Network:
    return network_of(*NETWORKS[name])


@cache
def serial(name: str, micro_batches: tuple[int, ...]) -> Trained:
    return train_serially(network(name)[0], micro_batches)


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_a_plan_computes_what_one_device_computes(name: str, plan: str) -> None:
    model, captured = network(name)
    options = PLANS[plan]
    decision = decide(captured.graph, **options)
    assert_equal(train_by_plan(model, decision), serial(name, options["micro_batches"]))


def test_a_skip_connection_crosses_several_stages() -> None:
    graph = network("unet")[1].graph
    decision = decide(graph, **PLANS["four ranks, a later micro-batch larger"])
    sends = {action for row in decision.program for action in row if "SEND_F0" in action}
    assert {"0SEND_F0>1", "0SEND_F0>3"} <= sends


class Counted(InProcessTransport):
    """Notes the keys of what is sent."""

    sent: ClassVar[list[tuple[int, str, int]]] = []

    def send(self, key: MessageKey, destination: int, tensors: Sequence[torch.Tensor]) -> None:
        self.sent.append((self.rank, str(key), len(tensors)))
        super().send(key, destination, tensors)


def two_a_rank(pipeline: Pipeline) -> Schedule:
    return schedule("interleaved")(replace(pipeline, positions=(0, 1, 0, 1)))


def test_what_an_action_makes_for_two_stages_of_a_rank_is_one_message() -> None:
    model, captured = network("unet")
    ranks = [(0,), (1,), (0,), (1,)]
    decision = decide(captured.graph, [0.25, 0.5, 0.75], (2, 2), ranks, schedule=two_a_rank)
    program = Boundaries.of_decision(captured.graph, decision).program(decision)
    joined = program.joined()
    assert {"0SEND_F0>3", "3SEND_B0>0"} <= {str(send) for _, send, _ in joined}
    Counted.sent = []
    assert_equal(train_by_plan(model, decision, transport=Counted), serial("unet", (2, 2)))
    legs = [a for rank, row in enumerate(program.rows) for a in row if a.op in SEND and program.messages_of(rank, a)]
    assert len(Counted.sent) == 3 * (len(legs) - len(joined))
    assert {count for _, key, count in Counted.sent if "F 0->1" in key} == {2}
    assert not any("F 0->3" in key for _, key, _ in Counted.sent)


def test_the_comparison_with_one_device_can_fail() -> None:
    model, captured = network("resnet")
    found = train_by_plan(model, decide(captured.graph, [0.5], (2, 2)))
    with pytest.raises(AssertionError, match="relative error"):
        assert_equal(found, serial("resnet", (4, 3, 3)))


def test_a_rank_keeps_the_state_of_its_own_stages_only() -> None:
    model, captured = network("resnet")
    engines, _ = run_ranks(model, decide(captured.graph, ["fc"], (2, 2)), [batch_of(model, 4, 0)])
    assert sorted(engines[1].state_dict()) == ["fc.bias", "fc.weight"]
    assert sorted({*engines[0].state_dict(), *engines[1].state_dict()}) == sorted(model.module.state_dict())
    assert storage_bytes(engines[1].held_tensors()) == 2 * 8 * sum(
        parameter.numel() for parameter in model.module.fc.parameters()
    )  # parameters and momentum


def test_what_a_step_received_is_not_kept() -> None:
    model, captured = network("resnet")
    engines, _ = run_ranks(model, decide(captured.graph, [0.5], (2, 2)), [batch_of(model, 4, 0)])
    for engine in engines:
        (executor,) = engine._runner._executors.values()
        assert executor.num_left == 0
        assert all(local_stage.passes.num_in_flight == 0 for local_stage in engine._local_stages.values())


def test_a_whole_step_without_the_loss_on_a_rank_gives_none() -> None:
    model, captured = network("resnet")
    _, results = run_ranks(model, decide(captured.graph, [0.5], (2, 2)), [batch_of(model, 4, 0)])
    assert results[0][0].loss is None
    assert isinstance(results[1][0].loss, float)
    assert [span.action for span in results[1][0].spans][:3] == ["1RECV_F0<0", "1F0", "1B0"]
    assert all(a.stop_s <= b.start_s for a, b in zip(results[0][0].spans, results[0][0].spans[1:], strict=False))


def alone(captured: CapturedModule, model: LoadedModel, decision: object) -> object:
    return engine_of(decision, model, captured, InProcessTransport(Hub(1, [(0,)]), 0))


def test_a_batch_of_another_size_is_refused_with_both_sizes() -> None:
    model, captured = network("resnet")
    engine = alone(captured, model, decide(captured.graph, [], (2, 2)))
    with pytest.raises(UsageError, match=r"a batch has 6 samples, the plan's global batch is 4"):
        engine.step(*batch_of(model, 6, 0))
    with pytest.raises(UsageError, match="takes 2 tensors"):
        engine.step((), ())


def test_a_plan_for_other_layers_is_refused_by_name() -> None:
    model, captured = network("resnet")
    decision = decide(network("vgg")[1].graph, [], (2, 2))
    with pytest.raises(CorruptFileError, match="layer bn1 is in no stage"):
        alone(captured, model, decision)


def tied(*, input_shape: tuple[int, ...] = (4, 3)) -> torch.nn.Module:
    first = torch.nn.Linear(3, 3)
    second = torch.nn.Linear(3, 3)
    second.weight = first.weight
    return torch.nn.Sequential(first, torch.nn.ReLU(), second)


@pytest.mark.parametrize("cuts", [[], [0.5]], ids=["one stage", "two stages"])
def test_a_tied_parameter_gets_the_gradient_of_all_its_uses(cuts: list[float]) -> None:
    model = load_model(ModelSource(f"{__name__}:tied", {}, (4, 3), "float64"))
    decision = decide(capture(model).graph, cuts, (2, 2))
    assert_equal(train_by_plan(model, decision), train_serially(model, (2, 2)))


class Fixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).reshape(4, 3)


def fixed(*, input_shape: tuple[int, ...] = (4, 3)) -> torch.nn.Module:
    return Fixed()


def test_a_model_for_one_number_of_samples_runs_with_that_number_only() -> None:
    model = load_model(ModelSource(f"{__name__}:fixed", {}, (4, 3), "float64"))
    captured = capture(model)
    alone(captured, model, decide(captured.graph, [], (4, 4)))
    with pytest.raises(UnsupportedModelError, match="captured for 4 samples only"):
        alone(captured, model, decide(captured.graph, [], (2, 2)))


def test_the_optimiser_is_made_for_the_stage_and_steps_once() -> None:
    model, captured = network("resnet")
    made = []

    def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        made.append(len(parameters))
        return sgd(parameters)

    run_ranks(model, decide(captured.graph, ["fc"], (2, 2)), [batch_of(model, 4, 0)], optimizer=optimizer)
    assert sorted(made) == [2, len(captured.graph.parameters) - 2]
