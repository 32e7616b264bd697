"""Published optimisers' answers, found again: every instance of ``tests/data`` under its peer's own objective.

Values are in the unit of the reference table: seconds (PipeDream, SparsePipe), milliseconds (Tarnawski et al.), time
per sample (Piper).  Rows of the reference table are those of the published planners themselves; values of integer
programs stopped at a gap and of simulations are left out.  A row holds if it differs by at most what was rounded off.
"""

from __future__ import annotations

import csv
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path

from benchmarks.report import Row, run
from planner.extras.baselines import sparsepipe
from planner.extras.baselines.pipedream import format as graph_format
from planner.extras.baselines.pipedream import planner as pipedream
from planner.extras.baselines.piper import format as piper_format
from planner.extras.baselines.piper import planner as piper
from planner.extras.baselines.tarnawski import format as dnn_format
from planner.extras.baselines.tarnawski import planner as tarnawski

DATA = Path(__file__).parents[1] / "tests" / "data"
PROFILES = DATA / "profiles"
GIB = 2**30
PEERS = ("pipedream", "piper", "sparsepipe", "tarnawski")
SPARSEPIPE = (
    # types and their devices, SparsePipe's own planner, the best under its cost (sparse VGG-16-BN, batch 64, 1 GB/s)
    ((("txp", 3), ("tv", 4)), 0.2016, 0.1595),
    ((("tv", 4),), 0.2555, 0.2555),
    ((("txp", 4), ("RTX", 4)), 0.1250, 0.1250),
)
_MACHINES = re.compile(r"(\[.*?\]) machines bw=(\[.*?\])")
_ACCELERATORS = re.compile(r"(\d+) accel(?: \+ (\d+) cpu)?")
_DEVICES = re.compile(r"(\d+) devices, ([0-9.]+) GiB/s")
_VARIANTS = {
    "Tarnawski DP (dp.exe)": "contiguous",
    "exact ideal-lattice DP with window pruning (prototype)": "contiguous",
    "dp.exe -linearize (DPL)": "linearized",
    "dp.exe -oneFpga (single device)": "single",
    "dp.exe -pipeDream baseline": "pipedream",
    "Piper DP (algo.cpp)": "piper",
    "equi-partition PipeDream-2BW-like planner": "equal",
}
"""Which of a peer's planners made a row, by the row's solver."""


@dataclass(frozen=True, slots=True)
class Known:
    """A question with a known answer.

    Attributes:
        expected: the reference value; ``digits`` of it are behind the decimal point.
        better: whether a smaller value is as good.
    """

    peer: str
    name: str
    unit: str
    expected: float
    digits: int
    solve: Callable[[], float]
    better: bool = False

    def row(self) -> Row:
        """The question, asked."""
        start = time.process_time()
        value = self.solve()
        seconds = time.process_time() - start
        if self.expected == inf:
            return Row(f"{self.name}: no plan fits ({seconds:.3f} s)", float(value == inf), "yes", "= 1", value == inf)
        margin = max(1e-6, 0.5 * 10.0**-self.digits * (1 + 1e-9))
        holds = value <= self.expected + margin and (self.better or value >= self.expected - margin)
        goal = f"{'<=' if self.better else '='} {self.expected:.{self.digits}f}"
        return Row(f"{self.name} ({seconds:.3f} s)", value, self.unit, goal, holds)


