"""What a part of one layer needs and saves, of the levels of whole layers: number by number.

Follows the same model as ``LevelTables.of_parts`` in ``planner.costs.memory.levels`` but none of its code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.costs.memory.levels import INPUTS_KEPT, INPUTS_SAVED, WEIGHT, LevelTables


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
    levels: LevelTables, kind: str, layer: int, part: Reading, needs: float, weights: tuple[float, float]
) -> NDArray[np.float64] | None:
    """``[quantity]`` of a part of a layer: its share of those of as many whole samples; None if not measured.

    What does not grow with the samples, at most the bytes of the weights, is a copy of these in another order of
    elements: it is there in as far as the part uses them.

    Args:
        needs: workspace of the part beyond such a share.
        weights: share of the layer's parameters that the part uses, and bytes of these in all.
    """
    whole, none = levels.at(kind, part.samples), levels.at(kind, 0.0)
    if whole is None or none is None:
        return None
    own, (used, in_all) = whole[:, layer] * part.share, weights
    copied = np.minimum(np.minimum(none, whole)[: WEIGHT + 1, layer], in_all)
    own[: WEIGHT + 1] += part.received + np.maximum(copied * max(0.0, used - part.share), max(0.0, needs))
    return np.asarray(own)


def inputs_saved(levels: LevelTables, kind: str, layer: int, part: Reading) -> tuple[float, float]:
    """What a part of a layer saves of others' values beyond its share, and what of all that lies where it was.

    Where it reads a copy, it saves that, whoever else has saved the values; else as much more as it reads more.
    """
    whole = levels.at(kind, part.samples)
    if whole is None:
        return part.received, 0.0
    first, every = float(whole[INPUTS_SAVED, layer]), float(whole[INPUTS_KEPT, layer])
    read, more = max(part.share, part.read_share), first * max(0.0, part.read_share - part.share)
    if part.stays or not whole[INPUTS_KEPT].any():  # or the profile does not know who saves what others saved
        return max(part.received, more), first * read
    received = part.received if every else 0.0
    if part.copied:
        return max(received, every * read - first * part.share), 0.0
    return max(received, more), first * read
