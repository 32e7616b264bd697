"""``halopipe import``: a published profile as one of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halopipe.cli import completion

_FORMATS = ("pipedream",)


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A published profile, such as PipeDream's graph.txt.")],
    format_: Annotated[
        str,
        typer.Option(
            "--format", metavar="FORMAT", help="pipedream.", autocompletion=completion.named(lambda: _FORMATS)
        ),
    ] = "pipedream",
    samples: Annotated[int, typer.Option(min=1, help="Samples of the mini-batch that the file is of.")] = 1,
    device: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What the file was measured on; of the catalogue, which knows its memory.",
            autocompletion=completion.devices,
        ),
    ] = "V100-16GB",
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")] = Path("profile.json"),
) -> None:
    """Read a published profile -> profile.json, on one device; plan it on others with --cluster."""
    from halopipe.planning import measure
    from halopipe.terminal import console
    from halopipe.terminal.output_files import claimed
    from halopipe.terminal.units import require_known
    from planner import catalogue
    from planner.baselines.common.as_profile import as_profile
    from planner.baselines.pipedream import format as pipedream
    from planner.ir.cluster import Cluster, DeviceSpec
    from planner.ir.codec import dump
    from planner.ir.errors import FormatError, UsageError
    from planner.ir.validation import faults

    with claimed([output], [file]):
        require_known("format to import", [format_], _FORMATS)
        entry = catalogue.device(device)
        if entry.memory_bytes is None:
            raise UsageError(
                f"the catalogue does not say how much memory {entry.name} has",
                [entry.note],
                ["--device V100-16GB", "halopipe devices"],
            )
        spec = DeviceSpec(f"n0/{entry.family}0", entry.name, "n0", int(entry.memory_bytes.value))
        found = as_profile(pipedream.read(file), Cluster((spec,), {}), samples)
        senseless = faults(found)
        if senseless:
            raise FormatError(f"{file}: what it says makes no sense", senseless[:20])
        dump(found, output)
        console.emit(measure.summary(found))
        console.wrote(output, console.command("plan", output, "--cluster", "cluster.yaml"))
