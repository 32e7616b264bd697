"""Published optimisers' answers, found again: any instance file under a peer's own objective and restrictions.

    python -m benchmarks.known_answers FILE --peer pipedream --machines 8 --bandwidth 1e9 --json
    python -m benchmarks.known_answers FILE --peer pipedream --machines 4,2 --bandwidth 1e10,1.25e9     2 hosts of 4
    python -m benchmarks.known_answers TXP:3 TV:4 --peer sparsepipe                                     one file a type
    python -m benchmarks.known_answers FILE --peer tarnawski --accelerators 4 --cpus 1 --memory 16GiB
    python -m benchmarks.known_answers FILE --peer piper --machines 8 --memory 8GiB --bandwidth 25GiB

Values are in the unit of the reference table: seconds (PipeDream, SparsePipe), milliseconds (Tarnawski et al.), time
per sample (Piper).  ``bound`` is a proved lower bound.  Exit codes: 0, 2 usage, 3 a bad file, 4 no feasible plan
(``value`` is then null), 130 Ctrl-C.

Without FILE every known instance of ``tests/data`` is solved and set beside its reference value.  Rows of the reference
table are those of the published planners themselves; values of integer programs stopped at a gap and of simulations are
left out.  A row holds if it differs by at most what was rounded off.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.report import Row, run
from planner.extras.baselines import sparsepipe
from planner.extras.baselines.common.answer import RivalAnswer
from planner.extras.baselines.pipedream import format as graph_format
from planner.extras.baselines.pipedream import planner as pipedream
from planner.extras.baselines.piper import format as piper_format
from planner.extras.baselines.piper import planner as piper
from planner.extras.baselines.tarnawski import format as dnn_format
from planner.extras.baselines.tarnawski import planner as tarnawski
from planner.ir.errors import HalopipeError, InfeasibleError, UsageError

DATA = Path(__file__).parents[1] / "tests" / "data"
PROFILES = DATA / "profiles"
GIB = 2**30
DEFAULT_MACHINES, DEFAULT_BANDWIDTH = 4, 1e9
UNITS = {"pipedream": "s", "sparsepipe": "s", "tarnawski": "ms", "piper": "time per sample"}
_SCALES = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(k|m|g|t|ki|mi|gi|ti|)(?:b|bytes)?(?:/s)?\s*", re.IGNORECASE)
_COUNTED = re.compile(r"(.+):([0-9]+)")


def size(text: str) -> float:
    """Bytes, or bytes a second: a number, or one with a unit such as 16GB, 16GiB or 10GB/s."""
    match = _SIZE.fullmatch(text)
    value = inf if text.strip().lower() == "inf" else 0.0
    if match:
        try:
            value = float(match[1]) * _SCALES[match[2].lower()]
        except ValueError:
            value = 0.0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size above 0, such as 1e9, 16GB or 16GiB")
    return value


def sizes(text: str) -> tuple[float, ...]:
    """Sizes, separated by commas."""
    return tuple(size(part) for part in text.split(","))


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers from 1, separated by commas."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of machines, such as 8, or 4,2 for 2 hosts of 4")
    return tuple(map(int, parts))


def number(text: str) -> int:
    """A whole number from 0."""
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0")
    return int(text)


_FLAG: Mapping[str, Any] = {"action": "store_true"}
_OPTIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "machines": ("pipedream sparsepipe tarnawski piper", {
        "type": counts, "metavar": "N", "help": "devices; N,N,... by level, the innermost first"}),
    "bandwidth": ("pipedream sparsepipe piper", {
        "type": sizes, "metavar": "BYTES_PER_S", "help": "of links; several by level"}),
    "no-communication": ("pipedream sparsepipe", {**_FLAG, "help": "activations between stages cost nothing"}),
    "accelerators": ("tarnawski piper", {"type": number, "metavar": "K", "help": "tarnawski: accelerators"}),
    "cpus": ("tarnawski", {"type": number, "metavar": "L", "help": "tarnawski: CPUs"}),
    "memory": ("pipedream sparsepipe tarnawski piper", {
        "type": size, "metavar": "BYTES", "help": "of a device; no limit, or the file's, if not given"}),
    "straight": ("pipedream", {**_FLAG, "help": "pipedream: no stage is replicated"}),
    "data-parallel": ("pipedream", {**_FLAG, "help": "pipedream: its model of pure data parallelism"}),
    "fixed-order": ("sparsepipe", {**_FLAG, "help": "sparsepipe: its planner's fixed order of devices"}),
    "variant": ("tarnawski piper", {
        "help": f"tarnawski: {', '.join(tarnawski.VARIANTS)}; piper: {', '.join(piper.VARIANTS)}"}),
    "time-limit": ("tarnawski piper", {
        "type": size, "metavar": "SECONDS", "help": "tarnawski, piper: the best so far by then"}),
    "released": ("pipedream piper", {**_FLAG, "help": "pipedream, piper: the cost without the restrictions"}),
}  # fmt: skip
"""By name: the peers that know it, and the option."""


def _parser() -> argparse.ArgumentParser:
    first, _, rest = (__doc__ or "").partition("\n\n")
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.known_answers", None, first, rest, formatter_class=form)
    parser.add_argument("files", metavar="FILE", nargs="*", help="instances; for sparsepipe one a type, as FILE:COUNT")
    parser.add_argument("--peer", choices=sorted(UNITS), help="whose objective and restrictions")
    for name, (_, option) in _OPTIONS.items():
        parser.add_argument(f"--{name}", **option)
    parser.add_argument("--json", action="store_true", help="the answer alone, as JSON")
    parser.add_argument("--quick", action="store_true", help="without FILE: a few instances, within a minute")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    options = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is no reason to stop
    try:
        if options.files:
            return _answer(options)
        flags = ["--json"] * options.json + ["--quick"] * options.quick
        title = "Published optimisers' answers, found again (CPU seconds behind each)"
        return run(title, lambda quick: [question.row() for question in known(options.peer, quick)], flags)
    except HalopipeError as error:
        sys.stderr.write(f"{error.render()}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _answer(options: argparse.Namespace) -> int:
    if options.peer is None:
        raise UsageError("whose planner?", [f"{len(options.files)} files, no --peer"], [f"--peer {' | '.join(UNITS)}"])
    given = {name: vars(options)[name.replace("-", "_")] for name in _OPTIONS}
    given = {name: value for name, value in given.items() if value not in (None, False)}
    for name in given:
        if options.peer not in _OPTIONS[name][0].split():
            sys.stderr.write(f"note: --{name} has no meaning for {options.peer}\n")
    start = time.process_time()
    answer = _PEERS[options.peer](options)
    seconds = time.process_time() - start
    shown = {
        "value": answer.value if answer.has_plan else None,
        "bound": answer.bound if answer.bound < inf else None,
        "status": answer.status,
        "cpu_seconds": round(seconds, 6),
        "plan": dict(answer.plan),
    }
    if options.json:
        sys.stdout.write(json.dumps(shown, indent=1, allow_nan=False) + "\n")
    else:
        unit = UNITS[options.peer]
        value = f"{answer.value:.9g} {unit}, bound {answer.bound:.9g} {unit}, " if answer.has_plan else ""
        sys.stdout.write(f"{options.peer}: {value}{answer.status}, {seconds:.3f} s of CPU\n")
        sys.stdout.write(json.dumps(shown["plan"], indent=1, ensure_ascii=False) + "\n")
    if not answer.has_plan:
        limits = ", ".join(f"{name} {value}" for name, value in given.items())
        remedy = "give more memory, devices or time"
        raise InfeasibleError(f"{options.peer} finds no plan ({answer.status})", [limits], [remedy])
    return 0


def _pipedream(options: argparse.Namespace) -> RivalAnswer:
    machines = options.machines or (DEFAULT_MACHINES,)
    bandwidths = options.bandwidth or (DEFAULT_BANDWIDTH,)
    if len(bandwidths) == 1:
        bandwidths *= len(machines)
    graph = graph_format.read(_one_file(options))
    if options.data_parallel:
        seconds = pipedream.data_parallel_s(graph, machines, bandwidths)
        return RivalAnswer(seconds, seconds, "optimal", {"machines": list(machines), "stages": 1})
    restrictions = pipedream.PipeDreamOptions(
        communication=not options.no_communication, straight=options.straight, memory_bytes=options.memory or inf
    )
    return pipedream.solve(graph, machines, bandwidths, restrictions, released=options.released)


def _sparsepipe(options: argparse.Namespace) -> RivalAnswer:
    paths, given = zip(*(_counted(file) for file in options.files), strict=True)
    machines: Sequence[int] = options.machines or (DEFAULT_MACHINES,)
    if len(machines) == 1:
        machines = tuple(machines) * len(paths)
    if len(machines) != len(paths):
        facts = [f"{len(machines)} numbers of machines, {len(paths)} files"]
        raise UsageError("machines and files do not match", facts, ["give one number a file, or FILE:COUNT"])
    types = [
        sparsepipe.DeviceType(_type_name(path, paths), graph_format.read(path), own if own is not None else count)
        for path, own, count in zip(paths, given, machines, strict=True)
    ]
    bandwidth = _one_bandwidth(options) or DEFAULT_BANDWIDTH
    limits = {"communication": not options.no_communication, "memory_bytes": options.memory or inf}
    return sparsepipe.best_pipeline(types, bandwidth, fixed_order=options.fixed_order, **limits)


def _tarnawski(options: argparse.Namespace) -> RivalAnswer:
    machines = sum(options.machines) if options.machines else None
    asked = {
        "accelerators": machines if options.accelerators is None else options.accelerators,
        "cpus": options.cpus,
        "memory_bytes": options.memory,
        "variant": options.variant,
        "time_limit_s": options.time_limit,
    }
    return tarnawski.solve(dnn_format.read(_one_file(options)), **_given(asked))


def _piper(options: argparse.Namespace) -> RivalAnswer:
    devices = sum(options.machines) if options.machines else options.accelerators
    bandwidth = _one_bandwidth(options)
    limits = {"devices": devices, "memory_bytes": options.memory, "bandwidth_bytes_per_s": bandwidth}
    instance = replace(piper_format.read(_one_file(options)), **_given(limits))
    variant = "released" if options.released else options.variant
    return piper.solve(instance, **_given({"variant": variant, "time_limit_s": options.time_limit}))


_PEERS: Mapping[str, Callable[[argparse.Namespace], RivalAnswer]] = {
    "pipedream": _pipedream,
    "sparsepipe": _sparsepipe,
    "tarnawski": _tarnawski,
    "piper": _piper,
}


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """What was given; the rest keeps the peer's defaults."""
    return {name: value for name, value in values.items() if value is not None}


