"""Runs of transformers on alike GPUs, predicted: Megatron-LM on A100, on V100, over slow networks, Alpa, and T4.

What a run's own source says of its software is stated here, once a source: which kernels are fused, whether messages
overlap, in what gradients are summed.  No time of a run is used to predict one.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from pathlib import Path

from halopipe.extras.transformers.evidence import MEGATRON, RunKind, kind_of
from planner.extras.kernels.estimates import DATASHEET, Estimate
from planner.extras.kernels.links import AlphaBeta
from planner.extras.transformers.cluster import GBIT, GpuCluster, named_cluster
from planner.extras.transformers.layers import layers_for
from planner.extras.transformers.memory import memory_of
from planner.extras.transformers.passes import Cost, Layers, Pass
from planner.extras.transformers.shape import Fusion, ParallelDegrees, Recompute, Sends, Transformer, named_transformer
from planner.extras.transformers.step import StepPrediction, predict

GIB = 2**30
NO_LAYER = Pass(Cost(), Cost())
WINDOWS_BYTES = 2 * 8 * 10 * 8949
"""Of one connection of NCCL's on AWS: two threads of eight sockets (its documentation), each at first of ten segments
(RFC 6928) in frames of 9,001 bytes."""
BERT_VOCABULARY = 29056
"""BERT-large's 28,996 word pieces, in whole multiples of 128."""
ODD = ("p8t1d8-mb2", "p1t8d8-mb2", "p4t2d8-mb2", "p2t4d8-mb2")
"""Rows that contradict the others: at micro-batch 2 each of four divisions takes 1.3 to 1.8 times what it takes at 1,
and 1.1 to 2.3 times what it takes at 4."""


@dataclass(frozen=True, slots=True)
class Run:
    """A measured run beside its prediction.

    Attributes:
        group: runs that a mean is taken over.
        measured_s: None: not measured; infinite: it ended for want of memory.
        measured_bytes: of the rank that holds most; 0: not measured.
        odd, odd_memory: its time, or its memory, contradicts other rows of its source.
        restricted: its source states no licence: the figures stay out of what is committed.
        kind: None: ``halopipe ways`` predicts no such run.
        ways_s: the step as ``halopipe ways`` predicts it, whatever its software is.
    """

    group: str
    name: str
    prediction: StepPrediction
    measured_s: float | None
    measured_bytes: float = 0.0
    usable_bytes: float = inf
    restricted: bool = False
    odd: bool = False
    odd_memory: bool = False
    predicted_bytes: float = field(default=0.0)
    kind: RunKind | None = None
    ways_s: float = 0.0

    @property
    def error(self) -> float:
        """Predicted / measured - 1, of the step."""
        return self.prediction.step.seconds / (self.measured_s or inf) - 1

    @property
    def ran(self) -> bool:
        """Whether a time was measured."""
        return self.measured_s is not None and self.measured_s < inf

    @property
    def fits(self) -> bool:
        """Whether it is predicted to fit."""
        return self.prediction.memory.total <= self.usable_bytes


