"""A plan as one offline page: network, step, memory, rivals, proof, and how each figure is known.

Everything is in the file: bokeh's script, ours, the style and the figures; a Content-Security-Policy lets exactly these
two scripts run and nothing be fetched.  Text from files goes through jinja2's autoescape, or is data that scripts put
into the page as text.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halopipe.extras.figures import graph_layout
from halopipe.extras.figures.colours import OPERATIONS, WORDS, stage_colour
from halopipe.planning import plan_files, searched_space, solve
from halopipe.planning.compare import Comparison, proof_text, tie_text
from halopipe.reports import explain
from halopipe.reports.predicted_vs_measured import apart_text, timeline_cells
from halopipe.terminal import units
from halopipe.terminal.console import command
from planner.costs.rows import stage_rows
from planner.ir.codec import load_any
from planner.ir.errors import UsageError
from planner.ir.files import write_text
from planner.ir.plan import Plan, Prediction
from planner.ir.profile import Profile
from planner.ir.schedule import Action
from planner.ir.timeline import Timeline, TimelineFile
from planner.layers import statistics_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from halopipe.extras.figures.charts import ChartPoint
    from halopipe.planning.pareto import Front

HeaderAndRows = tuple[list[str], list[list[str]]]


@dataclass(frozen=True, slots=True)
class ReportSources:
    """What a report is made from.

    Attributes:
        name: of the plan, as the page calls it.
        profile: that the plan was made from, under the plan's corrections.
        timelines: of a run of the plan; ``plan.measured`` is then what it measured.
        rivals: other plans by name, with what runs of theirs measured.
        file: that the plan was read from, as it was named; empty: ``name``.
    """

    name: str
    plan: Plan
    profile: Profile | None = None
    timelines: TimelineFile | None = None
    rivals: Mapping[str, Plan] = field(default_factory=dict)
    file: str = field(default="", compare=False)

    def command(self, verb: str, *arguments: object) -> str:
        """What to type of the plan: a verb, its file, and words after that."""
        return command(verb, self.file or self.name, *arguments)


def read(
    things: Sequence[str | Path | Plan | Profile | TimelineFile],
    profile: Path | None = None,
    cluster: Path | None = None,
    remembered: Profile | None = None,
) -> ReportSources:
    """Files, told apart by what they hold, and objects: the first plan is the one reported, others are its rivals.

    A profile that is not named is found where it is ``profile.json`` beside the plan.

    Args:
        profile: its file, if it is not among ``things``.
        cluster: the cluster file that the plan was made for, if it was.
        remembered: the plan's profile, where none is given.

    Raises:
        UsageError: there is no plan, there are two profiles or two timelines of a plan, or one is of none of the plans.
        StaleFileError: the plan was made from another profile.
        InputFileError: a file cannot be used.
    """
    from halopipe.planning.plan_files import on_cluster

    by_name: dict[str, Any] = {}
    for thing in [*things, *([profile] if profile is not None else [])]:
        if isinstance(thing, (str, Path)):
            by_name[str(thing)] = load_any(thing)
        else:
            by_name[_unused(thing.search.solver if isinstance(thing, Plan) else type(thing).__name__, by_name)] = thing
    plans = {name: value for name, value in by_name.items() if isinstance(value, Plan)}
    profiles = [name for name, value in by_name.items() if isinstance(value, Profile)]
    runs = [name for name, value in by_name.items() if isinstance(value, TimelineFile)]
    if not plans:
        raise UsageError("no plan is given", [f"{name} is none" for name in by_name], ["halopipe report plan.json ..."])
    if len(profiles) > 1:
        raise UsageError(f"{len(profiles)} profiles are given", profiles, ["keep the plan's own"])
    first, plan = next(iter(plans.items()))
    if profiles:
        of_plan = by_name[profiles[0]] if cluster is None else on_cluster(by_name[profiles[0]], cluster)
        remembered = plan_files.require_profile(of_plan, plan, profiles[0])
    elif remembered is None:
        remembered = plan_files.profile_of(plan, first, None, cluster)
    ran = _by_plan(plans, {name: by_name[name] for name in runs})
    plans = {
        name: replace(each, measured=by_name[ran[name]].measured_beside(each.prediction)) if name in ran else each
        for name, each in plans.items()
    }
    base = Counter(Path(name).name for name in plans)
    rivals = {Path(name).name if base[Path(name).name] == 1 else name: value for name, value in plans.items()}
    rivals.pop(Path(first).name if base[Path(first).name] == 1 else first)
    run = by_name[ran[first]] if first in ran else None
    return ReportSources(Path(first).name, plans[first], remembered, run, rivals, first)


def _unused(name: str, used: Mapping[str, object]) -> str:
    """``name``, or with the first number after it that makes it another."""
    return next(
        each for number in range(len(used) + 1) if (each := f"{name} {number + 1}" if number else name) not in used
    )


def _by_plan(plans: Mapping[str, Plan], runs: Mapping[str, TimelineFile]) -> dict[str, str]:
    """Of plans that were run, the name of the timeline: each is of the first plan that it can be of."""
    run_of: dict[str, str] = {}
    for name, run in runs.items():
        of = next((each for each, plan in plans.items() if not plan_files.other_plan(plan, run)), None)
        if of is None:
            first, plan = next(iter(plans.items()))
            plan_files.require_timeline_of(plan, first, run, name)
        elif of in run_of:
            raise UsageError(f"{run_of[of]} and {name} are both of {of}", [], ["keep one timeline a plan"])
        else:
            run_of[of] = name
    return run_of


def require_page(path: str | Path, option: str = "-o") -> None:
    """Whether the path is called as a page of HTML is, or is a pipe or device.

    Args:
        option: that named it.

    Raises:
        UsageError: it is not.
    """
    path = Path(path)
    if path.suffix.lower() not in _PAGES and (path.is_file() or not path.exists()):
        text = f"a report is a page of HTML, and {path.name!r} is not called so"
        remedy = f"{option} {path.with_suffix('.html')}"
        raise UsageError(text, ["a browser opens it, and can print it as PDF"], [remedy])


_PAGES = (".html", ".htm")


def write(
    things: Sequence[str | Path | Plan | Profile | TimelineFile], path: str | Path, profile: Profile | None
) -> None:
    """Writes the page about the first plan of ``things``; see :func:`read`, whose ``remembered`` is ``profile``."""
    require_page(path)
    write_text(path, page(read(things, remembered=profile)))


def page(sources: ReportSources, front: Front | None = None) -> str:
    """The report as HTML.

    Args:
        front: the Pareto front of step and memory, if it was searched for.

    Raises:
        UsageError: bokeh or jinja2 is not installed.
    """
    try:
        import jinja2

        from halopipe.extras.figures import charts
    except ImportError as error:
        raise UsageError(
            f"a report needs bokeh and jinja2: {error}",
            ["they draw the charts and fill the page in"],
            ["pip install 'halopipe[report]'", "halopipe draw PLAN -o step.svg in place of it, which needs neither"],
        ) from None
    plan = sources.plan
    profile = sources.profile
    prediction, fresh = solve.predict_again(plan, profile) if profile is not None else (plan.prediction, None)
    timelines = _timelines(fresh, sources.timelines)
    points = list(_points(sources, prediction, front))
    limits = [rank.memory_limit_bytes for rank in prediction.ranks]
    drawn = charts.charts(timelines, plan.decision, limits, points, plan.search.bound_s)
    known_limits = sorted(set(limits))
    rows = stage_rows(plan, profile, timelines[0] if timelines else None)
    comparison = Comparison({sources.name: plan, **sources.rivals}, profile=sources.profile)
    folder = files("halopipe.extras.figures") / "page"
    script = (folder / "report.js").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string((folder / "report.html.j2").read_text("utf-8")).render(
        title=sources.name,
        headline=explain.headline(plan, prediction, profile=profile).splitlines(),
        stale=explain.stale(plan.prediction, prediction),
        cards=list(_cards(plan, prediction, sources)),
        stages=[(stage_colour(row.stage), f"stage {row.stage}", ", ".join(row.devices)) for row in rows],
        stage_table=explain.stage_table(rows),
        layout_lines=[line.strip() for line in explain.layout_lines(rows)],
        has_edges=profile is not None,
        num_layers=len(plan.decision.layers),
        sources_drawn=[timeline.source for timeline in timelines if timeline.spans],
        legend=_legend(timelines),
        beside=_beside(plan, prediction, timelines, sources.timelines),
        ranks=list(_ranks(plan, prediction)),
        with_memory=[timeline.source for timeline in timelines if timeline.memory],
        limits=f"a rank may use {' and '.join(map(units.size, known_limits))}" if limits else "no limit is known",
        binding=plan.search.binding,
        certificate=explain.certificate(plan, prediction),
        bounds=_bounds(plan, prediction),
        alternatives=explain.alternative_table(plan),
        front=None if front is None else front.render().splitlines()[0],
        num_points=len(points),
        comparison=comparison.table() if sources.rivals else None,
        differences=comparison.differences(),
        other_models=[
            n for n, p in sources.rivals.items() if p.inputs.model_fingerprint != plan.inputs.model_fingerprint
        ],
        evidence=list(_evidence(plan, prediction, profile, timelines)),
        evidence_text=explain.evidence_text(prediction),
        missing=list(_missing(sources, timelines, front)),
        style=(folder / "report.css").read_text("utf-8"),
        policy="; ".join(
            (
                "default-src 'none'",
                f"script-src {charts.digest(drawn.script)} {charts.digest(script)}",
                "style-src 'unsafe-inline'",  # bokeh's charts bring their own into the page
                "img-src data: blob:",
                "base-uri 'none'",
                "form-action 'none'",
            )
        ),
        bokeh=drawn.script,
        script=script,
        data=_as_json(_data(sources, points, rows)),
        charts=[(element, _as_json(document)) for element, document in drawn.documents.items()],
    )


def figure_of(sources: ReportSources, what: str) -> Figure:
    """The ``step``, the ``memory`` or the ``graph`` of a plan as a figure.

    Memory is that of each rank's peak where nothing says it over time.

    Raises:
        UsageError: what it needs is not among the sources.
    """
    from halopipe.extras.figures import figures  # late: matplotlib takes longer to load than the rest

    plan = sources.plan
    profile = sources.profile
    if what == "graph":
        return figures.graph(plan, graph_layout.layer_edges(plan, profile))
    prediction, fresh = solve.predict_again(plan, profile) if profile is not None else (plan.prediction, None)
    timelines = _timelines(fresh, sources.timelines)
    devices = plan_files.device_names(plan)
    if what == "memory":
        limits = [rank.memory_limit_bytes for rank in prediction.ranks]
        with_memory = [timeline for timeline in timelines if timeline.memory]
        return (
            figures.memory_over_time(with_memory, limits, devices)
            if with_memory
            else figures.memory({sources.name: plan})
        )
    shown = [timeline for timeline in timelines if timeline.spans]
    if not shown:
        raise UsageError(
            "a step needs a timeline",
            ["a plan file holds the order of actions, not their times"],
            [
                f"{sources.command('draw', 'PROFILE')} (predicted)",
                f"{sources.command('draw', plan_files.timeline_of(Path(sources.name)))} (of a run)",
            ],
        )
    return figures.gantt(*shown, devices=devices)


def _as_json(value: Any) -> str:
    """For a script element: JSON in which nothing ends it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _timelines(fresh: Timeline | None, run: TimelineFile | None) -> list[Timeline]:
    """Predicted, by the profile or else as the run's file has it, then measured."""
    predicted = fresh or (run.predicted if run is not None and run.predicted.spans else None)
    return [*([predicted] if predicted is not None else []), *([run.measured] if run is not None else [])]


