"""Measuring a model: what a person names becomes a source, and the profiler measures it."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cuda_ops.device.host import MPI_JOB
from halopipe.planning.options import ProfileOptions
from halopipe.run_spec.options import GLOO, SHARED, TRANSPORTS
from halopipe.terminal import console, units
from halopipe.terminal.console import Reporter
from halopipe.terminal.units import require_known
from halopipe.training.optimizer_spec import parse_optimizer, require_arguments
from planner.costs.layers.interpolation import layer_cost
from planner.costs.layers.part_shapes import part_shapes
from planner.ir.codec import fingerprint, load
from planner.ir.errors import UsageError
from planner.ir.extras import extras
from planner.ir.planner_extra import PlannerExtra
from planner.ir.problem import DIM_FAMILIES, SAMPLE_DIMS
from planner.ir.profile import ModelSource, Optimizer, Profile

if TYPE_CHECKING:
    from halopipe.launch.job_environment import JobRank
    from profiler.measure.progress import ProfileProgress

_TORCH_S = 120.0  # to load it


def source_of(
    model: str | Path | Callable[..., Any],
    input_shape: Sequence[int] = (),
    arguments: Mapping[str, Any] = MappingProxyType({}),
    dtype: str = "",
    autocast: str = "",
    elementwise: Sequence[str] = (),
    *,
    example: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    varying: Mapping[str, Any] | None = None,
    local_losses: int = 0,
) -> ModelSource:
    """Where workers find the model; a module object is written to a file (:mod:`profiler.source.saved`).

    Args:
        dtype: of parameters and activations; empty: the module's own, of what a factory makes float32.
        example, loss_fn, varying: of a module object, as of :func:`halopipe.api.profile`.
        local_losses: of a factory, blocks that are each trained by a loss of their own; 0: none.

    Raises:
        UsageError: ``model`` is neither text nor a module nor a function that another process could import.
    """
    # where nobody has loaded torch, there is no module
    is_module = "torch" in sys.modules and isinstance(model, sys.modules["torch"].nn.Module)
    if not is_module and any(each is not None for each in (example, loss_fn, varying)):
        raise UsageError(
            "an example, a loss function and what varies are given beside a module object",
            [f"model: {model if isinstance(model, (str, Path)) else _factory_name(model)}"],
            ["have the factory return them: (module, (inputs, targets), loss_fn)"],
        )
    try:
        texts = {key: json.dumps(value, separators=(",", ":")) for key, value in arguments.items()}
    except (TypeError, ValueError) as error:
        raise UsageError(f"an argument of the factory cannot be written as JSON: {error}") from None
    shape = tuple(input_shape)
    rest = (autocast, tuple(elementwise))
    name = str(model) if isinstance(model, (str, Path)) else ""
    if not is_module and not ModelSource(name).is_file:
        name = name or _factory_name(model)
        return ModelSource(name, texts, shape, dtype or "float32", *rest, local_losses=local_losses)
    if local_losses:
        raise UsageError(
            "local losses are asked of a module as it is",
            [f"{local_losses} blocks"],
            ["have a factory return it: path/file.py:factory"],
        )
    if texts:
        raise UsageError(
            f"a module has no arguments: {', '.join(texts)}", ["it is taken as it is"], ["give them to a factory"]
        )
    from profiler.measure.child_process import warm
    from profiler.source.saved import save_module, saved_as

    if not is_module:
        saved = saved_as(name)
        return ModelSource(saved.path, {}, shape, dtype or saved.dtype, *rest, saved.digest)
    warm()
    result = model if example is None else (model, example, loss_fn, varying or {})
    saved = save_module(result, input_shape=shape)
    return ModelSource(saved.path, {}, (), dtype or saved.dtype, *rest, saved.digest)


def local_blocks(asked: str, device: str, num_workers: int) -> int:
    """Blocks that are each trained by a loss of their own; ``stage``: as many as workers are planned for.

    Raises:
        UsageError: it is neither that nor a number.
    """
    if asked == "stage":
        from profiler.measure.devices import chosen

        return chosen(device, num_workers)[1]
    try:
        return units.whole(asked, least=0)
    except ValueError:
        what = f"--local-loss {asked[:60]!r} says no number of blocks"
        raise UsageError(what, [], ["a number, or 'stage'"]) from None


def num_workers(cluster: int | str) -> int:
    """Workers on this host; 0 for ``auto``: two cores, or all GPUs.

    Raises:
        UsageError: it is neither a positive number nor ``auto``.
    """
    if cluster == "auto":
        return 0
    if isinstance(cluster, bool) or not isinstance(cluster, int) or cluster < 1:
        raise UsageError(f"cluster {cluster!r} is not known", [], ["'auto', or a number of workers on this host"])
    return cluster


def measure(
    source: ModelSource,
    asked: ProfileOptions,
    *,
    unfinished: Path | None = None,
    quiet: bool = False,
) -> Profile:
    """The profile of ``source`` on this machine, with progress and remarks on stderr unless ``quiet``.

    Args:
        unfinished: file that keeps what is finished; it stays until the caller has written the profile.

    Raises:
        UsageError: a family of dims is not known, or GPUs are to exchange by something else than NCCL.
        MissingDeviceError: there is no GPU, or there are too few.
    """
    require_known("family of dims", asked.allow, DIM_FAMILIES)
    _require_transport(asked.transport, (SHARED, GLOO))
    optimizer = optimizer_of(asked)
    from profiler.measure.devices import chosen

    _require_arguments(optimizer)
    kind, num_workers = chosen(asked.device, asked.workers)
    cores = len(os.sched_getaffinity(0))
    if kind.type == "cpu" and num_workers > cores and not quiet:
        console.remark(
            f"{num_workers} workers for {units.count(cores, 'core')}: they take turns, also where links are measured"
        )
    if asked.transport and kind.type != "cpu":
        raise UsageError(f"links between GPUs are measured over NCCL, not over {asked.transport}", [], ["--device cpu"])
    shapes = None
    if set(asked.allow) - {SAMPLE_DIMS}:
        shapes = functools.partial(part_shapes, allow=tuple(asked.allow), num_ranks=asked.num_ranks or num_workers)
    from profiler.session import profile

    with _kept(unfinished, quiet), Reporter("profiling", quiet=quiet) as reporter:

        def show(at: ProfileProgress) -> None:
            spread = f", spread {units.percent(at.spread)}" if at.spread else ""
            numbers = f"{at.layer} {units.seconds(at.seconds)}{spread}" if at.seconds else at.layer
            reporter.update(at.done, at.total, numbers, at.eta_s)

        measured = profile(
            source,
            num_workers=num_workers,
            device=kind.type,
            optimizer=optimizer,
            sizes=tuple(asked.sizes) or None,
            quick=asked.quick,
            shapes=shapes,
            read=layer_cost,
            num_processes=asked.num_processes,
            transport=asked.transport,
            measure_machine=asked.measure_machine,
            unfinished=unfinished,
            resume=asked.resume,
            progress=show,
            say=None if quiet else console.remark,
        )
    for extra in extras(PlannerExtra):
        measured = extra.with_device_figures(measured)
    return measured


def _require_arguments(optimizer: Optimizer) -> None:
    """As :func:`require_arguments`; where nobody has loaded torch, in a process that has it and goes on to measure."""
    if "torch" in sys.modules:
        require_arguments(optimizer)
        return
    from profiler.measure.child_process import Child

    with Child("halopipe.training.optimizer_spec:report_arguments", optimizer, core=None) as child:
        child.result(_TORCH_S)


def _require_transport(transport: str, transports: Sequence[str]) -> None:
    require_known("transport to measure links with", [transport] if transport else [], transports)


def measure_in_job(job: JobRank, source: ModelSource, asked: ProfileOptions) -> Profile | None:
    """As :func:`measure`, on all hosts of a job of torchrun, whose ranks are the workers; None but on rank 0.

    Raises:
        UsageError: GPUs are to be measured, or an interrupted profile is to go on.
    """
    if asked.device == "cuda":
        raise UsageError(
            "a job of torchrun measures cores, not GPUs",
            [],
            ["profile on each host: --device cuda", "describe the GPUs of all hosts in a cluster file"],
        )
    if asked.resume:
        raise UsageError("--resume is for a profile of one host", ["torchrun started this one"], ["leave it out"])
    from halopipe.launch.profile_hosts import profile_hosts

    alone = replace(asked, device="cpu", workers=1, transport="", num_ranks=asked.num_ranks or job.num_ranks)

    def here(is_quiet: bool) -> Profile:
        return measure(source, alone, quiet=is_quiet)

    _require_transport(asked.transport, TRANSPORTS[1:] if MPI_JOB in os.environ else (SHARED, GLOO))
    return profile_hosts(job, here, asked.quick, asked.transport)


def optimizer_of(asked: ProfileOptions) -> Optimizer:
    """Whose updates are measured or modelled."""
    return parse_optimizer(asked.optimizer) if isinstance(asked.optimizer, str) else asked.optimizer


def unfinished_file(output: str | Path) -> Path:
    """Where ``halopipe profile`` keeps what it has measured until it has written ``output``."""
    path = Path(output)
    if path.exists() and not path.is_file():  # beside a device is no place for it
        path = Path("profile.json")
    return path.with_name(f".{path.name}.unfinished")


@contextmanager
def _kept(unfinished: Path | None, quiet: bool) -> Iterator[None]:
    """Says, if the profile ends before its end, that what was measured is not lost."""
    try:
        yield
    except BaseException:
        if unfinished is not None and unfinished.exists() and not quiet:
            console.remark(f"what was measured is kept in {unfinished}; the same command with --resume goes on with it")
        raise


def merged(paths: Sequence[Path]) -> Profile:
    """The profiles of several hosts as one (:func:`profiler.merge.gather`).

    Raises:
        StaleFileError: they are of different models.
        UsageError: two are one measurement, which would count as two hosts.
    """
    from profiler.merge import gather

    profiles: dict[str, Profile] = {}
    of: dict[str, str] = {}
    for name in map(str, paths):
        profiles[name] = load(name, Profile)
        other = of.setdefault(fingerprint(profiles[name].bare), name)
        if other != name:
            raise UsageError(
                f"{other} and {name} are the same profile",
                ["each host is measured by itself: one measurement is of one host"],
                [f"leave out {name}, or profile on the other host"],
            )
    return gather(list(profiles.values()), list(profiles))


def no_model(candidate: object) -> UsageError:
    """What is said of something that is given in place of a module."""
    names = "give a module, the function that makes one, or its name: 'pkg.mod:factory' or 'path/file.py:factory'"
    if isinstance(candidate, type):
        return UsageError(
            f"{candidate.__name__} is a class, not a module", [], [f"{candidate.__name__}(...), one of it", names]
        )
    return UsageError(f"a {type(candidate).__name__} is no model", [], [names])


def _factory_name(model: object) -> str:
    if not inspect.isroutine(model) or inspect.ismethod(model):
        raise no_model(model)
    name = model.__qualname__
    module = model.__module__
    if "." in name or name == "<lambda>":
        raise UsageError(f"{name} is not at the top level of its module", [], ["move the factory to the top level"])
    if module != "__main__":
        return f"{module}:{name}"
    file = inspect.getsourcefile(model)
    if file is None or not Path(file).is_file():
        raise UsageError(f"{name} lives in no file", [], ["move the factory into a module that workers can import"])
    return f"{os.path.relpath(file)}:{name}"
