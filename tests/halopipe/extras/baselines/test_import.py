"""``halopipe import``, and the time that published planners have beside ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chains import chain_profile
from halopipe.planning import problem as problems
from halopipe.planning import solve
from planner.ir.codec import load
from planner.ir.profile import Profile
from tests.halopipe.commands import good, require_said

PROFILE = chain_profile(4, num_devices=2)
CLUSTER = """
halopipe: cluster
version: 1
hosts: [{name: n, count: 2, devices: [{device: T4, count: 2}]}]
links: {within-host: PCIe-3, across-hosts: Ethernet-10G}
"""


def test_a_published_profile_is_imported(folder: Path) -> None:
    nodes = [
        f"node{n} -- Layer{n}(x) -- forward_compute_time=10.0, backward_compute_time=20.0, "
        "activation_size=4096.0, parameter_size=1024.0"
        for n in (1, 2)
    ]
    (folder / "graph.txt").write_text("\n".join([*nodes, "\tnode1 -- node2"]) + "\n")
    good("import", "graph.txt", "--samples", "8", "--device", "V100-16GB", "-o", "imported.json")
    (device,) = load("imported.json", Profile).cluster.devices
    assert (device.kind, device.memory_bytes) == ("V100-16GB", 2**34)
    (folder / "cluster.yaml").write_text(CLUSTER.replace("T4", "V100-16GB"))
    good("plan", "imported.json", "--cluster", "cluster.yaml", "--solver", "even-split")


def test_each_baseline_has_the_time_of_its_authors_or_all_of_ours() -> None:
    problem = problems.make_problem(PROFILE, time_limit_s=20.0)
    solved = solve.solve_baselines(problem, ["dapple", "one-device", "pipedream", "tarnawski"])
    assert solved.limits_s == {"dapple": 20.0, "one-device": 20.0, "pipedream": 8.0, "tarnawski": 1200.0}
    assert set(solved.took_s) == set(solved.limits_s)
    assert all(took_s > 0 for took_s in solved.took_s.values())


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("words", "exit_code", "text"),
    [
        ("import broken.json", 3, "error[H307]"),
        ("import broken.json --format piper", 2, "no format to import 'piper'"),
        ("import broken.json --device V101", 2, "error[H206] no device 'V101' in the catalogue"),
    ],
)
def test_what_goes_wrong_is_said_on_stderr_with_its_exit_code(
    folder: Path, words: str, exit_code: int, text: str
) -> None:
    require_said(folder, words.split(), exit_code, text)
