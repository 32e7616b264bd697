"""The form of a model's requests and outputs; its example, whose answer is compared with one device.

One device is the user's own module, called as its user would call it, with the weights that the ranks begin with: in
the parts that micro-batches are, one after another, where a plan has several.  Nothing is left of it in the ranks: what
it writes to buffers is put back (:meth:`runtime.extras.streams.stream.RequestStream.offer`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halopipe.launch.parallelize import Parallel
from planner.ir.errors import FactoryError, NumericsError, UsageError
from profiler.capture.user_module import evaluating, untouched
from profiler.source.model import LoadedModel, as_captured, fed_example, load_state
from profiler.source.structure import BatchStructure, Nest, leaves
from runtime.numerics.compare import tolerance_of
from runtime.pipeline.microbatches import InputSpecs, filled

_SEEDS = (0, 1)

OutputForm = Callable[[Sequence[Tensor]], Any]


@dataclass(frozen=True, slots=True)
class ServedExample:
    """The model's example as a request, and what one device answers.

    Attributes:
        inputs: its tensors, without targets.
        answers: by micro-batch, the tensors of the module's output.
        form: what the module returns, of tensors as of its output.
        dtype: that the model computes in.
        draws: whether the module answers otherwise when it is asked again.
    """

    inputs: tuple[Tensor, ...]
    answers: tuple[tuple[Tensor, ...], ...]
    form: OutputForm
    dtype: str
    draws: bool

    @classmethod
    def of(
        cls, model: LoadedModel, specs: InputSpecs, planned: tuple[int, ...], fixed: int, dtype: str, *, evaluated: bool
    ) -> ServedExample:
        """What ``model`` answers on its example.

        Args:
            specs: what the plan's ranks take.
            planned: samples of each micro-batch.
            fixed: samples that each of them must have; 0: any number.
            dtype: of the plan; of autocast, where it has one.
            evaluated: whether the module is in evaluation mode.
        """
        model = as_captured(model, specs.specs, specs.captured)
        rows = fixed or min(model.samples, sum(planned))
        tensors = fed_example(model, rows)
        inputs = tensors[: len(model.inputs)]
        shares = [count for count in filled(rows, planned) if count]
        names = tuple(specs.specs)
        outputs = []
        for seed in _SEEDS:
            with torch.no_grad(), untouched(model.module):
                torch.manual_seed(seed)
                outputs.append([_answer(model, part, evaluated) for part in _parts(specs, names, inputs, shares)])
        answers = tuple(tuple(_tensors(output)) for output in outputs[0])
        others = tuple(tuple(_tensors(output)) for output in outputs[1])
        pairs = zip(answers, others, strict=True)
        draws = not all(torch.equal(a, b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))
        return cls(inputs, answers, _form_of(outputs[0][0]), dtype, draws)

    def compare(self, ask: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> str:
        """What is said of the ranks' answer, which ``ask`` gets.

        Raises:
            NumericsError: it is not one device's.
        """
        tensors = ask(self.inputs)
        if self.draws:
            return "the first answer is not compared with one device: the module draws random numbers"
        limits = tolerance_of(self.dtype)
        limit = limits.loss if self.dtype == "float64" else limits.loss_ceiling
        worst = 0.0
        for number, tensor in enumerate(tensors):
            parts = [answer[number] for answer in self.answers]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            error = _error(tensor, whole)
            worst = max(worst, error)
            if not error <= limit:
                raise NumericsError(
                    "the first answer is not what one device answers",
                    [
                        f"tensor {number} of the module's output: relative error {error:.1e}, accepted {limit:.0e}",
                        f"norms: {_norm(tensor):.9g} here, {_norm(whole):.9g} on one device",
                    ],
                    ["report it, with the plan and the model", "--no-check-first-answer, to answer all the same"],
                )
        return f"the first answer is one device's (relative error {worst:.1e}, accepted {limit:.0e})"


def as_trained(run: Parallel, model: LoadedModel) -> LoadedModel:
    """``model`` with the weights and buffers that the ranks have now."""
    load_state(model.owners, run.state_dict(), whole_loss=False)
    return model


def request(structure: BatchStructure, tensors: Mapping[str, Tensor]) -> tuple[Any, Any]:
    """Inputs and targets of tensors by the names that the graph has for them; None in place of targets not given.

    Raises:
        UsageError: a name is not known, or an input is missing.
    """
    names = structure.names
    num_inputs = len(structure.inputs.paths)
    unknown = [name for name in tensors if name not in names]
    missing = [name for name in names[:num_inputs] if name not in tensors]
    if unknown or missing:
        raise UsageError(
            f"the request has {', '.join(tensors) or 'nothing'}",
            [
                *([f"not known: {', '.join(unknown)}"] if unknown else []),
                *([f"missing: {', '.join(missing)}"] if missing else []),
            ],
            [
                f"inputs: {', '.join(names[:num_inputs])}",
                *([f"targets: {', '.join(names[num_inputs:])}"] if names[num_inputs:] else []),
            ],
        )
    inputs = structure.inputs.filled([tensors[name] for name in names[:num_inputs]])
    aims = [tensors[name] for name in names[num_inputs:] if name in tensors]
    if structure.targets is None or not aims or len(aims) < len(names) - num_inputs:
        return inputs, None
    return inputs, structure.targets.filled(aims)


def shape_of(specs: InputSpecs, name: str, rows: int) -> tuple[int, ...]:
    """Of a tensor of a request of ``rows`` samples."""
    return specs.shape(name, specs.specs[name].shape, rows)


def cast(tensor: Tensor, name: str, wanted: torch.dtype) -> Tensor:
    """In the dtype that the model takes, if that keeps what it says: real numbers are rounded, nothing else is lost.

    Raises:
        UsageError: it is of another kind, or a number has no place in ``wanted``.
    """
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise UsageError(f"{name} is no dense tensor with numbers", [str(tensor.layout)], [f"give it as {wanted}"])
    if tensor.dtype == wanted:
        return tensor
    fault = _lost_kind(tensor.dtype, wanted)
    if fault is None:
        kept = tensor.to(wanted)
        fault = _lost_number(tensor, kept)
        if fault is None:
            return kept
    raise UsageError(f"{name} is {tensor.dtype}, the model takes {wanted}", [fault], [f"give it as {wanted}"])


def _lost_kind(dtype: torch.dtype, wanted: torch.dtype) -> str | None:
    """What every tensor of a dtype would lose in another."""
    if torch.bool in (dtype, wanted):
        return "truth values are no numbers"
    if dtype.is_complex and not wanted.is_complex:
        return "its imaginary part would be lost"
    if dtype.is_floating_point and not (wanted.is_floating_point or wanted.is_complex):
        return "what is behind the point would be lost"
    return None


def _lost_number(tensor: Tensor, kept: Tensor) -> str | None:
    """What these numbers lose in the dtype of ``kept``."""
    if not tensor.numel():
        return None
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        overflows = bool((torch.isinf(kept) & torch.isfinite(tensor)).any())
        return "a finite number would become infinite" if overflows else None
    numbers = tensor.detach().cpu().numpy()  # torch has no least and largest of uint64
    least = int(numbers.min())
    most = int(numbers.max())
    if kept.dtype.is_floating_point or kept.dtype.is_complex:
        limit = int(2 / torch.finfo(kept.dtype).eps)
        low = -limit
        high = limit
    else:
        low = torch.iinfo(kept.dtype).min
        high = torch.iinfo(kept.dtype).max
    if low <= least and most <= high:
        return None
    return f"it holds {least} ... {most}, and keeps {low} ... {high}"


def _form_of(output: Any) -> OutputForm:
    """A tensor, or a tuple of them, where ``output`` holds something else than tensors and constants."""
    try:
        return Nest.of(output, "the module's output")[0].filled
    except FactoryError:
        return lambda tensors: tensors[0] if len(tensors) == 1 else tuple(tensors)


def _answer(model: LoadedModel, inputs: Sequence[Tensor], evaluated: bool) -> Any:
    if not evaluated:
        with model.precision():
            return model.call.output(model.module, inputs)
    with evaluating(model.module), model.precision():
        return model.call.output(model.module, inputs)


def _parts(
    specs: InputSpecs, names: Sequence[str], inputs: Sequence[Tensor], shares: Sequence[int]
) -> list[tuple[Tensor, ...]]:
    """The inputs of each micro-batch."""
    parts = []
    start = 0
    for count in shares:
        parts.append(
            tuple(specs.narrow(tensor, name, start, count) for name, tensor in zip(names, inputs, strict=False))
        )
        start += count
    return parts


def _tensors(output: Any) -> list[Tensor]:
    return [each for each in leaves(output) if isinstance(each, Tensor)]


def _error(tensor: Tensor, expected: Tensor) -> float:
    if tensor.shape != expected.shape:
        return float("inf")
    if not expected.is_floating_point():
        return 0.0 if torch.equal(tensor, expected) else float("inf")
    distance = _norm(tensor.double() - expected.double())
    norm = _norm(expected)
    return distance / norm if norm else distance


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))
