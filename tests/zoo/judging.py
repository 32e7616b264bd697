"""Each network under a pipeline, a pipeline with a split backward, data parallelism and a spatial plan.

The oracle is the user's own module, called eagerly: a fresh one, which halopipe has never seen.  It knows nothing of
graphs, stages or shares.  Both sides do two steps of SGD with momentum and weight decay in float64, and must then have
equal losses, gradients, parameters and buffers, to 1e-10.  What halopipe does not run, it must have refused before the
first step with an error of its own that says why; an error in a step is a crash, whoever wraps it.  The planner must
have refused it: a plan that its rules admit and ranks then refuse is a defect.  Captured graphs pass through a file.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from planner.check.structure import require_possible
from planner.ir import codec
from planner.ir.cluster import Cluster, DeviceSpec
from planner.ir.errors import HalopipeError, WorkerError
from planner.ir.graph import Graph
from planner.ir.layout import cut_points
from planner.ir.plan import Decision
from planner.ir.profile import ModelSource, Optimizer, Profile, Provenance
from planner.layers.sized import SPACE
from profiler.capture.graph import capture
from profiler.source.model import LoadedModel, as_captured
from profiler.source.parts import cast_module
from profiler.source.source import load_model
from runtime.captured import CapturedModule
from runtime.engine import Engine
from runtime.monitor.failure import blame
from runtime.optim.ties import groups_of
from runtime.rank import RankContext, check_layers
from runtime.stage.modes import MicrobatchShard
from runtime.stage.random.streams import CounterRng
from runtime.transport import Hub, InProcessTransport
from tests.runtime.divided import divided
from tests.runtime.plans import decide
from tests.zoo.drawing import Replayed
from tests.zoo.entries import DATA, PIPELINE, PLANS, SPATIAL, SPLIT, Entry

NUM_STEPS = 2
SEED = 0

EQUAL = "equal"
REFUSED = "refused"
WRONG = "wrong"
CRASHED = "crashed"
ADMITTED = "refused by ranks alone"

Batch = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a network under a plan.

    Attributes:
        plan: one of the plans, or ``capture``.
        outcome: equal, refused, wrong, crashed, or refused by ranks though the planner's rules admit the plan.
        text: the refusal, the differences, or the error.
    """

    plan: str
    outcome: str
    text: str = ""

    def is_as(self, entry: Entry) -> bool:
        """Whether it is what ``entry`` says is right; to be equal always is."""
        return self.outcome == EQUAL or (self.outcome == REFUSED and entry.is_expected(self.plan, self.text))


@dataclass(frozen=True, slots=True)
class Trained:
    """What some steps gave; tensors by the names of the user's module, those of a loss module behind ``loss_fn.``."""

    losses: tuple[float, ...]
    gradients: Mapping[str, Tensor]
    state: Mapping[str, Tensor]


def judge(entry: Entry, plans: Sequence[str] = PLANS) -> list[Verdict]:
    """The network under all plans that it has dims for; one verdict alone if it cannot even be captured.

    A capture that changes the user's module is a verdict of its own, before those of the plans.
    """
    try:
        model = load_model(entry.source, SEED)
        before = {} if _is_lazy(model) else _snapshot(model)
        random_state = torch.get_rng_state()
        captured = capture(model)
        model = as_captured(model, captured.graph.inputs, captured.graph.samples)
        changed = [*_differences("", _snapshot(model), before)]
        if not torch.equal(random_state, torch.get_rng_state()):
            changed.append("the state of torch's generator")
    except Exception as error:  # noqa: BLE001  # every outcome is a verdict
        return [_of_error("capture", error, before_the_first_step=True)]
    first = [Verdict("capture", WRONG, f"the capture changed {'; '.join(changed)}")] if changed else []
    first += _through_a_file(entry, captured.graph)
    possible = [plan for plan in plans if plan != SPATIAL or space_of(captured.graph)]
    return [*first, *(equal_to_one_device(entry, plan, model, captured) for plan in possible)]


