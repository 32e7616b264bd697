"""What a proof of a plan says: its claim, the space it is about, and what shows it (``planner.proof``)."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class ProofSpace:
    """The plans that a claim is about; ``planner.proof.space`` derives it from the profile and what was asked.

    Attributes:
        micro_batches: their sizes, in samples.
        schedules: by name.
        recompute: what a stage may compute again: ``nothing``, ``all``, ``cores`` (of attention).
        pools: devices that nothing tells apart, such as ``2 x cpu on n0``; stages take any set of them.
        num_cuts: places to cut, both ends included.
        any_cut: whether these are all places where the network can be cut; else those between two layers of its order.
    """

    micro_batches: tuple[int, ...]
    schedules: tuple[str, ...]
    recompute: tuple[str, ...]
    pools: tuple[str, ...]
    num_cuts: int
    any_cut: bool


@dataclass(frozen=True, slots=True)
class ProofPrices:
    """What each layer costs at least on a kind of device at so many samples, in the graph's order."""

    kind: str
    samples: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    backward_input_s: tuple[float, ...]
    backward_weight_s: tuple[float, ...]
    saved_bytes: tuple[float, ...]
    workspace_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Potential:
    """What the rest of a pipeline takes at least, by the cut where it begins; cuts left out: as long as the claim.

    Attributes:
        micro_batch: samples of a full one.
        unused: devices by pool before the rest begins.
        devices: those of its first stage, by pool; recompute: what that stage computes again.
        trip_s: from a micro-batch's forward on the first stage to the end of its backward there.
        end_s: from the stage's first forward to the end of its last backward.
        total_s: from the stage's first forward to the end of the step.
        free_s: the step, whenever the stage begins.
    """

    micro_batch: int
    unused: tuple[int, ...]
    devices: tuple[int, ...]
    recompute: str
    cuts: tuple[int, ...]
    trip_s: tuple[float, ...]
    end_s: tuple[float, ...]
    total_s: tuple[float, ...]
    free_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Proof:
    """A proof: no plan of the space has a step shorter than ``bound_s``, at the profile's prices.

    Attributes:
        plan_fingerprint, profile_fingerprint: of the plan that it is about, and of its profile.
        step_s: what that plan is predicted to take.
        opened: the beginnings of pipelines whose continuations are looked at one by one; all others take as long as the
            claim by the potentials alone.
    """

    plan_fingerprint: str
    profile_fingerprint: str
    step_s: float
    bound_s: float
    space: ProofSpace
    prices: tuple[ProofPrices, ...]
    potentials: tuple[Potential, ...]
    opened: tuple[str, ...]

    @property
    def gap(self) -> float:
        """By what part the plan may take longer than the best of the space."""
        return self.step_s / self.bound_s - 1 if self.bound_s > 0 else inf
