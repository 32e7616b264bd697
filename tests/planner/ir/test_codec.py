"""Files: what is written is read back; what is wrong is refused, all of it at once and in words."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.chains import chain_profile
from planner.ir import codec
from planner.ir.cluster import Cluster
from planner.ir.codec import fingerprint, require_match
from planner.ir.errors import CorruptFileError, HalopipeError, MissingFileError, NewerFileError, StaleFileError
from planner.ir.plan import Alternative, Measured, Placement, Plan, Rejected
from planner.ir.problem import DEFAULT_CONFIDENCE, Request
from planner.ir.profile import Profile, Slowdown
from planner.ir.timeline import MemorySample, Span, Timeline, TimelineFile
from planner.ir.validation import faults
from tests.planner.factories import chain_decision, made_up_proof, plan_of

PROFILE = chain_profile(4, num_devices=3, hosts=("n0", "n0", "n1"), speeds=(1.0, 1.0, 2.0), latency_s=1e-5)
FULL_PLAN = replace(
    plan_of(PROFILE, chain_decision(PROFILE, (2,), (2, 1), ((0, 1), (2,)), ((3, 1), (1,)))),
    alternatives=(Alternative("one-device", 0.25, None, "25 % slower: §"),),
    measured=Measured(0.1, 0.01, 5, (1e-3, 2e-3), (2e-3, 4e-3), (10, 20, 30), -0.03),
)
PLAN = replace(FULL_PLAN, search=replace(FULL_PLAN.search, rejected=(Rejected("gpipe", "H"),), bounds_s={"work": 0.1}))
STEP = Timeline("measured", 1.5, (Span(0, "0F0", 0.0, 1.0),), (MemorySample(0, 0.5, 100),))
TIMELINE = TimelineFile(STEP, STEP, (1.5,), (0.1, 0.05))
VALUES = {"profile": PROFILE, "plan": PLAN, "timeline": TIMELINE, "proof": made_up_proof()}


def refusal(text: str, cls: type = Plan) -> CorruptFileError:
    with pytest.raises(CorruptFileError) as caught:
        codec.loads(text, cls, source="plan.json")
    return caught.value


def edited(change: Callable[[dict[str, Any]], object]) -> str:
    """The plan file with a change."""
    document = json.loads(codec.dumps(PLAN))
    change(document)
    return json.dumps(document)


def asking(confidence: float) -> Plan:
    return replace(PLAN, inputs=replace(PLAN.inputs, request=Request(confidence=confidence)))


def test_a_plan_file_that_names_no_confidence_was_made_for_none_and_one_by_default_names_it() -> None:
    assert Request().confidence == DEFAULT_CONFIDENCE > 0
    for confidence in (0.0, DEFAULT_CONFIDENCE, 0.95):
        text = codec.dumps(asking(confidence))
        assert ('"confidence"' in text) is (confidence > 0)
        assert codec.loads(text, Plan) == asking(confidence)
    properties = json.loads(codec.schema("plan"))["$defs"]["Request"]["properties"]
    assert properties["confidence"]["default"] == 0.0


@pytest.mark.parametrize("name", codec.FORMATS)
def test_what_is_written_is_read_back_and_written_alike(name: str) -> None:
    value = VALUES[name]
    text = codec.dumps(value)
    again = codec.loads(text, type(value))
    assert again == value
    assert codec.dumps(again) == text
    assert text.endswith("}\n")


def test_numbers_keep_every_bit() -> None:
    timeline = TimelineFile(STEP, replace(STEP, step_s=0.1 + 0.2), (1 / 3,), (1e-300, 2.0**-1074))
    assert codec.loads(codec.dumps(timeline), TimelineFile) == timeline


SCHEMAS = Path(codec.__file__).parents[1] / "schemas"


def test_there_is_a_schema_for_every_format_and_no_other() -> None:
    assert sorted(path.stem for path in SCHEMAS.iterdir()) == sorted(codec.FORMATS) == sorted(VALUES)


@pytest.mark.parametrize("name", codec.FORMATS)
def test_the_committed_schema_is_current_and_files_follow_it(name: str) -> None:
    assert (SCHEMAS / f"{name}.json").read_text("utf-8") == codec.schema(name), f"halopipe schema {name}"
    schema = json.loads(codec.schema(name))
    jsonschema.Draft202012Validator.check_schema(schema)
    document = json.loads(codec.dumps(VALUES[name]))
    jsonschema.validate(document, schema)
    with pytest.raises(jsonschema.ValidationError, match="strange"):
        jsonschema.validate({**document, "strange": 1}, schema)


HOME = Path(__file__).resolve().parents[3]
WRITTEN = [
    path
    for path in (*HOME.glob("notebooks/data/**/*.json"), *HOME.glob("tests/data/golden/*.json"))
    if '"halopipe"' in path.read_text("utf-8")[:40]
]


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)
def test_files_of_earlier_releases_make_sense(path: Path) -> None:
    text = path.read_text("utf-8")
    cls, _ = codec.FORMATS[json.loads(text)["halopipe"]]
    codec.loads(text, cls)


def test_slow_downs_come_back_and_are_left_out_where_nothing_is_known() -> None:
    kind = PROFILE.cluster.devices[0].kind
    slowed = replace(PROFILE, slowdowns={kind: (Slowdown("l0", 2, 2, 1.25, 1.0, 0.01),)})
    assert codec.loads(codec.dumps(slowed), Profile) == slowed
    assert "slowdowns" not in codec.dumps(PROFILE)
    assert fingerprint(replace(slowed, slowdowns={})) == fingerprint(PROFILE) != fingerprint(slowed)
    standing = slowed.standing({PROFILE.cluster.devices[0].name: 0.5})
    assert standing.slowdowns[standing.cluster.devices[0].kind] == slowed.slowdowns[kind]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"layer": "l9"}, "layer: no layer 'l9'"),
        ({"samples": 0}, "samples: 0 is less than 1"),
        ({"num_devices": 1}, "num_devices: 1 is less than 2"),
        ({"forward": 0.99}, "forward: 0.99 is not between 1 and 1000"),
        ({"backward": 1e4}, "backward: 10000 is not between 1 and 1000"),
    ],
)
def test_slow_downs_that_speed_up_or_are_of_nothing_are_refused(change: dict[str, Any], fault: str) -> None:
    slowdown = replace(Slowdown("l0", 2, 2, 1.25, 1.0), **change)
    (told,) = faults(replace(PROFILE, slowdowns={"k": (slowdown,)}))
    assert told.startswith(f"slowdowns.k[0].{fault}")


def test_all_faults_of_sense_are_told_in_the_order_of_the_file() -> None:
    first, second, *rest = PROFILE.graph.layers
    graph = replace(PROFILE.graph, layers=(replace(first, inputs=(second.name,)), replace(second, name=""), *rest))
    places = [fault.partition(":")[0] for fault in faults(replace(PROFILE, graph=graph))]
    assert places[:3] == ["graph.layers[0].inputs[0]", "graph.layers[1].name", "graph.layers[2].inputs[0]"]


def test_a_changed_layer_is_a_changed_line() -> None:
    old = codec.dumps(PLAN).splitlines()
    layers = {**PLAN.decision.layers, "l2": Placement(0)}
    new = codec.dumps(replace(PLAN, decision=replace(PLAN.decision, layers=layers))).splitlines()
    changed = [(a.strip(), b.strip()) for a, b in zip(old, new, strict=True) if a != b]
    assert changed == [('"l2": {"stage": 1, "cuts": {}},', '"l2": {"stage": 0, "cuts": {}},')]


def test_all_faults_are_named_at_once_with_their_paths() -> None:
    def change(document: dict[str, Any]) -> None:
        document["decision"]["schedul"] = document["decision"].pop("schedule")
        document["prediction"]["step_s"] = "fast"
        document["decision"]["stages"][1]["ranks"] = [True]
        document["search"]["gap"] = None
        document["surprise"] = 1

    error = refusal(edited(change))
    assert error.title == "plan.json is not a valid plan file: 6 faults"
    assert set(error.details) == {
        "decision.schedul: unknown key; did you mean 'schedule'?",
        "decision.schedule: missing",
        'prediction.step_s: input should be a valid number, got "fast"',
        "decision.stages[1].ranks[0]: input should be a valid integer, got true",
        "search.gap: input should be a valid number, got null",
        "surprise: unknown key",
    }
    assert error.remedies == ("halopipe schema plan",)


def test_very_many_faults_are_counted() -> None:
    error = refusal(edited(lambda document: document["decision"].update({f"strange{k}": 1 for k in range(30)})))
    assert "30 faults" in error.title
    assert len(error.details) == 21
    assert error.details[-1] == "... and 10 more"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(number: str) -> None:
    text = codec.dumps(PLAN).replace('"bubble_fraction": 0.0', f'"bubble_fraction": {number}')
    assert "prediction.bubble_fraction: input should be a finite number" in refusal(text).details[0]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("decision", "micro_batches"), [2.0, 1], "decision.micro_batches[0]"),
        (("decision", "micro_batches"), [2, "1"], "decision.micro_batches[1]"),
        (("decision", "micro_batches"), "21", "decision.micro_batches"),
        (("prediction", "step_s"), True, "prediction.step_s"),
        (("search", "num_candidates"), True, "search.num_candidates"),
        (("inputs", "model", "factory"), 7, "inputs.model.factory"),
        (("decision", "layers"), [], "decision.layers"),
        (("measured",), {}, "measured.step_s: missing"),
    ],
)
def test_nothing_is_taken_for_another_type(path: tuple[str, ...], value: object, said: str) -> None:
    def change(document: dict[str, Any]) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    assert said in str(refusal(edited(change)))


def test_keys_given_twice_are_refused_with_their_paths() -> None:
    text = codec.dumps(PLAN)
    text = text.replace('"step_s": 0.001,', '"step_s": 0.001, "step_s": 0.002,')
    text = text.replace('{"stage": 0, ', '{"stage": 0, "stage": 1, ', 1)
    assert refusal(text).details == ("decision.layers.l0.stage: key given twice", "prediction.step_s: key given twice")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty"),
        (" \n", "it is empty"),
        ('{"halopipe": "plan", "version": 1, "inputs": {"mo', "it is cut off after 49 characters: line 1, column 47"),
        ('{"halopipe": "plan", "version": 1,', "it is cut off after 34 characters: line 1"),
        ('{"halopipe": "plan", "a": 1 "b": 2}', "line 1, column 29: Expecting ',' delimiter"),
        ('{"halopipe": "plan",\n', "line 2, column 1"),
        ("[]", "it is not a halopipe file"),
        ("{}", "it is not a halopipe file"),
        ('{"halopipe": ["plan"]}', "it is not a halopipe file"),
        ('{"halopipe": "profile", "version": 1}', "it is a halopipe profile file"),
        ('{"halopipe": "plan"}', "its version is missing; versions are whole numbers from 1"),
        ('{"halopipe": "plan", "version": true}', "its version is true"),
        ('{"halopipe": "plan", "version": "1"}', 'its version is "1"'),
        ('{"halopipe": "plan", "version": 0}', "its version is 0"),
        ("[" * 100_000, "nested too deeply"),
        ('{"halopipe": "plan", "version": ' + "9" * 5000 + "}", "plan.json"),
    ],
)
def test_other_texts_are_refused_with_what_they_are(text: str, said: str) -> None:
    with pytest.raises(HalopipeError) as caught:
        codec.loads(text, Plan, source="plan.json")
    assert said in str(caught.value)


def test_a_newer_version_is_refused_with_the_way_out() -> None:
    with pytest.raises(NewerFileError, match="written by a newer halopipe") as caught:
        codec.loads(edited(lambda document: document.update(version=2)), Plan)
    assert caught.value.details == ("it has plan format 2, this release reads up to 1",)
    assert caught.value.remedies


def test_other_types_are_no_file_format() -> None:
    with pytest.raises(TypeError, match="Cluster is not a file format; formats are profile, plan, timeline"):
        codec.dumps(Cluster((), {}))


def test_files_are_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    codec.dump(PLAN, path)
    assert codec.load(path, Plan) == PLAN
    assert codec.load(str(path), Plan) == PLAN
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(MissingFileError, match=f"cannot read {path}"):
            codec.load(path, Plan)
    (tmp_path / "binary").write_bytes(b'{"halopipe": "\xff"}')
    with pytest.raises(CorruptFileError, match="is not UTF-8 text"):
        codec.load(tmp_path / "binary", Plan)


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="cannot write"):
        codec.dump(PLAN, tmp_path / "none" / "plan.json")


@pytest.mark.parametrize("broken", ["fsync", "replace", "chmod"])
@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, failure: BaseException
) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(os, broken, fail)
    expected = MissingFileError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        codec.dump(PLAN, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]
    assert path.read_text() == "old"


def test_canonical_text_is_the_same_for_equal_values() -> None:
    assert codec.canonical({"b": (1, 2), "a": {"y": 1, "x": "é"}}) == '{"a":{"x":"é","y":1},"b":[1,2]}'


TEXT = codec.dumps(PLAN)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
    st.lists(st.integers(), max_size=2),
)


def read_or_refused(text: str) -> None:
    """The text is a plan that is written and read back, or it is refused as an input file."""
    try:
        plan = codec.loads(text, Plan)
    except HalopipeError as error:
        refused = error
    else:
        assert codec.loads(codec.dumps(plan), Plan) == plan
        return
    assert refused.exit_code == 3
    assert refused.render()


@settings(max_examples=150)
@given(st.integers(0, len(TEXT) - 1), st.integers(0, 30), st.text(max_size=6))
def test_a_spoilt_text_is_a_plan_or_refused(start: int, length: int, replacement: str) -> None:
    read_or_refused(TEXT[:start] + replacement + TEXT[start + length :])


@settings(max_examples=200)
@given(st.data())
def test_a_spoilt_value_is_a_plan_or_refused(data: st.DataObject) -> None:
    document = json.loads(TEXT)
    section = data.draw(st.sampled_from([key for key in document if key not in ("halopipe", "version")]))
    here = document
    key = section
    while isinstance(here[key], (dict, list)) and here[key] and data.draw(st.integers(0, 3)):
        here = here[key]
        key = data.draw(st.sampled_from(list(here) if isinstance(here, dict) else range(len(here))))
    if data.draw(st.booleans()):
        here[key] = data.draw(LEAVES)
    else:
        del here[key]
    read_or_refused(json.dumps(document))


@settings(max_examples=100)
@given(st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner)))
def test_any_json_is_a_profile_or_refused(value: object) -> None:
    header = {"halopipe": "profile", "version": 1}
    text = json.dumps({**value, **header} if isinstance(value, dict) else value)
    with pytest.raises(HalopipeError):
        codec.loads(text, Profile)


def test_equal_contents_have_equal_fingerprints_whatever_their_order() -> None:
    assert fingerprint({"a": 1, "b": (1, 2)}) == fingerprint({"b": [1, 2], "a": 1})
    assert fingerprint(chain_profile(3)) == fingerprint(chain_profile(3))
    assert re.fullmatch(r"sha256:[0-9a-f]{16}", fingerprint(()))


def test_any_change_is_seen() -> None:
    profile = chain_profile(3)
    changed = replace(profile.graph.layers[1], attributes={"op": "aten.gelu.default"})
    graph = replace(profile.graph, layers=(profile.graph.layers[0], changed, *profile.graph.layers[2:]))
    assert fingerprint(graph) != fingerprint(profile.graph)
    assert fingerprint(replace(profile, action_overhead_s={"kind-1": 1e-9})) != fingerprint(profile)


def test_the_fingerprint_of_a_value_never_changes_between_releases() -> None:
    assert fingerprint({"stage": 1, "name": "é"}) == "sha256:7fcacae7e6049965"


def test_a_stale_file_is_refused_with_both_fingerprints() -> None:
    require_match("model", "sha256:1", "sha256:1", "plan again")
    with pytest.raises(StaleFileError, match="the plan was made for another model") as caught:
        require_match("model", "sha256:1", "sha256:2", "plan again")
    assert caught.value.details == ("plan: sha256:1", "here: sha256:2")
    assert caught.value.remedies == ("plan again",)
