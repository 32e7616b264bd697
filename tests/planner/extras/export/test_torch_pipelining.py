"""Plans for torch's own pipelining: what ranks compute, where modules are split, and what torch cannot express."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.chains import chain_profile
from planner.extras.export.torch_pipelining import (
    BEGINNING,
    END,
    SplitPoint,
    TorchPipeline,
    is_loss,
    split_points,
    torch_pipelining,
)
from planner.ir.errors import UsageError
from planner.ir.graph import Graph, Layer, TensorSpec
from planner.ir.plan import Decision, Placement, Stage
from planner.ir.profile import Profile
from tests.planner.factories import chain_decision, plan_of

PROFILE = chain_profile(4, num_devices=4)

BATCHES = (2, 2, 2)


def export(decision: Decision, profile: Profile = PROFILE) -> TorchPipeline:
    good = plan_of(PROFILE, chain_decision(PROFILE))
    return torch_pipelining(replace(good, decision=decision), profile.graph, "p.csv")


@pytest.mark.parametrize(
    ("schedule", "rows"),
    [
        ("gpipe", ["0F0,0F1,0F2,0B0,0B1,0B2", "1F0,1F1,1F2,1B0,1B1,1B2"]),
        ("1f1b", ["0F0,0F1,0B0,0F2,0B1,0B2", "1F0,1B0,1F1,1B1,1F2,1B2"]),
        ("1f1b-2bp", ["0F0,0F1,0I0,0F2,0I1,0I2,0W0,0W1,0W2", "1F0,1I0,1F1,1I1,1F2,1I2,1W0,1W1,1W2"]),
    ],
)
def test_a_row_a_rank_has_what_it_computes(schedule: str, rows: list[str]) -> None:
    assert export(chain_decision(PROFILE, (2,), BATCHES, schedule=schedule)).schedule.splitlines() == rows


def test_the_rest_is_described() -> None:
    found = export(chain_decision(PROFILE, (1, 3), BATCHES, ranks=((2,), (0,), (1,))))
    described = json.loads(found.description)
    stages = described.pop("stages")
    assert described == {
        "schedule": "1f1b",
        "csv": "p.csv",
        "csv_format": "compute_only",
        "num_stages": 3,
        "num_microbatches": 3,
        "samples_per_microbatch": 2,
        "stage_to_rank": [2, 0, 1],
        "split_spec": {"l1": "BEGINNING", "l3": "BEGINNING"},
    }
    assert [(stage["first_layer"], stage["last_layer"], stage["device"]) for stage in stages] == [
        ("l0", "l0", "n0/cpu2"),
        ("l1", "l2", "n0/cpu0"),
        ("l3", "loss", "n0/cpu1"),
    ]
    assert found.inside_modules == ()


def test_a_cut_inside_a_module_is_said() -> None:
    profile = chain_profile(4, parameter_bytes=0)
    layers = tuple(replace(layer, attributes={"op": f"aten.{layer.name}.default"}) for layer in profile.graph.layers)
    profile = replace(profile, graph=replace(profile.graph, layers=layers))
    found = export(chain_decision(profile, (2,), BATCHES), profile)
    assert json.loads(found.description)["split_spec"] is None
    assert found.inside_modules == ("stage 1 begins between l1 and l2",)


def changed(name: str, **attributes: Any) -> Profile:
    """The profile with another layer ``name``."""
    layers = tuple(replace(x, **attributes) if x.name == name else x for x in PROFILE.graph.layers)
    return replace(PROFILE, graph=replace(PROFILE.graph, layers=layers))


INTEGERS = replace(PROFILE.graph.layers[1].outputs[0], dtype="int64")

SKIPS = chain_profile(4, num_devices=3, skips=((0, 3),))

ON_THREE: dict[str, Any] = {"ranks": ((0, 1), (2,)), "shares": ((3, 1), (1,))}

REFUSALS: list[tuple[Profile, dict[str, Any], str]] = [
    (
        PROFILE,
        {"micro_batches": (4, 4), **ON_THREE},
        "stage 0 is on ranks 0, 1 (samples 3:1): torch runs a stage on one rank",
    ),
    (SKIPS, {"cuts": (1, 3)}, "stage 0 hands l0 to stage 2: torch hands values to the next stage alone"),
    (PROFILE, {"micro_batches": (4, 3, 3)}, "micro-batches have 4, 3, 3 samples"),
    (PROFILE, {"schedule": "pipedream"}, "rank 0 has 0"),
    (PROFILE, {"schedule": "pipedream-2bw"}, "torch knows one version of the weights in a step"),
    (PROFILE, {"schedule": "1f1b-sno"}, "rank 0 has 0SEND_F0>1!: torch has no message that holds its rank"),
    (PROFILE, {"schedule": "forward"}, "it has forward passes alone: torch wants a backward for each"),
    (PROFILE, {"cuts": (4,)}, "stage 1 has nothing but the loss: torch needs a part of the model there"),
    (
        changed("l2", inputs=("l1", "x"), kind="pointwise"),
        {},
        "stage 1 (l2) reads x: torch feeds inputs to stage 0 alone",
    ),
    (
        changed("l3", parameters=("l0.weight",)),
        {},
        "l0.weight is used by stages 0 and 1: torch does not sum its gradients",
    ),
    (changed("l1", outputs=(INTEGERS,)), {}, "no gradient comes back from stage 1 to 0: torch waits for one"),
    (PROFILE, {"ranks": ((0,), (2,))}, "rank 1 has no stage: torch wants one on every rank"),
    (PROFILE, {"loss": 0}, "loss of the loss is on stage 0"),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("profile", "decided", "why"), REFUSALS)
def test_what_torch_cannot_express_is_refused(profile: Profile, decided: dict[str, Any], why: str) -> None:
    known = {"cuts": (2,), "micro_batches": (2, 2, 2, 2) if "pipedream" in str(decided) else BATCHES, **decided}
    loss = known.pop("loss", 1)
    decision = chain_decision(profile, **known)
    if not loss:
        decision = replace(decision, layers={**decision.layers, "loss": Placement(loss)})
    with pytest.raises(UsageError, match="cannot express this plan") as caught:
        export(decision, profile)
    assert why in "\n".join(caught.value.details)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        export(chain_decision(PROFILE, (2,), (4, 2), **ON_THREE, schedule="1f1b-sno"))
    assert len(caught.value.details) >= 3


def test_recomputation_is_left_to_the_user_but_said() -> None:
    decision = chain_decision(PROFILE, (2,), BATCHES)
    first, second = decision.stages
    decision = replace(decision, stages=(Stage(first.ranks, first.devices, recompute=True), second))
    stages = json.loads(export(decision).description)["stages"]
    assert [stage["recompute"] for stage in stages] == [True, False]


SPEC = TensorSpec(("sample", "feature"), (2, 4), "float32")


def graph_of(*layers: str) -> Graph:
    """Layers in a row, each ``name operator`` or ``name operator parameter``; a loss follows."""
    found = []
    value = "inputs"
    for text in (*layers, "loss cross_entropy_loss"):
        name, operator, *parameters = text.split()
        attributes = {"op": f"aten.{operator}.default"}
        found.append(Layer(name, "pointwise", (value,), (SPEC,), tuple(parameters), attributes))
        value = name
    return Graph(2, {"inputs": SPEC}, tuple(found), {}, "loss")


def cut(model: Graph, *after: str) -> list[tuple[str, str]]:
    """(module, point) of stages that end with the layers ``after``."""
    stage = 0
    stage_of = {}
    for layer in model.layers:
        stage_of[layer.name] = stage
        stage += layer.name in after
    return [(point.module, point.point) for point in split_points(model, stage_of)]


BLOCK = graph_of(
    "block.conv conv2d block.conv.weight",
    "block.bn batch_norm block.bn.weight",
    "block.relu relu",
    "block.add add",
    "block.relu_2 relu",
    "pool max_pool2d",
    "flatten flatten",
    "features.1 relu",
    "fc linear fc.weight fc.bias",
)

WEIGHTED = {name: f"{name} linear {name}.weight" for name in "abc"}

TWICE = graph_of("sin sin", "act relu", "act_2 relu", "fc linear fc.weight", "cos cos", "fc_2 linear fc.weight")

AROUND = ["a.conv conv2d a.conv.weight", "a.add add"]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("model", "after", "points"),
    [
        (BLOCK, "block.conv", [("block.bn", BEGINNING)]),  # a layer with parameters is a call of its module
        (BLOCK, "block.bn", [("block.bn", END)]),  # relu may be a part of block or an operator that it calls
        (BLOCK, "block.relu", [("", BEGINNING)]),
        (BLOCK, "block.add", [("", BEGINNING)]),
        (BLOCK, "block.relu_2", [("pool", BEGINNING)]),  # it is not called like its operator
        (BLOCK, "pool", [("pool", END)]),
        (BLOCK, "flatten", [("features.1", BEGINNING)]),
        (BLOCK, "features.1", [("fc", BEGINNING)]),
        # a module around what it computes itself ends there
        (graph_of(*AROUND, "b.add add", "b.conv conv2d b.conv.weight"), "a.add", [("b", BEGINNING)]),
        (graph_of(*AROUND, "flatten flatten", "fc linear fc.weight"), "a.add", [("a", END)]),
        # a module that is called twice tells nothing
        *((TWICE, after, [("", BEGINNING)]) for after in ("sin", "act", "cos")),
        # weights of another module make no call of it
        (
            graph_of("token embedding token.weight", "sin sin", "linear linear token.weight", "cos cos"),
            "sin",
            [("", BEGINNING)],
        ),
        # a module is named once even if it is a stage of its own
        (graph_of(WEIGHTED["a"], WEIGHTED["b"], "sin sin", WEIGHTED["c"]), "a b", [("b", BEGINNING), ("", BEGINNING)]),
    ],
)
def test_a_cut_is_told_by_a_module_that_certainly_begins_or_ends_there(
    model: Graph, after: str, points: list[tuple[str, str]]
) -> None:
    assert cut(model, *after.split()) == points


def test_stages_that_are_no_runs_of_layers_begin_nowhere() -> None:
    model = graph_of(*WEIGHTED.values())
    points = split_points(model, {"a": 0, "b": 1, "c": 0, "loss": 1})
    assert {point.module for point in points} == {""}
    assert points[0] == SplitPoint(1, "", BEGINNING, "a", "b")


def test_what_the_loss_computes_is_no_part_of_the_model() -> None:
    assert [is_loss(BLOCK, name) for name in ("loss", "loss.flatten", "lossy", "fc")] == [True, True, False, False]
