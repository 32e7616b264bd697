"""The connectionist temporal classification loss (CTC; Graves et al. 2006), as one operator of a loss for each sample.

    user:      F.ctc_loss(log_probs (time, sample, class), targets (sample, length), n (sample), m (sample))
    captured:  losses (sample) = halopipe::ctc_losses(log_probs, targets, n, m, blank, zero_infinity)
               mean of losses / m, or their sum

torch's own operator asks the lengths how much it has to keep for its backward, which a trace of shapes cannot know.
Inside of the operator torch's own is run, on the samples that are there.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from cuda_ops._torch import FakeTensor
from cuda_ops.dense.operators import define_operator

_SAMPLES = 1
_DIMS = {"log_probs": 3, "targets": 2}


class ConnectionistLosses(TorchFunctionMode):
    """Within it CTC losses of tensors without data are the operator above; those with data are torch's own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Asks for padded targets and lengths in tensors, samples first.

        Raises:
            ValueError: they are given otherwise, as they cannot be divided by samples.
        """
        keywords = dict(kwargs or {})
        if func is not functional.ctc_loss:
            return func(*args, **keywords)
        call = _CALL.bind(*args, **keywords)
        call.apply_defaults()
        arguments = call.arguments
        if not isinstance(arguments["log_probs"], FakeTensor):
            return func(*args, **keywords)
        lengths = [arguments[name] for name in ("input_lengths", "target_lengths")]
        if any(arguments[name].dim() != dims for name, dims in _DIMS.items()):
            raise ValueError("ctc_loss is given targets in one vector: give them as (samples, length), padded")
        if not all(isinstance(each, Tensor) and each.dim() == 1 for each in lengths):
            raise ValueError("ctc_loss is given lengths as a list: give them as tensors of integers, one a sample")
        losses = torch.ops.halopipe.ctc_losses(
            arguments["log_probs"], arguments["targets"], *lengths, arguments["blank"], arguments["zero_infinity"]
        )
        if arguments["reduction"] == "none":
            return losses
        if arguments["reduction"] == "sum":
            return losses.sum()
        return (losses / lengths[1].clamp(min=1).to(losses.dtype)).mean()


_CALL = signature(functional.ctc_loss)


def _losses(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    if isinstance(log_probs, FakeTensor):
        return log_probs.new_empty(log_probs.shape[_SAMPLES])
    if not log_probs.shape[_SAMPLES]:  # a rank without samples
        return log_probs.new_zeros(0) + log_probs.sum() * 0
    return torch.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, 0, zero_infinity)


define_operator(
    "ctc_losses(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, "
    "bool zero_infinity) -> Tensor",
    _losses,
    _losses,
)
