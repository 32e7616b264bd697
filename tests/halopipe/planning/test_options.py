"""Options of ``halopipe plan``: one list, for the command line and for calls; and those lists of other verbs."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
import typer.main

from benchmarks.chains import chain_profile
from halopipe.cli.app import app
from halopipe.planning.options import Asked, PlanOptions, ProfileOptions, SearchOptions, of_a_search
from halopipe.planning.problem import make_problem, problem_for
from halopipe.run_spec.schema import WRITTEN, asked_in, flag, from_text, spec
from planner.ir.errors import UsageError
from planner.ir.problem import SAMPLE_DIMS

PROFILE = chain_profile(3)


def command(verb: str) -> Any:
    return typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("verb", "group"), [("plan", PlanOptions), ("plan", SearchOptions), ("profile", ProfileOptions)]
)
def test_every_option_is_one_of_the_command_line_with_its_help_default_and_limits(verb: str, group: type) -> None:
    require_options(verb, group)


def require_options(verb: str, group: type) -> None:
    """The command line has each field of a list of options, with its help, default and limits."""
    known = {option.name: option for option in command(verb).params}
    for name, field in asked_in(group).items():
        shown, option = known[name], spec(field)
        assert (shown.help, flag(field) in shown.opts) == (option.help, True)
        assert shown.multiple is (isinstance(field.default, tuple) and not option.kind)
        if option.kind in WRITTEN:
            assert from_text(field, shown.default) == field.default
            continue
        assert shown.default == {(): None, True: not flag(field).startswith("--no-")}.get(field.default, field.default)
        assert (getattr(shown, "min", None), getattr(shown, "max", None)) == (option.least, option.most)


def test_all_that_calls_may_ask_is_an_option_of_the_same_type_and_what_nobody_asks_is_as_calls_have_it() -> None:
    types = get_type_hints(PlanOptions)
    assert get_type_hints(Asked) == {name: kind for name, kind in types.items() if name != "memory_bytes"}
    assert problem_for(PROFILE, PlanOptions()) == make_problem(PROFILE)
    assert of_a_search(SearchOptions(), PlanOptions()) == []


def test_what_is_typed_reaches_the_search_taken_apart() -> None:
    typed = {"allow": "sample, spatial", "without": "n0/*,n1/cpu0", "token_slices": "3+2", "memory_bytes": "2KiB"}
    values = {name: from_text(asked_in(PlanOptions)[name], text) for name, text in typed.items()}
    assert values == {
        "allow": (SAMPLE_DIMS, "spatial"),
        "without": ("n0/*", "n1/cpu0"),
        "token_slices": (3, 2),
        "memory_bytes": 2048,
    }
    with pytest.raises(UsageError, match="--token-slices"):
        from_text(asked_in(PlanOptions)["token_slices"], "3+x")


def test_what_a_way_has_no_use_for_is_named_by_its_flags() -> None:
    options = PlanOptions(schedules=("gpipe",), zero=2, halo_depth=1, memory_bytes=2**30)
    search = SearchOptions(pareto=0, measure_missing=True)
    assert of_a_search(search, options) == ["--schedule", "--zero", "--halo-depth", "--pareto", "--measure-missing"]
