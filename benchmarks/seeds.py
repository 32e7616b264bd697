"""Systems that split a network in one more way: planned, executed, exact; what each gains, predicted and published.

    python -m benchmarks.seeds [--quick] [--json]

No clocks: gains are the simulator's, at costs of the authors' own examples (equal stages, free messages), beside the
closed forms that they publish.  Errors are of gradients and weights after two steps in float64, on ranks that are
threads, against one device.

- *Chimera* (Li and Hoefler, SC 2021): bubbles of D stages and D micro-batches, 1F1B's step over its own.
- *Hanayo* (Liu et al., SC 2023): the same of waves, where a backward lasts twice as long as a forward.
- *PipeDream-2BW* (Narayanan et al., ICML 2021): a step in a long run without a flush, over that with one.
- *DistDL* (Hewett and Grady, arXiv 2006.03108): the largest of |<F x, y> - <x, F* y>| / |x| |y| over random layouts.
"""
