"""Measures operations beside other libraries: `python -m quackish bench`, and what the programs in benchmarks/ are of.

    operations, cells   what can be measured, and one shape, dtype and direction of it
    models, shapes      sizes of public models, and what the user asks for
    providers_*         who computes an operation: quackish, and every peer at its public entries
    truth_*             data, how far results are from fp64, and whether they repeat
    measured, measure_*, memory, host   one cell: who fails and why, time, memory, errors, in the same turns as the roof
    worker, supervisor  the process that measures; who starts it, and knows whose fault it was when it dies
    runner              a whole run: plan, progress, rows as they come, resuming
    environment, schema, files   the columns of its CSV, and the file
    results, report, panels, plots, figures    what people read of it
    compare             two CSVs
    console             what is seen meanwhile

Packages of the extra `bench` are imported inside functions.
"""
