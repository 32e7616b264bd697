"""What a layer costs: as measured, read between measurements, or by a model of its family or device.

Modules:

    confidence      How well a figure is known
    cost_table      Costs of all layers at one size: running sums, so that any stretch is one subtraction; ranges of
                    what was interpolated
    interpolation   What a layer costs at any number of samples: an exact hit, else read between measurements of one
                    back end
    regression      What nobody measured, from what was: a model for each family of layers, by features of layers
    roofline        What a profile would say on other devices: a roofline (Williams, Waterman and Patterson, CACM 2009),
                    layer by layer
    shards          What a part of a layer costs: as it was measured at its own shape, else by the model of its family,
                    else a share; which parts are worth measuring
    token_slices    What layers cost slice by slice, where sequences are cut into token slices
"""

from __future__ import annotations

__all__: list[str] = []