def known(peer: str = "", quick: bool = False) -> Iterator[Known]:
    """All questions, or one peer's; ``quick`` leaves out those of more than 8 devices."""
    with (DATA / "reference" / "planner.csv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    seen = set()
    for row in rows:
        found = _question(row)
        if found is None or (peer and found[0].peer != peer) or (quick and found[1] > 8) or found[0].name in seen:
            continue
        seen.add(found[0].name)
        yield found[0]
    if peer in ("", "sparsepipe"):
        yield from _of_sparsepipe()


def _question(row: dict[str, str]) -> tuple[Known, int] | None:
    """A row's question and its number of devices; None if the row does not state what a planner answers."""
    try:
        expected = inf if row["value"] == "OOM" else float(row["value"])
    except ValueError:
        return None
    digits = len(row["value"].partition(".")[2])
    if (match := _MACHINES.match(row["devices"])) and row["instance"].startswith("pipedream/"):
        return _of_pipedream(row, json.loads(match[1]), json.loads(match[2]), expected, digits)
    if (match := _ACCELERATORS.match(row["devices"])) and row["solver"] in _VARIANTS:
        return _of_tarnawski(row, int(match[1]), int(match[2] or 0), expected, digits)
    if (match := _DEVICES.match(row["devices"])) and row["solver"] in _VARIANTS:
        return _of_piper(row, int(match[1]), float(match[2]), expected, digits)
    return None


def _of_pipedream(
    row: dict[str, str], machines: list[int], bandwidths: list[float], expected: float, digits: int
) -> tuple[Known, int]:
    path = PROFILES / f"{row['instance']}.graph.txt"
    objective = row["objective"]
    limit = inf if row["memory_limit"] == "none" else 1e9 * float(row["memory_limit"].removesuffix("GB"))
    options = pipedream.PipeDreamOptions("ignored" not in objective, "straight" in objective, limit)

    def solve() -> float:
        graph = graph_format.read(path)
        if "data-parallel" in objective:
            return pipedream.data_parallel_s(graph, machines, bandwidths)
        return pipedream.solve(graph, machines, bandwidths, options).value

    kind = "data parallel" if "data-parallel" in objective else "straight" if options.straight else "best"
    free = "" if options.communication or "data-parallel" in objective else ", no communication"
    limited = "" if limit == inf else f", {row['memory_limit']}"
    speeds = "/".join(f"{bandwidth / 1e9:g}" for bandwidth in bandwidths)
    shape = "x".join(map(str, machines))
    name = f"{row['instance']}, {shape} machines, {speeds} GB/s{free}{limited}, {kind}"
    return Known("pipedream", name, "s", expected, digits, solve), sum(machines)


def _of_tarnawski(row: dict[str, str], accelerators: int, cpus: int, expected: float, digits: int) -> tuple[Known, int]:
    path = PROFILES / "dnn-partitioning" / f"{row['instance'].removeprefix('dnn-partitioning/').replace('/', '_')}.json"

    variant = _VARIANTS[row["solver"]]

    def solve() -> float:
        instance = dnn_format.read(path)
        return tarnawski.solve(instance, accelerators=accelerators, cpus=cpus, variant=variant).value

    name = f"{row['instance']}, {accelerators} accelerators, {cpus} CPUs, {variant}"
    return Known("tarnawski", f"{name}, {digits} digits", "ms", expected, digits, solve), accelerators + cpus


def _of_piper(row: dict[str, str], devices: int, bandwidth: float, expected: float, digits: int) -> tuple[Known, int]:
    path = PROFILES / "piper" / row["instance"].partition(" ")[0].removeprefix("piper/")
    memory = float(row["memory_limit"].removesuffix("GiB")) * GIB
    variant = _VARIANTS[row["solver"]]

    def solve() -> float:
        instance = piper_format.read(path)
        rate = bandwidth * GIB
        asked = replace(instance, devices=devices, memory_bytes=memory, bandwidth_bytes_per_s=rate)
        return piper.solve(asked, variant=variant).value

    name = f"{row['instance']}, {row['devices']}, {row['memory_limit']}, {variant}"
    return Known("piper", name, "per sample", expected, digits, solve), devices


def _of_sparsepipe() -> Iterator[Known]:
    for devices, own, best in SPARSEPIPE:
        for value, fixed in ((own, True), (best, False)):

            def solve(devices: tuple[tuple[str, int], ...] = devices, fixed: bool = fixed) -> float:
                types = [
                    sparsepipe.DeviceType(
                        name, graph_format.read(PROFILES / "sparsepipe" / f"b64_{name}.graph.txt"), count
                    )
                    for name, count in devices
                ]
                return sparsepipe.best_pipeline(types, fixed_order=fixed).value

            shape = " + ".join(f"{count} {name}" for name, count in devices)
            name = f"sparsepipe, {shape}, {'its own order' if fixed else 'any order'}"
            yield Known("sparsepipe", name, "s", value, 4, solve, better=not fixed)


def measure(quick: bool, peer: str = "") -> list[Row]:
    """The rows of all peers, or of one."""
    return [question.row() for question in known(peer, quick)]


main = partial(
    run,
    "Published optimisers' answers, found again (CPU seconds behind each)",
    measure,
    own={"--peer": {"choices": PEERS, "default": "", "help": "one of them"}},
)

if __name__ == "__main__":
    raise SystemExit(main())
