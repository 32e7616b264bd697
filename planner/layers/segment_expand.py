"""A row for each site out of a row for each sample: ``(sample, channel)`` -> ``(sites, channel)``.

Inputs y, and ``starts`` and ``lengths`` ``(sample,)``.  A rank's rows may belong to any samples, hence y is read whole.
"""

from __future__ import annotations

from planner.layers._rules import first_output, no_flops, whole_weights
from planner.layers._sites import read_rows

REDUCTION = ""
work = first_output
input_boxes = read_rows
weight_boxes = whole_weights
forward_flops = no_flops
