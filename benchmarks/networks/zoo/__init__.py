"""Networks of other people, small and with random weights, and the reference networks.

``benchmarks.networks.zoo:NAME``.

A factory's keyword arguments are none; what it returns is described in ``profiler.source.source``.  Those of
transformers and timm import these packages when they are called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from benchmarks.networks.zoo import (
    encoders,
    language_models,
    pictures,
    reference,
    timm_networks,
    torchvision_networks,
)

__all__ = ["ORIGINS", "Factory", "factories"]

Factory = Callable[[], Any]


def factories(module: ModuleType) -> dict[str, Factory]:
    """The public functions that ``module`` itself defines, in their order."""
    found = inspect.getmembers(module, inspect.isfunction)
    own = [(name, value) for name, value in found if value.__module__ == module.__name__ and name[0] != "_"]
    return dict(sorted(own, key=lambda each: each[1].__code__.co_firstlineno))


_TRANSFORMERS = encoders, language_models, pictures
ORIGINS: Mapping[str, Mapping[str, Factory]] = {
    "transformers": {name: factory for module in _TRANSFORMERS for name, factory in factories(module).items()},
    "timm": factories(timm_networks),
    "torchvision": factories(torchvision_networks),
    "profiler.models": factories(reference),
}
"""The factories by name, under the package whose networks they are."""


def __getattr__(name: str) -> Factory:
    for networks in ORIGINS.values():
        if name in networks:
            return networks[name]
    raise AttributeError(f"module 'benchmarks.networks.zoo' has no attribute {name!r}")
