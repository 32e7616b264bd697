"""What launchers are told of a network, from the sizes that a shape has.

Whatever a shape names and nobody tells is found by :func:`sizes_beyond`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

from planner.extras.transformers.shape import Transformer


def sizes_beyond(shape: Transformer, names: Collection[str]) -> list[str]:
    """Sizes beyond those of ``names`` that are not those that a network has if it is not said."""
    return [
        f"{field.name}={getattr(shape, field.name)}"
        for field in fields(shape)
        if field.name not in names and getattr(shape, field.name) != field.default
    ]
