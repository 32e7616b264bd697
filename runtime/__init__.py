"""Executes plans: one process a rank, the program's actions in their order, over torch.distributed.

:class:`Engine` is one rank's part of a plan, made of what the rank knows, a :class:`RankContext`;
:mod:`~runtime.monitor.watch` starts and watches the processes;
:mod:`~runtime.numerics.single_device` is the one device that every plan must equal.

Modules:

    captured     A captured model: what the profiler makes and measures, and the runtime cuts into stages
    checkpoint   Checkpoints that survive a crash at any moment, tell damage, and load under another plan
    engine       The engine: one rank's part of a plan, step after step
    extra        All that extras may add to the runtime
    extras       What papers, peers and particular machines brought, which the rest does without
    memory       The memory of a rank's tensors: what is in use, and the most that was, action by action
    monitor      Jobs of several processes: started, watched, their activity told, their failures explained
    numerics     Equal to one device: the step that a plan must equal, and how far it is from it
    optim        From gradients to new parameters: sums over ranks, ties, clipping, optimisers whole and divided, and
                 their state
    pipeline     The pipeline: one rank's row of the program, its messages, its micro-batches
    rank         One rank of a running plan: what it was told, where it is, its model, its peers, and what follows from
                 all of these
    recent       The last values by key, of which only a number is kept
    sparse       Stages of several ranks that share out the sites of sparse tensors: inspector and executor (Saltz et
                 al. 1991)
    spatial      Stages whose layers are divided along any dims: what moves between ranks inside a stage, and each
                 rank's part
    stage        Stages of a captured model as functions: cut out, run forward and backward in halves, on versions, with
                 draws
    timeouts     The longest waits of a job, by name
    transport    Moving tensors between ranks: every message carries its key, every wait has a deadline
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.ir.lazy import lazily

if TYPE_CHECKING:
    from runtime.engine import Engine, StepResult
    from runtime.numerics.compare import NumericsReport
    from runtime.numerics.single_device import serial_step
    from runtime.optim.ties import groups_of
    from runtime.rank import RankContext

__all__ = ["Engine", "NumericsReport", "RankContext", "StepResult", "groups_of", "serial_step"]

_HOMES = {
    "Engine": "engine",
    "NumericsReport": "numerics.compare",
    "RankContext": "rank",
    "StepResult": "engine",
    "groups_of": "optim.ties",
    "serial_step": "numerics.single_device",
}

__getattr__ = lazily(__name__, _HOMES)
