"""``halopipe devices``: the catalogue; ``halopipe cluster``: this host, or the machines of a cluster file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halopipe.cli.options import JsonOption
from halopipe.terminal import console, tables, units
from halopipe.terminal.output_files import claimed
from planner.ir.cluster import HOST, MEASURED, Cluster, DeviceSpec
from planner.ir.errors import UsageError

if TYPE_CHECKING:
    from planner.extras.catalogue.listing import Figure

_UNKNOWN = "–"


def devices(json: JsonOption = False) -> None:
    """List the devices and links of the catalogue, for cluster files; with --json, the source of each figure."""
    console.emit_json(catalogue_data()) if json else console.emit(catalogue_table())


def catalogue_table() -> str:
    """Devices and links of the catalogue."""
    from planner.extras.catalogue.listing import devices, links

    dtypes = ("float32", "tfloat32", "float16", "bfloat16", "float64", "int8")
    rows = [
        [
            entry.name,
            entry.family,
            _written(entry.memory_bytes),
            _written(entry.memory_bytes_per_s),
            _written(entry.on_chip_bytes),
            *(
                f"{entry.peak_flop_per_s[dtype].value / 1e12:.4g}" if dtype in entry.peak_flop_per_s else _UNKNOWN
                for dtype in dtypes
            ),
            entry.note,
        ]
        for entry in devices().values()
    ]
    header = ["device", "what", "memory", "at", "on chip", *dtypes, ""]
    cables = [
        [entry.name, _written(entry.bandwidth_bytes_per_s), ", ".join(entry.aliases)] for entry in links().values()
    ]
    return "\n".join(
        [
            "Devices (dense peaks in TFLOP/s by dtype; sources, dates, and why a figure is missing: --json)",
            tables.table(header, rows),
            "",
            "Links (from one device to another, in one direction)",
            tables.table(["link", "bandwidth", "also"], cables),
        ]
    )


def catalogue_data() -> dict[str, Any]:
    """The catalogue as plain data: every figure with its source and date."""
    from planner.extras.catalogue.listing import devices, links
    from planner.ir.codec import plain

    return {
        "devices": [plain(entry) for entry in devices().values()],
        "links": [plain(entry) for entry in links().values()],
    }


def _written(figure: Figure | None) -> str:
    return _UNKNOWN if figure is None else figure.text


def cluster(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CLUSTER]",
            help="A cluster file (YAML); this host if not given.",
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="PROFILE",
            help="A profile, whose kinds of device the file may name.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the profile as it would be on these machines.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show the devices and links of this host or of a cluster file; check the file."""
    from halopipe.planning import plan_files
    from planner.extras.catalogue.clusters import read_machines
    from planner.ir.codec import dump, plain

    with claimed([output], [file, profile]):
        measured = plan_files.load_profile(profile) if profile is not None else None
        if file is None:
            machines = measured.cluster if measured is not None else detected()
        else:
            machines = (
                read_machines(file, measured.cluster).cluster if measured is not None else read_machines(file).cluster
            )
        if output is not None and (measured is None or file is None):
            raise UsageError(
                "--output needs a cluster file and --profile", [], ["halopipe cluster FILE --profile PROFILE"]
            )
        kinds = measured.measurements if measured is not None else ()
        console.emit_json(plain(machines)) if json else console.emit(cluster_text(machines, kinds))
        if output is not None and measured is not None and file is not None:
            dump(plan_files.on_cluster(measured, file), output)
            console.wrote(output, console.command("plan", output))


def detected() -> Cluster:
    """This host as ``profile`` would find it: a device a core that may be used, then its GPUs; no links measured."""
    from cuda_ops import device_description

    num_cores = device_description().num_cores
    host = device_description(num_cores)
    cores = tuple(DeviceSpec(f"n0/cpu{rank}", host.processor, "n0", host.memory_bytes) for rank in range(num_cores))
    return Cluster((*cores, *_gpus("n0")), {})


def _gpus(host: str) -> tuple[DeviceSpec, ...]:
    from cuda_ops.device.gpus import may_have_gpus, num_gpus, why_no_gpu

    if not may_have_gpus() or why_no_gpu():
        return ()
    from profiler.measure.devices import BACKENDS, CUDA, described

    return described(BACKENDS[CUDA], host, num_gpus())


def cluster_text(cluster: Cluster, measured_kinds: Iterable[str] = ()) -> str:
    """The devices by host and kind, and the links."""
    levels = [tier.within for tier in cluster.tiers if tier.within not in ("", HOST)]
    alike: dict[tuple[object, ...], list[DeviceSpec]] = {}
    for device in cluster.devices:
        groups = tuple(device.group(level) for level in levels)
        alike.setdefault((device.host, device.kind, device.memory_bytes, *groups), []).append(device)
    measured = set(measured_kinds)
    rows = [
        [
            device.host,
            _span([each.name for each in those]),
            device.kind,
            units.size(device.memory_bytes),
            MEASURED if device.kind in measured else _UNKNOWN,
            *((device.group(level) or _UNKNOWN).removeprefix(f"{device.host}/") for level in levels),
        ]
        for those in alike.values()
        for device in those[:1]
    ]
    blocks = [tables.table(["host", "devices", "kind", "memory", "costs", *levels], rows)]
    within = {tier.name: tier.within or "all" for tier in cluster.tiers}
    rows = [
        [
            name,
            f"{units.size(link.bandwidth_bytes_per_s)}/s",
            units.seconds(link.latency_s),
            link.evidence,
            *([within.get(name, _UNKNOWN)] if within else []),
        ]
        for name, link in cluster.links.items()
    ]
    if rows:
        blocks.append(tables.table(["link", "bandwidth", "latency", "known", *(["within"] if within else [])], rows))
    return "\n\n".join(blocks)


def _span(names: list[str]) -> str:
    short_names = [name.rpartition("/")[2] for name in names]
    return short_names[0] if len(short_names) == 1 else f"{short_names[0]} ... {short_names[-1]} ({len(short_names)})"
