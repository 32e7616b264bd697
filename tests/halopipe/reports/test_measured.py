"""The summary of a profile."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.chains import chain_profile
from halopipe.reports.measured import summary
from planner.ir.profile import MeasuringProcess, Provenance
from tests.planner.networks import plain, priced
from tests.planner.parts import with_parts


def test_a_summary_says_what_was_measured() -> None:
    seconds = {"10": 0.2, "8": 0.168}
    processes = (MeasuringProcess(1, 1, 0, False),) * 3
    provenance = Provenance(
        {"torch": "0"},
        run_delay=0.04,
        contended=True,
        iteration_s=seconds,
        processes=processes,
        process_spread={"4": 0.031},
    )
    chain = replace(chain_profile(4, bandwidth_bytes_per_s=1e9), provenance=provenance)
    lines = summary(chain).splitlines()
    assert lines[0] == "tests.models:chain, float32"
    assert {
        "  5 layers, 4,096 parameters (16.0 KiB)",
        "  devices n0/cpu0, n0/cpu1: kind-1",
        "  one device, batch 8: 168 ms a step, 21.0 ms a sample",
        "  one device, batch 10: 200 ms a step, 20.0 ms a sample",
        "  3 processes measured; their steps are 3.1 % apart",
        "  link within-host: 1.00 KiB in 1.02 µs, 16.0 MiB in 16.8 ms",
    } <= set(lines)
    assert lines[-1].startswith("  warning: the machine was busy: 4.0 % of the time waited for a core")
    assert "warning" not in summary(replace(chain, provenance=replace(provenance, contended=False)))
    parts = with_parts(priced(*plain()), (4,), 2)
    said = f"  kind-1: {len(parts.parts['kind-1'])} parts of 4 layers were measured at their own shapes"
    assert said in summary(parts).splitlines()
