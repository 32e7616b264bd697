"""Training runs that others published, predicted from tables of kernels: ``python -m benchmarks.published``."""
