"""Every synchronous schedule, run by threads, computes what one device computes: losses, gradients and parameters."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from planner.ir.errors import UsageError
from planner.ir.schedule import Pipeline, Schedule
from planner.schedules import names, positions, schedule, traits
from profiler.capture import Captured, capture
from profiler.source import LoadedModel
from tests.runtime.plans import Trained, assert_equal, decide, model_of, train_by_plan, train_serially

SYNCHRONOUS = tuple(name for name in names() if traits(name).synchronous and traits(name).trains)
ELABORATE = ("1f1b-so", "1f1b-2bp-fill", "greedy", "interleaved", "zb-h2", "zb-v")
STEPS = {"gpt": 2, "unet": 1}
MICRO_BATCHES = (2, 1, 2, 1, 1)  # not a multiple of the positions


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@cache
def network(name: str) -> tuple[LoadedModel, Captured]:
    if name == "gpt":
        model = model_of("gpt:gpt", (4, 6), vocabulary=17, width=8, layers=2, heads=2)
    else:
        model = model_of("unet3d:unet3d", (4, 1, 8, 8, 8), width=2, depth=2)
    return model, capture(model)


@cache
def serial(name: str) -> Trained:
    return train_serially(network(name)[0], MICRO_BATCHES, STEPS[name])


def check(
    model_name: str, name: str, groups: list[tuple[int, ...]], shares: list[tuple[int, ...]], **how: object
) -> None:
    """Trains on one group of ranks a position, with as many stages on each as the schedule allows up to two."""
    per_position = 1 if traits(name).stages_per_position == 1 else 2
    where = positions(name, len(groups), per_position)

    def order(pipeline: Pipeline) -> Schedule:
        return schedule(name)(replace(pipeline, positions=where, **how))

    model, captured = network(model_name)
    decision = decide(
        captured.graph,
        [cut / len(where) for cut in range(1, len(where))],
        MICRO_BATCHES,
        [groups[position] for position in where],
        [shares[position] for position in where],
        order,
    )
    assert_equal(train_by_plan(model, decision, STEPS[model_name]), serial(model_name))


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_a_chain_of_stages_computes_what_one_device_computes(name: str) -> None:
    check("gpt", name, [(0,), (1,), (2,)], [(1,), (1,), (1,)])


@pytest.mark.parametrize("name", [name for name in SYNCHRONOUS if name in ELABORATE])
def test_skips_over_stages_and_replicas_compute_what_one_device_computes(name: str) -> None:
    check("unet", name, [(0,), (1, 2)], [(1,), (1, 1)])


@pytest.mark.parametrize("name", [name for name in SYNCHRONOUS if traits(name).windowed])
def test_windows_compute_what_one_device_computes(name: str) -> None:
    check("gpt", name, [(0,), (1,), (2,)], [(1,), (1,), (1,)], windows=(4, 3, 3) * (2 if name == "greedy" else 1))


@pytest.mark.parametrize("name", [name for name in names() if not traits(name).synchronous])
def test_schedules_that_change_the_weights_within_a_step_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="updates weights within a step, which cannot be run"):
        check("gpt", name, [(0,), (1,)], [(1,), (1,)])
