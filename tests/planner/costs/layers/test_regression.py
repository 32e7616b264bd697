"""Models of families: exact where costs are what the model says, held to a layer's own; plain loops say the same."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from planner.costs.layers import cost_table
from planner.costs.layers.cost_table import CostTables
from planner.costs.layers.interpolation import QUANTITIES
from planner.costs.layers.regression import FamilyModels, Features, family_names, fitted
from planner.ir.cluster import DATASHEET, FAMILY, INTERPOLATED, MEASURED
from planner.ir.errors import MissingMeasurementError
from planner.ir.profile import Measurement, Profile
from tests.planner.costs.plain_prices import Modelled
from tests.planner.networks import mesh_like, plain, priced, residual

KIND = "kind-1"


def modelled(profile: Profile, seconds_of: np.ndarray) -> Profile:
    """With forward and backward of exactly (1, flops, bytes, weights) x ``seconds_of``."""
    points = Features(profile.graph)
    index = {layer.name: number for number, layer in enumerate(profile.graph.layers)}

    def priced_again(m: Measurement) -> Measurement:
        seconds = float(points.whole(m.samples)[index[m.layer]] @ seconds_of)
        return replace(m, forward_s=seconds, backward_s=2 * seconds)

    return replace(profile, measurements={KIND: tuple(map(priced_again, profile.measurements[KIND]))})


def without(profile: Profile, layer: str, samples: tuple[int, ...] = ()) -> Profile:
    kept = [m for m in profile.measurements[KIND] if m.layer != layer or (samples and m.samples not in samples)]
    return replace(profile, measurements={KIND: tuple(kept)})


RATES = np.array([3e-6, 1e-12, 2e-11, 0.0])


def test_costs_that_are_what_the_model_says_are_found_for_a_layer_that_nobody_measured() -> None:
    profile = modelled(priced(*mesh_like(height=64)), RATES)
    last_conv = [layer.name for layer in profile.graph.layers if layer.kind == "conv"][-1]
    truth = CostTables(profile)
    index = [layer.name for layer in profile.graph.layers].index(last_conv)
    for samples in (1, 4, 32):
        cost = CostTables(without(profile, last_conv)).layer(KIND, index, samples)
        assert cost.values[:2] == pytest.approx(truth.layer(KIND, index, samples).values[:2], rel=0.05)
        assert cost.evidence == FAMILY
        assert cost.low <= 1 <= cost.high


def test_an_answer_is_held_to_what_the_layer_itself_was_measured_at() -> None:
    """One conv is twice as slow as its family; seen at one size, it is so at others."""
    profile = modelled(priced(*mesh_like(height=64)), RATES)
    index = [layer.kind for layer in profile.graph.layers].index("conv") + 3
    name = profile.graph.layers[index].name
    slow = replace(
        profile,
        measurements={
            KIND: tuple(
                replace(m, forward_s=2 * m.forward_s) if m.layer == name else m for m in profile.measurements[KIND]
            )
        },
    )
    alone = CostTables(without(slow, name)).layer(KIND, index, 8).values[0]
    held = CostTables(without(slow, name, (1, 4, 8, 16, 32))).layer(KIND, index, 8).values[0]
    assert held == pytest.approx(2 * alone, rel=0.1)


def test_exact_hits_and_lines_come_before_the_family_and_a_datasheet_after() -> None:
    profile = priced(*plain(samples=4))
    tables = CostTables(profile)
    assert (tables.layer(KIND, 0, 4).evidence, tables.layer(KIND, 0, 4).low) == (MEASURED, 1.0)
    assert tables.layer(KIND, 0, 3).evidence == INTERPOLATED
    few = replace(profile, measurements={KIND: tuple(m for m in profile.measurements[KIND] if m.samples == 1)})
    few = replace(few, measurements={KIND: tuple(m for m in few.measurements[KIND] if m.layer == "conv0")})
    with pytest.raises(MissingMeasurementError, match="what conv0 costs at 2 samples"):
        CostTables(few).layer(KIND, 0, 2)
    devices = tuple(
        replace(device, peak_flop_per_s={"float32": 1e12}, memory_bytes_per_s=1e11) for device in few.cluster.devices
    )
    known = CostTables(replace(few, cluster=replace(few.cluster, devices=devices)))
    assert known.layer(KIND, 0, 2).evidence == DATASHEET
    assert known.layer(KIND, 0, 2).values[0] > known.layer(KIND, 0, 1).values[0]


def test_across_a_change_of_back_end_with_one_size_on_either_side_the_nearest_ones_family_says() -> None:
    profile = modelled(priced(*mesh_like(height=64), sizes=(1, 8)), RATES)
    keyed = {
        KIND: tuple(
            replace(m, key="slow" if m.samples == 1 else "fast", forward_s=m.forward_s * (5 if m.samples == 1 else 1))
            for m in profile.measurements[KIND]
        )
    }
    truth = modelled(priced(*mesh_like(height=64), sizes=(2, 6)), RATES)
    index = [number for number, layer in enumerate(profile.graph.layers) if layer.kind == "conv"][2]
    tables, true = CostTables(replace(profile, measurements=keyed)), CostTables(truth)
    assert tables.layer(KIND, index, 6).evidence == FAMILY
    assert tables.layer(KIND, index, 6).values[0] == pytest.approx(true.layer(KIND, index, 6).values[0], rel=0.2)
    assert tables.layer(KIND, index, 2).values[0] == pytest.approx(5 * true.layer(KIND, index, 2).values[0], rel=0.2)


def test_coefficients_are_not_negative_and_zero_where_most_is_zero() -> None:
    points = np.array([[1.0, n, n * n, 0.0] for n in range(1, 9)])
    found = fitted(points, 10.0 - points[:, 1])
    assert (found >= 0).all()
    assert not fitted(points, np.array([0.0] * 5 + [1.0] * 3)).any()
    assert points @ fitted(points, 2.0 + 3 * points[:, 1]) == pytest.approx(2.0 + 3 * points[:, 1], rel=1e-3)


def test_a_range_is_wide_where_shapes_are_not_alike_and_narrow_where_they_are() -> None:
    exact = modelled(priced(*mesh_like(height=64)), RATES)
    draw = random.Random(1)
    noisy = replace(
        exact,
        measurements={
            KIND: tuple(replace(m, forward_s=m.forward_s * draw.uniform(0.3, 3)) for m in exact.measurements[KIND])
        },
    )
    index = [layer.kind for layer in exact.graph.layers].index("conv") + 3
    ranges = []
    for profile in (exact, noisy):
        tables = CostTables(profile)
        between = tables.at(KIND, 3)
        ranges.append((between.low[index], between.high[index]))
        assert tables.at(KIND, 4).low.tolist() == [1.0] * len(profile.graph.layers)
    assert ranges[0][1] - ranges[0][0] < 0.3 < ranges[1][1] - ranges[1][0]


def test_a_range_is_how_far_off_a_model_is_of_each_shape_that_it_has_not_seen() -> None:
    """A plain loop says the same: each shape in turn is held back, and the others' model asked for it."""
    exact = modelled(priced(*mesh_like(height=64)), RATES)
    convs = [layer for layer in exact.graph.layers if layer.kind == "conv"]
    profile = without(exact, convs[-1].name)
    draw = random.Random(2)
    noisy = tuple(replace(m, forward_s=m.forward_s * draw.uniform(0.5, 2)) for m in profile.measurements[KIND])
    profile = replace(profile, measurements={KIND: noisy})
    features, index = Features(profile.graph), {layer.name: n for n, layer in enumerate(profile.graph.layers)}
    others = {layer.name for layer in convs[1:-1]}  # the first reads the network's input: a family of its own
    found = [(features.whole(m.samples)[index[m.layer]], m) for m in noisy if m.layer in others]
    shapes = {tuple(point) for point, _ in found}
    ratios = []
    for shape in sorted(shapes):
        seen = [(point, m) for point, m in found if tuple(point) != shape]
        points = np.array([point for point, _ in seen])
        passes = [fitted(points, np.array([getattr(m, q) for _, m in seen])) for q in ("forward_s", "backward_s")]
        for m in (m for point, m in found if tuple(point) == shape):
            ratios.append((m.forward_s + m.backward_s) / sum(float(np.array(shape) @ each) for each in passes))
    low, high = np.quantile(ratios, (0.1, 0.9))
    families, last = FamilyModels(profile, KIND, features), index[convs[-1].name]
    _, models = families.values(last, np.array([features.whole(4)[last]]))
    assert families.bounds(last, int(models[0])) == pytest.approx((min(1.0, low), max(1.0, high)), rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_plain_loops_say_the_same_of_every_layer_and_quantity(seed: int) -> None:
    draw = random.Random(seed)
    profile = priced(*draw.choice([mesh_like(height=32), residual(), plain(samples=4)]))
    measured = [
        replace(
            m, forward_s=m.forward_s * draw.uniform(0.5, 2), key=draw.choice("aab"), workspace_bytes=draw.randrange(3)
        )
        for m in profile.measurements[KIND]
        if draw.random() < 0.6
    ]
    profile = replace(profile, measurements={KIND: tuple(measured)})
    families, plainly = FamilyModels(profile, KIND, Features(profile.graph)), Modelled(profile, KIND)
    for index, layer in enumerate(profile.graph.layers):
        for samples in (1, 3, 0.5, 64):
            found = families.whole(index, samples)
            for position, what in enumerate(QUANTITIES):
                if found:
                    said = plainly.whole(layer.name, samples, what)
                    assert said == pytest.approx(found[0].values[position], rel=1e-9, abs=1e-18)
                else:
                    with pytest.raises(LookupError):
                        plainly.whole(layer.name, samples, what)


def test_first_of_their_kind_are_layers_that_read_the_networks_inputs_alone() -> None:
    graph = priced(*mesh_like(height=64)).graph
    first, second = graph.layers[:2]
    both = replace(second, inputs=(*second.inputs, *graph.inputs))
    assert [family_names(graph, layer, "")[0][2] for layer in (first, second, both)] == [True, False, False]


def test_nothing_is_computed_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FamilyModels", "HeldBackRanges"):
        monkeypatch.setattr(cost_table, name, None)
    table = CostTables(priced(*plain(samples=4))).at(KIND, 3)
    with pytest.raises(TypeError):  # ranges are asked for, and nothing can make them
        _ = table.low
