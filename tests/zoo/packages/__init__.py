"""Networks of other people, small and with random weights, and the reference networks: ``tests.zoo.packages:NAME``.

Those of transformers, timm and torchvision import these packages when they are made.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.zoo.entries import Entry, Factory, factory_of, of_module
from tests.zoo.packages import (  # noqa: F401  # they register their networks
    encoders,
    language_models,
    pictures,
    reference,
    timm_networks,
    torchvision_networks,
)

__all__ = ["ORIGINS"]

ORIGINS: Mapping[str, Mapping[str, Entry]] = {
    origin: {name: entry for name, entry in of_module("packages").items() if entry.origin == origin}
    for origin in ("transformers", "timm", "torchvision", "profiler.models")
}
"""The networks by their own names, under the package that they are of."""


def __getattr__(name: str) -> Factory:
    return factory_of("packages", name)
