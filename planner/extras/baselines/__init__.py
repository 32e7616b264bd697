"""The planners of other papers.

A paper is a folder: ``planner`` is its own objective and search, ``format`` reads the files that it published,
``solver`` turns a problem of ours into one of its own and its answer into a plan.  A small paper without files of its
own is one module, ``best_pipeline`` its planner and ``solve`` its solver.  ``common`` is what they share.

Modules:

    bapipe       BaPipe: a balanced pipeline with one device a stage, and the schedule that suits links and memory
    common       What the papers' planners share
    dapple       DAPPLE: the shortest latency of a synchronous pipeline of replicated stages, with its three phases
    dryden       Dryden et al., "Improving Strong-Scaling of CNN Training by Exploiting Finer-Grained Parallelism",
                 IPDPS 2019
    hpgo         HPGO, the planner that DAPPLE's authors released: few families of pipelines, the best by one closed
                 form
    pipedream    PipeDream (Narayanan et al., SOSP 2019): the shortest slowest stage of a pipeline with replicated
                 stages
    piper        Piper (Tarnawski, Narayanan and Phanishayee, NeurIPS 2021)
    sailor       Sailor's profiles (Strati et al., SOSP 2025): seconds of each layer by GPU, micro-batch and tensor
                 degree
    sparsepipe   SparsePipe: PipeDream's pipeline on devices of several types, a stage as slow as its slowest device
    tarnawski    Tarnawski et al. (NeurIPS 2020): contiguous sets of operators on accelerators, the smallest largest
                 load
"""

from __future__ import annotations

from typing import ClassVar

from planner.ir.planner_extra import PlannerExtra


class PublishedPlanners(PlannerExtra):
    """The planners of other papers."""

    solvers: ClassVar = {
        "bapipe": "planner.extras.baselines.bapipe:solve",
        "dapple": "planner.extras.baselines.dapple:solve",
        "dryden": "planner.extras.baselines.dryden:solve",
        "pipedream": "planner.extras.baselines.pipedream.solver:solve",
        "pipedream-hierarchical": "planner.extras.baselines.pipedream.solver:solve_hierarchical",
        "piper": "planner.extras.baselines.piper.solver:solve",
        "piper-equal": "planner.extras.baselines.piper.solver:solve_equal",
        "sparsepipe": "planner.extras.baselines.sparsepipe:solve",
        "tarnawski": "planner.extras.baselines.tarnawski.solver:solve",
    }

    def stated_s(self, solver: str) -> float | None:
        from planner.extras.baselines.common.budgets import STATED_S

        return STATED_S.get(solver)


EXTRA = PublishedPlanners()
