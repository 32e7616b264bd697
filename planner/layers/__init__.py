"""Layer kinds: one class a kind, which states the kind's access relation, in a module for each family.

Read ``_kinds`` (the registry) and ``convolution``; then ``sized`` (a layer at a number of samples), ``division`` and
``boundary``, which put relations to use.  A kind has these functions, all pure; boxes are in global coordinates of a
micro-batch:

    work(layer, inputs) -> TensorSpec
        the space a layout divides: the output, or, for a reduction such as the loss, what it reduces over
    input_boxes(layer, inputs, work_box) -> tuple[Box, ...]
        which box of each input is read to do ``work_box``; may reach outside the tensor (padding)
    weight_boxes(layer, parameters, work_box) -> tuple[Box, ...]
        which box of each parameter is used; ranks with equal boxes share its gradient
    forward_flops(layer, inputs) -> int
        multiply-adds counted as two, for the shapes given

and ``REDUCTION``: what boxes do not cover: ``""``, ``"sum"`` (parts are partial sums) or ``"statistics"`` (a
normalisation over the samples of all ranks).  ``HALO`` is true where a layer also reads rows of other ranks that depend
on the data (neighbours of sites): boxes then say what a rank holds, and :func:`has_halo` that it receives more.
``CONVOLUTION`` is true of weighted sums over windows: halos of theirs travel while they compute, their channels may be
contracted by several ranks, and which back end runs them is asked of torch.
"""

from __future__ import annotations

from planner.layers._kinds import Kind, has_halo, is_convolution, kind, kinds
from planner.layers._rules import window
from planner.layers._samples import (
    MAPPED,
    batch_dependent_layers,
    batch_wide_layers,
    check_samples_apart,
    fixes_samples,
    normalises_values_of_samples,
    over_sites,
    prepared_inputs,
    require_micro_batches,
    require_several_values,
    statistics_text,
    takes_statistics,
    throughout_sites,
)

__all__ = [
    "MAPPED",
    "Kind",
    "batch_dependent_layers",
    "batch_wide_layers",
    "check_samples_apart",
    "fixes_samples",
    "has_halo",
    "is_convolution",
    "kind",
    "kinds",
    "normalises_values_of_samples",
    "over_sites",
    "prepared_inputs",
    "require_micro_batches",
    "require_several_values",
    "statistics_text",
    "takes_statistics",
    "throughout_sites",
    "window",
]
