"""Sailor's clusters, planned from Sailor's own profiles: alike and unlike GPUs, beside the plans of Sailor's planner.

    network     OPT-350M, float32, a global batch of 1,024, as in Sailor's runs
    GPUs        A100-40 and V100-16, four a host; times of layers by tensor degree and micro-batch, as measured
    links       within a host by tables of such hosts; of a host's cards what four GPUs get together at most, of a rank
                what one gets alone (sailor_network.json); between kinds the slower of both
    space       what Sailor's planner may choose: stages of a kind, tensor degree and blocks of their own, replicas,
                micro-batch; no ZeRO, nothing is computed again

The best plan is predicted a second time by the model of Sailor's runs (:mod:`benchmarks.published.sailor`), which has a
rate for each number of GPUs that talk and sums gradients after all passes.  ``LIMITS`` are what plans of Sailor's own
planner (eth-easl/sailor), run on the same profiles, take by halopipe's simulator.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise, permutations

from benchmarks.published.sailor import FIRST_BLOCK, HOSTS, LAST, SHAPE, Profiles, Stage, predicted
from benchmarks.report import Row, at_least, at_most
from planner.extras.baselines.sailor import NETWORKS, layer_times
from planner.extras.kernels.links import ALPHA_ACROSS_S, AlphaBeta
from planner.extras.transformers.cluster import GpuCluster
from planner.extras.transformers.passes import timed
from planner.extras.transformers.pools import GpuPool, Pools
from planner.extras.transformers.search import search
from planner.extras.transformers.shape import ParallelDegrees, Recompute
from planner.extras.transformers.space import DegreesSpace

BATCH, PER_HOST = 1024, 4
A100, V100 = "A100-40", "V100-16"
_KINDS = {A100: "A100-40GB", V100: "V100-16GB"}
LIMITS: Mapping[tuple[tuple[str, int], ...], float] = {
    ((A100, 32),): 7.993,
    ((A100, 128),): 2.835,
    ((A100, 32), (V100, 96)): 5.884,
}
"""Seconds of a step of Sailor's plans."""
MOST_SECONDS = 10.0
SPACE = DegreesSpace(zero=(0,), recompute=(Recompute.NONE,))


def rows() -> Iterator[Row]:
    """Of each cluster."""
    profiles = Profiles()
    for gpus, limit_s in LIMITS.items():
        cluster = pools_of_sailor(gpus, profiles)
        start_s = time.process_time()
        best = search(SHAPE, cluster, cluster.devices, BATCH, SPACE, time_limit_s=MOST_SECONDS)
        spent_s = time.process_time() - start_s
        name = f"Sailor's cluster, {' and '.join(f'{number} {gpu}' for gpu, number in gpus)}"
        ways = best.best.ways
        yield at_most(f"{name}: step, Sailor's own plan as a limit", best.best.prediction.step.seconds, "s", limit_s)
        yield at_most(f"{name}: step by the model of the runs", _again_s(ways, profiles), "s", limit_s)
        yield at_least(f"{name}: kinds that are used", len(set(ways.pools)), "", len(gpus))
        yield Row(f"{name}: proven gap", 100 * best.gap, "%")
        yield at_most(f"{name}: processor time", spent_s, "s", MOST_SECONDS)


def pools_of_sailor(gpus: tuple[tuple[str, int], ...], profiles: Profiles) -> Pools:
    """Hosts of four of each kind."""
    times = layer_times(profiles.rows, NETWORKS["OPT-350"], [_KINDS[gpu] for gpu, _ in gpus])
    pools = []
    for gpu, number in gpus:
        card, stream = (profiles.networks[gpu, talking][1] for talking in (PER_HOST, 1))
        kind = _KINDS[gpu]
        cluster = GpuCluster(
            gpu, kind, PER_HOST, HOSTS[gpu], AlphaBeta(ALPHA_ACROSS_S, card), "float32", of_network=1.0,
            stream_bytes_per_s=stream, timed=timed(SHAPE.layers, times[kind]),
        )  # fmt: skip
        pools.append(GpuPool(cluster, number))
    between = {
        (one.cluster.name, other.cluster.name): min(
            one.cluster.across, other.cluster.across, key=lambda wire: wire.bytes_per_s
        )
        for one, other in permutations(pools, 2)
    }
    return Pools("Sailor's", tuple(pools), between)


def _again_s(ways: ParallelDegrees, profiles: Profiles) -> float:
    """The step of a plan by the model that predicts Sailor's runs."""
    ends = list(accumulate(ways.chunks(SHAPE.layers), initial=FIRST_BLOCK))
    stages = []
    for (first, stop), gpu, tensor in zip(pairwise(ends), ways.pools, ways.degrees, strict=True):
        span = 0 if first == FIRST_BLOCK else first, LAST if stop == LAST else stop - 1
        stages.append([Stage(*span, gpu, tensor)] * ways.data)
    return predicted(stages, ways.micro_batch, BATCH, profiles)[0].step.seconds
