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

HOOKS = {
    "cluster files": {"YAML": "planner.extras.catalogue.clusters:read_machines"},
    "device figures": {"catalogue": "planner.extras.catalogue.known_devices:with_figures"},
    "device names": {"catalogue": "planner.extras.catalogue.known_devices:name_of"},
}
