from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from planner.extras.export.torch_pipelining import TorchPipeline, torch_pipelining
from planner.ir.errors import UsageError
from planner.ir.plan import Decision, Placement, Stage
from planner.ir.profile import Profile
from tests.planner.factories import chain_decision, plan_of

PROFILE = chain_profile(4, num_devices=4)
BATCHES = (2, 2, 2)


def export(decision: Decision, profile: Profile = PROFILE) -> TorchPipeline:
    good = plan_of(PROFILE, chain_decision(PROFILE))
    return torch_pipelining(replace(good, decision=decision), profile.graph, "p.csv")


def refusal(decision: Decision, profile: Profile = PROFILE) -> str:
    with pytest.raises(UsageError, match="cannot express this plan") as caught:
        export(decision, profile)
    return "\n".join(caught.value.details)


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


def test_replicas_are_refused_with_their_shares() -> None:
    decision = chain_decision(PROFILE, (2,), (4, 4), ranks=((0, 1), (2,)), shares=((3, 1), (1,)))
    assert refusal(decision) == "stage 0 is on ranks 0, 1 (samples 3:1): torch runs a stage on one rank"


def test_a_skip_is_refused() -> None:
    profile = chain_profile(4, num_devices=3, skips=((0, 3),))
    assert refusal(chain_decision(profile, (1, 3), BATCHES), profile) == (
        "stage 0 hands l0 to stage 2: torch hands values to the next stage alone"
    )


def test_micro_batches_of_several_sizes_are_refused() -> None:
    assert refusal(chain_decision(PROFILE, (2,), (4, 3, 3))).startswith("micro-batches have 4, 3, 3 samples")


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_weight_versions_are_refused(schedule: str) -> None:
    text = refusal(chain_decision(PROFILE, (2,), (2, 2, 2, 2), schedule=schedule))
    assert "rank 0 has 0" in text
    assert "torch knows one version of the weights in a step" in text


def test_messages_that_hold_their_rank_are_refused() -> None:
    text = refusal(chain_decision(PROFILE, (2,), BATCHES, schedule="1f1b-sno"))
    assert "rank 0 has 0SEND_F0>1!: torch has no message that holds its rank" in text


def test_forward_passes_alone_are_refused() -> None:
    text = refusal(chain_decision(PROFILE, (2,), BATCHES, schedule="forward"))
    assert text == "it has forward passes alone: torch wants a backward for each"


def test_a_stage_of_the_loss_alone_is_refused() -> None:
    assert refusal(chain_decision(PROFILE, (4,), BATCHES)) == (
        "stage 1 has nothing but the loss: torch needs a part of the model there"
    )


def test_an_input_that_a_later_stage_reads_is_refused() -> None:
    layers = tuple(
        replace(layer, inputs=("l1", "x"), kind="pointwise") if layer.name == "l2" else layer
        for layer in PROFILE.graph.layers
    )
    profile = replace(PROFILE, graph=replace(PROFILE.graph, layers=layers))
    assert refusal(chain_decision(profile, (2,), BATCHES), profile) == (
        "stage 1 (l2) reads x: torch feeds inputs to stage 0 alone"
    )


def test_tied_parameters_of_two_stages_are_refused() -> None:
    layers = tuple(
        replace(layer, parameters=("l0.weight",)) if layer.name == "l3" else layer for layer in PROFILE.graph.layers
    )
    profile = replace(PROFILE, graph=replace(PROFILE.graph, layers=layers))
    assert refusal(chain_decision(profile, (2,), BATCHES), profile) == (
        "l0.weight is used by stages 0 and 1: torch does not sum its gradients"
    )


def test_an_edge_without_gradient_is_refused() -> None:
    integers = replace(PROFILE.graph.layers[1].outputs[0], dtype="int64")
    layers = tuple(
        replace(layer, outputs=(integers,)) if layer.name == "l1" else layer for layer in PROFILE.graph.layers
    )
    profile = replace(PROFILE, graph=replace(PROFILE.graph, layers=layers))
    decision = chain_decision(profile, (2,), BATCHES)
    assert refusal(decision, profile) == "no gradient comes back from stage 1 to 0: torch waits for one"


def test_a_rank_without_a_stage_is_refused() -> None:
    decision = chain_decision(PROFILE, (2,), BATCHES, ranks=((0,), (2,)))
    assert refusal(decision) == "rank 1 has no stage: torch wants one on every rank"


def test_a_loss_that_begins_before_the_last_stage_is_refused() -> None:
    decision = chain_decision(PROFILE, (2,), BATCHES)
    layers = dict(decision.layers)
    layers["loss"] = Placement(0)
    assert "loss of the loss is on stage 0" in refusal(replace(decision, layers=layers))


def test_everything_that_is_wrong_is_said_at_once() -> None:
    decision = chain_decision(PROFILE, (2,), (4, 2), ranks=((0, 1), (2,)), shares=((3, 1), (1,)), schedule="1f1b-sno")
    assert len(refusal(decision).splitlines()) >= 3


def test_recomputation_is_left_to_the_user_but_said() -> None:
    decision = chain_decision(PROFILE, (2,), BATCHES)
    first, second = decision.stages
    decision = replace(decision, stages=(Stage(first.ranks, first.devices, recompute=True), second))
    stages = json.loads(export(decision).description)["stages"]
    assert [stage["recompute"] for stage in stages] == [True, False]
