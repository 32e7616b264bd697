from __future__ import annotations

import pytest

from benchmarks.layouts import EVERYTHING, SPACE, Case, measure_case, profile_of
from planner.ir.profile import ModelSource
from tests.planner.networks import priced, residual


@pytest.mark.parametrize("case", [Case(4, 4, SPACE), Case(4, 2, EVERYTHING, 6)])
def test_nothing_is_better_than_the_exact_layouts(case: Case) -> None:
    rows = list(measure_case(case, priced(*residual(), speeds=(1.0,) * 4)))
    ratios = [row for row in rows if row.unit == "ratio"]
    assert ratios
    assert all(row.holds for row in ratios)
    assert any(row.unit == "ms (proven)" for row in rows)


def test_the_roofline_profile_covers_every_layer_on_every_size() -> None:
    network, end = residual(samples=4)
    graph = network.graph(end)
    profile = profile_of(ModelSource("tests.models:network"), graph, 16)
    assert len(profile.measurements["V100"]) == 4 * len(graph.layers)
    assert len({device.host for device in profile.cluster.devices}) == 2
