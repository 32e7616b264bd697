"""What a part of one layer needs and saves, of the levels of whole layers: number by number.

Follows the same model as ``LevelTables.of_parts`` in ``planner.costs.memory.levels`` but none of its code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.ir.profile import LEVEL_NAMES

INPUTS_SAVED, INPUTS_KEPT = (LEVEL_NAMES.index(name) for name in ("inputs_saved", "inputs_kept"))
WHILE_IT_RUNS = slice(0, 1 + LEVEL_NAMES.index("backward_weight"))
Levels = NDArray[np.float64]
"""``[quantity, layer]`` of whole layers at a number of samples."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a rank's part of a layer reads.

    Attributes:
        samples, share: of the part, and what it is of the work of so many whole samples.
        read_share: what it reads of their inputs.
        received: bytes that come from other ranks of the stage; ``copied``: those that make it read a copy.
        stays: whether what is received is kept, whoever saves it.
    """

    samples: float
    share: float
    read_share: float
    received: float
    copied: float = 0.0
    stays: bool = False


def levels_of_part(
    whole: Levels | None, none: Levels | None, layer: int, part: Reading, needs: float, weights: tuple[float, float]
) -> list[float] | None:
    """By quantity of a part of a layer: its share of those of as many whole samples; None if not measured.

    What does not grow with the samples, at most the bytes of the weights, is a copy of these in another order of
    elements: it is there in as far as the part uses them.

    Args:
        whole: of the part's samples; ``none``: of no samples.
        needs: workspace of the part beyond such a share.
        weights: share of the layer's parameters that the part uses, and bytes of these in all.
    """
    if whole is None or none is None:
        return None
    own = whole[:, layer] * part.share
    used, in_all = weights
    copied = np.minimum(np.minimum(none, whole)[WHILE_IT_RUNS, layer], in_all)
    own[WHILE_IT_RUNS] += part.received + np.maximum(copied * max(0.0, used - part.share), max(0.0, needs))
    return [float(each) for each in own]


def inputs_saved(whole: Levels | None, layer: int, part: Reading) -> tuple[float, float]:
    """What a part of a layer saves of others' values beyond its share, and what of all that lies where it was.

    Where it reads a copy, it saves that, whoever else has saved the values; else as much more as it reads more.
    """
    if whole is None:
        return part.received, 0.0
    first = float(whole[INPUTS_SAVED, layer])
    every = float(whole[INPUTS_KEPT, layer])
    read = max(part.share, part.read_share)
    more = first * max(0.0, part.read_share - part.share)
    if part.stays or not whole[INPUTS_KEPT].any():  # or the profile does not know who saves what others saved
        return max(part.received, more), first * read
    received = part.received if every else 0.0
    if part.copied:
        return max(received, every * read - first * part.share), 0.0
    return max(received, more), first * read
