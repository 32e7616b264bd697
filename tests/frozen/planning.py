"""Problems whose plans are frozen: of every schedule, layout, memory limit, rule and kind of network and cluster.

What is kept of a plan is its decision, with a digest of its program, its prediction, and how it was found: status,
bound and how much was looked at.  Of a refusal it is the code and the text.  The clock stands almost still, so that no
machine is too slow; with the integer program it goes on, or one that finds the same plan again would not end.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.chains import chain_profile
from planner.ir.cluster import GRADIENT_SUMS, MEMORY, NORMALISATION, Collective
from planner.ir.codec import dumps, load
from planner.ir.constraints import parse_rule
from planner.ir.errors import HalopipeError
from planner.ir.problem import ALWAYS, AUTO, LATENCY, SELECTIVE, WHOLE, Problem
from planner.ir.problem import MEMORY as LEAST_MEMORY
from planner.ir.profile import Optimizer, Profile
from planner.schedules import names as schedule_names
from planner.solvers import baselines, solver
from tests.frozen.files import FOLDER
from tests.planner import causal, networks, sparse_networks
from tests.planner.extras.on_chip_memory import boards
from tests.planner.solvers import instances
from tests.planner.solvers.clocks import Ticking, by_clock

Named = tuple[str, Problem]
PROGRAM = "span-ilp"
EVERYTHING = ("sample", "spatial", "channel")


def frozen(name: str) -> Mapping[str, Any]:
    """What the planner says of a problem."""
    problem, method = PROBLEMS[name]
    try:
        with by_clock(Ticking(0.05 if method == PROGRAM else 1e-12)):
            plan = json.loads(dumps(solver(method)(problem, None)))
    except HalopipeError as error:
        return {"code": error.code, "title": error.title, "details": [*error.details], "remedies": [*error.remedies]}
    program = plan["decision"].pop("program")
    plan["decision"]["program"] = hashlib.sha256(json.dumps(program).encode()).hexdigest()[:16]
    return {part: plan[part] for part in ("decision", "prediction", "search")}


def chain(layers: int = 6, devices: int = 3, **more: Any) -> Profile:
    """An uneven chain with skips on devices of two hosts; ``more`` as of :func:`chain_profile`."""
    draw = random.Random(layers)
    given = {
        "forward_s": [draw.uniform(1e-3, 4e-3) for _ in range(layers)],
        "backward_s": [draw.uniform(2e-3, 8e-3) for _ in range(layers)],
        "parameter_bytes": [draw.randrange(1 << 14, 1 << 20, 4) for _ in range(layers)],
        "activation_bytes": [draw.randrange(1 << 10, 1 << 18, 4) for _ in range(layers)],
        "hosts": ["n0"] * ((devices + 1) // 2) + ["n1"] * (devices // 2),
        "skips": [(1, 3)],
        "latency_s": 1e-5,
        "update_s": 1e-4,
        "optimizer": Optimizer("Adam", {"lr": 0.01}, 2.0),
        "sizes": (1, 2, 4, 8),
    }
    return chain_profile(layers, devices, **{**given, **more})


def of_random() -> Iterator[Named]:
    """The small problems that enumeration judges."""
    makers = {
        "random": (instances.random_problem, 14),
        "branching": (instances.branching_problem, 6),
        "tied": (instances.tied_problem, 8),
        "heavy": (instances.heavy_problem, 4),
        "board": (boards.board_problem, 6),
        "attention": (instances.attention_problem, 6),
        "uneven": (instances.uneven_problem, 12),
    }
    for kind, (make, count) in makers.items():
        yield from ((f"{kind}-{seed}", make(seed)) for seed in range(count))


def of_schedules() -> Iterator[Named]:
    """Each schedule by name, on two hosts and on unlike devices."""
    for name in schedule_names():
        yield f"schedule-{name}", Problem(chain(), 4, schedules=(name,), confidence=0.0)
        unlike = {"speeds": (1.0, 0.6), "hosts": ["n0", "n1"]}
        yield f"schedule-{name}-unlike", Problem(chain(5, 2, **unlike), 4, schedules=(name,), confidence=0.0)


def of_memory() -> Iterator[Named]:
    """Limits, recomputation, division of the optimiser's state."""
    heavy = chain(activation_bytes=1 << 19, saved_bytes=1 << 20)
    for mib, recompute in itertools.product((22, 28, 1000), ("never", AUTO, SELECTIVE, ALWAYS)):
        name = f"memory-{mib}MiB-recompute-{recompute}"
        yield (
            name,
            Problem(heavy, 8, memory_bytes=mib << 20, recompute=recompute, confidence=0.0),
        )
    for zero, shard in itertools.product((1, 2, 3), (AUTO, ALWAYS)):
        name = f"zero-{zero}-{shard}"
        yield name, Problem(chain(4), 6, memory_bytes=6 << 20, shard=shard, zero=zero, confidence=0.0)
    for schedule in ("1f1b", "zb-h1"):
        name = f"zero-3-recompute-{schedule}"
        yield (
            name,
            Problem(
                chain(4), 6, schedules=(schedule,), max_stages=1, shard=ALWAYS, zero=3, recompute=ALWAYS, confidence=0.0
            ),
        )
    yield "memory-objective", Problem(chain(4, 2), 4, objective=LEAST_MEMORY, confidence=0.0)
    yield "memory-objective-recompute", Problem(chain(4, 2), 4, objective=LEAST_MEMORY, recompute=AUTO, confidence=0.0)


