"""What an entry of the zoo says of its network; the networks register themselves with :func:`network`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.ir.profile import ModelSource

PIPELINE = "pipeline"
SPLIT = "split backward"
DATA = "data parallel"
SPATIAL = "spatial"
PLANS = (PIPELINE, SPLIT, DATA, SPATIAL)

WHOLE_BATCH = dict.fromkeys((PIPELINE, SPLIT, SPATIAL), "all samples of a step at once|needs the whole batch")
"""What is refused of a network that needs the whole batch at once: more micro-batches than one, in whatever plan."""

Factory = Callable[[], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Entry:
    """One network, and what is right for it.

    Attributes:
        name: ``module:factory`` below :mod:`tests.zoo`; ``halopipe profile`` takes ``tests.zoo.module:factory``.  The
            modules of a package register as the package: ``packages:bert``.
        habit: what is special about it, in a few words.
        factory: makes it, as ``halopipe profile`` takes it.
        mixes: layers mix samples, or numbers are drawn by micro-batch: one device then runs the micro-batches of the
            plan one by one and adds their gradients (docs/decisions/0001).  If not, it runs the whole batch at once.
        draws: it draws random numbers, which one device is handed by the order in which it asks for them.
        refused: by plan, a pattern that the refusal matches; ``""`` is for all of them, as a refusal at capture is.
        tolerance: of float64; a model with a section in a lower dtype has that one's.
        micro_batches: of the pipeline, the pipeline with a split backward, data parallelism and the spatial plan.
        origin: whose network it is, where it was not written for the zoo.
    """

    name: str
    habit: str
    factory: Factory
    mixes: bool = False
    draws: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = 1e-10
    micro_batches: tuple[tuple[int, ...], ...] = ((3, 2), (2, 2, 2), (5,), (3, 2))
    origin: str = ""

    @property
    def source(self) -> ModelSource:
        """In float64."""
        return ModelSource(f"tests.zoo.{self.name}", dtype="float64")

    def expected_refusal(self, plan: str) -> str:
        """The pattern of the refusal under ``plan``; empty where the network runs."""
        return self.refused.get(plan, self.refused.get("", ""))

    def is_expected(self, plan: str, refusal: str) -> bool:
        """Whether it may be refused so under ``plan``."""
        pattern = self.expected_refusal(plan)
        return bool(pattern) and re.search(pattern, refusal, re.IGNORECASE) is not None

    def micro_batches_of(self, plan: str) -> tuple[int, ...]:
        """Of one plan."""
        return self.micro_batches[PLANS.index(plan)]


NETWORKS: dict[str, Entry] = {}


def network(habit: str, name: str = "", **said: Any) -> Callable[[Factory], Factory]:
    """Registers the decorated factory; for ``said`` see :class:`Entry`; ``refused`` may be one pattern for all."""
    refused = said.pop("refused", {})
    patterns = {"": refused} if isinstance(refused, str) else dict(refused)

    def register(factory: Factory) -> Factory:
        place = factory.__module__.rpartition("zoo.")[2].partition(".")[0]
        full_name = name or f"{place}:{factory.__name__}"
        NETWORKS[full_name] = Entry(full_name, habit, factory, refused=patterns, **said)
        return factory

    return register


def of_module(module: str) -> dict[str, Entry]:
    """The networks that a module or package of the zoo registers, by the names of their factories, in its order."""
    places = {name: name.partition(":") for name in NETWORKS}
    return {factory: NETWORKS[name] for name, (place, _, factory) in places.items() if place == module}


def factory_of(module: str, name: str) -> Factory:
    """For ``__getattr__`` of a package whose modules register networks as its own."""
    entry = NETWORKS.get(f"{module}:{name}")
    if entry is None:
        raise AttributeError(f"module 'tests.zoo.{module}' has no attribute {name!r}")
    return entry.factory
