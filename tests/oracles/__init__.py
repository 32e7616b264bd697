"""Second, plain ways to work out what the cost model says: small and slow on purpose, read by tests alone.

``plans.check``          the product's checker, and the plan's figures against the oracles
``evaluation.evaluate``  the step, the times and the peaks of a decision
``memory.peaks_of``      the most that each rank holds

Prices of layers, parts and links are taken as given; what stages, ranks and steps make of them is worked out here, with
none of the cost model's code (``test_oracles.py`` holds that).
"""
