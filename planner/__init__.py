"""The planner: chooses stages, schedule, devices and layouts from a profile.  Needs no torch and no devices.

Modules:

    baselines      The planners of other papers, and the strategies of everyday use
    catalogue      Devices and links one does not have at hand: one YAML file a device, every figure with its source and
                   date
    check          The checker: whether a plan is legal, as it was asked for, and what the cost model forecasts of its
                   decision
    costs          What a plan costs: layers, links, memory, and the simulation of a whole step
    export         Plans, profiles and timelines in the forms of other tools: tables (pandas), Chrome traces (Perfetto),
                   launchers
    ir             The nouns that flow between profiler, planner and runtime: plain frozen dataclasses and two rules
    kernels        Kernels and links of GPUs that are not here, from tables that others measured
    layers         Layer kinds: one class a kind, which states the kind's access relation, in a module for each family
    passes         Passes over action lists: list in, list out
    proof          Proofs of plans: what a search claims, in a form that little code verifies
    schedules      Schedules: one function each, ``order(pipeline) -> Schedule``, in a module for each family
    sites          Who owns which sites of a micro-batch of point clouds: blocks, their one order, intervals of it, and
                   their balance
    solvers        Solvers by name: each is a function ``solve(problem, progress) -> Plan``
    transformers   A transformer's training step on a cluster of GPUs: what it takes, what it holds, and which way is
                   the best
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.ir import validation
from planner.ir.profile import Profile
from planner.ir.quantities import Fault

__all__: list[str] = []


def _misfits(profile: Profile) -> Iterator[Fault]:
    from planner.layers.fitting import misfits  # late: a rank reads no profile

    yield from misfits(profile)


validation.also(Profile, _misfits)  # floors: files are read below the layer kinds, which have a say in what makes sense
