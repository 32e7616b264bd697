"""What layers cost at sizes that were measured or not: by plain loops, and where costs are what a model says."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.chains import chain_profile
from planner.costs.layers import cost_table
from planner.costs.layers.cost_table import CostTables, runs_of
from planner.costs.layers.features import Features
from planner.costs.layers.interpolation import QUANTITIES, layer_cost, measured_alike
from planner.costs.layers.regression import FamilyModels, fitted
from planner.ir.cluster import DATASHEET, INTERPOLATED, MEASURED
from planner.ir.errors import MissingMeasurementError
from planner.ir.profile import Measurement, Profile
from tests.planner.costs.plain_prices import Modelled, at_samples
from tests.planner.networks import mesh_like, plain, priced, residual

KIND = "kind-1"


def test_a_figure_is_as_certain_as_its_weakest_part() -> None:
    one, four = (Measurement("conv1", n, 1.0, 0.0, 0.0, 0.0, 100 * n, 7, 10) for n in (1, 4))
    assert layer_cost([one, replace(four, evidence=DATASHEET)], 2).evidence == DATASHEET


def measurements(draw: random.Random, sizes: tuple[int, ...], key: str = "") -> list[Measurement]:
    def seconds(samples: int) -> float:
        return draw.choice([0.0, draw.uniform(1e-4, 2e-4) * samples])

    def of(n: int) -> Measurement:
        saved = draw.randint(0, 9) * n
        workspace = draw.randint(0, 9)
        return Measurement("l", n, seconds(n), seconds(n), seconds(n), seconds(n), saved, workspace, 1, key=key)

    return [of(samples) for samples in sizes]


@pytest.mark.cases(30)
@pytest.mark.parametrize("seed", range(30))
def test_a_plain_look_up_reads_every_size_alike_and_misses_the_same(seed: int) -> None:
    """Between, below and beyond sizes that were measured, by one back end or by two."""
    draw = random.Random(seed)
    sizes = sorted(draw.sample(range(1, 40), draw.randint(1, 5)))
    found = [one for size in sizes for one in measurements(draw, (size,), draw.choice("aab"))]
    for samples in (0, *sizes, *range(1, 60, 3)):
        try:
            expected = [at_samples(found, samples, what) for what in QUANTITIES]
        except LookupError:
            with pytest.raises(MissingMeasurementError, match=f"what l costs at {samples} samples"):
                layer_cost(found, samples)
        else:
            assert layer_cost(found, samples).values == pytest.approx(expected, rel=1e-12)


def test_all_layers_at_once_cost_what_each_costs() -> None:
    draw = random.Random(0)
    for sizes in ((1, 2, 4, 8), (2, 6), (3, 4, 9)):
        by_layer = [measurements(draw, sizes) for _ in range(20)]
        (alike,) = measured_alike(by_layer)
        for samples in range(20):
            values, evidence = alike.at(samples)
            each = [layer_cost(found, samples) for found in by_layer]
            np.testing.assert_allclose(values, [cost.values for cost in each], rtol=1e-12)
            assert evidence == tuple(cost.evidence for cost in each)


def test_layers_are_grouped_in_runs_and_what_was_not_measured_is_named() -> None:
    assert runs_of([4, 0, 1, 2, 7]) == ((0, 3), (4, 5), (7, 8))
    assert runs_of([]) == ()
    with pytest.raises(MissingMeasurementError, match="5 of 5 layers were not measured on toaster"):
        CostTables(chain_profile(4)).at("toaster", 1)
    with pytest.raises(MissingMeasurementError, match="parameters of l0"):
        CostTables(replace(chain_profile(3), parameters={})).parameters(KIND)


def test_a_tied_parameter_counts_once() -> None:
    profile = chain_profile(3, parameter_bytes=400)
    layers = tuple(replace(layer, parameters=("l0.weight",)) for layer in profile.graph.layers[:3])
    graph = replace(profile.graph, layers=(*layers, profile.graph.layers[3]))
    assert CostTables(replace(profile, graph=graph)).graph.parameter_bytes.tolist() == [0, 400, 400, 400, 400]


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


def test_a_range_is_how_far_off_a_model_is_of_each_shape_that_it_has_not_seen() -> None:
    """A plain loop says the same: each shape in turn is held back, and the others' model asked for it."""
    exact = modelled(priced(*mesh_like(height=64)), RATES)
    convs = [layer for layer in exact.graph.layers if layer.kind == "conv"]
    profile = without(exact, convs[-1].name)
    draw = random.Random(2)
    noisy = tuple(replace(m, forward_s=m.forward_s * draw.uniform(0.5, 2)) for m in profile.measurements[KIND])
    profile = replace(profile, measurements={KIND: noisy})
    features = Features(profile.graph)
    index = {layer.name: n for n, layer in enumerate(profile.graph.layers)}
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
    families = FamilyModels(profile, KIND, features)
    last = index[convs[-1].name]
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
    families = FamilyModels(profile, KIND, Features(profile.graph))
    plainly = Modelled(profile, KIND)
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


def test_nothing_is_computed_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FamilyModels", "HeldBackRanges"):
        monkeypatch.setattr(cost_table, name, None)
    table = CostTables(priced(*plain(samples=4))).at(KIND, 3)
    with pytest.raises(TypeError):  # ranges are asked for, and nothing can make them
        _ = table.low
