"""What a launcher tells its workers, and what they answer.

Modules:

    event_log  What a rank has done, step by step, for the case that it is lost
    job        What the launcher tells a worker, and what a worker answers, as JSON in the job's folder
    job_file   A job file: the plan and the options of ``halopipe run``, by the names that the command line has for them
    options    What to run: the one list of options, from which the command line, the calls and the checks of limits
               take theirs
    result     How far a run is, and what came of it
    schema     Lists of options as the command line, the calls and job files take them: flags, limits, text to values
"""
