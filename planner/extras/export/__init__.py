"""Plans, profiles and timelines in the forms of other tools: tables (pandas), launchers.

Import from the module that defines a name: ``from planner.extras.export.tables import plans``.

Modules:

    launchers          Ways of a transformer's step as what other programs are launched with
    tables             Plans, stages, layers and timelines as pandas frames; column names are the JSON keys, units
                       included
    torch_pipelining   A plan for ``torch.distributed.pipelining``: where the model is split, and what each rank does in
                       which order
"""
