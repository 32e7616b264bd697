"""A transformer's ways, executed: plans of ``halopipe plan --ways`` on this host, compared with one device.

A small Llama (shared keys, gated, rotary), float64.  Nothing is measured with a clock.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.report import Row
from benchmarks.seeds.jobs import largest_error

MODEL = """
from profiler.models.llama import llama


def model():
    sizes = {"vocabulary": 66, "width": 16, "hidden": 24, "layers": 4, "heads": 4, "kv_heads": 2}
    return llama(input_shape=(8, 16), **sizes)
"""

WAYS = {
    "tensor parallel": "tensor=2,micro_batch=8",
    "sequence and vocabulary parallel": "tensor=2,micro_batch=8,sequence_parallel=1",
    "interleaved 1F1B": "pipeline=2,interleave=2,micro_batch=8",
    "ZeRO-1, full recomputation": "data=2,micro_batch=4,zero=1,recompute=full",
}


def rows(quick: bool) -> Iterator[Row]:
    """The largest error of each way."""
    for name, ways in WAYS.items():
        if quick and not ways.endswith("parallel=1"):
            continue
        yield largest_error(f"Megatron-LM, {name}", MODEL, [], ["--ways", ways])
