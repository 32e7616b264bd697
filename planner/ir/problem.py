"""What a solver is asked: a profile and the constraints."""

from __future__ import annotations

from dataclasses import dataclass

from planner.ir.profile import Profile


@dataclass(frozen=True, slots=True)
class Problem:
    """Find the plan with the shortest step.

    Attributes:
        global_batch: samples a step.
        schedules: names of the schedules that may be used.
        micro_batch_sizes: samples a micro-batch that may be used; empty: every divisor-like size the profile covers.
        max_stages: most stages; 0: no limit.
        num_ranks: devices that may be used, the first ones by rank; 0: all.
        memory_margin: share of a device's memory that stays free.
        gap: stop once the plan is proved to be within this fraction of the best.
        time_limit_s: stop searching after this long and return the best so far.
    """

    profile: Profile
    global_batch: int
    schedules: tuple[str, ...] = ()
    micro_batch_sizes: tuple[int, ...] = ()
    max_stages: int = 0
    num_ranks: int = 0
    memory_margin: float = 0.08
    gap: float = 0.0
    time_limit_s: float = 60.0

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that may be used."""
        count = len(self.profile.cluster.devices)
        return tuple(range(min(self.num_ranks, count) if self.num_ranks else count))

    def memory_limit_bytes(self, rank: int) -> int:
        """What a plan may use on ``rank``."""
        return int(self.profile.cluster.devices[rank].memory_bytes * (1 - self.memory_margin))
