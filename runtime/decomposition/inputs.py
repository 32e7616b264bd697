"""The arguments of an operator with all that this rank's part reads of them."""

from __future__ import annotations

from typing import Any

from runtime.decomposition.step import Step


def gathered(step: Step, arguments: dict[str, Any]) -> dict[str, Any]:
    """``arguments``, in which every value of the graph covers what the part needs of it.

    Exchanges run in the order of the layer's inputs, which is the same on every rank.
    """
    found = dict(arguments)
    for name, index in step.inputs_of.items():
        if isinstance(index, int):
            found[name] = step.get(index, arguments[name])
        elif index is not None:
            found[name] = [
                each if at is None else step.get(at, each) for at, each in zip(index, arguments[name], strict=True)
            ]
    return found
