"""Sailor's runs, predicted from Sailor's own profiles: stages of OPT-350M on alike and on unlike GPUs.

    layer       forward and backward by GPU, micro-batch and tensor degree; a smaller micro-batch takes no longer than a
                larger one (of two times that contradict this the shorter is taken)
    pipeline    one for each replica; each stage of it on GPUs of its own; the slowest counts
    messages    DeepSpeed's: blocking, a part from each tensor rank, in float32, over the cards of both hosts; then the
                tensor ranks of the next stage gather the parts before they compute
    gradients   a float32 ring over the replicas of a stage, at the rate of the slowest pair of hosts, after all passes
    memory      what the driver tells (``nvidia-smi``): of tensors, in float32, and of what is outside of them
    rates       between hosts by size, a polynomial of log2 of the MiB, up to the largest, as the source fitted them

Gradients and messages are float32: the profiles' own times are (on V100 those of float32 products, four times those of
float16), and so are the seconds that the source gives for its sums of gradients (21.6 s over 1 Gbit/s, of which float32
takes 18.3).  No step was looked at for it.  Gathering, what a block keeps, and what is outside of tensors are read off
the source's software (eth-easl/sailor: ``deepspeed/pipe_engine.py``, ``megatron/model/gpt_neo_model.py``, and its
simulator's ``get_memory_footprint_on_gpu`` and ``check_config_fits``), after errors had been seen.

Sailor's clusters, planned from Sailor's own profiles: alike and unlike GPUs, beside the plans of Sailor's planner.

    network     OPT-350M, float32, a global batch of 1,024, as in Sailor's runs
    GPUs        A100-40 and V100-16, four a host; times of layers by tensor degree and micro-batch, as measured
    links       within a host by tables of such hosts; of a host's cards what four GPUs get together at most, of a rank
                what one gets alone (sailor_network.json); between kinds the slower of both
    space       what Sailor's planner may choose: stages of a kind, tensor degree and blocks of their own, replicas,
                micro-batch; no ZeRO, nothing is computed again

The best plan is predicted a second time by the model of Sailor's runs , which has a
rate for each number of GPUs that talk and sums gradients after all passes.  ``LIMITS`` are what plans of Sailor's own
planner (eth-easl/sailor), run on the same profiles, take by halopipe's simulator.
"""

from __future__ import annotations

import json
import lzma
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, permutations
from math import log2
from pathlib import Path

from benchmarks.published.runs import Run, read
from benchmarks.report import Row, at_least, at_most
from planner.extras.baselines.sailor import NETWORKS, SailorRow, layer_times, parse
from planner.extras.kernels.estimates import TABLE, Estimate
from planner.extras.kernels.links import ALPHA_ACROSS_S, AlphaBeta, links
from planner.extras.transformers.cluster import GpuCluster
from planner.extras.transformers.memory import SINGLE, memory_of, stage_parameters
from planner.extras.transformers.passes import timed
from planner.extras.transformers.pipeline import chunked
from planner.extras.transformers.pools import GpuPool, Pools
from planner.extras.transformers.search import search
from planner.extras.transformers.shape import Fusion, ParallelDegrees, Recompute, Sends, named_transformer
from planner.extras.transformers.space import DegreesSpace
from planner.extras.transformers.step import MODEL_ERROR, StepPrediction

