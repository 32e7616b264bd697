"""The first halves of scripts of users: ``tests.zoo.scripts:NAME``; ``benchmarks.journey`` runs their sources.

Nothing of ours stands in them, so what is known of their networks stands here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from tests.zoo.entries import PIPELINE, SPLIT, WHOLE_BATCH, Entry, Factory, factory_of, network, of_module
from tests.zoo.scripts import habits, packages

__all__ = ["HABITS", "PACKAGES"]

_IN_FLOAT32 = 1e-5
"""Tolerance of networks that compute some of their layers in float32, whatever they are given."""

_DRAW = "bert roberta_tokens distilbert_answers t5 bart hubert segformer torchvision_googlenet torch_transformer"
_MIX = "patchtst torchvision_resnet torchvision_segmentation timm_efficientnet"
_SAID: Mapping[str, Mapping[str, Any]] = {
    **{name: {"draws": True} for name in _DRAW.split()},
    **{name: {"mixes": True} for name in _MIX.split()},
    "gpt2": {"draws": True, "tolerance": _IN_FLOAT32},
    "llama": {"tolerance": _IN_FLOAT32},
    "mixtral": {"tolerance": _IN_FLOAT32},
    "clip": {"refused": WHOLE_BATCH},
    "buffer_by_hand": {"refused": dict.fromkeys((PIPELINE, SPLIT), "a buffer that layers write must be on one stage")},
    "control_flow": {"refused": r"(, line |\.py:)\d"},
}
"""What is right for a network, where that is not to be equal; see :class:`tests.zoo.entries.Entry`."""


def _registered(module: Any, origin: str) -> dict[str, Entry]:
    """The public functions of ``module``, in their order; what they say of themselves is the habit."""
    made = [each for _, each in inspect.getmembers(module, inspect.isfunction) if each.__module__ == module.__name__]
    for factory in sorted(made, key=lambda each: each.__code__.co_firstlineno):
        said = _SAID.get(factory.__name__, {})
        network(str(factory.__doc__).strip().removesuffix("."), origin=origin, **said)(factory)
    return {name: entry for name, entry in of_module("scripts").items() if entry.origin == origin}


PACKAGES = _registered(packages, "packages")
HABITS = _registered(habits, "habits")


def __getattr__(name: str) -> Factory:
    return factory_of("scripts", name)
