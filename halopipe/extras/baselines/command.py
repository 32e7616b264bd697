"""``halopipe import``: a published profile as one of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halopipe.cli import completion
from halopipe.cli.options import FileOption
from halopipe.terminal import console
from halopipe.terminal.output_files import claimed
from halopipe.terminal.units import require_known
from planner.ir.cluster import Cluster, DeviceSpec
from planner.ir.errors import FormatError, UsageError
from planner.ir.problem import MOST_BATCH
from planner.ir.validation import MOST_DEVICES, faults

_FORMATS = ("pipedream", "sailor")


def import_(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A published profile: PipeDream's graph.txt, Sailor's times of layers."),
    ],
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            "--from",
            metavar="FORMAT",
            help="pipedream or sailor.",
            autocompletion=completion.offered(_FORMATS),
        ),
    ] = "pipedream",
    samples: Annotated[
        int, typer.Option(min=1, max=MOST_BATCH, help="Samples of the mini-batch that the file is of.")
    ] = 1,
    device: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What the file was measured on; of the catalogue, which knows its memory.",
            autocompletion=completion.offered("planner.extras.catalogue.listing:devices"),
        ),
    ] = "V100-16GB",
    model: Annotated[str, typer.Option(metavar="NAME", help="Of sailor: whose times, such as OPT-350.")] = "",
    tensor: Annotated[
        int, typer.Option(min=1, max=MOST_DEVICES, help="Of sailor: GPUs that a device of the cluster is.")
    ] = 1,
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of sailor: cluster file of the devices, of unlike kinds.")
    ] = None,
    output: FileOption = Path("profile.json"),
) -> None:
    """Read a published profile -> profile.json; of pipedream on one device, to be planned on others with --cluster."""
    from halopipe.reports.measured import summary
    from planner.extras.baselines import sailor
    from planner.extras.baselines.common.as_profile import as_profile
    from planner.extras.baselines.pipedream import format as pipedream
    from planner.extras.catalogue import listing
    from planner.extras.catalogue.clusters import read_machines
    from planner.ir.codec import dump

    with claimed([output], [file, cluster]):
        require_known("format to import", [format_], _FORMATS)
        entry = listing.device(device)
        if entry.memory_bytes is None:
            raise UsageError(
                f"the catalogue does not say how much memory {entry.name} has",
                [entry.note],
                ["--device V100-16GB", "halopipe devices"],
            )
        spec = DeviceSpec(f"n0/{entry.family}0", entry.name, "n0", int(entry.memory_bytes.value))
        machines = Cluster((spec,), {}) if cluster is None else read_machines(cluster).cluster
        if format_ == "sailor":
            imported = sailor.profile_of(sailor.read(file), model, machines, tensor)
        else:
            imported = as_profile(pipedream.read(file), machines, samples)
        senseless = faults(imported)
        if senseless:
            raise FormatError(f"{file}: what it says makes no sense", senseless[:20])
        dump(imported, output)
        console.emit(summary(imported))
        rest = () if cluster is not None else ("--cluster", "cluster.yaml")
        console.wrote(output, console.command("plan", output, *rest))