DATA = Path(__file__).parent / "data"
SHAPE = named_transformer("opt-350m")
FIRST_BLOCK = 1
LAST = 25
"""Layer 0 is the embedding, layer 25 the head."""
_FLOAT32 = SINGLE
"""Bytes of a number, kept or sent."""
ODD_TENSOR = 2
"""Degree of the two runs on unlike GPUs whose memory contradicts the others: their ranks have four times the share of a
block that those of degree 8 have, at the same micro-batch, and hold 3.8 and 5.5 GiB, where those hold 5.8 and 8.7."""
HOSTS = {
    "A100-40": "a100_40gb_host", "V100-16": "v100_host", "GH-96": "gh200_host", "RTX-3090": "rtx_3090_host",
    "RTX-2080": "rtx_2080_host", "Titan-RTX": "titan_rtx_host",
}  # fmt: skip
"""Tables of exchanges within a host."""
_OUTSIDE_BYTES = 3.0e9
_OUTSIDE_GH200_BYTES = 4.76e9 + 300e6
"""What the source's own simulator adds to tensors: "extra mem needed by megatron, shown in nvidia-smi, but not as part
of torch mem", with tensor parallelism; on GH200 "for fused kernel loading"."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A replica of a stage: layers, and the GPUs that share them."""

    first: int
    last: int
    gpu: str
    tensor: int


@dataclass(frozen=True)
class Profiles:
    """Sailor's times of layers, and rates between hosts."""

    folder: Path = DATA

    @cached_property
    def layers(self) -> Mapping[tuple[str, int], Mapping[int, Sequence[tuple[float, float, float]]]]:
        """By GPU and tensor degree, then by micro-batch: (forward, backward, update) seconds of each layer."""
        found: dict[tuple[str, int], dict[int, list[tuple[float, float, float]]]] = {}
        for row in self.rows:
            degrees = found.setdefault((row.gpu, row.tensor_parallel), {})
            times = row.forward_s, row.backward_s, row.update_s
            degrees.setdefault(row.micro_batch, []).extend([times] * (row.last_layer - row.first_layer + 1))
        return found

    @cached_property
    def rows(self) -> tuple[SailorRow, ...]:
        """The table of layers."""
        name = "sailor_layers.csv.xz"
        return parse(lzma.decompress((self.folder / name).read_bytes()).decode("utf-8"), name)

    @cached_property
    def networks(self) -> Mapping[tuple[str, int], tuple[Sequence[float], float]]:
        """By GPU and how many of a host's talk: the polynomial's coefficients, and the largest rate."""
        rates = json.loads((self.folder / "sailor_network.json").read_text("utf-8"))["inter"]
        return {(gpu, int(number)): (fit, rate) for gpu, of in rates.items() for number, (fit, rate) in of.items()}

    def host_bytes_per_s(self, gpu: str, number: int, num_bytes: float) -> float:
        """What the cards of a host send while so many of its GPUs talk: ``num_bytes`` in all."""
        (square, linear, constant), most = self.networks[gpu, number]
        size = log2(num_bytes / 2**20)
        if square < 0 and size > -linear / (2 * square):  # beyond its top
            return most
        return min(most, 1e9 * (square * size**2 + linear * size + constant))

    def passes(self, stage: Stage, micro_batch: int) -> tuple[float, float, float]:
        """Forward, backward and update of a replica of a stage."""
        table = self.layers[stage.gpu, stage.tensor]
        rows = [layers for size, layers in table.items() if size >= micro_batch]
        layers = range(stage.first, stage.last + 1)
        forward, backward = (sum(min(row[layer][which] for row in rows) for layer in layers) for which in (0, 1))
        return forward, backward, sum(table[micro_batch][layer][2] for layer in layers)

    def rate(self, one: Stage, other: Stage, num_bytes: float) -> float:
        """Bytes a second of all tensor ranks of two stages together, in messages of ``num_bytes`` in all."""
        return min(self.host_bytes_per_s(stage.gpu, stage.tensor, num_bytes) for stage in (one, other))


def _gathered_s(stage: Stage, num_bytes: float) -> float:
    """Parts of a message among the tensor ranks that received them."""
    return links(HOSTS[stage.gpu]).collective("all_gather", num_bytes, stage.tensor, stage.tensor).seconds


