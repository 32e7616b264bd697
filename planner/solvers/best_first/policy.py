"""How a search divides its work, all in one place: shares of what it may spend, each with what it is for.

What they earn is measured on the problems of ``python -m benchmarks.scale``; an arm that makes no plan shorter there,
or among those that are frozen, has no share.
"""

from __future__ import annotations

FIRST_ANSWERS = 0.25
"""Of what is left once pipelines of like stages are ranked: cuts and bounds of the first of them.  At a limit of 1 s
these are a few of them."""

WRITTEN = 0.25
"""Of the whole, at most, to write down the rows of a first answer: more micro-batches are not looked at first."""

BOUNDS = 0.25
"""Of what is left, for bounds of all pipelines: ends with the bounds that were made until then."""

STRATEGY = 0.15
"""Of what is left, for one everyday strategy: they are there to be compared with, and seldom the best."""

REPLICAS = 0.1
"""Of the whole, to price replicas on several kinds of devices."""

NEAR_AFTER = 0.3
"""Of the whole, after which a search without a proof looks near its best plan."""

NEAR = 0.5
"""Of what is left then, for that: a few stages solved again make the step of 50 layers on 256 devices 5 % shorter, and
those of 50 on 64 and 200 on 1,024, of two kinds and of one, a tenth."""

SEARCH = 0.85
"""Of the whole, for the search; the rest is for what is near the best plan at its end."""

TIES = 0.2
"""Of the whole, at most, to be kept for holding the best plan against others: where drawing their steps takes longer
(1.9 s a plan of 200 layers on 64 devices with 256 micro-batches), the fastest at the mean is taken."""

SEVERAL_STAGES = 0.12
"""Of the work that was done, for pipelines of several stages a device beside the others."""

FASTER_SEVERAL_STAGES = 0.5
"""The same where one of them is faster, and worth a proof: 24 layers on 4 devices are proven after 6 s, at 451 ms for
496; 48 layers, at 792 ms for 892, have a gap of 9 % then."""
