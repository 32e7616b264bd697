"""The verbs, one a file: parse, call one function, write one file.

Nothing of halopipe's other packages is imported at the top of these files, so that ``--help`` is quick and a user's
file that hides one of them is reported before it is imported.

Modules:

    app          The command line: ``profile``, ``plan``, ``run``, and the verbs that read their files
    check        ``halopipe check``: the checker on a plan, and the verifier on its proof
    checkpoint   ``halopipe checkpoint``: what a folder of checkpoints holds, checked; weights out of it for torch, and
                 into it
    compare      ``halopipe compare``: plans beside one another
    completion   What the shell offers for a value that is no file (``halopipe --install-completion``)
    demo         ``halopipe demo``: the whole journey on this machine
    doctor       ``halopipe doctor``: what is missing or odd on this machine
    explain      ``halopipe explain``: why this plan
    merge        ``halopipe merge``: profiles of one model from several hosts, as one
    options      Options that several verbs have, spelled once
    plan         ``halopipe plan``: searches for the best plan
    profile      ``halopipe profile``: measures a model on this machine, or on all hosts of a job of torchrun; ``--on``:
                 models it
    run          ``halopipe run``: executes a plan
    schema       ``halopipe schema``: the JSON Schema of a file format
"""
