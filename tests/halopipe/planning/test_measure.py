from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.chains import chain_profile
from halopipe.planning import measure
from halopipe.planning.options import ProfileOptions
from planner.ir.errors import UsageError
from planner.ir.profile import MeasuringProcess, ModelSource, Provenance
from tests.planner.networks import plain, priced
from tests.planner.parts import with_parts


def factory() -> None:
    """Stands for a user's factory."""


class Model:
    def make(self) -> None:
        """A method cannot be found by name."""


def test_a_factory_is_named_by_where_it_lives() -> None:
    assert measure.source_of(json.dumps, (8, 3), {"width": [1, 2]}, "float64") == ModelSource(
        "json:dumps", {"width": "[1,2]"}, (8, 3), "float64"
    )
    assert measure.source_of("a.b:c", (), {}, "float32").factory == "a.b:c"
    assert measure.source_of("a.b:c", (), {}, "float32", "bfloat16").autocast == "bfloat16"
    assert measure.source_of("a.b:c", (), {}, "float32", elementwise=["lib::op"]).elementwise == ("lib::op",)


@pytest.mark.parametrize("model", [Model(), Model().make, Model.make, lambda: None, 3])
def test_what_no_other_process_can_make_is_refused(model: object) -> None:
    with pytest.raises(UsageError):
        measure.source_of(model, (), {}, "float32")  # type: ignore[arg-type]


def test_an_argument_that_is_not_json_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be written as JSON"):
        measure.source_of(factory, (), {"activation": factory}, "float32")


def test_a_cluster_is_a_number_of_workers_or_auto() -> None:
    assert (measure.num_workers("auto"), measure.num_workers(4)) == (0, 4)
    for cluster in (0, -1, True, "host:8"):
        with pytest.raises(UsageError, match="is not known"):
            measure.num_workers(cluster)


def test_a_family_of_dims_that_does_not_exist_is_refused() -> None:
    source = measure.source_of("a.b:c", (), {}, "float32")
    with pytest.raises(UsageError, match=r"no family of dims 'space'[\s\S]*spatial"):
        measure.measure(source, ProfileOptions(device="cpu", allow=("space",)), quiet=True)


@pytest.mark.parametrize(("allow", "num_ranks", "asked"), [(["sample"], 0, None), ([], 4, None), (["spatial"], 0, 2)])
def test_parts_are_asked_for_where_more_than_samples_may_be_cut(
    allow: list[str], num_ranks: int, asked: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    measured = priced(*plain())
    monkeypatch.setattr("profiler.session.profile", lambda source, **options: seen.update(options) or measured)
    source = measure.source_of("a.b:c", (), {}, "float32")
    asked_for = ProfileOptions(workers=2, device="cpu", allow=allow, num_ranks=num_ranks)
    measure.measure(source, asked_for, quiet=True)
    assert (seen["shapes"].keywords if seen["shapes"] else None) == (
        {"allow": ("spatial",), "num_ranks": asked} if asked else None
    )


def test_a_summary_counts_measured_parts() -> None:
    profile = with_parts(priced(*plain()), (4,), 2)
    (line,) = [line for line in measure.summary(profile).splitlines() if "parts" in line]
    assert line == f"  kind-1: {len(profile.parts['kind-1'])} parts of 4 layers were measured at their own shapes"


def test_a_summary_says_how_far_processes_are_apart() -> None:
    provenance = Provenance(
        {"torch": "0"}, processes=(MeasuringProcess(1, 1, 0, False),) * 3, process_spread={"4": 0.031}
    )
    lines = measure.summary(replace(chain_profile(2), provenance=provenance)).splitlines()
    assert "  3 processes measured; their steps are 3.1 % apart" in lines


def test_a_summary_says_what_was_measured() -> None:
    provenance = Provenance({"torch": "0"}, run_delay=0.04, contended=True, iteration_s={"10": 0.2, "8": 0.168})
    profile = replace(chain_profile(4, bandwidth_bytes_per_s=1e9), provenance=provenance)
    lines = measure.summary(profile).splitlines()
    assert lines[0] == "tests.models:chain, float32"
    assert "  5 layers, 4,096 parameters (16.0 KiB)" in lines
    assert "  devices n0/cpu0, n0/cpu1: kind-1" in lines
    assert "  one device, batch 8: 168 ms a step, 21.0 ms a sample" in lines
    assert lines.index("  one device, batch 10: 200 ms a step, 20.0 ms a sample") > 0
    assert "  link within-host: 1.00 KiB in 1.02 µs, 16.0 MiB in 16.8 ms" in lines
    assert lines[-1].startswith("  warning: the machine was busy: 4.0 % of the time waited for a core")
    quiet = replace(profile, provenance=replace(provenance, contended=False))
    assert "warning" not in measure.summary(quiet)
