"""Measuring a model: what a person names becomes a source, the profiler measures it, and its result in a few lines."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halopipe import units
from halopipe.naming import require_known
from halopipe.optimizer import parse_optimizer
from halopipe.problems import FAMILIES
from halopipe.progress import Reporter
from planner.costs.part_shapes import part_shapes
from planner.ir.errors import UsageError
from planner.ir.problem import SAMPLE_DIMS
from planner.ir.profile import ModelSource, Optimizer, Profile

if TYPE_CHECKING:
    from profiler.session import ProfileProgress

DEFAULT_WORKERS = 2


def source_of(
    model: str | Callable[..., Any],
    input_shape: Sequence[int],
    arguments: Mapping[str, Any],
    dtype: str,
    autocast: str = "",
    elementwise: Sequence[str] = (),
) -> ModelSource:
    """Where workers find the model.

    Raises:
        UsageError: ``model`` is neither text nor a function that another process could import.
    """
    try:
        texts = {key: json.dumps(value, separators=(",", ":")) for key, value in arguments.items()}
    except (TypeError, ValueError) as error:
        raise UsageError(f"an argument of the factory cannot be written as JSON: {error}") from None
    factory = model if isinstance(model, str) else _factory_name(model)
    return ModelSource(factory, texts, tuple(input_shape), dtype, autocast, tuple(elementwise))


def num_workers(cluster: int | str) -> int:
    """Workers on this host; ``auto`` is two.

    Raises:
        UsageError: it is neither a positive number nor ``auto``.
    """
    if cluster == "auto":
        return DEFAULT_WORKERS
    if isinstance(cluster, bool) or not isinstance(cluster, int) or cluster < 1:
        raise UsageError(f"cluster {cluster!r} is not known", [], ["'auto', or a number of workers on this host"])
    return cluster


def measure(
    source: ModelSource,
    *,
    num_workers: int,
    optimizer: str | Optimizer,
    sizes: tuple[int, ...] = (),
    allow: Sequence[str] = (),
    num_ranks: int = 0,
    quick: bool = False,
    quiet: bool = False,
) -> Profile:
    """The profile of ``source`` on this machine, with progress on stderr unless ``quiet``.

    Args:
        allow: families of dims; with more than the samples, parts of layers that a planner would consider for up to
            ``num_ranks`` ranks (0: the workers) are measured at their own shapes.

    Raises:
        UsageError: a family of dims is not known.
    """
    require_known("family of dims", allow, FAMILIES)
    shapes = None
    if set(allow) - {SAMPLE_DIMS}:
        shapes = functools.partial(part_shapes, allow=tuple(allow), num_ranks=num_ranks or num_workers)
    from profiler.session import profile

    with Reporter("profiling", quiet=quiet) as reporter:

        def show(at: ProfileProgress) -> None:
            spread = f", spread {units.percent(at.spread)}" if at.spread else ""
            numbers = f"{at.layer} {units.seconds(at.seconds)}{spread}" if at.seconds else at.layer
            reporter.update(at.done, at.total, numbers, at.eta_s)

        return profile(
            source,
            num_workers=num_workers,
            optimizer=parse_optimizer(optimizer) if isinstance(optimizer, str) else optimizer,
            sizes=sizes or None,
            quick=quick,
            shapes=shapes,
            progress=show,
        )


def summary(profile: Profile) -> str:
    """What was measured: the model, its time by micro-batch size, the links, and how far it can be trusted."""
    from halopipe.explaining import model_text

    graph, cluster, provenance = profile.graph, profile.cluster, profile.provenance
    num_parameters = sum(prod(spec.shape) for spec in graph.parameters.values())
    lines = [
        model_text(profile.model),
        f"  {len(graph.layers)} layers, {num_parameters:,} parameters ({units.size(graph.parameter_bytes())})",
    ]
    devices: dict[str, list[str]] = {}
    for device in cluster.devices:
        devices.setdefault(device.kind, []).append(device.name)
    lines += [f"  devices {', '.join(names)}: {kind}" for kind, names in devices.items()]
    lines.append(f"  memory {units.size(cluster.devices[0].memory_bytes)} a device")
    for samples, step_s in sorted(provenance.iteration_s.items(), key=lambda item: int(item[0])):
        each = units.seconds(step_s / int(samples))
        lines.append(f"  one device, batch {samples}: {units.seconds(step_s)} a step, {each} a sample")
    for name, link in cluster.links.items():
        ends = [link.points[0], link.points[-1]] if link.points else []
        shown = ", ".join(f"{units.size(number)} in {units.seconds(value_s)}" for number, value_s in ends)
        lines.append(f"  link {name}: {shown or units.size(link.bandwidth_bytes_per_s) + '/s'}")
    for kind, measured in profile.parts.items():
        layers = {each.layer for each in measured}
        lines.append(f"  {kind}: {len(measured)} parts of {len(layers)} layers were measured at their own shapes")
    if provenance.contended:
        lines.append(
            f"  warning: the machine was busy: {units.percent(provenance.run_delay)} of the time waited for a core, "
            f"a fixed kernel took {units.seconds(provenance.canary_before_s)} before and "
            f"{units.seconds(provenance.canary_after_s)} after; close other programs and profile again"
        )
    return "\n".join(lines)


def _factory_name(model: object) -> str:
    if not inspect.isroutine(model) or inspect.ismethod(model):
        raise UsageError(
            f"a {type(model).__name__} cannot be profiled by itself",
            ["measuring and training happen in other processes, which build the model themselves"],
            ["give the function that makes it, or its name: 'pkg.mod:factory' or 'path/file.py:factory'"],
        )
    name, module = model.__qualname__, model.__module__
    if "." in name or name == "<lambda>":
        raise UsageError(f"{name} is not at the top level of its module", [], ["move the factory to the top level"])
    if module != "__main__":
        return f"{module}:{name}"
    file = inspect.getsourcefile(model)
    if file is None or not Path(file).is_file():
        raise UsageError(f"{name} lives in no file", [], ["move the factory into a module that workers can import"])
    return f"{os.path.relpath(file)}:{name}"
