"""Where tokens lie, what slices read of one another, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest

from benchmarks.chains import chain_profile
from halopipe.planning.problem import make_problem
from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.extras.token_slices.axes import TokenAxes, require_sliceable
from planner.extras.token_slices.refusals import faults, of_request
from planner.ir.box import Interval
from planner.ir.errors import UnsupportedModelError, UsageError
from planner.ir.graph import SAMPLE, Attribute, Layer, TensorSpec
from planner.ir.plan import Decision, Placement, Stage
from planner.ir.problem import Problem
from planner.solvers import solver
from planner.solvers.candidates.evaluate import Evaluator
from tests.planner.causal import SAMPLES, TOKENS, graph

SLICES = [(16,), (8, 8), (7, 6, 3), (1, 14, 1), (1,) * 16]


def test_each_layer_s_tokens_are_found_whatever_its_dims_are_called() -> None:
    axes = TokenAxes.of(graph(1))
    places = {name: (each.dim, each.is_merged) for name, each in axes.works.items()}
    plain = dict.fromkeys(("token", "p0", "r0", "head"), (1, False))
    heads = dict.fromkeys(("h0", "a0"), (2, False))
    merged = dict.fromkeys(("rows", "targets", "loss"), (0, True))
    assert places == {**plain, **heads, **merged}
    assert axes.reads_earlier == {"a0"}


@pytest.mark.parametrize("slices", SLICES, ids=str)
def test_a_slice_of_causal_attention_reads_the_keys_of_all_tokens_up_to_its_last(slices: tuple[int, ...]) -> None:
    division = TokenAxes.of(graph(1)).divided(["a0"], slices, SAMPLES)
    for position, (start, stop) in enumerate(pairwise(accumulate(slices, initial=0))):
        query, key, value = (division.wanted("a0", index)[position] for index in range(3))
        assert query[2] == Interval(start, stop)
        assert key[2] == value[2] == Interval(0, stop)
        came = [move for move in division.moves("a0", 1) if move.dst == position]
        assert [move.src for move in came] == list(range(position))
        assert sum(len(move.box[2]) for move in came) == start


@pytest.mark.parametrize("slices", SLICES, ids=str)
def test_every_row_of_samples_and_tokens_is_one_slice_s(slices: tuple[int, ...]) -> None:
    division = TokenAxes.of(graph(1)).divided(["rows", "loss"], slices, 3)
    rows = [box[0] for box in division.layers["loss"].own]
    assert [len(each) for each in rows] == [3 * length for length in slices]
    assert all(a.stop == b.start for a, b in pairwise(rows))
    read = [division.wanted("rows", 0)[position] for position in range(len(slices))]
    assert [(box[0], len(box[1])) for box in read] == [(Interval(0, 3), length) for length in slices]


def test_attention_that_is_not_known_to_be_causal_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="a0 cannot be run in token slices") as refused:
        TokenAxes.of(graph(1, causal=False))
    assert any("is_causal" in each for each in refused.value.remedies)


FEATURES = TensorSpec((SAMPLE, "time", "feature"), (SAMPLES, TOKENS, 4), "float32")


def odd(kind: str, tokens: int = TOKENS, **attributes: Attribute) -> Layer:
    return Layer("odd", kind, ("r0",), (replace(FEATURES, shape=(SAMPLES, tokens, 4)),), (), attributes)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (odd("softmax", dim=1), ""),
        (odd("opaque", op="aten.cumsum.default"), "which tokens it reads for one is not known"),
        (odd("layer_norm", dims=(1, 2)), ""),
        (odd("reduce", 1, dims=(1,), keeps=True), ""),
        (odd("lstm", op="aten.lstm.input"), ""),
        (odd("slice", TOKENS - 1, dim=1, starts=(1,)), ""),
        (odd("pad", TOKENS + 1, before=(0, 1, 0)), f"it makes other than {TOKENS} tokens"),
    ],
    ids=lambda value: value.kind if isinstance(value, Layer) else "",
)
def test_a_layer_over_all_tokens_or_that_shifts_them_is_refused_by_name(layer: Layer, reason: str) -> None:
    plain = graph(1)
    with pytest.raises(UnsupportedModelError, match="odd cannot be run in token slices") as caught:
        require_sliceable(replace(plain, layers=(*plain.layers[:-4], layer, *plain.layers[-4:])), (8, 8))
    assert any(reason in each for each in caught.value.details)
    assert caught.value.remedies[-1] == "plan without --allow time and --token-slices"


def test_what_follows_from_inputs_alone_may_be_read_whole() -> None:
    """A mask of keys that padding makes: every slice makes all of it."""
    keys = TensorSpec((SAMPLE, "dim1", "dim2", "dim3"), (SAMPLES, 1, 1, TOKENS), "bool")
    plain = graph(1)
    mask = Layer("mask", "reshape", ("x",), (keys,), (), {"kept": (0, -1, -1, 1)})
    layers = tuple(
        replace(layer, inputs=(*layer.inputs, "mask")) if layer.kind == "attention" else layer for layer in plain.layers
    )
    axes = TokenAxes.of(replace(plain, layers=(mask, *layers)))
    assert "mask" in axes.free
    assert "mask" not in axes.works
    assert all(box[3] == Interval(0, TOKENS) for box in axes.divided(["a0"], (7, 9), SAMPLES).wanted("a0", 3))


@pytest.mark.parametrize("slices", [(8,), (20,), (16, 0), (8, -1, 9)])
def test_slices_have_to_make_up_a_sequence(slices: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedModelError, match="do not make up a sequence") as refused:
        require_sliceable(graph(1), slices)
    assert str(TOKENS) in refused.value.details[0]


ASKED: Mapping[str, Mapping[str, Any]] = {
    "--token-slices 2+0": {"token_slices": [2, 0]},
    "--token-slices with --objective latency": {"token_slices": [2, 2], "objective": "latency"},
    "--recompute selective beside token slices": {"recompute": "selective", "allow": ["time"]},
}
"""By the beginning of the title of what is said."""


@pytest.mark.every_case
@pytest.mark.parametrize("title", ASKED)
def test_a_request_is_refused_with_a_remedy_or_a_reason(title: str) -> None:
    with pytest.raises(UsageError) as caught:
        solver("best-first")(make_problem(chain_profile(3, 2), **{"global_batch": 4, **ASKED[title]}), None)
    assert caught.value.title.startswith(title)
    assert [*caught.value.details, *caught.value.remedies]
    assert (caught.value.code, caught.value.exit_code) == ("H200", 2)
    assert len(of_request(Problem(chain_profile(3, 2), 4, confidence=0.0))) == len(ASKED)


def test_a_plan_with_spans_or_stages_of_several_ranks_has_faults() -> None:
    layers = {layer.name: Placement(0) for layer in graph().layers}
    stage = Stage((0, 1), ("a", "b"), recomputed=(("p0",),))
    decision = Decision("1f1b", (2,), (stage,), layers, ((), ()), (8, 8))
    spans, ranks = faults(decision)
    assert spans == "decision.stages[0].recomputed: stage 0 has 1 spans and token slices; it can have one of the two"
    assert ranks.startswith("decision.token_slices: stage 0 is on several ranks")
    assert not list(faults(replace(decision, token_slices=())))


@pytest.mark.parametrize(("stage", "is_refused"), [(1, True), (0, False)])
def test_stages_that_share_a_parameter_are_refused(stage: int, is_refused: bool) -> None:
    profile = chain_profile(5, 2)
    first, *others = profile.graph.layers
    others[3] = replace(others[3], parameters=first.parameters)
    tied = replace(profile, graph=replace(profile.graph, layers=(first, *others)))
    candidate = Candidate((0, 0, 0, 0, stage, stage), ((0,), (1,)), ((2,), (2,)), (2, 2), "1f1b", axis_parts=(4, 4))
    evaluator = Evaluator(Problem(tied, 4, confidence=0.0), CostModel(tied))
    text = "and sequences are cut into token slices: what a second copy takes then is not known"
    assert (text in evaluator.unmet(candidate)) is is_refused
