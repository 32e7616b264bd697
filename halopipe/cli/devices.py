"""``halopipe devices``: the catalogue."""

from __future__ import annotations

from halopipe.cli.options import Json
from halopipe.terminal import console


def devices(json: Json = False) -> None:
    """List the devices and links of the catalogue, for cluster files; with --json, the source of each figure."""
    from halopipe.planning import clusters

    console.emit_json(clusters.catalogue_data()) if json else console.emit(clusters.catalogue_table())
