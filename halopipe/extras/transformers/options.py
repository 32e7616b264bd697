"""What ``halopipe ways`` takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from planner.extras.transformers.shape import MOST_DEGREE
from planner.ir.options import option

FIXED = "What is given"
"""A heading in the help of ``halopipe ways``."""


@dataclass(frozen=True, slots=True)
class WaysOptions:
    """How a transformer may be divided, and how long that is searched for.  The help of each field says what it is."""

    tensor: int = option(0, "Ranks that share a block; 0: open.", panel=FIXED, least=0, most=MOST_DEGREE)
    pipeline: int = option(0, "Stages; 0: open.", panel=FIXED, least=0, most=MOST_DEGREE)
    interleave: int = option(0, "Chunks of a stage; 0: open.", panel=FIXED, least=0, most=MOST_DEGREE)
    micro_batch: int = option(0, "Samples a micro-batch; 0: open.", panel=FIXED, least=0, most=MOST_DEGREE)
    expert: int = option(0, "Ranks that share a block's experts; 0: open.", panel=FIXED, least=0, most=MOST_DEGREE)
    expert_tensor: int = option(
        0,
        "Tensor ranks of an expert: 1, or those of its block; 0: open.",
        panel=FIXED,
        least=0,
        most=MOST_DEGREE,
    )
    expert_exchange: str = option(
        "all-to-all", "How tokens come to experts: all-to-all, or dispatch (DeepEP, HybridEP).", "HOW", FIXED
    )
    context: int = option(
        0, "Ranks that share the tokens of a sample; 0: open.", panel=FIXED, least=0, most=MOST_DEGREE
    )
    recompute: str = option("", "none, selective, operators or full; empty: open.", "HOW", FIXED)
    recompute_modules: str = option(
        "", "What selective recomputation is of: core_attn,mlp, ...; empty: open.", "MODULES", FIXED
    )
    precision: str = option("bf16", "Of the products of blocks: bf16, or fp8 (8 bits).", "PRECISION", FIXED)
    offload: str = option(
        "", "In the host's memory: optimizer, parameters or activations; empty: nothing.", "WHAT", FIXED
    )
    zero: int = option(-1, "What replicas divide, 0 to 3; -1: open.", panel=FIXED, least=-1, most=3)
    software: str = option(
        "", "What runs the step: megatron, pytorch-compiled, ...; empty: what --for names, or megatron.", "SOFTWARE",
        FIXED, offers="planner.extras.transformers.software:SOFTWARE",
    )  # fmt: skip
    shards: int = option(
        0, "Neighbours among replicas that divide it; 0: open.", panel=FIXED, least=0, most=MOST_DEGREE
    )
    launcher: str = option(
        "", "Ways that this program can be told, alone: megatron, torchtitan, ...; empty: all.", "LAUNCHER", FIXED,
        flag="--for", offers="planner.extras.export.launchers:LAUNCHERS",
    )  # fmt: skip
    version: str = option("", "Of that program; empty: the newest that is known.", "VERSION", FIXED)
    gap: float = option(0.0, "Stop once the best is proved so close (0.01 = 1 %).", least=0.0)
    time_limit_s: float = option(60.0, "Seconds to search at most.", flag="--time-limit", least=0.0)
    price_per_hour: float = option(0.0, "Dollars an hour of one device; 0: not told.", least=0.0)
    layers: Path | None = option(None, "Sailor's times of layers, in place of kernels, with a cluster file.", "FILE")
