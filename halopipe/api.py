"""The five calls: profile, plan, compare (with baselines), explain, execute.  The command line is made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from halopipe import planning
from halopipe.comparing import Comparison
from planner.ir.plan import Plan
from planner.ir.profile import Profile

if TYPE_CHECKING:
    from halopipe.executing import Execution
    from planner.ir.profile import Optimizer
    from planner.solvers import Progress

__all__ = ["Comparison", "Execution", "baselines", "compare", "execute", "explain", "plan", "profile"]


def profile(
    model: str | Callable[..., Any],
    *,
    input_shape: Sequence[int] = (),
    arguments: Mapping[str, Any] | None = None,
    cluster: int | str = "auto",
    optimizer: str | Optimizer = "SGD",
    sizes: Sequence[int] = (),
    dtype: str = "float32",
    quick: bool = False,
) -> Profile:
    """Measures what every layer, device and link of this machine costs for ``model``.

    Args:
        model: ``pkg.mod:factory``, ``path/file.py:factory``, or the factory itself.  Measuring happens in other
            processes, and so does training, and they build the model themselves: a module object cannot be given.
        input_shape: shape of the example, samples first; empty: the factory's own example.
        arguments: keyword arguments of the factory; anything that JSON can hold.
        cluster: number of workers on this host (a worker is one core), or ``auto`` for two.
        optimizer: an :class:`Optimizer`, or text such as ``SGD:lr=0.1,momentum=0.9``.
        sizes: micro-batch sizes to measure; empty: the divisors of the example's batch.
        quick: fewer repetitions: faster, less exact.

    Raises:
        UsageError: the model cannot be found, built or captured; the text says which.
    """
    from halopipe import measuring

    return measuring.measure(
        measuring.source_of(model, input_shape, arguments or {}, dtype),
        num_workers=measuring.num_workers(cluster),
        optimizer=optimizer,
        sizes=tuple(sizes),
        quick=quick,
        quiet=True,
    )


def plan(
    profile: Profile,
    *,
    global_batch: int = 0,
    micro_batch: Sequence[int] = (),
    schedules: Sequence[str] = (),
    solver: str = planning.DEFAULT_SOLVER,
    num_ranks: int = 0,
    max_stages: int = 0,
    memory_bytes: int = 0,
    gap: float = 0.0,
    time_limit_s: float = 60.0,
    progress: Progress | None = None,
) -> Plan:
    """The fastest plan for a profile; what may be asked is that of :func:`halopipe.planning.make_problem`.

    Raises:
        InfeasibleError: no plan fits; the text names what binds and what would fit.
    """
    problem = planning.make_problem(
        profile,
        global_batch=global_batch,
        micro_batch=micro_batch,
        schedules=schedules,
        num_ranks=num_ranks,
        max_stages=max_stages,
        memory_bytes=memory_bytes,
        gap=gap,
        time_limit_s=time_limit_s,
    )
    return planning.solve(problem, solver, progress)


def explain(plan: Plan, profile: Profile | None = None) -> str:
    """Why this plan, in words and pictures; more of it with the profile that the plan was made from."""
    from halopipe import explaining

    return explaining.explain(plan, profile)


def baselines(profile: Profile, *, global_batch: int = 0) -> tuple[Plan, ...]:
    """The published strategies on the same profile, those that fit: one device, data parallelism, an even split."""
    problem = planning.make_problem(profile, global_batch=global_batch)
    return tuple(planning.solve_baselines(problem).plans.values())


def compare(*plans: Plan, **named: Plan) -> Comparison:
    """Plans beside one another, the first as the reference; those without a name get that of their solver."""
    found: dict[str, Plan] = {}
    for one in plans:
        name, number = one.search.solver, 2
        while name in found:
            name, number = f"{one.search.solver} {number}", number + 1
        found[name] = one
    return Comparison({**found, **named})


def execute(
    plan: Plan,
    model: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = None,
    *,
    example: Any = None,
) -> Execution:
    """Joins the torchrun job as one rank of ``plan``; see :func:`halopipe.executing.execute`."""
    from halopipe import executing

    return executing.execute(plan, model, loss_fn, optimizer, example=example)


def __getattr__(name: str) -> Any:
    if name == "Execution":  # its module loads torch
        from halopipe.executing import Execution

        return Execution
    raise AttributeError(f"module 'halopipe.api' has no attribute {name!r}")
