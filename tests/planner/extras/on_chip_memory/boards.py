"""Problems on boards with two memories."""

from __future__ import annotations

import random
from dataclasses import replace

from planner.extras.on_chip_memory.costs import off_chip
from planner.ir.problem import Problem
from planner.ir.profile import Measurement
from tests.planner.solvers.instances import random_problem


def board_problem(seed: int) -> Problem:
    """A random problem on boards: most stream, and some have a second memory; parameters outside of it are slower."""
    problem = random_problem(seed)
    draw = random.Random(seed + 10_000)
    profile = problem.profile
    streams = draw.random() < 0.8
    two = draw.random() < 0.7

    def slower(times: float) -> dict[str, tuple[Measurement, ...]]:
        names = ("forward_s", "backward_s", "backward_input_s", "backward_weight_s")
        return {
            off_chip(kind): tuple(replace(m, **{name: times * getattr(m, name) for name in names}) for m in found)
            for kind, found in profile.measurements.items()
        }

    more = slower(draw.choice([1.2, 3.0])) if two else {}
    devices = tuple(
        replace(device, streams=streams, on_chip_bytes=draw.choice([0, 600, 1500, 4000]) * two)
        for device in profile.cluster.devices
    )
    schedules = draw.choice([(), ("fbp-as",), ("1f1b-as", "1f1b")])
    parameters = {**profile.parameters, **{off_chip(kind): costs for kind, costs in profile.parameters.items() if two}}
    overheads = profile.action_overhead_s
    boards = replace(
        profile,
        cluster=replace(profile.cluster, devices=devices),
        measurements={**profile.measurements, **more},
        parameters=parameters,
        action_overhead_s={**overheads, **{off_chip(kind): each for kind, each in overheads.items() if two}},
    )
    return replace(problem, profile=boards, schedules=schedules)