def _one_file(options: argparse.Namespace) -> str:
    if len(options.files) != 1:
        raise UsageError(f"{options.peer} plans one file", [f"{len(options.files)} given: {', '.join(options.files)}"])
    return str(options.files[0])


def _one_bandwidth(options: argparse.Namespace) -> float | None:
    if options.bandwidth and len(options.bandwidth) > 1:
        raise UsageError(f"{options.peer} knows one bandwidth", [f"{len(options.bandwidth)} given"])
    return options.bandwidth[0] if options.bandwidth else None


def _counted(file: str) -> tuple[str, int | None]:
    """``FILE`` or ``FILE:COUNT``; a file that exists under the whole name is that file."""
    match = _COUNTED.fullmatch(file)
    return (file, None) if match is None or Path(file).exists() else (match[1], int(match[2]))


def _type_name(path: str, paths: Sequence[str]) -> str:
    """The file's name, as short as tells the types apart."""
    short = Path(path).name.removesuffix(".txt").removesuffix(".graph")
    return short if [Path(other).name for other in paths].count(Path(path).name) == 1 else path


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


def known(peer: str | None = None, quick: bool = False) -> Iterator[Known]:
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
    if peer in (None, "sparsepipe"):
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
    memory, variant = float(row["memory_limit"].removesuffix("GiB")) * GIB, _VARIANTS[row["solver"]]

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


if __name__ == "__main__":
    raise SystemExit(main())
