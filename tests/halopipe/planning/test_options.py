"""Options of ``halopipe plan``: one list, for the command line and for calls; and those lists of other verbs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import typer.main

from benchmarks.chains import chain_profile
from halopipe.cli.app import app
from halopipe.planning.options import PlanOptions, ProfileOptions
from halopipe.planning.problem import Asked, make_problem
from halopipe.planning.solve import DEFAULT_SOLVER
from halopipe.run_spec.options import asked_in, flag, spec
from halopipe.serving.options import ServeOptions
from planner.ir.errors import UsageError
from planner.ir.problem import SAMPLE_DIMS

PROFILE = chain_profile(3)


def command(verb: str) -> Any:
    return typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("verb", "group"), [("plan", PlanOptions), ("profile", ProfileOptions), ("serve", ServeOptions)]
)
def test_every_option_is_one_of_the_command_line_with_its_help_default_and_limits(verb: str, group: type) -> None:
    known = {option.name: option for option in command(verb).params}
    for name, field in asked_in(group).items():
        shown, option = known[name], spec(field)
        assert (shown.help, flag(field) in shown.opts) == (option.help, True)
        assert shown.default == (None if field.default == () else field.default)
        assert shown.multiple is isinstance(field.default, tuple)
        assert (getattr(shown, "min", None), getattr(shown, "max", None)) == (option.least, option.most)


def test_all_that_calls_may_ask_is_asked_and_what_nobody_asks_is_as_calls_have_it() -> None:
    asked = PlanOptions().asked()
    assert asked.keys() == Asked.__annotations__.keys()
    assert make_problem(PROFILE, **asked) == make_problem(PROFILE)
    assert PlanOptions().solver == DEFAULT_SOLVER
    assert PlanOptions().of_a_search == []


def test_what_is_asked_reaches_the_search_taken_apart() -> None:
    options = PlanOptions(
        micro_batch=(2,),
        allow=f"{SAMPLE_DIMS},spatial",
        without="n0/*,n1/cpu0",
        token_slices="3+2",
        no_calibration=True,
    )
    asked = options.asked()
    assert asked["allow"] == [SAMPLE_DIMS, "spatial"]
    assert (asked["without"], asked["token_slices"]) == (["n0/*", "n1/cpu0"], (3, 2))
    assert (asked["micro_batch"], asked["calibration"]) == ((2,), False)
    with pytest.raises(UsageError, match="--token-slices"):
        dataclasses.replace(options, token_slices="3+x").asked()


def test_what_a_way_has_no_use_for_is_named_by_its_flags() -> None:
    options = PlanOptions(schedule=("gpipe",), zero=2, halo_depth=1, pareto=0, measure_missing=True, memory="1GiB")
    assert options.of_a_search == ["--schedule", "--zero", "--halo-depth", "--pareto", "--measure-missing"]
