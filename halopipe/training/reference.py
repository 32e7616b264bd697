"""What one device computed in a job's first steps, and a rank's own differences from it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from runtime.engine import Engine
from runtime.numerics.compare import (
    Sketch,
    Tolerance,
    loss_differences,
    sketches,
    tensor_differences,
    tolerance_of,
)
from runtime.numerics.difference import Difference


@dataclass(frozen=True, slots=True)
class Reference:
    """What one device computed.

    Attributes:
        dtype: as the job's; under autocast that of its operators.
        losses: of the compared steps.
        gradient, parameter, buffer: after the first update, by name.
        rounding: relative error of each of them against float64, by kind, then by name (``0``, ``1``, ... for the
            losses); empty where the module cannot be run in it.  In float64, against the same with every trained
            number changed by the rounding of as many layers as there are.
        witness: how the batch was run.
        skipped: why there is no reference; empty: there is.
        error: that all ranks are to raise, see :mod:`runtime.monitor.failure`; empty: none.
        lowest: of a job in float64, the lower precision that some of its values are computed in; empty: none is.
    """

    dtype: str = ""
    losses: tuple[float, ...] = ()
    gradient: Mapping[str, Sketch] = field(default_factory=dict)
    parameter: Mapping[str, Sketch] = field(default_factory=dict)
    buffer: Mapping[str, Sketch] = field(default_factory=dict)
    rounding: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    witness: str = ""
    skipped: str = ""
    error: str = ""
    lowest: str = ""

    def to_text(self) -> str:
        """For the store of the job."""
        record: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        for kind in ("gradient", "parameter", "buffer"):
            record[kind] = {name: (each.shape, each.norm, each.buckets) for name, each in record[kind].items()}
        stream = io.BytesIO()
        torch.save(record, stream)
        return stream.getvalue().hex()

    @classmethod
    def from_text(cls, text: str) -> Reference:
        """What :meth:`to_text` made."""
        record = torch.load(io.BytesIO(bytes.fromhex(text)), weights_only=True)
        for kind in ("gradient", "parameter", "buffer"):
            record[kind] = {name: Sketch(tuple(shape), *rest) for name, (shape, *rest) in record[kind].items()}
        return cls(**{**record, "losses": tuple(record["losses"])})


def compare_tensors(reference: Reference, engine: Engine) -> tuple[Difference, ...]:
    """This rank's gradients, parameters and buffers after the first update beside one device's."""
    if not reference.gradient:
        return ()
    state = engine.state_dict()
    here = {
        "gradient": engine.gradients(),
        "parameter": {name: tensor for name, tensor in state.items() if name in reference.parameter},
        "buffer": {name: tensor for name, tensor in state.items() if name in reference.buffer},
    }
    return tuple(
        difference
        for kind, tensors in here.items()
        for difference in tensor_differences(
            kind, sketches(tensors), getattr(reference, kind), _tolerance(reference), reference.rounding.get(kind)
        )
    )


def compare_losses(reference: Reference, losses: Sequence[float]) -> tuple[Difference, ...]:
    """The losses of the first steps beside one device's."""
    rounding = reference.rounding.get("loss", {}).values()
    return tuple(loss_differences(losses, reference.losses, _tolerance(reference), rounding))


def _tolerance(reference: Reference) -> Tolerance:
    return tolerance_of(reference.dtype, reference.lowest)
