"""Who owns which sites of a micro-batch of point clouds: blocks, their one order, intervals of it.

Read ``keys`` (blocks), ``work`` (what these cost), ``bisection`` (their order in a sample), ``partition`` (cuts of an
order), ``arrangement`` (who owns what), ``prices`` (what layers cost on sites).  Import from the module that defines a
name: ``from planner.sites.arrangement import arrange``.
"""
