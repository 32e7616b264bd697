"""Jobs of two workers of this host in float64, held against one device as ``halopipe run --check-numerics`` does.

- *Megatron-LM*: a transformer's ways, executed: plans of ``halopipe plan --ways`` of a small Llama (shared keys, gated,
  rotary).
- *DistDL*'s primitives (Hewett and Grady, arXiv 2006.03108): |<F x, y> - <x, F* y>| / |x| |y| on random layouts of four
  ranks that are threads.

Nothing is measured with a clock.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from typer.testing import CliRunner

from benchmarks.report import Row, at_most
from halopipe.cli.app import app

TOLERANCE = 1e-10


def largest_error(
    name: str, model: str, profile: Sequence[str] = (), plan: Sequence[str] = (), run: Sequence[str] = ()
) -> Row:
    """The largest relative error of any gradient, parameter, buffer or loss of a job.

    Args:
        name: of the system; its row says that it was executed.
        model: text of a module with a factory ``model``.
        profile: more options of ``halopipe profile``.
        plan: of ``halopipe plan``.
        run: of ``halopipe run``.
    """
    with folder_of(model) as folder:
        Path(folder, "profile.json").write_text(profiled(model, tuple(profile)), encoding="utf-8")
        halopipe(folder, "plan", "profile.json", "--global-batch", "32", "--micro-batch", "8", *plan)
        told = halopipe(folder, "run", "plan.json", "--steps", "3", "--check-numerics", "--json", *run)
    return error_of(name, told)


@functools.cache
def profiled(model: str, options: tuple[str, ...]) -> str:
    """The profile of a module's factory ``model`` in float64, measured once for all plans that are made of it."""
    with folder_of(model) as folder:
        halopipe(folder, "profile", "model.py:model", "--quick", "--dtype", "float64", *options)
        return Path(folder, "profile.json").read_text(encoding="utf-8")


def error_of(name: str, told: str) -> Row:
    """The same of a job that was run with ``--check-numerics --json``, which ``told`` this."""
    error = max(each["error"] for each in json.loads(told)["numerics"]["worst"].values())
    return at_most(f"{name}, executed: largest error", error, "relative", TOLERANCE)


@contextlib.contextmanager
def folder_of(model: str) -> Iterator[Path]:
    """A folder that has this ``model.py``, for a while."""
    with tempfile.TemporaryDirectory() as name:
        Path(name, "model.py").write_text(model, encoding="utf-8")
        yield Path(name)


def halopipe(folder: Path, *arguments: str) -> str:
    """What the command prints; it runs in this process, so that torch is loaded once, its workers are forks.

    Raises:
        RuntimeError: it failed; the message is its own.
    """
    with contextlib.chdir(folder):
        done = CliRunner().invoke(app, list(arguments))
    if done.exit_code:
        raise RuntimeError(f"halopipe {' '.join(arguments)}:\n{done.stderr}")
    return done.stdout


LLAMA = """
from profiler.models.llama import llama


def model():
    sizes = {"vocabulary": 66, "width": 16, "hidden": 24, "layers": 4, "heads": 4, "kv_heads": 2}
    return llama(input_shape=(8, 16), **sizes)
"""

WAYS = {
    "tensor parallel": "tensor=2,micro_batch=8",
    "sequence and vocabulary parallel": "tensor=2,micro_batch=8,sequence_parallel=1",
    "interleaved 1F1B": "pipeline=2,interleave=2,micro_batch=8",
    "ZeRO-1, full recomputation": "data=2,micro_batch=4,zero=1,recompute=full",
}


def transformer_rows(quick: bool) -> Iterator[Row]:
    """The largest error of each way."""
    for name, ways in WAYS.items():
        if quick and not ways.endswith("parallel=1"):
            continue
        yield largest_error(f"Megatron-LM, {name}", LLAMA, [], ["--ways", ways])


ADJOINT = 1e-13


def primitive_rows(quick: bool) -> Iterator[Row]:
    """One row."""
    yield adjoints(20 if quick else 200)


def adjoints(count: int) -> Row:
    """The worst of random exchanges among four ranks."""
    import torch

    from halopipe.primitives import Partition, Ranks, repartition
    from runtime.transport import Hub, InProcessTransport

    torch.set_num_threads(1)
    rng = random.Random(0)
    worst = 0.0
    for _ in range(count):
        shape = tuple(rng.randint(2, 9) for _ in range(rng.randint(1, 3)))
        source, target = (Partition.of(shape, {dim: _cuts(rng, shape[dim])}) for dim in _dims(rng, shape))
        wanted = target.grown({0: (rng.randint(0, 3), rng.randint(0, 3))}, outside=True)
        hub = Hub(4, ())
        products = [torch.zeros(4)] * 4

        def one(rank: int, hub: Hub = hub, found: list[torch.Tensor] = products) -> None:
            ranks = Ranks.over(InProcessTransport(hub, rank), timeout_s=60.0)
            generator = torch.Generator().manual_seed(rank)
            parts = (source.local_shape(rank), wanted.local_shape(rank))  # noqa: B023  # it ends within the turn
            x, y = (torch.randn(each, generator=generator, dtype=torch.float64) for each in parts)
            x.requires_grad_()
            made = repartition(x, source, wanted, ranks)  # noqa: B023
            (back,) = torch.autograd.grad(made, x, y)
            found[rank] = torch.stack([(made * y).sum(), (x * back).sum(), x.square().sum(), y.square().sum()]).detach()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        there, here, of_x, of_y = torch.stack(products).sum(0).tolist()
        worst = max(worst, abs(there - here) / max(1e-30, of_x * of_y) ** 0.5)
    return at_most(f"DistDL, {count} adjoints: largest error", worst, "relative", ADJOINT)


def _dims(rng: random.Random, shape: tuple[int, ...]) -> tuple[int, int]:
    return rng.randrange(len(shape)), rng.randrange(len(shape))


def _cuts(rng: random.Random, extent: int) -> tuple[int, ...]:
    return (0, *sorted(rng.randint(0, extent) for _ in range(3)), extent)
