"""What proofs cover, and what to leave out of a request that has more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import comb, prod

from planner import layers, schedules
from planner.ir.problem import MICRO, NEVER, SAMPLE_DIMS, THROUGHPUT, Problem

MOST_WAYS = 50_000
"""To take two groups one after the other from the devices; a table of potentials has a row for about each."""


def refusals(problem: Problem) -> Iterator[tuple[str, str]]:
    """What no proof covers of a request and its profile, and what to do about it."""
    cluster = problem.cluster
    ranks = problem.ranks
    traits = {name: schedules.traits(name) for name in problem.schedules}
    odd = [n for n, t in traits.items() if t.timed or not (t.synchronous and t.trains and t.stages_per_position == 1)]
    pools = Counter((cluster.groups_of(r), cluster.devices[r].kind, problem.memory_limit_bytes(r)) for r in ranks)
    ways = prod(comb(count + 3, 3) for count in pools.values())
    streams = any(cluster.devices[r].streams or cluster.devices[r].memories[1:] for r in ranks)
    dims = ", ".join(problem.allow)
    for is_odd, what, remedy in (
        (problem.objective != THROUGHPUT, f"the objective {problem.objective}", "leave out --objective"),
        (odd, f"the schedule {', '.join(odd)}", "other schedules, such as --schedule 1f1b"),
        (problem.allow != (SAMPLE_DIMS,), f"layers cut along {dims}", "leave out --allow and --token-slices"),
        (problem.shard != NEVER, "a divided optimiser state", "leave out --shard"),
        (problem.fix or problem.forbid, "side constraints", "leave out --fix and --forbid"),
        (problem.batch_statistics != MICRO, "statistics of the whole batch", "leave out --batch-statistics"),
        (problem.profile.calibration.corrections, "costs that runs corrected", "add --no-calibration"),
        (layers.over_sites(problem.graph), "layers over sites", "leave out --proof"),
        (cluster.pairs, "links between single hosts", "leave out --proof"),
        (streams, "devices that stream or have memory on chip", "leave out --proof"),
        (ways > MOST_WAYS, f"{len(ranks)} devices, of too many groups", "fewer devices, such as --ranks 8"),
    ):
        if is_odd:
            yield what, remedy
