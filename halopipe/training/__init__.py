"""One rank's training: opened, looped, evaluated, checkpointed, compared with one device.

Modules:

    check_options        What is asked of a run must fit together, and fit the plan: looked at before any process starts
    checkpoint_folders   Folders of checkpoints as people look after them: what is there and whether it is sound,
                         weights out and in
    checkpointing        The checkpoints of a run: when they are written, and what they hold beside the model's state
    evaluate             The mean loss over evaluation data, the accuracy of models that classify, and metrics of one's
                         own
    first_divergence     Where a plan's values and one device's part: the layer, its stage and ranks, the micro-batch,
                         and the two numbers
    first_step           The first step of a job beside one device's, before its second begins
    isolated_timing      When a run times its stages alone, how often, and what came of it: before its first timed step
                         and after its last
    loop                 The steps of a run on one rank, one after another: what is noted of them, what is due after
                         them, and their end
    metrics              The metrics of a run as it goes, written by rank 0: what it is told of a step is a record,
                         which a writer keeps
    optimizer_spec       Optimisers and schedules as people write them
    rank                 One rank of a job, from its first look at the device to its last step
    rank_device          Where a rank of a plan computes: on a core of its host (``n0/cpu0``), or the GPU that the plan
                         names (``n0/gpu1``)
    reference            What one device computed in a job's first steps, and a rank's own differences from it
    resuming             Where a run goes on: the checkpoint that it begins with, chosen once for all ranks, and whether
                         it is this model's
    save_times           When a run saves a checkpoint: every so many steps, after so much time, at the interval that
                         costs least (Daly), and when it is asked to end
    script_values        Python values that a module and its loss read: a captured graph has them as they were, whatever
                         a script does later
    session              One rank of a running plan, in a script of one's own: steps, evaluations, checkpoints
    shared_capture       One capture of a job's model for all its processes of this host: they are forked from the
                         process that made it
    single_device        The first steps of a job on one device: those of the user's own module, called as the user
                         would call it
    steps                What happens in one step of a rank, from its batch to what follows it
    torch_traces         Steps as ``torch.profiler`` sees them: a Chrome trace a rank, with the plan's actions around
                         what they call
    work                 One rank's work: load and capture the model, meet the others, train, measure, compare with one
                         device
"""
