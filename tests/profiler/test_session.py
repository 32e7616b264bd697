"""A whole profile of a small network, once, in its processes."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from planner.costs.layers.part_shapes import part_shapes
from planner.ir import codec
from planner.ir.cluster import (
    ALL_REDUCE,
    GRADIENT_SUMS,
    MEASURED,
    MEMORY,
    NORMALISATION,
    PARTIAL_SUMS,
    PIECES,
    STATISTICS,
    WITHIN_HOST,
)
from planner.ir.errors import FactoryError, ModelNotFoundError, UnsupportedModelError, UsageError
from planner.ir.profile import ModelSource, Optimizer, Profile
from profiler import ProfileProgress, profile
from profiler.links import cpu, messages
from profiler.links.processes import num_measurements
from profiler.measure.contention import RunDelay, is_contended
from profiler.measure.job import MeasuringJob
from profiler.measure.noise import reference_kernel_s
from profiler.measure.partial_results import ModelCosts
from profiler.measure.worker import measure_model
from tests.profiler.measure.test_sizes import never_falls

TINY = ModelSource(
    "profiler.models.resnet:resnet18", {"num_classes": "5", "width": "4", "depths": "[1, 1]"}, (4, 3, 32, 32)
)
NARROW = ModelSource(
    "profiler.models.resnet:resnet18", {"num_classes": "5", "width": "4", "depths": "[1, 1, 1, 1]"}, (2, 3, 32, 32)
)


@pytest.fixture(scope="module")
def measured() -> tuple[Profile, list[ProfileProgress]]:
    seen: list[ProfileProgress] = []
    return profile(TINY, num_workers=2, quick=True, measure_machine=True, progress=seen.append), seen


def test_a_profile_measures_every_layer_at_every_divisor_of_the_batch(
    measured: tuple[Profile, list[ProfileProgress]],
) -> None:
    found, _ = measured
    kind = found.cluster.devices[0].kind
    wanted = [(samples, layer.name) for samples in (1, 2, 4) for layer in found.graph.layers]
    assert [(m.samples, m.layer) for m in found.measurements[kind]] == wanted
    assert all(m.forward_s >= 0 and m.backward_s >= 0 and m.saved_bytes >= 0 for m in found.measurements[kind])
    assert set(found.provenance.iteration_s) == {"1", "2", "4"}
    assert set(found.parameters[kind]) == {layer.name for layer in found.graph.layers if layer.parameters}
    assert (found.model, found.optimizer.name) == (TINY, "SGD")
    assert found.provenance.versions["torch"]


def test_a_profile_describes_two_workers_and_the_link_between_them(
    measured: tuple[Profile, list[ProfileProgress]],
) -> None:
    found, _ = measured
    assert [device.name for device in found.cluster.devices] == ["n0/cpu0", "n0/cpu1"]
    assert all(device.memory_bytes > 0 for device in found.cluster.devices)
    link = found.cluster.links[WITHIN_HOST]
    asked = [size for size, _ in link.points]
    assert asked == list(messages.SIZES[: len(asked)])  # up to where a message takes long
    assert asked[-1] >= messages.LEAST_LAST_BYTES
    assert all(seconds > 0 for _, seconds in (*link.points, *link.sending))
    assert link.bandwidth_bytes_per_s > 0
    assert link.evidence == MEASURED
    sizes = {ALL_REDUCE: cpu.SIZES, STATISTICS: cpu.STATISTICS_SIZES}
    assert [(c.operation, c.num_ranks, c.link) for c in found.cluster.collectives] == [
        *((operation, 2, WITHIN_HOST) for operation in sizes),
        *((MEMORY, number, WITHIN_HOST) for number in (1, 2)),
        *((operation, 1, WITHIN_HOST) for operation in (NORMALISATION, PIECES, PARTIAL_SUMS, GRADIENT_SUMS)),
    ]
    assert found.action_overhead_s.keys() == found.measurements.keys()
    assert all(0 <= seconds < 0.1 for seconds in found.action_overhead_s.values())
    for collective in found.cluster.collectives[:2]:
        asked = [size for size, _ in collective.points]
        offered = sizes[collective.operation]
        assert asked == list(offered[: len(asked)])
        assert asked[-1] >= min(messages.LEAST_LAST_BYTES, offered[-1])
        assert all(seconds > 0 for _, seconds in collective.points)


def test_a_profile_says_what_two_workers_at_once_take_from_one_another_or_nothing(
    measured: tuple[Profile, list[ProfileProgress]],
) -> None:
    found, _ = measured
    for slowed in found.slowdowns.values():
        assert [one.layer for one in slowed] == [layer.name for layer in found.graph.layers]
        assert {(one.samples, one.num_devices) for one in slowed} == {(2, 2)}  # half of the batch
        assert all(min(one.forward, one.backward) >= 1 for one in slowed)


def test_a_profile_survives_its_file(measured: tuple[Profile, list[ProfileProgress]], tmp_path: Path) -> None:
    codec.dump(measured[0], tmp_path / "profile.json")
    assert codec.load(tmp_path / "profile.json", Profile) == measured[0]


def test_progress_grows_to_its_end_in_both_parts(measured: tuple[Profile, list[ProfileProgress]]) -> None:
    found, seen = measured
    model = [at for at in seen if at.samples]
    links = [at for at in seen if not at.samples and at.layer != "capture"]
    assert [at.done for at in seen] == sorted(at.done for at in seen)
    assert never_falls(seen)
    assert {at.layer for at in model} <= {"warm-up", *found.graph.by_name()}
    assert [at for at in seen if at.eta_s is None] == [seen[0]]
    assert all(at.done <= at.total for at in seen)
    assert len(links) == num_measurements(2)
    assert (links[-1].eta_s, links[-1].done) == (0.0, links[-1].total)


def measured_here(source: ModelSource, sizes: tuple[int, ...] = (), optimizer: str = "SGD") -> ModelCosts:
    return measure_model(lambda _: None, MeasuringJob(source, Optimizer(optimizer, {"lr": 0.1}), sizes, quick=True))


def test_a_size_at_which_the_model_fails_is_left_out() -> None:
    found = measured_here(NARROW)  # its last batch norm has one value at one sample
    assert set(found.iteration_s) == {"2"}
    assert {measurement.samples for measurement in found.measurements} == {2}
    with pytest.raises(UnsupportedModelError, match=r"runs at no number of samples[\s\S]*1 samples: ValueError"):
        measured_here(NARROW, sizes=(1,))


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(FactoryError, match="3 dims"):
        measured_here(ModelSource(TINY.factory, {}, (4, 3, 8)))
    with pytest.raises(UsageError, match="no optimiser"):
        measured_here(NARROW, optimizer="Adm")
    with pytest.raises(UsageError, match="'scale' is no operator"):
        measured_here(replace(NARROW, elementwise=("scale",)))
    with pytest.raises(UsageError, match=r"sizes: 0, 2"):
        measured_here(NARROW, sizes=(0, 2))
    with pytest.raises(UsageError, match="workers: -1"):
        profile(TINY, num_workers=-1)


def test_an_error_of_the_measuring_process_comes_back_as_it_is() -> None:
    with pytest.raises(ModelNotFoundError, match="no_such"):
        profile(ModelSource("no_such:net"), num_workers=1)


def test_a_profile_is_contended_if_it_waited_or_the_canary_changed() -> None:
    assert not is_contended(0.005, 1.0, 1.04)
    assert is_contended(0.02, 1.0, 1.0)
    assert is_contended(0.0, 1.0, 0.9)
    assert reference_kernel_s() > 0
    assert RunDelay().share() >= 0


def test_parts_are_measured_at_their_own_shapes() -> None:
    source = ModelSource("profiler.models.mesh_tangling:mesh_tangling_128", {"width": "0.015625"}, (2, 18, 32, 32))
    shapes = functools.partial(part_shapes, allow=("sample", "spatial"), num_ranks=2)
    seen: list[ProfileProgress] = []
    found = profile(source, num_workers=1, sizes=(2,), quick=True, shapes=shapes, progress=seen.append)
    kind = found.cluster.devices[0].kind
    wanted = shapes(found.graph, (2,))
    assert {(m.layer, m.samples, m.part) for m in found.parts[kind]} == {
        (layer, shape.samples, shape.part) for shape in wanted for layer in shape.layers
    }
    assert all(not m.part for m in found.measurements[kind])
    assert {m.key for m in found.parts[kind] if "conv" in m.layer} != {""}
    said = [at for at in seen if at.layer.startswith("part ")]
    assert said[-1].layer.endswith(f" of {len(wanted)}")
    assert [at.done for at in seen[1:]] == sorted(at.done for at in seen[1:])
    assert all(0 <= at.done <= at.total for at in seen)
    assert codec.loads(codec.dumps(found), Profile) == found
