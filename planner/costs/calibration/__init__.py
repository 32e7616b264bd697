"""Corrections of a profile's costs: fitted to runs of plans, and applied.

    r_i       log(measured / predicted) of a class of costs in run i           :mod:`planner.costs.observe`
    factor    exp(w median r), w = n p^2 / (n p^2 + v): a normal prior of deviation p     ``fit.factor_from``
    machine   sum of passes measured alone / sum of their prices, where noise is less     ``machine.speeds``
    applied   cost x factor of its class on that kind of device or link    ``apply_corrections.corrected``

A run is told apart into classes of costs first; what is left over is the error that plans are widened by.
"""
