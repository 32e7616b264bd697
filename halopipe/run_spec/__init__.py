"""What a launcher tells its workers, and what they answer.

Modules:

    job        What the launcher tells a worker, and what a worker answers, as JSON in the job's folder
    job_file   A job file: the plan and the options of ``halopipe run``, by the names that the command line has for them
    options    What to run: the one list of options, from which the command line, the calls and the checks of limits
               take theirs
    result     How far a run is, and what came of it
    schema     One schema of options: a field has its type, default, limits, help, and what a shell offers for it
"""
