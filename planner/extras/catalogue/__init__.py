"""Devices and links one does not have at hand: one YAML file a device, every figure with its source and date.

    device("V100-16GB").memory_bytes       16 GiB, from which document, of when
    read_machines("cluster.yaml")          a cluster of such devices, see ``clusters``

PyYAML is loaded when the first file is read.

Modules:

    clusters   ``cluster.yaml``: machines one does not have: devices of the catalogue, of the profile, or with figures
               of one's own
    listing    The catalogue's entries by name, read once
    reading    YAML as strictly as JSON: no key twice, no unknown key, no value of another type; all faults in one go;
               quantities with units
"""

from __future__ import annotations

from planner.extras.catalogue.clusters import Machines, machines_of, read_machines
from planner.extras.catalogue.listing import DeviceEntry, Figure, LinkEntry, device, devices, link, links

__all__ = [
    "DeviceEntry",
    "Figure",
    "LinkEntry",
    "Machines",
    "device",
    "devices",
    "link",
    "links",
    "machines_of",
    "read_machines",
]