def read(path: Path) -> list[dict[str, str]]:
    """The lines of a table."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def published(lines: Sequence[Mapping[str, str]]) -> Iterator[Run]:
    """The rows of ``published_runs.csv``."""
    for line in lines:
        name = line["id"]
        if "memory" in name:
            yield _memory(line)
        elif name.startswith("xl-"):
            yield _slow_network(line)
        else:
            yield _megatron(line)


def shape_of(line: Mapping[str, str]) -> Transformer:
    """The network of a row."""
    hidden, ffn, heads, layers = (int(line[column]) for column in ("hidden", "ffn", "heads", "layers"))
    vocab = int(line["vocab"] or 51200)
    seq = int(line["seq_len"])
    return Transformer(line["model"], hidden, ffn, heads, layers, vocab, seq)


def _ways(line: Mapping[str, str]) -> ParallelDegrees:
    return ParallelDegrees(
        tensor=int(line["tensor_parallel"]),
        pipeline=int(line["pipeline"]),
        data=int(line["data_parallel"]),
        micro_batch=int(line["micro_batch"] or 1),
        sequence_parallel=line["sequence_parallel"] == "True",
        interleave=int(line["schedule"].rpartition("x")[2]) if "interleaved" in line["schedule"] else 1,
        recompute=Recompute(line["recompute"]),
        schedule="gpipe" if line["schedule"] == "gpipe" else "1f1b",
    )


def _megatron(line: Mapping[str, str]) -> Run:
    """Megatron-LM of 2022 on A100; before that on V100; and Alpa, whose compiler fuses as much, and overlaps nothing.

    The runs on V100 (Decentralized_FM_alpha, ``dist_megatron_train_qqp.py`` and its scripts) train a classifier on
    BERT's encoder: its vocabulary, no head; ``--no-bias-dropout-fusion``; gradients in float16, as no flag asks for
    more; a Megatron-LM that still has ``--checkpoint-activations``, and waits for the sums of its tensor ranks.
    """
    shape = shape_of(line)
    ways = _ways(line)
    batch = int(line["global_batch"])
    name = line["id"].removeprefix("megatron-xl24-")
    kind = None
    if line["id"].startswith("alpa"):
        group = "Alpa, 8 V100"
        cluster = named_cluster("p3.16xlarge")
        prediction = predict(shape, cluster, replace(ways, overlap_tensor=False), batch)
    elif "V100" in line["cluster"]:
        group = "Megatron on 64 V100"
        cluster = named_cluster("p3.16xlarge")
        # Without a head no table is summed over a pipeline's ends; that of the last stage is no more than the first's.
        shape = replace(shape, vocab=BERT_VOCABULARY, parameters_tied=ways.pipeline == 1)
        ways = earlier(ways)
        layers = layers_for(shape, cluster, ways)
        prediction = predict(shape, cluster, ways, batch, replace(layers, head=NO_LAYER))
    else:
        group = "Megatron on A100"
        cluster = named_cluster("a100-dgx")
        prediction = predict(shape, cluster, ways, batch)
        kind = kind_of(MEGATRON, shape, cluster, ways)
    memory = GIB * float(line["measured_memory_gib"] or 0)
    source = "DS3Lab" in line["source"]
    return Run(
        group, name, prediction, float(line["measured_s"]), memory, restricted=source, odd=name in ODD,
        kind=kind, ways_s=prediction.step.seconds,
    )  # fmt: skip


def earlier(ways: ParallelDegrees) -> ParallelDegrees:
    """In the software of the runs on V100."""
    return replace(ways, kernels=Fusion.KERNELS, fp32_gradients=False, overlap_tensor=False)


def _memory(line: Mapping[str, str]) -> Run:
    """Figure 1 of Korthikanti et al.: bytes of state and of activations of the blocks, without embedding and head."""
    shape = shape_of(line)
    ways = _ways(line)
    large = ways.pipeline > 1
    ways = replace(ways, micro_batch=1 if large else 4, interleave=3 if large else 1)
    batch = 64 if large else 4
    prediction = predict(shape, named_cluster("a100-dgx"), ways, batch)
    memory = memory_of(shape, ways, batch // ways.micro_batch)
    measured = GIB * sum(float(part) for part in line["measured_memory_gib"].split("+"))
    of_blocks = memory.state + memory.activations
    return Run("memory, Megatron on A100", line["id"], prediction, None, measured, predicted_bytes=of_blocks)


def _slow_network(line: Mapping[str, str]) -> Run:
    """Decentralized_FM_alpha: GPT-2 of transformers in eager PyTorch, float16 gradients, streams for messages.

    Embedding and loss are "very light-weighted" there, by the source: they cost nothing here.  All messages of a rank
    are of one NCCL communicator, which runs them one after another as they were called: receive, compute, send.  They
    hide where TCP takes them in: its windows grow from :data:`WINDOWS_BYTES` where a round trip at the network's rate
    is more, until they hold a message.  Delays are of one direction (netem, in both hosts).  That was settled after
    errors had been seen.
    """
    latency, _, rate = line["network"].partition(" ms, ")
    wire = AlphaBeta(1e-3 * float(latency), GBIT * float(rate.partition(" ")[0]))
    sends = Sends.OVERLAPPED if 2 * wire.alpha_s * wire.bytes_per_s > WINDOWS_BYTES else Sends.EXCHANGED
    cluster = replace(named_cluster("p3.2xlarge"), across=wire)
    shape = replace(shape_of(line), parameters_tied=False, vocab=1)
    ways = replace(_ways(line), kernels=Fusion.EAGER, fp32_gradients=False, sends=sends)
    layers = Layers(NO_LAYER, layers_for(shape, cluster, ways).block, NO_LAYER)
    prediction = predict(shape, cluster, ways, int(line["global_batch"]), layers)
    return Run("GPT-3 XL, slow networks", line["id"], prediction, float(line["measured_s"]), restricted=True)


AMP_LAYERS = 30
AMP_FIRST = 2
AMP_LAST = 26
AMP_BATCH = 32
"""AMP's layers: embedding, nothing, 24 blocks, nothing, norm, head, loss; samples a step."""


