"""What an entry of the zoo says of its network; the networks register themselves with :func:`network`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

PIPELINE, SPLIT, DATA, SPATIAL = "pipeline", "split backward", "data parallel", "spatial"
PLANS = (PIPELINE, SPLIT, DATA, SPATIAL)

WHOLE_BATCH = dict.fromkeys((PIPELINE, SPLIT, SPATIAL), "all samples of a step at once|needs the whole batch")
"""What is refused of a network that needs the whole batch at once: more micro-batches than one, in whatever plan."""

Factory = Callable[[], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Entry:
    """One network, and what is right for it.

    Attributes:
        name: ``module:factory`` below :mod:`tests.zoo`; ``halopipe profile`` takes ``tests.zoo.module:factory``.
        habit: what is special about it, in a few words.
        factory: makes it, as ``halopipe profile`` takes it.
        mixes: layers mix samples, or numbers are drawn by micro-batch: one device then runs the micro-batches of the
            plan one by one and adds their gradients (docs/decisions/0001).  If not, it runs the whole batch at once.
        draws: it draws random numbers, which one device is handed by the order in which it asks for them.
        refused: by plan, a pattern that the refusal matches; ``""`` is for all of them, as a refusal at capture is.
        tolerance: of float64; a model with a section in a lower dtype has that one's.
        micro_batches: of the pipeline, the pipeline with a split backward, data parallelism and the spatial plan.
    """

    name: str
    habit: str
    factory: Factory
    mixes: bool = False
    draws: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = 1e-10
    micro_batches: tuple[tuple[int, ...], ...] = ((3, 2), (2, 2, 2), (5,), (3, 2))

    def expected_refusal(self, plan: str) -> str:
        """The pattern of the refusal under ``plan``; empty where the network runs."""
        return self.refused.get(plan, self.refused.get("", ""))

    def micro_batches_of(self, plan: str) -> tuple[int, ...]:
        """Of one plan."""
        return self.micro_batches[PLANS.index(plan)]


NETWORKS: dict[str, Entry] = {}


def network(habit: str, **said: Any) -> Callable[[Factory], Factory]:
    """Registers the decorated factory; for ``said`` see :class:`Entry`; ``refused`` may be one pattern for all."""
    refused = said.pop("refused", {})
    patterns = {"": refused} if isinstance(refused, str) else dict(refused)

    def register(factory: Factory) -> Factory:
        name = f"{factory.__module__.rpartition('.')[2]}:{factory.__name__}"
        NETWORKS[name] = Entry(name, habit, factory, refused=patterns, **said)
        return factory

    return register
