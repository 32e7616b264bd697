from __future__ import annotations

from types import SimpleNamespace

from IPython.core.formatters import DisplayFormatter

from benchmarks.chains import chain_profile
from halopipe import api
from halopipe.extras.figures.notebook import register
from halopipe.planning.problem import make_problem
from halopipe.planning.solve import predict_again, solve
from planner.ir.timeline import TimelineFile

PROFILE = chain_profile(4, latency_s=3e-4)


def html(value: object) -> str:
    shell = SimpleNamespace(display_formatter=DisplayFormatter())
    register(shell)
    return str(shell.display_formatter.format(value)[0]["text/html"])


def test_a_plan_shows_itself_with_its_step_where_its_profile_is_remembered() -> None:
    alone = html(solve(make_problem(PROFILE, global_batch=8)))
    assert "peak memory in MiB" in alone
    shown = html(api.plan(PROFILE, global_batch=8))
    assert "predicted: " in shown
    assert "<td>nothing</td>" in shown  # the last stage sends


def test_a_timeline_shows_its_step_and_a_file_both() -> None:
    timeline = predict_again(api.plan(PROFILE, global_batch=8), PROFILE)[1]
    assert html(timeline).count("<svg") == 2  # memory over time as well
    both = html(TimelineFile(timeline, timeline, (0.5, 0.7, 0.6), (1.0, 1.0, 1.0)))
    assert "3 steps, median 600 ms" in both


def test_outside_of_a_notebook_nothing_is_registered() -> None:
    register(None)