def _through_a_file(entry: Entry, graph: Graph) -> Iterator[Verdict]:
    """What reading a profile of the graph makes of it, where that is anything but the graph."""
    device = DeviceSpec("host/cpu0", "cpu", "host", 2**30)
    nothing = Cluster((device,), {}), {device.kind: ()}, {device.kind: {}}, Provenance({})
    try:
        read = codec.loads(codec.dumps(Profile(entry.source, Optimizer(), graph, *nothing)), Profile).graph
    except HalopipeError as error:
        yield Verdict("capture", WRONG, f"its profile is no file: {error}")
    else:
        if read != graph:
            yield Verdict("capture", WRONG, "another graph is read than was written")


def equal_to_one_device(entry: Entry, plan: str, model: LoadedModel, captured: CapturedModule) -> Verdict:
    """Whether some steps of a network, captured once, are under a plan what they are for its user alone."""
    try:
        decision = decision_of(entry, plan, captured)
        require_possible(decision, captured.graph)
    except Exception as error:  # noqa: BLE001
        return _of_error(plan, error, before_the_first_step=True)
    micro_batches = decision.micro_batches
    batches = [batch_of(model, sum(micro_batches), step) for step in range(NUM_STEPS)]
    ranks = Ranks(decision, (model, captured), entry.source)
    try:
        check_layers(decision, captured.graph)
        found = ranks.trained(batches)
    except Exception as error:  # noqa: BLE001
        verdict = _of_error(plan, error, before_the_first_step=not ranks.began)
        return replace(verdict, outcome=ADMITTED) if verdict.outcome == REFUSED else verdict
    together = entry.mixes or entry.draws
    parts = micro_batches if together else (sum(micro_batches),)
    try:
        differences = [*_compared(found, alone(entry, model, captured, batches, parts), entry.tolerance)]
    except AssertionError as error:
        return Verdict(plan, WRONG, str(error))
    return Verdict(plan, WRONG, "; ".join(differences)) if differences else Verdict(plan, EQUAL)


