"""What a person sees: tables, progress, units, suggestions; and how a verb ends.

Modules:

    console        Where words go: results to stdout, progress to stderr; how a verb ends (exit codes)
    output_files   The files that a verb is going to write, looked at before its work starts, and its own until it ends
    tables         Text pictures for terminals and logs: tables, bars and a Gantt chart of one step
    units          Quantities as people write and read them: seconds, bytes, shares, shapes; for a misspelt name the
                   nearest one
"""
