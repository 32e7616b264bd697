"""Whole plans made by hand, for the tests of runs."""

from __future__ import annotations

import json
from dataclasses import replace

from benchmarks.layouts import profile_of
from planner.ir.codec import fingerprint
from planner.ir.plan import Plan, PlanInputs, Prediction, Search
from planner.ir.problem import Request, Rule
from planner.ir.profile import ModelSource, Optimizer, Profile
from profiler.source.source import load_model
from tests.captures import capture
from tests.runtime.plans import decide

RESNET = ModelSource(
    "profiler.models.resnet:resnet18", {"width": "4", "num_classes": "5", "depths": "[1, 1]"}, (4, 3, 16, 16)
)


def plan_of(source: ModelSource, cuts: list[float], micro_batches: tuple[int, ...] = (2, 2), **options: object) -> Plan:
    """The plan of a lowered decision, see :func:`tests.runtime.plans.decide`; predicted to take 0.01 s."""
    graph = capture(load_model(source)).graph
    inputs = PlanInputs(source, Optimizer("SGD", {"lr": 0.01, "momentum": 0.9}), fingerprint(graph), "", "")
    prediction = Prediction(0.01, 400.0, 0.1, (), "measured")
    search = Search("by hand", "none", "heuristic", 0.0, 0.0, 0, 0)
    return Plan(inputs, decide(graph, cuts, micro_batches, **options), prediction, search)


def mined(where: int = -1, deed: str = "", direction: str = "F", **more: object) -> Plan:
    """Three layers on two stages; layer ``where`` does ``deed`` in the last micro-batch of the poisoned step."""
    arguments = {"where": where, "deed": deed, "direction": direction, **more}
    texts = {name: json.dumps(value) for name, value in arguments.items()}
    return plan_of(ModelSource("tests.halopipe.bombs:mined", texts, (4, 3)), [0.5])


def profiled(plan: Plan, num_devices: int) -> tuple[Plan, Profile]:
    """The plan on cores of one host, with a profile of a datasheet that it may be made anew from, on 2 stages."""
    source = plan.inputs.model
    graph = capture(load_model(source)).graph
    found = profile_of(source, graph, num_devices)
    cores = tuple(replace(each, name=f"n0/cpu{rank}", host="n0") for rank, each in enumerate(found.cluster.devices))
    profile = replace(found, optimizer=plan.inputs.optimizer, cluster=replace(found.cluster, devices=cores))
    inputs = replace(
        plan.inputs,
        profile_fingerprint=fingerprint(profile),
        cluster_fingerprint=fingerprint(profile.cluster),
        request=Request(fix=(Rule(graph.layers[-1].name, "stage", "1"),)),
    )
    return replace(plan, inputs=inputs), profile