def of_rules() -> Iterator[Named]:
    """Side constraints, and what else may be asked."""
    for number, text in enumerate(
        (
            "l0=stage:0",
            "l5=stage:1",
            "l*=replicas:3",
            "l1=device:n1/cpu2",
            "l[23]=sample:1",
            "l0=recompute:yes",
            "l*=device:n0/*",
        )
    ):
        yield f"fix-{number}", Problem(chain(), 6, fix=(parse_rule(text),), recompute=AUTO, confidence=0.0)
        yield f"forbid-{number}", Problem(chain(), 6, forbid=(parse_rule(text),), recompute=AUTO, confidence=0.0)
    asked: Mapping[str, Mapping[str, Any]] = {
        "one-rank": {"num_ranks": 1},
        "two-stages": {"max_stages": 2},
        "gap": {"gap": 0.2},
        "confidence": {"confidence": 0.8},
        "a-device-gone": {"speeds": {"n0/cpu1": 0.0}},
        "a-device-slow": {"speeds": {"n0/cpu1": 0.5}},
        "micro-batches-of-2": {"micro_batch_sizes": (2,)},
        "whole-statistics": {"batch_statistics": WHOLE},
        "latency": {"objective": LATENCY, "schedules": ("forward",)},
        "stream": {"schedules": ("forward",)},
        "rate": {"schedules": ("forward",), "rate_per_s": 100.0},
        "rate-too-high": {"schedules": ("forward",), "rate_per_s": 1e9},
    }
    for name, fields in asked.items():
        yield f"asked-{name}", Problem(chain(), 8, **{"confidence": 0.0, **fields})


