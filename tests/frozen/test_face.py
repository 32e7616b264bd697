"""Help, errors, schemas and files are what they were; files of before are still read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halopipe.run_spec import job_file
from planner.ir import codec
from tests.frozen.face import FILES, errors, values
from tests.frozen.files import differences, read

VALUES = values()
OF_BEFORE = sorted(FILES.iterdir())


@pytest.mark.every_case
@pytest.mark.parametrize("name", VALUES)
def test_users_read_what_they_read(name: str) -> None:
    now = json.loads(json.dumps(VALUES[name]()))
    lines = [*differences(read("face", name), now)]
    assert not lines, "\n".join([*lines, "if this is right: python -m tests.frozen face --why TEXT"])


def test_errors_are_seen_with_their_remedies() -> None:
    seen = errors()
    assert len(seen) > 300
    assert any("--stdin" in text for texts in seen.values() for text in texts)


@pytest.mark.parametrize("folder", OF_BEFORE, ids=lambda folder: folder.name)
def test_files_of_before_are_read(folder: Path) -> None:
    for kind in codec.FORMATS:
        path = folder / f"{kind}.json"
        value = codec.load_any(path)
        assert codec.loads(codec.dumps(value), type(value)) == value
    assert job_file.read(folder / "job.yaml").plan is not None