def t4(runs: Sequence[Mapping[str, str]], layer_costs: Sequence[Mapping[str, str]]) -> list[Run]:
    """AMP's plans on 4 hosts of 4 T4, by its layers' times at one sample and by kernels beyond.

    Of a layer's forward F(1) at one sample an unknown part is the device's, the rest waits for the host: with g of
    kernels by the data sheet, F(b) lies between F(1) + g(b) - g(1) and F(1) g(b) / g(1); the middle is taken, and they
    are its range.  Backward takes the share more that kernels say.  DeepSpeed on Megatron-LM 1.1.5: no kernels
    are fused, float32 sums of gradients (``fp32_allreduce``), messages block, nothing is recomputed.
    """
    shape = named_transformer("gpt2-345m")
    cluster = named_cluster("g4dn.12xlarge")
    measured: dict[int, dict[int, float]] = {}
    for line in layer_costs:
        if line["instance"] == "G4":
            measured.setdefault(int(line["tensor_parallel"]), {})[int(line["layer"])] = float(
                line["forward_backward_or_forward_s"]
            )
    found = []
    for line in runs:
        ends = [int(end) for end in line["stage_boundaries"].split()]
        blocks = tuple(max(0, min(stop, AMP_LAST) - max(start, AMP_FIRST)) for start, stop in pairwise(ends))
        t, p, d, b = (int(line[column]) for column in ("tensor_parallel", "pipeline", "data_parallel", "micro_batch"))
        ways = ParallelDegrees(
            t, p, d, b, kernels=Fusion.EAGER, overlap_tensor=False, sends=Sends.BLOCKING, blocks=blocks
        )
        table = measured[ways.tensor]
        one, more = (
            layers_for(shape, cluster, replace(ways, micro_batch=b, fp32_gradients=False))
            for b in (1, ways.micro_batch)
        )
        block_s = sum(table[layer] for layer in range(AMP_FIRST, AMP_LAST)) / shape.layers
        layers = Layers(
            _beyond_one(table[0], one.embedding, more.embedding),
            _beyond_one(block_s, one.block, more.block),
            _beyond_one(sum(table[layer] for layer in range(AMP_LAST + 1, AMP_LAYERS)), one.head, more.head),
        )
        prediction = predict(shape, cluster, ways, AMP_BATCH, layers)
        name = f"tensor {ways.tensor}, pipeline {ways.pipeline}, data {ways.data}, micro-batch {ways.micro_batch}"
        # Gradients are in half precision until they are summed.
        memory = memory_of(shape, replace(ways, fp32_gradients=False), ways.micro_batches(AMP_BATCH))
        prediction = replace(prediction, memory=memory)
        seconds = float(line["measured_s"])
        found.append(Run("16 T4", name, prediction, seconds, usable_bytes=cluster.usable_bytes, restricted=True))
    return found


def _beyond_one(forward_s: float, one: Pass, more: Pass) -> Pass:
    """A layer that takes ``forward_s`` with one sample, of which kernels take ``one``, with more samples."""

    def grown(measured_s: float, before: float, after: float) -> Cost:
        low, high = sorted((measured_s + after - before, measured_s * after / before))
        return Cost.of("layers", Estimate((low + high) / 2, low, high, DATASHEET))

    backward_s = forward_s * one.backward.seconds / one.forward.seconds
    return Pass(
        grown(forward_s, one.forward.seconds, more.forward.seconds),
        grown(backward_s, one.backward.seconds, more.backward.seconds),
    )


def clusters() -> Mapping[str, GpuCluster]:
    """By group, the cluster that its runs were on."""
    names = {"Megatron on A100": "a100-dgx", "Megatron on 64 V100": "p3.16xlarge", "16 T4": "g4dn.12xlarge"}
    return {group: named_cluster(name) for group, name in names.items()}
