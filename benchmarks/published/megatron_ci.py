"""Memory of Megatron-LM's own functional tests, as its files of golden values have it, predicted.

``mem-allocated-bytes`` and ``mem-max-allocated-bytes`` of torch's allocator on the last rank, which writes them: what
is held between steps, and at most.  What the cases do is read off their ``model_config.yaml`` and Megatron-LM's
defaults: hidden and attention dropout of 0.1, GPT-2's 50,257 words or what is stated, both in whole multiples of 128 a
tensor rank; learnt places but where the case says ``rope``; gradients in float32; scores kept where attention is
``unfused``.  Nothing is fitted to a row; that the loss works in place (``_FUSED_LOGIT_BYTES`` of
:mod:`planner.extras.transformers.memory`) was read off its code after rows had been seen.  Workspaces of cuBLAS (64 MiB
and more), up to an eighth of what small networks hold, are not in the prediction.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.published.runs import read
from benchmarks.report import Row, at_most
from planner.extras.transformers.memory import Memory, stage_memory
from planner.extras.transformers.shape import ParallelDegrees, Recompute, Transformer

DATA = Path(__file__).parent / "data" / "megatron_ci.csv"
GROUP = "memory, Megatron-LM's tests"
WORDS = 50257
LARGE_BYTES = 16 * 2**30
MOST = 5.0
"""Mean error that is aimed at, in per cent; of cases of more than so many bytes."""
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Case:
    """A case on one kind of GPU, with what its last rank held."""

    name: str
    predicted: Memory
    held_bytes: float
    peak_bytes: float

    @property
    def is_large(self) -> bool:
        """Whether workspaces are a small part of it."""
        return self.peak_bytes > LARGE_BYTES

    @property
    def held_error(self) -> float:
        """Predicted / measured - 1, of what is held between steps."""
        return self.predicted.state / self.held_bytes - 1

    @property
    def peak_error(self) -> float:
        """Predicted / measured - 1, of the peak."""
        return self.predicted.total / self.peak_bytes - 1


def rows() -> Iterator[Row]:
    """Means, and each case."""
    cases = [_case(line) for line in read(DATA)]
    large = [case for case in cases if case.is_large]
    for label, some, goal in (("networks of 7e9 weights", large, MOST), ("all", cases, None)):
        held, peak = (
            100 * statistics.mean(abs(getattr(case, error)) for case in some) for error in ("held_error", "peak_error")
        )
        yield at_most(f"{GROUP}, {label}: mean error of what is held between steps", held, "%", goal)
        yield at_most(f"{GROUP}, {label}: mean error of the peak", peak, "%", goal)
    for case in cases:
        yield Row(f"{GROUP}, {case.name}: predicted memory", case.predicted.total / GIB, "GiB")
        yield Row(f"{GROUP}, {case.name}: measured memory", case.peak_bytes / GIB, "GiB")
        yield Row(f"{GROUP}, {case.name}: error of what is held between steps", 100 * case.held_error, "%")


def _case(line: Mapping[str, str]) -> Case:
    shape = shape_of(line)
    ways = ParallelDegrees(**division_of(line))
    count = ways.micro_batches(int(line["global_batch"]))
    memory = stage_memory(shape, ways, ways.pipeline - 1, count)
    label = f"{shape.name}, {line['golden']}"
    return Case(label, memory, float(line["allocated_bytes"]), float(line["peak_bytes"]))


def shape_of(line: Mapping[str, str]) -> Transformer:
    """The network of a case."""
    tensor = int(line["tensor"])
    name = line["case"].rpartition("/")[2]
    hidden = int(line["hidden"])
    heads = int(line["heads"])
    words = int(line["vocab"] or WORDS)
    experts = int(line["experts"] or 0)
    has_biases = "disable_bias" not in name and not experts
    return Transformer(
        name, hidden, 4 * hidden, heads, int(line["layers"]),
        vocab=-(-words // (128 * tensor)) * 128 * tensor,
        seq=int(line["seq"]),
        kv_heads=int(line["kv_groups"] or heads),
        rotary="rope" in name,
        fused_attention=line["attention_backend"] != "unfused",
        parameters_tied=not line["vocab"],  # those that state their words untie them
        experts=experts,
        top_k=int(line["topk"] or 0),
        qkv_bias=has_biases,
        out_bias=has_biases,
        ffn_bias=has_biases,
    )  # fmt: skip


def division_of(line: Mapping[str, str]) -> dict[str, Any]:
    """Parts of the way of a case, by name."""
    tensor = int(line["tensor"])
    pipeline = int(line["pipeline"])
    chunks = line["layers_per_virtual_stage"]
    return {
        "tensor": tensor,
        "pipeline": pipeline,
        "data": int(line["gpus"]) // (tensor * pipeline),
        "micro_batch": int(line["micro_batch"]),
        "sequence_parallel": line["sequence_parallel"] == "True",
        "interleave": int(line["layers"]) // pipeline // int(chunks) if chunks else 1,
        "recompute": Recompute(line["recompute"] or "none"),
        "zero": 1 if line["distributed_optimizer"] == "True" else 0,
        "expert": int(line["expert"]),
        "whole_experts": tensor > 1 and line.get("expert_tensor") == "1",
    }
