"""What sits right on the machine: how a process is set up for its device, later the kernels.

The profiler and the runtime set their processes up with the same call, so that a profile describes the run.
"""

from __future__ import annotations

from cuda_ops.device.host import (
    DeviceDescription,
    core_of,
    cores_beside,
    device_description,
    die_with_parent,
    prepare_process,
)

__all__ = [
    "DeviceDescription",
    "core_of",
    "cores_beside",
    "device_description",
    "die_with_parent",
    "prepare_process",
]
