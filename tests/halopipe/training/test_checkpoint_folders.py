"""``halopipe checkpoint``: what is there, what is damaged, weights out and in."""

from __future__ import annotations

import json
import os
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from typer.testing import Result

from halopipe.training.checkpoint_folders import load_weights
from halopipe.training.resuming import Saved
from planner.ir.codec import dump
from planner.ir.errors import CorruptFileError, UsageError
from planner.ir.plan import Plan
from profiler.source.parts import model_of
from runtime.checkpoint import Checkpoint, complete_steps, whole_state_dict
from tests.halopipe import commands, learners
from tests.halopipe.ranks import run_job
from tests.runtime.checkpoint.cases import forge

RECIPE = {"data": "tests.halopipe.learners:dataset", "optimizer": "AdamW:lr=0.05", "steps": 4}


def call(text: str) -> Result:
    return commands.call(*text.split())


@cache
def plan() -> Plan:
    return learners.plan()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints after 1 to 4 steps of two stages."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("trained") / "saved"
    run_job(plan(), folder.parent, **RECIPE, checkpoint=str(folder), checkpoint_every=1)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy in the working folder, beside the plan."""
    monkeypatch.chdir(tmp_path)
    dump(plan(), "plan.json")
    return Path(shutil.copytree(trained, tmp_path / "saved"))


def break_a_byte(folder: Path, step: int) -> None:
    """Change one byte that only its hash shows."""
    path = folder / f"step-{step}" / "rank-1" / "tensors.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_the_checkpoints_of_a_folder_are_listed_with_size_age_and_plan(folder: Path) -> None:
    os.utime(folder / "step-2", (0, 0))
    (folder / "step-3" / "manifest.json").unlink()
    (folder / "step-9.tmp").mkdir()
    shown = call("checkpoint list saved")
    assert shown.exit_code == 0, shown.stderr
    header, *rows = shown.stdout.splitlines()
    assert header.split() == ["step", "size", "age", "plan", "state"]
    assert [row.split()[0] for row in rows] == ["1", "2", "3", "4"]
    assert all("2 stages on 2 ranks, 1f1b, 2 micro-batches  complete" in row for row in (rows[0], rows[1], rows[3]))
    assert rows[2].endswith("manifest.json is missing, or no plain file")
    assert re.search(r" \d{5,} days ", rows[1])
    found = json.loads(call("checkpoint list saved --json").stdout)
    assert [each["step"] for each in found] == [1, 2, 3, 4]
    assert found[0]["num_bytes"] == sum(file.stat().st_size for file in (folder / "step-1").rglob("*.*"))


def test_every_byte_is_verified_and_damage_is_an_exit_code(folder: Path) -> None:
    assert call("checkpoint verify saved").exit_code == 0
    break_a_byte(folder, 4)
    break_a_byte(folder, 2)
    assert call("checkpoint list saved").stdout.count("complete") == 4  # sizes and manifests alone
    bad = call("checkpoint verify saved")
    assert bad.exit_code == 3
    assert bad.stdout.count("sound") == 2
    assert "error[H302] 2 checkpoints of 4 in saved are damaged" in bad.stderr
    assert "saved/step-2: rank-1/tensors.safetensors: " in bad.stderr
    assert "try: the newest sound one: saved/step-3" in bad.stderr
    assert call("checkpoint verify saved --step 3").exit_code == 0
    assert call("checkpoint verify saved --step 4").exit_code == 3
    assert call("checkpoint verify saved --step 7").exit_code == 3
    assert call("checkpoint saved").exit_code == 3


def test_weights_go_out_and_come_in_and_training_begins_from_them(folder: Path) -> None:
    text = call("checkpoint saved").stdout
    for said in ("step-4: 4 steps done", "saved by 2 ranks", "4 parameters and buffers", "other steps there: 1, 2, 3"):
        assert said in text
    assert call("checkpoint export saved --to weights.pt --step 3").exit_code == 0
    old = call("checkpoint saved --step 3 --to same.pt")
    assert (old.exit_code, Path("same.pt").read_bytes()) == (0, Path("weights.pt").read_bytes())
    state = torch.load("weights.pt", weights_only=True)
    learners.classifier()[0].double().load_state_dict(state, strict=True)
    made = call("checkpoint import begun --from weights.pt --plan plan.json")
    assert made.exit_code == 0, made.stderr
    assert "begun/step-0; next: halopipe run plan.json --checkpoint begun --resume" in made.stderr
    assert complete_steps("begun") == (0,)
    assert call("checkpoint verify begun").exit_code == 0
    begun = Checkpoint.open("begun")
    assert {key.removeprefix("model/") for key in begun.tensors()} == state.keys()
    assert all(torch.equal(begun.read(f"model/{name}"), tensor) for name, tensor in state.items())
    shutil.copytree("begun", "copy")
    found = run_job(plan(), folder, **RECIPE, checkpoint="begun", resume=True)
    assert (found.first_step, len(found.losses)) == (0, 4)
    one = run_job(learners.plan([]), folder, **RECIPE, checkpoint="copy", resume=True)
    assert found.losses == pytest.approx(one.losses, rel=1e-10)
    assert found.losses[0] != run_job(plan(), folder, **RECIPE).losses[0]  # which begins with the model's own
    again = call("checkpoint import begun --from weights.pt --plan plan.json")
    assert (again.exit_code, "begun has checkpoints already" in again.stderr) == (2, True)


def test_weights_go_out_in_the_format_of_torch(folder: Path) -> None:
    assert call("checkpoint saved --step 3 --to made/weights.dcp").exit_code == 0
    expected = whole_state_dict(Checkpoint.open(folder, 3))
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        dcp.load(state, checkpoint_id="made/weights.dcp", no_dist=True)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    again = call("checkpoint saved --to made/weights.dcp")
    assert (again.exit_code, "cannot write made/weights.dcp" in again.stderr) == (3, True)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("checkpoint list", 2, "checkpoint list needs a folder"),
        ("checkpoint burn saved", 2, "knows no 'burn'"),
        ("checkpoint list saved --step 3", 2, "checkpoint list takes no --step"),
        ("checkpoint saved --plan plan.json", 2, "checkpoint takes no --plan"),
        ("checkpoint export saved", 2, "checkpoint export needs --to"),
        ("checkpoint import saved --from x.pt", 2, "checkpoint import needs --plan"),
        *((f"checkpoint {verb}", 3, "has no complete") for verb in ("list no", "verify no", "export no --to x.pt")),
        ("checkpoint import begun --from text.pt --plan plan.json", 3, "text.pt"),
        ("checkpoint import begun --from nowhere.pt --plan plan.json", 3, "nowhere.pt"),
        ("checkpoint import begun --from other.pt --plan plan.json", 2, "Missing key(s) in state_dict"),
        (
            "checkpoint import begun --from nested.pt --plan plan.json",
            3,
            "state_dict is a mapping: perhaps the state dict is that",
        ),
        *(
            (f"checkpoint export saved --to {place}", 2, "would be taken for a checkpoint")
            for place in ("saved/step-500", "saved/step-3/weights.pt", "saved/step-7/weights.pt")
        ),
    ],
)
def test_what_cannot_be_done_is_refused_and_nothing_is_written(
    folder: Path, words: str, code: int, message: str
) -> None:
    torch.save({"0.weight": torch.ones(7, 5), "head": torch.ones(1)}, "other.pt")
    torch.save({"epoch": 3, "state_dict": {"a": torch.ones(1)}}, "nested.pt")
    Path("text.pt").write_text("no weights")
    result = call(words)
    assert (result.exit_code, message in result.stderr, result.stdout) == (code, True, ""), result.stderr
    assert not Path("x.pt").exists()
    assert not Path("begun").exists()
    assert complete_steps(folder) == (1, 2, 3, 4)


def test_checkpoints_of_before_say_how_many_ranks_there_were(folder: Path) -> None:
    assert "run/plan" in Checkpoint.open(folder, 4)
    forge(folder / "step-4", lambda text: re.sub(r'    "run/plan": ".*",\n', "", text))
    assert re.search(r"2 ranks +complete", call("checkpoint list saved").stdout)
    assert call("checkpoint saved").exit_code == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [("run/step", '"four"'), ("run/seed", '"x"'), ("run/micro_batches", '"two"'), ("data/epoch", "-1")],
)
def test_a_manifest_that_counts_with_words_is_damaged(folder: Path, key: str, value: str) -> None:
    forge(folder / "step-4", lambda text: re.sub(rf'("{key}": ).*?(,?)\n', rf"\g<1>{value}\2\n", text))
    shown = call("checkpoint saved --step 4")
    found = Saved(Checkpoint.open(folder, 4))
    with pytest.raises(CorruptFileError, match="step-4 is damaged") as caught:
        (found.step, found.seed(0), found.position, found.micro_batches)
    assert key in caught.value.details[0]
    assert shown.exit_code == (3 if key in ("run/step", "data/epoch") else 0), shown.stderr


def test_weights_of_a_loss_stay_where_a_state_has_none() -> None:
    network = nn.Linear(2, 3)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    model = model_of("a factory", (network, (torch.ones(4, 2), torch.zeros(4, dtype=torch.int64)), loss))
    state = {name: torch.ones_like(tensor) for name, tensor in network.state_dict().items()}
    with pytest.raises(UsageError, match="not the one that the plan was made for"):
        load_weights(model, state)
    load_weights(model, state, whole_loss=False)
    assert network.bias.tolist() == [1.0, 1.0, 1.0]
    assert loss.weight is not None
    assert loss.weight.tolist() == [1.0, 2.0, 3.0]