def _cards(plan: Plan, prediction: Prediction, sources: ReportSources) -> Iterator[tuple[str, str, str]]:
    """(what, figure, a line below it)."""
    run = sources.timelines
    low = prediction.p10_s
    high = prediction.p90_s
    within = (
        f"{units.seconds(low)} to {units.seconds(high)} in 8 of 10 steps" if 0 < low < high else prediction.evidence
    )
    yield "step, predicted", units.seconds(prediction.step_s), within
    if (measured := plan.measured) is not None:
        apart = "–" if measured.error is None else units.signed_percent(measured.error)
        note = apart_text(prediction, measured.transport, measured.kinds) or f"{apart} against the prediction"
        over = f" over {measured.transport}" if measured.transport else ""
        yield f"step, measured{over}", units.seconds(measured.step_s), note
    if run is not None and run.drift is not None:
        machine, model = map(units.signed_percent, (run.drift.machine, run.drift.model))
        yield "machine since the profile", machine, f"of the step, by its stages alone; the model missed {model}"
    per_s = f"{plan.decision.global_batch} samples a step"
    if measured is not None and measured.step_s:
        per_s += f"; measured: {units.rate(plan.decision.global_batch / measured.step_s)}"
    yield "samples a second, predicted", units.rate(prediction.samples_per_s), per_s
    yield "bubble", units.percent(prediction.bubble_fraction), "of the ranks' time is waiting"
    fullest = max(prediction.ranks, key=lambda rank: rank.peak_bytes / max(1, rank.memory_limit_bytes), default=None)
    if fullest is not None:
        yield (
            "peak memory",
            units.size(fullest.peak_bytes),
            f"of {units.size(fullest.memory_limit_bytes)}, rank {fullest.rank}",
        )
    bound = f"bound {units.seconds(plan.search.bound_s)}, of: {searched_space.space(plan)}"
    yield "proof", proof_text(plan.search), bound if plan.search.bound_s else "no bound is known"
    if sources.profile is not None and (statistics := statistics_text(plan.decision, sources.profile.graph)):
        yield "batch statistics", "of micro-batches", statistics
    if plan.search.tie is not None:
        tie = plan.search.tie
        yield "a tie", units.percent(tie.given_up), f"{tie_text(plan, tie)}: {tie.over}, is not surely faster"


