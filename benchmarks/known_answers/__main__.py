"""Published optimisers' answers, found again: any instance file under a peer's own objective and restrictions.

    python -m benchmarks.known_answers FILE --peer pipedream --machines 8 --bandwidth 1e9 --json
    python -m benchmarks.known_answers FILE --peer pipedream --machines 4,2 --bandwidth 1e10,1.25e9     2 hosts of 4
    python -m benchmarks.known_answers TXP:3 TV:4 --peer sparsepipe                                     one file a type
    python -m benchmarks.known_answers FILE --peer tarnawski --accelerators 4 --cpus 1 --memory 16GiB
    python -m benchmarks.known_answers FILE --peer piper --machines 8 --memory 8GiB --bandwidth 25GiB

Values are in the unit of the reference table: seconds (PipeDream, SparsePipe), milliseconds (Tarnawski et al.), time
per sample (Piper).  ``bound`` is a proved lower bound.  Exit codes: 0, 2 usage, 3 a bad file, 4 no feasible plan
(``value`` is then null), 130 Ctrl-C.  Without FILE every known instance is solved and set beside its reference value.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from planner.extras.baselines import sparsepipe
from planner.extras.baselines.common.answer import RivalAnswer
from planner.extras.baselines.pipedream import format as graph_format
from planner.extras.baselines.pipedream import planner as pipedream
from planner.extras.baselines.piper import format as piper_format
from planner.extras.baselines.piper import planner as piper
from planner.extras.baselines.tarnawski import format as dnn_format
from planner.extras.baselines.tarnawski import planner as tarnawski
from planner.ir.errors import HalopipeError, InfeasibleError, UsageError

DEFAULT_MACHINES = 4
DEFAULT_BANDWIDTH = 1e9
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
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of machines, such as 8, or 4,2 for 2 hosts of 4")
    return found


def number(text: str) -> int:
    """A whole number from 0."""
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    first, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.known_answers",
        description=first,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", metavar="FILE", nargs="*", help="instances; for sparsepipe one a type, as FILE:COUNT")
    parser.add_argument("--peer", choices=sorted(UNITS), help="whose objective and restrictions")
    parser.add_argument("--machines", type=counts, metavar="N", help="devices; N,N,... by level, the innermost first")
    parser.add_argument("--bandwidth", type=sizes, metavar="BYTES_PER_S", help="of links; several by level")
    parser.add_argument("--no-communication", action="store_true", help="activations between stages cost nothing")
    parser.add_argument("--accelerators", type=number, metavar="K", help="tarnawski: accelerators")
    parser.add_argument("--cpus", type=number, metavar="L", help="tarnawski: CPUs")
    parser.add_argument(
        "--memory", type=size, metavar="BYTES", help="of a device; no limit, or the file's, if not given"
    )
    parser.add_argument("--straight", action="store_true", help="pipedream: no stage is replicated")
    parser.add_argument("--data-parallel", action="store_true", help="pipedream: its model of pure data parallelism")
    parser.add_argument("--fixed-order", action="store_true", help="sparsepipe: its planner's fixed order of devices")
    parser.add_argument(
        "--variant", help=f"tarnawski: {', '.join(tarnawski.VARIANTS)}; piper: {', '.join(piper.VARIANTS)}"
    )
    parser.add_argument("--time-limit", type=size, metavar="SECONDS", help="tarnawski, piper: the best so far by then")
    parser.add_argument("--released", action="store_true", help="pipedream, piper: the cost without the restrictions")
    parser.add_argument("--json", action="store_true", help="the answer alone, as JSON")
    parser.add_argument("--quick", action="store_true", help="without FILE: a few instances, within a minute")
    return parser


_PEER_OPTIONS: Mapping[str, frozenset[str]] = {
    "pipedream": frozenset({"machines", "bandwidth", "no_communication", "memory", "straight", "data_parallel"})
    | {"released"},
    "sparsepipe": frozenset({"machines", "bandwidth", "no_communication", "memory", "fixed_order"}),
    "tarnawski": frozenset({"accelerators", "cpus", "memory", "machines", "variant", "time_limit"}),
    "piper": frozenset({"machines", "accelerators", "memory", "bandwidth", "time_limit", "variant", "released"}),
}
_GENERAL = frozenset({"files", "peer", "json", "quick"})


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    options = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is no reason to stop
    try:
        if not options.files:
            from benchmarks.known_answers.known_rows import show

            return show(options.peer, options.json, options.quick)
        return _answer(options)
    except HalopipeError as error:
        sys.stderr.write(f"{error.render()}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _answer(options: argparse.Namespace) -> int:
    if options.peer is None:
        raise UsageError("whose planner?", [f"{len(options.files)} files, no --peer"], [f"--peer {' | '.join(UNITS)}"])
    idle = [
        name
        for name, value in vars(options).items()
        if value not in (None, False) and name not in _PEER_OPTIONS[options.peer] | _GENERAL
    ]
    for name in idle:
        sys.stderr.write(f"note: --{name.replace('_', '-')} has no meaning for {options.peer}\n")
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
        error = InfeasibleError(
            f"{options.peer} finds no plan ({answer.status})", [_limits(options)], ["give more memory, devices or time"]
        )
        sys.stderr.write(f"{error.render()}\n")
        return error.exit_code
    return 0


def _limits(options: argparse.Namespace) -> str:
    given = {name: value for name, value in vars(options).items() if value not in (None, False, [])}
    return ", ".join(f"{name} {value}" for name, value in given.items() if name not in _GENERAL)


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
        raise UsageError(
            "machines and files do not match",
            [f"{len(machines)} numbers of machines, {len(paths)} files"],
            ["give one number a file, or FILE:COUNT"],
        )
    types = [
        sparsepipe.DeviceType(_type_name(path, paths), graph_format.read(path), own if own is not None else count)
        for path, own, count in zip(paths, given, machines, strict=True)
    ]
    bandwidth = _one_bandwidth(options) or DEFAULT_BANDWIDTH
    limits = {"communication": not options.no_communication, "memory_bytes": options.memory or inf}
    return sparsepipe.best_pipeline(types, bandwidth, fixed_order=options.fixed_order, **limits)


def _tarnawski(options: argparse.Namespace) -> RivalAnswer:
    instance = dnn_format.read(_one_file(options))
    accelerators = options.accelerators
    if accelerators is None and options.machines:
        accelerators = sum(options.machines)
    return tarnawski.solve(
        instance,
        **_given(
            accelerators=accelerators,
            cpus=options.cpus,
            memory_bytes=options.memory,
            variant=options.variant,
            time_limit_s=options.time_limit,
        ),
    )


def _piper(options: argparse.Namespace) -> RivalAnswer:
    instance = piper_format.read(_one_file(options))
    devices = sum(options.machines) if options.machines else options.accelerators
    bandwidth = _one_bandwidth(options)
    instance = replace(
        instance, **_given(devices=devices, memory_bytes=options.memory, bandwidth_bytes_per_s=bandwidth)
    )
    variant = "released" if options.released else options.variant
    return piper.solve(instance, **_given(variant=variant, time_limit_s=options.time_limit))


_PEERS: Mapping[str, Callable[[argparse.Namespace], RivalAnswer]] = {
    "pipedream": _pipedream,
    "sparsepipe": _sparsepipe,
    "tarnawski": _tarnawski,
    "piper": _piper,
}


def _given(**values: Any) -> dict[str, Any]:
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


if __name__ == "__main__":
    raise SystemExit(main())
