"""Notebooks: how plans and timelines show themselves, and the comparison of strategies as cells.

A plan is shown as its headline, the step, and a table of stages.  ``import halopipe`` asks IPython for it where a
notebook is running; types know nothing of it, and nothing is loaded before something is shown.

:data:`CELLS` is what ``halopipe notebook`` writes for a profile, and what ``notebooks/02_compare_strategies.ipynb`` is.
"""

from __future__ import annotations

import html
import importlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from planner.ir.errors import UsageError, WorkerError

if TYPE_CHECKING:
    from nbformat import NotebookNode

    from planner.ir.plan import Plan
    from planner.ir.timeline import Timeline, TimelineFile


def register(shell: Any) -> None:
    """Tells IPython's ``shell`` how to show them as HTML.

    Args:
        shell: as ``IPython.get_ipython()`` gives it; None outside of it.
    """
    formatter = getattr(shell, "display_formatter", None)
    if formatter is None:
        return
    to_html = formatter.formatters["text/html"]
    to_html.for_type_by_name("planner.ir.plan", "Plan", plan_html)
    formatter.formatters["text/plain"].for_type_by_name("planner.ir.plan", "Plan", _plan_text)
    to_html.for_type_by_name("planner.ir.timeline", "Timeline", timeline_html)
    to_html.for_type_by_name("planner.ir.timeline", "TimelineFile", timeline_file_html)


def plan_html(plan: Plan) -> str:
    """Headline, the step if the plan's profile is remembered, else memory by rank; and its stages."""
    from halopipe.api.files import profile_of
    from halopipe.extras.figures import figures
    from halopipe.planning import plan_files, solve
    from halopipe.reports import explain
    from planner.costs.rows import stage_rows

    profile = profile_of(plan)
    timeline = solve.predict_again(plan, profile)[1] if profile is not None else None
    if timeline is not None:
        figure = figures.gantt(timeline, devices=plan_files.device_names(plan))
    else:
        figure = figures.memory({"predicted": plan})
    header, cells = explain.stage_table(stage_rows(plan, profile, timeline))
    return (
        f"<pre>{html.escape(explain.headline(plan, profile=profile))}</pre>{figures.svg(figure)}{_table(header, cells)}"
    )


def _plan_text(plan: Plan, printer: Any, _cycle: bool) -> None:
    from halopipe.api.files import profile_of
    from halopipe.reports import explain

    printer.text(explain.headline(plan, profile=profile_of(plan)))


def timeline_html(timeline: Timeline) -> str:
    """The step, and memory over time where it is known."""
    from halopipe.extras.figures import figures

    shown = figures.svg(figures.gantt(timeline))
    return shown + (figures.svg(figures.memory_over_time([timeline])) if timeline.memory else "")


def timeline_file_html(file: TimelineFile) -> str:
    """The step predicted and measured."""
    from halopipe.extras.figures import figures
    from halopipe.terminal import units

    timelines = [timeline for timeline in (file.predicted, file.measured) if timeline.spans]
    text = f"{units.count(len(file.timed_seconds), 'step')}, median {units.seconds(file.step_s)}"
    return f"<pre>{html.escape(text)}</pre>{figures.svg(figures.gantt(*timelines))}"


