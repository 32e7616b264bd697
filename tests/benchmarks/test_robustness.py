"""Hostile files, spoilt plans and remedies of the product: the tables of the benchmark, and who judges them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks.robustness import __main__ as robustness
from benchmarks.robustness import fuzzing, habits, hostile_inputs, metrics, optimizers, remedies, schedules
from benchmarks.robustness.hostile_files import Hostile
from benchmarks.robustness.refusals import Refusal, alternatives, commands_of, rows, verdict
from planner.ir.errors import UsageError
from tests.zoo.entries import DATA, PIPELINE, Entry
from tests.zoo.judging import ADMITTED, CRASHED, EQUAL, REFUSED, WRONG, Verdict

HOSTILE = hostile_inputs.rows()
REFUSALS = rows()
CHEAP, DEAR = ([row for row in REFUSALS if row.is_dear == is_dear] for is_dear in (False, True))


@pytest.mark.every_case
@pytest.mark.parametrize("row", HOSTILE, ids=lambda row: row.name.encode("ascii", "backslashreplace").decode())
def test_hostile_input_is_refused_with_its_place(row: Hostile, tmp_path: Path) -> None:
    assert hostile_inputs.verdict(row, tmp_path) == ""


def test_there_are_300_classes_of_different_names_and_a_good_input_is_none(tmp_path: Path) -> None:
    assert len({row.name for row in HOSTILE}) == len(HOSTILE) >= 300
    assert hostile_inputs.verdict(Hostile("a good plan", ("check", "plan.json"), "is good"), tmp_path)


@pytest.mark.parametrize("row", CHEAP, ids=lambda row: row.name)
def test_the_remedies_of_a_refusal_work(row: Refusal, tmp_path: Path) -> None:
    assert verdict(row, tmp_path) == ""


@pytest.mark.exhaustive("ranks train, serve and save, after each remedy: seconds")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", DEAR, ids=lambda row: row.name)
def test_the_remedies_of_a_refusal_to_run_work(row: Refusal, tmp_path: Path) -> None:
    assert verdict(row, tmp_path) == ""


def test_a_habit_that_goes_wrong_is_told_from_one_that_is_refused() -> None:
    def noted(*numbers: float, error: Exception | None = None) -> habits.Script:
        def script(notes: habits.Notes) -> None:
            notes.numbers += numbers
            if error is not None:
                raise error

        return script

    kinds = {
        habits.EQUAL: noted(1.0, 2.0),
        habits.SILENT: noted(1.0, 2.1),
        habits.REFUSED: noted(error=UsageError("not so")),
        habits.LATE: noted(1.0, error=UsageError("not so")),
        habits.UNTYPED: noted(error=KeyError("lr")),
    }
    several = [habits.Habit(kind, noted(1.0, 2.0), ours) for kind, ours in kinds.items()]
    assert [habits.judge(habit).kind for habit in several] == list(kinds)
    counts, faults = habits.counted(several)
    assert counts == dict.fromkeys(kinds, 1)
    assert list(faults) == list(kinds)[1:]
    assert "number 1: 2.1 for 2.0" in faults[habits.SILENT]
    assert habits.fault(habits.Habit("refused", noted(1.0), kinds[habits.REFUSED], "not so")) == ""
    assert "is not said" in habits.fault(habits.Habit("refused", noted(1.0), kinds[habits.REFUSED], "other words"))


@pytest.mark.parametrize(("what", "number"), [("plan", 60), ("profile", 12), ("text", 200)])
def test_spoilt_files_are_refused_or_hold(what: str, number: int) -> None:
    fuzz = {"plan": fuzzing.fuzz_plans, "profile": fuzzing.fuzz_profiles, "text": fuzzing.fuzz_texts}[what]
    found = fuzz(number, seed=7)
    assert found.is_good, found.examples
    assert 0 < found.refused < found.tried == number


def test_a_seed_gives_the_same_mutations() -> None:
    document = {"a": {"b": [1, 2, 3]}, "c": {"d": "x"}}
    before = json.dumps(document)
    spoilt = [fuzzing.mutation(document, f"plan-0-{index}") for index in range(30)]
    assert spoilt == [fuzzing.mutation(document, f"plan-0-{index}") for index in range(30)]
    assert len(set(spoilt)) > 15
    assert json.dumps(document) == before


def test_what_should_not_be_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter((UsageError("ours"), KeyError("not ours"), None))

    def faults_of(plan: object, profile: object) -> tuple[str, ...]:
        error = next(told)
        if error is None:
            time.sleep(60)
        raise error

    fuzzing._plan_of(fuzzing.PLAN_SEEDS[0])
    for name, value in {
        "PLAN_SEEDS": fuzzing.PLAN_SEEDS[:1],
        "LIMIT_S": 1.0,
        "_PATIENCE": 1,
        "mutation": lambda document, name: json.dumps(document).encode(),
        "faults_of": faults_of,
    }.items():
        monkeypatch.setattr(fuzzing, name, value)
    found = fuzzing.fuzz_plans(3)
    assert (found.refused, found.untyped, found.hangs, found.is_good) == (1, 1, 1, False)


def test_a_command_that_works_and_a_remedy_without_a_command_are_no_rows(tmp_path: Path) -> None:
    assert "is not refused" in verdict(Refusal("", ("compare", "plan.json")), tmp_path)
    (tmp_path / "other").mkdir()
    assert "no remedy names a command" in verdict(Refusal("", ("plan", "nowhere.json")), tmp_path / "other")


def test_every_remedy_of_the_product_is_followed_or_has_a_reason_not_to_be() -> None:
    listed = [each for part in remedies.table().values() for group in part.values() for each in group]
    product = remedies.remedies_of_product()
    assert sorted(product - set(listed)) == [], "neither a row of refusals nor a reason: note it in remedies.json"
    assert sorted(set(listed) - product) == [], "the product has no such remedy: take it out of remedies.json"
    assert len(listed) == len(set(listed))
    assert set(remedies.table()["followed"]) <= {row.name for row in REFUSALS}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ("raise UsageError('a', ['--b'], ['--zero 1', 'mend it'])", ["--zero 1"]),
        ("raise UsageError('a', remedies=(f'--steps {n}', 'add ' + 'hp.plan(x)'))", ["--steps {}", "add hp.plan(x)"]),
        ("_IT = ['halopipe devices']\nraise UsageError('a', [], _IT if b else ())", ["halopipe devices"]),
        ("def f():\n    way = []\n    way.append('-o b')\n    raise UsageError('a', [], [*way])", ["-o b"]),
        ("def f(a, remedy):\n    raise UsageError(a, [], [remedy])\nf('b', '--keep 2')", ["--keep 2"]),
        ("def f():\n    return ['--keep 2']\nraise UsageError('a', [], f())", ["--keep 2"]),
        ("class AnError(UsageError):\n    usual: tuple = ('leave --keep out',)", ["leave --keep out"]),
        (
            "raise UsageError('a', [], [f'make it again: {command(\"plan\", x, \"-o\", y)}'])",
            ["make it again: halopipe plan {} -o {}"],
        ),
        ("def f():\n    '''--keep'''\n    return '--keep'", []),
    ],
)
def test_a_remedy_is_read_from_where_it_is_written(source: str, texts: list[str]) -> None:
    assert sorted(remedies.remedies_in(source)) == texts


def test_ways_that_a_remedy_names_are_followed_one_by_one() -> None:
    ways = ["measure it too: halopipe profile --sizes 2", "halopipe plan --measure-missing"]
    assert list(alternatives(", or ".join(ways))) == ways


@pytest.mark.parametrize(
    ("remedy", "printed", "is_it"),
    [
        ("a.py: --steps {}", "--steps 4", True),
        ("a.py: --steps {}", "--keep 4", False),
        ("a.py: --confidence 0.8", "confidence=0.8", True),
        ("a.py: --confidence 0.8", "confidence=0.9", False),
    ],
)
def test_a_remedy_is_recognised_as_it_is_printed(remedy: str, printed: str, is_it: bool) -> None:
    assert remedies.matches(remedy, printed) == is_it


def test_a_row_that_does_not_print_the_remedy_it_is_noted_for_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = next(each for each in REFUSALS if each.name == "plan --gap 2")
    noted = {"followed": {row.name: ["a.py: --zero 1"]}}
    monkeypatch.setattr("benchmarks.robustness.refusals.following.table", lambda: noted)
    assert "does not print ['a.py: --zero 1']" in verdict(row, tmp_path)


PLAN = Refusal("", ("plan", "profile.json", "--gap", "2", "-o", "a.json"), {"another name": "b.json"})
WAYS = Refusal("", ("ways", "llama2-7b"))
SERVE = Refusal("", ("serve", "plan.json", "--stdin", "npy", "--http", "8000"))
RESUME = Refusal("", ("run", "plan.json", "--resume", "--steps", "9"))
CALL = Refusal("", ("python", "hp.plan(profile, confidence=2, gap=0.1)"))
RUN = Refusal("", ("run", "plan.json", "--check-numerics"))


@pytest.mark.parametrize(
    ("remedy", "row", "commands"),
    [
        ("2 percent is --gap 0.02", PLAN, ["plan profile.json -o a.json --gap 0.02"]),
        ("leave --gap out", PLAN, ["plan profile.json -o a.json"]),
        ("-o another name", PLAN, ["plan profile.json --gap 2 -o b.json"]),
        ("--ranks 2, or --memory 1GiB", PLAN, ["plan profile.json --gap 2 -o a.json --ranks 2"]),
        ("--ranks 2 in place of --gap", PLAN, ["plan profile.json -o a.json --ranks 2"]),
        ("halopipe plan --help", PLAN, ["plan profile.json --help"]),
        ("halopipe plan PROFILE --ranks 2", RUN, ["plan profile.json --ranks 2", "run plan.json --check-numerics"]),
        ("plan with --schedule 1f1b alone", RUN,
         ["plan profile.json --global-batch 8 --schedule 1f1b", "run plan.json --check-numerics"]),
        ("halopipe devices", PLAN, ["devices"]),
        ("halopipe profile MODEL --on a100-dgx, and halopipe plan, in place of ways", WAYS,
         ["profile model.py:model --on a100-dgx", "plan profile.json"]),
        ("halopipe profile MODEL --sizes 2", RUN,
         ["profile model.py:model --sizes 2", "plan profile.json --global-batch 8", "run plan.json --check-numerics"]),
        ("--from a --to FOLDER in place of --stdin and --http", SERVE, ["serve plan.json --from a --to folder"]),
        ("--checkpoint FOLDER --resume auto: another one", RESUME,
         ["run plan.json --steps 9 --checkpoint folder --resume auto"]),
        ("--help of the command says what is its users' own", PLAN, ["plan profile.json --gap 2 -o a.json --help"]),
        ("confidence=0.8", CALL, ["python hp.plan(profile, gap=0.1, confidence=0.8)"]),
        ("mend the function that is named", RUN, []),
    ],
)  # fmt: skip
def test_a_remedy_is_read_as_a_person_reads_it(remedy: str, row: Refusal, commands: list[str]) -> None:
    assert [" ".join(command) for command in commands_of(remedy, row)] == commands


@pytest.mark.parametrize(
    ("refused", "outcomes", "expected"),
    [
        ({}, (EQUAL, EQUAL), robustness.EQUAL),
        ({PIPELINE: "buffer mean"}, (REFUSED, EQUAL), robustness.REFUSED),
        ({PIPELINE: "buffer mean"}, (EQUAL, EQUAL), robustness.EQUAL),
        ({PIPELINE: "hook"}, (REFUSED, EQUAL), robustness.NEEDLESS),
        ({}, (EQUAL, REFUSED), robustness.NEEDLESS),
        ({DATA: "buffer mean"}, (EQUAL, ADMITTED), robustness.NEEDLESS),
        ({PIPELINE: "buffer mean"}, (REFUSED, WRONG), robustness.WRONG),
        ({}, (CRASHED, WRONG), robustness.WRONG),
        ({}, (EQUAL, CRASHED), robustness.UNTYPED),
    ],
)
def test_a_network_is_of_the_class_of_its_worst_verdict(
    refused: dict[str, str], outcomes: tuple[str, ...], expected: str
) -> None:
    plans = zip((PIPELINE, DATA), outcomes, strict=True)
    verdicts = [Verdict(plan, outcome, "the buffer mean is written") for plan, outcome in plans]
    assert robustness.class_of(Entry("module:network", "none", tuple, refused=refused), verdicts) == expected


@pytest.mark.exhaustive("all parts of the benchmark, each a little")
def test_the_quick_run_prints_rows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robustness, "EVERY_FIFTH", 40)
    monkeypatch.setattr(robustness, "QUICK_SHARE", 200)
    assert robustness.main(["--quick", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    names = [row["name"] for row in rows]
    assert all(any(word in name for name in names) for word in ("networks", "plans", "profiles", "hostile", "checker"))
    figures = {row["name"]: row["value"] for row in rows}
    judged = [value for name, value in figures.items() if name.startswith("networks") and name != "networks tried"]
    assert sum(judged) == figures["networks tried"] >= 3
    assert [row["name"] for row in rows if row["goal"] and not row["holds"]] == []


HABITS = {each.__name__: each.habits() for each in (optimizers, schedules, metrics)}


@pytest.mark.cases(5)  # each starts two processes once or twice: 2 to 4 s
@pytest.mark.parametrize("habit", [each for own in HABITS.values() for each in own], ids=lambda habit: habit.name)
def test_a_habit_is_equal_to_a_plain_loop_or_refused_before_the_first_step(habit: habits.Habit) -> None:
    assert habits.fault(habit) == ""


@pytest.mark.parametrize(("subject", "least"), [*zip(HABITS, (20, 8, 6), strict=True)])
def test_the_tables_of_habits_have_the_rows_that_were_asked_for(subject: str, least: int) -> None:
    assert len({habit.name for habit in HABITS[subject]}) == len(HABITS[subject]) >= least
