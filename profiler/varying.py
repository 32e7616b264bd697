"""What a factory says about sizes that vary from batch to batch, checked against its example."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from planner.ir.errors import FactoryError
from planner.ir.graph import SAMPLE

Varying = dict[str, tuple[tuple[str, int], ...]]

_LEAST = 2  # an extent of 1 would be taken for one that is always 1
_FORM = '{"time": [("inputs", 1), ("targets", 1)]}: the size\'s name, and the tensors and dims where it is'


def parse_varying(factory: str, value: Any, tensors: Mapping[str, Tensor]) -> Varying:
    """The places of each size that varies, by its name; see ``profiler.source`` for the form of ``value``.

    Args:
        factory: whose answer it is, for errors.
        tensors: of the example, by name.

    Raises:
        FactoryError: it has another form, or does not fit the example.
    """
    title = f"{factory} says in another way which sizes vary"
    if not isinstance(value, Mapping):
        raise FactoryError(title, [f"a {type(value).__name__}"], [_FORM])
    found: Varying = {}
    owner: dict[tuple[str, int], str] = {}
    for name, places in value.items():
        _require_name(factory, name, tensors)
        try:
            found[name] = tuple((str(tensor), int(dim)) for tensor, dim in places)
        except (TypeError, ValueError):
            raise FactoryError(title, [f"{name}: {places!r}"], [_FORM]) from None
        if not found[name]:
            raise FactoryError(f"{factory} names no place of {name}", [], [_FORM])
        for place in found[name]:
            _require_place(factory, name, place, tensors)
            if owner.setdefault(place, name) != name:
                raise FactoryError(
                    f"{factory} gives dim {place[1]} of {place[0]} two names", [f"{owner[place]} and {name}"]
                )
        _require_extent(factory, name, found[name], tensors)
    return found


def _require_name(factory: str, name: Any, tensors: Mapping[str, Tensor]) -> None:
    taken = (*tensors, "num_samples", SAMPLE)
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name in taken:
        raise FactoryError(
            f"{factory}: {name!r} cannot be the name of a size that varies",
            [f"taken: {', '.join(taken)}"],
            ["a word, such as time, points, height"],
        )


def _require_place(factory: str, name: str, place: tuple[str, int], tensors: Mapping[str, Tensor]) -> None:
    tensor, dim = place
    if tensor not in tensors:
        raise FactoryError(
            f"{factory}: {name} is said to be in {tensor!r}, which is not there", [f"there are {', '.join(tensors)}"]
        )
    shape = tuple(tensors[tensor].shape)
    first = next(iter(tensors))
    if not (1 if tensor == first else 0) <= dim < len(shape):
        raise FactoryError(
            f"{factory}: {name} is said to be dim {dim} of {tensor}",
            [f"its shape is {shape}", *(["dim 0 holds the samples"] if dim == 0 else [])],
            ["count dims from 0, samples first"],
        )


def _require_extent(
    factory: str, name: str, places: tuple[tuple[str, int], ...], tensors: Mapping[str, Tensor]
) -> None:
    extents = {place: tensors[place[0]].shape[place[1]] for place in places}
    if len(set(extents.values())) > 1:
        shown = [f"dim {dim} of {tensor}: {extent}" for (tensor, dim), extent in extents.items()]
        raise FactoryError(f"{factory}: {name} has several extents in the example", shown, ["give them several names"])
    if min(extents.values()) < _LEAST:
        raise FactoryError(
            f"{factory}: {name} is {min(extents.values())} in the example",
            [f"a size that varies must be at least {_LEAST} there"],
            ["a larger example, --input"],
        )