def decision_of(entry: Entry, plan: str, captured: CapturedModule) -> Decision:
    """The decision of one of the plans for a network."""
    graph = captured.graph
    micro_batches = entry.micro_batches_of(plan)
    if not captured.polymorphic:
        micro_batches = (graph.samples,) * (1 if plan == DATA else 2)
    if plan == PIPELINE:
        return decide(graph, [0.5], micro_batches)
    if plan == SPLIT:
        return decide(graph, [0.35], micro_batches, schedule="zb-h1")
    if plan == DATA:
        samples = micro_batches[0]
        return divided(graph, {"sample": cut_points((samples // 2, samples - samples // 2))}, micro_batches)
    return divided(graph, {space_of(graph): cut_points((2, 1))}, micro_batches)


def space_of(graph: Graph) -> str:
    """The dim that the spatial plan cuts; empty if the network has none."""
    dims = {dim for layer in graph.layers for spec in layer.outputs for dim in spec.dims}
    return next((dim for dim in ("height", "width", "depth") if dim in dims and dim in SPACE), "")


class Ranks:
    """All ranks of a plan as threads, each with a copy of the network.

    Attributes:
        began: whether a step was begun.
    """

    def __init__(
        self,
        decision: Decision,
        network: tuple[LoadedModel, CapturedModule],
        source: ModelSource,
        transport: Callable[[Hub, int], InProcessTransport] = InProcessTransport,
    ) -> None:
        self._decision = decision
        self._network = network
        self._source = source
        self._transport = transport
        self._groups = groups_of(decision, network[1].graph)
        self.began = False

    def trained(self, batches: Sequence[Batch]) -> Trained:
        """What the steps give; what ranks share must be the same on each of them."""
        hub = Hub(self._decision.num_ranks, self._groups, rendezvous=True)
        built = threading.Barrier(self._decision.num_ranks)
        found: dict[int, tuple[list[float | None], dict[str, Tensor], dict[str, Tensor]]] = {}
        errors: list[Exception] = []
        copies = [self._copy() for _ in range(self._decision.num_ranks)]

        def run(rank: int) -> None:
            end = self._transport(hub, rank)
            try:
                try:
                    engine = self._engine(*copies[rank], end)
                except Exception:
                    built.abort()
                    raise
                built.wait(30)
                self.began = True
                losses = [engine.step(*batch).loss for batch in batches]
                found[rank] = losses, dict(engine.gradients()), dict(engine.state_dict())
            except threading.BrokenBarrierError:
                pass  # another rank refused
            except Exception as error:  # noqa: BLE001  # raised below, in the test's own thread
                errors.append(error)
            finally:
                end.close()

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(copies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise min(errors, key=lambda error: (blame(error), not isinstance(error, HalopipeError)))
        return together([found[rank] for rank in sorted(found)])

    def _copy(self) -> tuple[LoadedModel, CapturedModule]:
        try:
            return copy.deepcopy(self._network)
        except RuntimeError:  # older hooks leave tensors on modules that cannot be copied; ranks make their own anyway
            model = load_model(self._source, SEED)
            return model, capture(model)

    def _engine(self, model: LoadedModel, captured: CapturedModule, end: InProcessTransport) -> Engine:
        told = {"model": captured, "module": model.module, "transport": end}
        return Engine(RankContext(self._decision, _optimizer, seed=SEED, deadline_s=20.0, **told))


def together(of_ranks: list[tuple[list[float | None], dict[str, Tensor], dict[str, Tensor]]]) -> Trained:
    """Of all ranks one result; what ranks share must be the same on each of them."""
    gradients: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    for _, *more in of_ranks:
        for whole, part in zip((gradients, state), more, strict=True):
            for name, tensor in part.items():
                if not torch.equal(whole.setdefault(name, tensor), tensor):
                    raise AssertionError(f"ranks differ in {name}")
    steps = zip(*(losses for losses, *_ in of_ranks), strict=True)
    found = [{loss for loss in step if loss is not None} for step in steps]
    if any(len(each) != 1 for each in found):
        raise AssertionError(f"ranks differ in the loss: {found}")
    return Trained(tuple(each.pop() for each in found), gradients, state)


def alone(
    entry: Entry, model: LoadedModel, captured: CapturedModule, batches: Sequence[Batch], micro_batches: tuple[int, ...]
) -> Trained:
    """The same steps by a fresh module of the user's, called as the user would call it.

    Args:
        model: says how the tensors of a batch are nested.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        made = entry.factory()
    module = made[0]
    loss_fn = made[2] if len(made) > 2 else _own_loss
    if not module.training:
        module.train()
    modules = {"": module, **({"loss_fn.": loss_fn} if isinstance(loss_fn, nn.Module) else {})}
    for owner in modules.values():
        cast_module(owner, torch.float64)
    parameters = {p + name: each for p, owner in modules.items() for name, each in owner.named_parameters()}
    optimizer = _optimizer([each for each in parameters.values() if each.requires_grad])
    draw = CounterRng(SEED)
    losses = []
    for draw.step, (inputs, targets) in enumerate(batches):
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        first = 0
        rows = sum(micro_batches)
        for microbatch, count in enumerate(micro_batches):
            draw.at(MicrobatchShard(microbatch, count, 0, count))
            cut = rows_between((*inputs, *targets), model.fed_rows, first, count)
            here = cut[: len(inputs)]
            there = cut[len(inputs) :]
            with _draws(entry, captured, draw):
                loss = loss_fn(model.call.output(module, here), model.call.aims(there))
            loss = sum(loss.values() if isinstance(loss, dict) else loss) if isinstance(loss, (dict, tuple)) else loss
            (loss * count / rows).backward()
            total += loss.item() * count / rows
            first += count
        optimizer.step()
        losses.append(total)
    gradients = {name: each.grad for name, each in parameters.items() if each.grad is not None}
    state = {p + name: each for p, owner in modules.items() for name, each in _state(owner).items()}
    return Trained(tuple(losses), gradients, state)


def _own_loss(output: Mapping[str, Tensor], _: object) -> Tensor:
    """Of a module that gives its loss, as its user would take it."""
    return output["loss"]


def _draws(entry: Entry, captured: CapturedModule, draw: CounterRng) -> AbstractContextManager[object]:
    return Replayed(captured, draw) if entry.draws else nullcontext()


def _optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)  # type: ignore[arg-type]


def _state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, also those that are not kept in checkpoints."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def rows_between(tensors: tuple[Tensor, ...], rows: tuple[int, ...], first: int, count: int) -> tuple[Tensor, ...]:
    """Samples ``first`` to ``first + count`` of tensors of which a sample has so many rows; 0: all have the tensor."""
    pairs = zip(tensors, rows, strict=True)
    return tuple(each[first * rows : (first + count) * rows] if rows else each for each, rows in pairs)


def batch_of(model: LoadedModel, rows: int, step: int) -> Batch:
    """The example resized to ``rows``, each step other numbers in another order; what has no samples stays."""
    generator = torch.Generator().manual_seed(step)
    order = torch.randperm(rows, generator=generator) % model.samples

    def pick(tensor: Tensor, rows: int) -> Tensor:
        if not rows:
            return tensor
        picked = tensor.unflatten(0, (-1, rows))[order].flatten(0, 1)
        if not picked.is_floating_point():
            return picked
        return picked + 0.1 * torch.randn(picked.shape, generator=generator, dtype=picked.dtype)

    inputs, targets = model.fed
    picked = tuple(map(pick, (*inputs, *targets), model.fed_rows))
    return picked[: len(inputs)], picked[len(inputs) :]


def _compared(found: Trained, expected: Trained, tolerance: float) -> Iterator[str]:
    for step, (here, there) in enumerate(zip(found.losses, expected.losses, strict=True)):
        if not abs(here - there) <= tolerance * max(1.0, abs(there)):
            yield f"loss of step {step}: {here:.12g}, one device {there:.12g}"
    for name, gradient in expected.gradients.items():
        if name not in found.gradients:
            if gradient.abs().max() > 0:
                yield f"gradient of {name} is missing"
            continue
        yield from _distance(f"gradient of {name}", found.gradients[name], gradient, tolerance)
    for name in found.gradients.keys() - expected.gradients.keys():
        yield f"gradient of {name}: one device has none"
    for name in found.state.keys() & expected.state.keys():
        yield from _distance(name, found.state[name], expected.state[name], tolerance)


def _distance(name: str, here: Tensor, there: Tensor, tolerance: float) -> Iterator[str]:
    if here.shape != there.shape or here.dtype != there.dtype:
        yield f"{name}: {here.dtype} {tuple(here.shape)}, one device {there.dtype} {tuple(there.shape)}"
        return
    if not there.numel():
        return
    wide = torch.complex128 if there.is_complex() else torch.float64
    error = (here.detach().to(wide) - there.detach().to(wide)).abs().max().item()
    scale = max(1.0, there.detach().to(wide).abs().max().item())
    if not error <= tolerance * scale:
        yield f"{name}: differs by {error:.3g} where one device has at most {scale:.3g}"


def _is_lazy(model: LoadedModel) -> bool:
    """Whether it has parameters without shape, which have no values to look at."""
    return any(is_lazy(parameter) for parameter in model.module.parameters())


def _snapshot(model: LoadedModel) -> dict[str, object]:
    """What a capture must leave as it is."""
    found: dict[str, object] = {}
    function = getattr(model.loss_fn, "function", None)
    for prefix, owner in (("", model.module), ("loss_fn.", function)):
        if not isinstance(owner, nn.Module):
            continue
        found |= {f"mode of {prefix}{name}": each.training for name, each in owner.named_modules()}
        found |= {f"{prefix}{name}": each.detach().clone() for name, each in _state(owner).items()}
        found |= {f"requires_grad of {prefix}{name}": each.requires_grad for name, each in owner.named_parameters()}
        found |= {f"gradient of {prefix}{name}": each.grad is None for name, each in owner.named_parameters()}
        found |= {
            f"hooks of {prefix}{name}": tuple(len(getattr(each, kind)) for kind in _HOOKS)
            for name, each in owner.named_modules()
        }
    return found


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _differences(prefix: str, after: Mapping[str, object], before: Mapping[str, object]) -> Iterator[str]:
    for name in sorted({*after, *before}):
        a = after.get(name)
        b = before.get(name)
        same = torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        if not same:
            yield prefix + name


def _of_error(plan: str, error: Exception, *, before_the_first_step: bool) -> Verdict:
    if isinstance(error, AssertionError) and not before_the_first_step:
        return Verdict(plan, WRONG, str(error))
    is_refusal = isinstance(error, HalopipeError) and not isinstance(error, WorkerError)
    if is_refusal and before_the_first_step:
        return Verdict(plan, REFUSED, str(error))
    return Verdict(plan, CRASHED, f"{type(error).__name__}: {error}")
