from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from planner.costs.rows import in_flight, layout_text, stage_layouts
from planner.ir.plan import Placement
from tests.planner.factories import chain_decision

PROFILE = chain_profile(4)


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        ({}, "whole"),
        ({"sample": (0, 3, 4)}, "samples 6:2"),
        ({"height": (0, 5, 8)}, "height 5:3"),
        ({"sample": (0, 1, 2), "height": (0, 4, 8)}, "samples 4:4 x height 4:4"),
    ],
)
def test_a_layout_is_put_in_words(cuts: dict[str, tuple[int, ...]], words: str) -> None:
    assert layout_text(Placement(0, cuts), 8) == words


def test_margins_and_shared_channels_are_told() -> None:
    assert layout_text(Placement(0, {"height": (0, 4, 8)}, margin=2), 8) == "height 4:4 (margin 2)"
    assert layout_text(Placement(0, {"channel": (0, 4, 8)}, ways=2), 8) == "channel 4:4 (2 ways)"


def test_layers_of_a_stage_are_counted_by_layout() -> None:
    shared = chain_decision(PROFILE, micro_batches=(4,), ranks=((0, 1),), shares=((3, 1),))
    layers = {**shared.layers, "l1": Placement(0, {})}
    assert stage_layouts(replace(shared, layers=layers), 0) == {"samples 3:1": 4, "whole": 1}
    assert stage_layouts(chain_decision(PROFILE, cuts=(2,)), 0) == {}


@pytest.mark.parametrize(("schedule", "counts"), [("gpipe", (4, 4)), ("1f1b", (2, 1)), ("zb-h1", (2, 2))])
def test_micro_batches_in_flight_are_those_of_the_program(schedule: str, counts: tuple[int, int]) -> None:
    decision = chain_decision(PROFILE, cuts=(2,), micro_batches=(2, 2, 2, 2), schedule=schedule)
    assert tuple(in_flight(decision, stage) for stage in range(2)) == counts


def test_a_program_that_cannot_be_read_has_none() -> None:
    decision = chain_decision(PROFILE, cuts=(2,))
    assert in_flight(replace(decision, program=(("nonsense",),)), 0) == 0
    assert in_flight(replace(decision, program=()), 1) == 0
