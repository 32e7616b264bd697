"""What of a plan is checked, field by field: the table that the checker is held to.

Each row says how a field is verified without a profile and with one.  ``WHOLLY`` in front means that a change of the
field, whatever it is, is found; ``PARTLY`` that some are; ``HISTORY`` that the field tells how the search went or what
a run measured.  That is no statement about the plan: nobody can reckon it again, and nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import UnionType
from typing import Union, get_args, get_origin, get_type_hints

from planner.ir.plan import Plan

WHOLLY = "wholly"
PARTLY = "partly"
NOT = "not"
HISTORY = "history"


@dataclass(frozen=True, slots=True)
class Check:
    """How a field is verified: how far, and by what, without a profile and with it."""

    alone: str
    alone_by: str
    against: str
    against_by: str


_FORM = Check(PARTLY, "the form of a fingerprint", WHOLLY, "the fingerprint of what the profile holds")
_SOURCE = Check(NOT, "", WHOLLY, "equal to the profile's")
_ASKED = Check(PARTLY, "a known word, kept by the decision", PARTLY, "a known word, kept by the decision")
_ASKED_MOST = Check(PARTLY, "the decision keeps it", PARTLY, "the decision keeps it")
_CORRECTION = Check(PARTLY, "form", PARTLY, "costs are multiplied by it: step and times of what the plan uses")
_PLACED = Check(
    PARTLY, "parts for ranks, dims, shares, what was allowed", WHOLLY, "and what the layer can; step, memory"
)
_TIME = Check(WHOLLY, "the four times of a rank add up to the step", WHOLLY, "reckoned again")
_COUNT = Check(HISTORY, "not below 0", HISTORY, "not below 0")
_WORDS = Check(HISTORY, "", HISTORY, "")
_RUN = Check(HISTORY, "form: entries for stages and ranks, not below 0", HISTORY, "the same")

ROWS: Mapping[str, Check] = {
    "inputs.model.factory": _SOURCE,
    "inputs.model.arguments": _SOURCE,
    "inputs.model.input_shape": _SOURCE,
    "inputs.model.dtype": _SOURCE,
    "inputs.model.autocast": _SOURCE,
    "inputs.model.elementwise": _SOURCE,
    "inputs.model.digest": _SOURCE,
    "inputs.model.local_losses": _SOURCE,
    "inputs.model.sizes": _SOURCE,
    "inputs.optimizer.name": _SOURCE,
    "inputs.optimizer.arguments": _SOURCE,
    "inputs.optimizer.state_bytes_per_parameter_byte": _SOURCE,
    "inputs.model_fingerprint": _FORM,
    "inputs.profile_fingerprint": _FORM,
    "inputs.cluster_fingerprint": _FORM,
    "inputs.profile_path": Check(HISTORY, "where to look for the profile", HISTORY, "the same"),
    "inputs.request.objective": _ASKED,
    "inputs.request.schedules": _ASKED,
    "inputs.request.micro_batch_sizes": _ASKED_MOST,
    "inputs.request.token_slices": _ASKED_MOST,
    "inputs.request.max_stages": _ASKED_MOST,
    "inputs.request.num_ranks": _ASKED_MOST,
    "inputs.request.memory_margin": Check(PARTLY, "a share", WHOLLY, "the limit of each rank is made of it"),
    "inputs.request.memory_bytes": Check(
        PARTLY, "no limit is above it", WHOLLY, "the limit of each rank is made of it"
    ),
    "inputs.request.gap": Check(PARTLY, "not below 0; a plan within gap keeps it", PARTLY, "the same"),
    "inputs.request.confidence": Check(PARTLY, "from 0 to 1; above a tie's", PARTLY, "the same"),
    "inputs.request.allow": _ASKED,
    "inputs.request.recompute": _ASKED,
    "inputs.request.shard": _ASKED,
    "inputs.request.batch_statistics": Check(
        PARTLY, "one of two", WHOLLY, "one micro-batch where a layer depends on it"
    ),
    "inputs.request.chunks": _ASKED,
    "inputs.request.zero": _ASKED,
    "inputs.request.halo_depth": _ASKED_MOST,
    "inputs.request.fix[].pattern": _ASKED_MOST,
    "inputs.request.fix[].what": _ASKED_MOST,
    "inputs.request.fix[].value": Check(PARTLY, "kept, but for kinds of devices", PARTLY, "kept"),
    "inputs.request.forbid[].pattern": _ASKED_MOST,
    "inputs.request.forbid[].what": _ASKED_MOST,
    "inputs.request.forbid[].value": Check(PARTLY, "kept, but for kinds of devices", PARTLY, "kept"),
    "inputs.request.rate_per_s": Check(WHOLLY, "not above what is sustained", WHOLLY, "the same"),
    "inputs.request.speeds": Check(PARTLY, "no device is used that is gone", PARTLY, "and the profile of what is left"),
    "inputs.corrections[].of.what": _CORRECTION,
    "inputs.corrections[].of.where": _CORRECTION,
    "inputs.corrections[].of.shared": _CORRECTION,
    "inputs.corrections[].factor": _CORRECTION,
    "inputs.corrections[].num_plans": Check(HISTORY, "at least 1", HISTORY, "at least 1"),
    "decision.schedule": Check(WHOLLY, "the program is made again from it; allowed", WHOLLY, "the same"),
    "decision.micro_batches": Check(WHOLLY, "sum and rate, program, sizes asked for", WHOLLY, "and step"),
    "decision.stages[].ranks": Check(PARTLY, "program, one stage or position a rank", WHOLLY, "and whose device it is"),
    "decision.stages[].devices": Check(PARTLY, "one device a rank, one rank a device", WHOLLY, "as in the cluster"),
    "decision.stages[].recompute": Check(PARTLY, "as asked for", WHOLLY, "step and memory"),
    "decision.stages[].recomputed": Check(
        PARTLY, "layers of the stage, each once; as asked for", WHOLLY, "what can run as one; step and memory"
    ),
    "decision.stages[].blocks[].layers": Check(
        PARTLY, "stretches of the stage, of forward plans", WHOLLY, "what is exact in a block; step and memory"
    ),
    "decision.stages[].blocks[].tiles": Check(PARTLY, "along space", WHOLLY, "what is exact in tiles; step and memory"),
    "decision.stages[].sharded": Check(PARTLY, "as asked for, where it can be", WHOLLY, "step and memory"),
    "decision.stages[].zero": Check(PARTLY, "as asked for, where it can be", WHOLLY, "step and memory"),
    "decision.layers.*.stage": Check(PARTLY, "a stage that there is, none without layers", WHOLLY, "and step, memory"),
    "decision.layers.*.cuts": _PLACED,
    "decision.layers.*.ways": Check(PARTLY, "divides the parts of some dim", WHOLLY, "and what the layer can; step"),
    "decision.layers.*.margin": Check(PARTLY, "0 to what was asked for", WHOLLY, "and the smallest part; step"),
    "decision.token_slices": Check(
        PARTLY, "positive, allowed; the program", WHOLLY, "what the layers can; step, memory"
    ),
    "decision.prepares_next_step": Check(PARTLY, "some rank prepares something", WHOLLY, "step and memory"),
    "decision.program": Check(WHOLLY, "legal, ends, and is what the schedule gives", WHOLLY, "with the model's edges"),
    "prediction.step_s": Check(WHOLLY, "the times of each rank add up to it; rate, gap", WHOLLY, "reckoned again"),
    "prediction.samples_per_s": Check(WHOLLY, "global batch over step", WHOLLY, "the same"),
    "prediction.bubble_fraction": Check(WHOLLY, "bubble and idle of the ranks over the step", WHOLLY, "reckoned again"),
    "prediction.ranks[].rank": Check(WHOLLY, "numbers from 0", WHOLLY, "the same"),
    "prediction.ranks[].compute_s": _TIME,
    "prediction.ranks[].communication_s": _TIME,
    "prediction.ranks[].idle_s": _TIME,
    "prediction.ranks[].bubble_s": _TIME,
    "prediction.ranks[].peak_bytes": Check(PARTLY, "within the limit", WHOLLY, "reckoned again, to a few bytes"),
    "prediction.ranks[].memory_limit_bytes": Check(
        PARTLY, "at most what was asked for", WHOLLY, "the device's memory less the margin, or what was asked for"
    ),
    "prediction.ranks[].kind": Check(NOT, "", PARTLY, "that of the device, where the file says it"),
    "prediction.ranks[].on_chip_bytes": Check(PARTLY, "within what is there", WHOLLY, "reckoned again"),
    "prediction.ranks[].on_chip_limit_bytes": Check(PARTLY, "not below what is in it", WHOLLY, "the device's"),
    "prediction.evidence": Check(PARTLY, "a known word", WHOLLY, "of the prices that the plan uses"),
    "prediction.p10_s": Check(PARTLY, "not above p90", WHOLLY, "drawn again, to six digits"),
    "prediction.p90_s": Check(PARTLY, "not below p10", WHOLLY, "drawn again, to six digits"),
    "prediction.sustained_per_s": Check(PARTLY, "of forward passes, no period above a step", WHOLLY, "simulated again"),
    "prediction.sustained_p10_per_s": Check(PARTLY, "not above p90", WHOLLY, "drawn again, to six digits"),
    "prediction.sustained_p90_per_s": Check(PARTLY, "not below p10", WHOLLY, "drawn again, to six digits"),
    "prediction.transport": Check(NOT, "", WHOLLY, "of the links between the plan's ranks"),
    "search.method": _WORDS,
    "search.solver": _WORDS,
    "search.status": Check(PARTLY, "a known word that bound and gap allow", PARTLY, "the same"),
    "search.bound_s": Check(WHOLLY, "at most the step, the largest by name, gap", WHOLLY, "the same"),
    "search.gap": Check(WHOLLY, "step over bound - 1", WHOLLY, "the same"),
    "search.num_simulated": _COUNT,
    "search.num_candidates": _COUNT,
    "search.bounds_s": Check(PARTLY, "none above the bound, the largest is it", PARTLY, "the same"),
    "search.binding": Check(PARTLY, "shares of computing, bubble and memory", WHOLLY, "and of sums and messages"),
    "search.rejected[].what": _WORDS,
    "search.rejected[].why": _WORDS,
    "search.tie.over": _WORDS,
    "search.tie.step_s": Check(WHOLLY, "below the step; gap and bound are of it", WHOLLY, "the same"),
    "search.tie.given_up": Check(WHOLLY, "step over step_s - 1", WHOLLY, "the same"),
    "search.tie.confidence": Check(PARTLY, "below what was asked for", PARTLY, "the same"),
    "search.tie.num_ranks": Check(PARTLY, "no fewer than the plan's; as many: given_up is small", PARTLY, "the same"),
    "alternatives[].name": Check(NOT, "", PARTLY, "of schedules: there is one"),
    "alternatives[].step_s": Check(
        PARTLY, "not below the bound; the slowdown in its words", PARTLY, "of schedules: reckoned again"
    ),
    "alternatives[].peak_bytes": Check(
        PARTLY, "the size in its words; within --memory", PARTLY, "within the limits; of schedules: reckoned again"
    ),
    "alternatives[].why_not": Check(PARTLY, "the numbers in it, but for rates", PARTLY, "the same"),
    "measured.step_s": Check(WHOLLY, "predicted step and error", WHOLLY, "the same"),
    "measured.spread": _RUN,
    "measured.num_steps": _RUN,
    "measured.stage_forward_s": _RUN,
    "measured.stage_backward_s": _RUN,
    "measured.peak_bytes": _RUN,
    "measured.error": Check(WHOLLY, "measured over predicted - 1, of one transport and kind", WHOLLY, "the same"),
    "measured.transport": _RUN,
    "measured.kinds": _RUN,
    "measured.stage_update_s": _RUN,
    "measured.stage_reduction_s": _RUN,
    "measured.ranks[].rank": Check(WHOLLY, "numbers from 0", WHOLLY, "the same"),
    "measured.ranks[].compute_s": _RUN,
    "measured.ranks[].communication_s": _RUN,
    "measured.ranks[].bubble_s": _RUN,
    "measured.ranks[].idle_s": _RUN,
}


def fields_of(kind: object = Plan, path: str = "") -> Iterator[str]:
    """Every field of a plan file, as the rows name it: ``[]`` for the entries of a list, ``*`` for names."""
    origin = get_origin(kind)
    arguments = [one for one in get_args(kind) if one is not type(None)]
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        for one in fields(kind):
            yield from fields_of(hints[one.name], f"{path}.{one.name}" if path else one.name)
    elif origin in (Union, UnionType) and len(arguments) == 1:
        yield from fields_of(arguments[0], path)
    elif origin is tuple and is_dataclass(arguments[0]):
        yield from fields_of(arguments[0], f"{path}[]")
    elif origin is not None and origin is not tuple and len(arguments) == 2 and is_dataclass(arguments[1]):
        yield from fields_of(arguments[1], f"{path}.*")
    else:
        yield path


def not_checked(has_profile: bool) -> tuple[str, ...]:
    """The fields of which some change would not be noticed, history apart."""
    lines = []
    for path, row in ROWS.items():
        how_far, by = (row.against, row.against_by) if has_profile else (row.alone, row.alone_by)
        if how_far in (PARTLY, NOT):
            lines.append(f"{path} (only: {by})" if by else path)
    return tuple(lines)


def needs_profile() -> tuple[str, ...]:
    """The fields of which more is checked with a profile than without."""
    order = (NOT, PARTLY, WHOLLY)
    checked = {path: row for path, row in ROWS.items() if HISTORY not in (row.alone, row.against)}
    return tuple(path for path, row in checked.items() if order.index(row.against) > order.index(row.alone))
