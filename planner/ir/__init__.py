"""The nouns that flow between profiler, planner and runtime: plain frozen dataclasses and a rule.

The rule is :func:`planner.ir.schedule.dependencies` (what must come first); what must move between boxes is said by
:func:`planner.layers.boxes.transfers`.  Import from the module that defines a name: ``from planner.ir.box import
Interval``.

Modules:

    box           Boxes, and a message of what must move between them
    chrome_trace  Timelines as a Chrome trace: a process a source (predicted, measured), a thread a rank
    cluster       Devices, the groups they are in, and the links between them
    codec         Files: strict to read, byte-deterministic to write
    constraints   Side constraints as text, and what they mean: which stages a rule allows
    errors        Everything halopipe can tell a user that went wrong
    extras        What the folders of ``PACKAGE/extras`` add to the core of a package
    files         Files as bytes: what is read ends soon whatever the path is, what is written replaces nothing but
                  regular files
    graph         The network as the planner sees it: layers in topological order, and what flows between them
    layout        How a tensor is divided over the ranks of a stage: cut points per dim
    lazy          What is made when it is first asked for: names of a package, and values by key
    options       How a field of a list of options is asked for: help, limits, how its text is read
    plan          The plan: what is decided, what it is predicted to cost, how it was found, and when it counts as
                  proven
    planner_extra All that extras may add to the planner
    problem       What a solver is asked: a profile, and the request: every option of a plan, with its help and default
    profile       What every layer, device and link costs: the file between ``profile`` and ``plan``
    program       A program: a schedule with every message, reduction and update explicit; which gradients share a
                  bucket
    proof         What a proof of a plan says: its claim, the space it is about, and what shows it (``planner.proof``)
    quantities    Quantities as data sheets write them, and what they may be: not negative, and not beyond any machine
    schedule      Pipeline schedules as data: what each rank does, in order, and the one rule of what must precede what
    scratch       Folders for temporary files that are gone with their process; after one that was killed, with the
                  next that is made
    strict_yaml   YAML as strictly as JSON: no key twice, no tag, no alias inside of what it names
    timeline      When every action ran: predicted by the simulator or measured by the runtime, in one type
    validation    Whether a file of the right types makes sense: one list of faults, each with its path inside the file
"""
