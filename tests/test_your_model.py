"""The examples of docs/your_model.md are trained by two ranks, on their own data, as on one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.ir.profile import ModelSource
from tests.halopipe.plans import plan_of
from tests.halopipe.ranks import run_job
from tests.missing_operators import declare_missing
from tests.test_readme import HOME, blocks, file_of

BLOCKS = blocks((HOME / "docs" / "your_model.md").read_text("utf-8"))
FILES = {file_of(block): block.text for block in BLOCKS if file_of(block)}
LONG = pytest.mark.exhaustive("each is captured and trained: ten seconds for all; the last one is, always")
NAMES = ("pictures.py", "sentences.py", "clouds.py", "volumes.py", "waves.py")


def test_there_is_an_example_for_each_kind_of_data() -> None:
    assert sorted(FILES) == sorted([*NAMES, "train.py"])


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=LONG) for name in NAMES[:-1]), NAMES[-1]])
def test_an_example_trains_on_its_data(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare_missing()  # transformers loads torchvision
    monkeypatch.chdir(tmp_path)
    for each, text in FILES.items():
        (tmp_path / each).write_text(text)
    for maker in (block.text for block in BLOCKS if name == "pictures.py" and "effect_noise" in block.text):
        exec(maker, {})
    plan = plan_of(ModelSource(f"{name}:model"), [0.5])
    result = run_job(plan, tmp_path, data=f"{name}:data", steps=3, check_numerics=True)
    assert (plan.decision.num_ranks, len(result.losses)) == (2, 3)
    assert len(set(result.losses)) == 3  # of three batches, not of one
    assert result.numerics is not None
    assert (result.numerics.num_tensors > 0, result.numerics.skipped) == (True, "")
