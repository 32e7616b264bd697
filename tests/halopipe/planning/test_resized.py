"""Profiles for other sizes than were measured: what a layer costs there."""

from __future__ import annotations

import pytest

from halopipe.planning.resized import parse_sizes, resized
from planner.ir.codec import fingerprint
from planner.ir.errors import UsageError
from planner.ir.profile import ModelSource, Profile
from profiler import load_model
from runtime.stage.shapes import graph_of_sizes
from tests.captures import capture
from tests.planner.networks import Network, priced


def profiled(height: int) -> Profile:
    made = Network(1, 2, height)
    return priced(made, made.relu(made.conv(made.image, 4)), sizes=(1,))


def test_a_layer_costs_as_many_times_as_much_as_it_does_of_the_work() -> None:
    small, large = profiled(32), profiled(64)
    found = resized(small, large.graph)
    for kind, measured in small.measurements.items():
        for before, after in zip(measured, found.measurements[kind], strict=True):
            assert after.forward_s == pytest.approx(4 * before.forward_s)
            assert after.saved_bytes == 4 * before.saved_bytes
    assert found.graph == large.graph


def test_what_was_measured_counts_as_a_part_of_the_large_image() -> None:
    small = profiled(32)
    found = resized(small, profiled(64).graph)
    (parts,) = found.parts.values()
    assert {(one.layer, one.part) for one in parts if one.layer != "loss"} == {
        ("conv0", (4, 32, 32)),
        ("pointwise1", (4, 32, 32)),
    }


def test_a_graph_of_another_network_is_refused() -> None:
    made = Network(1, 2, 64)
    with pytest.raises(UsageError, match="other layers"):
        resized(profiled(32), made.graph(made.conv(made.image, 4)))


def test_sizes_as_text() -> None:
    assert parse_sizes("height=8192,width=4096") == {"height": 8192, "width": 4096}
    for text in ("height", "height=0", "height=x"):
        with pytest.raises(UsageError, match="names no size"):
            parse_sizes(text)


@pytest.mark.exhaustive("two captures of a network whose sizes vary")
def test_the_graph_of_other_sizes_is_that_of_a_capture_there() -> None:
    small, large = (
        capture(load_model(ModelSource("profiler.models.unet2d:unet2d", {"width": "2"}, (1, 1, extent, extent))))
        for extent in (16, 32)
    )
    found = graph_of_sizes(small, {"height": 32, "width": 32})
    assert fingerprint(found) == fingerprint(large.graph)