def _legend(timelines: Sequence[Timeline]) -> list[tuple[str, str, str]]:
    """(colour, words, operations) of what the step chart shows."""
    drawn_ops = {Action.parse(span.action).op for timeline in timelines for span in timeline.spans}
    groups: dict[tuple[str, str], list[str]] = {}
    for op in OPERATIONS:
        if op in drawn_ops:
            groups.setdefault((OPERATIONS[op], WORDS[op]), []).append(op.value)
    return [(colour, label, " ".join(ops)) for (colour, label), ops in groups.items()]


def _beside(
    plan: Plan, prediction: Prediction, timelines: Sequence[Timeline], run: TimelineFile | None
) -> HeaderAndRows | None:
    """Predicted beside measured."""
    ranks = [stage.ranks for stage in plan.decision.stages]
    if run is not None:
        step_s = run.step_s
        predicted = timelines[0] if timelines[0] is not run.measured else Timeline("predicted", prediction.step_s, ())
        alike = prediction.is_of(run.transport, run.kinds)
        return timeline_cells(predicted, run.measured, step_s, ranks, prediction.ranks, alike=alike)
    return None


def _ranks(plan: Plan, prediction: Prediction) -> Iterator[dict[str, Any]]:
    """A line a rank: where its time goes, and its memory."""
    devices = plan_files.device_names(plan)
    step_s = prediction.step_s or 1.0
    for rank in prediction.ranks:
        seconds = (rank.compute_s, rank.communication_s, rank.bubble_s, rank.idle_s)
        parts = [(name, 100 * s / step_s) for name, s in zip(_PARTS, seconds, strict=True)]
        filled = rank.peak_bytes / max(1, rank.memory_limit_bytes)
        yield {
            "rank": rank.rank,
            "device": devices[rank.rank],
            "parts": [(name, f"{share:.2f}", units.percent(share / 100)) for name, share in parts],
            "peak": units.size(rank.peak_bytes),
            "limit": units.size(rank.memory_limit_bytes),
            "filled": f"{100 * min(1.0, filled):.2f}",
            "over": filled > 1,
        }


