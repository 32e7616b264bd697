from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from benchmarks.chains import chain_profile
from planner.ir import codec
from planner.ir.timeline import Span, Timeline, TimelineFile
from tests.planner.factories import chain_decision, made_up_proof, plan_of

SCHEMAS = Path(codec.__file__).parents[1] / "schemas"
PROFILE = chain_profile(3)
STEP = Timeline("predicted", 1.0, (Span(0, "0F0", 0.0, 1.0),))
EXAMPLES = {
    "profile": PROFILE,
    "plan": plan_of(PROFILE, chain_decision(PROFILE, (1,))),
    "timeline": TimelineFile(STEP, STEP, (1.0,), (0.5,)),
    "proof": made_up_proof(),
}


def test_there_is_a_schema_for_every_format_and_no_other() -> None:
    assert sorted(path.stem for path in SCHEMAS.iterdir()) == sorted(codec.FORMATS) == sorted(EXAMPLES)


@pytest.mark.parametrize("name", codec.FORMATS)
def test_the_committed_schema_is_current(name: str) -> None:
    assert (SCHEMAS / f"{name}.json").read_text("utf-8") == codec.schema(name), f"halopipe schema {name}"


@pytest.mark.parametrize("name", codec.FORMATS)
def test_files_follow_their_schema_and_a_strange_key_does_not(name: str) -> None:
    schema = json.loads(codec.schema(name))
    jsonschema.Draft202012Validator.check_schema(schema)
    document = json.loads(codec.dumps(EXAMPLES[name]))
    jsonschema.validate(document, schema)
    with pytest.raises(jsonschema.ValidationError, match="strange"):
        jsonschema.validate({**document, "strange": 1}, schema)
