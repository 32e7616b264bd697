"""Layer kinds: one class a kind, which states the kind's access relation, in a module for each family.

Read ``_kinds`` (the registry) and ``convolution``; then ``sized`` (a layer at a number of samples), ``division`` and
``boundary``, which put relations to use.  A kind has these functions, all pure; boxes are in global coordinates of a
micro-batch:

    work(layer, inputs) -> TensorSpec
        the space a layout divides: the output, or, for a reduction such as the loss, what it reduces over
    input_boxes(layer, inputs, work_box) -> Boxes
        which box of each input is read to do ``work_box``; may reach outside the tensor (padding)
    weight_boxes(layer, parameters, work_box) -> Boxes
        which box of each parameter is used; ranks with equal boxes share its gradient
    forward_flops(layer, inputs) -> int
        multiply-adds counted as two, for the shapes given

and ``REDUCTION``: what boxes do not cover: ``""``, ``"sum"`` (parts are partial sums) or ``"statistics"`` (a
normalisation over the samples of all ranks).  ``HALO`` is true where a layer also reads rows of other ranks that depend
on the data (neighbours of sites): boxes then say what a rank holds, and :func:`has_halo` that it receives more.
``CONVOLUTION`` is true of weighted sums over windows: halos of theirs travel while they compute, their channels may be
contracted by several ranks, and which back end runs them is asked of torch.

A class states its ``name``, and where the names of its output's ``dims`` are from; a dim without a name is never cut:

    space       sample, channel, and up to three of space
    input       as those of an input that has as many dims
    sequence    sample, time, feature; an output of more dims has no names
    own         a rule in ``profiler.capture.layers.output_names``

Modules:

    _kinds            The registry of layer kinds: each is a class in a module of its family, named where it is written
    _rules            What layer kinds have in common: how an interval of the work maps to an interval of an input
    _samples          Which layers of a graph mix samples, so that a stage of theirs is not divided by samples; which
                      are over sites
    backward_halo     Which halo the backward of a convolution over cut space moves: that of dx or that of dy
    boundary          What stages hand to each other, derived from the access relations of the layers on both sides
    boxes             Boxes as arrays: what each rank has of a tensor, and what moves
    contraction       Layers whose input channels are shared: who reads, makes, sums and keeps what
    convolution       Convolutions, and pools: a window that moves over space, and so the halo that a part reads of its
                      neighbours
    data_movement     Data that is moved, not computed: reshapes, slices, concatenation, padding; and interpolation
    division          How a stage of several ranks divides its layers: what every rank does, holds, reads and uses of
                      each
    elementwise       What reads each place for itself: elementwise operations, the loss, and operators that nobody
                      described
    fitting           Whether attributes and shapes of a graph's layers are such as their kinds can read: each asked as
                      planners ask it
    normalization     What is normalised or reduced over some dims: normalisations, softmax, sums and means
    products          Products with weights, or of inputs: linear layers, embeddings, attention, recurrent layers
    receptive_field   What an output reads: boxes followed from outputs back to inputs, by the access relations of the
                      layers alone
    recomputed        Spans of layers that are computed again when the backward comes to them, and which of them are
                      attention's core
    shards            What every rank makes, holds, reads and uses of a layer, under each of many ways to divide it
    sized             A layer at a number of samples, and the dims that it may be cut along
    sparse            Layers over the sites of sparse tensors: convolutions, pools, and from sites to samples and back
    stage_rules       What layers ask of the stages that hold them: one table, which searches keep to and the runtime
                      refuses by
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
    joined_text,
    merging_layer,
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
    "joined_text",
    "kind",
    "kinds",
    "merging_layer",
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
