"""Small handmade plans with round numbers, for the planner's tests; of profiles by ``benchmarks.chains``.

profile = chain_profile(3, num_devices=2, forward_s=(1e-3, 2e-3, 1e-3))
decision = chain_decision(profile, cuts=(2,), micro_batches=(2, 2))    # layers 0 and 1 | layer 2 and the loss
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from planner.costs.simulator.prices import SlotPrices, prices_of, resources
from planner.costs.simulator.program import CompiledProgram
from planner.costs.stages.action_costs import StageCosts
from planner.ir.cluster import MEASURED
from planner.ir.codec import fingerprint
from planner.ir.layout import Layout, cut_points
from planner.ir.plan import Decision, Placement, Plan, PlanInputs, Prediction, RankPrediction, Search, Stage
from planner.ir.profile import Profile
from planner.ir.program import Program
from planner.ir.proof import Potential, Proof, ProofPrices, ProofSpace
from planner.ir.schedule import Pipeline, StageGraph
from planner.layers.boundary import Boundaries
from planner.passes import lower
from planner.schedules import schedule as schedule_named


def chain_decision(
    profile: Profile,
    cuts: Sequence[int] = (),
    micro_batches: tuple[int, ...] = (2, 2),
    ranks: Sequence[tuple[int, ...]] | None = None,
    shares: Sequence[tuple[int, ...]] | None = None,
    schedule: str = "1f1b",
) -> Decision:
    """The lowered decision that cuts the graph before the layers ``cuts``.

    Args:
        ranks: of each stage; stage ``s`` on rank ``s`` if not given.
        shares: samples of each rank, by stage; equal if not given.
    """
    graph = profile.graph
    bounds = (0, *cuts, len(graph.layers))
    num_stages = len(bounds) - 1
    groups = tuple(ranks) if ranks is not None else tuple((s,) for s in range(num_stages))
    share_of = tuple(shares) if shares is not None else tuple((1,) * len(group) for group in groups)
    layouts = [Layout({"sample": cut_points(s)} if len(s) > 1 else {}) for s in share_of]
    stage_of = {layer.name: s for s, (a, b) in enumerate(pairwise(bounds)) for layer in graph.layers[a:b]}
    boundaries = Boundaries.of(graph, stage_of, layouts, groups)
    edges = boundaries.edges()
    stages = StageGraph(num_stages, len(micro_batches), edges, boundaries.prepares())
    routes = boundaries.routes(edges, micro_batches)
    num_ranks = 1 + max(rank for group in groups for rank in group)
    program = lower(schedule_named(schedule)(Pipeline(stages)), stages, groups, routes, num_ranks)
    devices = profile.cluster.devices
    return Decision(
        schedule=schedule,
        micro_batches=micro_batches,
        stages=tuple(Stage(group, tuple(devices[rank].name for rank in group)) for group in groups),
        layers={name: Placement(s, layouts[s].cuts) for name, s in stage_of.items()},
        program=tuple(tuple(str(action) for action in row) for row in program.rows),
    )


def batch_bytes(profile: Profile, decision: Decision) -> int:
    """Of the inputs of a step."""
    times = decision.global_batch / profile.graph.samples
    return round(sum(spec.num_bytes * (times if spec.has_samples else 1) for spec in profile.graph.inputs.values()))


def plan_of(profile: Profile, decision: Decision, step_s: float = 1e-3) -> Plan:
    """A plan with ``decision`` and a made-up prediction."""
    ranks = tuple(
        RankPrediction(rank, step_s, 0.0, 0.0, 2**20, profile.cluster.devices[rank].memory_bytes)
        for rank in range(decision.num_ranks)
    )
    return Plan(
        inputs=PlanInputs(
            model=profile.model,
            optimizer=profile.optimizer,
            model_fingerprint=fingerprint(profile.graph),
            profile_fingerprint=fingerprint(profile),
            cluster_fingerprint=fingerprint(profile.cluster),
        ),
        decision=decision,
        prediction=Prediction(step_s, decision.global_batch / step_s, 0.0, ranks, MEASURED),
        search=Search("by hand", "none", "heuristic", 0.0, 0.0, 0, 0),
    )


def made_up_proof() -> Proof:
    """A proof of one layer, with made-up figures."""
    return Proof(
        "sha256:0",
        "sha256:1",
        1.0,
        0.9,
        ProofSpace((1,), ("1f1b",), ("nothing",), ("1 x cpu on n0",), 2, True),
        (ProofPrices("cpu", 1, *6 * ((0.5,),)),),
        (Potential(1, (1,), (1,), "nothing", (0,), *4 * ((0.9,),)),),
        ("1: 1 1 1 nothing",),
    )


def slot_prices(program: Program, compiled: CompiledProgram, costs: StageCosts) -> SlotPrices:
    """All prices of a program, by what its transfers carry."""
    transfer_bytes = []
    for slot in compiled.transfers:
        ends = (slot.src, slot.dst) if slot.forward else (slot.dst, slot.src)
        message = next(m for m in program.messages[slot.route] if (m.src, m.dst) == ends)
        transfer_bytes.append(message.forward_bytes if slot.forward else message.backward_bytes)
    return prices_of(compiled, costs, transfer_bytes, resources(compiled, costs.cost_model.network))