def of_layouts() -> Iterator[Named]:
    """Images, sites and tokens that may be cut."""
    images = {"plain": networks.plain, "residual": networks.residual, "mesh": networks.mesh_like}
    for (name, make), allow in itertools.product(images.items(), (("sample",), ("sample", "spatial"), EVERYTHING)):
        for devices in (2, 4):
            profile = networks.priced(*make(), (1.0,) * devices, latency_s=1e-6)
            yield f"{name}-{devices}-{'-'.join(allow)}", Problem(profile, 4, allow=allow, confidence=0.0)
    unlike = networks.priced(*networks.plain(height=24), (1.0, 0.5), latency_s=1e-6)
    yield "plain-unlike", Problem(unlike, 2, allow=EVERYTHING, confidence=0.0)
    yield "plain-halo-depth", Problem(unlike, 2, allow=EVERYTHING, halo_depth=4, confidence=0.0)
    yield "plain-tight", Problem(unlike, 4, allow=EVERYTHING, memory_bytes=1 << 18, recompute=AUTO, confidence=0.0)
    running = networks.with_running_statistics(networks.priced(*networks.residual(), (1.0, 1.0)))
    yield "residual-statistics", Problem(running, 4, allow=EVERYTHING, batch_statistics=WHOLE, confidence=0.0)
    yield "residual-forward", Problem(running, 4, schedules=("forward",), allow=EVERYTHING, confidence=0.0)
    sparse = {"classifier": sparse_networks.classifier, "segmenter": sparse_networks.segmenter}
    for (name, graph), allow in itertools.product(sparse.items(), (("sample",), ("sample", "spatial"))):
        yield (
            f"sparse-{name}-{'-'.join(allow)}",
            Problem(sparse_networks.sparse_profile(graph()), 4, allow=allow, confidence=0.0),
        )
    yield (
        "sparse-unlike",
        Problem(sparse_networks.sparse_profile(sparse["classifier"](), (1.0, 0.6)), 4, confidence=0.0),
    )
    yield "tokens", Problem(causal.profile(), 2, allow=("sample", "time"), confidence=0.0)
    yield (
        "tokens-by-hand",
        Problem(causal.profile(), 2, allow=("sample", "time"), token_slices=(8, 4, 4), confidence=0.0),
    )
    yield "tokens-not-behind", Problem(causal.profile(behind=False), 2, allow=("sample", "time"), confidence=0.0)