_PARTS = ("compute", "communication", "bubble", "idle")


def _bounds(plan: Plan, prediction: Prediction) -> list[tuple[str, str, str]]:
    """(name, seconds, percent of the step) of each bound, and the step itself."""
    step_s = prediction.step_s or 1.0
    bounds_s = dict(plan.search.bounds_s) or ({"bound": plan.search.bound_s} if plan.search.bound_s > 0 else {})
    rows = [*sorted(bounds_s.items(), key=lambda item: item[1]), *([("this plan", step_s)] if bounds_s else [])]
    return [(name, units.seconds(s), f"{100 * min(1.0, s / step_s):.2f}") for name, s in rows]


def _points(sources: ReportSources, prediction: Prediction, front: Front | None) -> Iterator[ChartPoint]:
    """What is known of step and memory, the plan first."""
    from halopipe.extras.figures.charts import ChartPoint

    yield ChartPoint(sources.name, "chosen", prediction.step_s, prediction.peak_bytes)
    for other in sources.plan.alternatives:
        if other.step_s is not None and other.peak_bytes is not None:
            yield ChartPoint(other.name, "alternative", other.step_s, other.peak_bytes)
    for name, rival in sources.rivals.items():
        yield ChartPoint(name, "rival", rival.prediction.step_s, rival.prediction.peak_bytes)
    for number, plan in enumerate(front.plans if front is not None else (), start=1):
        yield ChartPoint(f"point {number} of the front", "front", plan.prediction.step_s, plan.prediction.peak_bytes)


