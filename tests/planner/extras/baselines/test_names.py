"""The names under which published planners are asked for."""

from __future__ import annotations

from planner.solvers import baselines


def test_published_planners_are_baselines() -> None:
    papers = {"bapipe", "dapple", "dryden", "pipedream", "piper", "sparsepipe", "tarnawski"}
    assert set(baselines()) == {
        *("data-parallel", "even-split", "one-device"),
        *(papers | {"pipedream-hierarchical", "piper-equal"}),
    }
