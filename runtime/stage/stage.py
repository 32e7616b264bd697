"""One stage on one rank: forward and backward of micro-batches, in whatever order the program says.

F    the forward keeps autograd's graph; with recompute its inputs only; without a backward in the program nothing.
     Of spans of layers that are computed again it keeps what they read (:mod:`runtime.stage.recomputed`)
B    the backward makes the gradients of inputs and parameters
I    its first half makes those of the inputs, and of the parameters of operators that cannot be halved
W    its second half makes those of the other parameters
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from cuda_ops._torch import run_backward
from cuda_ops.dense.backward_halves import WeightGradients
from cuda_ops.dense.deferred_gradients import CurrentQueue, WeightGradientQueue, accumulate
from runtime.numerics.finite import Examiner
from runtime.stage.cut import StageAttribute, StageFunction
from runtime.stage.functions import StageCall, StageCalls, Variant
from runtime.stage.modes import MicrobatchContext, MicrobatchShard, RunConfig
from runtime.stage.random.streams import CounterRng
from runtime.stage.weight_versions import Weights

Added = Callable[[Tensor], None]
"""Told of a parameter whose ``.grad`` is complete, as far as one micro-batch goes."""


class DeferredWeightGradients(WeightGradientQueue):
    """What I leaves to W of one micro-batch; tells of parameters one by one, so that they can be sent at once.

    Args:
        added: told of each of ``parameters`` in :meth:`run`, once.
    """

    def __init__(self, parameters: Iterable[Tensor], added: Added | None) -> None:
        super().__init__(self._add_and_tell)
        self._parameters = tuple(parameters)
        self._added = added
        self._parts: Counter[Tensor] = Counter()
        self._announced: set[Tensor] = set()

    def note(self, targets: tuple[Tensor | None, Tensor | None], compute: Callable[[], WeightGradients]) -> None:
        super().note(targets, compute)
        for target in targets:
            if target is not None:
                self._parts[target] += 1

    @torch.no_grad()
    def run(self) -> None:
        self._tell(parameter for parameter in self._parameters if not self._parts[parameter])
        super().run()
        self._tell(self._parameters)

    def _add_and_tell(self, parameter: Tensor, gradient: Tensor) -> None:
        accumulate(parameter, gradient)
        self._parts[parameter] -= 1
        if not self._parts[parameter]:
            self._tell([parameter])

    def _tell(self, parameters: Iterable[Tensor]) -> None:
        if self._added is None:
            return
        for parameter in parameters:
            if parameter not in self._announced:
                self._announced.add(parameter)
                self._added(parameter)


class Divided(MicrobatchContext, Protocol):
    """How layers are divided along any dims."""

    def begin(self, microbatch: int) -> None:
        """The backward of a micro-batch, or of a part, is next."""

    def finish(self) -> None:
        """A backward for the input is over."""

    def reset(self) -> None:
        """Forget what is under way."""


class _Recorded(NamedTuple):
    """What a forward with gradients leaves.

    Attributes:
        leaves: differentiable inputs received from other stages.
        roots: where each output enters the autograd graph.  A number, such as the loss, is there itself, which takes
            torch less time; others need not stay alive for it.
    """

    leaves: dict[str, Tensor]
    roots: dict[str, GradientEdge | Tensor]


@dataclass(slots=True)
class _InFlight:
    """A micro-batch between its forward and the end of its backward.

    Attributes:
        weights: what it runs on in place of the parameters, of which ``version``.
        seeds: gradients of the loss, and of what is added up to it, by name.
        deferred: the weight gradients that I leaves to W; None where backward is whole.
        rerun: with recompute, until forward has been run again.
        recorded: otherwise, until the backward for the input.
    """

    weights: tuple[Tensor, ...]
    version: int
    seeds: dict[str, Tensor]
    deferred: DeferredWeightGradients | None = None
    rerun: StageCall | None = None
    recorded: _Recorded | None = None


class StagePasses:
    """Runs a :class:`StageFunction`, several micro-batches at a time.

    Args:
        function: what the stage computes; gradients are added to ``.grad`` of its parameters.
        received: names of those inputs that another stage made; the floating ones among them get a gradient.
        loss: name of the output that is the loss; None on a stage that does not make it.
        terms: outputs that are added up to the loss, each once: their gradient is that of the loss times this number, 0
            on all ranks but one where each has a copy of the whole term.
        current: where operators of ``function`` that can be halved leave their weight gradients; None: there are none.
        variant: the same stage in another mode.
        rng: what layers draw by.
        divided: how layers are divided along any dims; None: ranks share out samples.
        added: told of parameters whose ``.grad`` has been added to by other means than autograd's.
        slices: by name, what has gradients once a backward is over; None: the parameters.
        span_recompute: how spans of layers run once more in the backward.

    Attributes:
        inputs: names of the values that ``forward`` needs.
        sizes: names of the sizes that it needs, beside the number of samples.
        mutated: names of the buffers that layers write.
        losses: by micro-batch.
        weights: the versions of the parameters.
    """

    def __init__(
        self,
        function: StageFunction,
        received: frozenset[str],
        loss: str | None,
        run_config: RunConfig | None = None,
        *,
        terms: Mapping[str, float] = MappingProxyType({}),
        current: CurrentQueue | None = None,
        variant: Variant | None = None,
        rng: CounterRng | None = None,
        divided: Divided | None = None,
        added: Added | None = None,
        slices: Mapping[str, Tensor] | None = None,
        span_recompute: MicrobatchContext | None = None,
    ) -> None:
        run_config = run_config or RunConfig()
        self._function = function
        self._loss = loss
        self._run_config = run_config
        self.inputs = function.inputs
        self.sizes = function.sizes
        self.mutated = function.mutated
        # Inputs to which gradients flow back: (number among the inputs, name).
        self._received_at = tuple((place, name) for place, name in enumerate(function.inputs) if name in received)
        self._graded: Mapping[str, Tensor] = function.parameters if slices is None else slices
        seed_weights = terms if loss is None else {**terms, loss: 1.0}
        self._seeded = {name: seed_weights[name] for name in function.outputs if name in seed_weights}
        self._current = current or CurrentQueue()
        self._rng = rng
        self._divided = divided
        self._added = added
        contexts = [each for each in (rng, divided, span_recompute) if each is not None]
        self._calls = StageCalls(function, run_config.autocast, variant, contexts)
        parameters = function.parameters
        self._state = tuple(function.attributes.values())
        # Places in the state: of parameters that are trained, and of buffers that the function writes.
        self._trained = tuple(index for index, name in enumerate(function.attributes) if name in parameters)
        self._written = frozenset(index for index, name in enumerate(function.attributes) if name in function.mutated)
        self.weights = Weights(tuple(parameters.values()), run_config.version_uses, added)
        self._is_versioned = self.weights.is_versioned
        self._in_flight: dict[int, _InFlight] = {}
        self._seeds: dict[float, Tensor] = {}  # by weight, the gradients of losses, kept from step to step
        self.losses: dict[int, Tensor] = {}

    def examine(self, examiner: Examiner | None) -> None:
        """From now on, have ``examiner`` look at what each operator makes, forward and backward; None: no more."""
        self._calls.examiner = examiner

    @property
    def num_in_flight(self) -> int:
        """Micro-batches on their way."""
        return len(self._in_flight)

    def forward(
        self, microbatch_shard: MicrobatchShard, values: Mapping[str, Tensor], loss_weight: float, version: int = 0
    ) -> dict[str, Tensor]:
        """The outputs but the loss, detached; the loss goes to ``losses[microbatch]``.

        Args:
            microbatch_shard: this rank's rows of a micro-batch; there may be none.
            values: by name, this rank's share of each.
            loss_weight: what the loss counts for in the gradients: this rank's rows over all rows that the next update
                counts.
            version: of the weights.
        """
        microbatch = microbatch_shard.microbatch
        call = self._call(microbatch_shard, values)
        if not self._run_config.trains:
            return self._handed_out(microbatch, self._calls.run_without_gradients(call))
        in_flight = _InFlight(self.weights.leaves(version), version, {})
        if microbatch in self._run_config.split:
            in_flight.deferred = DeferredWeightGradients(in_flight.weights, None if self._is_versioned else self._added)
        if self._is_versioned:
            call = StageCall(microbatch_shard, call.values, self._with(in_flight.weights))
        if self._run_config.recompute:
            in_flight.rerun = StageCall(microbatch_shard, call.values, self._unwritten(call.state))
            outputs = self._calls.run_without_gradients(call)
        else:
            in_flight.recorded, outputs = self._record(call, in_flight.deferred)
        in_flight.seeds = {name: self._seed(outputs[name], loss_weight * part) for name, part in self._seeded.items()}
        self._in_flight[microbatch] = in_flight
        return self._handed_out(microbatch, outputs)

    def backward(self, microbatch: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Adds to the parameters' gradients; returns those of the received inputs, zeros where nothing flows back.

        Args:
            gradients: of the outputs, by name; an output without one takes no part.
        """
        input_gradients = self.backward_input(microbatch, gradients)
        self.backward_weight(microbatch)
        return input_gradients

    def backward_input(self, microbatch: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradients of the received inputs; those of weights are for :meth:`backward_weight` where they can be.

        What that one does not need is let go.
        """
        in_flight = self._in_flight[microbatch]
        if in_flight.rerun is not None:
            in_flight.recorded = self._record(in_flight.rerun, in_flight.deferred)[0]  # the outputs are needed no more
            in_flight.rerun = None
        if in_flight.recorded is None:
            raise KeyError(f"micro-batch {microbatch} has had its backward for the input")
        recorded = in_flight.recorded
        in_flight.recorded = None
        output_gradients = {**gradients, **in_flight.seeds}
        seeds = {name: output_gradients[name] for name in recorded.roots if name in output_gradients}
        if self._divided is not None:
            self._divided.begin(microbatch)
        if seeds:
            run_backward([recorded.roots[name] for name in seeds], list(seeds.values()))
        if self._divided is not None:
            self._divided.finish()
        return {
            name: torch.zeros_like(leaf) if leaf.grad is None else _compact(leaf.grad)
            for name, leaf in recorded.leaves.items()
        }

    def backward_weight(self, microbatch: int) -> None:
        """Adds to the parameters' gradients what :meth:`backward_input` deferred, and forgets the micro-batch."""
        in_flight = self._in_flight.pop(microbatch)
        if in_flight.deferred is not None:
            in_flight.deferred.run()
        if self._is_versioned:
            self.weights.collect(in_flight.weights, in_flight.version)
        if self._calls.examiner is not None:
            self._calls.examiner.backward(microbatch, self._graded)

    def evaluate(self, microbatch_shard: MicrobatchShard, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As :meth:`forward`, in evaluation mode and on the newest weights; nothing is kept, no buffer is written.

        Raises:
            UnsupportedModelError: it is not known what the stage computes in evaluation mode.
        """
        call = self._call(microbatch_shard, values)
        call = StageCall(microbatch_shard, call.values, self._unwritten(call.state))
        return self._handed_out(microbatch_shard.microbatch, self._calls.run_without_gradients(call, training=False))

    def answer(
        self, microbatch_shard: MicrobatchShard, values: Mapping[str, Tensor], *, training: bool, frozen: frozenset[str]
    ) -> dict[str, Tensor]:
        """As :meth:`forward`, without gradients: nothing is kept, but buffers are written, which are state of a stream.

        Args:
            training: whether it is run in the mode that the module was captured in, else in evaluation mode.
            frozen: names of buffers that evaluation mode leaves as they are: running statistics.
        """
        call = self._call(microbatch_shard, values)
        if not training:
            places = (place for place, name in enumerate(self._function.attributes) if name in frozen)
            call = StageCall(microbatch_shard, call.values, _copied(call.state, self._written & frozenset(places)))
        return self._handed_out(microbatch_shard.microbatch, self._calls.run_without_gradients(call, training))

    def before_update(self) -> None:
        """Call before the optimiser changes the parameters."""
        self.weights.before_update()

    def reset(self, step: int = 0) -> None:
        """Forget the micro-batches of the last step; the next ones are of ``step``, counted from 0."""
        if self._rng is not None:
            self._rng.step = step
        if self._divided is not None:
            self._divided.reset()
        self._in_flight.clear()
        self.losses.clear()
        if self._is_versioned:
            self.weights.reset()

    def _seed(self, loss: Tensor, weight: float) -> Tensor:
        seed = self._seeds.get(weight)
        if seed is None or seed.dtype != loss.dtype:
            seed = self._seeds[weight] = torch.full_like(loss, weight, requires_grad=False)
        return seed

    def _call(self, microbatch_shard: MicrobatchShard, values: Mapping[str, Tensor]) -> StageCall:
        return StageCall(microbatch_shard, tuple([values[name] for name in self.inputs]), self._state)

    def _record(self, call: StageCall, deferred: DeferredWeightGradients | None) -> tuple[_Recorded, dict[str, Tensor]]:
        """Runs with gradients."""
        values = list(call.values)
        leaves = {}
        for index, name in self._received_at:
            if _is_differentiable(values[index]):
                values[index] = leaves[name] = values[index].detach().requires_grad_()
        self._current.queue = deferred
        try:
            outputs = self._calls.run(StageCall(call.microbatch_shard, tuple(values), call.state))
        finally:
            self._current.queue = None
        roots = {
            name: get_gradient_edge(output) if output.ndim else output
            for name, output in outputs.items()
            if output.requires_grad
        }
        return _Recorded(leaves, roots), outputs

    def _handed_out(self, microbatch: int, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._loss is not None:
            self.losses[microbatch] = outputs.pop(self._loss).detach()
        return {name: output.detach() for name, output in outputs.items()}

    def _with(self, weights: tuple[Tensor, ...]) -> tuple[StageAttribute, ...]:
        """The attributes, with ``weights`` in place of the parameters."""
        state = list(self._state)
        for place, tensor in zip(self._trained, weights, strict=True):
            state[place] = tensor
        return tuple(state)

    def _unwritten(self, state: tuple[StageAttribute, ...]) -> tuple[StageAttribute, ...]:
        """``state``, but with copies of what the function writes."""
        return _copied(state, self._written)


def _copied(state: tuple[StageAttribute, ...], places: Collection[int]) -> tuple[StageAttribute, ...]:
    """``state``, but with copies of what stands at ``places``."""
    if not places:
        return state
    return tuple(
        each.detach().clone() if place in places and isinstance(each, Tensor) else each
        for place, each in enumerate(state)
    )


def _compact(gradient: Tensor) -> Tensor:
    """The gradient without the rest of a larger one that it is a part of, which would live while it travels."""
    return gradient.clone() if gradient.untyped_storage().nbytes() > 2 * gradient.nbytes - 1 else gradient


def _is_differentiable(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()