def _evidence(
    plan: Plan, prediction: Prediction, profile: Profile | None, timelines: Sequence[Timeline]
) -> Iterator[tuple[str, str, str]]:
    """(figure, how it is known, more) for every kind of figure on the page."""
    yield "step and its parts, predicted", prediction.evidence, "simulated; the weakest evidence of what goes into it"
    if 0 < prediction.p10_s < prediction.p90_s:
        yield "range of the step", "drawn", "the step replayed with costs drawn as the profile says they vary"
    if profile is None:
        yield "layers, links, devices", "not known here", "the profile says; it is not among the files given"
    else:
        for number, counted in _evidence_of_layers(plan, profile).items():
            layer_counts = ", ".join(f"{units.count(n, 'layer')} {word}" for word, n in counted.items())
            yield f"layers of stage {number}", " and ".join(counted), layer_counts
        for name, link in profile.cluster.links.items():
            yield (
                f"link {name}",
                link.evidence,
                f"{units.size(link.bandwidth_bytes_per_s)}/s, {units.seconds(link.latency_s)}",
            )
        for collective in profile.cluster.collectives:
            ranks = units.count(collective.num_ranks, "rank")
            where = f"{collective.operation} of {ranks}, {collective.link}"
            yield where, "measured", units.count(len(collective.points), "size")
        processes = profile.provenance.processes
        if processes or profile.provenance.versions:
            quiet = "others used the machine meanwhile" if profile.provenance.contended else "the machine was quiet"
            versions = ", ".join(f"{name} {text}" for name, text in profile.provenance.versions.items())
            yield (
                "the profile itself",
                "measured",
                f"{units.count(len(processes), 'process', 'processes')}; {quiet}; {versions}",
            )
    for correction in plan.inputs.corrections:
        of = correction.of
        runs = units.count(correction.num_plans, "plan")
        yield f"{of.what} on {of.where}", "corrected", f"times {correction.factor:.3f}, from runs of {runs}"
    for timeline in timelines:
        if timeline.source == "measured":
            yield "actions of the step, measured", "measured", "one step of the run, on the ranks' own clocks"
    if plan.measured is not None:
        text = f"median of {plan.measured.num_steps} steps, spread {units.percent(plan.measured.spread)}"
        yield "step, measured", "measured", text
    yield (
        "bound",
        "proven" if plan.search.bound_s else "not known",
        "holds in the simulator, for the plans that were searched",
    )


def _evidence_of_layers(plan: Plan, profile: Profile) -> dict[int, Counter[str]]:
    by_stage: dict[int, Counter[str]] = {}
    costs = graph_layout.layer_costs(plan, profile)
    for name, placement in plan.decision.layers.items():
        by_stage.setdefault(placement.stage, Counter())[costs[name][2] if name in costs else "not known"] += 1
    return dict(sorted(by_stage.items()))


def _missing(sources: ReportSources, timelines: Sequence[Timeline], front: Front | None) -> Iterator[tuple[str, str]]:
    """(what is not on the page, what shows it)."""
    if sources.profile is None:
        yield "what layers cost, what flows between them, the predicted step", sources.command("report", "PROFILE")
    if sources.timelines is None:
        report_command = sources.command("report", plan_files.timeline_of(Path(sources.name)))
        yield "the measured step", f"{sources.command('run')}, then {report_command}"
    if not sources.rivals:
        yield "rivals", sources.command("report", "other-plan.json")
    if front is None:
        what = "the Pareto front, which is a search of its own"
        yield what, sources.command("report", *(["PROFILE"] if sources.profile is None else []), "--pareto", 5)


def _data(sources: ReportSources, points: Sequence[ChartPoint], rows: Iterable[Any]) -> dict[str, Any]:
    """What scripts need; texts are put into the page as text."""
    plan = sources.plan
    profile = sources.profile
    return {
        "stages": [
            {"name": f"stage {row.stage}", "devices": ", ".join(row.devices), "colour": stage_colour(row.stage)}
            for row in rows
        ],
        "devices": plan_files.device_names(plan),
        "limits": [units.size(rank.memory_limit_bytes) for rank in plan.prediction.ranks],
        "sent": {
            f"{h.src}>{h.dst}": [units.size(h.forward_bytes), units.size(h.backward_bytes)]
            for row in rows
            for h in row.sends or ()
        },
        "points": [
            [point.name, point.role, units.seconds(point.step_s), units.size(point.peak_bytes)] for point in points
        ],
        "network": graph_layout.network(plan, profile),
    }
