"""Equal to one device: the step that a plan must equal, and how far it is from it.

Modules:

    compare         How far a plan's losses, gradients and state are from one device's, and the tolerance that is
                    allowed
    difference      One quantity of a plan beside one device's; without torch
    finite          NaN and infinity: found before an update is made of them, and where in the step they first appeared
    nan_guard       What a NaN does to a step: nothing that is made of NaN or infinity goes on, or is saved
    single_device   One device: the step that a plan's step must equal
"""

from __future__ import annotations

__all__: list[str] = []
