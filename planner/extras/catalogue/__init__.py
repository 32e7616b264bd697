"""Devices and links one does not have at hand: one YAML file a device, every figure with its source and date.

    device("V100-16GB").memory_bytes       16 GiB, from which document, of when
    read_machines("cluster.yaml")          a cluster of such devices, see ``clusters``

PyYAML is loaded when the first file is read.

Modules:

    clusters   ``cluster.yaml``: machines one does not have: devices of the catalogue, of the profile, or with figures
               of one's own
    known_devices   Measured devices that the catalogue knows: their peaks, for what is not measured and for efficiency
                    figures
    listing         The catalogue's entries by name, read once
    reading         Plain values of YAML by type: no unknown key, no value of another type; all faults in one go
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.ir.planner_extra import PlannerExtra

if TYPE_CHECKING:
    from pathlib import Path

    from planner.extras.catalogue.clusters import Machines
    from planner.ir.cluster import Cluster
    from planner.ir.profile import Profile


class CatalogueDevices(PlannerExtra):
    """Devices that one does not have at hand."""

    def machines(self, path: str | Path, cluster: Cluster) -> Machines:
        from planner.extras.catalogue.clusters import read_machines

        return read_machines(path, cluster)

    def with_device_figures(self, profile: Profile) -> Profile:
        from planner.extras.catalogue.known_devices import with_figures

        return with_figures(profile)

    def device_name(self, kind: str, memory_bytes: int) -> str:
        from planner.extras.catalogue.known_devices import name_of

        return name_of(kind, memory_bytes)


EXTRA = CatalogueDevices()