def of_clusters() -> Iterator[Named]:
    """More devices than one host has, of one kind and of two."""
    for devices, kinds in itertools.product((8, 16), (1, 2)):
        speeds = (1.0,) * (devices // 2) + ((1.0, 0.55)[kinds - 1],) * (devices // 2)
        hosts = [f"n{rank // 4}" for rank in range(devices)]
        cluster = {"speeds": speeds, "hosts": hosts, "skips": [(2, 5)], "sizes": (1, 2, 4, 8, 16)}
        yield f"cluster-{devices}-of-{kinds}", Problem(chain(8, devices, **cluster), 32, gap=0.05, confidence=0.0)


def of_links() -> Iterator[Named]:
    """Collectives that were measured on fewer ranks than a stage has, or not at all; links that are not alike."""
    asked: Mapping[str, Mapping[str, Any]] = {
        "one-host": {"hosts": None},
        "hosts-of-2": {"hosts": ["n0", "n0", "n1", "n1"]},
        "slow": {"hosts": ["n0", "n0", "n1", "n1"], "bandwidth_bytes_per_s": 2e8, "latency_s": 1e-4},
    }
    for (name, fields), measured in itertools.product(asked.items(), ((), (2,), (2, 4))):
        profile = chain(4, 4, **{"update_s": 1e-3, **fields})
        tables = [each for each in profile.cluster.collectives if each.num_ranks in measured]
        tables = [replace(each, points=tuple((n, 0.8 * s + 1e-5) for n, s in each.points)) for each in tables]
        extra = [Collective(kind, 1, "", ((1024, 2e-5), (1 << 20, 4e-4))) for kind in (GRADIENT_SUMS, NORMALISATION)]
        extra += [Collective(MEMORY, count, "", ((1 << 20, 1e-3 * count**0.5),)) for count in (1, 2, 4)]
        cluster = replace(profile.cluster, collectives=(*tables, *(extra if measured else ())))
        of_groups = "-".join(map(str, measured)) or "not"
        yield (
            f"links-{name}-{of_groups}-measured",
            Problem(replace(profile, cluster=cluster), 8, shard=AUTO, zero=2, confidence=0.0),
        )
        links = {tier: replace(link, points=()) for tier, link in cluster.links.items()}
        stated = replace(profile, cluster=replace(cluster, links=links))
        yield f"links-{name}-stated-{of_groups}-measured", Problem(stated, 8, confidence=0.0)


def of_ties() -> Iterator[Named]:
    """A pipeline that is a few percent faster than data parallelism, which exchanges less; the last is no tie."""
    alike = {"parameter_bytes": 1 << 22, "skips": [], "forward_s": 1e-3, "backward_s": 2e-3, "update_s": 0.0}
    for bandwidth in (1e9, 6e8, 2e8):
        profile = chain(6, 2, bandwidth_bytes_per_s=bandwidth, **alike)
        yield f"ties-{bandwidth / 1e6:.0f}", Problem(profile, 8, confidence=0.95)


def of_measurements() -> Iterator[Named]:
    """Sizes between those that were measured, of profiles that tell how measurements vary."""
    draw = random.Random(0)
    even = chain(5, 2)
    varied = {
        kind: tuple(replace(each, forward_s=each.forward_s * draw.uniform(0.8, 1.2)) for each in measured)
        for kind, measured in even.measurements.items()
    }
    uneven = replace(even, measurements=varied)
    yield "measured-varied-between", Problem(uneven, 6, micro_batch_sizes=(3,), confidence=0.8, num_ranks=1)
    for path in (
        *sorted((FOLDER.parent / "checker").glob("*.json")),
        max((FOLDER / "files").iterdir()) / "profile.json",
    ):
        profile = load(path, Profile)
        yield f"measured-{path.stem}-between", Problem(profile, 6, micro_batch_sizes=(3,), confidence=0.8)


def infeasible() -> Iterator[Named]:
    """Problems without a plan, and requests that are none."""
    asked: Mapping[str, Mapping[str, Any]] = {
        "no-memory": {"memory_bytes": 1 << 16},
        "no-memory-recompute": {"memory_bytes": 1 << 16, "recompute": AUTO, "shard": AUTO},
        "too-large-micro-batch": {"micro_batch_sizes": (64,)},
        "rules-that-disagree": {"fix": (parse_rule("l0=stage:1"), parse_rule("l5=stage:0"))},
        "unknown-schedule": {"schedules": ("fastest",)},
        "unknown-layer": {"fix": (parse_rule("conv*=stage:0"),)},
        "unknown-device": {"fix": (parse_rule("l0=device:gpu7"),)},
        "all-gone": {"speeds": dict.fromkeys(("n0/cpu0", "n0/cpu1", "n1/cpu2"), 0.0)},
        "forward-and-backward": {"schedules": ("forward", "1f1b")},
        "time-without-tokens": {"allow": ("sample", "time")},
    }
    for name, fields in asked.items():
        yield f"infeasible-{name}", Problem(chain(), 8, **{"confidence": 0.0, **fields})


def of_methods() -> Iterator[tuple[str, tuple[Problem, str]]]:
    """Baselines and the integer program."""
    for name in (*baselines(), PROGRAM):
        yield f"by-{name}", (Problem(chain(), 8, confidence=0.0), name)
        unlike = {"speeds": (1.0, 0.6), "hosts": ["n0", "n1"]}
        yield f"by-{name}-unlike", (Problem(chain(5, 2, **unlike), 4, confidence=0.0), name)
    yield f"by-{PROGRAM}-gap", (Problem(chain(), 8, gap=0.1, confidence=0.0), PROGRAM)


SEARCHED = (
    *of_random(),
    *of_schedules(),
    *of_memory(),
    *of_rules(),
    *of_layouts(),
    *of_clusters(),
    *of_links(),
    *of_ties(),
    *of_measurements(),
    *infeasible(),
)
PROBLEMS: Mapping[str, tuple[Problem, str]] = {
    **{name: (problem, "best-first") for name, problem in SEARCHED},
    **dict(of_methods()),
}
"""By name: the problem, and who solves it."""
