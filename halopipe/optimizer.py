"""The optimiser as people write it: ``SGD``, ``SGD:lr=0.1,momentum=0.9``, ``AdamW:lr=0.001``."""

from __future__ import annotations

from collections.abc import Mapping

from halopipe import naming
from planner.ir.errors import UsageError
from planner.ir.profile import Optimizer

_DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "SGD": {"lr": 0.01, "momentum": 0.9},
    "Adam": {"lr": 0.001},
    "AdamW": {"lr": 0.001},
    "RMSprop": {"lr": 0.001},
    "Adagrad": {"lr": 0.01},
}
_STATE_PER_PARAMETER: Mapping[str, float] = {"SGD": 0.0, "Adam": 2.0, "AdamW": 2.0, "RMSprop": 1.0, "Adagrad": 1.0}
"""Tensors of a parameter's size that ``torch.optim`` keeps for each (torch 2.13), without momentum."""


def parse_optimizer(text: str) -> Optimizer:
    """The optimiser that ``text`` spells; arguments that are given replace the defaults altogether.

    Raises:
        UnknownNameError: it is none of those whose state is known.
        UsageError: an argument is not ``key=number``.
    """
    name, colon, rest = text.partition(":")
    naming.require_known("optimiser", [name], list(_DEFAULTS))
    arguments = _parse_arguments(rest) if colon else dict(_DEFAULTS[name])
    with_momentum = 1.0 if name in ("SGD", "RMSprop") and arguments.get("momentum", 0.0) > 0 else 0.0
    return Optimizer(name, arguments, _STATE_PER_PARAMETER[name] + with_momentum)


def _parse_arguments(text: str) -> dict[str, float]:
    arguments = {}
    for pair in text.split(","):
        key, equals, value = (part.strip() for part in pair.partition("="))
        try:
            number = float(value) if equals and key.isidentifier() else None
        except ValueError:
            number = None
        if number is None:
            raise UsageError(f"optimiser argument {pair!r} is not key=number", [], ["--optimizer SGD:lr=0.1"])
        arguments[key] = number
    return arguments
