"""Several processes' measurements as one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.ir.profile import Measurement, ParameterCost, PreparationCost
from profiler.measure.partial_results import FinishedMeasurements, ModelCosts, Rest, SizeCosts
from profiler.merge import merged, merged_parameters, merged_preparations, merged_seconds, process_of, process_spread

RAW = (1.0, 1.1, 0.9, 1.0)


def measurement(layer: str, seconds: float, part: tuple[int, ...] = (), samples: int = 2) -> Measurement:
    raw_s = tuple(3 * seconds * each for each in RAW)
    return Measurement(
        layer, samples, seconds, 2 * seconds, seconds, 0.0, 64, 8, len(RAW), 0.1, "Mkldnn", part=part, raw_s=raw_s
    )


def costs(*sizes: tuple[int, float], rest: Rest | None = None) -> ModelCosts:
    done = FinishedMeasurements(tuple(SizeCosts(n, (measurement("a", s, samples=n),), 4 * s) for n, s in sizes))
    return ModelCosts(done, rest or Rest({}, 1.0, 1.0, 0.001))


def test_the_median_of_the_processes_counts_and_every_run_is_kept_in_order() -> None:
    a, b = merged([[measurement("a", s), measurement("b", 10 * s)] for s in (1.0, 5.0, 2.0)])
    assert (a.layer, a.forward_s, a.backward_s, a.backward_input_s, a.backward_weight_s) == ("a", 2.0, 4.0, 2.0, 0.0)
    assert (b.forward_s, b.num_runs) == (20.0, 12)
    assert a.raw_s == tuple(3 * s * each for s in (1.0, 5.0, 2.0) for each in RAW)
    assert (a.saved_bytes, a.workspace_bytes, a.key) == (64, 8, "Mkldnn")
    assert a.spread > 0.5  # of runs that are five times apart


def test_a_single_measurement_stays_as_it_is() -> None:
    one = measurement("a", 1.0)
    assert merged([[one]]) == (one,)
    assert merged([[one], [measurement("a", 2.0, part=(4,))]])[0] == one
    assert merged([[one], [measurement("a", 2.0, samples=4)]])[1].forward_s == 2.0


def test_without_raw_samples_the_larger_spread_counts() -> None:
    pair = [replace(measurement("a", s), raw_s=(), spread=spread) for s, spread in ((1.0, 0.1), (2.0, 0.3))]
    assert [(one.spread, one.forward_s) for one in merged([[each] for each in pair])] == [(0.3, 1.5)]


def test_parameters_and_preparations_are_medians_too() -> None:
    found = merged_parameters([{"a": ParameterCost(s, 2 * s)} for s in (1.0, 9.0, 3.0)])
    assert found == {"a": ParameterCost(3.0, 6.0)}
    each = [[PreparationCost("map_0", ("x",), (), s, 2, s / 2)] for s in (1.0, 9.0, 3.0)]
    assert merged_preparations(each) == (PreparationCost("map_0", ("x",), (), 3.0, 2, 1.5),)
    assert merged_seconds([{"10": 1.0, "2": 1.0}, {"10": 3.0}]) == {"2": 1.0, "10": 2.0}
    assert list(merged_seconds([{"10": 1.0, "2": 1.0}])) == ["2", "10"]


def test_a_process_says_how_quiet_it_was_and_what_a_step_took() -> None:
    busy = process_of(costs((4, 1.0), (1, 0.25), rest=Rest({}, 1.0, 1.08, 0.001)), repeated=True)
    assert (busy.contended, busy.repeated, busy.run_delay) == (True, True, 0.001)
    assert list(busy.step_s.items()) == [("1", 0.75), ("4", 3.0)]
    assert not process_of(costs((4, 1.0)), repeated=False).contended


def test_the_spread_between_processes_is_by_size() -> None:
    processes = [process_of(costs((1, s), (4, 1.0)), repeated=False) for s in (1.0, 1.2, 0.9)]
    assert process_spread(processes) == {"1": pytest.approx(0.3), "4": 0.0}
    assert process_spread(processes[:1]) == {}
