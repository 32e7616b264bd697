from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from halopipe.run_spec.options import ON_NAN, RunOptions
from halopipe.training.check_options import require_consistent
from planner.ir.errors import UnknownNameError, UsageError
from planner.ir.plan import Plan
from runtime.numerics.finite import OnNan
from tests.halopipe import learners


@cache
def plan(schedule: str = "1f1b") -> Plan:
    return learners.plan(schedule=schedule)


def refused(schedule: str = "1f1b", **options: object) -> UsageError:
    with pytest.raises(UsageError) as caught:
        require_consistent(plan(schedule), RunOptions(**options))
    assert caught.value.exit_code == 2
    return caught.value


_COMPILED = "--calibrate on times stages as they were profiled, which was without --compile"


@pytest.mark.parametrize(
    ("options", "title", "remedy"),
    [
        ({"eval_every": 5}, "--eval-every needs --eval-data", "--eval-data halopipe.data:digits --eval-batches 8"),
        ({"eval_batches": 5}, "--eval-batches needs --eval-data", "--eval-data halopipe.data:digits"),
        ({"checkpoint_every": 5}, "--checkpoint-every needs --checkpoint", "--checkpoint checkpoints"),
        ({"keep": 5}, "--keep needs --checkpoint", "--checkpoint checkpoints"),
        ({"resume": True}, "--resume needs --checkpoint", "--checkpoint checkpoints"),
        ({"restarts": 3}, "--restarts needs --checkpoint", "--checkpoint checkpoints"),
        ({"data_from": "share"}, "--data-from share needs --data", "--data FACTORY of a Dataset"),
        (
            {"compiler": "eager", "lone_passes": "on"},
            _COMPILED,
            "leave one of them out",
        ),
        (
            {"resume": True, "checkpoint": "x", "check_numerics": True},
            "--check-numerics needs a run from the first step",
            "leave one of them out",
        ),
        (
            {"restarts": 1, "checkpoint": "x", "check_numerics": True},
            "--check-numerics needs a run from the first step",
            "leave one of them out",
        ),
        (
            {"checkpoint": "x", "accumulate": 3, "steps": 20},
            "--steps 20 is no multiple of --accumulate 3",
            "--steps 21",
        ),
        (
            {"checkpoint": "x", "accumulate": 2, "checkpoint_every": 5},
            "--checkpoint-every 5 is no multiple of --accumulate 2",
            "--checkpoint-every 6",
        ),
        (
            {"check_numerics": True, "accumulate": 30},
            "--check-numerics needs an update, the first is after 30 steps",
            "--steps 30",
        ),
    ],
)
def test_an_option_that_lacks_another_is_named_with_the_remedy(
    options: dict[str, object], title: str, remedy: str
) -> None:
    error = refused(**options)
    assert error.title == title
    assert error.remedies[0] == remedy


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0},
        {"accumulate": 0},
        {"clip_norm": -1.0},
        {"clip_norm": float("nan")},
        {"eval_every": -1, "eval_data": "a:b"},
        {"checkpoint_every": -1, "checkpoint": "x"},
    ],
)
def test_numbers_that_mean_nothing_are_refused(options: dict[str, object]) -> None:
    assert "least" in str(refused(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "SGD"},
        {"scheduler": "StepLR:step_size=1"},
        {"clip_norm": 1.0},
        {"accumulate": 2},
        {"checkpoint": "x"},
        {"eval_data": "a:b"},
        {"check_numerics": True},
    ],
)
def test_a_plan_of_forward_passes_takes_nothing_that_trains(options: dict[str, object]) -> None:
    error = refused("forward", **options)
    assert "is for training, this plan has forward passes alone" in error.title
    assert not plan("forward").decision.trains
    assert plan().decision.trains
    require_consistent(plan("forward"), RunOptions(data="a:b", metrics="x"))


def test_unknown_names_are_answered_with_the_nearest() -> None:
    for options in ({"data_from": "frist"}, {"optimizer": "AdamV"}, {"scheduler": "StepLF"}):
        with pytest.raises(UnknownNameError) as caught:
            require_consistent(plan(), RunOptions(**options))
        assert "did you mean" in str(caught.value)


def test_a_folder_with_checkpoints_is_not_written_to_by_another_run(tmp_path: Path) -> None:
    require_consistent(plan(), RunOptions(checkpoint=str(tmp_path)))
    (tmp_path / "step-3").mkdir()
    error = refused(checkpoint=str(tmp_path))
    assert error.details == ("steps 3",)
    assert error.remedies[0] == "--resume, to go on from the newest"
    for resume in (True, "auto"):
        require_consistent(plan(), RunOptions(checkpoint=str(tmp_path), resume=resume))
    (tmp_path / "file").touch()
    assert "is no folder" in refused(checkpoint=str(tmp_path / "file")).title


def test_what_is_done_about_nan_is_known_and_fits_the_schedule() -> None:
    assert tuple(OnNan) == ON_NAN
    with pytest.raises(UnknownNameError, match="'skop'"):
        require_consistent(plan(), RunOptions(on_nan="skop"))
    error = refused("pipedream", on_nan="skip")
    assert error.title.startswith("--on-nan skip needs a schedule that updates the weights at the end of a step")
    assert error.remedies == ("--on-nan stop", "halopipe plan --schedule 1f1b")
    for each in ON_NAN:
        require_consistent(plan(), RunOptions(on_nan=each))
