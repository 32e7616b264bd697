"""Devices with a second memory, beside the multipliers (block RAM of an FPGA: :class:`planner.ir.cluster.DeviceSpec`).

It has the parameters, their gradients and the optimiser's state where all of those that the device holds fit.  So there
are two kinds of costs of such a device: its own, with parameters read on chip, and :func:`.costs.off_chip`.

Modules:

    costs   Costs of layers with parameters on chip and without, and which of the two a rank pays
"""

from __future__ import annotations

HOOKS = {
    "kinds of a device": {"on chip": "planner.extras.on_chip_memory.costs:kinds"},
    "read beside": {"on chip": "planner.extras.on_chip_memory.costs:read_on_chip"},
    "main-memory kind": {"on chip": "planner.extras.on_chip_memory.costs:off_chip"},
    "bytes beside": {"on chip": "planner.extras.on_chip_memory.costs:on_chip_bytes"},
}