def _table(header: list[str], cells: list[list[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


CELLS: tuple[str, ...] = (
    """\
# Strategies compared

What would each strategy make of the same machines? This notebook reads a profile, `$name`, plans from it and compares;
it measures nothing. It was written by `halopipe notebook`, and is yours to change.

It needs `pip install 'halopipe[notebooks]'`, and as long as the planner searches: seconds for small networks on a few
devices, minutes for large ones.
""",
    """\
import halopipe as hp

profile = hp.load($file)
print(profile.model.factory, *profile.model.input_shape)
print(len(profile.graph.layers), "layers on", ", ".join(device.name for device in profile.cluster.devices))
""",
    """\
## Plans

The planner's own plan, and the published and everyday strategies, solved on the same profile and priced by the same
simulator; those that fit. Times are seconds of a step; `slower` is relative to the fastest of the table.
""",
    """\
plan = hp.plan(profile)
comparison = hp.compare(plan, *hp.baselines(profile))
table = comparison.frame().sort_values("step_s")
table[["step_s", "samples_per_s", "slower", "bubble_fraction", "peak_bytes", "num_stages", "schedule", "micro_batches"]]
""",
    """\
ax = (1e3 * table.step_s[::-1]).plot.barh(figsize=(8, 0.6 + 0.3 * len(table)))
ax.set(xlabel="step in ms, predicted", ylabel="")
ax.spines[["top", "right"]].set_visible(False)
""",
    """\
## The planner's plan

The step as it is predicted, and the stages. No plan of the space that was searched is faster than the bound.
""",
    "plan",
    """\
search = plan.search
print(f"{search.status}: {1e3 * plan.prediction.step_s:.1f} ms a step, bound {1e3 * search.bound_s:.1f} ms")
print(*search.binding, sep="\\n")
""",
    """\
## The next best strategy

The fastest of the others, and what each of them decides otherwise.
""",
    """\
rivals = [name for name in table.index if name != next(iter(comparison.plans))]
comparison.plans[rivals[0]] if rivals else "no other strategy fits"
""",
    "print(comparison.render())",
    """\
## Step against memory

The Pareto front: each point is the fastest plan that obeys a limit of memory on every device.
""",
    """\
front = hp.pareto(profile, num_points=5)
print(front)
""",
    """\
points = front.frame()
ax = (1e3 * points.step_s).set_axis(points.peak_bytes / 2**20).plot(style="o", figsize=(6, 3.5), ylim=(0, None))
(1e3 * table.step_s).set_axis(table.peak_bytes / 2**20).plot(style="x", ax=ax)
ax.set(xlabel="memory of the fullest device in MiB", ylabel="step in ms")
ax.legend(["front", "strategies"], frameon=False)
ax.spines[["top", "right"]].set_visible(False)
""",
    """\
## What if

The best plan on twice as many devices, and for twice the batch. Ask what you like: `hp.what_if` knows devices, memory,
links and what a plan must be.
""",
    """\
for question in (
    f"devices={2 * len(profile.cluster.devices)}",
    f"global-batch={2 * plan.decision.global_batch}",
):
    print(hp.what_if(plan, profile, question))
""",
)
"""Of the notebook, in order; those of text begin with ``#``.  ``$`` begins what is filled in."""

RAN: tuple[str, ...] = (
    """\
## Predicted against measured

These plans were run (`halopipe run PLAN --update`); their files keep what was measured. Seconds of a step.
""",
    """\
ran = hp.compare($plans).frame()
ran[["step_s", "measured_step_s", "error", "schedule", "micro_batches"]]
""",
    """\
ax = (1e3 * ran[["step_s", "measured_step_s"]][::-1]).plot.barh(figsize=(8, 0.8 + 0.5 * len(ran)))
ax.set(xlabel="step in ms", ylabel="")
ax.legend(["predicted", "measured"], frameon=False)
ax.spines[["top", "right"]].set_visible(False)
""",
)
"""At the end, where plans that were run are given."""


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_START_S = 300
"""Most that a kernel may take to start: a busy machine imports slowly."""


def strategies(profile: Path, plans: Sequence[Path], folder: Path) -> NotebookNode:
    """The comparison of strategies for a profile, without outputs: the same cells and ids each time.

    Args:
        plans: files of plans made from the profile, which have been run.
        folder: where the notebook will lie; files are named relative to it.

    Raises:
        UsageError: nbformat is not installed.
    """
    nbformat = _needed("nbformat")
    name = os.path.relpath(profile, folder)
    files = "".join(f"    {_literal(os.path.relpath(plan, folder))},\n" for plan in plans)
    filled = {"name": name, "file": _literal(name), "plans": f"\n{files}"}
    cells = []
    for number, template in enumerate(CELLS + RAN * bool(plans)):
        source = Template(template).substitute(filled).rstrip("\n")
        make = nbformat.v4.new_markdown_cell if source.startswith("#") else nbformat.v4.new_code_cell
        cells.append(make(source, id=f"cell-{number:02}"))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook: NotebookNode = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    return notebook


def _literal(text: str) -> str:
    """As Python reads it; JSON escapes what is beyond 16 bits as two characters, which Python takes for two."""
    return json.dumps(text) if text.isascii() else repr(text)


def run(notebook: NotebookNode, folder: Path, timeout_s: int | None = None) -> None:
    """Runs all cells in ``folder`` and keeps their outputs, without what changes from run to run (times, versions).

    Args:
        timeout_s: most that a cell may take.

    Raises:
        UsageError: nbclient or ipykernel is not installed.
        WorkerError: a cell failed; the notebook holds the outputs up to it.
    """
    client = _needed("nbclient")
    exceptions = _needed("nbclient.exceptions")
    _needed("ipykernel")
    metadata = dict(notebook.metadata)
    where = {"metadata": {"path": str(folder)}}
    silent = ["--IPKernelApp.log_level=40"]  # else it warns that what it says over local ports is not encrypted
    runner = client.NotebookClient(
        notebook,
        timeout=timeout_s,
        startup_timeout=_START_S,
        coalesce_streams=True,
        kernel_name="python3",
        resources=where,
        extra_arguments=silent,
    )
    try:
        runner.execute()
    except exceptions.CellExecutionError as error:
        raise WorkerError(
            f"a cell of the notebook failed: {error.ename}: {str(error.evalue).partition(chr(10))[0]}",
            [line for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()][-6:],
            ["the notebook holds what came before: open it, and go on from there"],
        ) from None
    except (RuntimeError, KeyError) as error:  # of the kernel: it died, never answered, or is not known
        raise WorkerError(f"no kernel runs the notebook: {error}", [], ["python -m ipykernel install --user"]) from None
    finally:
        notebook.metadata = metadata
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)


def text(notebook: NotebookNode) -> str:
    """As it is kept in a file."""
    return str(_needed("nbformat").writes(notebook)) + "\n"


def _needed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        remedies = ["pip install 'halopipe[notebooks]'"]
        if name != "nbformat":
            remedies.append("--no-run, which writes the notebook and needs nbformat alone")
        raise UsageError(f"notebooks need {name.partition('.')[0]}: {error}", [], remedies) from None