def runs(folder: Path = DATA) -> Iterator[Run]:
    """The rows of Sailor's table, predicted."""
    profiles = Profiles(folder)
    for line in read(folder / "sailor_runs.csv"):
        group = "Sailor, GH200" if line["site"] == "clariden" else "Sailor, unlike GPUs"
        prediction, memory = _predict(line, profiles)
        measured = float(line["measured_peak_bytes"])
        odd = group == "Sailor, unlike GPUs" and _stages(line)[0][0].tensor == ODD_TENSOR
        yield Run(
            group, line["name"], prediction, float(line["measured_s"]), measured, predicted_bytes=memory,
            odd_memory=odd,
        )  # fmt: skip


def _stages(line: Mapping[str, str]) -> list[list[Stage]]:
    """By stage, its replicas."""
    found = []
    for span, replicas in zip(
        line["layers_per_stage"].split(" | "), line["replicas_of_each_stage"].split(" | "), strict=True
    ):
        first, last = (int(end) for end in span.split("-"))
        names = [replica.split() for replica in replicas.split("; ")]
        found.append([Stage(first, last, name, int(tensor.removeprefix("tp"))) for name, _, tensor in names])
    return found


def _predict(line: Mapping[str, str], profiles: Profiles) -> tuple[StepPrediction, float]:
    return predicted(_stages(line), int(line["micro_batch"]), int(line["global_batch"]), profiles)


def predicted(
    stages: Sequence[Sequence[Stage]], micro_batch: int, global_batch: int, profiles: Profiles
) -> tuple[StepPrediction, float]:
    """A step of stages, each by its replicas, and the bytes of the rank that holds most."""
    data = len(stages[0])
    micro_batches = global_batch // (data * micro_batch)
    whole = _FLOAT32 * micro_batch * SHAPE.seq * SHAPE.hidden
    pipelines = []
    least = []
    for replica in zip(*stages, strict=True):
        times = []
        for place, stage in enumerate(replica):
            forward_s, backward_s, _ = profiles.passes(stage, micro_batch)
            gathered_s = _gathered_s(stage, whole)
            times.append((forward_s + (place > 0) * gathered_s, backward_s + (place < len(replica) - 1) * gathered_s))
        hop_s = [whole / profiles.rate(*pair, whole) for pair in pairwise(replica)]
        chunks = chunked(times, hop_s, Sends.BLOCKING, len(stages))
        pipelines.append(chunks.step_s(micro_batches))
        least.append(chunks.least_s(micro_batches))
    blocks = tuple(min(of[0].last, LAST - 1) - max(of[0].first, FIRST_BLOCK) + 1 for of in stages)
    degree = stages[0][0].tensor
    ways = ParallelDegrees(
        degree, len(stages), data, micro_batch, kernels=Fusion.KERNELS, fp32_gradients=False, blocks=blocks
    )
    sums_s = 0.0
    for index, of in enumerate(stages):
        if data > 1:
            num_bytes = _FLOAT32 * stage_parameters(SHAPE, ways, index) * degree  # of all tensor ranks of a host
            rate = min(profiles.rate(one, other, num_bytes / data) for one in of for other in of)
            sums_s = max(sums_s, 2 * (data - 1) / data * num_bytes / rate)
    update_s = max(profiles.passes(stage, micro_batch)[2] for of in stages for stage in of)
    step_s = max(pipelines) + sums_s + update_s
    memory = memory_of(SHAPE, ways, micro_batches, _FLOAT32)
    outside = max(_OUTSIDE_GH200_BYTES if stage.gpu == "GH-96" else _OUTSIDE_BYTES for of in stages for stage in of)
    parts = {"passes": max(pipelines), "gradient sums": sums_s, "optimiser": update_s}
    step = Estimate(step_s, (1 - MODEL_ERROR) * step_s, (1 + MODEL_ERROR) * step_s, TABLE)
    prediction = StepPrediction(step, parts, memory, micro_batches, max(least) + sums_s + update_s)
    return prediction, memory.total + outside


BATCH = 1024
PER_HOST = 4
A100 = "A100-40"
V100 = "V100-16"
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
